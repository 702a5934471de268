"""Lists of jobs: one page, or all pages as one document, without holding them all in memory."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Final

from fluxmesh.cli import output
from fluxmesh.cli.parser import Options, Parser, count, json_option
from fluxmesh.documents import job_document
from fluxmesh.errors import InvalidOption
from fluxmesh.job import Job
from fluxmesh.query import PAGE_DEFAULT, PAGE_MAX, Page, Query
from fluxmesh.storage.base import Storage

COLUMNS: Final = ("ID", "STATUS", "TASK", "QUEUE", "TIER", "ATTEMPTS", "CREATED", "NOTE")
DEAD_COLUMNS: Final = ("ID", "TASK", "QUEUE", "ATTEMPTS", "ENDED", "REASON", "ERROR")


def add_page_options(parser: Parser) -> None:
    parser.add_argument(
        "--limit", type=count(1, PAGE_MAX), metavar="N", help=f"jobs on the page ({PAGE_DEFAULT})"
    )
    parser.add_argument("--cursor", metavar="TEXT", help="next_cursor of the page before")
    parser.add_argument("--all", action="store_true", help="every page")
    json_option(parser)


async def pages(storage: Storage, query: Query, options: Options) -> AsyncIterator[Page[Job]]:
    """One page, or with --all each page from the cursor on."""
    if options.all and options.limit is not None:
        raise InvalidOption("--all", "given together with --limit", hint="give one of them")
    limit = options.limit or (PAGE_MAX if options.all else PAGE_DEFAULT)
    cursor = options.cursor
    while True:
        page = await storage.find(query, cursor=cursor, limit=limit)
        yield page
        cursor = page.next_cursor
        if not options.all or cursor is None:
            return


async def print_jobs(storage: Storage, query: Query, options: Options, *, dead: bool = False) -> None:
    """The list as a table, or with --json as {"items": […], "next_cursor": …}."""
    if options.json:
        await _print_document(storage, query, options)
        return
    rows: list[tuple[str, ...]] = []
    async for page in pages(storage, query, options):
        rows.extend(_dead_row(job) if dead else _row(job) for job in page.items)
        if len(rows) >= PAGE_MAX or not options.all or page.next_cursor is None:
            output.table(DEAD_COLUMNS if dead else COLUMNS, rows, right=("ATTEMPTS",))
            rows.clear()
        _remark(page, options)


def _remark(page: Page[Job], options: Options) -> None:
    if page.partial and not options.all:
        output.note("partial: the search stopped at its bound; --cursor or --all goes on")
    if page.next_cursor is not None and not options.all:
        output.note(f"more: --cursor {page.next_cursor}")


async def _print_document(storage: Storage, query: Query, options: Options) -> None:
    glue = '{"items":['
    last: str | None = None
    partial = False
    async for page in pages(storage, query, options):
        for job in page.items:
            output.json_text(glue)
            output.json_text(output.encoded(job_document(job)))
            glue = ","
        last, partial = page.next_cursor, page.partial
    if glue != ",":
        output.json_text(glue)
    tail = f'],"next_cursor":{output.encoded(last).decode()}'
    output.json_text(f'{tail},"partial":true}}\n' if partial and last is not None else f"{tail}}}\n")


def _row(job: Job) -> tuple[str, ...]:
    return (
        job.id,
        job.status.value,
        job.task,
        job.queue,
        output.tier(job.priority),
        str(job.attempts),
        output.instant(job.created_at),
        _note(job),
    )


def _note(job: Job) -> str:
    if job.waiting_for is not None:
        return f"waits for {job.waiting_for}"
    if job.error is not None and not (job.ended and job.reason is None and job.result is not None):
        return output.safe(f"{job.error.type}: {job.error.message}", most=80)
    if job.progress_message and not job.ended:
        return output.safe(f"{job.progress:.0f} % {job.progress_message}", most=80)
    return ""


def _dead_row(job: Job) -> tuple[str, ...]:
    error = f"{job.error.type}: {job.error.message}" if job.error else ""
    return (
        job.id,
        job.task,
        job.queue,
        str(job.attempts),
        output.instant(job.completed_at),
        job.reason or "",
        output.safe(error, most=80),
    )
