"""fluxmesh.client against a real server: each verb on both faces, lost answers, refusals, bounds."""

from __future__ import annotations

import asyncio
import inspect
import select
import socket
import socketserver
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from fluxmesh import errors
from fluxmesh.api.bodies import BULK_BYTES
from fluxmesh.client import AsyncClient, Client, ServerRefused, Submitted, verbs
from fluxmesh.client.answers import Metrics
from fluxmesh.client.problems import Problem, problem_error
from fluxmesh.config import Settings
from fluxmesh.ids import new_job_id
from fluxmesh.job import Attempt, Job, JobError, Outcome, Status
from fluxmesh.outcome import Charge, Transition
from fluxmesh.storage.values import Cancelled, DeadGroup, QueueStats, WorkerInfo
from tests.api.serving import PATIENCE_S, Api, served

OLD_ID = "01000000-0000-7000-8000-000000000000"


class OnALoop:
    """The verbs of an AsyncClient, each run to its end, so that both faces take the same tests."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self._runner = asyncio.Runner()
        self._runner.run(self._make(args, options))

    async def _make(self, args: Any, options: Any) -> None:
        self._client = AsyncClient(*args, **options)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        verb = getattr(self._client, name)

        def call(*args: Any, **options: Any) -> Any:
            answer = verb(*args, **options)
            return self._runner.run(gathered(answer) if isinstance(answer, AsyncIterator) else answer)

        return call

    def __enter__(self) -> OnALoop:
        return self

    def __exit__(self, *_: object) -> None:
        self._runner.run(self._client.close())
        self._runner.close()


async def gathered(items: AsyncIterator[Any]) -> list[Any]:
    return [item async for item in items]


FACES = {"blocking": Client, "async": OnALoop}


@pytest.fixture(params=FACES)
def face(request: pytest.FixtureRequest) -> Any:
    return FACES[request.param]


@pytest.fixture
def client(face: Any, api: Api) -> Iterator[Any]:
    with face(str(api.client.base_url)) as made:
        yield made


# -- verbs -----------------------------------------------------------------------------------------------


def test_a_submitted_job_comes_back_as_the_record_that_is_stored(client: Any, api: Api) -> None:
    told = client.submit(
        "mail", [1, "zwei"], {"to": ("a", "b")}, queue="post", priority="high", tags=["x"], max_retries=1
    )

    assert isinstance(told, Submitted)
    assert told.job is not None
    assert (told.id, told.status, told.deduplicated) == (told.job.id, Status.PENDING, False)
    assert (told.job.task, told.job.queue, told.job.priority, told.job.tags) == ("mail", "post", 1, ("x",))
    assert (told.job.args, told.job.kwargs) == ([1, "zwei"], {"to": ["a", "b"]})
    assert client.get(told.id) == api.run(api.storage.get(told.id)) == told.job


def test_a_point_in_time_may_be_a_datetime(client: Any) -> None:
    told = client.submit("t", run_at=datetime(2090, 1, 31, 8, tzinfo=UTC), timeout=3)
    assert told.job.timeout_seconds == 3
    assert (told.status, told.job.scheduled_at) == (Status.SCHEDULED, 3789532800.0)


def test_a_known_key_is_told_and_another_payload_is_a_conflict(client: Any) -> None:
    key = new_job_id()
    first = client.submit("t", [1], idempotency_key=key)
    again = client.submit("t", [1], idempotency_key=key)

    assert (again.id, first.deduplicated, again.deduplicated) == (first.id, False, True)
    with pytest.raises(errors.IdempotencyConflict, match=key):
        client.submit("t", [2], idempotency_key=key)


def test_many_jobs_are_judged_one_by_one(client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verbs, "BATCH_MAX", 2)  # several requests
    key = new_job_id()
    jobs = [
        {"task": "t", "args": [1], "idempotency_key": key},
        {"task": "t", "priority": "urgent"},
        {"task": "t", "args": [2], "idempotency_key": key},
        {"task": "t", "args": [1], "idempotency_key": key},
        {"task": "t"},
    ]
    first, wrong, conflict, again, last = client.submit_many(jobs)

    assert isinstance(wrong, errors.InvalidOption)
    assert wrong.field == "priority"
    assert isinstance(conflict, errors.IdempotencyConflict)
    assert (again.id, again.deduplicated) == (first.id, True)
    assert client.get(last.id).task == "t"
    assert client.submit_many([]) == []


def test_a_batch_never_has_more_bytes_than_the_server_takes() -> None:
    assert verbs.BULK_BYTES < BULK_BYTES
    item = verbs.Item("", None, b"x" * (verbs.BULK_BYTES // 3))
    sizes = [len(batch) for batch in verbs._batches(list(enumerate([item] * 7)))]
    assert sizes == [2, 2, 2, 1]


def test_a_waiting_client_hears_of_the_end_and_of_the_time_that_is_up(face: Any, tmp_path: Path) -> None:
    with served(tmp_path / "jobs.db") as api, face(str(api.client.base_url)) as client:
        job_id = client.submit("w", queue="w").id
        with pytest.raises(errors.WaitTimeout, match=r"PENDING after 0\.2 s"):
            client.wait(job_id, timeout=0.2)
        worker, job = api.start("w")
        end = Transition(Status.COMPLETED, Outcome.COMPLETED, Charge.ATTEMPT)
        ending = threading.Timer(0.2, api.end, (worker, job, end))
        ending.start()
        assert client.wait(job_id).status is Status.COMPLETED
        ending.join()


def test_a_job_is_cancelled_retried_and_moved(client: Any) -> None:
    job_id = client.submit("t").id
    client.reprioritise(job_id, "critical")
    assert client.get(job_id).priority == 0
    assert client.cancel(job_id) is Cancelled.CANCELLED
    with pytest.raises(errors.JobConflict):
        client.cancel(job_id)
    client.retry(job_id)
    assert (client.get(job_id).life, client.get(job_id).status) == (2, Status.PENDING)
    with pytest.raises(errors.JobConflict):
        client.retry(job_id)


def test_the_cancel_of_a_running_job_is_a_request(client: Any, api: Api) -> None:
    task = new_job_id()
    job_id = client.submit(task, queue=task).id
    api.start(task)
    assert client.cancel(job_id) is Cancelled.REQUESTED


def test_dead_letters_are_listed_grouped_replayed_and_discarded(client: Any, api: Api) -> None:
    task = new_job_id()
    first, second, third = (api.dead_letter(task) for _ in range(3))

    page = client.dlq(f"task:{task}", limit=2)
    assert [job.id for job in page.items] == [third, second]
    assert [job.id for job in client.dlq(f"task:{task}", cursor=page.next_cursor).items] == [first]
    expected = JobError("LuckError", "no luck", ("app.py:1 run",), "LuckError: no luck")
    assert page.items[0].error == expected
    [attempt] = client.history(first)
    assert isinstance(attempt, Attempt)
    assert (attempt.outcome, attempt.error) == (Outcome.FAILED, expected)
    [group] = [one for one in client.dlq_groups(limit=1_000) if one.task == task]
    assert isinstance(group, DeadGroup)
    assert (group.count, group.error) == (3, expected)

    client.dlq_discard(first)
    with pytest.raises(errors.JobNotFound):
        client.get(first)
    client.dlq_replay(second)
    with pytest.raises(errors.JobConflict, match="no dead letter"):
        client.dlq_replay(second)
    looked = client.dlq_replay_many(f"task:{task}", dry_run=True)
    assert (looked.ids, looked.dry_run, looked.more) == ((third,), True, False)
    assert client.dlq_replay_many(f"task:{task}").ids == (third,)
    assert client.dlq(f"task:{task}").items == ()


def test_all_jobs_of_a_query_are_walked_over(client: Any) -> None:
    task = new_job_id()
    ids = [one.id for one in client.submit_many([{"task": task}] * 7)]

    assert [job.id for job in client.iterate(f"task:{task}", page=3)] == ids[::-1]
    assert [job.id for job in client.iterate(f"task:{task}", page=3, limit=4)] == ids[:2:-1]
    assert list(client.iterate(f"task:{task}", limit=0)) == []
    page = client.jobs(f"task:{task}", limit=7)
    assert [job.id for job in page.items] == ids[::-1]


def test_queues_workers_and_numbers_are_told_as_values(client: Any, api: Api) -> None:
    name = f"east/{new_job_id()}"
    client.submit("t", queue=name, priority="low")
    assert (client.pause(name), client.pause(name)) == (True, False)
    [queue] = [one for one in client.queues() if one.queue == name]
    assert isinstance(queue, QueueStats)
    assert (queue.paused, queue.queued) == (True, (0, 0, 0, 1))
    metrics = client.metrics()
    assert isinstance(metrics, Metrics)
    assert (metrics.queues[name].low, metrics.queues[name].paused) == (1, True)
    assert metrics.total_jobs >= 1
    assert (client.resume(name), client.resume(name)) == (True, False)
    api.submit(task=(task := new_job_id()), queue=task)
    api.start(task)
    [worker] = [one for one in client.workers() if one.worker_id == task]
    assert isinstance(worker, WorkerInfo)
    assert worker.queues == (task,)
    client.health()


# -- refusals --------------------------------------------------------------------------------------------


def test_refusals_are_the_errors_of_the_sdk(client: Any) -> None:
    with pytest.raises(errors.JobNotFound):
        client.get(new_job_id())
    with pytest.raises(errors.JobGone):
        client.history(OLD_ID)
    with pytest.raises(errors.InvalidOption) as caught:
        client.jobs("colour:red")
    assert str(caught.value).count("q: ") <= 1
    with pytest.raises(errors.InvalidOption):
        client.jobs(limit=0)


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ({"args": [b"bytes"]}, errors.InvalidPayload),
        ({"args": [float("nan")]}, errors.InvalidPayload),
        ({"kwargs": {1: "one"}}, errors.InvalidPayload),
        ({"kwargs": {"at": datetime(2026, 1, 1, tzinfo=UTC)}}, errors.InvalidPayload),
        ({"run_at": datetime(2026, 1, 1)}, errors.InvalidOption),  # noqa: DTZ001 - it is what is refused
        ({"colour": "red"}, errors.InvalidOption),
        ({"queue": "a:b"}, errors.InvalidOption),
        ({"id": "7"}, errors.InvalidOption),
    ],
)
def test_what_json_would_change_or_the_server_refuse_is_not_sent(
    client: Any, options: dict[str, Any], kind: type[Exception]
) -> None:
    with pytest.raises(kind):
        client.submit("t", **options)


def test_a_full_queue_and_a_large_payload_are_told(face: Any, tmp_path: Path) -> None:
    settings = Settings(queue_cap=1, payload_limit_bytes=1_024)
    with served(tmp_path / "jobs.db", settings) as api, face(str(api.client.base_url)) as client:
        with pytest.raises(errors.PayloadTooLarge):
            client.submit("t", ["x" * 2_000])
        client.submit("t")
        with pytest.raises(errors.QueueFull):
            client.submit("t")


def test_a_token_is_sent_and_shown_nowhere(face: Any, tmp_path: Path) -> None:
    with served(tmp_path / "jobs.db", tokens=["s3cret"]) as api:
        url = str(api.client.base_url)
        with face(url, token="s3cret") as client:
            assert client.submit("t").status is Status.PENDING
            assert "s3cret" not in repr(client) + repr(vars(client))
        with face(url) as client, pytest.raises(errors.NotAuthorised):
            client.metrics()
        with face(url, token="wrong") as client, pytest.raises(errors.NotAuthorised):
            client.metrics()


@pytest.mark.parametrize(
    "url",
    [
        "127.0.0.1:8000", "ftp://host", "http://", "http://user:pw@host", "http://host?x=1", "http://host#x",
        "http://host:port", "http://host/api/v1/", "http://ho st", "", None, "http://[::1",
    ],
)  # fmt: skip
def test_an_address_that_is_none_is_refused(url: Any) -> None:
    for kind in (Client, AsyncClient):
        with pytest.raises(errors.InvalidOption) as caught:
            kind(url)
        assert caught.value.field == "url"
        assert "pw" not in str(caught.value)


@pytest.mark.parametrize(
    "options", [{"token": ""}, {"token": "a b"}, {"token": "ä"}, {"timeout_s": 0}, {"retries": -1}]
)
def test_an_option_out_of_range_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(errors.InvalidOption):
        Client("http://127.0.0.1:1", **options)


def test_every_code_of_ours_comes_back_as_its_class() -> None:
    for kind in (errors.InvalidPayload, errors.StorageRefused, errors.OutcomeUnknown, errors.QueueFull):
        error = problem_error(Problem(kind.code, "what", hint="try"), kind.http_status)
        assert type(error) is kind
        assert str(error) == "what (try)"
    option = problem_error(Problem("invalid_option", "queue: no", field="queue"), 422)
    assert isinstance(option, errors.InvalidOption)
    assert (option.field, option.message) == ("queue", "queue: no")
    refused = problem_error(Problem("method_not_allowed", "no"), 405)
    assert isinstance(refused, ServerRefused)
    assert (refused.status, refused.problem) == (405, "method_not_allowed")


# -- lost answers ----------------------------------------------------------------------------------------


class Between:
    """A TCP relay before the API. The answers to the first `drops` requests that reach it are lost: the
    server has done what was asked, and the client's connection ends."""

    def __init__(self, port: int, drops: int) -> None:
        self.drops = drops
        self.seen = b""
        outer = self

        class Handler(socketserver.BaseRequestHandler):
            def handle(self) -> None:
                with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S) as server:
                    while ready := select.select([self.request, server], [], [], PATIENCE_S)[0]:
                        data = ready[0].recv(1 << 20)
                        if not data:
                            return
                        if ready[0] is self.request:
                            outer.seen += data
                            server.sendall(data)
                        elif outer.drops > 0:
                            outer.drops -= 1
                            return
                        else:
                            self.request.sendall(data)

        self.server = socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"


