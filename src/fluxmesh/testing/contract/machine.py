"""Random verbs by random workers, each step compared with a brute-force walk and with a simple model."""

from __future__ import annotations

import itertools
from typing import Any, Final

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from fluxmesh.job import TIERS, Status
from fluxmesh.storage.affinities import own_of
from fluxmesh.storage.values import (
    HELD_TAKEABLE_AFTER_S,
    MAX_HOPS,
    Begun,
    Cancelled,
    Done,
    ExchangeRequest,
    Owned,
    Reap,
    Settle,
    Settled,
    Standing,
)
from fluxmesh.submission import NewJob
from fluxmesh.testing.contract.harness import Backend
from fluxmesh.testing.contract.lab import (
    COMPLETED,
    CRASHED,
    INTERRUPTED,
    LEASE_S,
    affinity_of,
    dead,
    new_job,
    retention,
    retry,
    snooze,
)
from fluxmesh.testing.contract.model import NOTHING_OWN, OWNED
from fluxmesh.testing.contract.stage import AGES, QUEUES, TASKS, Stage

REAPS: Final = {"crash": CRASHED, "retry": retry(5), "dead": dead("plain")}
ENDS: Final = {
    "return": COMPLETED,
    "retry": retry(7),
    "retry at once": retry(0),
    "give up": dead("plain"),
    "interrupt": INTERRUPTED,
    "snooze": snooze(3),
}
JOBS_MOST: Final = 40
KEYS: Final = ("a", "b")

pick = st.integers(0, 1_000)
short = st.sampled_from([0.0, 0.2])
few = st.lists(pick, min_size=1, max_size=4)
some_tiers = st.sampled_from([TIERS, TIERS, (0, 1), (2, 3)])
# Each part of a submission is one of a few; most jobs are plain.
PARTS: Final[tuple[tuple[dict[str, Any], ...], ...]] = (
    ({}, {}, {"delay": 4}, {"expires_in": 9}, {"delay": 2, "expires_in": 5}),
    ({}, {}, {"concurrency_key": "one"}, {"concurrency_key": "two", "concurrency_limit": 2}),
    ({}, {}, {}, {"unique_key": "u1"}, {"unique_key": "u2"}),
    ({}, {}, {}, {"idempotency_key": "i1"}, {"idempotency_key": "i2"}),
    ({}, {}, {"queue": "second"}),
    ({}, {}, {}, {"priority": 0}, {"priority": 3}),
    ({}, *({"affinity_key": key} for key in KEYS)),
    ({"task": "plain"}, {"task": "plain"}, *({"task": task} for task in TASKS)),
    ({}, {"argument": 1}),
)
a_job = st.tuples(*map(st.sampled_from, PARTS)).map(
    lambda parts: {name: value for part in parts for name, value in part.items()}
)
weights = st.sampled_from([0.0, 0.7, 1.0, 1.0])
subset = st.sets(st.sampled_from(QUEUES), min_size=1).map(lambda names: tuple(sorted(names)))


def submitted(job: dict[str, Any]) -> NewJob:
    fields = dict(job)
    return new_job(fields.pop("task"), fields.pop("argument", 0), **fields)


