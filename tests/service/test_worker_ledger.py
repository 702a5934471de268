"""What a worker writes down for whoever watches over it, when a body has ended and its loop does not turn."""

from __future__ import annotations

import asyncio
import math
import time

import pytest

from fluxmesh.middleware import CallNext, JobRun
from fluxmesh.outcome import End
from fluxmesh.storage.values import OnDeath
from fluxmesh.worker.beater import meaning_of_death
from fluxmesh.worker.ledger import Entry, LedgerReader, make_ledger_file
from fluxmesh.worker.stall import is_ground
from tests.service.workshop import LIMIT_S, Workshop, workshop

FAR_S = 1e9


@pytest.mark.parametrize("guided", [False, True])
@workshop()
async def test_a_body_that_ended_on_its_thread_is_late_for_nothing_while_the_loop_stands_still(
    shop: Workshop, guided: bool
) -> None:
    gate, begun = shop.gate(), shop.gate()
    reader = LedgerReader(make_ledger_file())
    after: list[Entry] = []

    async def around(run: JobRun, call_next: CallNext) -> End:
        end = await call_next()
        after.extend(reader.entries())
        return end

    @shop.task("waits")
    def waits() -> str:
        begun.set()
        gate.wait(LIMIT_S)
        return "done"

    if guided:
        shop.registry.middleware += (around,)
    job_id = await shop.put("waits")
    worker = shop.make_worker()
    worker.write_ledger(reader.fd)
    await worker.start()
    shop.workers.append(worker)
    assert await asyncio.to_thread(begun.wait, LIMIT_S)
    vitals = reader.vitals()
    assert vitals is not None

    [entry] = reader.entries()
    run = worker._table.runs[job_id]
    assert is_ground(entry, vitals, FAR_S)
    assert meaning_of_death(run, math.inf) is OnDeath.TIMEOUT
    gate.set()
    until = time.monotonic() + LIMIT_S
    while not (entry := reader.entries()[0]).left:  # no await: the loop stands in this test
        assert time.monotonic() < until
        time.sleep(0.001)  # noqa: ASYNC251
    assert not is_ground(entry, vitals, FAR_S)
    while meaning_of_death(run, math.inf) is OnDeath.TIMEOUT:
        assert time.monotonic() < until
        time.sleep(0.001)  # noqa: ASYNC251

    assert (await shop.ended(job_id)).result == "done"
    assert reader.entries() == []
    assert [entry.left for entry in after] == [False] * guided  # the loop goes on with it
    reader.close()
