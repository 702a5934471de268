"""Taking back what the dead owned: reap, and when nobody counts as dead (arming)."""

from __future__ import annotations

import math

import pytest

from fluxmesh.ids import new_job_id
from fluxmesh.job import Status
from fluxmesh.storage.values import (
    Reap,
    Settled,
)
from fluxmesh.testing.contract.lab import (
    BEAT_S,
    CRASHED,
    LEASE_S,
    Lab,
    Puppet,
    dead,
    ids,
    own,
    retry,
    scenario,
)
from fluxmesh.testing.contract.liveness import victim_with


class TestReaping:
    @scenario
    async def test_a_reaped_job_has_a_new_token_and_its_old_place(self, lab: Lab) -> None:
        victim, survivor = await victim_with(lab)
        later = await lab.put()
        (old,) = victim.owned.items()
        await lab.storage.declare_dead(victim.ref, "killed")
        assert await lab.reap_all(CRASHED) == [old[0]]
        job = await lab.job(old[0])
        assert (job.status, job.crashes, job.attempts, job.worker_id) == (Status.PENDING, 1, 0, None)
        assert job.token > old[1]
        assert ids(await survivor.claim(2)) == [old[0], later]

    @scenario
    async def test_a_held_job_goes_back_uncharged(self, lab: Lab) -> None:
        job_id = await lab.put()
        worker = await lab.worker()
        await worker.hold_one()
        await lab.storage.declare_dead(worker.ref, "killed")
        assert await lab.reap_all(CRASHED) == [job_id]
        job = await lab.job(job_id)
        assert (job.status, job.crashes, await lab.storage.history(job_id)) == (Status.PENDING, 0, [])

    @scenario
    async def test_a_decision_to_retry_later_or_to_give_up_is_applied(self, lab: Lab) -> None:
        victim, _ = await victim_with(lab, 2)
        await lab.storage.declare_dead(victim.ref, "killed")
        one, two = await lab.orphans()
        answers = await lab.storage.reap([Reap(one.id, one.token, retry(9)), Reap(two.id, two.token, dead())])
        assert answers == [Settled.APPLIED] * 2
        assert await lab.statuses([one.id, two.id]) == [Status.SCHEDULED, Status.DEAD_LETTER]

    @scenario
    async def test_the_crash_stands_in_the_history_under_the_dead_worker(self, lab: Lab) -> None:
        victim, _ = await victim_with(lab)
        await lab.storage.declare_dead(victim.ref, "killed")
        (job_id,) = await lab.reap_all(CRASHED)
        history = await lab.storage.history(job_id)
        assert history is not None
        assert [(entry.outcome, entry.worker_id) for entry in history] == [("crashed", "victim")]

    @scenario
    async def test_the_dead_owners_settle_comes_too_late(self, lab: Lab) -> None:
        """C04: a frozen worker wakes up."""
        victim, survivor = await victim_with(lab)
        job = victim.only()
        await lab.pass_time(LEASE_S + 1, survivor)
        await lab.reap_all()
        new = await survivor.claim_one()
        assert await victim.settle(job) is Settled.STALE
        answer = await victim.beat_listing([own(job)])
        assert answer.lost == (job.id,)
        assert await survivor.settle(new) is Settled.APPLIED
        assert (await lab.storage.counts()).stale_settles == 1

    @scenario
    async def test_an_owner_that_lives_again_keeps_its_jobs(self, lab: Lab) -> None:
        victim, survivor = await victim_with(lab)
        await lab.pass_time(LEASE_S + 1, survivor)
        (orphan,) = await lab.orphans()
        await victim.beat()
        assert await lab.storage.reap([Reap(orphan.id, orphan.token, CRASHED)]) == [Settled.STALE]
        assert (await lab.job(orphan.id)).crashes == 0
        assert await victim.settle(victim.only()) is Settled.APPLIED

    @scenario
    async def test_a_decision_about_an_older_token_is_refused(self, lab: Lab) -> None:
        _, survivor = await victim_with(lab)
        await lab.pass_time(LEASE_S + 1, survivor)
        (orphan,) = await lab.orphans()
        await lab.storage.reap([Reap(orphan.id, orphan.token, CRASHED)])
        await survivor.claim_one()
        assert await lab.storage.reap([Reap(orphan.id, orphan.token, CRASHED)]) != [Settled.APPLIED]
        job = await lab.job(orphan.id)
        assert (job.status, job.worker_id, job.crashes) == (Status.RUNNING, "survivor", 1)

    @scenario
    async def test_a_job_of_the_living_is_not_reaped_whoever_asks(self, lab: Lab) -> None:
        victim, _ = await victim_with(lab)
        (owned,) = victim.owned.items()
        assert await lab.storage.reap([Reap(*owned, CRASHED), Reap(new_job_id(), 1)]) == [Settled.STALE] * 2
        assert await lab.status(owned[0]) is Status.RUNNING

    @scenario
    async def test_a_reap_while_the_cancel_flag_stands_is_a_cancel(self, lab: Lab) -> None:
        victim, _ = await victim_with(lab)
        (job_id,) = victim.owned
        await lab.storage.cancel([job_id])
        await lab.storage.declare_dead(victim.ref, "killed")
        await lab.reap_all(CRASHED)
        assert await lab.status(job_id) is Status.CANCELLED


