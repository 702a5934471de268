"""rediss://: the right authority is trusted, and what is wrong with a certificate is said."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from fluxmesh.errors import InvalidOption, StorageError, StorageRefused, StorageUnreachable
from fluxmesh.storage.base import Storage
from fluxmesh.storage.values import Verdict
from tests.redis_server import Server
from tests.tls_files import Authority
from tests.unit.redis.play import claim, play, put, register


class TlsServer(Server):
    """Speaks TLS alone."""

    def __init__(self, folder: Path, authority: Authority, names: str, *options: str) -> None:
        certificate, key = authority.sign("server", names)
        self._tls = ("--tls-cert-file", str(certificate), "--tls-key-file", str(key))
        self._tls += ("--tls-ca-cert-file", str(authority.certificate))
        super().__init__(folder, *options)

    def start(self) -> None:
        given = self.options
        self.options = (*given, "--port", "0", "--tls-port", str(self.port), *self._tls)
        try:
            super().start()
        finally:
            self.options = given

    def tls_url(self, **options: object) -> str:
        query = "&".join(f"{name}={value}" for name, value in options.items())
        return f"rediss://127.0.0.1:{self.port}/0?{query}"


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="module")
def server(authority: Authority, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TlsServer]:
    names = "IP:127.0.0.1,DNS:redis.example"
    server = TlsServer(tmp_path_factory.mktemp("redis"), authority, names, "--tls-auth-clients", "no")
    yield server
    server.stop()


def refused(url: str) -> StorageError:
    with pytest.raises(StorageError) as caught:
        play(url, put)
    assert caught.value.hint != "is the server running?"
    return caught.value


def test_with_the_right_authority_jobs_go_through_and_are_waited_for(
    server: TlsServer, authority: Authority
) -> None:
    async def scene(storage: Storage) -> None:
        worker = await register(storage)
        assert not (await claim(storage, worker, 1)).running
        assert (await put(storage)).verdict is Verdict.CREATED
        assert await storage.wait_for_work(worker, 10)
        assert len((await claim(storage, worker, 2)).running) == 1

    play(server.tls_url(ssl_ca_certs=authority.certificate), scene)


def test_another_authority_is_not_trusted(server: TlsServer, tmp_path: Path) -> None:
    other = Authority(tmp_path, "other")
    for url in (server.tls_url(ssl_ca_certs=other.certificate), server.tls_url()):
        error = refused(url)
        assert isinstance(error, StorageRefused)
        assert "certificate is not accepted" in error.message
        assert "ssl_ca_certs" in error.hint


def test_a_certificate_for_another_name_is_not_accepted(server: TlsServer, authority: Authority) -> None:
    trusting = server.tls_url(ssl_ca_certs=authority.certificate).replace("127.0.0.1", "localhost")
    error = refused(trusting)
    assert "localhost" in error.message
    assert "ssl_check_hostname" in error.hint
    play(f"{trusting}&ssl_check_hostname=false", put)


def test_a_server_that_wants_a_certificate_of_ours_gets_one(authority: Authority, tmp_path: Path) -> None:
    server = TlsServer(tmp_path, authority, "IP:127.0.0.1", "--tls-auth-clients", "yes")
    try:
        error = refused(server.tls_url(ssl_ca_certs=authority.certificate))
        assert "ssl_certfile" in error.hint
        certificate, key = authority.sign("client", "DNS:client.example")
        own = {"ssl_certfile": certificate, "ssl_keyfile": key}
        play(server.tls_url(ssl_ca_certs=authority.certificate, **own), put)
    finally:
        server.stop()


def test_one_who_speaks_tls_to_a_server_without_it_is_told(tmp_path: Path) -> None:
    server = Server(tmp_path)
    try:
        error = refused(f"rediss://127.0.0.1:{server.port}/0?socket_connect_timeout=0.3")
        assert "redis://" in error.hint
    finally:
        server.stop()


def test_one_who_speaks_plainly_to_a_server_with_tls_is_told(server: TlsServer) -> None:
    error = refused(server.url())
    assert isinstance(error, StorageUnreachable)
    assert "rediss://" in error.hint


@pytest.mark.parametrize("name", ["ssl_ca_certs", "ssl_certfile"])
def test_files_that_are_not_there_or_hold_nonsense_are_told_at_once(
    server: TlsServer, name: str, tmp_path: Path
) -> None:
    nonsense = tmp_path / "nonsense.pem"
    nonsense.write_text("nothing")
    for path in (tmp_path / "missing.pem", nonsense):
        with pytest.raises(InvalidOption, match="TLS options"):
            play(server.tls_url(**{name: path}), put)
    with pytest.raises(InvalidOption, match="TLS options"):
        play(server.tls_url(ssl_cert_reqs="perhaps"), put)
