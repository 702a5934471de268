"""Lost replies of every verb, processes that die between verbs, storages that were closed."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest

from fluxmesh.errors import OutcomeUnknown, StorageUnreachable
from fluxmesh.events import Event
from fluxmesh.ids import new_job_id
from fluxmesh.job import Status
from fluxmesh.query import Query
from fluxmesh.storage.base import Storage
from fluxmesh.storage.values import (
    HELD_TAKEABLE_AFTER_S,
    Begun,
    Cancelled,
    Done,
    ExchangeRequest,
    Owned,
    ProgressNote,
    Reap,
    Registration,
    Settle,
    Settled,
    Verdict,
    WorkerRef,
    WorkerView,
)
from fluxmesh.testing.contract.faulty import FaultyStorage
from fluxmesh.testing.contract.lab import (
    BEAT_S,
    COMPLETED,
    CRASHED,
    LEASE_S,
    QUEUE_CAP,
    Lab,
    Puppet,
    dead,
    ids,
    insist,
    new_job,
    own,
    retention,
    retry,
    scenario,
)


async def faulty(lab: Lab, *verbs: str) -> tuple[FaultyStorage, Storage]:
    """A process that will not hear the next answer to these verbs."""
    faults = FaultyStorage(await lab.open())
    faults.lose_replies(*verbs)
    return faults, faults.as_storage()


async def drain(lab: Lab, *also_beating: Puppet) -> list[str]:
    """Let three beats pass, then let a fresh worker run whatever can be run: the ids it ran."""
    await lab.pass_time(3 * BEAT_S, *also_beating)
    worker = await lab.worker("drainer")
    done: list[str] = []
    for _ in range(50):
        jobs = await worker.claim(50)
        if not jobs:
            return done
        await worker.complete(*jobs)
        done += ids(jobs)
    pytest.fail("there is no end of jobs")


class TestLostReplies:
    """The verb was performed and its answer lost; the caller makes the same call again."""

    @scenario
    async def test_of_enqueue(self, lab: Lab) -> None:
        faults, storage = await faulty(lab, "enqueue")
        jobs = [
            new_job("work"),
            new_job("work", idempotency_key="i"),
            new_job("work", unique_key="u"),
            new_job("work", delay=1),
        ]
        answers = await insist(lambda: storage.enqueue(jobs, queue_cap=QUEUE_CAP))
        assert faults.is_spent
        assert [answer.id for answer in answers] == [job.id for job in jobs]
        assert {answer.verdict for answer in answers} == {Verdict.EXISTING}
        assert (await lab.storage.counts()).total == 4
        assert sorted(await drain(lab)) == sorted(job.id for job in jobs)

    @scenario
    async def test_of_register(self, lab: Lab) -> None:
        faults, storage = await faulty(lab, "register")
        registration = (await lab.worker("other")).registration
        epoch = await insist(lambda: storage.register(registration))
        assert faults.is_spent
        await lab.put()
        worker = Puppet(storage, registration, epoch)
        assert len(await worker.claim(1)) == 1
        assert await lab.orphans() == ()

    @scenario
    async def test_of_an_exchange_that_claims(self, lab: Lab) -> None:
        made = await lab.put_many(4)
        faults, storage = await faulty(lab, "exchange")
        worker = await lab.worker(storage=storage)
        request = worker.request(slots=2, extra=1)
        answer = await insist(lambda: worker.send(request))
        assert faults.is_spent
        assert (ids(answer.running), ids(answer.held)) == (made[:2], made[2:3])
        assert await worker.begin(*answer.held) == [Begun.BEGUN]
        await worker.complete(*answer.running, *answer.held)
        assert await drain(lab, worker) == made[3:]

    @scenario
    async def test_of_an_exchange_that_claims_and_is_never_repeated(self, lab: Lab) -> None:
        made = await lab.put_many(3)
        _, storage = await faulty(lab, "exchange")
        worker = await lab.worker(storage=storage)
        with pytest.raises(OutcomeUnknown):
            await worker.exchange(slots=2, extra=1)
        assert worker.owned == {}
        assert await drain(lab, worker) == made

    @scenario
    async def test_of_an_exchange_that_settles(self, lab: Lab) -> None:
        made = await lab.put_many(3)
        faults, storage = await faulty(lab)
        worker = await lab.worker(storage=storage)
        one, two, three = await worker.claim(3)
        faults.lose_replies("exchange")
        request = worker.request(
            settle=[
                Settle(job.id, job.token, end)
                for job, end in ((one, COMPLETED), (two, retry(1)), (three, dead()))
            ]
        )
        answer = await insist(lambda: worker.send(request))
        assert answer.settled == (Settled.ALREADY,) * 3
        assert await lab.statuses(made) == [Status.COMPLETED, Status.SCHEDULED, Status.DEAD_LETTER]
        assert [(await lab.job(job_id)).attempts for job_id in made] == [1, 1, 1]
        assert (await lab.storage.counts()).stale_settles == 0
        assert await drain(lab, worker) == [two.id]

    @scenario
    async def test_of_an_exchange_that_begins(self, lab: Lab) -> None:
        await lab.put(priority=1)
        await lab.put(priority=3)
        faults, storage = await faulty(lab)
        worker = await lab.worker(storage=storage)
        high, low = await worker.hold(2)
        urgent = await lab.put(priority=2)
        faults.lose_replies("exchange")
        request = worker.request(begin=[own(high), own(low)])
        answer = await insist(lambda: worker.send(request))
        # The one that was given back may be called outranked or lost: either way it is not this worker's.
        assert answer.begun[0] is Begun.BEGUN
        assert answer.begun[1] in (Begun.OUTRANKED, Begun.LOST)
        assert ids(answer.running) == [urgent]
        await worker.complete(high, *answer.running)
        assert await drain(lab, worker) == [low.id]

    @scenario
    async def test_of_an_exchange_that_does_everything_at_once(self, lab: Lab) -> None:
        made = await lab.put_many(3)
        faults, storage = await faulty(lab)
        worker = await lab.worker(storage=storage)
        first = await worker.exchange(slots=1, extra=1)
        faults.lose_replies("exchange")
        request = worker.request(
            settle=[Settle(first.running[0].id, first.running[0].token, COMPLETED)],
            begin=[own(first.held[0])],
            slots=1,
        )
        answer = await insist(lambda: worker.send(request))
        assert (answer.settled, answer.begun) == ((Settled.ALREADY,), (Begun.BEGUN,))
        assert ids(answer.running) == made[2:]
        assert await lab.statuses(made) == [Status.COMPLETED, Status.RUNNING, Status.RUNNING]

    @scenario
    async def test_of_release(self, lab: Lab) -> None:
        made = await lab.put_many(2)
        faults, storage = await faulty(lab, "release")
        worker = await lab.worker(storage=storage)
        jobs = await worker.claim(2)
        worker.owned.clear()
        assert await insist(lambda: storage.release(worker.ref, [own(job) for job in jobs])) == [False, False]
        assert faults.is_spent
        assert await drain(lab, worker) == made

    @scenario
    async def test_of_a_release_after_which_another_worker_got_the_job(self, lab: Lab) -> None:
        await lab.put()
        _, storage = await faulty(lab, "release")
        one, two = await lab.worker("w1", storage=storage), await lab.worker("w2")
        job = await one.claim_one()
        with pytest.raises(OutcomeUnknown):
            await storage.release(one.ref, [own(job)])
        new = await two.claim_one()
        assert await storage.release(one.ref, [own(job)]) == [False]
        assert await two.settle(new) is Settled.APPLIED

    @pytest.mark.parametrize("verb", ["transfer", "take_held"])
    @scenario
    async def test_of_stealing(self, lab: Lab, verb: str) -> None:
        """What the thief never heard of is released after two of its lists, or is in the second answer."""
        made = await lab.put_many(2)
        faults, storage = await faulty(lab, verb)
        owner, thief = await lab.worker("w1"), await lab.worker("w2", storage=storage)
        held = await owner.hold(2)
        lab.clock.advance(HELD_TAKEABLE_AFTER_S + 0.01)
        if verb == "transfer":
            moved = await insist(lambda: thief.transfer(*held))
        else:
            moved = list((await insist(lambda: thief.take_held(2))).running)
            await thief.complete(*moved)
        assert faults.is_spent
        owner.owned.clear()
        left = await drain(lab, owner, thief)
        if verb == "transfer":
            for job in moved:
                await thief.begin(job)
            await thief.complete(*moved)
        assert sorted(left + ids(moved)) == sorted(made)
        assert await lab.statuses(made) == [Status.COMPLETED] * 2

    @scenario
    async def test_of_progress(self, lab: Lab) -> None:
        await lab.put()
        _, storage = await faulty(lab, "progress")
        worker = await lab.worker(storage=storage)
        job = await worker.claim_one()
        assert await insist(lambda: worker.note(job, percent=30.0))
        assert (await lab.job(job.id)).progress == 30.0

    @scenario
    async def test_of_a_beat_with_lists(self, lab: Lab) -> None:
        """Each repetition may count as a list of its own: what is listed stays."""
        await lab.put_many(2)
        faults, storage = await faulty(lab)
        worker = await lab.worker(storage=storage)
        await worker.exchange(slots=1, extra=1)
        for _ in range(4):
            lab.clock.advance(BEAT_S)
            faults.lose_replies("beat")
            assert (await insist(worker.beat)).lost == ()
        assert (await lab.storage.counts()).by_status[Status.RUNNING] == 1

    @scenario
    async def test_of_declare_dead_orphans_and_reap(self, lab: Lab) -> None:
        made = await lab.put_many(2)
        faults, storage = await faulty(lab, "declare_dead", "orphans", "reap")
        victim = await lab.worker("victim")
        await victim.claim(2)
        assert await insist(lambda: storage.declare_dead(victim.ref, "killed"))
        found = (await insist(lambda: storage.orphans(10))).jobs
        assert sorted(ids(found)) == sorted(made)
        reaps = [Reap(job.id, job.token, CRASHED) for job in found]
        answers = await insist(lambda: storage.reap(reaps))
        assert faults.is_spent
        assert not {Settled.APPLIED} & set(answers)
        assert [(await lab.job(job_id)).crashes for job_id in made] == [1, 1]
        assert sorted(await drain(lab)) == sorted(made)

    @scenario
    async def test_of_cancel(self, lab: Lab) -> None:
        ready, running = await lab.put_many(2)
        await lab.storage.reprioritise([running], 0)
        faults, storage = await faulty(lab, "cancel")
        worker = await lab.worker()
        await worker.claim(1)
        answers = await insist(lambda: storage.cancel([ready, running]))
        assert faults.is_spent
        assert answers[0] in (Cancelled.CANCELLED, Cancelled.ENDED)
        assert answers[1] is Cancelled.REQUESTED
        assert await lab.statuses([ready, running]) == [Status.CANCELLED, Status.RUNNING]

    @scenario
    async def test_of_replay(self, lab: Lab) -> None:
        job_id = await lab.put()
        worker = await lab.worker()
        await worker.settle(await worker.claim_one(), dead())
        _, storage = await faulty(lab, "replay")
        assert await insist(lambda: storage.replay([job_id])) == [Done.CONFLICT]
        assert (await lab.job(job_id)).life == 2
        assert await drain(lab) == [job_id]

    @scenario
    async def test_of_discard_and_reprioritise(self, lab: Lab) -> None:
        gone, moved = await lab.put(), await lab.put()
        await lab.storage.cancel([gone])
        _, storage = await faulty(lab, "discard", "reprioritise")
        assert await insist(lambda: storage.discard([gone])) == [Done.UNKNOWN]
        assert await insist(lambda: storage.reprioritise([moved], 0)) == [Done.DONE]
        assert ((await lab.job(moved)).priority, (await lab.storage.counts()).total) == (0, 1)

    @scenario
    async def test_of_pause_and_resume(self, lab: Lab) -> None:
        job_id = await lab.put()
        _, storage = await faulty(lab, "pause", "resume")
        assert not await insist(lambda: storage.pause("default"))
        assert await drain(lab) == []
        assert not await insist(lambda: storage.resume("default"))
        assert await drain(lab) == [job_id]

    @scenario
    async def test_of_promote_and_prune(self, lab: Lab) -> None:
        due, over = await lab.put(delay=1), await lab.put()
        await lab.storage.cancel([over])
        lab.clock.advance(101)
        _, storage = await faulty(lab, "promote", "prune")
        assert (await insist(lambda: storage.promote(10))).count == 0
        assert (await insist(lambda: storage.prune(retention(), 10))).jobs == 0
        assert await lab.storage.get(over) is None
        assert await drain(lab) == [due]

    @scenario
    async def test_of_lead_and_command(self, lab: Lab) -> None:
        worker = await lab.worker()
        _, storage = await faulty(lab, "lead", "command")
        assert await insist(lambda: storage.lead("me", 5))
        assert await insist(lambda: storage.command("w1", "quiet"))
        assert (await worker.beat()).command == "quiet"


class TestDeathBetweenVerbs:
    @pytest.mark.parametrize("after", ["claim", "hold", "begin", "progress", "settle", "release"])
    @scenario
    async def test_a_worker_that_dies_after_a_verb_strands_nothing(self, lab: Lab, after: str) -> None:
        """P1: the storage is closed without a word; one lease later everything runs elsewhere."""
        survivor = await lab.worker("survivor")
        await lab.arm(survivor)
        made = await lab.put_many(3)
        victim = await lab.worker("victim", storage=await lab.open())
        answer = await victim.exchange(slots=0 if after == "hold" else 1, extra=1)
        done: list[str] = []
        if after == "begin":
            await victim.begin(*answer.held)
        elif after == "progress":
            await victim.note(answer.running[0], percent=1.0)
        elif after == "settle":
            await victim.complete(*answer.running)
            done = ids(answer.running)
        elif after == "release":
            await victim.release(*answer.running)
        await victim.storage.close()
        await lab.pass_time(LEASE_S + 0.5, survivor)
        await lab.reap_all()
        assert sorted(done + await drain(lab, survivor)) == sorted(made)
        assert await lab.statuses(made) == [Status.COMPLETED] * 3

    @scenario
    async def test_a_producer_that_dies_after_enqueue_leaves_its_job(self, lab: Lab) -> None:
        producer = await lab.open()
        job = new_job("work")
        await producer.enqueue([job], queue_cap=QUEUE_CAP)
        await producer.close()
        assert await drain(lab) == [job.id]

    @scenario
    async def test_a_housekeeper_that_dies_between_orphans_and_reap_leaves_the_work_to_the_next(
        self, lab: Lab
    ) -> None:
        made = await lab.put_many(2)
        victim = await lab.worker("victim")
        await victim.claim(2)
        await lab.storage.declare_dead(victim.ref, "killed")
        housekeeper = await lab.open()
        assert len((await housekeeper.orphans(10)).jobs) == 2
        await housekeeper.close()
        assert sorted(await lab.reap_all()) == sorted(made)


async def listen(storage: Storage) -> None:
    async with storage.subscribe(["jobs"]):
        pass


REF = WorkerRef("w1", 1)
SEAT = Registration("w1", ("default",), (0, 1, 2, 3), (), 1, 6.0, 2.0)
VERBS: dict[str, Callable[[Storage], Awaitable[object]]] = {
    "enqueue": lambda storage: storage.enqueue([new_job("work")], queue_cap=9),
    "wait_for": lambda storage: storage.wait_for(new_job_id(), 0.01),
    "register": lambda storage: storage.register(SEAT),
    "exchange": lambda storage: storage.exchange(ExchangeRequest(REF, 1, slots=1)),
    "wait_for_work": lambda storage: storage.wait_for_work(REF, 0.01),
    "wait_for_notice": lambda storage: storage.wait_for_notice(REF, 0.01),
    "release": lambda storage: storage.release(REF, [Owned("x", 1)]),
    "transfer": lambda storage: storage.transfer(REF, [Owned("x", 1)]),
    "take_held": lambda storage: storage.take_held(REF, 1),
    "progress": lambda storage: storage.progress(REF, [ProgressNote("x", 1)]),
    "beat": lambda storage: storage.beat(REF, [], WorkerView(SEAT)),
    "declare_dead": lambda storage: storage.declare_dead(REF, "killed"),
    "orphans": lambda storage: storage.orphans(1),
    "reap": lambda storage: storage.reap([Reap("x", 1)]),
    "command": lambda storage: storage.command("w1", "stop"),
    "lead": lambda storage: storage.lead("me", 1.0),
    "tend": lambda storage: storage.tend("me", 1.0, promote=1, orphans=1),
    "promote": lambda storage: storage.promote(1),
    "prune": lambda storage: storage.prune(retention(), 1),
    "cancel": lambda storage: storage.cancel(["x"]),
    "replay": lambda storage: storage.replay(["x"]),
    "discard": lambda storage: storage.discard(["x"]),
    "reprioritise": lambda storage: storage.reprioritise(["x"], 1),
    "pause": lambda storage: storage.pause("q"),
    "resume": lambda storage: storage.resume("q"),
    "get": lambda storage: storage.get("x"),
    "history": lambda storage: storage.history("x"),
    "find": lambda storage: storage.find(Query()),
    "counts": lambda storage: storage.counts(),
    "queue_stats": lambda storage: storage.queue_stats(),
    "dlq_groups": lambda storage: storage.dlq_groups(1),
    "fleet": lambda storage: storage.fleet(),
    "mesh_views": lambda storage: storage.mesh_views(),
    "publish": lambda storage: storage.publish(Event("jobs")),
    "subscribe": lambda storage: listen(storage),
}


class TestClosedStorage:
    @pytest.mark.parametrize("verb", sorted(VERBS))
    @scenario
    async def test_a_verb_of_a_closed_storage_says_that_it_is_closed(self, lab: Lab, verb: str) -> None:
        storage = await lab.open()
        await storage.close()
        with pytest.raises(StorageUnreachable):
            await VERBS[verb](storage)
        assert (await lab.storage.counts()).total == 0

    @scenario
    async def test_closing_twice_is_no_error(self, lab: Lab) -> None:
        storage = await lab.open()
        await storage.close()
        await storage.close()

    @scenario
    async def test_every_verb_is_one_of_the_table(self, lab: Lab) -> None:
        """So that a verb added to the port is added here."""
        verbs = {name for name in vars(Storage) if not name.startswith("_")}
        assert verbs - {"info", "close"} == set(VERBS)
        assert all(callable(getattr(lab.storage, verb)) for verb in verbs)
