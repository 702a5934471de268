"""Changes of owner outside the exchange: release, transfer, take_held; and notes on owned jobs."""

from __future__ import annotations

from collections.abc import Sequence

from fluxmesh.storage.sqlite import moves, place
from fluxmesh.storage.sqlite.belonging import Apart
from fluxmesh.storage.sqlite.claim import Claim, Found, claimed
from fluxmesh.storage.sqlite.held import next_s, takeable
from fluxmesh.storage.sqlite.step import Me, Row, Step
from fluxmesh.storage.values import (
    MAX_HOPS,
    ClaimedJob,
    Owned,
    ProgressNote,
    Standing,
    TakeAnswer,
    WorkerRef,
)


def owned_row(step: Step, worker: WorkerRef, job_id: str, token: int) -> Row | None:
    """The job, if this worker run owns it under this token."""
    row = step.row(job_id)
    if row is None or row.token != token or row.lane != str(worker.epoch):
        return None
    return row if row.place in (place.HELD, place.RUNNING) else None


def release(step: Step, worker: WorkerRef, jobs: Sequence[Owned]) -> list[bool]:
    step.asking = worker.epoch
    answers = []
    for job in jobs:
        row = owned_row(step, worker, job.id, job.token)
        if row is not None:
            moves.give_back(step, row, token=step.token_after(row.token))
        answers.append(row is not None)
    return answers


def transfer(step: Step, thief: WorkerRef, jobs: Sequence[Owned]) -> list[ClaimedJob]:
    standing, me = step.standing(thief.epoch)
    if standing is not Standing.GOOD or me is None or _is_silent(step, me):
        return []
    taken = []
    apart = Apart.of(step, me)
    for job in jobs:
        row = step.row(job.id)
        if row is None or row.token != job.token or row.place != place.HELD or row.lane == str(me.epoch):
            continue
        if (row.hops or 0) >= MAX_HOPS or not me.can_run(row.queue, row.tier, row.task):
            continue
        if apart is not None and apart.until_us(row.queue, row.tier, row.task, row.slot, row.since_us):
            continue
        found = step.one("exchange.owned", row.id, row.token, row.lane)
        if found is not None:
            taken.append(_hop(step, me, Found(*found), (row.hops or 0) + 1, running=False))
    return taken


def _is_silent(step: Step, me: Me) -> bool:
    found = step.one("liveness.beat_of", me.epoch)
    return found is None or step.boot_us - found[0] > me.lease_us


def _hop(step: Step, me: Me, found: Found, hops: int, *, running: bool) -> ClaimedJob:
    token = step.token_after(found.token)
    to = place.RUNNING if running else place.HELD
    started_us = step.now_us if running else None
    values = (str(me.epoch), step.boot_us, token, started_us, me.worker_id, hops, to, found.rid)
    step.run("exchange.hop", *values)
    step.count(found.queue, found.tier, place.HELD, -1)
    step.count(found.queue, found.tier, to, 1)
    return claimed(found, token, hops)


def take_held(step: Step, worker: WorkerRef, slots: int) -> TakeAnswer:
    standing, me = step.standing(worker.epoch)
    if standing is not Standing.GOOD or me is None or not me.donates or slots < 1 or _is_silent(step, me):
        return TakeAnswer()
    claim = Claim(step, me)
    taken: list[ClaimedJob] = []
    for held in takeable(step, me):
        found = held.found
        if len(taken) >= slots:
            step.ready_again(found.queue, found.tier, found.task, found.slot, found.since_us)
            break
        if held.from_us > step.boot_us:
            continue
        if claim.outranks(found.tier):
            break
        if claim.is_paused(found.queue):
            continue
        if found.expires_us is not None and found.expires_us <= step.now_us:
            continue
        taken.append(_hop(step, me, found, held.hops + 1, running=True))
    if len(taken) >= slots:
        step.run("exchange.busy", me.epoch)
        claim.claim(0, 0, ())  # others hear of what is ready as well, which it may have been woken for
    return TakeAnswer(tuple(taken), next_s(step, me) if len(taken) < slots else None)


def progress(step: Step, worker: WorkerRef, notes: Sequence[ProgressNote]) -> list[bool]:
    answers = []
    for note in notes:
        row = owned_row(step, worker, note.id, note.token)
        if row is not None:
            on_death = None if note.on_death is None else int(note.on_death)
            step.run("exchange.progress", note.percent, note.message, on_death, row.rid)
        answers.append(row is not None)
    return answers
