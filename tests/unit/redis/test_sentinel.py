"""The primary that Sentinels know: found at each new connection, and asked itself whether it is one."""

from __future__ import annotations

import asyncio
import itertools
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from fluxmesh.config import Settings
from fluxmesh.errors import OutcomeUnknown, StorageError, StorageRefused, StorageUnreachable
from fluxmesh.storage.base import Storage
from fluxmesh.storage.registry import open_storage
from fluxmesh.storage.values import Enqueued, Verdict
from fluxmesh.submission import NewJob
from tests.redis_fleet import SERVICE, Sentinel, await_that, primary, replica, role, sentinel_url
from tests.redis_server import Server, free_port
from tests.unit.redis.play import claim, new_job, play, put, register

FAILOVER_S = 20.0


class Pair:
    """A primary, its replica, and a Sentinel that watches them."""

    def __init__(self, folder: Path) -> None:
        self.first = primary(folder / "first")
        self.second = replica(folder / "second", self.first)
        self.sentinel = Sentinel(folder / "sentinel", self.first)
        self.sentinel.await_replicas(1)
        self.url = sentinel_url(self.sentinel)

    def stop(self) -> None:
        self.sentinel.stop()
        self.first.stop()
        self.second.stop()


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    pair = Pair(tmp_path)
    yield pair
    pair.stop()


async def put_until_taken(storage: Storage, job: NewJob | None = None) -> tuple[Enqueued, list[StorageError]]:
    """Submit one job as a careful caller does: the same job again, until it is accepted."""
    job, errors = job or new_job(), []
    async with asyncio.timeout(FAILOVER_S):
        while True:
            try:
                return (await storage.enqueue([job], queue_cap=1_000))[0], errors
            except (StorageUnreachable, OutcomeUnknown) as error:
                errors.append(error)
                await asyncio.sleep(0.05)


def test_the_primary_is_found_and_lost_and_found_again(pair: Pair) -> None:
    async def scene(storage: Storage) -> None:
        worker = await register(storage)
        await claim(storage, worker, 1)
        first = await put(storage)
        with pair.second.client() as client:
            await_that(lambda: client.exists(f"fluxmesh:jobs:{first.id}"), "the replica has it")
        pair.first.kill()
        taken, errors = await put_until_taken(storage)
        assert taken.verdict is Verdict.CREATED
        assert errors
        assert all("NOSCRIPT" not in str(error) for error in errors)
        assert pair.sentinel.primary_port() == pair.second.port
        assert (await storage.counts()).total == 2
        # The subscriber has moved as well.
        await storage.wait_for_work(worker, 1)
        claimed = await claim(storage, worker, 2)
        assert len(claimed.running) == 1
        assert len((await claim(storage, worker, 3)).running) == 1
        await claim(storage, worker, 4)
        await storage.wait_for_work(worker, 1)
        await put(storage)
        assert await storage.wait_for_work(worker, 10)

    play(pair.url, scene)


def test_a_primary_that_has_become_a_replica_is_left_without_an_error(pair: Pair) -> None:
    """READONLY has done nothing: the same question goes to the new primary."""

    async def scene(storage: Storage) -> None:
        await put(storage)
        pair.sentinel.fail_over()
        with pair.first.client() as client:  # a connection that nobody has cut
            client.execute_command("REPLICAOF", "127.0.0.1", pair.second.port)
        assert (await put(storage)).verdict is Verdict.CREATED

    play(pair.url, scene)


def test_a_sentinel_that_names_a_replica_is_not_believed(pair: Pair, tmp_path: Path) -> None:
    liar = Sentinel(tmp_path / "liar", pair.second)
    try:
        with pytest.raises(StorageUnreachable, match=f"127.0.0.1:{pair.second.port}: is a slave"):
            play(sentinel_url(liar), put)
        play(sentinel_url(liar, pair.sentinel), put)
    finally:
        liar.stop()


def test_sentinels_that_are_gone_or_know_nothing_are_passed_over(pair: Pair, tmp_path: Path) -> None:
    host = f"127.0.0.1:{free_port()}"
    url = pair.url.replace("://", f"://{host},")
    play(url, put)
    with pytest.raises(StorageUnreachable, match="knows no service 'other'"):
        play(pair.url.replace(SERVICE, "other"), put)


