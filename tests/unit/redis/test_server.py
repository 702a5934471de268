"""What becomes of verbs when the server is not there, dies, hangs, refuses or forgets."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from fluxmesh.config import Settings
from fluxmesh.errors import InvalidOption, OutcomeUnknown, StorageRefused, StorageUnreachable
from fluxmesh.job import Outcome, Status
from fluxmesh.outcome import Charge, Transition
from fluxmesh.queue import Queue
from fluxmesh.storage.base import Storage
from fluxmesh.storage.registry import open_storage
from fluxmesh.storage.values import (
    ExchangeRequest,
    Settle,
    Settled,
    Verdict,
)
from fluxmesh.submission import prepare
from tests.redis_fleet import await_that
from tests.redis_server import Server
from tests.unit.redis.play import BOUND_S, claim, play, put, register

COMPLETED = Transition(Status.COMPLETED, Outcome.COMPLETED, Charge.ATTEMPT, result=b"\x07")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    server = Server(tmp_path)
    yield server
    server.stop()


def test_a_server_that_is_not_there_is_unreachable(server: Server) -> None:
    server.stop()

    async def open_it() -> None:
        await open_storage(server.url(), Settings(), create=True)

    with pytest.raises(StorageUnreachable, match=str(server.port)):
        asyncio.run(open_it())


@pytest.mark.parametrize("policy", ["allkeys-lru", "allkeys-random"])
def test_a_server_that_throws_keys_away_is_refused(server: Server, policy: str) -> None:
    with server.client() as client:
        client.config_set("maxmemory-policy", policy)
    with pytest.raises(StorageRefused, match=policy):
        play(server.url(), put)


def test_a_wrong_password_is_refused_and_not_shown(server: Server) -> None:
    with server.client() as client:
        client.config_set("requirepass", "right")
        with pytest.raises(StorageRefused) as caught:
            play(f"redis://:wrong-one@127.0.0.1:{server.port}/0", put)
    assert "wrong-one" not in str(caught.value)
    play(f"redis://:right@127.0.0.1:{server.port}/0", put)


@pytest.mark.parametrize("tail", ["?colour=red", "?socket_connect_timeout=perhaps"])
def test_an_option_that_the_url_cannot_have_is_refused(server: Server, tail: str) -> None:
    with pytest.raises(InvalidOption):
        play(server.url() + tail, put)


def test_a_database_that_the_server_has_not_is_refused(server: Server) -> None:
    with pytest.raises(StorageRefused):
        play(server.url(999), put)


def test_scripts_that_the_server_has_forgotten_are_sent_again(server: Server) -> None:
    async def scene(storage: Storage) -> None:
        assert (await put(storage)).verdict is Verdict.CREATED
        with server.client() as client:
            client.script_flush()
        assert (await put(storage)).verdict is Verdict.CREATED

    play(server.url(), scene)


def test_a_verb_whose_answer_does_not_come_has_an_unknown_outcome(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fluxmesh.storage.redis.dialer.ANSWER_S", 0.2)

    async def scene(storage: Storage) -> None:
        await put(storage)
        server.process.send_signal(signal.SIGSTOP)
        with pytest.raises(OutcomeUnknown):
            await put(storage)
        server.process.send_signal(signal.SIGCONT)
        assert (await storage.counts()).total in (1, 2)

    play(server.url(), scene)


def test_after_a_death_of_the_server_verbs_fail_and_then_go_on(server: Server) -> None:
    async def scene(storage: Storage) -> None:
        await put(storage)
        server.kill()
        with pytest.raises((StorageUnreachable, OutcomeUnknown)):
            await put(storage)
        with pytest.raises(StorageUnreachable):
            await put(storage)
        server.start()
        assert (await put(storage)).verdict is Verdict.CREATED

    play(server.url(), scene)


def test_whoever_waits_for_work_is_told_when_its_connection_was_lost_and_hears_again(server: Server) -> None:
    async def scene(storage: Storage) -> None:
        worker = await register(storage)
        assert (await claim(storage, worker, 1)).running == ()
        waiting = asyncio.create_task(storage.wait_for_work(worker, BOUND_S))
        with server.client() as client:
            client.client_kill_filter(_type="pubsub")
        assert await waiting
        assert await storage.wait_for_work(worker, BOUND_S)  # connected again: it may have missed something
        waiting = asyncio.create_task(storage.wait_for_work(worker, BOUND_S))
        await claim(storage, worker, 2)
        await put(storage)
        assert await waiting

    play(server.url(), scene)


def test_the_answer_of_a_verb_that_was_given_up_is_nobody_elses(server: Server) -> None:
    async def scene(storage: Storage) -> None:
        await put(storage)
        server.process.send_signal(signal.SIGSTOP)
        given_up = asyncio.create_task(storage.counts())
        await asyncio.sleep(0.05)
        given_up.cancel()
        server.process.send_signal(signal.SIGCONT)
        for _ in range(3):
            assert (await put(storage)).verdict is Verdict.CREATED
        assert (await storage.counts()).total == 4

    play(server.url(), scene)


def has_flags(server: Server) -> bool:
    return int(server.version().split(".")[0]) >= 7


def limit_memory(server: Server, bytes_: int) -> None:
    with server.client() as client:
        client.config_set("maxmemory", bytes_)


def test_when_memory_is_full_nothing_is_taken_in_and_what_runs_can_end(server: Server) -> None:
    async def scene(storage: Storage) -> None:
        worker = await register(storage)
        await put(storage)
        (job,) = (await claim(storage, worker, 1)).running
        limit_memory(server, 1)
        with pytest.raises(StorageUnreachable, match="OOM"):
            await put(storage)
        ends = ExchangeRequest(worker, 2, (Settle(job.id, job.token, COMPLETED),))
        if has_flags(server):
            assert (await storage.exchange(ends)).settled == (Settled.APPLIED,)
        limit_memory(server, 0)
        assert (await put(storage)).verdict is Verdict.CREATED

    play(server.url(), scene)


def test_without_script_flags_a_refused_end_changes_nothing_and_is_taken_later(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Redis 6.2 knows no flags; a newer one that is not told any does the same."""
    monkeypatch.setattr("fluxmesh.storage.redis.connection._FLAGS_SINCE", 1_000)

    async def scene(storage: Storage) -> None:
        worker = await register(storage)
        await put(storage)
        (job,) = (await claim(storage, worker, 1)).running
        before = await storage.get(job.id)
        limit_memory(server, 1)
        ends = ExchangeRequest(worker, 2, (Settle(job.id, job.token, COMPLETED),))
        for _ in range(2):
            with pytest.raises(StorageUnreachable, match=r"OOM.*memory is full"):
                await storage.exchange(ends)
        assert await storage.get(job.id) == before
        limit_memory(server, 0)
        assert (await storage.exchange(ends)).settled == (Settled.APPLIED,)

    play(server.url(), scene)


