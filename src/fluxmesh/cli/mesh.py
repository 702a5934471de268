"""fluxmesh mesh: who is there, who owns what, and keys. Reads what workers have told storage."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from fluxmesh import peers
from fluxmesh.cli import mesh_simulate, output
from fluxmesh.cli.parser import Options, Parser, add_verb, add_verbs, json_option
from fluxmesh.cli.session import with_storage
from fluxmesh.config import Settings
from fluxmesh.errors import NotInMesh
from fluxmesh.mesh.view import MemberReport
from fluxmesh.storage.base import Storage
from fluxmesh.submission import DEFAULT_QUEUE, checked_name, checked_queue

MEMBERS = (
    "WORKER",
    "EPOCH",
    "STATE",
    "IN RING",
    "ADDRESS",
    "SLOTS",
    "RUNNING",
    "HELD",
    "FLAGS",
    "RTT MS",
    "SINCE",
)
NOBODY_HINT = "workers join with --mesh; one tells a few seconds after its start"
SPLIT_HINT = "just started or gone? else the firewall, seeds or keys: docs/mesh.md, When something is wrong"
SPLIT_LINES = 5
SPLIT_NAMES = 5
STEALS = (
    "WORKER",
    "EPOCH",
    "HELD",
    "STOLEN",
    "GIVEN",
    "ASKED",
    "GOT",
    "NOTHING",
    "FAILED",
    "WAS ASKED",
    "REFUSED",
    "BY STORAGE",
    "OWN",
    "OTHERS'",
)
# The columns from ASKED on, by the names of the counters that each sums.
STEAL_COUNTERS = (
    ("steals_initiated",),
    ("steals_succeeded",),
    ("steals_empty", "steals_lost", "steals_dropped"),
    ("steals_failed",),
    ("steal_requests",),
    ("steals_refused",),
    ("jobs_taken_held",),
    ("affinity_hits",),
    ("affinity_misses",),
)
RINGS = ("QUEUE", "WORKER", "POINTS", "SHARE", "TOO MUCH", "SEEN BY")
_NUMBERS = ("EPOCH", "IN RING", "SLOTS", "RUNNING", "HELD", "RTT MS", "POINTS", "SHARE")


def configure(parser: Parser) -> None:
    verbs = add_verbs(parser)
    members = add_verb(
        verbs,
        "members",
        _members,
        "list the members, as the workers see them",
        "fluxmesh mesh members",
        "fluxmesh mesh members --by worker-1 --json",
    )
    members.add_argument("--by", metavar="WORKER", help="as this worker sees them (all who tell)")
    json_option(members)
    steals = add_verb(
        verbs,
        "steals",
        _steals,
        "show how many jobs each worker holds, took from others and gave to them",
        "fluxmesh mesh steals",
        "fluxmesh mesh steals --json",
    )
    json_option(steals)
    ring = add_verb(
        verbs, "ring", _ring, "show who owns which share of the keys", "fluxmesh mesh ring --queue default"
    )
    ring.add_argument("--queue", metavar="NAME", help="only this queue (all)")
    json_option(ring)
    owner = add_verb(
        verbs, "owner", _owner, "name the worker to whom a key belongs", "fluxmesh mesh owner tenant-7"
    )
    owner.add_argument("key", metavar="KEY", help="an affinity key, or the name of a task")
    owner.add_argument("--queue", default=DEFAULT_QUEUE, metavar="NAME", help="of which ring (default)")
    json_option(owner)
    keygen = add_verb(
        verbs,
        "keygen",
        _keygen,
        "make a key for the mesh; it is printed and kept nowhere",
        "fluxmesh mesh keygen",
    )
    json_option(keygen)
    simulated = add_verb(verbs, "simulate", mesh_simulate.run, mesh_simulate.SUMMARY, *mesh_simulate.EXAMPLES)
    mesh_simulate.configure(simulated)


def _members(options: Options) -> int:
    async def command(storage: Storage, _settings: Settings) -> int:
        everybody = seen = await peers.observe(storage)
        if options.by is not None:
            seen = [one for one in seen if one.worker_id == options.by]
            if not seen:
                output.tell_error(
                    f"worker {options.by} has told nothing of a mesh",
                    "`fluxmesh mesh members` shows who has; a worker tells a few seconds after its start",
                )
                return NotInMesh.exit_code
        if options.json:
            output.json_document({"items": seen, "next_cursor": None})
        else:
            output.table(MEMBERS, _rows(seen), right=_NUMBERS)
        _note_what_is_odd(everybody)
        return 0

    return with_storage(options, command)


def _note_what_is_odd(seen: Sequence[peers.Observation], queue: str | None = None) -> None:
    """On stderr: that there is nothing to show, or that the workers do not see each other."""
    output.flush()
    if not seen:
        output.note(f"no worker has told of a mesh\nhint: {NOBODY_HINT}")
    elif queue is not None and not peers.rings(seen, queue):
        output.note(f"nobody is on a ring of the queue {queue!r}\nhint: `fluxmesh mesh ring` shows all")
    split = peers.unseen(seen)
    for worker_id, names in list(split.items())[:SPLIT_LINES]:
        output.note(f"the views differ: {output.safe(worker_id)} does not see {output.safe(listed(names))}")
    if len(split) > SPLIT_LINES:
        output.note(f"the views differ: so it is with {len(split) - SPLIT_LINES} more workers")
    if split:
        output.note(f"hint: {SPLIT_HINT}")


def listed(names: Sequence[str]) -> str:
    more = len(names) - SPLIT_NAMES
    return ", ".join(names[:SPLIT_NAMES]) + (f" and {more} more" if more > 0 else "")


def _rows(seen: Sequence[peers.Observation]) -> list[tuple[str, ...]]:
    """One row for each run that somebody sees. Where they differ, STATE says how many see what; the rest is
    as the member itself told it, or who told last."""
    runs: dict[tuple[str, int], list[tuple[bool, float, MemberReport]]] = {}
    for one in seen:
        for member in one.members:
            told = (member.worker_id == one.worker_id, one.told_at, member)
            runs.setdefault((member.worker_id, member.epoch), []).append(told)
    return [_row([report for *_, report in runs[run]], _best(runs[run]), len(seen)) for run in sorted(runs)]


def _best(told: Sequence[tuple[bool, float, MemberReport]]) -> MemberReport:
    return max(told, key=lambda one: one[:2])[2]


def _row(reports: Sequence[MemberReport], best: MemberReport, observers: int) -> tuple[str, ...]:
    states = Counter(report.standing for report in reports).most_common()
    in_ring = sum(report.in_ring for report in reports)
    return (
        best.worker_id,
        str(best.epoch),
        states[0][0] if len(states) == 1 else ", ".join(f"{state} {count}" for state, count in states),
        f"{in_ring}/{observers}",
        best.address,
        _number(best.capacity),
        _number(best.running),
        _number(best.queued),
        ",".join(best.flags),
        _number(best.rtt_ms),
        output.instant(best.since),
    )


def _steals(options: Options) -> int:
    async def command(storage: Storage, _settings: Settings) -> int:
        seen = await peers.observe(storage)
        summed = peers.totals(seen)
        if options.json:
            output.json_document(
                {"items": [_told(one) for one in seen], "next_cursor": None, "totals": summed}
            )
        else:
            ordered = sorted(seen, key=lambda one: (one.worker_id, one.epoch))
            rows = [(one.worker_id, str(one.epoch), *_steal_numbers(one)) for one in ordered]
            if len(rows) > 1:
                sums = [sum(int(row[column]) for row in rows) for column in range(2, len(STEALS))]
                rows.append(("all", "", *(str(number) for number in sums)))
            output.table(STEALS, rows, right=STEALS[1:])
        _note_what_is_odd(seen)
        return 0

    return with_storage(options, command)


def _told(one: peers.Observation) -> dict[str, object]:
    """What a worker tells of itself, without whom it sees."""
    return {
        "worker_id": one.worker_id,
        "epoch": one.epoch,
        "told_at": one.told_at,
        "buffered": one.buffered,
        "adaptive_prefetch": one.adaptive_prefetch,
        "jobs_stolen_in": one.jobs_stolen_in,
        "jobs_stolen_out": one.jobs_stolen_out,
        "counters": one.counters,
    }


def _steal_numbers(one: peers.Observation) -> tuple[str, ...]:
    counted = (sum(one.counters.get(name, 0) for name in names) for names in STEAL_COUNTERS)
    return tuple(str(number) for number in (one.buffered, one.jobs_stolen_in, one.jobs_stolen_out, *counted))


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:g}"


def _ring(options: Options) -> int:
    queue = None if options.queue is None else checked_queue(options.queue)

    async def command(storage: Storage, _settings: Settings) -> int:
        seen = await peers.observe(storage)
        told = peers.rings(seen, queue)
        if options.json:
            output.json_document({"items": told, "next_cursor": None})
        else:
            rows = [
                (
                    ring.queue,
                    member.worker_id,
                    str(member.virtual_nodes),
                    f"{member.share:.2%}",
                    "yes" if member.over else "",
                    "all" if ring.agreed else ",".join(ring.seen_by),
                )
                for ring in told
                for member in ring.members
            ]
            output.table(RINGS, rows, right=_NUMBERS)
        _note_what_is_odd(seen, queue)
        return 0

    return with_storage(options, command)


def _owner(options: Options) -> int:
    key, queue = checked_name("KEY", options.key), checked_queue(options.queue)

    async def command(storage: Storage, _settings: Settings) -> int:
        owner = peers.owner(await peers.observe(storage), key, queue)
        if options.json:
            output.json_document(owner)
        else:
            output.line(owner.owner)
            if not owner.agreed:
                output.note(f"seen so by {', '.join(owner.seen_by)}; others see another owner just now")
        return 0

    return with_storage(options, command)


def _keygen(options: Options) -> int:
    from fluxmesh.mesh.options import keygen

    key = keygen()
    if options.json:
        output.json_document({"key": key})
    else:
        output.line(key)
    return 0
