"""What the threads that talk to SQLite answer when a verb fails."""

from __future__ import annotations

import asyncio
from typing import Any

import apsw
import pytest

from fluxmesh.errors import FluxMeshError, InvalidOption
from fluxmesh.storage.sqlite.engine import Call, Reader
from tests.unit.sqlite.bench import Bench


def problem_of(bench: Bench, verb: Any) -> BaseException | None:
    async def read() -> BaseException | None:
        loop = asyncio.get_running_loop()
        reader = Reader(bench.path)
        try:
            return reader.read(Call(verb, (), loop.create_future(), loop))[2]
        finally:
            reader.close()

    return asyncio.run(read())


def test_an_error_that_ends_the_transaction_is_told_itself(bench: Bench) -> None:
    def verb(db: apsw.Connection) -> None:
        db.execute("rollback")
        raise apsw.IOError("disk I/O error")

    problem = problem_of(bench, verb)
    assert isinstance(problem, FluxMeshError)
    assert "disk I/O error" in str(problem)


@pytest.mark.parametrize("text", ["\ud800", "a" * 200 + "\udcff"])
def test_text_that_is_no_unicode_is_the_callers_mistake(bench: Bench, text: str) -> None:
    problem = problem_of(bench, lambda db: list(db.execute("select ?", (text,))))
    assert isinstance(problem, InvalidOption)
    str(problem).encode()