@contextmanager
def between(api: Api, drops: int) -> Iterator[Between]:
    relay = Between(api.client.base_url.port or 0, drops)
    thread = threading.Thread(target=relay.server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield relay
    finally:
        relay.server.shutdown()
        relay.server.server_close()
        thread.join(PATIENCE_S)


def test_a_submission_whose_answers_are_lost_is_stored_once(face: Any, api: Api) -> None:
    task = new_job_id()
    with between(api, drops=2) as relay, face(relay.url) as client:
        told = client.submit(task)
        assert told.deduplicated is False
        assert relay.seen.count(b"POST /api/v1/jobs ") == 3
        relay.drops = 1
        [one, other] = client.submit_many([{"task": task}, {"task": task}])
        assert (one.deduplicated, other.deduplicated) == (False, False)
    with face(str(api.client.base_url)) as client:
        assert {job.id for job in client.iterate(f"task:{task}")} == {told.id, one.id, other.id}


def test_a_submission_that_never_got_an_answer_names_the_id_to_repeat_it_with(face: Any, api: Api) -> None:
    with between(api, drops=1) as relay, face(relay.url, retries=0) as client:
        with pytest.raises(errors.OutcomeUnknown) as caught:
            client.submit("t")
        job_id = caught.value.hint.split("'")[1]
        assert client.submit("t", id=job_id).id == job_id


def test_what_is_not_the_same_done_twice_is_not_repeated(face: Any, api: Api) -> None:
    with between(api, drops=0) as relay, face(relay.url) as client:
        job_id = client.submit("t").id
        relay.drops = 1
        with pytest.raises(errors.OutcomeUnknown):
            client.cancel(job_id)
        assert relay.drops == 0
        assert relay.seen.count(b"/cancel") == 1
        relay.drops = 2
        assert client.get(job_id).status is Status.CANCELLED  # a read is
        relay.drops = 1
        name = new_job_id()
        assert client.pause(name) is False  # the first try paused it
        assert client.resume(name) is True


def test_where_nobody_listens_is_told_soon_and_nothing_was_done(face: Any) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound, not listening: refused at once
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        with face(url, retries=1) as client:
            for verb in (client.health, client.metrics, lambda: client.cancel(new_job_id())):
                with pytest.raises(errors.StorageUnreachable, match=url):
                    verb()


def test_a_server_that_never_answers_is_given_up(face: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with face(url, retries=0, timeout_s=0.2) as client:
            with pytest.raises(errors.StorageUnreachable):
                client.metrics()
            with pytest.raises(errors.OutcomeUnknown):
                client.cancel(new_job_id())


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n<p>hi</p>", ServerRefused),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}", ServerRefused),
        (b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:1/\r\nContent-Length: 0\r\n\r\n", ServerRefused),
        (b"HTTP/1.1 502 Bad Gateway\r\nContent-Length: 0\r\n\r\n", errors.StorageUnreachable),
    ],
)
def test_what_is_no_answer_of_a_server_of_ours_is_told(
    face: Any, answer: bytes, kind: type[Exception]
) -> None:
    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            self.request.recv(1 << 16)
            self.request.sendall(answer)

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        url = f"http://127.0.0.1:{server.server_address[1]}"
        with face(url, retries=0) as client, pytest.raises(kind):
            client.metrics()
        server.shutdown()
        thread.join(PATIENCE_S)


