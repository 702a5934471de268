"""The built-in tasks do what their names say; their results fit into storage."""

from __future__ import annotations

import asyncio
import hashlib
import math
from pathlib import Path
from typing import Any

import pytest

from fluxmesh import tasks
from fluxmesh.codec import encode_result
from fluxmesh.config import Settings
from fluxmesh.context import Context
from fluxmesh.errors import InvalidOption
from fluxmesh.job import JobOptions
from fluxmesh.storage.values import ClaimedJob

CONTRACT_NAMES = {
    "file_digest",
    "flaky_pipeline",
    "failing_task",
    "slow_task",
    "batch_process",
    "heavy_computation",
    "webhook_delivery",
}


def context(attempts: int = 0) -> Context:
    job = ClaimedJob(
        id="0",
        token=1,
        task="t",
        queue="default",
        tier=2,
        payload=b"",
        options=None,
        attempts=attempts,
        crashes=0,
        snoozes=0,
        interruptions=0,
        life=1,
    )
    return Context(job, JobOptions(), lambda _: None)


def test_the_registry_has_the_tasks_of_the_contract_by_their_bare_names() -> None:
    registry = tasks.builtin_registry(Settings())
    assert {definition.name for definition in registry} == CONTRACT_NAMES
    with_context = {definition.name for definition in registry if definition.takes_context == "ctx"}
    assert with_context == CONTRACT_NAMES - {"file_digest", "failing_task"}


@pytest.mark.parametrize("chunk_bytes", [1, 2, 3, 7, 1 << 20])
@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\n",
        b"one",
        b" one two\nthree  \n\n four",
        b"a b c d e f g",
        b"\xff\xfe\x00 x\x0by",
        b"   \t\n ",
    ],
)
def test_a_digest_is_the_same_whatever_the_chunks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes, chunk_bytes: int
) -> None:
    monkeypatch.setattr(tasks, "CHUNK_BYTES", chunk_bytes)
    path = tmp_path / "file"
    path.write_bytes(content)

    assert tasks.file_digest(str(path)) == {
        "path": str(path),
        "sha256": hashlib.sha256(content).hexdigest(),
        "bytes": len(content),
        "lines": content.count(b"\n"),
        "words": len(content.split()),
    }


def test_a_missing_file_fails_and_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nowhere"):
        tasks.file_digest(str(tmp_path / "nowhere"))


def test_the_flaky_pipeline_fails_on_its_first_attempts_only() -> None:
    for attempts in range(2):
        with pytest.raises(tasks.FlakyFailure, match=f"k7: attempt {attempts + 1} of 2"):
            tasks.flaky_pipeline(2, "k7", context(attempts))
    assert tasks.flaky_pipeline(2, "k7", context(2)) == {"key": "k7", "attempts": 3}


def test_the_failing_task_fails_for_the_reason_given() -> None:
    with pytest.raises(tasks.DeliberateFailure, match="because"):
        tasks.failing_task("because")


def test_a_batch_reports_every_item() -> None:
    ctx = context()
    result = asyncio.run(tasks.batch_process(["a", {"b": 1}], ctx))
    assert (result["total"], result["processed_count"]) == (2, 2)
    assert [entry["item"] for entry in result["results"]] == ["a", {"b": 1}]
    assert ctx.reported == (100.0, "2 of 2")
    assert encode_result(result)


def test_an_empty_batch_is_done_at_once() -> None:
    result = asyncio.run(tasks.batch_process([], context()))
    assert result == {"total": 0, "processed_count": 0, "results": []}


def test_the_slow_task_reports_how_far_it_is() -> None:
    ctx = context()
    assert asyncio.run(tasks.slow_task(0, ctx)) == {"duration": 0}
    assert ctx.reported == (95.0, "step 20 of 20")


def test_the_heavy_computation_computes() -> None:
    ctx = context()
    result = tasks.heavy_computation(250_000, ctx)
    assert result["sum"] == pytest.approx(math.fsum(math.sqrt(n) for n in range(1, 250_001)))
    assert ctx.reported == (100.0, None)
    assert tasks.heavy_computation(0, context()) == {"iterations": 0, "sum": 0.0}


def test_a_cancelled_computation_stops_early() -> None:
    ctx = context()
    ctx.mark_cancelled()
    tasks.heavy_computation(10_000_000, ctx)
    assert ctx.reported == (1.0, None)


@pytest.mark.parametrize("value", [-1, True, math.nan, math.inf, 86_401])
def test_an_impossible_duration_is_refused(value: Any) -> None:
    with pytest.raises(InvalidOption, match="duration"):
        asyncio.run(tasks.slow_task(value, context()))


@pytest.mark.parametrize("value", [-1, True, 1.5, 10**10])
def test_an_impossible_count_of_iterations_is_refused(value: Any) -> None:
    with pytest.raises(InvalidOption, match="iterations"):
        tasks.heavy_computation(value, context())
