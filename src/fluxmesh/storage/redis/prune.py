"""Retention: what is over, and older than it has to be kept, is deleted in small steps."""

from __future__ import annotations

from typing import Final

from fluxmesh.clock import US
from fluxmesh.storage.redis.scripts import Scripts
from fluxmesh.storage.values import Pruned, Retention

JOBS_MOST: Final = 250  # a script of more would keep other clients waiting
OTHERS_MOST: Final = 500


async def prune(scripts: Scripts, retention: Retention, limit: int) -> Pruned:
    """At most `limit` (and JOBS_MOST) jobs, and the leftovers of all else."""
    ages = (
        retention.result_ttl_s,
        retention.dead_letter_ttl_s,
        retention.worker_ttl_s,
        retention.idempotency_ttl_s,
    )
    most = max(1, min(limit, JOBS_MOST))
    jobs, other, more = await scripts.run("prune", *(round(age * US) for age in ages), most, OTHERS_MOST)
    return Pruned(jobs=jobs, other=other, more=bool(more))