def test_nobody_there_is_told_in_time_and_without_passwords() -> None:
    url = f"redis+sentinel://:hidden@127.0.0.1:{free_port()}/{SERVICE}/0?sentinel_password=hidden"

    async def open_it() -> None:
        async with asyncio.timeout(5):
            await open_storage(url, Settings(), create=True)

    with pytest.raises(StorageUnreachable, match="no primary found") as caught:
        asyncio.run(open_it())
    assert "hidden" not in str(caught.value)
    assert "Sentinels" in caught.value.hint


def test_sentinels_and_servers_have_passwords_of_their_own(tmp_path: Path) -> None:
    server = primary(tmp_path / "server", "--requirepass", "theirs")
    watching = (f"sentinel auth-pass {SERVICE} theirs", "requirepass its-own")
    sentinel = Sentinel(tmp_path / "sentinel", server, *watching)
    try:
        play(sentinel_url(sentinel, user=":theirs@", query="?sentinel_password=its-own"), put)
        for user, query in ((":theirs@", ""), (":wrong@", "?sentinel_password=its-own")):
            with pytest.raises(StorageRefused) as caught:
                play(sentinel_url(sentinel, user=user, query=query), put)
            assert "its-own" not in str(caught.value)
            assert "theirs" not in str(caught.value)
    finally:
        sentinel.stop()
        server.stop()


def test_while_no_primary_is_found_sentinels_are_not_stormed(pair: Pair) -> None:
    async def scene(storage: Storage) -> None:
        with pair.sentinel.client() as client:
            client.execute_command("SENTINEL", "SET", SERVICE, "down-after-milliseconds", 60_000)
            pair.first.kill()
            before = client.info("stats")["total_connections_received"]
            deadline = asyncio.get_running_loop().time() + 1.5
            tries = 0
            while asyncio.get_running_loop().time() < deadline:
                answers = await asyncio.gather(*(put(storage) for _ in range(20)), return_exceptions=True)
                assert all(isinstance(one, StorageUnreachable | OutcomeUnknown) for one in answers)
                tries += len(answers)
            asked = client.info("stats")["total_connections_received"] - before
        assert tries > 100
        assert asked < 15

    play(pair.url, scene)


def test_a_primary_that_hangs_is_given_up_with_all_connections_to_it(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fluxmesh.storage.redis.dialer.FOUND_ANSWER_S", 0.5)

    async def scene(storage: Storage) -> None:
        worker = await register(storage)
        await claim(storage, worker, 1)
        await asyncio.gather(*(put(storage) for _ in range(5)))
        pair.first.process.send_signal(signal.SIGSTOP)
        try:
            taken, errors = await put_until_taken(storage)
            assert taken.verdict is Verdict.CREATED
            assert isinstance(errors[0], OutcomeUnknown)
            assert role(pair.second) == "master"
            # The subscriber, too, listens to a server that says nothing any more.
            await storage.wait_for_work(worker, 2)
            for request in itertools.count(2):
                if not (await claim(storage, worker, request)).running:
                    break
            await put(storage)
            assert await storage.wait_for_work(worker, 10)
        finally:
            pair.first.process.send_signal(signal.SIGCONT)

    play(pair.url, scene)


def test_a_wait_that_replicas_do_not_answer_looks_the_primary_up_anew(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A primary that was cut off goes on to take what nobody will keep."""

    async def scene(storage: Storage) -> None:
        job = new_job()
        await put(storage)
        before = ours(pair.first)
        monkeypatch.setattr("fluxmesh.storage.redis.connection.WAIT_MS", 200)
        pair.second.process.send_signal(signal.SIGSTOP)
        with pytest.raises(OutcomeUnknown):
            await storage.enqueue([job], queue_cap=1_000)
        pair.second.process.send_signal(signal.SIGCONT)
        assert (await put_until_taken(storage, job))[0].verdict is Verdict.EXISTING
        assert len(before) == 1
        assert not before & ours(pair.first)

    play(pair.url, scene, Settings(wait_replicas=1))


def ours(server: Server) -> set[str]:
    """The connections on which something was enqueued."""
    with server.client() as client:
        return {one["id"] for one in client.client_list() if one["cmd"] in ("wait", "evalsha", "eval")}


def test_a_server_that_is_no_sentinel_is_told_as_such(tmp_path: Path) -> None:
    server = primary(tmp_path / "plain")
    try:
        with pytest.raises(StorageRefused, match="is no Sentinel") as caught:
            asyncio.run(
                open_storage(f"redis+sentinel://127.0.0.1:{server.port}/{SERVICE}", Settings(), create=True)
            )
        assert "redis://" in caught.value.hint
    finally:
        server.stop()
