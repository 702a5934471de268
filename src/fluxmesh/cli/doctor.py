"""fluxmesh doctor: what is well, what may become a trouble, what is one already, and what to do about it."""

from __future__ import annotations

import asyncio
import os
import platform
import shutil
import socket
import stat
import sys
from collections.abc import Iterator, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Final

from msgspec import Struct

from fluxmesh.cli import output
from fluxmesh.cli.parser import Options, Parser, examples, json_option
from fluxmesh.cli.run import run_async
from fluxmesh.cli.session import described, say_storage, settings_of, storage_of
from fluxmesh.clock import US, Clock, system_clock
from fluxmesh.config import Settings
from fluxmesh.errors import InvalidOption, StorageError
from fluxmesh.events import Event
from fluxmesh.ids import new_nonce
from fluxmesh.job import Status
from fluxmesh.peers import Observation, observe, unseen
from fluxmesh.query import Query
from fluxmesh.storage.base import Storage
from fluxmesh.storage.records import NO_WORKER
from fluxmesh.storage.values import QueueStats, StorageInfo, WorkerInfo
from fluxmesh.worker.skew import TOLERATED_S, skew_s

OLDEST_PYTHON: Final = (3, 11)
SQLITE_WANTED: Final = (3, 51, 3)  # older ones have the WAL-reset bug, which can corrupt a database
SPACE_WARN_BYTES: Final = 1 << 30
SPACE_FAIL_BYTES: Final = 100 << 20
LOOKED_AT: Final = 100
ANSWER_S: Final = 2.0
_RELEASED_US: Final = 1_735_689_600 * US  # 2025-01-01: a clock before this was never set
_ALIVE: Final = frozenset({"ready", "draining", "retiring"})


class Health(StrEnum):
    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


class Check(Struct, frozen=True):
    """One finding. `hint` says what to do; empty if all is well."""

    name: str
    status: Health
    message: str
    hint: str = ""


def configure(parser: Parser) -> None:
    parser.epilog = examples("fluxmesh doctor", "fluxmesh doctor --url sqlite:///tasks.db --json")
    parser.set_defaults(run=_run)
    json_option(parser)


def _run(options: Options) -> int:
    settings = settings_of(options)
    say_storage(settings)
    clock = system_clock()
    checks = [python_check(sys.version_info[:3]), clock_check(clock)]
    checks += file_checks(described(settings.url))
    code = run_async(_ask_storage(settings, clock, checks))
    _print(checks, as_json=options.json)
    if code == 0 and any(check.status is Health.FAIL for check in checks):
        return 1
    return code


def _print(checks: Sequence[Check], *, as_json: bool) -> None:
    if as_json:
        well = all(check.status is not Health.FAIL for check in checks)
        output.json_document({"ok": well, "checks": checks})
        return
    rows = [(check.status.value, check.name, check.message) for check in checks]
    output.table(("STATE", "CHECK", "FINDING"), rows)
    output.flush()
    for check in checks:
        if check.hint:
            output.note(f"hint: {check.name}: {output.safe(check.hint)}")


async def _ask_storage(settings: Settings, clock: Clock, checks: list[Check]) -> int:
    """Adds what only the storage knows. Answers the exit code of a storage that cannot be opened."""
    try:
        async with storage_of(settings) as storage:
            asked_us = clock.wall_us()
            info = await storage.info()
            checks.append(skew_check(skew_s(asked_us, clock.wall_us(), info.now_us)))
            checks += storage_checks(info, settings.wait_replicas)
            checks.append(await _doorbell_check(storage))
            fleet = await storage.fleet()
            queues = await storage.queue_stats()
            waiting = sum(sum(queue.queued) for queue in queues)
            homeless = await _homeless(storage, queues)
            checks += [workers_check(fleet, waiting), queues_check(fleet, queues, homeless)]
            checks.append(beats_check(fleet, info.now_us / US))
            checks += await mesh_checks(settings, await observe(storage), fleet)
    except StorageError as error:
        checks.append(Check("storage", Health.FAIL, error.message, error.hint))
        return error.exit_code
    return 0


