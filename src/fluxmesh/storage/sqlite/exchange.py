"""The one hot-path verb: settle, promote what is due, begin, claim, in one transaction."""

from __future__ import annotations

from collections.abc import Sequence

from fluxmesh.codec import append_history
from fluxmesh.job import Status
from fluxmesh.storage.sqlite import held as held_jobs
from fluxmesh.storage.sqlite import moves, place
from fluxmesh.storage.sqlite.claim import Claim, Found, claimed
from fluxmesh.storage.sqlite.step import Step
from fluxmesh.storage.values import (
    Begun,
    ClaimedJob,
    ExchangeAnswer,
    ExchangeRequest,
    Owned,
    Promoted,
    Settle,
    Settled,
    Standing,
)

_PROMOTE_IN_EXCHANGE = 250


def exchange(step: Step, request: ExchangeRequest) -> ExchangeAnswer:
    epoch = request.worker.epoch
    step.asking = epoch
    standing, me = step.standing(epoch)
    lane = str(epoch)
    settled = tuple(settle_all(step, lane, request.settle))
    if standing is not Standing.GOOD or me is None:
        return ExchangeAnswer(standing, settled, tuple(Begun.LOST for _ in request.begin))
    next_due_us = promote_due(step, _PROMOTE_IN_EXCHANGE)[1]
    wants = request.slots + request.extra
    if not wants and not request.begin:
        step.run("exchange.busy", epoch)
        return ExchangeAnswer(standing, settled, next_due_s=_seconds(next_due_us, step.now_us))
    given = _given_before(step, request)
    claim = Claim(step, me, request.request_id)
    begun = tuple([begin(step, claim, item) for item in request.begin])
    slots = request.slots + sum(answer is not Begun.BEGUN for answer in begun)
    running, held = given or claim.claim(slots, request.extra, request.reserve)
    short = len(running) < slots
    step.run("exchange.wait" if short else "exchange.busy", epoch)
    wake_us = [at for at in (next_due_us, claim.next_look_us) if at is not None]
    return ExchangeAnswer(
        standing,
        settled,
        begun,
        tuple(running),
        tuple(held),
        more=claim.more,
        next_due_s=_seconds(min(wake_us, default=None), step.now_us),
        next_held_s=held_jobs.next_s(step, me) if short else None,
    )


def _seconds(at_us: int | None, now_us: int) -> float | None:
    return None if at_us is None else max(0.0, (at_us - now_us) / 1e6)


def settle_all(step: Step, lane: str, items: Sequence[Settle]) -> list[Settled]:
    """Normal returns, by far the most, are written together; every other end by itself."""
    answers: list[Settled] = []
    complete: dict[int, tuple[object, ...]] = {}
    for item in items:
        if item.transition.status is Status.COMPLETED and _note_completed(step, lane, item, complete):
            answers.append(Settled.APPLIED)
        else:
            answers.append(settle(step, lane, item))
    if complete:
        step.db.executemany(step.sql["exchange.complete"], complete.values())
    return answers


def _note_completed(step: Step, lane: str, item: Settle, complete: dict[int, tuple[object, ...]]) -> bool:
    row = step.one("exchange.running", item.id)
    if row is None or row[1] != item.token or row[2] != place.RUNNING or row[3] != lane or row[0] in complete:
        return False
    rid, _, _, _, queue, tier, task, life, attempts, started_us, worker_id, history, key = row
    transition = item.transition
    history = append_history(
        history, life=life, attempt=attempts + 1, started_us=started_us, ended_us=step.now_us,
        worker_id=worker_id or "", outcome=transition.outcome.value, error=None,
    )  # fmt: skip
    complete[rid] = (step.now_us, step.now_us, transition.result, history, item.message, rid)
    step.count(queue, tier, place.RUNNING, -1)
    step.count(queue, tier, place.COMPLETED, 1)
    step.freed(task, key)
    step.ended(item.id)
    return True


