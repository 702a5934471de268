"""wait_replicas: a job is accepted once so many replicas have it, and nobody is told so before."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from fluxmesh.api.problems import problem_of
from fluxmesh.config import Settings, load_settings
from fluxmesh.errors import InvalidOption, OutcomeUnknown
from fluxmesh.queue import Queue
from fluxmesh.storage.base import Storage
from fluxmesh.storage.registry import open_storage
from fluxmesh.storage.values import Enqueued, Verdict
from fluxmesh.submission import NewJob
from tests.redis_fleet import primary, replica
from tests.redis_server import Server
from tests.unit.redis.play import BOUND_S, new_job, play, put

ONE = Settings(wait_replicas=1)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    server = primary(tmp_path / "primary")
    yield server
    server.stop()


@pytest.fixture
def follower(server: Server, tmp_path: Path) -> Iterator[Server]:
    follower = replica(tmp_path / "replica", server)
    yield follower
    follower.stop()


async def enqueue_until_accepted(storage: Storage, job: NewJob) -> Enqueued:
    async with asyncio.timeout(BOUND_S):
        while True:
            with contextlib.suppress(OutcomeUnknown):
                return (await storage.enqueue([job], queue_cap=1_000))[0]


def test_an_accepted_job_is_on_the_replica(server: Server, follower: Server) -> None:
    async def scene(storage: Storage) -> None:
        with follower.client() as client:
            for _ in range(20):
                answer = await put(storage)
                assert answer.verdict is Verdict.CREATED
                assert client.exists(f"fluxmesh:jobs:{answer.id}")

    play(server.url(), scene, ONE)


def test_without_the_replica_the_outcome_is_unknown_and_a_repetition_waits_again(
    server: Server, follower: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scene(storage: Storage) -> None:
        job = new_job()
        await put(storage)
        monkeypatch.setattr("fluxmesh.storage.redis.connection.WAIT_MS", 200)
        follower.process.send_signal(signal.SIGSTOP)
        for _ in range(2):  # a job that is known does not pass for one that replicas have
            with pytest.raises(
                OutcomeUnknown, match=r"outcome unknown.*0 of 1 replicas.*safe to repeat"
            ) as caught:
                await storage.enqueue([job], queue_cap=1_000)
            told = problem_of(caught.value)  # as REST tells it
            assert (told["status"], told["code"]) == (503, "outcome_unknown")
        follower.process.send_signal(signal.SIGCONT)
        assert (await enqueue_until_accepted(storage, job)).verdict is Verdict.EXISTING
        with follower.client() as client:
            assert client.exists(f"fluxmesh:jobs:{job.id}")

    play(server.url(), scene, ONE)


@pytest.mark.usefixtures("follower")
@pytest.mark.parametrize("key", ["id", "idempotency_key", "unique_key"])
def test_a_repeated_submission_writes_again_so_that_the_wait_covers_the_first(
    server: Server, key: str
) -> None:
    """WAIT waits for what its own connection has written: that of a new connection would be nothing."""

    async def scene(storage: Storage) -> None:
        fields = {} if key == "id" else {key: "k"}
        job = new_job(**fields)
        again = job if key == "id" else new_job(**fields)
        await storage.enqueue([job], queue_cap=1_000)
        with server.client() as client:
            before = client.info("persistence")["rdb_changes_since_last_save"]
            (answer,) = await storage.enqueue([again], queue_cap=1_000)
            after = client.info("persistence")["rdb_changes_since_last_save"]
        assert (answer.verdict, answer.id) == (Verdict.EXISTING, job.id)
        assert after > before

    play(server.url(), scene, ONE)


def test_scripts_that_were_forgotten_are_sent_again_with_their_wait(server: Server, follower: Server) -> None:
    async def scene(storage: Storage) -> None:
        with server.client() as client:
            client.script_flush()
        answer = await put(storage)
        with follower.client() as client:
            assert client.exists(f"fluxmesh:jobs:{answer.id}")

    play(server.url(), scene, ONE)


def test_nothing_waits_unless_it_is_asked_for(server: Server) -> None:
    async def scene(storage: Storage) -> None:
        with server.client() as client:
            client.config_resetstat()
            await put(storage)
            calls = client.info("commandstats")
        assert "cmdstat_wait" not in calls

    play(server.url(), scene)


def test_an_awaited_wait_blocks_nobody_else(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fluxmesh.storage.redis.connection.WAIT_MS", 200)

    async def scene(storage: Storage) -> None:
        waiting = asyncio.create_task(put(storage))
        while not waiting.done():
            await storage.counts()
        with pytest.raises(OutcomeUnknown):
            await waiting

    play(server.url(), scene, ONE)


@pytest.mark.parametrize("url", ["sqlite:///jobs.db", "memory://"])
def test_a_storage_without_replicas_refuses_to_wait_for_them(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InvalidOption, match=r"wait_replicas.*no replicas"):
        Queue(url, wait_replicas=1)
    with pytest.raises(InvalidOption, match="wait_replicas"):
        asyncio.run(open_storage(url, ONE, create=True))
    assert not list(tmp_path.iterdir())


def test_it_is_a_setting() -> None:
    assert load_settings(environ={"FLUXMESH_WAIT_REPLICAS": "2"}).wait_replicas == 2
    with pytest.raises(InvalidOption, match="wait_replicas"):
        load_settings({"wait_replicas": -1})
