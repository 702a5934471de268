"""fluxmesh queues: list, pause, resume."""

from __future__ import annotations

from fluxmesh.cli import output
from fluxmesh.cli.parser import Options, Parser, add_verb, add_verbs, json_option
from fluxmesh.cli.session import with_storage
from fluxmesh.config import Settings
from fluxmesh.documents import queue_document
from fluxmesh.job import TIER_NAMES
from fluxmesh.storage.base import Storage
from fluxmesh.storage.values import QueueStats
from fluxmesh.submission import checked_queue

COLUMNS = (
    "QUEUE",
    "STATE",
    *(name.upper() for name in TIER_NAMES),
    "SCHEDULED",
    "RUNNING",
    "PARKED",
    "OLDEST",
)


def configure(parser: Parser) -> None:
    verbs = add_verbs(parser)
    listed = add_verb(
        verbs, "list", _list, "list queues with what waits in them", "fluxmesh queues list --json"
    )
    json_option(listed)
    pause = add_verb(
        verbs,
        "pause",
        _pause,
        "start no more jobs of a queue; running ones go on",
        "fluxmesh queues pause default",
    )
    resume = add_verb(
        verbs, "resume", _resume, "start jobs of a queue again", "fluxmesh queues resume default"
    )
    for verb in (pause, resume):
        verb.add_argument("queue", metavar="QUEUE", help="the queue's name")
        json_option(verb)


def _list(options: Options) -> int:
    async def command(storage: Storage, _settings: Settings) -> int:
        stats = await storage.queue_stats()
        if options.json:
            output.json_document({"items": [queue_document(queue) for queue in stats], "next_cursor": None})
        else:
            output.table(COLUMNS, [_row(queue) for queue in stats], right=COLUMNS[2:])
        return 0

    return with_storage(options, command)


def _row(queue: QueueStats) -> tuple[str, ...]:
    return (
        queue.queue,
        "paused" if queue.paused else "open",
        *(str(number) for number in queue.queued),
        str(queue.scheduled),
        str(queue.running),
        str(queue.parked),
        "" if queue.oldest_wait_s is None else f"{queue.oldest_wait_s:.1f} s",
    )


def _pause(options: Options) -> int:
    return _switch(options, pause=True)


def _resume(options: Options) -> int:
    return _switch(options, pause=False)


def _switch(options: Options, *, pause: bool) -> int:
    name = checked_queue(options.queue)

    async def command(storage: Storage, _settings: Settings) -> int:
        changed = await (storage.pause(name) if pause else storage.resume(name))
        state = "paused" if pause else "open"
        if options.json:
            output.json_document({"queue": name, "paused": pause, "changed": changed})
        else:
            output.line(f"{name} {state}")
        if not changed:
            output.note(f"queue {name} was {state} already")
        return 0

    return with_storage(options, command)
