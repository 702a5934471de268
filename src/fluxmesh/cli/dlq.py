"""fluxmesh dlq: list, groups, replay, discard. All of them see dead letters only."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Final

import msgspec

from fluxmesh.cli import output
from fluxmesh.cli.listing import add_page_options, print_jobs
from fluxmesh.cli.many import Told, in_batches, report, told
from fluxmesh.cli.parser import Options, Parser, Verbs, add_verb, add_verbs, count, json_option
from fluxmesh.cli.session import with_storage
from fluxmesh.cli.waiting import unknown
from fluxmesh.config import Settings
from fluxmesh.documents import group_document
from fluxmesh.errors import InvalidOption, JobConflict
from fluxmesh.job import Status
from fluxmesh.query import PAGE_MAX, Query, parse_query
from fluxmesh.storage.base import Storage
from fluxmesh.storage.values import DeadGroup, Done

_ID: Final = "0190a3e4-5b6c-7d8e-9f01-23456789abcd"
_GROUPS_DEFAULT: Final = 50
Verb = Callable[[Sequence[str]], Awaitable[list[Done]]]


def configure(parser: Parser) -> None:
    verbs = add_verbs(parser)
    listed = add_verb(
        verbs,
        "list",
        _list,
        "list dead letters, newest first",
        "fluxmesh dlq list --q task:failing_task --json",
    )
    listed.add_argument("--q", default="", metavar="QUERY", help="field:value of queue, task, tag, worker, …")
    add_page_options(listed)
    groups = add_verb(
        verbs, "groups", _groups, "count dead letters by what went wrong", "fluxmesh dlq groups --json"
    )
    groups.add_argument(
        "--limit", type=count(1, PAGE_MAX), default=_GROUPS_DEFAULT, metavar="N", help="most groups"
    )
    json_option(groups)
    _add_bulk(verbs, "replay", _replay, "give dead letters a new life")
    _add_bulk(verbs, "discard", _discard, "delete dead letters with their history")


def _add_bulk(verbs: Verbs, name: str, run: Callable[[Options], int], summary: str) -> None:
    verb = add_verb(
        verbs,
        name,
        run,
        summary,
        f"fluxmesh dlq {name} {_ID}",
        f"fluxmesh dlq {name} --q task:failing_task --dry-run",
        f"fluxmesh dlq {name} --all",
    )
    verb.add_argument("ids", metavar="ID", nargs="*", help="ids of dead letters; else --q or --all")
    verb.add_argument("--q", metavar="QUERY", help="all dead letters that match")
    verb.add_argument("--all", action="store_true", help="all dead letters there are")
    verb.add_argument("--dry-run", action="store_true", help="only say which ones")
    json_option(verb)


def dead_query(text: str) -> Query:
    """The query, of dead letters only."""
    query = parse_query(text)
    if query.state not in (None, Status.DEAD_LETTER):
        raise InvalidOption("q", f"state:{query.state} is no dead letter", hint="use `fluxmesh jobs list`")
    return msgspec.structs.replace(query, state=Status.DEAD_LETTER)


def _list(options: Options) -> int:
    query = dead_query(options.q)

    async def command(storage: Storage, _settings: Settings) -> int:
        await print_jobs(storage, query, options, dead=True)
        return 0

    return with_storage(options, command)


def _groups(options: Options) -> int:
    async def command(storage: Storage, _settings: Settings) -> int:
        groups = await storage.dlq_groups(options.limit)
        if options.json:
            output.json_document({"items": [group_document(group) for group in groups], "next_cursor": None})
        else:
            columns = ("FINGERPRINT", "COUNT", "TASK", "REASON", "NEWEST", "EXAMPLE", "ERROR")
            output.table(columns, [_group_row(group) for group in groups], right=("COUNT",))
        return 0

    return with_storage(options, command)


def _group_row(group: DeadGroup) -> tuple[str, ...]:
    error = f"{group.error.type}: {group.error.message}" if group.error else ""
    return (
        group.fingerprint,
        str(group.count),
        group.task,
        group.reason,
        output.instant(group.newest_at),
        group.example,
        output.safe(error, most=80),
    )


# -- replay and discard ------------------------------------------------------------------------------


def _replay(options: Options) -> int:
    return _bulk(options, lambda storage: storage.replay, "REPLAYED", "another job holds its unique key")


def _discard(options: Options) -> int:
    return _bulk(options, lambda storage: storage.discard, "DISCARDED", "it cannot be discarded now")


def _bulk(options: Options, verb_of: Callable[[Storage], Verb], done: str, why_not: str) -> int:
    given = (bool(options.ids), options.q is not None, options.all)
    if sum(given) != 1:
        raise InvalidOption("dlq", "name ids, or give --q, or give --all", hint="exactly one of the three")
    query = None if options.ids else dead_query(options.q or "")

    async def command(storage: Storage, _settings: Settings) -> int:
        chosen = await (_matching(storage, query) if query is not None else _judged(storage, options.ids))
        wanted = [item.job_id for item in chosen if item.failure is None]
        if not options.dry_run:
            answers = dict(await in_batches(verb_of(storage), wanted))
            chosen = [
                item if item.failure else told(item.job_id, answers[item.job_id], done, why_not)
                for item in chosen
            ]
            if query is not None:  # a letter that left meanwhile is no failure of a query
                chosen = [item for item in chosen if item.failure is None]
        code = report(chosen, as_json=options.json)
        if query is not None:
            would = "would be " if options.dry_run else ""
            output.note(f"{len(chosen)} {would}{done.lower()}")
        return code

    return with_storage(options, command)


async def _matching(storage: Storage, query: Query) -> list[Told]:
    """All dead letters of the query now. Gathered first, because a replay moves what a cursor walks over."""
    found: list[Told] = []
    cursor: str | None = None
    while True:
        page = await storage.find(query, cursor=cursor, limit=PAGE_MAX)
        found.extend(Told(job.id, Status.DEAD_LETTER.value) for job in page.items)
        cursor = page.next_cursor
        if cursor is None:
            return found


async def _judged(storage: Storage, ids: Sequence[str]) -> list[Told]:
    """Only dead letters: `jobs retry` serves jobs that were cancelled or have expired."""
    items: list[Told] = []
    for job_id in dict.fromkeys(ids):
        job = await storage.get(job_id)
        if job is None:
            items.append(Told(job_id, failure=unknown(job_id)))
        elif job.status is not Status.DEAD_LETTER:
            refusal = JobConflict(f"job {job_id} is no dead letter, it is {job.status.value}")
            items.append(Told(job_id, failure=refusal))
        else:
            items.append(Told(job_id, Status.DEAD_LETTER.value))
    return items
