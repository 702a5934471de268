"""What jobs cost: processor time of the worker and of the server, and the scripts that the server ran."""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from benchmarks.bench import Site
from benchmarks.crew import WorkerProcess, usage_of_tree
from benchmarks.figures import rounded
from benchmarks.gauge import Spent


class Reading(Struct, frozen=True):
    completed: int
    worker_cpu_s: float
    spent: Spent | None  # by the server, where there is one


class Toll:
    """From the first look that finds a job completed until all are: the start of the worker is left out."""

    def __init__(self, site: Site, worker: WorkerProcess, count: int) -> None:
        self._site = site
        self._worker = worker
        self._count = count
        self._readings: list[Reading] = []
        self._looks = 0

    async def look(self, completed: int) -> None:
        """Two readings, not one at each look: they take time from what is measured."""
        self._looks += bool(self._readings)
        if completed >= self._count or (completed and not self._readings):
            spent = None if self._site.gauge is None else await self._site.gauge.spent()
            self._readings.append(Reading(completed, usage_of_tree(self._worker.pid).cpu_s, spent))

    def told(self) -> dict[str, Any] | None:
        """None where all was over at the first look."""
        if len(self._readings) < 2:
            return None
        return cost(self._readings[0], self._readings[-1], self._looks)


def cost(first: Reading, last: Reading, looks: int) -> dict[str, Any]:
    """Between two readings. Each look was a script too, and a small one: it is taken off the calls."""
    jobs = last.completed - first.completed
    told: dict[str, Any] = {
        "jobs": jobs,
        "worker_cpu_s_per_1000_jobs": rounded((last.worker_cpu_s - first.worker_cpu_s) * 1e3 / jobs),
    }
    if first.spent is None or last.spent is None:
        return told
    calls = last.spent.scripts - first.spent.scripts - looks
    took_us = (last.spent.scripts_s - first.spent.scripts_s) * 1e6
    return told | {
        "server_cpu_s_per_1000_jobs": rounded((last.spent.cpu_s - first.spent.cpu_s) * 1e3 / jobs),
        "evalsha_calls_per_job": rounded(calls / jobs),
        "evalsha_usec_per_call": rounded(took_us / calls) if calls else None,
        "evalsha_usec_per_job": rounded(took_us / jobs),
    }
