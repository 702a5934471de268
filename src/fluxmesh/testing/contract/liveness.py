"""Who is alive: beats, proofs of death, orphans."""

from __future__ import annotations

import pytest

from fluxmesh.ids import new_job_id
from fluxmesh.job import JobOptions, Status
from fluxmesh.storage.values import (
    Begun,
    Ground,
    OnDeath,
    Owned,
    Reap,
    Settled,
    Standing,
    TaskSpec,
    WorkerRef,
)
from fluxmesh.testing.contract.lab import (
    BEAT_S,
    CRASHED,
    LEASE_S,
    Lab,
    Puppet,
    ids,
    own,
    retry,
    scenario,
)


async def victim_with(lab: Lab, jobs: int = 1) -> tuple[Puppet, Puppet]:
    """A worker that owns `jobs` running jobs, and another that keeps the fleet in sight; armed."""
    survivor = await lab.worker("survivor")
    await lab.arm(survivor)
    await lab.put_many(jobs)
    victim = await lab.worker("victim", storage=await lab.open())
    assert len(await victim.claim(jobs)) == jobs
    return victim, survivor


class TestBeats:
    @scenario
    async def test_a_beating_worker_is_never_an_orphans_owner(self, lab: Lab) -> None:
        """C02: fifty leases."""
        victim, survivor = await victim_with(lab)
        for _ in range(150):
            await lab.pass_time(BEAT_S, victim, survivor)
            assert await lab.orphans() == ()
        assert await victim.settle(victim.only()) is Settled.APPLIED

    @scenario
    async def test_a_beat_tells_the_storages_time(self, lab: Lab) -> None:
        worker = await lab.worker()
        lab.clock.advance(1.25)
        assert (await worker.beat()).now_us == lab.clock.wall_us()
        lab.clock.advance(1.25)
        assert (await worker.beat_listing(None)).now_us == lab.clock.wall_us()

    @scenario
    async def test_a_beat_names_what_is_lost(self, lab: Lab) -> None:
        await lab.put_many(3)
        worker, other = await lab.worker("w1"), await lab.worker("w2")
        mine, gone = await worker.claim(2)
        await worker.release(gone)
        await other.claim_one()
        listed = [own(mine), own(gone), Owned(new_job_id(), 1)]
        answer = await worker.beat_listing(listed)
        assert (answer.standing, set(answer.lost)) == (Standing.GOOD, {gone.id, listed[2].id})

    @scenario
    async def test_a_beat_repeats_cancel_flags_for_as_long_as_they_stand(self, lab: Lab) -> None:
        await lab.put()
        worker = await lab.worker()
        job = await worker.claim_one()
        assert (await worker.beat()).cancelled == ()
        await lab.storage.cancel([job.id])
        assert [(await worker.beat()).cancelled for _ in range(3)] == [(job.id,)] * 3
        await worker.settle(job)
        assert (await worker.beat()).cancelled == ()

    @scenario
    async def test_a_cancelled_held_job_is_lost_to_its_owner(self, lab: Lab) -> None:
        await lab.put()
        worker = await lab.worker()
        held = await worker.hold_one()
        await lab.storage.cancel([held.id])
        assert (await worker.beat_listing([own(held)])).lost == (held.id,)

    @scenario
    async def test_a_command_is_heard_with_the_next_beat_until_it_is_taken_back(self, lab: Lab) -> None:
        worker = await lab.worker()
        heard = []
        for command in ("quiet", "stop", None):
            assert await lab.storage.command("w1", command)
            heard.append((await worker.beat()).command)
        assert heard == ["quiet", "stop", None]
        assert not await lab.storage.command("nobody", "stop")

    @scenario
    async def test_a_beat_puts_a_missing_row_back_under_the_same_epoch(self, lab: Lab) -> None:
        """C05: a live worker whose record is deleted."""
        await lab.put_many(2)
        worker = await lab.worker()
        job = await worker.claim_one()
        lab.backend.forget_worker(worker.ref)
        assert (await worker.beat()).standing is Standing.GOOD
        assert [(info.worker_id, info.epoch) for info in await lab.storage.fleet()] == [
            ("w1", worker.ref.epoch)
        ]
        assert len(await worker.claim(1)) == 1
        assert await worker.settle(job) is Settled.APPLIED

    @scenario
    async def test_a_missing_row_is_not_put_back_beside_a_newer_epoch(self, lab: Lab) -> None:
        older = await lab.worker("w1")
        newer = await lab.worker("w1")
        lab.backend.forget_worker(older.ref)
        assert (await older.beat()).standing is Standing.FENCED
        assert (await newer.beat()).standing is Standing.GOOD
        assert len(await newer.claim(1)) == 0
        assert await older.claim(1) == []

    @scenario
    async def test_an_older_epoch_that_still_beats_keeps_its_running_jobs(self, lab: Lab) -> None:
        victim, survivor = await victim_with(lab)
        await lab.worker("victim")
        await lab.pass_time(3 * LEASE_S, victim, survivor)
        assert await lab.orphans() == ()
        assert (await victim.beat()).lost == ()

    @scenario
    async def test_a_supervisors_beat_renews_and_judges_nothing(self, lab: Lab) -> None:
        victim, survivor = await victim_with(lab)
        for _ in range(9):
            await lab.pass_time(BEAT_S, survivor)
            answer = await victim.beat_listing(None)
            assert (answer.standing, answer.lost) == (Standing.GOOD, ())
            assert await lab.orphans() == ()
        assert await victim.settle(victim.only()) is Settled.APPLIED

    @scenario
    async def test_the_fleet_shows_what_the_beat_told(self, lab: Lab) -> None:
        worker = await lab.worker("w1")
        await worker.beat(status="draining")
        (info,) = await lab.storage.fleet()
        assert (info.worker_id, info.status, info.hostname, info.pid) == ("w1", "draining", "host", 1)


