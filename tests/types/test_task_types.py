"""Tasks carry the types of their functions: mypy sees the arguments of delay and the type of a result."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from tests.architecture.gates import ROOT

PREAMBLE = """
from __future__ import annotations

from typing import Any

from fluxmesh import Context, Priority, Queue, Status

queue = Queue(db_path="tasks.db")


@queue.task
def bare(left: int, right: str = "") -> float:
    return 0.5


@queue.task(priority="high", max_retries=3, timeout=30, rate_limit="100/m", max_concurrent=5)
async def process_order(order_id: int, db_pool: Any = None, ctx: Context | None = None) -> str:
    return f"done {order_id}"


"""


def judged(directory: Path, body: str) -> list[str]:
    """What mypy --strict says of the body: "error: …" and "note: Revealed type …" in order of lines."""
    path = directory / "snippet.py"
    path.write_text(PREAMBLE + body, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--no-error-summary", str(path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert not done.stderr, done.stderr
    lines = [line.partition(": ")[2] for line in done.stdout.splitlines()]
    return [re.sub(r"builtins\.|fluxmesh\.(\w+\.)+|typing\.", "", line) for line in lines]


def test_a_correct_program_has_no_errors(tmp_path: Path) -> None:
    body = """
jobs = bare.map([(1, "a"), (2, "b")]) + bare.map([{"left": 1}])
bare.options(delay=5, priority=Priority.LOW, idempotency_key="k1").delay(8)
process_order.options(priority="low", run_at="2030-01-31T08:00:00Z").map([(1,), (2,)])
queue.submit("shop.mail", [1], {"to": "x"}, queue="mail", max_retries=0)
text: str = process_order.delay(7).result(timeout=10)
number: float = bare(1, right="x")


async def main() -> None:
    text: str = await process_order(7)
    job = await process_order.enqueue(7, ctx=None)
    text = await job
    await job.refresh()
    await job.aio.cancel()
    if job.status is Status.COMPLETED:
        print((await queue.aio.counts()).total, (await bare.enqueue_map([(1,)]))[0].id)
"""
    assert judged(tmp_path, body) == []


def test_types_of_the_function_reach_the_job_and_its_result(tmp_path: Path) -> None:
    body = """
reveal_type(bare)
reveal_type(process_order)
reveal_type(bare.delay(1))
reveal_type(bare.delay(1).result())
reveal_type(process_order.options(delay=1).delay(1).result())
reveal_type(process_order.map([(1,)]))
reveal_type(bare(1))
reveal_type(process_order(1))
"""
    revealed = re.compile('note: Revealed type is "(.*)"')
    matches = [revealed.fullmatch(line) for line in judged(tmp_path, body)]

    assert [match[1] for match in matches if match] == [
        "Task[[left: int, right: str =], float]",
        "AsyncTask[[order_id: int, db_pool: Any =, ctx: Context | None =], str]",
        "JobHandle[float]",
        "float",
        "str",
        "list[JobHandle[str]]",
        "float",
        "Coroutine[Any, Any, str]",
    ]


def test_wrong_arguments_and_unknown_options_are_found(tmp_path: Path) -> None:
    body = """
bare.delay("one")
bare.delay()
bare.delay(1, wrong=2)
process_order.options(priority="low").delay(order="x")
bare.options(retries=3)
queue.submit("t", prioritty=1)
bare.delay(1).result().upper()
Queue(max_retry=3)


async def main() -> None:
    await bare.enqueue("one")


@queue.task(ratelimit="1/s")
def third() -> None: ...
"""
    errors = [line for line in judged(tmp_path, body) if line.startswith("error:")]

    wanted = [
        'Argument 1 to "delay"',
        'Missing positional argument "left"',
        'Unexpected keyword argument "wrong"',
        'Unexpected keyword argument "order"',
        'Unexpected keyword argument "retries"',
        'Unexpected keyword argument "prioritty"',
        '"float" has no attribute "upper"',
        'Unexpected keyword argument "max_retry"',
        'Argument 1 to "enqueue"',
        "ratelimit",
    ]
    for part in wanted:
        assert any(part in line for line in errors), (part, errors)
