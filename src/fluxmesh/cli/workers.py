"""fluxmesh workers: who runs jobs here."""

from __future__ import annotations

from fluxmesh.cli import output
from fluxmesh.cli.parser import Options, Parser, examples, json_option
from fluxmesh.cli.session import with_storage
from fluxmesh.config import Settings
from fluxmesh.storage.base import Storage
from fluxmesh.storage.values import WorkerInfo

COLUMNS = (
    "WORKER",
    "EPOCH",
    "STATUS",
    "HOST",
    "PID",
    "QUEUES",
    "TIERS",
    "SLOTS",
    "RUNNING",
    "HELD",
    "LAST BEAT",
)


def configure(parser: Parser) -> None:
    parser.epilog = examples("fluxmesh workers", "fluxmesh workers --json")
    parser.set_defaults(run=_run)
    json_option(parser)


def _run(options: Options) -> int:
    async def command(storage: Storage, _settings: Settings) -> int:
        fleet = await storage.fleet()
        if options.json:
            output.json_document({"items": fleet, "next_cursor": None})
        else:
            output.table(
                COLUMNS,
                [_row(worker) for worker in fleet],
                right=("EPOCH", "PID", "SLOTS", "RUNNING", "HELD"),
            )
        return 0

    return with_storage(options, command)


def _row(worker: WorkerInfo) -> tuple[str, ...]:
    return (
        worker.worker_id,
        str(worker.epoch),
        worker.status,
        worker.hostname,
        str(worker.pid),
        ",".join(worker.queues),
        ",".join(output.tier(number) for number in worker.tiers),
        str(worker.capacity),
        str(worker.running),
        str(worker.held),
        output.instant(worker.last_heartbeat),
    )