class TestLostClaims:
    """A claim whose answer never arrived: the owner beats, and never lists the job."""

    async def _unlisted(self, lab: Lab, *, held: bool = False) -> tuple[Puppet, Owned]:
        await lab.put()
        worker = await lab.worker()
        job = await (worker.hold_one() if held else worker.claim_one())
        worker.owned.clear()
        return worker, own(job)

    @pytest.mark.parametrize("held", [False, True])
    @scenario
    async def test_it_is_released_after_two_lists_without_it_and_more_than_two_beats(
        self, lab: Lab, *, held: bool
    ) -> None:
        worker, job = await self._unlisted(lab, held=held)
        await lab.pass_time(2 * BEAT_S, worker)
        assert await lab.status(job.id) in (Status.RUNNING, Status.CLAIMED)
        await lab.pass_time(0.5, worker)
        shown = await lab.job(job.id)
        assert (shown.status, shown.worker_id) == (Status.PENDING, None)
        assert (shown.attempts, shown.crashes) == (0, 0)
        assert shown.token > job.token

    @scenario
    async def test_one_list_without_it_is_not_enough(self, lab: Lab) -> None:
        worker, job = await self._unlisted(lab)
        lab.clock.advance(2.5 * BEAT_S)
        await worker.beat_listing([])
        assert await lab.status(job.id) is Status.RUNNING
        await worker.beat_listing([])
        assert await lab.status(job.id) is Status.PENDING

    @scenario
    async def test_the_two_lists_must_follow_each_other(self, lab: Lab) -> None:
        worker, job = await self._unlisted(lab)
        lab.clock.advance(2.5 * BEAT_S)
        for listed in ([], [job], [], [job]):
            await worker.beat_listing(listed)
            assert await lab.status(job.id) is Status.RUNNING

    @scenario
    async def test_a_supervisors_beat_is_no_list(self, lab: Lab) -> None:
        worker, job = await self._unlisted(lab)
        lab.clock.advance(2.5 * BEAT_S)
        await worker.beat_listing([])
        for _ in range(3):
            await worker.beat_listing(None)
        assert await lab.status(job.id) is Status.RUNNING

    @scenario
    async def test_a_job_listed_under_a_wrong_token_is_not_listed(self, lab: Lab) -> None:
        worker, job = await self._unlisted(lab)
        lab.clock.advance(2.5 * BEAT_S)
        for _ in range(2):
            answer = await worker.beat_listing([Owned(job.id, job.token - 1)])
            assert answer.lost == (job.id,)
        assert await lab.status(job.id) is Status.PENDING

    @scenario
    async def test_what_is_listed_is_kept(self, lab: Lab) -> None:
        await lab.put_many(3)
        worker = await lab.worker()
        answer = await worker.exchange(slots=2, extra=1)
        await lab.pass_time(10 * BEAT_S, worker)
        assert await worker.begin(*answer.held) == [Begun.BEGUN]
        await worker.complete(*answer.running, *answer.held)

    @scenario
    async def test_a_transferred_job_is_young_again(self, lab: Lab) -> None:
        worker, job = await self._unlisted(lab, held=True)
        lab.clock.advance(2.5 * BEAT_S)
        await worker.beat_listing([])
        thief = await lab.worker("w2")
        (moved,) = await thief.transfer(worker.given[job.id])
        for _ in range(2):
            await thief.beat_listing([])
            await worker.beat_listing([])
        assert (await lab.job(job.id)).token == moved.token

    @scenario
    async def test_a_cancelled_lost_claim_ends_cancelled(self, lab: Lab) -> None:
        worker, job = await self._unlisted(lab)
        await lab.storage.cancel([job.id])
        lab.clock.advance(2.5 * BEAT_S)
        for _ in range(2):
            await worker.beat_listing([])
        assert await lab.status(job.id) is Status.CANCELLED