# -- findings ------------------------------------------------------------------------------------------


async def mesh_checks(
    settings: Settings, seen: Sequence[Observation], fleet: Sequence[WorkerInfo]
) -> list[Check]:
    """Whether the settings would do for a worker, if the mesh is on, and whether those in it see each
    other."""
    checks = []
    if settings.mesh:
        here = any(info.hostname == socket.gethostname() and info.status in _ALIVE for info in fleet)
        checks.append(await _mesh_settings_check(settings, worker_is_here=here))
    if settings.mesh or seen:
        checks.append(views_check(seen))
    return checks


async def _mesh_settings_check(settings: Settings, *, worker_is_here: bool) -> Check:
    from fluxmesh.mesh.names import Names
    from fluxmesh.mesh.options import MeshWorker, parse_seed
    from fluxmesh.mesh.ports import bind_ports
    from fluxmesh.mesh.streams import STREAM_PORT_ABOVE

    try:
        options = MeshWorker().resolved(settings)
    except InvalidOption as error:
        return Check("mesh", Health.FAIL, error.message, error.hint or "docs/mesh.md, Options")
    hosts = {seed: parse_seed(seed)[0] for seed in options.seeds}
    found = await Names().addresses(list(hosts.values()))
    lost = [seed for seed, host in hosts.items() if not found[host]]
    if lost:
        text = f"no address is found for the seeds: {', '.join(lost[:5])}"
        return Check("mesh", Health.WARN, text, "a typo? a worker looks them up again at each try")
    if options.key_files_open:
        text = f"others may read {', '.join(options.key_files_open)}"
        return Check("mesh", Health.WARN, text, f"chmod 600 {options.key_files_open[0]}")
    if options.is_exposed:
        text = f"listens at {options.bind_host} without a key"
        return Check("mesh", Health.WARN, text, "`fluxmesh mesh keygen` makes a key")
    try:
        bind_ports(options.bind_host, options.port).close()
    except InvalidOption as error:
        if error.field != "mesh_port" or not worker_is_here:
            return Check("mesh", Health.WARN, error.message, error.hint)
    keys, seeds = len(options.encryption_key), len(options.seeds)
    counts = f"{keys} {'key' if keys == 1 else 'keys'}, {seeds} {'seed' if seeds == 1 else 'seeds'}"
    ports = f"UDP {options.port} and TCP {options.port + STREAM_PORT_ABOVE}"
    return Check("mesh", Health.OK, f"{ports} of {options.bind_host}, {counts}")


def views_check(seen: Sequence[Observation]) -> Check:
    """Whether all workers of the mesh that tell storage what they see, see each other."""
    split = unseen(seen)
    if not seen:
        hint = "workers join with --mesh; one tells a few seconds after its start"
        return Check("mesh views", Health.WARN, "no worker has told of a mesh", hint)
    if split:
        name, names = next(iter(split.items()))
        text = f"{name} does not see {', '.join(names[:5])}" + ("" if len(split) == 1 else ", and others")
        return Check("mesh views", Health.WARN, text, "`fluxmesh mesh members` shows who sees whom")
    return Check("mesh views", Health.OK, "1 worker" if len(seen) == 1 else f"{len(seen)} workers agree")


def python_check(version: tuple[int, ...]) -> Check:
    text = ".".join(str(part) for part in version)
    if version < OLDEST_PYTHON:
        return Check("python", Health.FAIL, text, "Python 3.11 or newer is needed")
    return Check("python", Health.OK, f"{platform.python_implementation()} {text}")


def clock_check(clock: Clock) -> Check:
    now_s = clock.wall_us() / US
    if clock.wall_us() < _RELEASED_US:
        return Check(
            "clock", Health.FAIL, f"{output.instant(now_s)} is in the past", "set this machine's clock"
        )
    return Check("clock", Health.OK, output.instant(now_s))


