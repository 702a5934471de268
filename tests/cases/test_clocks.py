"""Workers whose clocks are wrong, on a storage that has a clock of its own: C24. (Its schedule comes with
schedules.)"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import pytest

from fluxmesh.clock import SKEW_ENV
from tests.cases.beside import beside
from tests.cases.harness import START_S, Lab, Site, wait_until
from tests.cases.report import Case, scaled
from tests.cases.workers import DirectWorker, WorkerGroup

pytestmark = [pytest.mark.only("redis"), pytest.mark.slow]

DELAY_S: Final = 5.0
NEAR_S: Final = 0.5
LONG_S: Final = scaled(10)
STAMPS_S: Final = 0.5  # between this machine's clock and what the storage wrote: it is the same machine
WRONG: Final = "clock differs from the storage's"
FAKETIME: Final = "libfaketime.so.1"


def faketime() -> Path:
    """Where Debian and its kin put it."""
    found = sorted(Path("/usr/lib").glob(f"*/faketime/{FAKETIME}"))
    if not found:
        raise FileNotFoundError(f"{FAKETIME} is missing: run `make services`")
    return found[0]


def by_offset(hours: float) -> dict[str, str]:
    return {SKEW_ENV: str(hours * 3_600)} if hours else {}


def by_library(hours: float) -> dict[str, str]:
    """The whole process is lied to, but for monotonic time. (The lies reach `time.sleep` all the same, which
    counts by it: so no body sleeps, and no supervisor waits for a child.)"""
    if not hours:
        return {}
    return {
        "LD_PRELOAD": str(faketime()),
        "FAKETIME": f"{hours:+g}h",
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
    }


def doctor(lab: Lab, environ: Mapping[str, str]) -> tuple[str, str]:
    argv = [sys.executable, "-m", "fluxmesh.cli", "doctor", "--json"]
    env = {**lab.env(), **environ}
    done = subprocess.run(
        argv, env=env, cwd=lab.folder, capture_output=True, text=True, timeout=START_S, check=False
    )
    checks = {check["name"]: check for check in json.loads(done.stdout)["checks"]}
    return checks["skew"]["status"], checks["beats"]["status"]


def stamps_off(lab: Lab, began_at: float) -> float:
    """How far the stored instants lie outside of the time that this has taken."""
    ended_at = time.time()
    stamps = [
        stamp
        for record in lab.records()
        for stamp in (record.created_at, record.started_at, record.completed_at)
        if stamp is not None
    ]
    stamps += [stamp for row in lab.queue.list_workers() for stamp in (row.started_at, row.last_heartbeat)]
    return max(0.0, began_at - min(stamps), max(stamps) - ended_at)


class Fleet:
    """W1 is right, the others are not; each serves a queue of its own beside the common one."""

    def __init__(self, lab: Lab, environs: Mapping[str, Mapping[str, str]], *, direct: bool) -> None:
        self.lab = lab
        self.groups: dict[str, WorkerGroup | DirectWorker] = {}
        for name, environ in environs.items():
            if direct:
                self.groups[name] = lab.direct_worker(name, "default", f"of-{name}", environ=environ)
            else:
                self.groups[name] = lab.launch(name, "--queues", f"default,of-{name}", environ=environ)
        lab.await_workers(*self.groups.values())

    def logged(self, event: str) -> dict[str, int]:
        return {name: group.log.read_text("utf-8").count(event) for name, group in self.groups.items()}

    def lateness(self, name: str) -> float:
        """Of the delayed job that this worker has produced."""
        [produced] = self.lab.marks.ends(note=f"{name}, produced")
        [started] = self.lab.marks.starts(note=f"{name}, delayed")
        return started.at - produced.at - DELAY_S


def wrong_clocks(
    site: Site, name: str, environs: Mapping[str, Mapping[str, str]], *, direct: bool = False, **told: Any
) -> None:
    with site.lab(name) as lab:
        case: Case = lab.case("C24", delay_s=DELAY_S, long_s=LONG_S, **told)
        began_at = time.time()
        fleet = Fleet(lab, environs, direct=direct)
        long = [
            lab.submit("anap" if direct else "nap", LONG_S, f"{name}, long", queue=f"of-{name}")
            for name in environs
        ]
        producers = [lab.submit("pass on", DELAY_S, name, queue=f"of-{name}") for name in environs]
        lab.await_ended(producers, 20)
        lab.ids += [str(lab.now(producer).result) for producer in producers]
        delayed = [lab.queue.get(job_id) for job_id in lab.ids[-len(producers) :]]
        lab.await_ended([*long, *delayed], LONG_S + DELAY_S + 20)
        late = {name: fleet.lateness(name) for name in environs}
        case.at_most("delayed_late_by_s", max(late.values()), NEAR_S)
        case.at_most("delayed_early_by_s", max(-least for least in late.values()), NEAR_S)
        jobs = [*long, *producers, *delayed]
        case.equal("starts", {len(lab.marks.starts(job=job.id)) for job in jobs}, {1})
        case.equal("recoveries_logged", sum(fleet.logged("jobs reaped").values()), 0)
        expected = {name: int(bool(environ)) for name, environ in environs.items()}
        wait_until(lambda: fleet.logged(WRONG) == expected, 5, "those with a wrong clock say so, once")
        case.equal("workers_that_say_their_clock_is_wrong", fleet.logged(WRONG), expected)
        case.at_most("stamps_off_by_s", stamps_off(lab, began_at), STAMPS_S)
        told_by_doctor = {name: doctor(lab, environ) for name, environ in environs.items()}
        healths = {name: ("warn" if environ else "ok", "ok") for name, environ in environs.items()}
        case.equal("doctor_on_skew_and_beats", told_by_doctor, healths)
        lab.close(case)


@beside
def test_c24_a_worker_with_a_wrong_clock_changes_nothing_and_is_told(site: Site) -> None:
    environs = {"w1": by_offset(0), "w2": by_offset(1), "w3": by_offset(-1)}
    wrong_clocks(site, "offset", environs, clocks="by offset", hours="0 +1 -1")


@beside
def test_c24_the_same_by_libfaketime(site: Site) -> None:
    environs = {"w1": by_library(0), "w2": by_library(1)}
    wrong_clocks(site, "faketime", environs, direct=True, clocks="by libfaketime", hours="0 +1")
