"""What operators do: cancel, replay, discard and reprioritise jobs, pause and resume queues."""

from __future__ import annotations

from collections.abc import Sequence

from fluxmesh.job import Status
from fluxmesh.storage.records import tags_of
from fluxmesh.storage.sqlite import moves, place, push
from fluxmesh.storage.sqlite.step import Row, Step
from fluxmesh.storage.values import Cancelled, Done

_REPLAYABLE = (place.DEAD_LETTER, place.CANCELLED, place.EXPIRED)


def has_ended(row: Row) -> bool:
    return row.place >= place.COMPLETED


def cancel(step: Step, ids: Sequence[str]) -> list[Cancelled]:
    """A running job gets the flag, of which its owner hears at once; every other one that has not ended ends
    here."""
    owners: set[int] = set()
    answers = [_cancel(step, step.row(job_id), owners) for job_id in ids]
    for epoch in owners:
        push.notice(step, epoch)
    return answers


def _cancel(step: Step, row: Row | None, owners: set[int]) -> Cancelled:
    if row is None:
        return Cancelled.UNKNOWN
    if has_ended(row):
        return Cancelled.ENDED
    if row.place == place.RUNNING:
        if not row.cancel:
            step.run("operate.flag_cancel", row.rid)
        owners.add(int(row.lane))
        return Cancelled.REQUESTED
    # A held job has an owner, who must not be able to begin it under the token it knows.
    token = step.token_after(row.token) if row.place == place.HELD else row.token
    moves.to_end(step, row, Status.CANCELLED, token=token, percent=row.percent, message=row.message)
    return Cancelled.CANCELLED


def replay(step: Step, ids: Sequence[str]) -> list[Done]:
    """A new life for ended jobs. Of several replays only the first meets an ended one."""
    return [_replay(step, step.row(job_id)) for job_id in ids]


def _replay(step: Step, row: Row | None) -> Done:
    if row is None:
        return Done.UNKNOWN
    if row.place not in _REPLAYABLE:
        return Done.CONFLICT
    if row.unique_key is not None and step.one("operate.holder", row.queue, row.unique_key) is not None:
        return Done.CONFLICT
    moves.to_new_life(step, row)
    return Done.DONE


def discard(step: Step, ids: Sequence[str]) -> list[Done]:
    """Delete ended jobs with all that hangs on them: tags, idempotency key, their number in the counters."""
    return [_discard(step, step.row(job_id)) for job_id in ids]


def _discard(step: Step, row: Row | None) -> Done:
    if row is None:
        return Done.UNKNOWN
    if not has_ended(row):
        return Done.CONFLICT
    found = step.one("operate.options", row.rid)
    drop_tags(step, row.rid, None if found is None else found[0])
    step.run("operate.drop_job", row.rid)
    if row.idempotency_key is not None:
        step.run("operate.drop_key", row.idempotency_key, row.id)
    step.count(row.queue, row.tier, row.place, -1)
    return Done.DONE


def drop_tags(step: Step, rid: int, options: bytes | None) -> None:
    """Take a job out of the lists of its tags."""
    if options is None:
        return  # a job with tags has options: they stand in them
    tags = tags_of(options)
    if tags is None:
        step.run("operate.drop_tags_of", rid)
    elif tags:
        step.db.executemany(step.sql["operate.drop_tag"], [(tag, rid) for tag in tags])


def reprioritise(step: Step, ids: Sequence[str], tier: int) -> list[Done]:
    """Move jobs that have not ended to another tier. One that is there already keeps its place in the row,
    so that the call may be repeated."""
    return [_reprioritise(step, step.row(job_id), tier) for job_id in ids]


def _reprioritise(step: Step, row: Row | None, tier: int) -> Done:
    if row is None:
        return Done.UNKNOWN
    if has_ended(row):
        return Done.CONFLICT
    if row.tier == tier:
        return Done.DONE
    if row.place == place.RUNNING:
        step.run("operate.set_tier", tier, step.next_seq(), row.rid)
        step.count(row.queue, row.tier, place.RUNNING, -1)
        step.count(row.queue, tier, place.RUNNING, 1)
    else:
        moves.to_new_tier(step, row, tier)
        released = step.row(row.id) if row.place == place.HELD else None
        if released is not None and released.expires_us is not None and released.expires_us <= step.now_us:
            # As with every other way of giving a held job back.
            moves.to_end(step, released, Status.EXPIRED, token=released.token)
    return Done.DONE


def pause(step: Step, queue: str) -> bool:
    """Ready jobs stay where they are: claim passes paused queues by. Held ones go back."""
    if not step.run("operate.pause", queue):
        return False
    for (job_id,) in step.all("operate.held_of_queue", queue):
        row = step.row(job_id)
        if row is not None:
            moves.give_back(step, row, token=step.token_after(row.token))
    return True


def resume(step: Step, queue: str) -> bool:
    if not step.run("operate.resume", queue):
        return False
    for tier, count in step.all("operate.waiting_of_queue", queue):
        # Of any task: the counters do not tell, and whoever finds nothing waits again.
        step.ready(queue, tier, "", count)
    return True
