"""Who lives, who is dead and by what ground, and what becomes of a dead owner's jobs.

Leases are stamps of time since boot on the worker's row; a beat renews the lease of all its jobs at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fluxmesh.outcome import Counters
from fluxmesh.storage.affinities import kept
from fluxmesh.storage.sqlite import exchange, moves, place, push
from fluxmesh.storage.sqlite.locks import is_freed
from fluxmesh.storage.sqlite.step import Step, encode_struct
from fluxmesh.storage.values import (
    MESH_VIEW_BYTES,
    PROCESS_GONE,
    Affinity,
    BeatAnswer,
    Ground,
    OnDeath,
    Orphan,
    OrphansAnswer,
    Owned,
    Promoted,
    Reap,
    Registration,
    Settled,
    Standing,
    Tended,
    WorkerRef,
    WorkerView,
)

LEFT = "left"
_LISTS_MISSED = 2


def register(step: Step, registration: Registration, bell: str | None, lock: str | None) -> int:
    found = step.one("liveness.next_epoch")
    assert found is not None
    epoch = int(found[0])
    step.run("liveness.fence", registration.worker_id, epoch)
    step.run("liveness.forget_mesh_of_older", registration.worker_id, epoch)
    step.run("liveness.forget_affinity_of_older", registration.worker_id, epoch)
    _put_worker(step, epoch, registration, "ready", 0, bell, lock, fenced=False)
    _put_tasks(step, "liveness.put_task", epoch, registration)
    return epoch


def _put_tasks(step: Step, statement: str, epoch: int, registration: Registration) -> None:
    for spec in registration.tasks:
        limited = spec.rate_limit is not None or spec.max_concurrent is not None
        step.run(statement, spec.name, encode_struct(spec), epoch, int(limited))


def _put_worker(
    step: Step,
    epoch: int,
    registration: Registration,
    status: str,
    running: int,
    bell: str | None,
    lock: str | None,
    *,
    fenced: bool,
) -> None:
    lease_us, beat_us = round(registration.lease_s * 1e6), round(registration.beat_s * 1e6)
    step.run(
        "liveness.put_worker", epoch, registration.worker_id, encode_struct(registration), lease_us, beat_us,
        step.boot_us, step.now_us, step.shared.clock.boot_id(), step.now_us, status, running, int(fenced),
        bell, lock,
    )  # fmt: skip


def _meta(step: Step, name: str) -> int | str:
    found = step.one("liveness.meta", name)
    return 0 if found is None else found[0]


def arm(step: Step) -> bool:
    """Note that storage was looked at now; False while no lease may count as lapsed.

    Nobody looked for more than two beats, the clock went back, or the machine was booted: then whatever the
    stamps say, their owners had no chance to renew, and they get one lease from now on.
    """
    longest = step.one("liveness.longest") or (0, 0)
    lease_us = max(longest[0], round(step.shared.lease_s * 1e6))
    beat_us = longest[1] or lease_us / 3
    fleet_us, boot_id = int(_meta(step, "fleet_beat_us")), step.shared.clock.boot_id()
    booted = _meta(step, "boot_id") != boot_id
    clock_is_another = booted or fleet_us > step.boot_us
    if clock_is_another or step.boot_us - fleet_us > 2 * beat_us:
        until_us = step.boot_us + lease_us
        if not clock_is_another:
            until_us = max(until_us, int(_meta(step, "reap_not_before_us")))  # never shortened
        step.run("liveness.set_meta", until_us, "reap_not_before_us")
        step.run("liveness.restamp", step.boot_us, boot_id, boot_id, step.boot_us)
        if booted:
            step.run("liveness.set_meta", boot_id, "boot_id")
    if fleet_us != step.boot_us:
        step.run("liveness.set_meta", step.boot_us, "fleet_beat_us")
    return step.boot_us >= int(_meta(step, "reap_not_before_us"))


def beat(
    step: Step,
    worker: WorkerRef,
    owned: Sequence[Owned] | None,
    view: WorkerView,
    bell: str | None,
    lock: str | None,
) -> BeatAnswer:
    arm(step)
    standing, me = step.standing(worker.epoch)
    boot_id = step.shared.clock.boot_id()
    told = (view.status, view.running) if owned is not None else (None, None)
    renewed = step.run("liveness.renew", step.boot_us, step.now_us, boot_id, *told, worker.epoch)
    if not renewed:
        fenced = step.one("liveness.newer", worker.worker_id, worker.epoch) is not None
        _put_worker(
            step, worker.epoch, view.registration, view.status, view.running, bell, lock, fenced=fenced
        )
        # With its row its tasks may have been forgotten: of a machine that slept, say. Newer ones stand.
        _put_tasks(step, "liveness.put_missing_task", worker.epoch, view.registration)
        step.run("liveness.forget_missing", worker.epoch)
        step.run("liveness.forget_affinity", worker.epoch)
        standing, me = step.standing(worker.epoch)
    if owned is None:
        return BeatAnswer(standing, now_us=step.now_us)
    lost, cancelled = _compare(step, worker, owned, beat_us=0 if me is None else me.beat_us)
    if view.mesh is not None:
        _tell_mesh(step, worker.epoch, view.mesh, standing)
    has_affinity = me is not None and me.own is not None
    if view.affinity is not None:
        has_affinity = _tell_affinity(step, worker.epoch, view.affinity, standing)
    found = step.one("liveness.command_of", worker.epoch)
    command = None if found is None else found[0]
    return BeatAnswer(standing, lost, cancelled, command, step.now_us, has_affinity)


def _tell_mesh(step: Step, epoch: int, view: bytes, standing: Standing) -> None:
    """Only a worker of good standing has a view: a fenced one's place is another's."""
    if view and len(view) <= MESH_VIEW_BYTES and standing is Standing.GOOD:
        step.run("liveness.tell_mesh", epoch, step.now_us, view)
    else:
        step.run("liveness.forget_mesh", epoch)


def _tell_affinity(step: Step, epoch: int, told: Affinity, standing: Standing) -> bool:
    """Whether something of it is kept."""
    affinity = kept(told) if standing is Standing.GOOD else None
    if affinity is None:
        step.run("liveness.forget_affinity", epoch)
    else:
        step.run("liveness.tell_affinity", epoch, affinity.weight, encode_struct(affinity.parts))
    return affinity is not None


def _forget_told(step: Step, epoch: int) -> None:
    step.run("liveness.forget_mesh", epoch)
    step.run("liveness.forget_affinity", epoch)


def _compare(
    step: Step, worker: WorkerRef, owned: Sequence[Owned], *, beat_us: int
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """What the worker believes it owns against what it does. A job that it was given long ago and does not
    name in two lists running never reached it: it is given back."""
    told = {job.id: job.token for job in owned}
    cancelled: list[str] = []
    stored: dict[str, int] = {}
    for job_id, token, taken_us, cancel, missed, rid in step.all("liveness.owned", str(worker.epoch)):
        stored[job_id] = token
        if told.get(job_id) == token:
            if cancel:
                cancelled.append(job_id)
            if missed:
                step.run("liveness.missed", None, rid)
        elif (missed or 0) + 1 < _LISTS_MISSED or abs(step.boot_us - taken_us) <= 2 * beat_us:
            if not missed:
                step.run("liveness.missed", 1, rid)
        else:
            row = step.row(job_id)
            if row is not None:
                moves.give_back(step, row, token=step.token_after(row.token))
    lost = tuple(job.id for job in owned if stored.get(job.id) != job.token)
    return lost, tuple(cancelled)


def declare_dead(step: Step, worker: WorkerRef, how: str) -> bool:
    found = step.one("liveness.is_there", worker.epoch)
    if found is None:
        return False
    _forget_told(step, worker.epoch)
    if how == LEFT and step.one("liveness.owns", str(worker.epoch)) is None:
        step.run("liveness.drop_worker", worker.epoch)
        return True
    step.run("liveness.declare", how, worker.epoch, PROCESS_GONE)
    return True


def _look_for_freed_locks(step: Step) -> None:
    own = None if step.shared.lock is None else step.shared.lock.name
    for epoch, lock in step.all("liveness.locks"):
        if lock != own and is_freed(step.shared.locks_folder, lock):
            step.run("liveness.declare", PROCESS_GONE, epoch, PROCESS_GONE)
            _forget_told(step, epoch)


def _dead_owners(step: Step, *, armed: bool) -> dict[int, tuple[str, Ground, str]]:
    """Epochs that own jobs and are dead: their worker id, by which ground, and how."""
    dead: dict[int, tuple[str, Ground, str]] = {}
    known = set()
    for epoch, worker_id, dead_how, lapsed in step.all("liveness.gone", step.boot_us):
        known.add(epoch)
        if dead_how is not None:
            dead[epoch] = (worker_id, Ground.PROVEN, dead_how)
        elif lapsed and armed:
            dead[epoch] = (worker_id, Ground.LAPSED, "its lease lapsed")
    for (lane,) in step.all("liveness.owners"):
        epoch = int(lane)
        if epoch not in known and _long_missing(step, epoch) and armed:
            dead[epoch] = ("", Ground.MISSING, "its record is missing")
    return dead


def _long_missing(step: Step, epoch: int) -> bool:
    """True if the row was seen missing one lease ago; notes it when it is seen first."""
    seen = step.one("liveness.seen_missing", epoch)
    boot_id = step.shared.clock.boot_id()
    lease_us = max((step.one("liveness.longest") or (0, 0))[0], round(step.shared.lease_s * 1e6))
    if seen is None or seen[1] != boot_id or seen[0] > step.boot_us:
        step.run("liveness.note_missing", epoch, step.boot_us, boot_id)
        return False
    return bool(step.boot_us - int(seen[0]) >= lease_us)


def orphans(step: Step, limit: int) -> OrphansAnswer:
    armed = arm(step)
    if step.shared.proof_of_death:
        _look_for_freed_locks(step)
    found: list[Orphan] = []
    for epoch, (worker_id, ground, how) in _dead_owners(step, armed=armed).items():
        if len(found) >= limit:
            break
        found.extend(
            _orphan(step, WorkerRef(worker_id or row[10] or "", epoch), ground, how, row)
            for row in step.all("liveness.orphans", str(epoch), limit - len(found))
        )
    return OrphansAnswer(armed, tuple(found))


def _orphan(step: Step, worker: WorkerRef, ground: Ground, how: str, row: tuple[Any, ...]) -> Orphan:
    job_id, token, at, on_death, task, options, attempts, crashes, snoozes, interruptions, _ = row
    spec = step.one("enqueue.spec", task)
    return Orphan(
        id=job_id,
        token=token,
        worker=worker,
        ground=ground,
        how=how,
        started=at == place.RUNNING,
        on_death=OnDeath(on_death or 0),
        task=task,
        options=options,
        spec=None if spec is None else step.shared.spec(spec[0]),
        counters=Counters(attempts, crashes, snoozes, interruptions),
    )


def reap(step: Step, items: Sequence[Reap]) -> list[Settled]:
    armed = arm(step)
    dead = _dead_owners(step, armed=armed)
    answers = []
    for item in items:
        row = step.row(item.id)
        if row is None or row.token != item.token:
            answers.append(Settled.ALREADY if row is not None and row.token > item.token else Settled.STALE)
        elif row.place not in (place.HELD, place.RUNNING) or int(row.lane) not in dead:
            answers.append(Settled.STALE)
        else:
            token = step.token_after(row.token)
            if item.transition is None or row.place == place.HELD:
                moves.give_back(step, row, token=token)
            else:
                moves.apply(step, row, item.transition, token=token)
            answers.append(Settled.APPLIED)
    return answers


def command(step: Step, worker_id: str, word: str | None) -> bool:
    told = step.all("liveness.set_command", word, worker_id)
    for (epoch,) in told:
        push.notice(step, epoch)
    return bool(told)


def lead(step: Step, holder: str, ttl_us: int) -> bool:
    now_us, until_us = step.boot_us, int(_meta(step, "leader_until_us"))
    free = _meta(step, "leader") == "" or until_us <= now_us or until_us > now_us + 10 * ttl_us
    if not free and _meta(step, "leader") != holder:
        return False
    step.run("liveness.lead", holder)
    step.run("liveness.lead_until", now_us + ttl_us)
    return True


def tend(step: Step, holder: str, ttl_us: int, promote: int, limit: int) -> Tended:
    leads = lead(step, holder, ttl_us)
    promoted = exchange.promote(step, promote) if leads else Promoted(0)
    return Tended(leads, promoted, orphans(step, limit))
