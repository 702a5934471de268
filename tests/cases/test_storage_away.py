"""The storage is away for long, again and again, or silent: consuming resumes, nothing leaks, and whoever
asks meanwhile is told in time.

Bodies end while it is away; their ends are stored afterwards, and no body runs again.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Final, NamedTuple

import httpx
import pytest

from fluxmesh.errors import OutcomeUnknown, StorageUnreachable
from fluxmesh.handle import JobHandle
from fluxmesh.job import Outcome
from tests.cases.backdoor import RedisDoor
from tests.cases.beside import beside
from tests.cases.harness import START_S, Lab, Site, wait_until
from tests.cases.report import Case, scaled
from tests.cases.test_outages import let_pass
from tests.cases.test_redis_cases import own_server
from tests.cases.workers import ApiServer, WorkerGroup

AWAY_S: Final = scaled(60)
FROZEN_S: Final = scaled(20)
FLAPS: Final = 10
FLAPPING_S: Final = scaled(20)
RESUMED_S: Final = 10.0
READY_S: Final = 1.0 + 0.5  # a bound of the server's own, seen by a client on a busy machine
PYTHON_S: Final = 20.0  # an answer that does not come (10 s), then a connection that does not (5 s)
REST_S: Final = 11.0
CLI_S: Final = 20.0  # with the start of a process
HELD: Final = 6
FEW: Final = 3  # of the task "few" run at once
KEYED: Final = 2  # of the key
TOLD: Final = frozenset({"StorageUnreachable", "OutcomeUnknown", "accepted"})
_ID: Final = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")

Away = Callable[[Lab], AbstractContextManager[None]]
"""A storage that is away from the entry of the context to its exit, at least."""


# -- how it is away --------------------------------------------------------------------------------------
@contextmanager
def out_of_reach(lab: Lab) -> Iterator[None]:
    """Frozen, or locked."""
    with lab.door.out_of_reach():
        yield


@contextmanager
def killed(lab: Lab) -> Iterator[None]:
    """The server's process is killed, and another one started on its files."""
    assert isinstance(lab.door, RedisDoor)
    let_pass(1.5)  # the append-only file is synced once a second
    lab.door.server.kill()
    try:
        yield
    finally:
        lab.door.server.start()


@contextmanager
def flapping(lab: Lab) -> Iterator[None]:
    """Restarted again and again; up for about as long as down."""
    assert isinstance(lab.door, RedisDoor)
    server = lab.door.server
    half_s = FLAPPING_S / FLAPS / 2

    def flap() -> None:
        for number in range(FLAPS):
            (server.stop, server.kill)[number % 2]()
            let_pass(half_s)
            server.start()
            let_pass(half_s)

    with ThreadPoolExecutor(1) as pool:
        flaps = pool.submit(flap)
        yield
        flaps.result(FLAPPING_S + START_S)


# -- who asks meanwhile ----------------------------------------------------------------------------------
class Told(NamedTuple):
    """What a producer was told, after how long, and which job it was told of."""

    what: str
    took_s: float
    job_id: str | None


def by_python(lab: Lab) -> Told:
    began_at = time.monotonic()
    try:
        handle = lab.queue.submit("tick", ("by python",))
    except OutcomeUnknown as error:
        told, job_id = "OutcomeUnknown", error.ids[0]
    except StorageUnreachable:
        told, job_id = "StorageUnreachable", None
    else:
        told, job_id = "accepted", handle.id
    return Told(told, time.monotonic() - began_at, job_id)


def by_rest(url: str) -> Told:
    began_at = time.monotonic()
    answer = httpx.post(f"{url}/api/v1/jobs", json={"task": "tick", "args": ["by rest"]}, timeout=60)
    took_s = time.monotonic() - began_at
    if answer.status_code == 201:
        return Told("accepted", took_s, answer.json()["id"])
    problem = answer.json()
    kinds = {"outcome_unknown": "OutcomeUnknown", "storage_unreachable": "StorageUnreachable"}
    found = _ID.search(problem["detail"])
    return Told(kinds.get(problem["code"], problem["code"]), took_s, found[0] if found else None)


def by_cli(lab: Lab) -> Told:
    argv = [sys.executable, "-m", "fluxmesh.cli", "submit", "--task", "tick", "--args", '["by cli"]']
    began_at = time.monotonic()
    done = subprocess.run(
        argv, env=lab.env(), cwd=lab.folder, capture_output=True, text=True, timeout=60, check=False
    )
    took_s = time.monotonic() - began_at
    if done.returncode == 0:
        return Told("accepted", took_s, done.stdout.strip())
    found = _ID.search(done.stderr)
    kind = {4: "StorageUnreachable", 1: "OutcomeUnknown"}.get(done.returncode, done.stderr)
    return Told("OutcomeUnknown" if found else kind, took_s, found[0] if found else None)


