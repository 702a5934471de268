"""Housekeeping against a real storage under a manual clock."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest

from fluxmesh.clock import ManualClock
from fluxmesh.config import Settings
from fluxmesh.job import Outcome, Status
from fluxmesh.outcome import Charge, Transition
from fluxmesh.scheduler.housekeeping import PATIENCE_S, STOPPED, Housekeeper
from fluxmesh.storage.base import Storage
from fluxmesh.storage.values import PROCESS_GONE, OnDeath
from fluxmesh.testing.contract.harness import Backend
from fluxmesh.testing.contract.lab import BEAT_S, LEASE_S, Lab, Puppet, scenario
from tests.contract.test_sqlite import SqliteBackend
from tests.service.log_tap import LogTap, tapped

SETTINGS = Settings(lease_s=LEASE_S, result_ttl=100, dead_letter_ttl=1_000)
REAP_S = SETTINGS.reap_s


def housekeeper(lab: Lab, settings: Settings = SETTINGS) -> Housekeeper:
    return Housekeeper(lab.storage, settings, lab.clock, random.Random(1))


async def rounds(lab: Lab, keeper: Housekeeper, seconds: float, *beating: Puppet) -> None:
    """Time passes as it does beside a running loop: a round at every interval, a beat at every beat."""
    since_beat_s = 0.0
    for _ in range(round(seconds / keeper.interval_s)):
        lab.clock.advance(keeper.interval_s)
        since_beat_s += keeper.interval_s
        if since_beat_s >= BEAT_S:
            since_beat_s = 0.0
            for worker in beating:
                await worker.beat()
        await keeper.run_once()


@pytest.fixture
def backend(tmp_path: Path) -> Backend:
    return SqliteBackend(tmp_path)


@pytest.fixture
def tap() -> Iterator[LogTap]:
    with tapped() as tap:
        yield tap


class TestCadence:
    @scenario
    async def test_a_death_is_looked_for_twice_in_a_reap_period_and_twice_a_second(self, lab: Lab) -> None:
        intervals = {reap_s: housekeeper(lab, Settings(reap_s=reap_s)).interval_s for reap_s in (0.1, 1, 10)}
        assert intervals == {0.1: 0.05, 1: 0.4, 10: 0.4}

    def test_where_lapses_are_known_it_rests_until_one_or_two_reap_periods(self) -> None:
        nobody = cast("Storage", None)
        keeper = Housekeeper(nobody, Settings(reap_s=1), ManualClock(), random.Random(1))
        rests = [keeper.rest_s(None, lapse_s) for lapse_s in (None, 0.0, 0.9, 1.5, 6.0, math.inf)]
        assert rests == [None, 0.4, pytest.approx(0.902), pytest.approx(1.502), 2, 2]
        assert [keeper.rest_s(due_s, 6.0) for due_s in (0.0, 1.2, 5.0)] == [0.4, 1.2, 2]


class TestLeading:
    @scenario
    async def test_one_leads_and_another_takes_over_when_the_first_falls_silent(self, lab: Lab) -> None:
        first, second = housekeeper(lab), housekeeper(lab)
        await first.run_once()
        await second.run_once()
        assert (first.leading, second.leading) == (True, False)
        await rounds(lab, first, 10 * REAP_S)
        await second.run_once()
        assert not second.leading
        await rounds(lab, second, 4 * REAP_S)
        assert second.leading

    @scenario
    async def test_who_does_not_lead_still_takes_back_the_jobs_of_the_dead(self, lab: Lab) -> None:
        leader, other = housekeeper(lab), housekeeper(lab)
        await leader.run_once()
        await other.run_once()
        victim = await lab.worker()
        job_id = await lab.put()
        await victim.claim_one()
        await lab.storage.declare_dead(victim.ref, "killed by SIGKILL")
        await other.run_once()
        assert await lab.status(job_id) is Status.PENDING


class TestPromotion:
    @scenario
    async def test_due_jobs_are_made_ready_and_the_next_due_instant_ends_the_rest(self, lab: Lab) -> None:
        keeper = Housekeeper(lab.storage, SETTINGS, lab.clock, random.Random(1), on_time_s=0.2)
        assert await keeper.run_once() == 0.2
        job_id = await lab.put(delay_seconds=0.3)
        assert await keeper.run_once() == pytest.approx(0.3, abs=1e-3)
        lab.clock.advance(0.3)
        await keeper.run_once()
        assert await lab.status(job_id) is Status.PENDING

    @scenario
    async def test_more_than_one_batch_is_promoted_in_a_round(self, lab: Lab) -> None:
        await lab.put_many(2_500, delay_seconds=1)
        lab.clock.advance(1)
        await housekeeper(lab).run_once()
        assert (await lab.storage.counts()).by_status[Status.PENDING] == 2_500


class TestReaping:
    @scenario
    async def test_running_jobs_of_the_dead_are_charged_a_crash_and_held_ones_nothing(
        self, lab: Lab, tap: LogTap
    ) -> None:
        victim = await lab.worker()
        ids = await lab.put_many(5)
        answer = await victim.exchange(slots=2, extra=3)
        assert (len(answer.running), len(answer.held)) == (2, 3)
        await lab.storage.declare_dead(victim.ref, "killed by SIGKILL")

        await housekeeper(lab).run_once()

        jobs = [await lab.job(job_id) for job_id in ids]
        assert {job.status for job in jobs} == {Status.PENDING}
        assert [job.crashes for job in jobs] == [1, 1, 0, 0, 0]
        assert [job.attempts for job in jobs] == [0] * 5
        history = await lab.storage.history(ids[0])
        assert history is not None
        assert [(entry.outcome, entry.worker_id) for entry in history] == [(Outcome.CRASHED, "w1")]
        assert history[0].error is not None
        assert "killed by SIGKILL" in history[0].error.message
        assert await lab.storage.history(ids[4]) == []
        (reaped,) = tap.found("jobs reaped")
        assert reaped["count"] == 5
        assert (reaped["worker"], reaped["ground"], reaped["how"]) == (
            "w1",
            "death proven",
            "killed by SIGKILL",
        )

    @scenario
    async def test_c15_a_job_that_kills_its_worker_three_times_is_a_dead_letter_that_says_how(
        self, lab: Lab
    ) -> None:
        keeper = housekeeper(lab)
        job_id = await lab.put(max_retries=10)
        waits = []
        for _ in range(3):
            victim = await lab.worker()
            while not (claimed := await victim.claim()):
                lab.clock.advance(0.1)
                waits.append(0.1)
            assert claimed[0].id == job_id
            await lab.storage.declare_dead(victim.ref, "killed by SIGKILL")
            await keeper.run_once()
        job = await lab.job(job_id)
        assert (job.status, job.reason) == (Status.DEAD_LETTER, "worker lost x3: killed by SIGKILL")
        assert (job.crashes, job.attempts) == (3, 0)
        assert 0.5 <= sum(waits) <= 1.1  # none after the first crash, one retry delay after the second

    @pytest.mark.parametrize(
        ("on_death", "how", "outcome", "charged"),
        [
            (OnDeath.TIMEOUT, "retired: a body could not be stopped", Outcome.TIMEOUT, Charge.ATTEMPT),
            (OnDeath.INTERRUPTED, "killed by SIGKILL", Outcome.INTERRUPTED, Charge.INTERRUPTION),
            (None, STOPPED, Outcome.INTERRUPTED, Charge.INTERRUPTION),
        ],
    )
    @scenario
    async def test_what_the_owners_death_means_is_what_was_noted(
        self, lab: Lab, on_death: OnDeath | None, how: str, outcome: Outcome, charged: Charge
    ) -> None:
        victim = await lab.worker()
        job_id = await lab.put()
        job = await victim.claim_one()
        if on_death is not None:
            assert await victim.note(job, on_death=on_death)
        await lab.storage.declare_dead(victim.ref, how)
        await housekeeper(lab).run_once()
        found = await lab.job(job_id)
        counters = {
            Charge.ATTEMPT: found.attempts,
            Charge.INTERRUPTION: found.interruptions,
            Charge.CRASH: found.crashes,
        }
        assert counters == {charge: int(charge is charged) for charge in counters}
        history = await lab.storage.history(job_id)
        assert history is not None
        assert [entry.outcome for entry in history] == [outcome]

    @scenario
    async def test_an_unnamed_cause_is_left_a_moment_for_the_supervisor_to_name(self, lab: Lab) -> None:
        victim = await lab.worker()
        job_id = await lab.put(max_crashes=1)
        await victim.claim_one()
        await lab.storage.declare_dead(victim.ref, PROCESS_GONE)
        keeping = asyncio.ensure_future(housekeeper(lab).reap_orphans(patience_s=PATIENCE_S))
        await asyncio.sleep(0)  # its first look is under way, before the cause is named
        await lab.storage.declare_dead(victim.ref, "killed by SIGKILL")
        assert await keeping == 1
        assert (await lab.job(job_id)).reason == "worker lost x1: killed by SIGKILL"

    @scenario
    async def test_a_cause_that_nobody_names_is_told_as_it_is(self, lab: Lab) -> None:
        victim = await lab.worker()
        job_id = await lab.put(max_crashes=1)
        await victim.claim_one()
        await lab.storage.declare_dead(victim.ref, PROCESS_GONE)
        await housekeeper(lab).run_once()
        assert (await lab.job(job_id)).reason == f"worker lost x1: {PROCESS_GONE}"

    @scenario
    async def test_a_crash_while_the_cancel_flag_stands_is_the_end(self, lab: Lab) -> None:
        victim = await lab.worker()
        job_id = await lab.put()
        await victim.claim_one()
        await lab.storage.cancel([job_id])
        await lab.storage.declare_dead(victim.ref, "killed by SIGKILL")
        await housekeeper(lab).run_once()
        assert await lab.status(job_id) is Status.CANCELLED

    @scenario
    async def test_a_full_worker_is_emptied_in_one_round(self, lab: Lab) -> None:
        victim = await lab.worker()
        ids = await lab.put_many(250)
        assert len(await victim.claim(250)) == 250
        await lab.storage.declare_dead(victim.ref, "killed by SIGKILL")
        assert await housekeeper(lab).reap_orphans() == 250
        assert set(await lab.statuses(ids)) == {Status.PENDING}

    @scenario
    async def test_options_that_cannot_be_read_do_not_keep_a_job(self, lab: Lab) -> None:
        victim = await lab.worker()
        odd, sound = await lab.put(max_retries=7), await lab.put(max_retries=7)
        await victim.claim(2)
        lab.backend.corrupt(odd, "options", b"\xff\x00\x13\x37")
        await lab.storage.declare_dead(victim.ref, "killed by SIGKILL")
        assert await housekeeper(lab).reap_orphans() == 2
        again = await lab.worker("w2")
        assert {job.id for job in await again.claim(2)} == {odd, sound}

    @scenario
    async def test_a_silent_owner_loses_its_jobs_when_its_lease_is_over_and_not_before(
        self, lab: Lab, tap: LogTap
    ) -> None:
        keeper = housekeeper(lab)
        silent, alive = await lab.worker("silent"), await lab.worker("alive")
        lost, kept = await lab.put(), await lab.put()
        await silent.claim_one()
        await alive.claim_one()
        await rounds(lab, keeper, LEASE_S + BEAT_S, silent, alive)  # in good order: armed
        await rounds(lab, keeper, LEASE_S - BEAT_S, alive)
        assert await lab.status(lost) is Status.RUNNING
        await rounds(lab, keeper, BEAT_S + REAP_S, alive)
        assert await lab.status(lost) is Status.PENDING
        assert await lab.status(kept) is Status.RUNNING
        assert tap.found("jobs reaped", worker="silent", ground="lease lapsed", count=1)

    @scenario
    async def test_after_a_time_out_of_sight_nobody_is_reaped_for_one_lease(
        self, lab: Lab, tap: LogTap
    ) -> None:
        keeper = housekeeper(lab)
        worker = await lab.worker()
        job_id = await lab.put()
        await worker.claim_one()
        await rounds(lab, keeper, LEASE_S + BEAT_S, worker)
        lab.clock.advance(600)
        await keeper.run_once()
        await rounds(lab, keeper, LEASE_S - REAP_S)
        assert await lab.status(job_id) is Status.RUNNING
        assert tap.found("leases disarmed", level="warning")
        await rounds(lab, keeper, 2 * REAP_S)
        assert await lab.status(job_id) is Status.PENDING

    @scenario
    async def test_c05_jobs_of_a_dead_worker_without_a_record_are_taken_back(self, lab: Lab) -> None:
        keeper = housekeeper(lab)
        victim, bystander = await lab.worker("victim"), await lab.worker("bystander")
        ids = await lab.put_many(3)
        assert len(await victim.claim(3)) == 3
        await rounds(lab, keeper, LEASE_S + BEAT_S, victim, bystander)
        lab.backend.forget_worker(victim.ref)
        await rounds(lab, keeper, 2 * (LEASE_S + REAP_S) + 2, bystander)
        assert set(await lab.statuses(ids)) == {Status.PENDING}
        assert [(await lab.job(job_id)).crashes for job_id in ids] == [1, 1, 1]

    @scenario
    async def test_c05_a_live_worker_without_a_record_is_back_after_one_beat_and_keeps_its_job(
        self, lab: Lab
    ) -> None:
        keeper = housekeeper(lab)
        worker = await lab.worker()
        job_id = await lab.put()
        await worker.claim_one()
        await rounds(lab, keeper, LEASE_S + BEAT_S, worker)
        lab.backend.forget_worker(worker.ref)
        await rounds(lab, keeper, 3 * LEASE_S, worker)
        job = await lab.job(job_id)
        assert (job.status, job.crashes) == (Status.RUNNING, 0)


class TestPruning:
    @scenario
    async def test_what_is_over_goes_when_its_time_is_up_batch_by_batch(self, lab: Lab) -> None:
        keeper = housekeeper(lab)
        worker = await lab.worker()
        for _ in range(2):
            await lab.put_many(600)
            await worker.complete(*await worker.claim(600))
        dead = await lab.end(Transition(Status.DEAD_LETTER, Outcome.FAILED, Charge.ATTEMPT, reason="error"))
        await rounds(lab, keeper, 10)
        assert (await lab.storage.counts()).by_status.get(Status.COMPLETED) == 1_200
        lab.clock.advance(SETTINGS.result_ttl)
        await rounds(lab, keeper, 10)
        assert (await lab.storage.counts()).by_status.get(Status.COMPLETED, 0) == 0
        assert await lab.status(dead) is Status.DEAD_LETTER
        lab.clock.advance(SETTINGS.dead_letter_ttl)
        await rounds(lab, keeper, 10)
        assert (await lab.storage.counts()).total == 0
