"""The storage of a chaos run: made, spoilt in every way it can be, and mended."""

from __future__ import annotations

import errno
import os
import random
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Final, Protocol

import apsw
import redis as driver

from fluxmesh.clock import OFFSETS_ENV, OffsetClock
from tests.cases.backdoor import BackDoor, RedisDoor, SqliteDoor
from tests.chaos import skew
from tests.chaos.proxy import Proxy
from tests.redis_fleet import DOWN_AFTER_MS, SERVICE, Sentinel, primary, replica, sentinel_url
from tests.redis_server import Server

DISK_BYTES: Final = 96 << 20
_LOCK_S: Final = 0.15  # of slow: so long held, and so long not
_FREE_S: Final = 0.05
_SLOW_S: Final = (0.05, 0.3)  # of every answer
_PATIENT_MS: Final = 60_000
_PAUSE_S: Final = 0.01
_NAMESPACE: Final = "chaos"


class NotDone(Exception):
    """A fault did not come about, and does not count."""


class Spoilt(Protocol):
    """A storage. Inside a fault it is spoilt; NotDone is raised if it is not."""

    door: BackDoor
    url: str
    clock_is_stepped: bool  # stamps of the storage say nothing about order any more

    def env(self) -> dict[str, str]: ...
    def env_of_worker(self, slot: int) -> dict[str, str]: ...
    def fault(self, kind: str, rng: random.Random, amount: float) -> Iterator[None]: ...
    def leftovers(self) -> list[str]: ...
    def keep(self, folder: Path) -> None: ...
    def close(self) -> None: ...


