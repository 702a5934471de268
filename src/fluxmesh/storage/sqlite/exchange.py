"""The one hot-path verb: settle, promote what is due, begin, claim, in one transaction."""

from __future__ import annotations

import msgspec

from fluxmesh.storage.sqlite import moves, place
from fluxmesh.storage.sqlite.claim import Claim, Found, claimed
from fluxmesh.storage.sqlite.step import Me, Step, encode_struct
from fluxmesh.storage.values import (
    HELD_TAKEABLE_AFTER_S,
    MAX_HOPS,
    REQUESTS_KEPT,
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
from fluxmesh.job import Status

_PROMOTE_IN_EXCHANGE = 250
_HELD_LOOK = 2_000
_decode_memory = msgspec.msgpack.Decoder(list[tuple[str, int]]).decode


def exchange(step: Step, request: ExchangeRequest) -> ExchangeAnswer:
    epoch = request.worker.epoch
    step.asking = epoch
    standing, me = step.standing(epoch)
    lane = str(epoch)
    settled = tuple([settle(step, lane, item) for item in request.settle])
    if standing is not Standing.GOOD or me is None:
        return ExchangeAnswer(standing, settled, tuple(Begun.LOST for _ in request.begin))
    next_due_us = promote_due(step, _PROMOTE_IN_EXCHANGE)[1]
    wants = request.slots + request.extra
    if not wants and not request.begin:
        step.run("exchange.busy", epoch)
        return ExchangeAnswer(standing, settled, next_due_s=_seconds(next_due_us, step.now_us))
    remembered = _remembered(step, request)
    claim = Claim(step, me)
    begun = tuple([begin(step, claim, item) for item in request.begin])
    if remembered is not None:
        running, held = remembered
    else:
        running, held = claim.claim(request.slots, request.extra, request.reserve)
        _remember(step, request, running, held)
    if held and not claim.left_behind:
        step.ready(held[-1].queue, held[-1].tier, held[-1].task)
    short = len(running) < request.slots
    step.run("exchange.wait" if short else "exchange.busy", epoch)
    wake_us = [at for at in (next_due_us, claim.next_permit_us) if at is not None]
    return ExchangeAnswer(
        standing,
        settled,
        begun,
        tuple(running),
        tuple(held),
        more=claim.more,
        next_due_s=_seconds(min(wake_us, default=None), step.now_us),
        next_held_s=next_held_s(step, me) if short else None,
    )


def _seconds(at_us: int | None, now_us: int) -> float | None:
    return None if at_us is None else max(0.0, (at_us - now_us) / 1e6)


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
        for offset, (rid, queue, task, _) in enumerate(rows):
            updates.append((place.ready_lane(tier, queue), seq + offset, seq + offset, rid))
            step.count(queue, tier, place.SCHEDULED, -1)
            step.count(queue, tier, place.READY, 1)
            step.ready(queue, tier, task)
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
    """Start a held job, unless a higher tier is ready that this worker could run."""
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
    higher = [tier for tier in claim.me.tiers if tier < row.tier]
    if claim.is_paused(row.queue) or next(claim.runnable(higher, 1), None) is not None:
        moves.to_ready(step, row, token=step.token_after(row.token), percent=row.percent, message=row.message)
        return Begun.OUTRANKED
    step.run("exchange.begin", step.boot_us, step.now_us, row.rid)
    step.count(row.queue, row.tier, place.HELD, -1)
    step.count(row.queue, row.tier, place.RUNNING, 1)
    return Begun.BEGUN


def _remember(step: Step, request: ExchangeRequest, running: list[ClaimedJob], held: list[ClaimedJob]) -> None:
    if running or held:
        jobs = [(job.id, job.token) for job in (*running, *held)]
        slot = request.request_id % REQUESTS_KEPT
        step.run("exchange.remember", request.worker.epoch, slot, request.request_id, encode_struct(jobs))


def _remembered(step: Step, request: ExchangeRequest) -> tuple[list[ClaimedJob], list[ClaimedJob]] | None:
    slot = request.request_id % REQUESTS_KEPT
    found = step.one("exchange.remembered", request.worker.epoch, slot, request.request_id)
    if found is None:
        return None
    running: list[ClaimedJob] = []
    held: list[ClaimedJob] = []
    for job_id, token in _decode_memory(found[0]):
        row = step.one("exchange.owned", job_id, token, str(request.worker.epoch))
        if row is not None:
            job = claimed(Found(*row), token)
            (running if row[17] == place.RUNNING else held).append(job)
    return running, held


def next_held_s(step: Step, me: Me) -> float | None:
    """When take_held may find something for this worker: seconds; None: nothing is held that it could run."""
    if not me.donates or step.one("exchange.any_held") is None:
        return None
    taken = [row[19] for row in step.all("exchange.held", str(me.epoch), _HELD_LOOK) if takeable(step, me, row)]
    if not taken:
        return None
    return max(0.0, (min(taken) + HELD_TAKEABLE_AFTER_S * 1e6 - step.boot_us) / 1e6)


def takeable(step: Step, me: Me, row: tuple[object, ...]) -> bool:
    """True if the held job of this row (of exchange.held) may go to this worker, whatever its age."""
    found = Found(*row[:19])  # type: ignore[arg-type]
    owner = step.shared.me(int(str(row[22])), row[21])  # type: ignore[arg-type]
    return owner.donates and (row[20] or 0) < MAX_HOPS and me.can_run(found.queue, found.tier, found.task)  # type: ignore[operator]
