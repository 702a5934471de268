"""Waiting for a job's end, and events: the rows by which a sender knows whom to ring."""

from __future__ import annotations

from collections.abc import Sequence

from fluxmesh.clock import US
from fluxmesh.events import Event, encode_event
from fluxmesh.storage.sqlite import place
from fluxmesh.storage.sqlite.bells import EVENT, NOTICE
from fluxmesh.storage.sqlite.step import Step


def watch(step: Step, job_id: str, bell: str | None, timeout_s: float) -> bool:
    """Note that this bell waits for the end of a job. False: there is nothing to wait for."""
    row = step.row(job_id)
    if row is None or row.place >= place.COMPLETED:
        return False
    if bell is not None:
        step.run("push.watch", job_id, bell, step.now_us + round((timeout_s + 1.0) * US))
    return True


def unwatch(step: Step, job_id: str, bell: str) -> None:
    step.run("push.unwatch", job_id, bell)


def notice(step: Step, epoch: int) -> None:
    """Have this worker beat at once: the answer will tell it something."""
    found = step.one("push.bell_of", epoch)
    if found is not None and found[0] is not None:
        step.ring(found[0], NOTICE)


def listen(step: Step, topics: Sequence[str], bell: str, ttl_s: float) -> None:
    for topic in topics:
        step.run("push.listen", topic, bell, step.now_us + round(ttl_s * US))


def unlisten(step: Step, bell: str) -> None:
    step.run("push.unlisten", bell)


def publish(step: Step, event: Event) -> int:
    message = EVENT + encode_event(event)
    bells = step.all("push.listeners", event.topic, step.now_us)
    for (bell,) in bells:
        step.ring(bell, message)
    return len(bells)