class Machine(Stage, RuleBasedStateMachine):
    """The rules. What a verb does to the stage and what it must answer stands in stage.py."""

    # -- producers -------------------------------------------------------------------------------------
    @initialize(
        jobs=st.lists(a_job, min_size=8, max_size=16),
        queues=subset,
        tiers=some_tiers,
        weight=weights,
    )
    def begin_with_jobs_and_workers(
        self, jobs: list[dict[str, Any]], queues: tuple[str, ...], tiers: tuple[int, ...], weight: float
    ) -> None:
        self.seat_at("w1", QUEUES, TIERS, None, donates=True)
        self.seat_at("w2", queues, tiers, "rare", donates=False)
        for who, key, task in ((0, KEYS[0], "plain"), (1, KEYS[1], "few")):
            self.own(who, weight, QUEUES, {key}, {task})
        self.put([submitted(job) for job in jobs])

    @precondition(lambda self: len(self.model.jobs) < JOBS_MOST)
    @rule(jobs=st.lists(a_job, min_size=1, max_size=5))
    def enqueue(self, jobs: list[dict[str, Any]]) -> None:
        self.put([submitted(job) for job in jobs])

    @precondition(Stage.has_jobs)
    @rule(picks=few)
    def enqueue_again(self, picks: list[int]) -> None:
        self.put([job.new for job in self.any_jobs(picks)])

    # -- workers ---------------------------------------------------------------------------------------
    @rule(
        name=st.sampled_from(["w1", "w2", "w3"]),
        queues=subset,
        tiers=some_tiers,
        unknown=st.sampled_from([None, None, "rare"]),
        donates=st.booleans(),
    )
    def register(
        self,
        name: str,
        queues: tuple[str, ...],
        tiers: tuple[int, ...],
        unknown: str | None,
        *,
        donates: bool,
    ) -> None:
        self.seat_at(name, queues, tiers, unknown, donates=donates)

    @rule(
        who=pick,
        settles=st.lists(st.tuples(pick, st.sampled_from(sorted(ENDS))), max_size=3),
        begins=few,
        slots=st.integers(0, 3),
        extra=st.integers(0, 3),
    )
    def exchange(
        self, who: int, settles: list[tuple[int, str]], begins: list[int], slots: int, extra: int
    ) -> None:
        self.exchanged(who, [(n, ENDS[end]) for n, end in settles], begins, slots, extra)

    @rule(who=pick, slots=st.integers(1, 4), extra=st.integers(0, 2))
    def claim(self, who: int, slots: int, extra: int) -> None:
        self.exchanged(who, [], [], slots, extra)

    @rule(who=pick, extra=st.integers(1, 4))
    def hold(self, who: int, extra: int) -> None:
        self.exchanged(who, [], [], 0, extra)

    @rule(who=pick)
    def begin_all(self, who: int) -> None:
        self.exchanged(who, [], list(range(10)), 0, 0)

    @rule(
        who=pick,
        ends=st.lists(st.sampled_from(sorted(ENDS)), min_size=1, max_size=4),
        slots=st.integers(0, 4),
    )
    def settle_all(self, who: int, ends: list[str], slots: int) -> None:
        self.exchanged(who, [(n, ENDS[ends[n % len(ends)]]) for n in range(10)], [], slots, 0)

    @precondition(lambda self: self.last)
    @rule(n=pick)
    def repeat_a_request(self, n: int) -> None:
        """Its settles were applied, its jobs are given again as far as they are still its own."""
        seat, puppet, request, tokens = self.last[n % len(self.last)]
        mine = {(job.id, job.token) for job in self.model.owned_by(seat.ref, *OWNED)}
        if not mine & tokens:
            return  # nothing of it is left: it may be taken for a new one
        bare = ExchangeRequest(request.worker, request.request_id, (), (), request.slots, request.extra)
        answer = self.run(puppet.send(bare))
        given = {(job.id, job.token) for job in (*answer.running, *answer.held)}
        assert given == (mine & tokens if seat.is_good else set())
        if seat.is_good:
            self.model.promote(self.now_us)

    @rule(verb=st.sampled_from(["release", "transfer", "take_held"]), who=pick, picks=few, seconds=short)
    def move(self, verb: str, who: int, picks: list[int], seconds: float) -> None:
        """Jobs change hands, after a while."""
        self.lab.clock.advance(seconds)
        if verb == "release":
            self.release(who, picks)
        elif verb == "transfer":
            self.transfer(who, picks)
        else:
            self.take_held(who, 1 + len(picks))

    def release(self, who: int, picks: list[int]) -> None:
        seat, puppet = self.seat(who)
        jobs = self.chosen(picks, self.model.owned_by(seat.ref, *OWNED))
        owned = [Owned(job.id, job.token) for job in jobs]
        assert self.run(puppet.storage.release(puppet.ref, owned)) == [True] * len(jobs)
        for job in jobs:
            self.lost(job)
            self.model.give_back(job, self.now_us)

    @precondition(lambda self: self.stale)
    @rule(n=pick, end=st.sampled_from(sorted(ENDS)))
    def use_a_stale_token(self, n: int, end: str) -> None:
        puppet, item = self.stale[n % len(self.stale)]
        job = self.model.jobs.get(item.id)
        assert self.run(puppet.storage.release(puppet.ref, [item])) == [False]
        if job is None or job.token == item.token:
            return
        answer = self.run(puppet.exchange(settle=[Settle(item.id, item.token, ENDS[end])], begin=[item]))
        assert (answer.settled, answer.begun) == ((Settled.STALE,), (Begun.LOST,))
        self.model.stale += 1
        if answer.standing is Standing.GOOD:
            self.model.promote(self.now_us)
            (seat,) = [seat for seat, other in self.puppets if other is puppet]
            self.model.claim(seat, 1, answer.running, answer.held, self.now_us)

    def transfer(self, who: int, picks: list[int]) -> None:
        seat, puppet = self.seat(who)
        held = [job for job in self.model.jobs.values() if job.status is Status.CLAIMED]
        jobs = {job.id: job for job in self.chosen(picks, held) if job.owner != seat.ref}
        moved = self.run(
            puppet.storage.transfer(puppet.ref, [Owned(job.id, job.token) for job in jobs.values()])
        )
        for given in moved:
            job = jobs[given.id]
            assert (job.hops < MAX_HOPS, given.token > job.token, seat.is_good) == (True, True, True)
            assert not self.model.is_left(seat, job, self.now_us)
            assert (given.hops, given.slot) == (job.hops + 1, job.new.slot)
            self.lost(job)
            job.owner, job.token, job.taken_us, job.hops = seat.ref, given.token, self.now_us, job.hops + 1
            puppet.owned[given.id] = given.token

    def take_held(self, who: int, slots: int) -> None:
        seat, puppet = self.seat(who)
        answer = self.run(puppet.take_held(slots))
        donors = {other.ref for other, _ in self.puppets if other.donates and other.ref != seat.ref}
        for given in answer.running:
            job = self.model.jobs[given.id]
            assert job.status is Status.CLAIMED
            assert job.owner in donors
            assert job.hops < MAX_HOPS
            assert self.now_us - job.taken_us > HELD_TAKEABLE_AFTER_S * 1e6
            higher = [other for other in self.model.ready_for(seat, self.now_us) if other.tier < job.tier]
            assert not higher, "a held job was taken below a ready one of a higher tier"
            self.lost(job)
            self.model.own(seat, given, Status.RUNNING, self.now_us).hops += 1

    @rule(who=pick)
    def beat(self, who: int) -> None:
        seat, puppet = self.seat(who)
        mine = self.model.owned_by(seat.ref, *OWNED)
        answer = self.run(puppet.beat_listing([Owned(job.id, job.token) for job in mine]))
        if seat.missing:
            seat.missing, seat.own = False, NOTHING_OWN
        assert answer.lost == ()
        assert (answer.standing is Standing.GOOD) == seat.is_good
        assert set(answer.cancelled) == {job.id for job in mine if job.cancel}
        seat.renewed_us = self.now_us

    @rule(
        who=pick,
        weight=weights,
        queues=subset,
        keys=st.sets(st.sampled_from(KEYS)),
        tasks=st.sets(st.sampled_from(sorted(TASKS))),
    )
    def own(self, who: int, weight: float, queues: tuple[str, ...], keys: set[str], tasks: set[str]) -> None:
        """Jobs of these keys, and of these tasks without one, belong to the worker from now on."""
        self.beat(who)
        seat, puppet = self.seat(who)
        mine = self.model.owned_by(seat.ref, *OWNED)
        affinity = affinity_of(keys, weight=weight, queues=queues, tasks=sorted(tasks))
        self.run(puppet.beat_listing([Owned(job.id, job.token) for job in mine], affinity=affinity))
        if seat.is_good:
            seat.own = own_of(affinity) if weight else NOTHING_OWN

    # -- time and death --------------------------------------------------------------------------------
    @rule(seconds=st.sampled_from([0.05, 0.2, 1.0, 2.0, 2.0, 5.0, 12.0, 45.0]))
    def let_time_pass(self, seconds: float) -> None:
        self.lab.clock.advance(seconds)

    @rule(
        who=pick,
        proven=st.booleans(),
        ends=st.lists(st.sampled_from(sorted(REAPS)), min_size=2, max_size=2),
        quiet=st.booleans(),
    )
    def die(self, who: int, ends: list[str], *, proven: bool, quiet: bool) -> None:
        if proven:
            self.declare_dead(who)
        self.reap(ends, quiet=quiet)

    def declare_dead(self, who: int) -> None:
        seat, puppet = self.seat(who)
        if self.run(puppet.storage.declare_dead(puppet.ref, "killed")):
            seat.dead = True

    def reap(self, ends: list[str], *, quiet: bool) -> None:
        """Before it, perhaps, a lease in which only some go on beating."""
        if quiet:
            for _ in range(5):
                self.lab.clock.advance(LEASE_S / 4)
                self.beat(0)
        found = self.run(self.lab.storage.orphans(1_000)).jobs
        reaps = []
        for n, orphan in enumerate(found):
            job = self.model.jobs[orphan.id]
            (seat,) = [seat for seat, _ in self.puppets if seat.ref == job.owner]
            assert (orphan.token, orphan.worker) == (job.token, job.owner)
            assert orphan.started == (job.status is Status.RUNNING)
            assert seat.dead or self.now_us - seat.renewed_us >= LEASE_S * 1e6, "a live owner's job"
            reaps.append(Reap(orphan.id, orphan.token, REAPS[ends[n % 2]] if orphan.started else None))
        assert self.run(self.lab.storage.reap(reaps)) == [Settled.APPLIED] * len(reaps)
        for item in reaps:
            job = self.model.jobs[item.id]
            self.lost(job)
            if item.transition is None:
                self.model.give_back(job, self.now_us)
            else:
                self.model.end(job, item.transition, self.now_us)

    # -- operators -------------------------------------------------------------------------------------

    @precondition(Stage.has_jobs)
    @rule(
        verb=st.sampled_from(["cancel", "replay", "discard", "reprioritise"]),
        picks=few,
        tier=st.integers(0, 3),
    )
    def operate(self, verb: str, picks: list[int], tier: int) -> None:
        if verb == "cancel":
            self.cancel(picks)
        elif verb == "replay":
            self.replay(picks)
        elif verb == "discard":
            self.discard(picks)
        else:
            self.reprioritise(picks, tier)

    def cancel(self, picks: list[int]) -> None:
        jobs = self.any_jobs(picks)
        answers = self.run(self.lab.storage.cancel([job.id for job in jobs]))
        for job, answer in zip(jobs, answers, strict=True):
            if job.ended:
                assert answer is Cancelled.ENDED
            elif job.status is Status.RUNNING:
                assert answer is Cancelled.REQUESTED
                job.cancel = True
            else:
                assert answer is Cancelled.CANCELLED
                self.lost(job)
                job.owner = None
                self.model.move(job, Status.CANCELLED, self.now_us)

    def replay(self, picks: list[int]) -> None:
        jobs = self.any_jobs(picks)
        answers = self.run(self.lab.storage.replay([job.id for job in jobs]))
        for job, answer in zip(jobs, answers, strict=True):
            may = job.ended and job.status is not Status.COMPLETED
            key = job.new.unique_key
            if may and key is not None and self.model.holder(job.queue, key) is not None:
                may = False
            assert answer is (Done.DONE if may else Done.CONFLICT)
            if may:
                self.model.replay(job, self.now_us)

    def discard(self, picks: list[int]) -> None:
        jobs = self.any_jobs(picks)
        answers = self.run(self.lab.storage.discard([job.id for job in jobs]))
        for job, answer in zip(jobs, answers, strict=True):
            assert answer is (Done.DONE if job.ended else Done.CONFLICT)
            if job.ended:
                del self.model.jobs[job.id]
                key = job.new.idempotency_key
                if key is not None and self.model.keys.get(key, ("", None))[0] == job.id:
                    del self.model.keys[key]

    def reprioritise(self, picks: list[int], tier: int) -> None:
        jobs = self.any_jobs(picks)
        answers = self.run(self.lab.storage.reprioritise([job.id for job in jobs], tier))
        for job, answer in zip(jobs, answers, strict=True):
            assert answer is (Done.CONFLICT if job.ended else Done.DONE)
            if job.ended or job.tier == tier:
                continue
            job.tier = tier
            self.model.arrive(job)
            if job.status is Status.CLAIMED:
                self.lost(job)
                self.model.give_back(job, self.now_us)

    @rule(queue=st.sampled_from(QUEUES), shut=st.sampled_from([False, False, True]))
    def pause_or_resume(self, queue: str, *, shut: bool) -> None:
        storage = self.lab.storage
        changed = self.run(storage.pause(queue) if shut else storage.resume(queue))
        assert changed == ((queue in self.model.paused) != shut)
        if not shut:
            self.model.paused.discard(queue)
            return
        self.model.paused.add(queue)
        for job in self.model.jobs.values():
            if job.queue == queue and job.status is Status.CLAIMED:
                self.lost(job)
                self.model.give_back(job, self.now_us)

    # -- housekeeping ----------------------------------------------------------------------------------

    @rule(verb=st.sampled_from(["promote", "promote", "prune"]))
    def keep_house(self, verb: str) -> None:
        if verb == "promote":
            self.promote()
        else:
            self.prune()

    def promote(self) -> None:
        self.run(self.lab.storage.promote(1_000))
        self.model.promote(self.now_us)

    def prune(self) -> None:
        pruned = self.run(self.lab.storage.prune(retention(**AGES), 1_000))
        over = [job for job in self.model.jobs.values() if job.ended and self.is_over(job)]
        assert pruned.jobs == len(over)
        for job in over:
            self.model.gone[job.id] = self.model.jobs.pop(job.id)
        self.forget_seats()

    # -- the comparison --------------------------------------------------------------------------------
    @invariant()
    def agrees(self) -> None:
        self.run(self.compare())


def play(backend: Backend, *, examples: int, steps: int) -> None:
    """Random verbs on namespaces of this backend; the same ones in every run."""
    machine = type("BoundMachine", (Machine,), {"backend": backend, "names": itertools.count()})
    profile = settings(
        max_examples=examples,
        stateful_step_count=steps,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(machine, settings=profile)


class TestRandomVerbs:
    def test_random_verbs_agree_with_a_brute_force_walk_and_a_simple_model(self, backend: Backend) -> None:
        play(backend, examples=120, steps=60)

    @pytest.mark.slow
    def test_many_more_random_verbs_agree(self, backend: Backend) -> None:
        play(backend, examples=600, steps=80)