def test_an_answer_that_only_trickles_is_given_up(face: Any) -> None:
    ended = threading.Event()

    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            self.request.recv(1 << 16)
            self.request.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n")
            while not ended.wait(0.02):  # far sooner than any read times out
                try:
                    self.request.sendall(b" ")
                except OSError:
                    return

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        url = f"http://127.0.0.1:{server.server_address[1]}"
        with face(url, retries=0, timeout_s=0.3) as client, pytest.raises(errors.StorageUnreachable):
            client.metrics()
        ended.set()
        server.shutdown()
        thread.join(PATIENCE_S)


def test_without_httpx_the_extra_is_named() -> None:
    code = "import sys; sys.modules['httpx'] = None; import fluxmesh.client"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 1
    assert "pip install 'fluxmesh[client]'" in done.stderr


# -- the two faces ---------------------------------------------------------------------------------------


def verbs_of(kind: type) -> dict[str, inspect.Signature]:
    return {
        name: inspect.signature(verb)
        for name, verb in inspect.getmembers(kind, inspect.isfunction)
        if not name.startswith("_")
    }


def test_both_faces_have_the_same_verbs_with_the_same_arguments_and_answers() -> None:
    blocking, awaited = verbs_of(Client), verbs_of(AsyncClient)
    assert blocking.keys() == awaited.keys()
    for name, signature in blocking.items():
        other = awaited[name]
        assert signature.parameters == other.parameters, name
        assert str(signature.return_annotation) == str(other.return_annotation).removeprefix("Async"), name
        assert inspect.iscoroutinefunction(getattr(AsyncClient, name)) or name == "iterate"
    assert inspect.signature(Client).parameters == inspect.signature(AsyncClient).parameters


def test_answers_are_the_structs_of_the_sdk() -> None:
    assert Client.get.__annotations__["return"] == Job.__name__
