"""python -m fluxmesh.worker.keeper: the process beside a worker that a program runs inside itself.

A program that calls run_worker() has no supervisor. This process keeps the worker's lease while a body
holds the program's interpreter, and declares its death when the program is gone, so that its jobs run
elsewhere at once. It never kills. It ends when the worker does, when its standard input ends, or when the
program does.

It is started with `--ledger-fd N` and reads its orders, one line of JSON, from standard input: the
storage's URL may hold a password, and command lines are everybody's to read.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import signal
import sys
from collections.abc import Sequence
from typing import Final

import msgspec
from msgspec import Struct

from fluxmesh.clock import system_clock
from fluxmesh.config import Settings
from fluxmesh.errors import FluxMeshError
from fluxmesh.obs.log import configure
from fluxmesh.service import Service
from fluxmesh.storage.base import Storage
from fluxmesh.storage.registry import open_storage
from fluxmesh.storage.values import PROCESS_GONE
from fluxmesh.worker.death_reporter import Death, DeathReporter
from fluxmesh.worker.keeper_process import READY
from fluxmesh.worker.lease_keeper import LeaseKeeper
from fluxmesh.worker.ledger import LEDGER_FLAG, LedgerReader
from fluxmesh.worker.proc import ParentWatch, process_state
from fluxmesh.worker.stall import LOOK_S

ORDERS_MOST_BYTES: Final = 1 << 20
DECLARE_MOST_S: Final = 30.0  # for a death that storage cannot be told of; then the lease tells
LAST_LOOKS_S: Final = 1.0  # at a program whose end of the pipe is closed
_READ_BYTES: Final = 64 << 10


class Orders(Struct, frozen=True):
    """What the program says to its keeper."""

    pid: int
    url: str
    settings: Settings


class Keeper(Service):
    """Ends by itself when there is nothing more to be kept; `declared` is what is left to do then."""

    def __init__(self, orders: Orders, ledger: LedgerReader, stdin_fd: int) -> None:
        rng = random.Random()
        super().__init__("keeper", interval_s=LOOK_S, rng=rng)
        self._ledger = ledger
        self._parent = ParentWatch(orders.pid)
        self._stdin_fd = stdin_fd
        self._clock = system_clock()
        self._input_ended_s: float | None = None

        async def opened(inline: bool) -> Storage:  # noqa: FBT001 - the port's own way to be opened
            return await open_storage(orders.url, orders.settings, create=False, inline=inline)

        self._lease = LeaseKeeper(
            ledger,
            open_storage=opened,
            stall_limit_s=orders.settings.stall_limit_s,
            clock=self._clock,
            log=self._log,
        )
        self._reporter = DeathReporter(
            open_storage=opened, settings=orders.settings, clock=self._clock, rng=rng
        )
        self._proof_of_death = orders.settings.proof_of_death

    async def run_once(self) -> float | None:
        """Keep the lease if that is needed; stop when the worker or the program is gone."""
        now_s, rest_s = self._clock.mono_s(), LOOK_S
        vitals = self._ledger.vitals()
        if self._parent.gone():
            self.request_stop()
            if vitals is not None and self._proof_of_death:
                self._reporter.report(Death(self._ledger.worker(vitals.epoch), PROCESS_GONE))
        elif vitals is None:
            self.request_stop()  # it was registered before we came: it has ended, and the program goes on
        else:
            rest_s = self._lease.look(vitals, process_state(self._parent.pid), now_s)
        ended_s = self._input_ended_s
        if ended_s is not None and (vitals is None or now_s - ended_s > LAST_LOOKS_S):
            self.request_stop()
        return rest_s if ended_s is None else LOOK_S

    async def get_ready(self) -> None:
        """Look at once when the program ends or has nothing more to say; try the storage. Bounded."""
        loop = asyncio.get_running_loop()
        loop.add_reader(self._stdin_fd, self._input_ended)
        if self._parent.fileno() >= 0:
            loop.add_reader(self._parent.fileno(), self._parent_ended)
        await self._lease.open_early()

    async def declared(self) -> bool:
        """Wait until storage has heard of the program's death, if there was one; False: not in time."""
        try:
            async with asyncio.timeout(DECLARE_MOST_S):
                while self._reporter.pending:
                    await self._declare()
        except TimeoutError:
            pass
        left = self._reporter.pending
        await self._reporter.close()
        await self._lease.close()
        return not left

    async def _declare(self) -> None:
        try:
            await self._reporter.run_once()
        except FluxMeshError as error:
            self._log.debug("storage does not answer", verb="declare_dead", error=str(error))
            await asyncio.sleep(LOOK_S)

    def _input_ended(self) -> None:
        if os.read(self._stdin_fd, _READ_BYTES):
            return
        asyncio.get_running_loop().remove_reader(self._stdin_fd)
        # A program that dies closes this pipe some moments before it is gone.
        self._input_ended_s = self._clock.mono_s()
        self.wake()

    def _parent_ended(self) -> None:
        asyncio.get_running_loop().remove_reader(self._parent.fileno())
        self.wake()


def main(argv: Sequence[str] | None = None) -> int:
    # Signals to the whole group mean the program; its worker may take its time to drain.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    parser = argparse.ArgumentParser(prog="python -m fluxmesh.worker.keeper")
    parser.add_argument(LEDGER_FLAG, type=int, required=True)
    ledger = LedgerReader(parser.parse_args(argv).ledger_fd)
    os.set_inheritable(ledger.fd, False)
    line = sys.stdin.buffer.readline(ORDERS_MOST_BYTES)
    if not line:
        return 0  # the worker has ended before this process had begun
    orders = msgspec.json.decode(line, type=Orders)
    configure("warning", "text")
    return 0 if asyncio.run(_keep(orders, ledger)) else 1


async def _keep(orders: Orders, ledger: LedgerReader) -> bool:
    keeper = Keeper(orders, ledger, sys.stdin.fileno())
    await keeper.start()
    await keeper.get_ready()
    with contextlib.suppress(OSError):  # nobody listens if the program is gone already
        sys.stderr.write(f"{READY}\n")
        sys.stderr.flush()
    await keeper.wait()
    return await keeper.declared()


if __name__ == "__main__":
    sys.exit(main())