class TestArming:
    """P8: after an outage or a clock step nobody is reaped for one lease; then the dead are."""

    async def _nobody_is_reaped_for_one_lease_then_the_dead_are(
        self, lab: Lab, victim: Puppet, survivor: Puppet
    ) -> None:
        answer = await lab.storage.orphans(10)
        assert (answer.armed, answer.jobs) == (False, ())
        for _ in range(2):
            await lab.pass_time(LEASE_S / 2 - 0.2, survivor)
            answer = await lab.storage.orphans(10)
            assert (answer.armed, answer.jobs) == (False, ())
        await lab.pass_time(1.0, survivor)
        answer = await lab.storage.orphans(10)
        assert answer.armed
        assert ids(answer.jobs) == list(victim.owned)
        assert await lab.reap_all() == list(victim.owned)

    @scenario
    async def test_a_storage_that_was_out_of_sight(self, lab: Lab) -> None:
        victim, survivor = await victim_with(lab)
        lab.clock.advance(3 * LEASE_S)
        await self._nobody_is_reaped_for_one_lease_then_the_dead_are(lab, victim, survivor)

    @scenario
    async def test_a_live_worker_that_comes_back_after_an_outage_keeps_its_jobs(self, lab: Lab) -> None:
        victim, survivor = await victim_with(lab)
        lab.clock.advance(3 * LEASE_S)
        await survivor.beat()
        assert await lab.orphans() == ()
        await lab.pass_time(LEASE_S - 1, survivor)
        await victim.beat()
        await lab.pass_time(2 * LEASE_S, survivor, victim)
        assert await lab.orphans() == ()

    @pytest.mark.parametrize("minutes", [10, -10])
    @scenario
    async def test_a_lease_clock_that_was_stepped(self, lab: Lab, minutes: int) -> None:
        victim, survivor = await victim_with(lab)
        lab.step_lease_clock(60 * minutes)
        await self._nobody_is_reaped_for_one_lease_then_the_dead_are(lab, victim, survivor)

    @pytest.mark.parametrize("minutes", [10, -10])
    @scenario
    async def test_a_wall_clock_that_was_stepped_reaps_nobody(self, lab: Lab, minutes: int) -> None:
        victim, survivor = await victim_with(lab)
        lab.clock.step_wall(60 * minutes)
        await lab.pass_time(2 * LEASE_S, victim, survivor)
        assert await lab.orphans() == ()
        await lab.pass_time(LEASE_S + 0.5, survivor)
        assert await lab.reap_all() == list(victim.owned)

    @scenario
    async def test_a_reboot(self, lab: Lab) -> None:
        if lab.backend.lease_clock != "boot":
            return
        victim, _ = await victim_with(lab)
        lab.clock.reboot("manual-boot-2")
        survivor = await lab.worker("survivor-of-the-boot")
        await self._nobody_is_reaped_for_one_lease_then_the_dead_are(lab, victim, survivor)

    @scenario
    async def test_a_fresh_storage_reaps_nobody_for_one_lease(self, lab: Lab) -> None:
        await lab.put()
        victim = await lab.worker("victim")
        await victim.claim_one()
        lab.clock.advance(2.5 * BEAT_S)
        survivor = await lab.worker("survivor")
        assert not (await lab.storage.orphans(10)).armed
        await lab.pass_time(LEASE_S + 0.5, survivor)
        assert ids(await lab.orphans()) == list(victim.owned)

    @scenario
    async def test_a_missing_row_is_no_ground_while_disarmed(self, lab: Lab) -> None:
        victim, survivor = await victim_with(lab)
        lab.backend.forget_worker(victim.ref)
        assert await lab.orphans() == ()
        lab.clock.advance(3 * LEASE_S)
        assert await lab.orphans() == ()
        await lab.pass_time(LEASE_S + 0.5, survivor)
        await lab.orphans()
        await lab.pass_time(LEASE_S + 0.5, survivor)
        assert await lab.reap_all() == list(victim.owned)

    @scenario
    async def test_the_death_of_the_last_known_worker_does_not_arm_sooner(self, lab: Lab) -> None:
        victim, survivor = await victim_with(lab)
        lab.backend.forget_worker(victim.ref)
        assert await lab.orphans() == ()
        lab.clock.advance(3 * LEASE_S)
        await survivor.beat()
        await lab.storage.declare_dead(survivor.ref, "killed")
        lab.clock.advance(0.04)
        answer = await lab.storage.orphans(10)
        assert (answer.armed, answer.jobs) == (False, ())

    @scenario
    async def test_a_reap_decided_before_an_outage_is_refused_while_disarmed(self, lab: Lab) -> None:
        victim, survivor = await victim_with(lab)
        await lab.pass_time(LEASE_S + 0.5, survivor)
        (orphan,) = await lab.orphans()
        lab.clock.advance(3 * LEASE_S)
        await survivor.beat()
        assert await lab.storage.reap([Reap(orphan.id, orphan.token, CRASHED)]) == [Settled.STALE]
        assert await victim.settle(victim.only()) is Settled.APPLIED


