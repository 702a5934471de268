"""Resources, middleware and outgoing headers as a program defines them on its Queue."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from fluxmesh import Context, InvalidOption, InvalidPayload, Queue
from fluxmesh.middleware import CallNext, JobRun, Submitting
from fluxmesh.outcome import End
from fluxmesh.resources import Scope

BOUND_S = 60


@pytest.fixture
def queue(tmp_path: Path) -> Iterator[Queue]:
    queue = Queue(db_path=tmp_path / "jobs.db", settings={"lease_s": 3})
    yield queue
    queue.close()


def test_a_resource_may_be_defined_after_the_task_that_takes_it(queue: Queue) -> None:
    @queue.task
    async def use(order_id: int, db_pool: Any, ctx: Context, *, session: Any) -> list[Any]:
        return [order_id, db_pool, session, ctx.attempt]

    with pytest.raises(InvalidPayload, match="missing a required argument: 'db_pool'"):
        use.delay(1)  # type: ignore[call-arg]

    @queue.worker_resource(scope=Scope.WORKER)
    def db_pool() -> str:
        return "pool"

    @queue.worker_resource(scope=Scope.TASK, name="session")
    def make_session(db_pool: str) -> str:
        return f"session of {db_pool}"

    assert db_pool() == "pool"  # the function stays what it was
    worker = queue.worker()
    worker.start()
    try:
        assert use.delay(7).result(timeout=BOUND_S) == [7, "pool", "session of pool", 1]  # type: ignore[call-arg]
        given = use.options(priority="high").delay(7, "mine", session=3)  # type: ignore[call-arg]
        assert given.result(timeout=BOUND_S) == [7, "mine", 3, 1]
        assert queue.submit(use.name, [8]).result(timeout=BOUND_S) == [8, "pool", "session of pool", 1]
        with pytest.raises(InvalidPayload) as caught:
            use.delay()  # type: ignore[call-arg]
        assert "it is use(order_id)" in caught.value.hint
    finally:
        worker.stop()


def test_two_resources_of_one_name_are_refused_where_they_are_written(queue: Queue) -> None:
    @queue.worker_resource
    def pool() -> int:
        return 1

    with pytest.raises(InvalidOption, match="'pool' is already defined"):
        queue.worker_resource(scope=Scope.TASK)(pool)


def test_headers_added_at_submission_reach_middleware_and_body(queue: Queue) -> None:
    local = threading.local()
    local.trace = "t1"

    @queue.add_outgoing
    def trace(submitting: Submitting) -> Mapping[str, str]:
        return {"trace": f"{local.trace}/{submitting.task}", "seen": ",".join(submitting.headers)}

    @queue.add_outgoing
    def mark(submitting: Submitting) -> Mapping[str, str]:
        return {"id": submitting.job_id, "mark": submitting.headers["trace"].upper()}

    seen: list[dict[str, str]] = []

    @queue.add_middleware
    async def note(run: JobRun, call_next: CallNext) -> End:
        seen.append(dict(run.headers))
        return await call_next()

    @queue.task(name="show", headers={"team": "shop"})
    def show(number: int, ctx: Context) -> dict[str, str]:
        return dict(ctx.headers)

    worker = queue.worker()
    worker.start()
    try:
        one = show.delay(1)  # type: ignore[call-arg]
        expected = {"team": "shop", "trace": "t1/show", "seen": "team", "id": one.id, "mark": "T1/SHOW"}
        assert one.result(timeout=BOUND_S) == expected == seen[0]
        assert one.record.headers == expected
        many = show.options(headers={"own": "1"}).map([(1,), (2,)])
        got = [job.result(timeout=BOUND_S) for job in many]
        assert [headers["id"] for headers in got] == [job.id for job in many]
        assert {headers["seen"] for headers in got} == {"own"}
        by_name = asyncio.run(queue.aio.submit("show", [1]))
        assert by_name.result(timeout=BOUND_S)["id"] == by_name.id
    finally:
        worker.stop()


def test_a_hook_that_fails_or_adds_nonsense_is_heard_where_the_job_is_submitted(queue: Queue) -> None:
    answers: list[Any] = [{"n": 1}, ["n"], {"x": "y" * 9_000}, {f"h{n}": "" for n in range(40)}]

    @queue.task
    def body() -> None: ...

    @queue.add_outgoing
    def first(submitting: Submitting) -> Any:
        return answers[0]

    for message in ("the value of 'n' is not text", "is not an object", "9,001 characters"):
        with pytest.raises(InvalidOption, match=f"headers: {message}"):
            body.delay()
        answers.pop(0)
    body.delay()

    @queue.add_outgoing
    def second(submitting: Submitting) -> Mapping[str, str]:
        return {f"k{n}": "" for n in range(40)}

    with pytest.raises(InvalidOption, match="headers: 80 headers"):
        body.delay()

    @queue.add_outgoing
    def third(submitting: Submitting) -> Mapping[str, str]:
        raise KeyError("trace")

    answers[0] = {}
    with pytest.raises(KeyError, match="trace"):
        body.delay()
    assert queue.counts().total == 1