class Meanwhile:
    """Asks while the storage is away, from three doors at once, and looks at the API's health."""

    def __init__(self, lab: Lab, url: str) -> None:
        self._lab = lab
        self._url = url
        self.told: dict[str, Told] = {}
        self.ready: list[tuple[int, float]] = []
        self.alive: set[int] = set()

    def ask(self) -> None:
        doors: dict[str, Callable[[], Told]] = {
            "python": lambda: by_python(self._lab),
            "rest": lambda: by_rest(self._url),
            "cli": lambda: by_cli(self._lab),
        }
        with ThreadPoolExecutor(len(doors)) as pool:
            runs = {name: pool.submit(door) for name, door in doors.items()}
            with httpx.Client(base_url=self._url, timeout=30) as client:
                for _ in range(3):
                    self._look(client)
            self.told = {name: run.result() for name, run in runs.items()}

    def _look(self, client: httpx.Client) -> None:
        self.alive.add(client.get("/healthz").status_code)
        began_at = time.monotonic()
        self.ready.append((client.get("/readyz").status_code, time.monotonic() - began_at))

    def into(self, case: Case) -> None:
        for name, bound_s in (("python", PYTHON_S), ("rest", REST_S), ("cli", CLI_S)):
            told = self.told[name]
            case.at_most(f"{name}_told_after_s", told.took_s, bound_s)
            case.equal(f"{name}_told", told.what, told.what if told.what in TOLD else sorted(TOLD))
            named = told.job_id is not None or told.what == "StorageUnreachable"
            case.equal(f"{name}_is_told_the_id", named, True)
        case.equal("healthz", self.alive, {200})

    def into_when_away_all_along(self, case: Case) -> None:
        case.equal("readyz", {code for code, _ in self.ready}, {503})
        case.at_most("readyz_after_s", max(took_s for _, took_s in self.ready), READY_S)


# -- what must not leak ----------------------------------------------------------------------------------
def sockets_of(pid: int) -> int:
    """Open sockets of a process: connections to a server, doorbells."""
    count = 0
    for entry in os.listdir(f"/proc/{pid}/fd"):
        try:
            count += os.readlink(f"/proc/{pid}/fd/{entry}").startswith("socket:")
        except OSError:
            continue
    return count


