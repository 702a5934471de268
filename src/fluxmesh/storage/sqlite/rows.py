"""A row of the job table as a record for doors."""

from __future__ import annotations

from typing import Any

from fluxmesh.job import Job
from fluxmesh.storage.records import Full, record_of
from fluxmesh.storage.sqlite import place


def job_of(row: tuple[Any, ...]) -> Job:
    """The record of a row of `reads.job`, whose columns are those of Full, in order."""
    full = Full(*row)
    return record_of(full, place.STATUS[full.place])
