"""Beats in the name of a process: when, how often, for how long."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import pytest

from fluxmesh.clock import ManualClock
from fluxmesh.errors import StorageUnreachable
from fluxmesh.obs.log import get_logger
from fluxmesh.storage.base import Storage
from fluxmesh.storage.values import BeatAnswer, Owned, Registration, Standing, WorkerRef, WorkerView
from fluxmesh.worker.lease_keeper import IDLE_CLOSE_S, LeaseKeeper
from fluxmesh.worker.ledger import Ledger, LedgerReader, make_ledger_file
from fluxmesh.worker.proc import ProcessState
from fluxmesh.worker.stall import LOOK_S, SILENT_BEATS, TURN_LIMIT_S

LIMIT_S = 20.0
BEAT_S = 1.0
WHO = Registration("w", ("default",), (0,), (), 2, 3.0, BEAT_S)


class Recorder:
    """A storage that takes beats and releases, and keeps what it was told."""

    def __init__(self, clock: ManualClock) -> None:
        self.clock = clock
        self.beats: list[float] = []
        self.released: list[Owned] = []
        self.opened = self.closed = 0
        self.reachable = True
        self.standing = Standing.GOOD

    async def open(self, inline: bool) -> Storage:
        self.opened += 1
        return self  # type: ignore[return-value]

    async def beat(self, worker: WorkerRef, owned: Sequence[Owned] | None, view: WorkerView) -> BeatAnswer:
        assert (worker, owned, view) == (WorkerRef("w", 3), None, WorkerView(WHO))
        if not self.reachable:
            raise StorageUnreachable("out of reach")
        self.beats.append(self.clock.mono_s())
        return BeatAnswer(self.standing)

    async def release(self, worker: WorkerRef, jobs: Sequence[Owned]) -> list[bool]:
        assert worker == WorkerRef("w", 3)
        self.released += jobs
        return [True for _ in jobs]

    async def close(self) -> None:
        self.closed += 1


class Scene:
    def __init__(self) -> None:
        self.clock = ManualClock()
        self.storage = Recorder(self.clock)
        self.reader = LedgerReader(make_ledger_file())
        self.ledger = Ledger(self.reader.fd, WHO, concurrency=2, hard_grace_s=0, clock=self.clock)
        self.keeper = LeaseKeeper(
            self.reader,
            open_storage=self.storage.open,
            stall_limit_s=LIMIT_S,
            clock=self.clock,
            log=get_logger("test"),
        )
        self.state = ProcessState.RUNS
        self.clock.advance(100)
        self.began_s = self.clock.mono_s()
        self.ledger.turned()
        self.ledger.registered(3, self.began_s)

    async def go_on(self, seconds: float, *, meanwhile: Callable[[], Any] = lambda: None) -> None:
        for _ in range(round(seconds / LOOK_S)):
            self.clock.advance(LOOK_S)
            meanwhile()
            vitals = self.reader.vitals()
            assert vitals is not None
            self.keeper.look(vitals, self.state, self.clock.mono_s())
            for _ in range(5):
                await asyncio.sleep(0)

    def lives(self) -> None:
        self.ledger.turned()
        self.ledger.beat(self.clock.mono_s())


Play = Callable[[Scene], Awaitable[None]]


@pytest.fixture
def play() -> Iterator[Callable[[Play], None]]:
    scene = Scene()
    yield lambda scenario: asyncio.run(scenario(scene))  # type: ignore[arg-type]
    scene.reader.close()


def test_while_it_beats_itself_storage_is_not_even_opened(play: Callable[[Play], None]) -> None:
    async def scenario(scene: Scene) -> None:
        await scene.go_on(10, meanwhile=scene.lives)
        assert scene.storage.opened == 0

    play(scenario)


def test_a_silent_process_is_kept_a_beat_apart_from_a_third_of_a_beat_too_late_on(
    play: Callable[[Play], None],
) -> None:
    async def scenario(scene: Scene) -> None:
        await scene.go_on(10)
        beats = scene.storage.beats
        assert beats[0] - scene.began_s == pytest.approx(SILENT_BEATS * BEAT_S + LOOK_S / 2, abs=LOOK_S)
        gaps = [after - before for before, after in pairwise(beats)]
        assert all(gap == pytest.approx(BEAT_S, abs=LOOK_S + 0.01) for gap in gaps)
        assert len(beats) >= 7
        assert scene.keeper.kept_since_s == beats[0]
        await scene.go_on(1, meanwhile=scene.lives)
        assert scene.keeper.kept_since_s is None

    play(scenario)


def test_a_lease_is_kept_no_longer_than_the_stall_limit_after_the_last_sign(
    play: Callable[[Play], None],
) -> None:
    async def scenario(scene: Scene) -> None:
        await scene.go_on(3 * LIMIT_S)
        assert LIMIT_S - 2 * BEAT_S <= scene.storage.beats[-1] - scene.began_s <= LIMIT_S + 0.01

    play(scenario)


@pytest.mark.parametrize("state", [ProcessState.STOPPED, ProcessState.TRACED, ProcessState.DEAD])
def test_a_process_that_is_stopped_or_dead_is_not_kept(
    play: Callable[[Play], None], state: ProcessState
) -> None:
    async def scenario(scene: Scene) -> None:
        scene.state = state
        scene.ledger.enter("a" * 36, 1, 1_000.0, 1)
        await scene.go_on(10)
        assert scene.storage.beats == []
        assert scene.storage.released == []

    play(scenario)


def test_a_worker_that_storage_has_given_up_is_not_kept(play: Callable[[Play], None]) -> None:
    async def scenario(scene: Scene) -> None:
        scene.storage.standing = Standing.FENCED
        await scene.go_on(10)
        assert len(scene.storage.beats) == 1

    play(scenario)


def test_a_storage_that_does_not_answer_is_asked_again_soon(play: Callable[[Play], None]) -> None:
    async def scenario(scene: Scene) -> None:
        scene.storage.reachable = False
        await scene.go_on(5)
        assert scene.keeper.kept_since_s is None
        scene.storage.reachable = True
        await scene.go_on(BEAT_S / 4 + LOOK_S)
        assert len(scene.storage.beats) == 1

    play(scenario)


def test_what_waits_behind_a_process_that_says_nothing_is_given_back_once(
    play: Callable[[Play], None],
) -> None:
    async def scenario(scene: Scene) -> None:
        waits = scene.ledger.enter("a" * 36, 1, 1_000.0, 1)
        runs = scene.ledger.enter("b" * 36, 2, 1_000.0, 0)
        await scene.go_on(TURN_LIMIT_S - LOOK_S)
        assert scene.storage.released == []
        await scene.go_on(3)
        assert scene.storage.released == [Owned("a" * 36, 1)]
        assert not scene.ledger.begin(waits)
        assert scene.ledger.begin(runs)

    play(scenario)


def test_the_connection_is_let_go_when_it_is_long_well_again(play: Callable[[Play], None]) -> None:
    async def scenario(scene: Scene) -> None:
        await scene.go_on(3)
        assert (scene.storage.opened, scene.storage.closed) == (1, 0)
        await scene.go_on(IDLE_CLOSE_S + 2, meanwhile=scene.lives)
        assert (scene.storage.opened, scene.storage.closed) == (1, 1)

    play(scenario)