class TestTending:
    """A round of housekeeping in one call."""

    @scenario
    async def test_one_leads_and_promotes_and_everybody_finds_orphans(self, lab: Lab) -> None:
        victim, _ = await victim_with(lab)
        due = await lab.put(delay_seconds=5)
        await lab.storage.declare_dead(victim.ref, "killed")
        lab.clock.advance(5)
        other = await lab.storage.tend("other", 10, promote=0, orphans=10)
        assert (other.leads, [job.how for job in other.orphans.jobs]) == (True, ["killed"])
        mine = await lab.storage.tend("mine", 10, promote=10, orphans=10)
        assert (mine.leads, mine.promoted.count, mine.orphans.jobs) == (False, 0, other.orphans.jobs)
        assert await lab.status(due) is Status.SCHEDULED
        lab.clock.advance(11)
        mine = await lab.storage.tend("mine", 10, promote=10, orphans=0)
        assert (mine.leads, mine.promoted.count, mine.orphans.jobs) == (True, 1, ())
        assert await lab.status(due) is Status.PENDING

    @scenario
    async def test_it_tells_when_the_next_job_is_due_and_what_may_lapse_when(self, lab: Lab) -> None:
        await lab.put(delay_seconds=5)
        quiet = await lab.storage.tend("me", 10, promote=10, orphans=10)
        assert quiet.promoted.next_due_s == pytest.approx(5)
        assert quiet.orphans.next_lapse_s in (None, math.inf)
        worker = await lab.worker()
        lab.clock.advance(1)
        watched = (await lab.storage.tend("me", 10, promote=10, orphans=10)).orphans.next_lapse_s
        assert watched is None or watched == pytest.approx(LEASE_S - 1)
        await lab.storage.declare_dead(worker.ref, "killed")
        gone = (await lab.storage.tend("me", 10, promote=10, orphans=10)).orphans.next_lapse_s
        assert gone in (None, math.inf)