def files_of(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


class Open:
    """What the processes hold open, and the server for them, when nothing happens."""

    def __init__(self, lab: Lab, groups: list[WorkerGroup], server: ApiServer) -> None:
        self._lab = lab
        self.pids = [member.pid for group in groups for member in lab.members(group)]
        self.pids += [server.pid]
        self.before = self._now()

    def _now(self) -> dict[str, int]:
        found = {"sockets": sum(map(sockets_of, self.pids)), "files": sum(map(files_of, self.pids))}
        if isinstance(self._lab.door, RedisDoor):
            clients = self._lab.door.ask("CLIENT", "LIST")
            found["clients"] = len(clients) if isinstance(clients, list) else clients.count(b"id=")
        return found

    def settled(self) -> bool:
        return all(count <= self.before[name] + 2 for name, count in self._now().items())

    def into(self, case: Case) -> None:
        wait_until(self.settled, 20, f"what is open is as before: {self.before}")
        case.equal("nothing_leaks_of", sorted(self.before), sorted(self._now()))


def runs_at_full_width(lab: Lab, case: Case) -> None:
    """As many of a limited task and of a key run at once as may, and no more."""
    door = lab.folder / "limited may end"
    limited = lab.submit_many("few", [(str(door), "few")] * (FEW + 1))
    options = {"concurrency_key": "k", "concurrency_limit": KEYED}
    keyed = lab.submit_many("until", [(str(door), "keyed")] * (KEYED + 1), **options)
    lab.await_starts(FEW, 10, note="few")
    lab.await_starts(KEYED, 10, note="keyed")
    let_pass(0.5)  # one more would have started by now
    widths = (len(lab.marks.starts(note="few")), len(lab.marks.starts(note="keyed")))
    case.equal("limited_at_once", widths, (FEW, KEYED))
    door.touch()
    lab.await_ended([*limited, *keyed], 20)


# -- the scene -------------------------------------------------------------------------------------------
def permits_are_taken(lab: Lab, door: Path) -> list[JobHandle[str]]:
    """Limited jobs run when the storage goes away, and others wait for their permits."""
    options = {"concurrency_key": "k", "concurrency_limit": KEYED}
    jobs = lab.submit_many("few", [(str(door), "few before")] * (2 * FEW))
    jobs += lab.submit_many("until", [(str(door), "keyed before")] * (2 * KEYED), **options)
    lab.await_starts(FEW, 10, note="few before")
    lab.await_starts(KEYED, 10, note="keyed before")
    return jobs


def away(lab: Lab, how: Away, for_s: float, *, all_along: bool, **told: object) -> None:
    case = lab.case("away", away_s=for_s, workers=2, held=HELD, **told)
    groups = [lab.launch("w1", concurrency=8), lab.launch("w2", concurrency=8)]
    lab.await_workers(*groups)
    server, url = lab.api("api")
    assert httpx.get(f"{url}/readyz").status_code == 200
    lab.await_ended(lab.submit_many("tick", [("warm",)] * 20), 20)
    lab.await_ended([lab.queue.get(by_rest(url).job_id or "")], 20)
    left_open = Open(lab, groups, server)
    held, door = lab.submit_held(HELD, "held")
    limited = permits_are_taken(lab, door)
    lab.await_starts(HELD, 20, note="held")
    before = {row.worker_id: (row.pid, row.epoch) for row in lab.queue.list_workers()}

    meanwhile = Meanwhile(lab, url)
    began_at = time.monotonic()
    with how(lab):
        door.touch()  # the bodies end while nobody can be told
        lab.marks.all()
        wait_until(lambda: len(lab.marks.ends(note="held")) == HELD, 20, "the bodies have ended")
        meanwhile.ask()
        let_pass(max(0.0, began_at + for_s - time.monotonic()))
    back_at = time.monotonic()

    first = wait_until(lambda: submitted(lab), RESUMED_S, "a job is accepted again")
    lab.await_starts(1, RESUMED_S, note="first afterwards")
    started_at = lab.marks.starts(note="first afterwards")[0].at
    case.at_most("consuming_resumed_after_s", started_at - back_at, RESUMED_S)
    lab.await_ended([first, *held, *limited], 30)
    for job in (*held, *limited):
        assert len(lab.marks.starts(job=job.id)) == 1, "no body runs again"
    outcomes = {tuple(lab.outcomes(job)) for job in (*held, *limited)}
    case.equal("outcomes_of_those_that_ran", outcomes, {(Outcome.COMPLETED,)})
    runs_at_full_width(lab, case)
    after = {row.worker_id: (row.pid, row.epoch) for row in lab.queue.list_workers()}
    case.equal("processes_and_epochs_are_the_same", after == before, True)
    wait_until(lambda: httpx.get(f"{url}/readyz").status_code == 200, 5, "the API is ready again")
    left_open.into(case)
    meanwhile.into(case)
    if all_along:
        meanwhile.into_when_away_all_along(case)
    accepted = [told.job_id for told in meanwhile.told.values() if told.what == "accepted" and told.job_id]
    lab.await_ended([lab.queue.get(job_id) for job_id in accepted], 20)
    lab.close(case)


def submitted(lab: Lab) -> JobHandle[str] | None:
    try:
        return lab.submit("tick", "first afterwards")
    except (StorageUnreachable, OutcomeUnknown):
        return None


@pytest.mark.only("redis")
@pytest.mark.slow
@beside
def test_a_server_that_is_killed_and_comes_back_later(site: Site) -> None:
    with own_server(site, "--appendonly", "yes") as (_, own), own.lab() as lab:
        away(lab, killed, AWAY_S, all_along=True, by="killed")


@pytest.mark.only("redis")
@pytest.mark.slow
@beside
def test_a_server_that_is_restarted_again_and_again(site: Site) -> None:
    with own_server(site, "--appendonly", "yes", "--appendfsync", "always") as (_, own), own.lab() as lab:
        away(lab, flapping, FLAPPING_S, all_along=False, by="restarted", restarts=FLAPS)


@pytest.mark.only("redis")
@pytest.mark.slow
@beside
def test_a_server_that_is_frozen(site: Site) -> None:
    with own_server(site) as (_, own), own.lab() as lab:
        away(lab, out_of_reach, FROZEN_S, all_along=True, by="frozen")


@pytest.mark.only("sqlite")
@beside
def test_a_database_that_another_program_keeps_locked(site: Site) -> None:
    with site.lab() as lab:
        away(lab, out_of_reach, AWAY_S, all_along=True, by="locked")
