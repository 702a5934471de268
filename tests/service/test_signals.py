"""Signals as tellings: what they mean while a process works, and when it has come to its end."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

BOUND_S = 20
PROGRAM = """
import asyncio, atexit, signal, sys, time
from fluxmesh.worker.signals import StopSignals

async def main():
    told = asyncio.Event()
    signals = StopSignals(told.set, told.set)
    signals.install()
    print("works", flush=True)
    await told.wait()
    {ending}
    return 7

code = asyncio.run(main())
print("ends", flush=True)
time.sleep(60)
sys.exit(code)
"""


def ended_in_its_end(ending: str, number: signal.Signals) -> int:
    """Told once, and once more when it has done everything but exit. Its status."""
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM.format(ending=ending)], stdout=subprocess.PIPE, text=True
    ) as program:
        try:
            assert program.stdout is not None
            assert program.stdout.readline() == "works\n"
            program.send_signal(signal.SIGTERM)
            assert program.stdout.readline() == "ends\n"
            program.send_signal(number)
            return program.wait(BOUND_S)
        finally:
            program.kill()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_a_process_that_has_come_to_its_end_changes_nothing_of_its_code(
    number: signal.Signals,
) -> None:
    assert ended_in_its_end("signals.end_with(7)", number) == 7


def test_without_that_it_would_die_of_the_signal() -> None:
    assert ended_in_its_end("signals.remove()", signal.SIGTERM) == -signal.SIGTERM
