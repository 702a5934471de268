"""Retention: what is over, and older than it has to be kept, is deleted in small steps."""

from __future__ import annotations

import contextlib
import os
import stat
from collections import Counter
from itertools import islice
from typing import Final

from msgspec import Struct

from fluxmesh.clock import US
from fluxmesh.storage.sqlite import place
from fluxmesh.storage.sqlite.locks import is_freed
from fluxmesh.storage.sqlite.operate import drop_tags
from fluxmesh.storage.sqlite.step import Step
from fluxmesh.storage.values import Pruned, Retention

JOBS_MOST: Final = 250  # a step of more would keep other writers waiting
OTHERS_MOST: Final = 500
_FILES_LOOKED_AT: Final = 200


class Doomed(Struct, frozen=True, gc=False):
    """The columns of `prune.doomed`, in order."""

    rid: int
    id: str
    queue: str
    tier: int
    place: int
    ended_us: int
    idempotency_key: str | None
    options: bytes | None


def prune(step: Step, retention: Retention, limit: int) -> Pruned:
    """At most `limit` (and JOBS_MOST) jobs, and the leftovers of all else."""
    most = max(1, min(limit, JOBS_MOST))
    doomed = _find_doomed(step, retention, most)
    _delete(step, doomed, retention)
    other = _drop_leftovers(step)
    other += _drop_workers(step, retention)
    other += step.run("prune.tasks", step.now_us, OTHERS_MOST)
    more = len(doomed) == most
    if not more:
        _sweep_folder(step, retention)
    return Pruned(jobs=len(doomed), other=other, more=more)


# -- jobs ------------------------------------------------------------------------------------------------


def _find_doomed(step: Step, retention: Retention, most: int) -> list[Doomed]:
    found: list[Doomed] = []
    for at in place.TERMINAL_PLACE.values():
        ttl_s = retention.dead_letter_ttl_s if at == place.DEAD_LETTER else retention.result_ttl_s
        before_us = step.now_us - round(ttl_s * US)
        if len(found) < most:
            found += [Doomed(*row) for row in step.all("prune.doomed", at, before_us, most - len(found))]
    return found


def _delete(step: Step, doomed: list[Doomed], retention: Retention) -> None:
    ttl_us = round(retention.idempotency_ttl_s * US)
    tally: Counter[tuple[str, int, int]] = Counter()
    for job in doomed:
        drop_tags(step, job.rid, job.options)
        if job.idempotency_key is not None:
            _keep_or_drop_key(step, job, job.idempotency_key, job.ended_us + ttl_us)
        tally[(job.queue, job.tier, job.place)] -= 1
    step.db.executemany(step.sql["operate.drop_job"], [(job.rid,) for job in doomed])
    # Not by step.count, which writes at the end: counters that come to nothing are to be gone in this step.
    step.db.executemany(step.sql["step.tally"], [(*key, change) for key, change in tally.items()])


def _keep_or_drop_key(step: Step, job: Doomed, key: str, forget_us: int) -> None:
    if forget_us > step.now_us:
        step.run("prune.keep_key", place.STATUS[job.place].value, forget_us, key, job.id)
    else:
        step.run("operate.drop_key", key, job.id)


# -- all else --------------------------------------------------------------------------------------------


def _drop_leftovers(step: Step) -> int:
    return sum(
        (
            step.run("prune.forget_keys", step.now_us, OTHERS_MOST),
            step.run("prune.waiters", step.now_us),
            step.run("prune.listeners", step.now_us),
            step.run("prune.missing"),
            step.run("prune.tallies"),
            step.run("prune.lanes"),
        )
    )


def _drop_workers(step: Step, retention: Retention) -> int:
    """Rows of workers that are gone. One that is dead or fenced is kept for a lease after its last beat: if
    its process lives after all, it shall hear so, and not find its row missing and put it back."""
    silent_since_us = step.now_us - round(retention.worker_ttl_s * US)
    gone = step.all("prune.workers", step.now_us, silent_since_us, OTHERS_MOST)
    for epoch, _, _ in gone:
        step.run("prune.drop_worker", epoch)
    if gone:
        step.run("prune.mesh")
        step.run("prune.affinity")
    for name in {name for _, bell, lock in gone for name in (bell, lock) if name is not None}:
        _remove_file(step, name)
    return len(gone)


def _remove_file(step: Step, name: str) -> None:
    """Remove a bell or a lock, if the kernel says that no process has it and no row names it.

    This may come before the commit, and even without one: what a process has is not touched, and a dead
    one's file is of no use once its jobs are taken back. (A missing lock proves nothing, so at worst a lease
    has to lapse.)
    """
    if step.one("prune.is_named", name, name) is not None:
        return  # runs of one process share its bell and its lock
    belfry = step.shared.belfry
    with contextlib.suppress(OSError):
        is_bell = stat.S_ISSOCK(os.lstat(belfry.folder / name).st_mode)
        if belfry.is_abandoned(name) if is_bell else is_freed(belfry.folder, name):
            belfry.remove(name)


def _sweep_folder(step: Step, retention: Retention) -> None:
    """Remove the files of processes that were killed, also of those that never were workers.

    Only old ones: a new lock is a moment without its holder, and a freed one is the proof of a death that
    may not have been looked for yet, also in another namespace of the file.
    """
    before_s = step.now_us / US - retention.worker_ttl_s
    with contextlib.suppress(OSError), os.scandir(step.shared.belfry.folder) as entries:
        for entry in islice(entries, _FILES_LOOKED_AT):
            if entry.stat(follow_symlinks=False).st_mtime < before_s:
                _remove_file(step, entry.name)