def test_without_script_flags_a_worker_keeps_its_ends_claims_nothing_and_goes_on_when_there_is_room(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fluxmesh.storage.redis.connection._FLAGS_SINCE", 1_000)
    queue = Queue(server.url(), settings={"lease_s": 2.0})
    gate = threading.Event()
    entered: list[int] = []

    @queue.task(name="work")
    def work(number: int) -> int:
        entered.append(number)
        gate.wait(BOUND_S)
        return number

    worker = queue.worker(concurrency=2)
    worker.start()
    try:
        jobs = work.map([(number,) for number in range(4)])
        await_that(lambda: len(entered) == 2, "two bodies run")
        limit_memory(server, 1)
        gate.set()
        with server.client() as client:
            refusals = client.info("stats")["total_error_replies"]
            await_that(
                lambda: client.info("stats")["total_error_replies"] >= refusals + 3, "ends are refused"
            )
        assert len(entered) == 2
        limit_memory(server, 0)
        assert [job.result(timeout=BOUND_S) for job in jobs] == [0, 1, 2, 3]
        assert sorted(entered) == [0, 1, 2, 3]  # each once: the ends had waited in the worker
    finally:
        worker.stop(1)
        queue.close()


def test_many_verbs_at_once_each_get_their_own_answer(server: Server) -> None:
    async def scene(storage: Storage) -> None:
        jobs = [prepare({"task": "work"}).job((n,), {}) for n in range(200)]
        answers = await asyncio.gather(*(storage.enqueue([job], queue_cap=1_000) for job in jobs))
        assert [answer.id for (answer,) in answers] == [job.id for job in jobs]
        assert (await storage.counts()).total == 200

    play(server.url(), scene)


def test_a_storage_that_is_closed_lets_the_verb_under_way_end(server: Server) -> None:
    async def scene(storage: Storage) -> None:
        await put(storage)
        under_way = asyncio.create_task(put(storage))
        await asyncio.sleep(0)
        await storage.close()
        assert (await under_way).verdict is Verdict.CREATED
        with pytest.raises(StorageUnreachable, match="closed"):
            await put(storage)

    play(server.url(), scene)


def test_a_server_that_wants_a_password_from_one_who_gives_none_is_refused(server: Server) -> None:
    with server.client() as client:
        client.config_set("requirepass", "right")
    with pytest.raises(StorageRefused):
        play(server.url(), put)
