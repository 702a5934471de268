"""A tiny worker process for the supervisor's tests: speaks the report protocol and does as it is told.

python child.py JOURNAL STEP… --ledger-fd N --report-fd N. The journal gets a line for each thing that
happens to it. Steps: epoch=N, ready, junk, ended, left=N (ended, but for N bodies), exit=N, obey (drain at
the first telling: 0; at the second: 1), deaf (ignores SIGTERM), once=PATH (goes on only if PATH is not
there yet, and creates it; else obeys), after=PATH (waits until it is there), eof, well=EPOCH (signs of life
from now on), stands=EPOCH and mute=EPOCH (its loop does not answer; it says nothing any more), each
followed by job=ID,TOKEN,SECONDS for what it runs, with its hard deadline; recovers=PATH (its loop answers
once that is there)."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import threading
import time

from fluxmesh.clock import SystemClock
from fluxmesh.storage.values import Registration
from fluxmesh.worker.ledger import Ledger
from fluxmesh.worker.signals import StopSignals

WHO = Registration("w", ("default",), (0, 1, 2, 3), (), 4, 2.0, 2.0 / 3)


class Child:
    def __init__(self, journal: str, ledger_fd: int, report_fd: int) -> None:
        self._journal = journal
        self._report_fd = report_fd
        self._ledger = Ledger(ledger_fd, WHO, concurrency=4, hard_grace_s=0, clock=SystemClock())
        self._told = 0

    def note(self, what: str) -> None:
        with open(self._journal, "a", encoding="utf-8") as file:
            file.write(f"{os.getpid()} {what}\n")

    def report(self, line: bytes) -> None:
        os.write(self._report_fd, line + b"\n")

    async def obey(self, *, drains: bool) -> int:
        done: asyncio.Future[int] = asyncio.get_running_loop().create_future()

        def first() -> None:
            self.note("told once")
            if drains:
                self.report(b'{"ended": true}')
                done.set_result(0)

        def second() -> None:
            self.note("told twice")
            done.set_result(1)

        StopSignals(first, second).install()
        self.report(json.dumps({"ready": True}).encode())
        return await done

    def live(self, way: str, epoch: int) -> None:
        """Signs of life on a thread, as many as there are."""
        ledger, began_s = self._ledger, time.monotonic()
        ledger.answered()
        ledger.turned()
        ledger.registered(epoch, began_s)
        if way == "mute":
            return
        ledger.probed()

        def go_on() -> None:
            while True:
                ledger.turned()
                ledger.beat(time.monotonic())
                if way == "well":
                    ledger.probed()
                    ledger.answered()
                time.sleep(0.05)

        threading.Thread(target=go_on, daemon=True).start()

    def recover(self, path: str) -> None:
        """The loop answers again and again once this is there."""

        def go_on() -> None:
            while not os.path.exists(path):
                time.sleep(0.01)
            while True:
                self._ledger.probed()
                self._ledger.answered()
                with open(f"{path}.done", "w"):
                    pass
                time.sleep(0.05)

        threading.Thread(target=go_on, daemon=True).start()

    def run(self, steps: list[str]) -> int:
        for step in steps:
            name, _, value = step.partition("=")
            match name:
                case "epoch":
                    self.report(json.dumps({"epoch": int(value), "from_the_future": [1]}).encode())
                case "ready":
                    self.report(b'{"ready": true}')
                case "junk":
                    self.report(b"\xff\x00{[" * 10)
                    self.report(b'"text"')
                case "ended":
                    self.report(b'{"ended": true}')
                case "left":
                    self.report(json.dumps({"ended": True, "left_running": int(value)}).encode())
                case "once":
                    try:
                        os.close(os.open(value, os.O_CREAT | os.O_EXCL))
                    except FileExistsError:
                        return asyncio.run(self.obey(drains=True))
                case "after":
                    for _ in range(3_000):
                        if os.path.exists(value):
                            break
                        time.sleep(0.01)
                case "well" | "stands" | "mute":
                    self.live(name, int(value))
                case "recovers":
                    self.recover(value)
                case "job":
                    job_id, token, seconds = value.split(",")
                    self._ledger.enter(job_id, int(token), time.monotonic() + float(seconds), 0)
                    self._ledger.blocked(job_id)  # the last one is named
                case "exit":
                    return int(value)
                case "deaf":
                    signal.signal(signal.SIGTERM, signal.SIG_IGN)
                    self.report(b'{"ready": true}')
                    sys.stdin.buffer.read()
                case "eof":
                    self.report(b'{"ready": true}')
                    sys.stdin.buffer.read()
                    self.note("end of file")
                    return 0
                case "obey" | "linger":
                    return asyncio.run(self.obey(drains=name == "obey"))
        return 0


def main() -> int:
    journal, *steps, ledger_flag, ledger_fd, flag, report_fd = sys.argv[1:]
    assert (ledger_flag, flag) == ("--ledger-fd", "--report-fd")
    child = Child(journal, int(ledger_fd), int(report_fd))
    child.note("started")
    return child.run(steps)


if __name__ == "__main__":
    code = main()
    sys.exit(code)