# -- SQLite ----------------------------------------------------------------------------------------------
class SqliteStorage:
    """A file on a disk of its own, small enough to be filled: that takes root."""

    def __init__(self, folder: Path) -> None:
        self._disk = folder / "disk"
        self._disk.mkdir()
        self._mounted = False
        if os.geteuid() == 0:
            options = f"size={DISK_BYTES}"
            made = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", self._disk], check=False)
            self._mounted = made.returncode == 0
        self._clock_file = folder / "clock"
        OffsetClock.write(self._clock_file)
        self.clock_is_stepped = False
        self.door = SqliteDoor(self._disk / "jobs.db", _NAMESPACE)
        self.url = self.door.url

    @property
    def clock(self) -> OffsetClock:
        return OffsetClock(self._clock_file)

    def env(self) -> dict[str, str]:
        return {OFFSETS_ENV: str(self._clock_file)}

    def env_of_worker(self, slot: int) -> dict[str, str]:
        return {}

    @contextmanager
    def fault(self, kind: str, rng: random.Random, amount: float) -> Iterator[None]:
        match kind:
            case "storage_frozen":
                with self._locked():
                    yield
            case "storage_slow":
                over = threading.Event()
                done: list[int] = []
                thread = threading.Thread(target=self._flap, args=(over, done))
                thread.start()
                try:
                    yield
                finally:
                    over.set()
                    thread.join(30)
                if not done:
                    raise NotDone("it was never locked")
            case "storage_full":
                with self._filled():
                    yield
            case "clock":
                self.clock_is_stepped = True
                shift_us = round(amount * 1e6)
                OffsetClock.write(self._clock_file, wall_us=shift_us)
                try:
                    yield
                finally:
                    OffsetClock.write(self._clock_file)
            case _:
                raise NotDone(f"no such fault: {kind}")

    @contextmanager
    def _locked(self) -> Iterator[None]:
        with closing(apsw.Connection(str(self.door.path))) as db:
            db.set_busy_timeout(10_000)
            try:
                db.execute("begin exclusive")
            except apsw.Error as error:
                raise NotDone(str(error)) from error
            try:
                yield
            finally:
                db.execute("rollback")

    def _flap(self, over: threading.Event, done: list[int]) -> None:
        while not over.is_set():
            try:
                with self._locked():
                    over.wait(_LOCK_S)
                    done.append(1)
            except NotDone:
                pass
            over.wait(_FREE_S)

    @contextmanager
    def _filled(self) -> Iterator[None]:
        ballast = self._disk / "ballast"
        refused = False
        try:
            with ballast.open("wb", buffering=0) as file:
                for size in (1 << 20, 1 << 12):
                    try:
                        for _ in range(DISK_BYTES // size + 1):
                            file.write(b"\0" * size)
                    except OSError as error:
                        refused = error.errno == errno.ENOSPC
            if not refused:
                raise NotDone("the disk was not filled")
            yield
        finally:
            ballast.unlink(missing_ok=True)

    def leftovers(self) -> list[str]:
        return self.door.disorder([_NAMESPACE])

    def close(self) -> None:
        if self._mounted:
            subprocess.run(["umount", "-l", self._disk], check=False)

    def keep(self, folder: Path) -> None:
        """A copy of the file, for evidence."""
        with (
            closing(apsw.Connection(str(self.door.path))) as db,
            closing(apsw.Connection(str(folder / "jobs.db"))) as copy,
            copy.backup("main", db, "main") as backup,
        ):
            backup.step()


# -- Redis -----------------------------------------------------------------------------------------------
class RedisStorage:
    """A server that has on disk what it has answered, behind a proxy."""

    def __init__(self, folder: Path, rng: random.Random) -> None:
        self._folder = folder
        data = folder / "redis"
        data.mkdir()
        options = ("--appendonly", "yes", "--appendfsync", "always", "--auto-aof-rewrite-percentage", "0")
        self._server = Server(data, *options)
        self.proxy = Proxy(self._server.port, rng)
        self.url = f"redis://127.0.0.1:{self.proxy.port}/0"
        self.door: BackDoor = RedisDoor(self._server, 0, _NAMESPACE, url=self.url)
        self.clock_is_stepped = False

    def env(self) -> dict[str, str]:
        return {}

    def _skew_file(self, slot: int) -> Path:
        path = self._folder / f"skew-{slot}"
        if not path.exists():
            skew.write(path, 0)
        return path

    def env_of_worker(self, slot: int) -> dict[str, str]:
        return {skew.SKEW_ENV: str(self._skew_file(slot))}

    @contextmanager
    def fault(self, kind: str, rng: random.Random, amount: float) -> Iterator[None]:
        match kind:
            case "storage_killed":
                self._server.kill()
                if self._server.process.returncode != -signal.SIGKILL:
                    raise NotDone("it was not killed")
                try:
                    yield
                finally:
                    self._server.start()
                    self._await_loaded()
            case "storage_frozen":
                pid = self._server.process.pid
                os.kill(pid, signal.SIGSTOP)
                try:
                    if not is_stopped(pid):
                        raise NotDone("it was not stopped")
                    yield
                finally:
                    os.kill(pid, signal.SIGCONT)
            case "storage_full":
                with self._filled():
                    yield
            case "storage_slow" | "replies_lost":
                with proxied(self.proxy, kind):
                    yield
            case "clock":
                # Of all workers: they are on other machines than their storage.
                files = [self._skew_file(slot) for slot in range(8)]
                try:
                    for file in files:
                        skew.write(file, round(amount * 1e6))
                    yield
                finally:
                    for file in files:
                        skew.write(file, 0)
            case _:
                raise NotDone(f"no such fault: {kind}")

    def _await_loaded(self) -> None:
        for _ in range(1_000):
            try:
                with self._server.client() as client:
                    client.ping()
                    return
            except driver.RedisError:
                time.sleep(_PAUSE_S)
        raise TimeoutError("the server does not come up again")

    @contextmanager
    def _filled(self) -> Iterator[None]:
        with self._server.client() as client:
            used = client.info("memory")["used_memory"]
            client.config_set("maxmemory", used + 1_024)
            try:
                refused = False
                for number in range(200):
                    try:
                        client.set(f"{_NAMESPACE}-ballast-{number}", b"\0" * 10_000)
                    except driver.ResponseError as error:
                        refused = "OOM" in str(error) or "maxmemory" in str(error)
                        break
                if not refused:
                    raise NotDone("memory was not full")
                yield
            finally:
                client.config_set("maxmemory", 0)
                names = [f"{_NAMESPACE}-ballast-{number}" for number in range(200)]
                client.delete(*names)

    def leftovers(self) -> list[str]:
        door = self.door
        assert isinstance(door, RedisDoor)
        found = door.disorder([_NAMESPACE])
        permits = door.ask("HGETALL", door.key("running"))
        found += [f"permits in use: {permits}"] if permits else []
        owned = [name for name in door.keys(door.key("in_flight", "*", "*")) if door.ask("ZCARD", name)]
        return found + [f"jobs owned: {name}" for name in owned]

    def close(self) -> None:
        self.proxy.stop()
        self._server.stop()

    def keep(self, folder: Path) -> None:
        """Its data is in the folder of the run already."""


@contextmanager
def proxied(proxy: Proxy, kind: str) -> Iterator[None]:
    before = proxy.delayed + proxy.lost
    try:
        if kind == "storage_slow":
            proxy.delay_s = _SLOW_S
        else:
            proxy.loses_replies = True
        yield
    finally:
        proxy.delay_s = (0.0, 0.0)
        proxy.loses_replies = False
    if proxy.delayed + proxy.lost == before:
        raise NotDone("nothing passed")


def is_stopped(pid: int) -> bool:
    """A stop takes a moment to arrive."""
    for _ in range(100):
        if state_of(pid) in "Tt":
            return True
        time.sleep(_PAUSE_S / 5)
    return False


def state_of(pid: int) -> str:
    """The letter of /proc; X: there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return "X"


# -- Redis with replicas ---------------------------------------------------------------------------------
class ReplicatedStorage:
    """A primary and a replica that a Sentinel watches. It has patience with a slow machine, but for when a
    primary is lost: a replica that it promotes beside a primary that lives is another story."""

    def __init__(self, folder: Path, rng: random.Random) -> None:
        self.clock_is_stepped = False
        self._primary = primary(folder / "first")
        self._replica = replica(folder / "second", self._primary)
        self._sentinel = Sentinel(folder / "sentinel", self._primary)
        self._sentinel.await_replicas(1)
        self._be_patient(_PATIENT_MS)
        self.url = sentinel_url(self._sentinel)
        self.door: BackDoor = RedisDoor(self._primary, 0, _NAMESPACE, url=self.url)
        self.lost_ns: list[int] = []

    def _be_patient(self, down_after_ms: int) -> None:
        with self._sentinel.client() as client:
            client.sentinel_set(SERVICE, "down-after-milliseconds", down_after_ms)

    def env(self) -> dict[str, str]:
        return {"FLUXMESH_WAIT_REPLICAS": "1"}

    def env_of_worker(self, slot: int) -> dict[str, str]:
        return {}

    @contextmanager
    def fault(self, kind: str, rng: random.Random, amount: float) -> Iterator[None]:
        """The one that was lost comes back as the replica of the other, with nothing of its own."""
        if kind != "primary_lost":
            raise NotDone(f"no such fault: {kind}")
        lost = self._primary
        lost.kill()
        self.lost_ns.append(time.monotonic_ns())
        self._be_patient(DOWN_AFTER_MS)
        yield
        deadline = time.monotonic() + 30
        while self._sentinel.primary_port() == lost.port:
            if time.monotonic() > deadline:
                raise NotDone("no replica was promoted")
            time.sleep(_PAUSE_S)
        self._be_patient(_PATIENT_MS)
        self._primary, self._replica = self._replica, lost
        lost.options = (*lost.options, "--replicaof", "127.0.0.1", str(self._primary.port))
        lost.start()
        self.door = RedisDoor(self._primary, 0, _NAMESPACE, url=self.url)

    def leftovers(self) -> list[str]:
        return RedisStorage.leftovers(self)  # type: ignore[arg-type]

    def close(self) -> None:
        self._sentinel.stop()
        for server in (self._primary, self._replica):
            server.stop()

    def keep(self, folder: Path) -> None:
        """Nothing of it is on disk."""


def open_storage_of_run(kind: str, folder: Path, rng: random.Random) -> Spoilt:
    if kind == "sqlite":
        return SqliteStorage(folder)
    if kind == "redis":
        return RedisStorage(folder, rng)
    return ReplicatedStorage(folder, rng)