def settle(step: Step, lane: str, item: Settle) -> Settled:
    """End one running job by (owner, token)."""
    row = step.row(item.id)
    if row is None or row.token != item.token:
        step.stale()
        return Settled.STALE
    if row.place == place.RUNNING and row.lane == lane:
        moves.apply(step, row, item.transition, token=row.token, percent=item.percent, message=item.message)
        return Settled.APPLIED
    if row.place in (place.HELD, place.RUNNING):
        step.stale()
        return Settled.STALE
    # The token was not passed on since: the place it has now is the one this very settle gave it.
    return Settled.ALREADY


def promote_due(step: Step, limit: int) -> tuple[int, int | None]:
    """Make due jobs ready, oldest first in each tier. The number, and the first instant still to come."""
    firsts = step.one("claim.due")
    if firsts is None or all(at is None for at in firsts):
        return 0, None
    count = 0
    for tier, at in enumerate(firsts):
        if at is None or at > step.now_us or count >= limit:
            continue
        rows = step.all("claim.due_jobs", str(tier), step.now_us, limit - count)
        seq = step.next_seq(len(rows))
        updates = []
        for offset, (rid, queue, task, slot) in enumerate(rows):
            updates.append((place.ready_lane(tier, queue), seq + offset, seq + offset, rid))
            step.count(queue, tier, place.SCHEDULED, -1)
            step.count(queue, tier, place.READY, 1)
            step.ready(queue, tier, task, slot=slot)
        step.db.executemany(step.sql["claim.promote"], updates)
        count += len(rows)
    if count:
        firsts = step.one("claim.due") or ()
    return count, min((at for at in firsts if at is not None), default=None)


def promote(step: Step, limit: int) -> Promoted:
    """The housekeeping verb: promotes, and expires what was not started in time."""
    for (job_id,) in step.all("claim.expired", step.now_us, limit):
        row = step.row(job_id)
        if row is not None:
            token = step.token_after(row.token) if row.place == place.HELD else row.token
            moves.to_end(step, row, Status.EXPIRED, token=token)
    count, next_us = promote_due(step, limit)
    return Promoted(count, _seconds(next_us, step.now_us))


def begin(step: Step, claim: Claim, item: Owned) -> Begun:
    """Start a held job, unless a higher tier is ready that this worker could run, or a limit that was
    registered since keeps it."""
    row = step.row(item.id)
    lane = str(claim.me.epoch)
    if row is None or row.token != item.token or row.lane != lane:
        return Begun.LOST
    if row.place == place.RUNNING:
        return Begun.BEGUN  # a repeated request
    if row.place != place.HELD:
        return Begun.LOST
    if row.expires_us is not None and row.expires_us <= step.now_us:
        moves.to_end(step, row, Status.EXPIRED, token=step.token_after(row.token))
        return Begun.LOST
    if claim.is_paused(row.queue) or claim.outranks(row.tier) or not claim.may_begin(row.task):
        moves.to_ready(step, row, token=step.token_after(row.token), percent=row.percent, message=row.message)
        return Begun.OUTRANKED
    step.run("exchange.begin", step.boot_us, step.now_us, row.rid)
    step.count(row.queue, row.tier, place.HELD, -1)
    step.count(row.queue, row.tier, place.RUNNING, 1)
    return Begun.BEGUN


def _given_before(step: Step, request: ExchangeRequest) -> tuple[list[ClaimedJob], list[ClaimedJob]] | None:
    """What an earlier sending of the same request was given, less what is no longer its own. None: this is
    the first sending, or nothing of it is left, and a fresh claim does no harm."""
    running: list[ClaimedJob] = []
    held: list[ClaimedJob] = []
    for row in step.all("exchange.given", str(request.worker.epoch), request.request_id):
        found = Found(*row)
        (running if found.place == place.RUNNING else held).append(claimed(found, found.token))
    return (running, held) if running or held else None
