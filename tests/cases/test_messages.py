"""One bad message must not hurt the batch: C06."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

from fluxmesh.job import Outcome, Status
from tests.cases.harness import Lab

JUNK = bytes.fromhex("FF001337")


class CreatesFile:
    """Unpickling this creates the file: what must not happen."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.open, (str(self._path), os.O_CREAT | os.O_WRONLY))


def shown(lab: Lab, job_id: str) -> Any:
    """What another process reads through `fluxmesh jobs show`."""
    argv = [sys.executable, "-m", "fluxmesh.cli", "jobs", "show", job_id, "--json"]
    done = subprocess.run(argv, env=lab.env(), cwd=lab.folder, capture_output=True, timeout=60, check=True)
    return json.loads(done.stdout)


def test_c06_undecodable_payloads_go_to_the_dead_letters_alone(lab: Lab) -> None:
    case = lab.case("C06", jobs=10, bad=2)
    jobs = lab.submit_many("tick", [(f"job {number}",) for number in range(1, 11)])
    trap = lab.folder / "created-by-a-pickle"
    evil = pickle.dumps(CreatesFile(trap))
    os.close(pickle.loads(evil))  # the trap works
    trap.unlink()
    for number, payload in ((3, JUNK), (6, evil)):
        lab.door.overwrite_payload(jobs[number - 1].id, payload)
    group = lab.worker("w1", concurrency=10)
    [before] = lab.members(group)
    lab.await_ended(jobs, 30)

    bad, good = [jobs[2], jobs[5]], [job for job in jobs if job not in (jobs[2], jobs[5])]
    case.equal("completed", sum(job.status is Status.COMPLETED for job in good), 8)
    case.equal("bad_status", {job.status for job in bad}, {Status.DEAD_LETTER})
    case.equal("bad_reason", {lab.now(job).reason for job in bad}, {"undecodable"})
    case.equal("bad_history", {tuple(lab.outcomes(job)) for job in bad}, {(Outcome.UNDECODABLE,)})
    case.equal("raw_payloads", [lab.now(job).raw_payload for job in bad], [JUNK.hex(), evil.hex()])
    for job, payload in zip(bad, (JUNK, evil), strict=True):
        document = shown(lab, job.id)
        assert (document["status"], document["raw_payload"]) == ("DEAD_LETTER", payload.hex()), document
    [after] = lab.members(group)
    case.equal("worker_is_the_same", (after.pid, after.epoch), (before.pid, before.epoch))
    case.equal("pickle_was_run", trap.exists(), False)
    lab.close(case)
