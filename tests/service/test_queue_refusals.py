"""What a program can get wrong is refused where it is written, with the option's name and a hint."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Iterator
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from fluxmesh import (
    Context,
    DuplicateTask,
    InvalidOption,
    InvalidPayload,
    PayloadTooLarge,
    Queue,
    Status,
    UsageError,
)
from fluxmesh.calls import AsyncTask


@pytest.fixture
def queue(tmp_path: Path) -> Iterator[Queue]:
    queue = Queue(db_path=tmp_path / "jobs.db")
    yield queue
    queue.close()


@pytest.fixture
def task(queue: Queue) -> AsyncTask[..., Any]:
    async def body(*args: Any, **kwargs: Any) -> None: ...

    return queue.task(name="body")(body)


def nothing_was_stored(queue: Queue) -> bool:
    return not Path(queue.url.removeprefix("sqlite:///")).exists() or queue.counts().total == 0


OPTIONS: list[tuple[dict[str, Any], str, str]] = [
    ({"prioritty": "high"}, "prioritty: unknown option", "did you mean 'priority'"),
    ({"retries": 3}, "retries: unknown option", "did you mean 'max_retries'"),
    ({"dealy": 3}, "dealy: unknown option", "did you mean 'delay'"),
    ({"zzz": 3}, "zzz: unknown option", "known: queue, priority, max_retries,"),
    ({"delay": timedelta(seconds=3)}, "delay_seconds: datetime.timedelta(seconds=3)", "seconds as a number"),
    ({"max_retries": -1}, "max_retries: -1 is out of range", "0 to"),
    ({"max_retries": 1.5}, "max_retries: 1.5 is not a whole number", ""),
    ({"max_retries": True}, "max_retries: True is not a whole number", ""),
    ({"timeout": -1}, "timeout_seconds: -1 is out of range", "more than 0"),
    ({"timeout": 0}, "timeout_seconds: 0 is out of range", "more than 0"),
    ({"timeout": math.nan}, "timeout_seconds: nan is not a number", ""),
    ({"timeout": "30"}, "timeout_seconds: '30' is not a number", ""),
    ({"timeout": 3, "timeout_seconds": 3}, "given twice", ""),
    ({"delay": math.nan}, "delay_seconds: nan is not a number", ""),
    ({"delay": -0.1}, "delay_seconds: -0.1 seconds is out of range", "10 years"),
    ({"delay": math.inf}, "delay_seconds: inf is not a number", ""),
    ({"delay": 5, "expires_in": 5}, "expires_in_seconds: the job would expire", ""),
    ({"priority": 4}, "priority: 4 is not a tier", "critical, high, default, low"),
    ({"priority": "urgent"}, "priority: 'urgent' is not a tier", "critical, high, default, low"),
    ({"queue": "high"}, "queue: 'high' is the name of a tier", "priority='high'"),
    ({"queue": "critical"}, "queue: 'critical' is the name of a tier", "priority='critical'"),
    ({"queue": ""}, "queue: is empty", "1 to 200"),
    ({"queue": "a:b"}, "brace or a colon", "dots or dashes"),
    ({"queue": "q" * 201}, "queue: 201 characters", "1 to 200"),
    ({"jitter": "some"}, "jitter: 'some' is unknown", "half"),
    ({"backoff_strategy": "magic"}, "backoff_strategy: 'magic' is unknown", "exponential"),
    ({"concurrency_limit": 2}, "concurrency_limit: given without concurrency_key", "name the key"),
    ({"tags": "one"}, "tags: is not a list", ""),
]


@pytest.mark.parametrize(("options", "message", "hint"), OPTIONS)
def test_a_bad_option_of_a_task_is_refused(
    queue: Queue, options: dict[str, Any], message: str, hint: str
) -> None:
    with pytest.raises(InvalidOption) as caught:
        queue.task(**options)(lambda: None)
    assert message in str(caught.value)
    assert hint in caught.value.hint
    assert len(queue.registry) == 0


@pytest.mark.parametrize(("options", "message", "hint"), OPTIONS)
def test_a_bad_option_of_a_call_is_refused(
    task: AsyncTask[..., Any], options: dict[str, Any], message: str, hint: str
) -> None:
    with pytest.raises(InvalidOption) as caught:
        task.options(**options)
    assert message in str(caught.value)
    assert hint in caught.value.hint


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"run_at": 5, "delay": 5}, "run_at: given together with delay_seconds"),
        ({"run_at": "30000-01-01T00:00:00Z"}, "run_at: '30000-01-01T00:00:00Z' is not a point in time"),
        ({"run_at": 884_541_340_800}, "run_at: 884541340800 is out of range (before the year 10000)"),
        ({"run_at": "2030-01-31 08:00"}, "run_at: the time has no UTC offset"),
        ({"run_at": datetime(2030, 1, 31)}, "run_at: the time has no UTC offset"),  # noqa: DTZ001
        ({"run_at": math.nan}, "run_at: nan is not a point in time"),
        ({"run_at": "tomorrow"}, "run_at: 'tomorrow' is not a point in time"),
        ({"id": "7"}, "id: '7' is not a UUIDv7"),
        ({"args": [1]}, "args: is no option"),
        ({"task": "other"}, "task: is no option"),
        ({"rate_limit": "1/s"}, "rate_limit: belongs to a task, not to one job (@queue.task(rate_limit=…))"),
    ],
)
def test_what_belongs_to_one_job_is_checked_when_it_is_given(
    task: AsyncTask[..., Any], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidOption) as caught:
        task.options(**options)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "options",
    [
        {"rate_limit": "fast"},
        {"rate_limit": "0/s"},
        {"max_concurrent": 0},
        {"on_lease_lost": "panic"},
        {"isolation": "thread"},
        {"isolation": True},
        {"memory_limit_mb": 200},
        {"memory_limit_mb": 200, "isolation": "none"},
        {"memory_limit_mb": 1, "isolation": "process"},
        {"memory_limit_mb": "200", "isolation": "process"},
        {"idempotency_key": "k"},
        {"run_at": 5},
        {"name": ""},
        {"name": "t" * (1 << 20)},
        {"name": "a\nb"},
    ],
)
def test_what_no_task_can_have_is_refused(queue: Queue, options: dict[str, Any]) -> None:
    with pytest.raises(InvalidOption) as caught:
        queue.task(**options)(lambda: None)
    assert len(str(caught.value)) < 300


def nested(levels: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(levels):
        value = [value]
    return value


class Thing:
    pass


BAD_ARGUMENTS: list[tuple[Callable[[], Any], type[UsageError], str]] = [
    (lambda: "x" * (1 << 20), PayloadTooLarge, "the limit is 1,048,576"),
    (lambda: nested(10_000), PayloadTooLarge, "more than 100 levels deep"),
    (lambda: math.nan, InvalidPayload, "nan is not a finite number"),
    (lambda: {"rate": [1.0, -math.inf]}, InvalidPayload, "-inf is not a finite number"),
    (lambda: b"raw", InvalidPayload, "bytes cannot be carried (send base64 text)"),
    (lambda: {1, 2}, InvalidPayload, "set cannot be carried (send a list)"),
    (lambda: Thing(), InvalidPayload, "Thing cannot be carried"),
    (lambda: datetime.now(UTC), InvalidPayload, "datetime cannot be carried"),
    (lambda: {1: "one"}, InvalidPayload, "the key 1 is not text"),
    (lambda: 1 << 64, InvalidPayload, "more than 64 bits"),
    (lambda: "\ud800", InvalidPayload, "not valid Unicode"),
]


@pytest.mark.parametrize(("make", "kind", "message"), BAD_ARGUMENTS)
@pytest.mark.parametrize("way", ["delay", "keyword", "enqueue", "map", "submit"])
def test_an_argument_that_cannot_be_carried_is_refused(
    queue: Queue,
    task: AsyncTask[..., Any],
    make: Callable[[], Any],
    kind: type[UsageError],
    message: str,
    way: str,
) -> None:
    value = make()
    ways: dict[str, Callable[[], Any]] = {
        "delay": lambda: task.delay(value),
        "keyword": lambda: task.delay(word=value),
        "enqueue": lambda: asyncio.run(task.enqueue(value)),
        "map": lambda: task.map([(1,), (value,)]),
        "submit": lambda: queue.submit("body", [value]),
    }
    with pytest.raises(kind) as caught:
        ways[way]()
    assert message in str(caught.value)
    assert way != "map" or str(caught.value).startswith("item 1: ")
    assert nothing_was_stored(queue)


def test_a_payload_of_exactly_the_limit_is_taken(task: AsyncTask[..., Any]) -> None:
    frame = len(b"\x92\x91\xdb0000\x80")  # [[text32], {}] in msgpack
    task.delay("x" * ((1 << 20) - frame))
    with pytest.raises(PayloadTooLarge):
        task.delay("x" * ((1 << 20) - frame + 1))


@pytest.mark.parametrize("item", [7, "text", [1], None])
def test_map_takes_tuples_and_dicts_only(queue: Queue, task: AsyncTask[..., Any], item: Any) -> None:
    with pytest.raises(InvalidPayload, match=r"item 1: .* neither a tuple nor a dict"):
        task.map([(1,), item])
    assert nothing_was_stored(queue)


def test_map_refuses_one_id_for_many(task: AsyncTask[..., Any]) -> None:
    one = task.options(id="018bcfe5-6800-7000-8000-000000000001")
    with pytest.raises(InvalidOption, match="id: belongs to one job"):
        one.map([(1,), (2,)])


@pytest.mark.parametrize("name", ["", "t" * (1 << 20), "a\x00b"])
def test_a_name_that_no_task_can_have_is_not_submitted(queue: Queue, name: str) -> None:
    with pytest.raises(InvalidOption, match="task: ") as caught:
        queue.submit(name)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(("args", "kwargs"), [("text", None), ({"a": 1}, None), ([], [1]), (7, None)])
def test_submitted_arguments_are_a_list_and_a_dict(queue: Queue, args: Any, kwargs: Any) -> None:
    with pytest.raises(InvalidPayload, match="args: "):
        queue.submit("t", args, kwargs)


def test_two_tasks_of_one_name_are_refused(queue: Queue) -> None:
    queue.task(name="same")(lambda: 1)
    with pytest.raises(DuplicateTask, match="'same' is already defined by tests") as caught:
        queue.task(name="same")(lambda: 2)
    assert "name=" in caught.value.hint


def yields() -> Iterator[int]:
    yield 1


async def yields_on_a_loop() -> AsyncIterator[int]:
    yield 1


@pytest.mark.parametrize(
    ("thing", "message"),
    [
        (7, "int is not a function"),
        ("text", "str is not a function"),
        (Thing, "type is not a function"),
        (partial(int, "7"), "partial is not a function"),
        (yields, "yields is a generator (return a list"),
        (yields_on_a_loop, "yields_on_a_loop is a generator (return a list"),
    ],
)
def test_only_a_function_becomes_a_task(queue: Queue, thing: Any, message: str) -> None:
    for decorate in (queue.task, queue.task(name="t")):
        with pytest.raises(InvalidOption) as caught:
            decorate(thing)
        assert message in str(caught.value)


def test_a_task_is_decorated_once(queue: Queue, task: AsyncTask[..., Any]) -> None:
    with pytest.raises(InvalidOption, match=r"'body' is a task already .*once"):
        queue.task(name="again")(task)


@pytest.mark.parametrize("verb", ["cancel", "replay", "discard"])
def test_one_id_is_no_list_of_ids(queue: Queue, verb: str) -> None:
    with pytest.raises(InvalidOption, match=r"job_ids: one text .*\['018b'\]"):
        getattr(queue, verb)("018b")
    with pytest.raises(InvalidOption, match="job_ids"):
        queue.reprioritise("018b", "high")


def test_a_large_payload_is_warned_of(task: AsyncTask[..., Any], caplog: pytest.LogCaptureFixture) -> None:
    task.delay("x" * (64 << 10))
    assert "large payload task='body'" in caplog.text
    caplog.clear()
    task.delay("x" * (63 << 10))
    assert caplog.text == ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"default_timeout": -1}, "default_timeout: -1 is out of range"),
        ({"default_timeout": math.nan}, "default_timeout: nan is not a number"),
        ({"default_max_retries": -1}, "default_max_retries: -1 is out of range"),
        ({"default_max_retries": 1.5}, "default_max_retries: 1.5 is not a whole"),
        ({"result_ttl": -1}, "result_ttl: -1"),
        ({"durability": "maybe"}, "durability: 'maybe'"),
        ({"namespace": "a b"}, "namespace: 'a b'"),
        ({"scheduler_batch_size": 0}, "scheduler_batch_size: 0"),
        ({"scheduler_batch_size": 1_001}, "scheduler_batch_size: 1001"),
        ({"settings": {"leas_s": 3}}, "leas_s: unknown setting in the arguments (did you mean 'lease_s'?)"),
        ({"settings": {"lease_s": 1}}, "lease_s: 1"),
        (
            {"url": "nosql://x"},
            "unknown storage 'nosql' (known: sqlite://, redis://, rediss://, redis+sentinel://",
        ),
        ({"url": "jobs.db"}, "'jobs.db' is a path and not a URL (write sqlite:///jobs.db)"),
        ({"durability": "full"}, "(process or power)"),
        ({"scheduler_batch_size": 0}, "(1 to 1,000)"),
        ({"settings": {"lease_s": "x"}}, "(2 to 86,400)"),
        ({"url": "sqlite:///a.db", "db_path": "b.db"}, "db_path: given together with url"),
    ],
)
def test_a_queue_with_an_impossible_setting_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidOption) as caught:
        Queue(**arguments)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("timeout", "'timeout'; did you mean default_timeout"),
        ("max_retry", "'max_retry'; did you mean default_max_retries"),
        ("lease_s", "did you mean settings={'lease_s'"),
        ("zzz", "unexpected argument 'zzz'$"),
    ],
)
def test_an_unknown_argument_of_a_queue_is_refused(name: str, meant: str) -> None:
    with pytest.raises(TypeError, match=meant):
        Queue(**{name: 3})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"queues": ["critical", "mail"]}, "'critical' is a tier and 'mail' is a queue"),
        ({"queues": []}, "queues: the list is empty"),
        ({"queues": ["critical"], "tiers": [0]}, "tiers: given together with tier names"),
        ({"tiers": []}, "tiers: the list is empty"),
        ({"tiers": ["urgent"]}, "'urgent' is not a tier"),
        ({"concurrency": 0}, "concurrency: 0"),
        ({"grace_s": -1}, "grace_s: -1"),
        ({"grace_s": math.nan}, "grace_s: nan"),
        ({"worker_id": "a:b"}, "worker_id: 'a:b' has a brace or a colon"),
        ({"reserve": {"critical": 8}}, "reserve: 8 of 8 slots"),
        ({"reserve": {"critical": -1}}, "reserve: -1 is not a number of slots"),
        ({"reserve": {"urgent": 1}}, "'urgent' is not a tier"),
        ({"on_lease_lost": "panic"}, "on_lease_lost: 'panic'"),
    ],
)
def test_a_worker_with_an_impossible_option_is_refused(
    queue: Queue, arguments: dict[str, Any], message: str
) -> None:
    for start in (queue.worker, queue.run_worker):
        with pytest.raises(InvalidOption) as caught:
            start(**arguments)
        assert message in str(caught.value)


def test_arguments_that_the_function_cannot_take_are_refused_where_they_are_given(queue: Queue) -> None:
    @queue.task
    async def pay(order: int, *, currency: str = "EUR", ctx: Context) -> None: ...

    wrong: Any = pay
    for call in (
        lambda: wrong.delay(),
        lambda: wrong.delay(1, curency="USD"),
        lambda: wrong.options(delay=5).delay(1, 2),
        lambda: queue.submit(pay.name, [1, 2]),
    ):
        with pytest.raises(InvalidPayload, match="the arguments do not fit") as caught:
            call()
        assert caught.value.hint == "it is pay(order, *, currency='EUR')"
    with pytest.raises(InvalidPayload, match="item 1: the arguments do not fit: missing"):
        pay.map([(1,), ()])
    assert nothing_was_stored(queue)


def test_a_task_whose_code_is_elsewhere_takes_any_arguments(queue: Queue) -> None:
    assert queue.submit("shop.elsewhere", [1, 2], {"x": 3}).status is Status.PENDING


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rate_limits": "1/s"}, "did you mean 'rate_limit'?"),
        ({"max_concurent": 1}, "did you mean 'max_concurrent'?"),
        ({"rate_limit": 100}, "rate_limit: 100 is not a rate"),
    ],
)
def test_a_slip_in_what_only_tasks_have_is_told(queue: Queue, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidOption) as caught:
        queue.task(**options)(lambda: None)
    assert message in str(caught.value)


@pytest.mark.parametrize("url", ["redis://:hidden@h/0", "redis://h/0?password=hidden"])
def test_the_text_of_a_queue_tells_no_password(url: str) -> None:
    queue = Queue(url)
    assert "hidden" not in repr(queue) + str(queue) + repr(queue.settings)
    assert "***" in repr(queue)