class TestOrphans:
    @scenario
    async def test_a_silent_owners_jobs_are_orphans_after_a_lease_and_not_before(self, lab: Lab) -> None:
        victim, survivor = await victim_with(lab, 2)
        await lab.pass_time(LEASE_S - 0.5, survivor)
        assert await lab.orphans() == ()
        await lab.pass_time(1.0, survivor)
        found = await lab.orphans()
        assert {(job.id, job.token) for job in found} == set(victim.owned.items())
        assert {(job.worker, job.ground, job.started) for job in found} == {(victim.ref, Ground.LAPSED, True)}

    @scenario
    async def test_an_owner_that_closed_its_storage_without_a_word_is_reaped_after_a_lease(
        self, lab: Lab
    ) -> None:
        victim, survivor = await victim_with(lab)
        await victim.storage.close()
        await lab.pass_time(LEASE_S + 0.5, survivor)
        assert await lab.reap_all() == list(victim.owned)
        assert ids(await survivor.claim(1)) == list(victim.owned)

    @scenario
    async def test_an_orphan_brings_all_that_a_decision_needs(self, lab: Lab) -> None:
        spec = TaskSpec("work", options=JobOptions(max_crashes=7))
        await lab.put("work", max_retries=5)
        await lab.put("work")
        worker = await lab.worker("w1", tasks=(spec,))
        await worker.settle(await worker.claim_one(), retry(0))
        answer = await worker.exchange(slots=1, extra=1)
        await worker.note(answer.running[0], on_death=OnDeath.TIMEOUT)
        await lab.storage.declare_dead(worker.ref, "killed by signal 9")
        found = {job.id: job for job in await lab.orphans()}
        running, held = found[answer.running[0].id], found[answer.held[0].id]
        assert (running.started, held.started) == (True, False)
        assert (running.on_death, held.on_death) == (OnDeath.TIMEOUT, OnDeath.CRASH)
        assert (running.ground, running.task, running.spec) == (Ground.PROVEN, "work", spec)
        assert "signal 9" in running.how
        assert {running.options, held.options} == {answer.running[0].options, answer.held[0].options}
        assert sorted([running.counters.attempts, held.counters.attempts]) == [0, 1]

    @scenario
    async def test_the_limit_of_a_call_is_kept_and_the_rest_follows(self, lab: Lab) -> None:
        victim, _ = await victim_with(lab, 5)
        await lab.storage.declare_dead(victim.ref, "killed")
        first = (await lab.storage.orphans(2)).jobs
        assert len(first) == 2
        await lab.storage.reap([Reap(job.id, job.token, CRASHED) for job in first])
        assert len(await lab.orphans()) == 3

    @scenario
    async def test_a_proven_death_is_a_ground_at_once(self, lab: Lab) -> None:
        victim, _ = await victim_with(lab)
        assert await lab.storage.declare_dead(victim.ref, "exit code 1")
        assert [job.ground for job in await lab.orphans()] == [Ground.PROVEN]

    @scenario
    async def test_a_proven_death_counts_while_disarmed_too(self, lab: Lab) -> None:
        victim, _ = await victim_with(lab)
        lab.clock.advance(3 * LEASE_S)
        await lab.storage.declare_dead(victim.ref, "exit code 1")
        answer = await lab.storage.orphans(10)
        assert (answer.armed, len(answer.jobs)) == (False, 1)

    @scenario
    async def test_only_the_epoch_that_died_loses_its_jobs(self, lab: Lab) -> None:
        await lab.put_many(2)
        older = await lab.worker("w1")
        first = await older.claim_one()
        newer = await lab.worker("w1")
        second = await newer.claim_one()
        assert await lab.orphans() == ()
        await lab.storage.declare_dead(older.ref, "killed")
        assert ids(await lab.orphans()) == [first.id]
        assert await newer.settle(second) is Settled.APPLIED

    @scenario
    async def test_a_death_of_nobody_is_not_recorded(self, lab: Lab) -> None:
        assert not await lab.storage.declare_dead(WorkerRef("nobody", 77), "killed")

    @scenario
    async def test_one_that_left_with_nothing_is_gone_and_with_jobs_is_dead(self, lab: Lab) -> None:
        tidy, hasty = await lab.worker("tidy"), await lab.worker("hasty")
        await lab.put()
        await hasty.claim_one()
        assert await lab.storage.declare_dead(tidy.ref, "left")
        assert await lab.storage.declare_dead(hasty.ref, "left")
        assert [info.worker_id for info in await lab.storage.fleet()] == ["hasty"]
        assert len(await lab.orphans()) == 1

    @scenario
    async def test_a_missing_row_is_a_ground_one_lease_after_it_was_first_missed(self, lab: Lab) -> None:
        """C05."""
        victim, survivor = await victim_with(lab)
        await lab.pass_time(2 * BEAT_S, survivor)
        lab.backend.forget_worker(victim.ref)
        assert await lab.orphans() == ()
        await lab.pass_time(LEASE_S - 0.5, survivor)
        assert await lab.orphans() == ()
        await lab.pass_time(1.0, survivor)
        assert [(job.worker.epoch, job.ground) for job in await lab.orphans()] == [
            (victim.ref.epoch, Ground.MISSING)
        ]
        assert await lab.reap_all() == list(victim.owned)

    @scenario
    async def test_a_row_that_came_back_in_time_is_missed_no_longer(self, lab: Lab) -> None:
        victim, survivor = await victim_with(lab)
        lab.backend.forget_worker(victim.ref)
        assert await lab.orphans() == ()
        await lab.pass_time(LEASE_S - 1, survivor)
        await victim.beat()
        await lab.pass_time(1.5, survivor)
        assert await lab.orphans() == ()
        lab.backend.forget_worker(victim.ref)
        await lab.pass_time(BEAT_S, survivor)
        assert await lab.orphans() == ()
