"""Every key of a namespace, in one place, for Python and for Lua.

`{}` stands for a part: `K.ready(queue, tier)` in a script, `key(prefix, "ready", queue, tier)` in Python.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

KEYS: Final[Mapping[str, str]] = {
    # Jobs. A hash each; its fields are named as the columns of the SQLite table; absent = null.
    "job": "jobs:{}",
    # Places: sorted sets of ids. A job is in exactly the one that its field `place` names.
    "delayed": "delayed:{}",  # 0: tier -> due_us
    "ready": "queue:{}:{}",  # 1: queue, tier -> arrival sequence
    "parked": "parked:{}",  # 2: lane (t:<tier>:<queue>:<task> or k:<tier>:<queue>:<key>) -> sequence
    "in_flight": "in_flight:{}.{}",  # 3 and 4: worker id, epoch -> taken_us
    "held": "held",  # 3 once more, of all owners -> taken_us
    "ended": "ended:{}",  # 5, 7, 8: COMPLETED, CANCELLED, EXPIRED -> ended_us
    "dlq": "dlq",  # 6 -> ended_us
    # What hangs on places.
    "lanes": "lanes",  # set: parking sets that may have something to give
    "lanes_of": "lanes_of:{}:{}",  # kind (t, k), task or key -> set: its lanes with jobs
    "expires": "expires",  # jobs that have not started -> expires_us
    "owners": "owners",  # hash: epoch -> worker id, of those who may own jobs
    "groups": "groups",  # fingerprint -> number of its dead letters
    "group": "group:{}",  # fingerprint -> its dead letters -> ended_us
    "running": "running",  # hash: t:<task>, k:<concurrency key> -> how many run
    "tally": "tally",  # hash: <queue>:<tier>:<place> -> how many jobs
    # Lists for doors -> rid (the arrival sequence at creation).
    "all": "all",
    "by_queue": "by:queue:{}",
    "by_task": "by:task:{}",
    "by_tag": "by:tag:{}",
    # Keys of submissions.
    "idempotency": "idempotency:{}",  # hash: payload_hash, job_id, status, forget_us
    "forget": "forget",  # idempotency key -> forget_us, of pruned jobs
    "unique": "unique:{}:{}",  # queue, key -> id of the job that holds it
    # Workers and tasks.
    "workers": "workers",  # hash: epoch -> worker id
    "worker": "worker:{}",  # epoch -> hash; mesh, mesh_us: what it told of it; weight, parts: its own work
    "waiting": "waiting",  # epochs that wait for work -> since when
    "missing": "missing",  # hash: epoch of an owner without a record -> when that was seen first
    "tasks": "tasks",  # hash: task -> its TaskSpec
    "task_epochs": "task_epochs",  # hash: task -> epoch that registered it last
    "limits": "limits",  # hash: task -> [count, period_us, interval_us, max_concurrent], limited ones only
    "tat": "tat",  # hash: task -> theoretical arrival time of its rate limit
    "paused": "paused",  # set of queues
    # counters: seq, epoch, stale, failed, fleet_beat_us, reap_not_before_us
    "counters": "counters",
    "leader": "lock:housekeeping",  # hash: holder, until_us
    # Channels, not keys.
    "bell": "bell:{}",  # epoch: there may be work; "notice": a beat would be told something
    "over": "over:{}",  # job id: it has ended
    "awaited": "awaited",  # nothing is sent; its listeners may wait for the end of a job
    "event": "event:{}",  # topic
}

_SIMPLE: Final = re.compile(r"[\w.]+|'[^']*'")
_CALLED: Final = re.compile(r"\bK\.(\w+)\(")


def prefix_of(namespace: str, *, in_cluster: bool) -> str:
    """What every key of the namespace begins with; in a cluster a hash tag, which keeps them on one node."""
    return f"{{{namespace}}}:" if in_cluster else f"{namespace}:"


def key(prefix: str, name: str, *parts: object) -> str:
    return prefix + KEYS[name].format(*parts)


def written_out(lua: str) -> str:
    """A script's text with every `K.name(a, b)` replaced by the expression that builds the key from P."""
    done = ""
    while found := _CALLED.search(lua):
        pieces = KEYS[found[1]].split("{}")
        arguments, end = _arguments(lua, found.end())
        if len(arguments) != len(pieces) - 1:
            raise ValueError(f"K.{found[1]} takes {len(pieces) - 1} parts: {arguments}")
        built = f"P .. '{pieces[0]}'"
        for argument, piece in zip(arguments, pieces[1:], strict=True):
            simple = _SIMPLE.fullmatch(argument)
            built += f" .. {argument if simple else f'({written_out(argument)})'}"
            built += f" .. '{piece}'" if piece else ""
        done += lua[: found.start()] + f"({built})"
        lua = lua[end:]
    return done + lua


def _arguments(text: str, start: int) -> tuple[list[str], int]:
    """The arguments of the call whose bracket was opened just before `start`, and where the call ends."""
    arguments, depth, begun = [], 0, start
    for at in range(start, len(text)):
        letter = text[at]
        if letter in "([{":
            depth += 1
        elif letter in ")]}" and depth:
            depth -= 1
        elif not depth and letter in ",)":
            arguments.append(text[begun:at].strip())
            begun = at + 1
            if letter == ")":
                return [argument for argument in arguments if argument], at + 1
    raise ValueError(f"a call that does not end: {text[start : start + 40]!r}")
