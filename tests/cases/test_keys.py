"""Unique keys die with their job: C20. One idempotency key, many producers: C21. Nothing stays: C22."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fluxmesh.errors import IdempotencyConflict, JobConflict
from fluxmesh.handle import JobHandle
from fluxmesh.job import Outcome, Status
from tests.cases.beside import beside
from tests.cases.harness import LEASE_S, REAP_S, Lab, Site, wait_until
from tests.cases.report import Case, scaled

# -- C20 -------------------------------------------------------------------------------------------------
KEY = "sync-42"


def submit_unique(lab: Lab, task: str, *args: object, **options: object) -> JobHandle[str]:
    return lab.submit(task, *args, unique_key=KEY, **options)


def holds(lab: Lab, case: Case, what: str, holder: JobHandle[str]) -> None:
    """A second enqueue meanwhile returns the first job."""
    second = submit_unique(lab, "tick", "second")
    case.equal(f"{what}: second is the first", (second.id == holder.id, second.deduplicated), (True, True))


def freed(lab: Lab, case: Case, what: str) -> JobHandle[str]:
    """A new enqueue makes a new job at once, which then ends."""
    new = submit_unique(lab, "tick", f"after {what}")
    case.equal(f"{what}: a new job at once", new.deduplicated, False)
    return new


@beside
def test_c20_a_unique_key_dies_with_its_job(site: Site) -> None:
    with site.lab() as lab:
        case = lab.case("C20", variants="a b c d e", unique_key=KEY)
        # (e) expires unstarted: the only worker serves another queue, and does the housekeeping.
        keeper = lab.worker("keeper", "--queues", "other")
        expiring = submit_unique(lab, "tick", "e", expires_in=0.5)
        holds(lab, case, "e", expiring)
        wait_until(lambda: expiring.status is Status.EXPIRED, 10, "it has expired")
        new = freed(lab, case, "e")
        # (c) cancelled.
        holds(lab, case, "c", new)
        new.cancel()
        new = freed(lab, case, "c")
        group = lab.worker("w1")
        lab.await_ended([new], 10)
        # (a) fails all its retries.
        failing = submit_unique(lab, "fail", 9, 0.2, "a", max_retries=1, backoff_base_seconds=0.2)
        holds(lab, case, "a", failing)
        lab.await_ended([failing], 20)
        case.equal("a: dead letter", failing.status, Status.DEAD_LETTER)
        door = lab.folder / "door"
        new = submit_unique(lab, "until", str(door), "after a")
        case.equal("a: a new job at once", new.deduplicated, False)
        with pytest.raises(JobConflict):
            failing.replay()
        case.equal("a: replay is refused meanwhile", failing.status, Status.DEAD_LETTER)
        door.touch()
        lab.await_ended([new], 10)
        # (d) deleted by an operator.
        failing.discard()
        lab.ids.remove(failing.id)
        new = freed(lab, case, "d")
        lab.await_ended([new], 10)
        # (b) its worker is killed, another one completes it.
        recovered = submit_unique(lab, "nap", 1.0, "b")
        lab.await_starts(1, 10, note="b")
        group.kill()
        holds(lab, case, "b", recovered)
        lab.worker("w2")
        lab.await_starts(2, 2 * (LEASE_S + REAP_S), note="b")
        holds(lab, case, "b again", recovered)
        lab.await_ended([recovered], 20)
        case.equal("b: outcomes", lab.outcomes(recovered), [Outcome.CRASHED, Outcome.COMPLETED])
        lab.await_ended([freed(lab, case, "b")], 10)
        case.equal("keeper_lives", keeper.running, True)
        lab.close(case)


# -- C21 -------------------------------------------------------------------------------------------------
ORDER_KEY = "order-881"
PROGRAMS, THREADS, COMMANDS = 4, 12, 2


def start_program(lab: Lab, kwargs: dict[str, object], **settings: object) -> subprocess.Popen[str]:
    """A process of its own that submits from many threads at once, when it is told to."""
    program = Path(__file__).with_name("submitter.py")
    argv = [sys.executable, program, str(THREADS), ORDER_KEY, json.dumps(kwargs)]
    pipe = subprocess.PIPE
    return subprocess.Popen(argv, env=lab.env(**settings), stdin=pipe, stdout=pipe, text=True)


def start_command(lab: Lab, kwargs: dict[str, object], **settings: object) -> subprocess.Popen[str]:
    argv = [sys.executable, "-m", "fluxmesh.cli", "submit", "--task", "order", "--json"]
    argv += ["--kwargs", json.dumps(kwargs), "--idempotency-key", ORDER_KEY]
    pipe = subprocess.PIPE
    return subprocess.Popen(argv, env=lab.env(**settings), stdout=pipe, stderr=pipe, text=True)


@beside
def test_c21_fifty_parallel_submits_of_one_key_make_one_job(site: Site) -> None:
    with site.lab() as lab:
        case = lab.case("C21", python=PROGRAMS * THREADS, commands=COMMANDS, key=ORDER_KEY)
        body = {"amount": 10, "cur": "EUR"}
        assert lab.queue.counts().total == 0  # the file is there: the command creates none
        programs = [start_program(lab, body) for _ in range(PROGRAMS)]
        for program in programs:
            assert program.stdout is not None
            assert program.stdout.readline() == "ready\n"
        commands = [start_command(lab, body) for _ in range(COMMANDS)]
        answers: list[dict[str, object]] = []
        for program in programs:
            assert program.stdin is not None
            program.stdin.write("go\n")
            program.stdin.flush()
        for program in programs:
            answers += json.loads(program.communicate(timeout=60)[0])
        texts = [command.communicate(timeout=60)[0] for command in commands]
        case.equal("exit_codes", {run.returncode for run in [*programs, *commands]}, {0})
        ids = {str(answer["id"]) for answer in answers} | {json.loads(text)["id"] for text in texts}
        created = sum(not answer["deduplicated"] for answer in answers)
        case.equal("ids", len(ids), 1)
        case.equal("created_in_python", created in (0, 1), True)  # a command may have been the first
        case.equal("stored_jobs", lab.queue.counts().total, 1)
        [only] = ids
        lab.ids.append(only)

        # Every producer so far has ended; the mapping is in the file.
        lab.queue.close()
        reordered = lab.queue.submit("order", kwargs={"cur": "EUR", "amount": 10}, idempotency_key=ORDER_KEY)
        case.equal("reordered_is_the_same", (reordered.id, reordered.deduplicated), (only, True))
        with pytest.raises(IdempotencyConflict):
            lab.queue.submit("order", kwargs={**body, "amount": 11}, idempotency_key=ORDER_KEY)
        refused = start_command(lab, {**body, "amount": 11})
        told = refused.communicate(timeout=60)[1]
        case.equal("other_payload_exit_code", refused.returncode, 6)
        assert ORDER_KEY in told, told
        case.equal("stored_jobs_still", lab.queue.counts().total, 1)

        with lab.beside("beta") as beta:
            other = beta.queue.submit("order", kwargs=body, idempotency_key=ORDER_KEY)
            beta.ids.append(other.id)
            case.equal("beta_has_its_own", (other.id != only, other.deduplicated), (True, False))
            lab.worker("w1")
            beta.worker("beta-w1")
            lab.await_ended([reordered], 10)
            beta.await_ended([other], 10)
            again = lab.queue.submit("order", kwargs=body, idempotency_key=ORDER_KEY)
            case.equal("the_same_when_it_has_ended", again.id, only)
            case.equal("starts", len(lab.marks.starts(job=only)), 1)
            case.close([*lab.judged(), *beta.judged()])


# -- C22 a -----------------------------------------------------------------------------------------------
TTL_S = scaled(3)
EACH = 1_000


@beside
def test_c22_what_is_over_is_deleted(site: Site) -> None:
    with site.lab(result_ttl=TTL_S, dead_letter_ttl=TTL_S, idempotency_ttl=TTL_S) as lab:
        case = lab.case("C22a", ttl_s=TTL_S, ok=EACH, failing=EACH)
        lab.worker("w1", concurrency=32)
        warm = lab.submit("tick", "warm")
        wait_until(lambda: not _stored(lab), 30, "the first job is pruned")
        baseline = lab.door.rows()
        good = lab.submit_many("tick", [("good",)] * EACH, tags=["kept"])
        bad = lab.submit_many("fail", [(9, 0.0, "bad")] * EACH, max_retries=0, tags=["kept"])
        keyed = [lab.submit("tick", "keyed", idempotency_key=f"key {n}") for n in range(20)]
        ended = 2 * EACH + len(keyed) + 1
        wait_until(lambda: len(lab.marks.ends()) == ended, 60, "all bodies have ended")
        ended_at = time.monotonic()
        wait_until(lambda: not _stored(lab), 60, "all are pruned")
        case.at_most("gone_after_s", time.monotonic() - ended_at, 15)
        wait_until(lambda: _grown(lab, baseline) <= 10, 15, "the other tables shrink too")
        case.at_most("rows_above_the_baseline", _grown(lab, baseline), 10)
        case.equal("jobs_counted", lab.queue.counts().total, 0)
        case.equal("starts", len(lab.marks.starts()), ended)
        case.close(lab.judged(gone=[job.id for job in [warm, *good, *bad, *keyed]]))


def _stored(lab: Lab) -> int:
    return sum(lab.door.places().values())


def _grown(lab: Lab, baseline: dict[str, int]) -> int:
    return max(rows - baseline.get(name, 0) for name, rows in lab.door.rows().items())
