"""Work that belongs to a worker: who gets what first, what is left to others, and whom a job wakes."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

import msgspec
import pytest

from fluxmesh.affinity import SLOT_BITMAP_BYTES, slot_of
from fluxmesh.job import Status
from fluxmesh.storage.affinities import OTHERS_MOST, PARTS_MOST
from fluxmesh.storage.values import (
    AFFINITY_WINDOW,
    HELD_TAKEABLE_AFTER_S,
    NOBODYS_AFTER_S,
    STRICT_S,
    Affinity,
    AffinityPart,
    Begun,
    TaskSpec,
)
from fluxmesh.testing.contract.lab import (
    LEASE_S,
    WAIT_S,
    Lab,
    Puppet,
    affinity_of,
    dead,
    ids,
    new_job,
    retention,
    scenario,
)
from fluxmesh.testing.contract.push import SHORT_S, idle_worker, is_woken

MOST: Final = 0.7
ALL_SLOTS: Final = b"\xff" * SLOT_BITMAP_BYTES
KEYS: Final = ("mine", "theirs", "nobodys")


async def put_keys(lab: Lab, *keys: str | None, **fields: object) -> list[str]:
    """Ids of new jobs with these affinity keys; None: without one."""
    jobs = [new_job(**fields if key is None else {"affinity_key": key, **fields}) for key in keys]  # type: ignore[arg-type]
    await lab.enqueue(*jobs)
    return [job.id for job in jobs]


async def worker_with_own(lab: Lab, *keys: str, weight: float = MOST, name: str = "w1") -> Puppet:
    worker = await lab.worker(name)
    await worker.own(*(keys or ("mine",)), weight=weight)
    return worker


def own_first(jobs: Sequence[tuple[str, bool]], weight: float, count: int) -> list[str]:
    """By the book: of the first 1 + 63a that are left the first own one, else the first."""
    left, given = list(jobs), list[str]()
    while left and len(given) < count:
        window = left[: 1 + int(AFFINITY_WINDOW * weight)]
        found = next((job for job in window if job[1]), window[0])
        left.remove(found)
        given.append(found[0])
    return given


class TestOwnFirst:
    def test_the_keys_of_these_scenes_have_slots_of_their_own(self) -> None:
        assert len({slot_of(key) for key in KEYS}) == len(KEYS)

    @scenario
    async def test_its_own_jobs_are_given_first_and_both_kinds_in_the_order_of_arrival(
        self, lab: Lab
    ) -> None:
        made = await put_keys(lab, "theirs", "mine", None, "mine", "theirs")
        worker = await worker_with_own(lab)
        answer = await worker.exchange(slots=3, extra=2)
        given = [made[at] for at in (1, 3, 0, 2, 4)]
        assert (ids(answer.running), ids(answer.held)) == (given[:3], given[3:])

    @pytest.mark.parametrize("weight", [0.0, 0.04, 0.5, MOST, 1.0])
    @scenario
    async def test_every_claim_agrees_with_the_book(self, lab: Lab, weight: float) -> None:
        """Whatever the weight, in one claim or in many."""
        rng = random.Random(f"own first {weight}")
        keys = [rng.choice(["mine", *["theirs"] * 9]) for _ in range(300)]
        made = await put_keys(lab, *keys)
        worker = await worker_with_own(lab, weight=weight)
        given: list[str] = []
        while len(given) < len(made):
            answer = await worker.exchange(slots=rng.choice([1, 1, 2, 7, 40]), extra=rng.choice([0, 0, 3]))
            given += ids((*answer.running, *answer.held))
        jobs = [(job_id, key == "mine") for job_id, key in zip(made, keys, strict=True)]
        assert given == own_first(jobs, weight, len(made))

    @scenario
    async def test_what_stands_beyond_the_window_is_not_looked_for(self, lab: Lab) -> None:
        made = await put_keys(lab, "theirs", "theirs", "theirs", "mine")
        worker = await worker_with_own(lab, weight=0.04)  # a window of three
        assert [(await worker.claim_one()).id for _ in made] == [made[at] for at in (0, 3, 1, 2)]

    @scenario
    async def test_a_higher_tier_comes_before_its_own(self, lab: Lab) -> None:
        (low,) = await put_keys(lab, "mine", priority=2)
        (high,) = await put_keys(lab, "theirs", priority=1)
        assert ids(await (await worker_with_own(lab)).claim(2)) == [high, low]

    @scenario
    async def test_nobody_waits_for_affinity_below_full_weight(self, lab: Lab) -> None:
        made = await put_keys(lab, "theirs", "nobodys")
        await worker_with_own(lab, "theirs", name="w2")
        assert ids(await (await worker_with_own(lab)).claim(2)) == made

    @scenario
    async def test_one_that_has_waited_for_long_counts_as_its_own(self, lab: Lab) -> None:
        old = await put_keys(lab, "theirs")
        delayed = await put_keys(lab, "theirs", delay=NOBODYS_AFTER_S)
        lab.clock.advance(NOBODYS_AFTER_S + 0.01)
        new = await put_keys(lab, "mine")
        worker = await worker_with_own(lab)
        assert ids(await worker.claim(3)) == [*old, *new, *delayed]

    @scenario
    async def test_a_job_without_a_key_belongs_by_its_task(self, lab: Lab) -> None:
        worker = await lab.worker(tasks=("work", "warm"))
        await worker.own("mine", tasks=("warm",), weight=MOST)
        first, warm, keyed = (
            await lab.put("work"),
            await lab.put("warm"),
            await lab.put("warm", affinity_key="theirs"),
        )
        assert ids(await worker.claim(3)) == [warm, first, keyed]

    @scenario
    async def test_in_a_queue_that_no_part_names_arrival_alone_counts(self, lab: Lab) -> None:
        worker = await lab.worker(queues=("a",))
        await worker.own("mine", queues=("b", "c"), weight=MOST)
        made = await put_keys(lab, "theirs", "mine", queue="a")
        assert ids(await worker.claim(2)) == made

    @scenario
    async def test_every_part_that_names_the_queue_counts(self, lab: Lab) -> None:
        worker = await lab.worker(queues=("a", "b"))
        nothing = AffinityPart(("a", "b"), bytes(SLOT_BITMAP_BYTES), ())
        everything = AffinityPart(("b",), ALL_SLOTS, ())
        await worker.beat_listing([], affinity=Affinity(MOST, (nothing, everything)))
        without, keyed = await put_keys(lab, None, "mine", queue="b")
        assert ids(await worker.claim(2)) == [keyed, without]

    @scenario
    async def test_the_queues_of_a_tier_take_turns_all_the_same(self, lab: Lab) -> None:
        worker = await lab.worker(queues=("a", "b"))
        await worker.own("mine", queues=("a", "b"), weight=MOST)
        a = await put_keys(lab, "theirs", "mine", queue="a")
        b = await put_keys(lab, "theirs", "theirs", queue="b")
        given = ids(await worker.claim(4))
        assert sorted(given[:2]) == sorted([a[1], b[0]])
        assert sorted(given[2:]) == sorted([a[0], b[1]])

    @pytest.mark.parametrize("limit", ["concurrent", "key", "rate"])
    @scenario
    async def test_jobs_that_were_passed_by_are_held_against_the_permits_that_are_left(
        self, lab: Lab, limit: str
    ) -> None:
        specs = {"concurrent": {"max_concurrent": 1}, "rate": {"rate_limit": "1/h"}, "key": {}}[limit]
        worker = await lab.worker(tasks=(TaskSpec("work", **specs), "free"))  # type: ignore[arg-type]
        await worker.own("mine", weight=MOST)
        fields = {"concurrency_key": "k"} if limit == "key" else {}
        made = await put_keys(lab, "theirs", "theirs", "mine", "theirs", **fields)
        free = await lab.put("free")
        assert ids(await worker.claim(5)) == [made[2], free]
        assert (await lab.job(made[0])).waiting_for is not None

    @scenario
    async def test_parked_jobs_of_its_tasks_are_among_the_candidates(self, lab: Lab) -> None:
        rare = [await lab.put("rare", affinity_key=key) for key in ("theirs", "mine")]
        assert await (await lab.worker("w0")).claim(1) == []
        (usual,) = await put_keys(lab, "mine")
        worker = await lab.worker(tasks=("work", "rare"))
        await worker.own("mine", weight=MOST)
        assert ids(await worker.claim(3)) == [rare[1], usual, rare[0]]

    @scenario
    async def test_large_payloads_do_not_pile_up_for_the_sake_of_its_own(self, lab: Lab) -> None:
        large = [
            msgspec.structs.replace(
                new_job(affinity_key="theirs"), payload=b"\x92\x91\xda\xff\xff" + b"x" * 65_535 + b"\x80"
            )
            for _ in range(40)
        ]
        await lab.enqueue(*large)
        (mine,) = await put_keys(lab, "mine")
        worker = await worker_with_own(lab, weight=0.99)
        given = [(await worker.claim_one()).id for _ in range(41)]
        assert given[0] == large[0].id
        assert set(given) == {mine, *(job.id for job in large)}
        assert [job_id for job_id in given if job_id != mine] == [job.id for job in large]


class TestTellingOfAffinity:
    """A beat brings it; it stays until the next one that does, or until its worker is gone."""

    async def owns(self, lab: Lab, worker: Puppet) -> bool:
        made = await put_keys(lab, "theirs", "mine")
        given = await worker.claim(2)
        await worker.complete(*given)
        assert sorted(ids(given)) == sorted(made)
        return ids(given) != made

    @scenario
    async def test_a_beat_without_it_leaves_it_and_another_replaces_it(self, lab: Lab) -> None:
        worker = await worker_with_own(lab)
        await worker.beat()
        assert await self.owns(lab, worker)
        await worker.own("nobodys", weight=MOST)
        assert not await self.owns(lab, worker)
        await worker.own("mine", weight=MOST)
        assert await self.owns(lab, worker)
        await worker.own("mine", weight=0.0)
        assert not await self.owns(lab, worker)

    @pytest.mark.parametrize(
        "wrong",
        [
            Affinity(1.01, (AffinityPart(("default",), ALL_SLOTS, ()),)),
            Affinity(-0.5, (AffinityPart(("default",), ALL_SLOTS, ()),)),
            Affinity(float("nan"), (AffinityPart(("default",), ALL_SLOTS, ()),)),
            Affinity(MOST, (AffinityPart(("default",), ALL_SLOTS[1:], ()),)),
            Affinity(MOST, (AffinityPart(("default",), ALL_SLOTS + b"\xff", ()),)),
            Affinity(MOST, (AffinityPart(("default",), ALL_SLOTS, ()),) * (PARTS_MOST + 1)),
            Affinity(MOST, (AffinityPart(("default",), ALL_SLOTS, ("t" * (1 << 20),)),)),
            Affinity(MOST, ()),
        ],
        ids=["weight", "negative", "nan", "short", "long", "parts", "names", "empty"],
    )
    @scenario
    async def test_what_is_out_of_bounds_is_not_kept(self, lab: Lab, wrong: Affinity) -> None:
        worker = await worker_with_own(lab)
        await worker.beat_listing([], affinity=wrong)
        without, keyed = await put_keys(lab, None, "mine")
        assert ids(await worker.claim(2)) == [without, keyed]

    @scenario
    async def test_as_many_parts_as_there_may_be_are_kept(self, lab: Lab) -> None:
        worker = await lab.worker()
        part = AffinityPart(("default",), ALL_SLOTS, ())
        await worker.beat_listing([], affinity=Affinity(MOST, (part,) * PARTS_MOST))
        without, keyed = await put_keys(lab, None, "mine")
        assert ids(await worker.claim(2)) == [keyed, without]

    @scenario
    async def test_a_later_run_of_the_worker_begins_without(self, lab: Lab) -> None:
        await worker_with_own(lab)
        assert not await self.owns(lab, await lab.worker())

    @scenario
    async def test_a_worker_whose_record_was_lost_begins_anew(self, lab: Lab) -> None:
        worker = await worker_with_own(lab)
        lab.backend.forget_worker(worker.ref)
        await worker.beat()
        assert not await self.owns(lab, worker)
        await worker.own("mine", weight=MOST)
        assert await self.owns(lab, worker)

    @scenario
    async def test_nothing_of_it_stays_when_the_worker_is_long_gone(self, lab: Lab) -> None:
        worker = await worker_with_own(lab)
        before = lab.backend.rows()
        await lab.pass_time(100.0)
        await lab.storage.prune(retention(worker_s=60.0), 100)
        rows = lab.backend.rows()
        assert (before["worker"], rows.get("worker", 0), rows.get("affinity", 0)) == (1, 0, 0)
        await worker.beat()
        assert not await self.owns(lab, worker)

    @scenario
    async def test_each_beat_of_the_worker_is_answered_by_whether_it_is_known(self, lab: Lab) -> None:
        worker = await lab.worker()
        assert not (await worker.beat()).has_affinity
        mine, none = affinity_of(("mine",), weight=MOST), affinity_of(("mine",), weight=0.0)
        assert (await worker.beat_listing([], affinity=mine)).has_affinity
        assert (await worker.beat()).has_affinity
        lab.backend.forget_worker(worker.ref)
        await worker.beat_listing(None)  # a supervisor's, by which the row is there again
        assert not (await worker.beat()).has_affinity
        assert (await worker.beat_listing([], affinity=mine)).has_affinity
        lab.backend.forget_worker(worker.ref)
        assert (await worker.beat_listing([], affinity=mine)).has_affinity
        assert not (await worker.beat_listing([], affinity=none)).has_affinity

    @scenario
    async def test_a_beat_of_a_supervisor_tells_nothing(self, lab: Lab) -> None:
        worker = await worker_with_own(lab)
        await worker.beat_listing(None, affinity=Affinity())
        assert await self.owns(lab, worker)


class TestStrictly:
    """At full weight what belongs to another living worker is left to it for a while."""

    async def two(self, lab: Lab) -> tuple[Puppet, Puppet]:
        mine = await worker_with_own(lab, weight=1.0)
        return mine, await worker_with_own(lab, "theirs", weight=1.0, name="w2")

    @scenario
    async def test_it_is_neither_given_nor_parked_and_the_answer_tells_until_when(self, lab: Lab) -> None:
        worker, owner = await self.two(lab)
        theirs, nobodys, mine = await put_keys(lab, "theirs", "nobodys", "mine")
        lab.clock.advance(1)
        answer = await worker.exchange(slots=3)
        assert ids(answer.running) == [mine, nobodys]
        assert answer.next_due_s == pytest.approx(STRICT_S - 1, abs=0.001)
        assert (await lab.job(theirs)).waiting_for is None
        assert ids(await owner.claim(3)) == [theirs]

    @scenario
    async def test_after_a_while_anybody_may_have_it(self, lab: Lab) -> None:
        worker, owner = await self.two(lab)
        made = await put_keys(lab, "theirs")
        await lab.pass_time(STRICT_S - 0.01, owner, worker)
        assert await worker.claim(1) == []
        lab.clock.advance(0.01)
        assert ids(await worker.claim(1)) == made

    @scenario
    async def test_it_outranks_nothing(self, lab: Lab) -> None:
        worker, owner = await self.two(lab)
        await put_keys(lab, "mine")
        held = await worker.hold_one()
        made = await put_keys(lab, "theirs", priority=0)
        assert await worker.begin(held) == [Begun.BEGUN]
        await lab.pass_time(STRICT_S, owner, worker)
        await put_keys(lab, "mine")
        assert ids(await worker.claim(1)) == made

    @pytest.mark.parametrize(
        "why",
        ["draining", "dead", "left", "fenced", "silent", "quiet", "lost", "disowned", "unable", "elsewhere"],
    )
    @scenario
    async def test_it_is_left_to_none_that_could_not_come_for_it(self, lab: Lab, why: str) -> None:
        worker, owner = await self.two(lab)
        tasks = ("work", "rare") if why == "unable" else ("work",)
        if why == "unable":
            worker = await lab.worker("w3", tasks=tasks)
            await worker.own("mine")
        made = await put_keys(lab, "theirs", task=tasks[-1])
        if why in ("draining", "disowned", "elsewhere"):
            await owner.own(
                *(() if why == "disowned" else ("theirs",)),
                status="draining" if why == "draining" else "ready",
                queues=("other",) if why == "elsewhere" else ("default",),
            )
        elif why in ("dead", "left"):
            await lab.storage.declare_dead(owner.ref, "killed" if why == "dead" else "left")
        elif why == "fenced":
            await lab.worker("w2")
        elif why == "silent":
            await lab.pass_time(LEASE_S + 0.1, worker)
        elif why == "quiet":
            await lab.storage.command("w2", "quiet")
        elif why == "lost":
            lab.backend.forget_worker(owner.ref)
        assert ids(await worker.claim(1)) == made

    @scenario
    async def test_it_is_taken_by_neither_way_until_then(self, lab: Lab) -> None:
        worker, owner = await self.two(lab)
        idle = await lab.worker("w3")
        await idle.own("nobodys")
        theirs, mine = await put_keys(lab, "theirs", "mine")
        held = [*await owner.hold(1), *await worker.hold(1)]
        assert ids(held) == [theirs, mine]
        lab.clock.advance(1)
        answer = await idle.take_held(2)
        assert answer.running == ()
        assert answer.next_held_s == pytest.approx(STRICT_S - 1, abs=0.001)
        assert (await idle.exchange(slots=1)).next_held_s == pytest.approx(STRICT_S - 1, abs=0.001)
        assert await idle.transfer(*held) == []
        await lab.pass_time(STRICT_S - 1, worker, owner, idle)
        assert ids(await idle.transfer(held[0])) == [theirs]
        assert ids((await idle.take_held(2)).running) == [mine]

    @scenario
    async def test_the_one_to_whom_it_belongs_takes_it_from_whoever_holds_it(self, lab: Lab) -> None:
        made = await put_keys(lab, "mine", "theirs")
        plain = await lab.worker("w0")
        held = await plain.hold(2)
        worker, owner = await self.two(lab)
        assert ids(await worker.transfer(*held)) == made[:1]
        lab.clock.advance(HELD_TAKEABLE_AFTER_S + 0.01)
        assert ids((await owner.take_held(2)).running) == made[1:]

    @pytest.mark.parametrize("weight", [None, MOST])
    @scenario
    async def test_one_that_is_not_so_strict_gets_it_as_ever(self, lab: Lab, weight: float | None) -> None:
        await self.two(lab)
        made = await put_keys(lab, "theirs", "mine")
        worker = await lab.worker("w3")
        if weight is not None:
            await worker.own("nobodys", weight=weight)
        assert ids(await worker.claim(2)) == made

    @scenario
    async def test_a_look_past_the_jobs_of_others_is_bounded_in_each_tier(self, lab: Lab) -> None:
        worker, owner = await self.two(lab)
        theirs = await lab.put_many(OTHERS_MOST, affinity_key="theirs", priority=1)
        (high,) = await put_keys(lab, "mine", priority=1)
        (low,) = await put_keys(lab, "mine", priority=2)
        assert ids(await worker.claim(2)) == [low]
        assert ids(await owner.claim(1)) == theirs[:1]
        assert ids(await worker.claim(2)) == [high]


class TestWakingTheOwner:
    @scenario
    async def test_the_owner_that_waits_is_woken_before_others(self, lab: Lab) -> None:
        first, owner, last = [await idle_worker(lab, name) for name in ("w1", "w2", "w3")]
        await owner.own("mine", weight=MOST)
        assert await is_woken(owner, lambda: put_keys(lab, "mine"))
        for other in (first, last):
            assert not await other.storage.wait_for_work(other.ref, SHORT_S)

    @scenario
    async def test_each_of_several_goes_to_its_owner_and_the_rest_to_others(self, lab: Lab) -> None:
        workers = [await idle_worker(lab, f"w{n}") for n in range(4)]
        await workers[1].own("one", weight=MOST)
        await workers[3].own("three", tasks=("work",), weight=MOST)
        await put_keys(lab, "three", "one", "nobodys")
        for worker in (workers[1], workers[3], workers[0]):
            assert await worker.storage.wait_for_work(worker.ref, WAIT_S)
        assert not await workers[2].storage.wait_for_work(workers[2].ref, SHORT_S)

    @scenario
    async def test_while_the_owner_is_busy_another_is_woken(self, lab: Lab) -> None:
        await worker_with_own(lab, name="busy")
        idle = await idle_worker(lab)
        await idle.own("nobodys", weight=MOST)
        assert await is_woken(idle, lambda: put_keys(lab, "mine"))

    @scenario
    async def test_a_job_without_a_key_wakes_the_owner_of_its_task(self, lab: Lab) -> None:
        other, owner = await idle_worker(lab, "w1"), await idle_worker(lab, "w2")
        await owner.own(tasks=("work",), weight=MOST)
        assert await is_woken(owner, lab.put)
        assert not await other.storage.wait_for_work(other.ref, SHORT_S)

    @pytest.mark.parametrize("how", ["release", "replay", "promote", "left behind"])
    @scenario
    async def test_whatever_makes_it_ready_wakes_its_owner(self, lab: Lab, how: str) -> None:
        busy = await lab.worker("busy", tasks=("work", "other"))
        made = await put_keys(lab, "mine")
        job = await busy.claim_one()
        if how == "replay":
            await busy.settle(job, dead())
        if how in ("promote", "left behind"):
            await put_keys(lab, *["mine"] * 2, delay=1)
        other, owner = [await idle_worker(lab, name) for name in ("w1", "w2")]
        await other.own("theirs", weight=MOST)
        await owner.own("mine", weight=MOST)
        if how in ("promote", "left behind"):
            lab.clock.advance(1)
        acts: dict[str, Callable[[], Awaitable[object]]] = {
            "release": lambda: busy.release(job),
            "replay": lambda: lab.storage.replay(made),
            "promote": lambda: lab.storage.promote(1),
            "left behind": lambda: busy.claim(1),
        }
        assert await is_woken(owner, acts[how])
        if how in ("release", "replay"):
            assert not await other.storage.wait_for_work(other.ref, SHORT_S)

    @scenario
    async def test_at_full_weight_the_wake_up_is_not_spent_on_those_who_leave_it(self, lab: Lab) -> None:
        owner = await worker_with_own(lab, weight=1.0, name="owner")
        idle = await idle_worker(lab)
        await idle.own("theirs", weight=1.0)
        (mine,) = await put_keys(lab, "mine")
        assert not await idle.storage.wait_for_work(idle.ref, SHORT_S)
        assert await is_woken(idle, lambda: put_keys(lab, "nobodys"))
        assert (await owner.claim_one()).id == mine

    @scenario
    async def test_at_full_weight_one_that_waits_for_long_wakes_anybody(self, lab: Lab) -> None:
        owner = await worker_with_own(lab, weight=1.0, name="owner")
        await put_keys(lab, "mine")
        job = await owner.claim_one()
        await lab.pass_time(STRICT_S, owner)
        idle = await idle_worker(lab)
        await idle.own("theirs", weight=1.0)
        assert await is_woken(idle, lambda: owner.release(job))
        assert ids(await idle.claim(1)) == [job.id]

    @scenario
    async def test_at_full_weight_a_plain_worker_is_woken_if_the_owner_is_busy(self, lab: Lab) -> None:
        await worker_with_own(lab, weight=1.0, name="owner")
        idle = await idle_worker(lab)
        assert await is_woken(idle, lambda: put_keys(lab, "mine"))
        assert await lab.status((await idle.claim_one()).id) is Status.RUNNING
