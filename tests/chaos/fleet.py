"""The workers of a chaos run, and everything that becomes of their processes, seen from outside."""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from fluxmesh.testing.history import Happening, ProcessEvent
from tests.cases.workers import Group
from tests.chaos.plan import WorkerSpec

_LOOK_MS: Final = 100  # for new processes; ends are told at once


class ChaosWorker(Group):
    """`fluxmesh worker` with the tasks of a chaos run."""

    def __init__(
        self,
        name: str,
        spec: WorkerSpec,
        *,
        env: Mapping[str, str],
        folder: Path,
        mesh_port: int | None = None,
        seeds: Sequence[int] = (),
    ) -> None:
        """`mesh_port`: it is in a mesh, with the workers that have the ports of `seeds`."""
        self.name: Final = name
        self.mesh_port: Final = mesh_port
        argv = [sys.executable, "-m", "tests.chaos.entry", "worker", "--app", "tests.chaos.app:queue"]
        argv += ["--id", name, "--concurrency", str(spec.concurrency)]
        argv += [] if spec.processes is None else ["--processes", str(spec.processes)]
        argv += spec.flags
        if mesh_port is not None:
            argv += ["--mesh", "--mesh-port", str(mesh_port)]
        if seeds:
            argv += ["--mesh-seeds", ",".join(f"127.0.0.1:{port}" for port in seeds)]
        super().__init__(argv, env=env, folder=folder, log=folder / f"{name}.log")

    def ready(self) -> set[int]:
        """The processes that its supervisor has seen ready."""
        lines = [line for line in self.log.read_bytes().splitlines() if b'"worker ready"' in line]
        return {json.loads(line)["pid"] for line in lines}


class Seen:
    """What stands of a process in /proc."""

    __slots__ = ("group", "parent", "pid", "worker")

    def __init__(self, pid: int, parent: int, group: int, worker: str) -> None:
        self.pid, self.parent, self.group, self.worker = pid, parent, group, worker


def processes() -> list[tuple[int, int, int, str]]:
    """(pid, parent, group, state) of every process."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                text = Path(f"/proc/{name}/stat").read_text()
            except OSError:
                continue
            state, parent, group = text.rpartition(")")[2].split()[:3]
            found.append((int(name), int(parent), int(group), state))
    return found


def worker_id_of(pid: int) -> str:
    """The --id of a process; empty: it is no child of a worker."""
    try:
        argv = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    except OSError:
        return ""
    if "fluxmesh.cli.child" in argv and "--id" in argv:
        return argv[argv.index("--id") + 1]
    return ""


class Watch:
    """A thread that meets every process of the workers' groups and notes when it ends."""

    def __init__(self) -> None:
        self.events: list[ProcessEvent] = []
        self._lock = threading.Lock()
        self._groups: dict[int, str] = {}
        self._seen: dict[int, Seen] = {}
        self._fds: dict[int, int] = {}  # pidfd -> pid
        self._poll = select.poll()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
        self._thread.start()

    def follow(self, worker: ChaosWorker) -> None:
        with self._lock:
            self._groups[worker.pid] = worker.name

    def stop(self) -> None:
        self._over.set()
        self._thread.join(10)

    def note(self, what: Happening, pid: int, at_ns: int | None = None) -> None:
        seen = self._seen.get(pid)
        worker = seen.worker if seen is not None else ""
        event = ProcessEvent(time.monotonic_ns() if at_ns is None else at_ns, what, pid, worker)
        with self._lock:
            self.events.append(event)

    def members(self, group: int) -> list[int]:
        """The processes of a group that are not gone."""
        return [pid for pid, _, of, state in processes() if of == group and state not in "ZX"]

    def children(self, group: int) -> list[int]:
        """Those of them that run jobs."""
        return [pid for pid in self.members(group) if pid != group and worker_id_of(pid)]

    def _run(self) -> None:
        while not self._over.is_set():
            self._meet()
            alive_ns = time.monotonic_ns()  # who had ended before would be told at once
            for fd, _ in self._poll.poll(_LOOK_MS):
                self._part(fd, alive_ns)

    def _meet(self) -> None:
        with self._lock:
            groups = dict(self._groups)
        for pid, parent, group, state in processes():
            known = self._seen.get(pid)
            if group not in groups or state in "ZX":
                continue
            if known is not None:
                if not known.worker:  # it has been forked, and is what it is to be only now
                    known.worker = worker_id_of(pid)
                continue
            try:
                fd = os.pidfd_open(pid)
            except ProcessLookupError:
                continue
            self._seen[pid] = Seen(pid, parent, group, worker_id_of(pid))
            self._fds[fd] = pid
            self._poll.register(fd, select.POLLIN)

    def _part(self, fd: int, alive_ns: int) -> None:
        pid = self._fds.pop(fd)
        self._poll.unregister(fd)
        os.close(fd)
        self.note(Happening.GONE, pid, alive_ns)
        seen = self._seen.pop(pid)  # the number may come again
        if seen.pid != seen.group:
            try:
                os.waitpid(pid, os.WNOHANG)  # an orphan that was adopted; others are their supervisor's
            except ChildProcessError:
                pass

    # -- what the nemesis does to them -------------------------------------------------------------------
    def kill(self, pids: list[int]) -> list[int]:
        """SIGKILL; those that were there."""
        done = []
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
            self.note(Happening.KILLED, pid)
            done.append(pid)
        return done

    def stop_them(self, pids: list[int]) -> list[int]:
        """SIGSTOP; those that stand still now."""
        from tests.chaos.storages import is_stopped

        done = []
        for pid in pids:
            try:
                at_ns = time.monotonic_ns()
                os.kill(pid, signal.SIGSTOP)
            except ProcessLookupError:
                continue
            if is_stopped(pid):
                self.note(Happening.STOPPED, pid, at_ns)
                done.append(pid)
        return done

    def continue_them(self, pids: list[int]) -> None:
        for pid in pids:
            try:
                os.kill(pid, signal.SIGCONT)
            except ProcessLookupError:
                continue
            self.note(Happening.CONTINUED, pid)
