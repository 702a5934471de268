"""More than one server: replicas, Sentinels and clusters, each on free ports, each ended by its pid."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from redis.backoff import NoBackoff

from tests.redis_server import Server, free_port, program

SERVICE: Final = "jobs"
SLOTS: Final = 16_384
DOWN_AFTER_MS: Final = 500
_SETTLE_S: Final = 30.0
_LOOK_S: Final = 0.02
_BUS: Final = 10_000  # a cluster's nodes talk so far above their ports


def await_that(condition: Callable[[], Any], what: str, within_s: float = _SETTLE_S) -> Any:
    """The first answer of `condition` that is true. What servers agree on among themselves tells nobody."""
    deadline = time.monotonic() + within_s
    while True:
        answer = condition()
        if answer:
            return answer
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {within_s:g} s: {what} (last: {answer!r})")
        time.sleep(_LOOK_S)


def primary(folder: Path, *options: str) -> Server:
    """A server that gives its data to replicas at once."""
    folder.mkdir(parents=True, exist_ok=True)
    return Server(folder, "--repl-diskless-sync", "yes", "--repl-diskless-sync-delay", "0", *options)


def replica(folder: Path, of: Server, *options: str) -> Server:
    """A server that follows another, and has all its data."""
    made = primary(folder, "--replicaof", "127.0.0.1", str(of.port), *options)
    await_linked(made, of)
    return made


def await_linked(follower: Server, of: Server) -> None:
    """Until the primary counts it among its replicas."""

    def online() -> bool:
        seen = client.info("replication").values()
        states = [one["state"] for one in seen if isinstance(one, dict) and one.get("port") == follower.port]
        return states == ["online"]

    with of.client() as client:
        await_that(online, "the replica follows")


def role(server: Server) -> str:
    with server.client() as client:
        return str(client.role()[0].decode())


class Sentinel:
    """Watches one service. Its opinion alone is enough for a failover."""

    def __init__(self, folder: Path, watched: Server, *lines: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.port = free_port()
        self.folder = folder
        config = folder / "sentinel.conf"
        config.write_text(
            "\n".join(
                [
                    f"port {self.port}",
                    "bind 127.0.0.1",
                    f"dir {folder}",
                    f"sentinel monitor {SERVICE} 127.0.0.1 {watched.port} 1",
                    f"sentinel down-after-milliseconds {SERVICE} {DOWN_AFTER_MS}",
                    f"sentinel failover-timeout {SERVICE} 6000",
                    *lines,
                    "",
                ]
            )
        )
        self._redis = watched.redis
        with (folder / "sentinel.log").open("ab") as log:
            self.process = subprocess.Popen([program(), config, "--sentinel"], stdout=log, stderr=log)
        await_that(self._answers, "the Sentinel answers")

    def _answers(self) -> bool:
        try:
            with self.client() as client:
                return bool(client.ping())
        except self._redis.AuthenticationError:
            return True
        except self._redis.RedisError:
            return False

    def client(self) -> Any:
        return self._redis.Redis(port=self.port, retry=self._redis.retry.Retry(NoBackoff(), 0))

    def await_replicas(self, count: int) -> None:
        """Until it knows so many: of others it could promote none."""
        with self.client() as client:
            await_that(
                lambda: client.sentinel_master(SERVICE)["num-slaves"] >= count, f"it knows {count} replicas"
            )

    def fail_over(self) -> None:
        """Have it promote the replica, as soon as it finds it good enough."""

        def begun() -> bool:
            try:
                return bool(client.execute_command("SENTINEL", "FAILOVER", SERVICE))
            except self._redis.ResponseError:
                return False

        with self.client() as client:
            before = self.primary_port()
            await_that(begun, "the failover begins")
            await_that(lambda: self.primary_port() != before, "the Sentinel has switched")

    def primary_port(self) -> int:
        with self.client() as client:
            return int(client.sentinel_get_master_addr_by_name(SERVICE)[1])

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            self.process.wait(10)


def sentinel_url(*sentinels: Sentinel, database: int = 0, user: str = "", query: str = "") -> str:
    hosts = ",".join(f"127.0.0.1:{one.port}" for one in sentinels)
    return f"redis+sentinel://{user}{hosts}/{SERVICE}/{database}{query}"


class Cluster:
    """Servers that are one cluster; the first owns all slots, unless they are shared out."""

    def __init__(self, folder: Path, nodes: int = 1, *, shared_out: bool = False) -> None:
        self.nodes: list[Server] = []
        try:
            for number in range(nodes):
                place = folder / f"node{number}"
                place.mkdir(parents=True)
                self.nodes.append(Server(place, "--cluster-enabled", "yes", "--cluster-node-timeout", "2000"))
            if shared_out:
                step = -(-SLOTS // nodes)
                for number, node in enumerate(self.nodes):
                    self._own(node, range(number * step, min((number + 1) * step, SLOTS)))
            else:
                self._own(self.nodes[0], range(SLOTS))
            for node in self.nodes[1:]:
                with self.nodes[0].client() as client:
                    client.execute_command("CLUSTER", "MEET", "127.0.0.1", node.port, node.port + _BUS)
            await_that(self._agree, "the nodes agree")
        except BaseException:
            self.stop()
            raise

    def _own(self, node: Server, slots: Sequence[int]) -> None:
        with node.client() as client:
            client.execute_command("CLUSTER", "ADDSLOTS", *slots)

    def _agree(self) -> bool:
        return all(self._well(node) for node in self.nodes)

    def _well(self, node: Server) -> bool:
        with node.client() as client:
            said = client.execute_command("CLUSTER", "INFO")
        found = dict(line.split(":", 1) for line in _text(said).split() if ":" in line)
        return found["cluster_state"] == "ok" and int(found["cluster_known_nodes"]) == len(self.nodes)

    def id_of(self, node: Server) -> str:
        with node.client() as client:
            return _text(client.execute_command("CLUSTER", "MYID"))

    def owner_of(self, key: str) -> Server:
        def owns(node: Server) -> bool:
            with node.client() as client:
                try:
                    client.execute_command("EXISTS", key)
                except node.redis.exceptions.MovedError:
                    return False
            return True

        return next(node for node in self.nodes if owns(node))

    def give(self, slot: int, to: Server) -> None:
        """Make another node the owner of an empty slot."""
        owner = self.id_of(to)
        for node in (to, *self.nodes):
            with node.client() as client:
                client.execute_command("CLUSTER", "SETSLOT", slot, "NODE", owner)

    def stop(self) -> None:
        for node in self.nodes:
            node.stop()


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return "\n".join(f"{name}:{said}" for name, said in value.items())
    return value.decode() if isinstance(value, bytes) else str(value)
