"""C06: whatever another program writes into a column of a job, the jobs around it are run and shown."""

from __future__ import annotations

import contextlib
import itertools

import apsw
import pytest

from fluxmesh.cli.output import instant
from fluxmesh.job import Status
from fluxmesh.storage.sqlite import exchange, operate
from fluxmesh.storage.values import Settle
from fluxmesh.testing.contract.lab import COMPLETED, dead, retry
from tests.unit.sqlite.bench import Bench

MOST = (1 << 63) - 1
VALUES = ["x'y", "", "\x1b[31m\n", b"\xff\x00\x13\x37", -5, 0, 99, 1 << 62, MOST, -MOST - 1, 1.5e300, None]


def spoil(bench: Bench, value: object) -> None:
    """One job for each column, with the value written there if SQLite takes it."""
    for name in [row[1] for row in bench.db.execute('pragma table_info("fluxmesh:job")')]:
        if name != "rid":
            with contextlib.suppress(apsw.Error):
                bench.set(bench.put(), **{name: value})


def run_all(bench: Bench, good: set[str]) -> None:
    """Claim and end whatever can be claimed; spoilt jobs in every way."""
    worker = bench.worker()
    ends = itertools.cycle([COMPLETED, dead(), retry()])
    for _ in range(10):
        given = bench.claim(worker, 20)
        settle = [Settle(job.id, job.token, COMPLETED if job.id in good else next(ends)) for job in given]
        bench.exchange(worker, settle=tuple(settle))


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_other_jobs_are_run_and_every_job_is_shown(bench: Bench, value: object) -> None:
    good = set(bench.put_many(10))
    spoil(bench, value)
    good |= set(bench.put_many(10))
    bench.run(exchange.promote, 1_000)
    run_all(bench, good)
    assert {bench.status(job_id) for job_id in good} == {Status.COMPLETED}
    ids = bench.found()
    assert good <= set(ids)
    for job_id in ids:
        job = bench.job(job_id)
        assert [instant(at) for at in (job.created_at, job.scheduled_at, job.completed_at)]
    bench.run(operate.replay, ids)
    bench.run(operate.cancel, ids)
    bench.run(operate.discard, ids)


def test_spoilt_running_jobs_keep_no_other_from_its_end(bench: Bench) -> None:
    worker = bench.worker()
    for value in VALUES:
        spoilt = bench.put()
        good = bench.put()
        given = bench.claim(worker, 2)
        for name in ("attempts", "token", "started_us", "worker_id", "history", "percent", "cancel", "life"):
            with contextlib.suppress(apsw.Error):
                bench.set(spoilt, **{name: value})
        bench.exchange(worker, settle=tuple(Settle(job.id, job.token, retry()) for job in given[::-1]))
        assert bench.status(good) is Status.SCHEDULED
