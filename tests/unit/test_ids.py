"""Job ids: UUIDv7 in one spelling, in the order of their making."""

from __future__ import annotations

import os
import uuid

import pytest

from fluxmesh.clock import SystemClock
from fluxmesh.ids import is_job_id, job_id_time_ms, new_job_id, new_nonce


def test_new_ids_are_uuid_v7_and_sort_by_their_making() -> None:
    made = [new_job_id() for _ in range(1_000)]
    assert len(set(made)) == 1_000
    assert made == sorted(made)
    assert {uuid.UUID(job_id).version for job_id in made} == {7}
    assert all(is_job_id(job_id) for job_id in made)


def test_an_id_tells_when_it_was_made() -> None:
    before = SystemClock().wall_us() // 1_000
    made = job_id_time_ms(new_job_id())
    after = SystemClock().wall_us() // 1_000
    # Ids made within one millisecond borrow from the next ones.
    assert before - 1 <= made <= after + 1_000


@pytest.mark.parametrize(
    "text",
    [
        "",
        "0",
        str(uuid.uuid4()),
        new_job_id().upper(),
        new_job_id().replace("-", ""),
        "{" + new_job_id() + "}",
        new_job_id() + "\n",
        " " + new_job_id(),
        new_job_id()[:-1] + "g",
    ],
)
def test_only_the_canonical_spelling_is_an_id(text: str) -> None:
    assert not is_job_id(text)


def test_nonces_are_not_met_twice() -> None:
    made = {new_nonce() for _ in range(1_000)}
    assert len(made) == 1_000
    assert {len(nonce) for nonce in made} == {16}


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_a_forked_child_does_not_go_on_with_its_parents_ids() -> None:
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(writing, new_job_id().encode())
        os._exit(0)
    os.waitpid(pid, 0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        child = pipe.read().decode()
    # The random part, for the time may well be the same.
    assert child[-12:] != new_job_id()[-12:]