def skew_check(ahead_s: float) -> Check:
    """Jobs go by the storage's time; logs, certificates and signatures by this machine's."""
    if abs(ahead_s) > TOLERATED_S:
        text = f"{abs(ahead_s):,.0f} s {'ahead of' if ahead_s > 0 else 'behind'} the storage's"
        return Check("skew", Health.WARN, text, "set this machine's clock (NTP), or the server's")
    return Check("skew", Health.OK, "this clock and the storage's agree")


def file_checks(url: str) -> Iterator[Check]:
    """Permissions and space of a database file. A file that is missing is left to the storage to tell."""
    scheme, _, path_text = url.partition(":///")
    if scheme != "sqlite":
        return
    path = Path(path_text)
    if not os.path.exists(path):  # False, too, in a folder that may not be entered
        return
    yield permission_check(path)
    yield space_check(shutil.disk_usage(path.parent).free)


def permission_check(path: Path) -> Check:
    name = "permissions"
    mode = path.stat().st_mode
    if not os.access(path, os.R_OK | os.W_OK):
        return Check(name, Health.FAIL, f"{path} cannot be written to", f"chown or chmod u+rw {path}")
    if not os.access(path.parent, os.W_OK | os.X_OK):
        hint = f"SQLite keeps files beside the database: chmod u+wx {path.parent}"
        return Check(name, Health.FAIL, f"the folder {path.parent} cannot be written to", hint)
    if mode & stat.S_IWOTH:
        return Check(name, Health.WARN, f"everybody may write to {path}", f"chmod o-w {path}")
    return Check(name, Health.OK, stat.filemode(mode))


def space_check(free_bytes: int) -> Check:
    text = f"{free_bytes / (1 << 30):,.1f} GiB free"
    hint = "free some space: a full disk stops every worker"
    if free_bytes < SPACE_FAIL_BYTES:
        return Check("free space", Health.FAIL, text, hint)
    if free_bytes < SPACE_WARN_BYTES:
        return Check("free space", Health.WARN, text, hint)
    return Check("free space", Health.OK, text)


def version_check(info: StorageInfo) -> Check:
    parts = tuple(int(part) for part in info.version.split(".") if part.isdecimal())
    if info.kind == "sqlite" and parts < SQLITE_WANTED:
        return Check(info.kind, Health.FAIL, info.version, "pip install --upgrade apsw")
    return Check(info.kind, Health.OK, info.version)


def file_system_check(kind: str) -> Check:
    if kind.startswith("fuse"):
        hint = "its locks may not hold between processes: put the file on a local disk"
        return Check("file system", Health.WARN, kind, hint)
    if kind in ("tmpfs", "ramfs"):
        return Check("file system", Health.WARN, f"{kind}: gone after a reboot", "put the file on a disk")
    return Check("file system", Health.OK, kind)


def storage_checks(info: StorageInfo, wait_replicas: int) -> Iterator[Check]:
    """What its version and its set-up promise."""
    details = dict(info.details)
    if info.kind == "sqlite":
        yield Check("schema", Health.OK, "known")
    yield version_check(info)
    if "file system" in details:
        yield file_system_check(details["file system"])
    if "append-only file" in details:
        yield kept_check(details["append-only file"], details.get("snapshots", "unknown"))
    if wait_replicas:
        yield replicas_check(details.get("replicas", "unknown"), wait_replicas)


def kept_check(append_only: str, snapshots: str) -> Check:
    """What of the jobs a restart of the server leaves."""
    hint = "set `appendonly yes` (docs/redis.md)"
    if append_only == "yes":
        return Check("kept jobs", Health.OK, "in an append-only file")
    if snapshots == "yes":
        return Check("kept jobs", Health.OK, "in snapshots: a crash loses what came after the last one")
    if snapshots == "no":
        return Check("kept jobs", Health.WARN, "a restart of the server loses every job", hint)
    return Check("kept jobs", Health.WARN, "no append-only file; of snapshots it does not tell", hint)


