"""What a worker tells its node and its storage of what it holds, and how seldom."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any, cast

import pytest

from fluxmesh.clock import ManualClock
from fluxmesh.mesh.messages import Flag, NodeRef, Offered
from fluxmesh.mesh.node import MeshNode
from fluxmesh.mesh.roster import Part, Share
from fluxmesh.storage.values import Affinity, AffinityPart, BeatAnswer, ClaimedJob, Standing
from fluxmesh.worker.sharing import AGAIN_S, NUDGE_GAP_S, Sharing
from fluxmesh.worker.slots import Slots
from fluxmesh.worker.stock import Rules, Stock
from fluxmesh.worker.trading import TELL_GAP_S, Trading

PEER = NodeRef("peer", 1)
OFFERED = (Offered(f"{1:036}", 1),)


class Node:
    """What a node would have been told."""

    def __init__(self) -> None:
        self.loads: list[dict[str, Any]] = []
        self.wishes: list[int] = []
        self.answers: list[tuple[object, ...]] = []
        self.running = True
        self.share = Share(0.7)
        self.news = False

    def has_news(self, now_s: float) -> bool:
        return self.news

    def publish(self, **load: Any) -> None:
        self.loads.append(load)

    def seek(self, want: int) -> None:
        self.wishes.append(want)

    def took(self, *answer: object) -> None:
        self.answers.append(answer)

    def affinity(self) -> Share:
        return self.share

    def owns(self, queue: str, task: str, slot: int | None) -> bool | None:
        return None

    def owns_of(self, worker_id: str, queue: str, task: str, slot: int | None) -> bool:
        return False

    def claim_share(self) -> float:
        return 1.0


class Desk:
    def __init__(self) -> None:
        self.clock = ManualClock()
        self.slots = Slots(1, {})
        self.stock = Stock(Rules(concurrency=1), self.clock)
        self.node = Node()
        self.trading = Trading(self.stock, self.slots, self.clock, lambda: Flag.READY)
        self.stock.on_taken = self.trading.on_taken

    def join(self) -> None:
        self.trading.join(cast("MeshNode", self.node), asyncio.get_running_loop())
        self.trading.publish()
        self.node.loads.clear()

    def hold(self, first: int, last: int) -> None:
        self.stock.put(
            [
                ClaimedJob(f"{number:036}", 1, "t", "default", 1, b"", None, 0, 0, 0, 0, 1)
                for number in range(first, last + 1)
            ]
        )
        self.trading.changed()


def played(test: Callable[[Desk], Any]) -> Callable[[], None]:
    async def play() -> None:
        desk = Desk()
        desk.join()
        desk.clock.advance(1)
        async with asyncio.timeout(10):
            await test(desk)

    def run() -> None:
        asyncio.run(play())

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    return run


@played
async def test_a_surplus_is_told_at_once_and_what_changes_nothing_for_others_is_not(desk: Desk) -> None:
    desk.hold(1, 1)
    assert [load["queued"] for load in desk.node.loads] == [1], "it is not idle any more"
    desk.clock.advance(1)
    desk.hold(2, 6)
    assert len(desk.node.loads) == 1
    desk.hold(7, 7)
    [_, load] = desk.node.loads
    assert load == {
        "queued": 7, "running": 0, "stealable": 7, "best_tier": 1, "run_ms": 1_000, "flags": Flag.READY,
    }  # fmt: skip
    desk.hold(8, 9)
    assert len(desk.node.loads) == 2


@played
async def test_to_become_idle_and_to_be_so_no_longer_is_told_at_once(desk: Desk) -> None:
    desk.slots.enter(2)
    desk.trading.changed()
    desk.clock.advance(1)
    desk.slots.leave(2)
    desk.trading.changed()
    assert [load["running"] for load in desk.node.loads] == [1, 0]


@played
async def test_what_trembles_is_told_once_in_five_milliseconds(desk: Desk) -> None:
    for _ in range(50):
        desk.slots.enter(2)
        desk.trading.changed()
        desk.slots.leave(2)
        desk.trading.changed()
    desk.slots.enter(2)
    desk.trading.changed()
    assert [load["running"] for load in desk.node.loads] == [1]
    assert desk.trading._timer is not None
    desk.slots.leave(2)
    desk.clock.advance(TELL_GAP_S)
    while len(desk.node.loads) < 2:  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    assert [load["running"] for load in desk.node.loads] == [1, 0]
    assert desk.trading._timer is None


@played
async def test_jobs_of_a_peer_come_to_the_loop_from_the_thread_of_the_node(desk: Desk) -> None:
    came: asyncio.Future[tuple[object, int]] = asyncio.get_running_loop().create_future()
    desk.trading.receive = lambda peer, jobs: came.set_result(((peer, jobs), threading.get_ident()))
    await asyncio.to_thread(desk.trading.on_take, PEER, OFFERED)
    assert await came == ((PEER, OFFERED), threading.get_ident())
    assert desk.node.answers == []


@played
async def test_without_anybody_to_receive_them_the_answer_is_that_nothing_was_got(desk: Desk) -> None:
    await asyncio.to_thread(desk.trading.on_take, PEER, OFFERED)
    while not desk.node.answers:  # noqa: ASYNC110
        await asyncio.sleep(0)
    assert desk.node.answers == [(PEER, OFFERED, ())]


def test_so_it_is_when_the_loop_is_closed() -> None:
    desk = Desk()

    async def join() -> None:
        desk.join()

    asyncio.run(join())
    desk.trading.on_take(PEER, OFFERED)
    assert desk.node.answers == [(PEER, OFFERED, ())]
    desk.trading.on_taken()


@played
async def test_a_node_that_comes_later_hears_of_the_wish_that_stands(desk: Desk) -> None:
    desk.trading.seek(3)
    desk.stock.want = 3
    assert desk.node.wishes == [3]
    other = desk.node = Node()
    desk.join()
    assert other.wishes == [3]


# -- what storage is told --------------------------------------------------------------------------------
BITS = b"\x80" + bytes(511)
MINE = Share(0.7, (Part(("default",), BITS, ("t",)),))
TOLD = Affinity(0.7, (AffinityPart(("default",), BITS, ("t",)),))


class Beats:
    def __init__(self) -> None:
        self.clock = ManualClock()
        self.nudged = 0
        self.known: tuple[AffinityPart, ...] = ()  # to storage
        self.told = threading.Event()
        self.node = Node()
        self.sharing = Sharing(self.clock, self.nudge)
        self.sharing.join(cast("MeshNode", self.node))
        self.clock.advance(1)

    def nudge(self) -> None:
        self.nudged += 1
        self.told.set()

    def beat(self, standing: Standing = Standing.GOOD) -> Affinity | None:
        affinity = self.sharing.to_tell()
        self.known = affinity.parts if affinity is not None else self.known
        self.sharing.told(affinity, BeatAnswer(standing, has_affinity=bool(self.known)))
        return affinity


def test_a_share_is_told_once_and_again_after_a_while_in_case_it_was_lost() -> None:
    beats = Beats()
    assert beats.beat() is None, "nothing is what storage knows"
    beats.node.share = MINE
    assert beats.beat() == TOLD
    assert beats.beat() is None
    beats.clock.advance(AGAIN_S)
    assert beats.beat() == TOLD
    beats.node.share = Share(0.7)
    assert beats.beat() == Affinity()
    assert beats.beat() is None


def test_a_share_is_told_anew_to_a_storage_that_did_not_know_the_worker() -> None:
    beats = Beats()
    beats.node.share = MINE
    assert beats.beat(Standing.UNKNOWN) == TOLD
    assert beats.beat() == TOLD
    assert beats.beat(Standing.UNKNOWN) is None
    assert beats.beat() == TOLD


def test_a_storage_that_has_lost_it_is_told_again_by_a_beat_at_once() -> None:
    beats = Beats()
    beats.node.share = MINE
    beats.beat()
    beats.beat()
    assert beats.nudged == 0
    beats.known = ()
    assert beats.beat() is None, "nobody knows yet that it was lost"
    assert beats.nudged == 1
    assert beats.beat() == TOLD
    assert beats.beat() is None
    assert beats.nudged == 1


def test_one_that_never_keeps_it_is_told_with_each_beat_and_none_is_out_of_turn_for_that() -> None:
    beats = Beats()
    beats.node.share = MINE
    for _ in range(3):
        affinity = beats.sharing.to_tell()
        assert affinity == TOLD
        beats.sharing.told(affinity, BeatAnswer(Standing.GOOD))
    assert beats.nudged == 0


def test_counters_that_changed_are_told_out_of_turn_but_seldom() -> None:
    beats = Beats()
    beats.sharing.look()
    assert beats.nudged == 0, "there is no news"
    beats.node.news = True
    beats.sharing.look()
    assert beats.nudged == 1
    for _ in range(59):  # twice a second, while no beat is answered
        beats.clock.advance(0.5)
        beats.sharing.look()
    assert beats.nudged == 10
    beats.node.news = False
    beats.clock.advance(60)
    beats.sharing.look()
    assert beats.nudged == 10


def test_without_a_node_there_are_no_news() -> None:
    sharing = Sharing(ManualClock(), lambda: pytest.fail("a beat for nothing"))
    sharing.look()


def test_one_that_drains_or_has_lost_its_node_has_no_share() -> None:
    for end in ("drain", "node"):
        beats = Beats()
        beats.node.share = MINE
        beats.beat()
        if end == "drain":
            beats.sharing.close()
        else:
            beats.node.running = False
        assert beats.beat() == Affinity()


def test_changes_one_after_the_other_bring_two_beats() -> None:
    beats = Beats()
    for _ in range(10):
        beats.sharing.changed()
    assert beats.nudged == 1
    beats.told.clear()
    assert beats.told.wait(10 * NUDGE_GAP_S), "the last change is told as well"
    assert beats.nudged == 2
    beats.clock.advance(NUDGE_GAP_S)
    beats.sharing.changed()
    assert beats.nudged == 3


def test_nothing_is_told_after_the_end() -> None:
    beats = Beats()
    beats.sharing.changed()
    beats.sharing.changed()
    timer = beats.sharing._timer
    assert timer is not None
    beats.sharing.close()
    timer.join(5)
    beats.sharing.changed()
    assert beats.nudged == 1
