"""Submitting: what is stored for a call, a map, a name; keys, caps, precedence; lists and counts."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fluxmesh import IdempotencyConflict, InvalidOption, JobNotFound, Priority, Queue, QueueFull, Status
from fluxmesh.clock import ManualClock
from fluxmesh.ids import new_job_id
from fluxmesh.storage.values import Cancelled, Done
from tests.service.hands import Hands


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def queue(tmp_path: Path, clock: ManualClock) -> Iterator[Queue]:
    queue = Queue(db_path=tmp_path / "jobs.db", clock=clock)
    yield queue
    queue.close()


def test_calling_a_task_calls_its_function(queue: Queue) -> None:
    @queue.task
    def double(number: int) -> int:
        """Twice as much."""
        return 2 * number

    @queue.task(priority="high")
    async def triple(number: int) -> int:
        return 3 * number

    assert double(21) == 42
    assert asyncio.run(triple(14)) == 42
    assert (double.__doc__, double.__name__) == ("Twice as much.", "double")
    assert {definition.name for definition in queue.registry} == {double.name, triple.name}
    assert double.name == f"{__name__}.test_calling_a_task_calls_its_function.double"


def test_a_call_is_stored_with_its_arguments(queue: Queue) -> None:
    @queue.task(name="add")
    def add(*numbers: int, **more: Any) -> int:
        return 0

    record = add.delay(1, 2, deep={"list": [1.5, None, "ü"]}).record

    assert (record.task, record.status) == ("add", Status.PENDING)
    assert (record.args, record.kwargs) == ([1, 2], {"deep": {"list": [1.5, None, "ü"]}})
    assert (record.queue, record.priority) == ("default", Priority.DEFAULT)


def test_the_call_goes_before_the_task(queue: Queue) -> None:
    @queue.task(name="t", priority="high", queue="mail", tags=["a"], delay=60, max_retries=5)
    def body() -> None: ...

    plain = body.delay().record
    assert (plain.priority, plain.queue, plain.tags) == (Priority.HIGH, "mail", ("a",))
    assert (plain.status, plain.max_retries) == (Status.SCHEDULED, None)  # the worker knows its task's own

    own = body.options(priority=Priority.LOW, queue="sms", tags=["b"], delay=0, max_retries=1).delay().record
    assert (own.priority, own.queue, own.tags) == (Priority.LOW, "sms", ("b",))
    assert (own.status, own.max_retries) == (Status.PENDING, 1)


def test_a_point_in_time_replaces_the_delay_of_the_task(queue: Queue, clock: ManualClock) -> None:
    @queue.task(name="t", delay=60)
    def body() -> None: ...

    due_s = clock.wall_us() / 1e6 + 5
    assert body.options(run_at=due_s).delay().record.scheduled_at == pytest.approx(due_s)
    both = body.options(run_at=due_s).options(delay=7).delay().record
    assert both.scheduled_at == pytest.approx(due_s + 2)


def test_options_make_a_copy(queue: Queue) -> None:
    @queue.task(name="t")
    def body() -> None: ...

    low = body.options(priority="low")
    assert low.name == "t"
    assert low.delay().record.priority == Priority.LOW
    assert body.delay().record.priority == Priority.DEFAULT


def test_map_submits_tuples_and_dicts_in_order(queue: Queue) -> None:
    @queue.task(name="t")
    def body(number: int) -> None: ...

    count = 2_345  # more than two batches, and a part of one
    jobs = body.map((index,) if index % 2 else {"number": index} for index in range(count))

    assert len({job.id for job in jobs}) == count
    assert [jobs[0].record.kwargs, jobs[2_001].record.args] == [{"number": 0}, [2_001]]
    assert queue.counts().by_status[Status.PENDING] == count
    hands = Hands(queue)
    assert [hands.complete(), hands.complete()] == [jobs[0].id, jobs[1].id]


def test_map_of_nothing_stores_nothing(queue: Queue) -> None:
    @queue.task(name="t")
    def body() -> None: ...

    assert body.map([]) == []
    assert asyncio.run(body.enqueue_map([])) == []


def test_options_apply_to_a_map(queue: Queue) -> None:
    @queue.task(name="t")
    def body(number: int) -> None: ...

    jobs = asyncio.run(body.options(priority="low", delay=5).enqueue_map([(1,), (2,)]))
    assert [(job.record.priority, job.record.status) for job in jobs] == [(3, Status.SCHEDULED)] * 2


def test_one_key_makes_one_job(queue: Queue) -> None:
    """C21: reordered keyword arguments are the same payload, another amount is a conflict."""

    @queue.task(name="charge")
    def charge(**body: Any) -> None: ...

    keyed = charge.options(idempotency_key="order-881")
    first = keyed.delay(amount=10, cur="EUR")
    again = keyed.delay(cur="EUR", amount=10)

    assert (again.id, first.deduplicated, again.deduplicated) == (first.id, False, True)
    with pytest.raises(IdempotencyConflict, match=f"'order-881' belongs to job {first.id}"):
        keyed.delay(amount=11, cur="EUR")
    assert queue.counts().total == 1


def test_fifty_threads_with_one_key_make_one_job(queue: Queue) -> None:
    @queue.task(name="charge")
    def charge(amount: int) -> None: ...

    keyed = charge.options(idempotency_key="order-881")
    gate = threading.Barrier(50)
    jobs = []

    def submit() -> None:
        gate.wait(30)
        jobs.append(keyed.delay(10))

    threads = [threading.Thread(target=submit) for _ in range(50)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)

    assert len(jobs) == 50
    assert len({job.id for job in jobs}) == 1
    assert sum(not job.deduplicated for job in jobs) == 1
    assert queue.counts().total == 1


def test_namespaces_have_keys_of_their_own(queue: Queue, tmp_path: Path) -> None:
    other = Queue(db_path=tmp_path / "jobs.db", namespace="beta")
    first = queue.task_named("charge").options(idempotency_key="k").delay(10)
    second = other.task_named("charge").options(idempotency_key="k").delay(99)
    assert first.id != second.id
    assert not second.deduplicated
    with pytest.raises(JobNotFound):
        other.get(first.id)
    other.close()


def test_a_unique_key_gives_its_holder_until_that_has_ended(queue: Queue) -> None:
    """C20."""

    @queue.task(name="sync")
    def sync(number: int) -> None: ...

    unique = sync.options(unique_key="sync-42")
    first = unique.delay(1)
    assert (unique.delay(2).id, unique.delay(3).deduplicated) == (first.id, True)
    first.cancel()
    second = unique.delay(4)
    assert second.id != first.id
    assert not second.deduplicated


def test_an_id_of_ones_own_is_kept_and_known_again(queue: Queue) -> None:
    own = new_job_id()
    task = queue.task_named("t").options(id=own)
    first, again = task.delay(), task.delay()
    assert (first.id, first.deduplicated, again.id, again.deduplicated) == (own, False, own, True)


def test_a_full_queue_refuses_and_says_what_was_stored(tmp_path: Path) -> None:
    queue = Queue(db_path=tmp_path / "jobs.db", settings={"queue_cap": 3})
    task = queue.task_named("t")
    task.delay()
    with pytest.raises(QueueFull, match=r"item 2 of 4: queue 'default' holds 3 jobs") as caught:
        task.map([(index,) for index in range(4)])
    assert len(caught.value.accepted) == 2
    assert queue.get(caught.value.accepted[1]).record.args == [1]
    with pytest.raises(QueueFull, match=r"^queue 'default' holds 3"):
        task.delay()
    assert queue.counts().total == 3
    task.options(queue="other").delay()  # the cap is one queue's
    queue.close()


def test_a_map_of_several_round_trips_tells_all_that_was_stored(tmp_path: Path) -> None:
    queue = Queue(db_path=tmp_path / "jobs.db", settings={"queue_cap": 1_500})
    with pytest.raises(QueueFull, match=r"item 1,500 of 2,500: ") as caught:
        queue.task_named("t").map([(index,) for index in range(2_500)])
    assert len(set(caught.value.accepted)) == 1_500 == queue.counts().total
    assert queue.get(caught.value.accepted[-1]).record.args == [1_499]
    queue.close()


def test_a_conflict_inside_a_map_names_the_item(queue: Queue) -> None:
    keyed = queue.task_named("t").options(idempotency_key="k")
    with pytest.raises(IdempotencyConflict, match="item 1 of 2: idempotency key 'k'") as caught:
        keyed.map([(1,), (2,)])
    assert len(caught.value.accepted) == 1


def test_jobs_are_submitted_by_the_names_of_their_tasks(queue: Queue) -> None:
    job = queue.submit("shop.mail", [1], {"to": "x"}, queue="mail", priority="critical", max_retries=0)
    record = job.record
    assert (record.task, record.args, record.kwargs) == ("shop.mail", [1], {"to": "x"})
    assert (record.queue, record.priority, record.max_retries) == ("mail", 0, 0)
    assert asyncio.run(queue.aio.submit("shop.mail")).record.args == []
    with pytest.raises(InvalidOption, match="did you mean 'priority'"):
        queue.submit("shop.mail", prioritty=1)  # type: ignore[call-arg]


def test_a_known_name_brings_its_options_along(queue: Queue) -> None:
    @queue.task(name="t", priority="high")
    def body() -> None: ...

    assert queue.submit("t").record.priority == Priority.HIGH
    assert queue.task_named("t").options(priority="low").delay().record.priority == Priority.LOW


def test_a_handle_for_a_stored_job_is_got_by_its_id(queue: Queue) -> None:
    job = queue.submit("t", [1])
    assert queue.get(job.id).record.args == [1]
    with pytest.raises(JobNotFound, match="no job 018bcfe5"):
        queue.get("018bcfe5-6800-7000-8000-000000000001")


def test_jobs_are_found_by_queries_and_pages(queue: Queue) -> None:
    jobs = queue.task_named("t").map([(index,) for index in range(5)])
    queue.submit("other", queue="mail")
    first = queue.find("task:t", limit=3)
    rest = queue.find("task:t", limit=3, cursor=first.next_cursor)
    assert [job.id for job in (*first.items, *rest.items)] == [job.id for job in reversed(jobs)]
    assert [job.task for job in queue.find("queue:mail").items] == ["other"]
    assert len(queue.find().items) == 6
    with pytest.raises(InvalidOption, match="did you mean 'state'"):
        queue.find("sate:pending")
    with pytest.raises(InvalidOption, match="limit"):
        queue.find(limit=0)


def test_many_jobs_are_cancelled_replayed_moved_and_discarded(queue: Queue) -> None:
    ids = [job.id for job in queue.task_named("t").map([(1,), (2,)])]
    unknown = new_job_id()
    assert queue.reprioritise([*ids, unknown], "high") == [Done.DONE, Done.DONE, Done.UNKNOWN]
    assert queue.replay(ids) == [Done.CONFLICT] * 2
    assert queue.cancel([*ids, unknown]) == [Cancelled.CANCELLED, Cancelled.CANCELLED, Cancelled.UNKNOWN]
    assert queue.replay(ids[:1]) == [Done.DONE]
    assert queue.discard(ids) == [Done.CONFLICT, Done.DONE]
    assert queue.counts().total == 1


def test_a_paused_queue_starts_nothing(queue: Queue) -> None:
    @queue.task(name="t", queue="mail")
    def body() -> None: ...

    body.delay()
    assert (queue.pause("mail"), queue.pause("mail")) == (True, False)
    [stats] = [entry for entry in queue.stats() if entry.queue == "mail"]
    assert stats.paused
    hands = Hands(queue, serves="mail")
    with pytest.raises(ValueError, match="not enough values"):
        hands.claim()
    assert (queue.resume("mail"), queue.resume("mail")) == (True, False)
    assert hands.claim().queue == "mail"


def test_workers_are_listed_with_the_fields_of_the_contract(queue: Queue) -> None:
    assert queue.list_workers() == []
    epoch = Hands(queue).ref.epoch
    [worker] = queue.list_workers()
    assert (worker.worker_id, worker.epoch, worker.queues) == ("hands", epoch, ("default",))
    assert (worker.capacity, worker.running) == (1, 0)
    for name in ("hostname", "pid", "status", "last_heartbeat"):
        assert hasattr(worker, name)


def test_dead_letters_are_grouped_by_their_kind(queue: Queue) -> None:
    @queue.task(name="t", max_retries=0)
    def body(number: int) -> None: ...

    body.map([(1,), (2,)])
    hands = Hands(queue)
    hands.fail("order 17 is missing")
    hands.fail("order 18 is missing")
    [group] = queue.dead_letter_groups()
    assert (group.task, group.reason, group.count) == ("t", "error", 2)
    assert asyncio.run(queue.aio.dead_letter_groups(1)) == [group]


def test_the_storage_tells_what_it_is(queue: Queue) -> None:
    info = queue.info()
    assert (info.kind, info.namespace) == ("sqlite", "fluxmesh")
    assert info.where == queue.url.removeprefix("sqlite:///")
    assert "jobs.db" in repr(queue)


def test_a_program_and_its_worker_agree_on_the_names_of_its_tasks(tmp_path: Path) -> None:
    """A module that is run as a program is not called __main__ by the worker that imports it."""
    (tmp_path / "shop.py").write_text(
        "from fluxmesh import Queue\n"
        "queue = Queue(db_path='jobs.db')\n"
        "@queue.task\n"
        "def mail(): ...\n"
        "if __name__ == '__main__': print(mail.name)\n"
    )
    for way in (["shop.py"], ["-m", "shop"]):
        done = subprocess.run(
            [sys.executable, *way], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True
        )
        assert done.stdout.strip() == "shop.mail"