def replicas_check(connected: str, wanted: int) -> Check:
    text = f"{connected} connected, wait_replicas is {wanted}"
    if connected.isdecimal() and int(connected) < wanted:
        hint = "until more are connected no job is accepted: start replicas, or lower wait_replicas"
        return Check("replicas", Health.WARN, text, hint)
    return Check("replicas", Health.OK, text)


async def _homeless(storage: Storage, queues: Sequence[QueueStats]) -> list[str]:
    """Tasks of waiting jobs that a worker has met which does not have them; of the newest jobs only."""
    if not any(item.parked for item in queues):
        return []
    page = await storage.find(Query(state=Status.PENDING), limit=LOOKED_AT)
    return sorted({job.task for job in page.items if job.waiting_for == NO_WORKER})


async def _doorbell_check(storage: Storage) -> Check:
    """Send ourselves an event and hear it."""
    topic = f"doctor-{new_nonce()}"
    slow = "workers look for new jobs every 250 ms instead"
    try:
        async with storage.subscribe([topic]) as events:
            await storage.publish(Event(topic))
            await asyncio.wait_for(anext(events), ANSWER_S)
    except (StorageError, TimeoutError) as error:
        return Check("doorbells", Health.WARN, f"do not ring: {error}"[:200], slow)
    return Check("doorbells", Health.OK, "ring")


def workers_check(fleet: Sequence[WorkerInfo], waiting: int) -> Check:
    alive = sum(worker.status in _ALIVE for worker in fleet)
    text = f"{alive} alive, {waiting:,} {'job waits' if waiting == 1 else 'jobs wait'}"
    if not alive:
        hint = "start one: `fluxmesh worker`"
        return Check("workers", Health.WARN, text, hint)
    return Check("workers", Health.OK, text)


def queues_check(
    fleet: Sequence[WorkerInfo], queues: Sequence[QueueStats], homeless: Sequence[str] = ()
) -> Check:
    """Jobs that wait where nobody looks, or for a task that nobody has."""
    served = {name for worker in fleet if worker.status in _ALIVE for name in worker.queues}
    paused = [item.queue for item in queues if item.paused and any(item.queued)]
    alone = [item.queue for item in queues if any(item.queued) and item.queue not in served]
    if alone and served:
        hint = f"start one: `fluxmesh worker --queues {','.join(alone[:5])}`"
        return Check("queues", Health.WARN, f"jobs wait, but no worker serves: {', '.join(alone[:5])}", hint)
    if paused:
        hint = f"when it may go on: `fluxmesh queues resume {paused[0]}`"
        return Check("queues", Health.WARN, f"jobs wait, paused: {', '.join(paused[:5])}", hint)
    if homeless:
        text = f"jobs wait for a worker that has their task: {', '.join(homeless[:5])}"
        return Check("queues", Health.WARN, text, "start one with their app: `fluxmesh worker --app …`")
    parked = sum(item.parked for item in queues)
    if parked:
        hint = "`fluxmesh jobs list --q state:pending` says what each waits for"
        text = "1 job waits for its limit" if parked == 1 else f"{parked:,} jobs wait for their limits"
        return Check("queues", Health.OK, text, hint)
    return Check("queues", Health.OK, f"{len(queues)} known")


def beats_check(fleet: Sequence[WorkerInfo], now_s: float) -> Check:
    silent = [worker.worker_id for worker in fleet if worker.status == "silent"]
    ahead = [worker.worker_id for worker in fleet if worker.last_heartbeat > now_s + 5]
    if ahead:
        return Check("beats", Health.WARN, f"in the future: {', '.join(ahead[:5])}", "a clock was set back")
    if silent:
        hint = "a stopped or overloaded process? `fluxmesh workers` shows its pid"
        return Check("beats", Health.WARN, f"silent: {', '.join(silent[:5])}", hint)
    return Check("beats", Health.OK, "regular" if fleet else "none yet")
