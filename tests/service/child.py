"""A tiny worker process for the supervisor's tests: speaks the report protocol and does as it is told.

python child.py JOURNAL STEP… --report-fd N. The journal gets a line for each thing that happens to it.
Steps: epoch=N, ready, junk, ended, left=N (ended, but for N bodies), exit=N, obey (drain at the first
telling: 0; at the second: 1), deaf (ignores SIGTERM), once=PATH (goes on only if PATH is not there yet, and
creates it; else obeys), eof.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys

from fluxmesh.worker.signals import StopSignals


class Child:
    def __init__(self, journal: str, report_fd: int) -> None:
        self._journal = journal
        self._report_fd = report_fd
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
    journal, *steps, flag, report_fd = sys.argv[1:]
    assert flag == "--report-fd"
    child = Child(journal, int(report_fd))
    child.note("started")
    return child.run(steps)


if __name__ == "__main__":
    code = main()
    sys.exit(code)
