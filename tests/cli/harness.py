"""The command line as its users meet it: a process with arguments, two streams and an exit code."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import io
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from fluxmesh.cli.main import entry
from fluxmesh.config import Settings
from fluxmesh.storage.registry import open_storage

FLUXMESH = (sys.executable, "-m", "fluxmesh.cli")
PATIENCE_S = 30.0
_PR_CAPBSET_DROP = 24
_CAP_DAC_OVERRIDE = 1
_CAP_DAC_READ_SEARCH = 2


@dataclass(frozen=True)
class Done:
    """What a command left behind."""

    code: int
    out: str
    err: str

    @property
    def document(self) -> Any:
        """The one JSON document on stdout."""
        return json.loads(self.out)

    def refused(self, code: int, *words: str) -> None:
        """A user's mistake: this exit code, an error and a hint with these words, nothing on stdout."""
        assert self.code == code, self
        assert self.out == ""
        assert "Traceback" not in self.err
        assert "error: " in self.err
        for word in words:
            assert word in self.err, self.err


def environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """Ours without any setting of FluxMesh, and what is asked for."""
    plain = {key: value for key, value in os.environ.items() if not key.startswith("FLUXMESH_")}
    return plain | dict(extra or {})


def run(
    *args: str | bytes,
    cwd: Path,
    env: Mapping[str, str] | None = None,
    stdin: str | None = None,
    powerless: bool = False,
    timeout: float = PATIENCE_S,
) -> Done:
    """Run one command to its end. `powerless`: file modes bind it, even where the tests run as root."""
    done = subprocess.run(
        [*FLUXMESH, *args],
        cwd=cwd,
        env=environment(env),
        input=b"" if stdin is None else stdin.encode(),
        capture_output=True,
        timeout=timeout,
        check=False,
        preexec_fn=drop_file_powers if powerless else None,
    )
    return Done(done.returncode, done.stdout.decode(), done.stderr.decode("utf-8", "backslashreplace"))


def run_here(*args: str, cwd: Path) -> Done:
    """`run` in this interpreter: for what a test arranges or looks up, where a process shows nothing."""
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True) for _ in range(2))
    with (
        contextlib.chdir(cwd),
        mock.patch.dict(os.environ, environment(), clear=True),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        code = entry(args)
    return Done(code, *(text.buffer.getvalue().decode() for text in (out, err)))  # type: ignore[attr-defined]


def drop_file_powers() -> None:
    """In a child before exec: root may no longer read and write what modes forbid."""
    if os.geteuid() == 0:
        libc = ctypes.CDLL(None)
        for capability in (_CAP_DAC_OVERRIDE, _CAP_DAC_READ_SEARCH):
            libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0)


def make_database(path: Path) -> str:
    """An empty database; answers its URL."""

    async def make() -> None:
        storage = await open_storage(f"sqlite:///{path}", Settings(), create=True)
        await storage.close()

    asyncio.run(make())
    return f"sqlite:///{path}"


class Running:
    """A command that goes on, with its standard error read as it comes."""

    def __init__(self, *args: str, cwd: Path, env: Mapping[str, str] | None = None) -> None:
        self.process = subprocess.Popen(
            [*FLUXMESH, *args],
            cwd=cwd,
            env=environment(env),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        self.err = ""

    def until(self, text: str, *, times: int = 1, within_s: float = PATIENCE_S) -> None:
        """Read until the text stands there so often."""
        assert self.process.stderr is not None
        until = time.monotonic() + within_s
        while self.err.count(text) < times:
            left = until - time.monotonic()
            ready, _, _ = select.select([self.process.stderr], [], [], max(left, 0))
            data = os.read(self.process.stderr.fileno(), 65_536) if ready else b""
            assert data, f"{text!r} did not come: {self.err}"
            self.err += data.decode("utf-8", "replace")

    def end(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Signal it, and wait for its exit code."""
        self.process.send_signal(number)
        return self.wait()

    def wait(self) -> int:
        _, rest = self.process.communicate(timeout=PATIENCE_S)
        self.err += rest.decode("utf-8", "replace")
        return self.process.returncode

    def __enter__(self) -> Running:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        if self.process.stderr is not None:
            self.process.stderr.close()


def worker(url: str, cwd: Path, *args: str) -> Running:
    """A worker command whose processes take jobs."""
    running = Running("worker", "--url", url, *args, cwd=cwd)
    try:
        count = int(args[args.index("--processes") + 1]) if "--processes" in args else 1
        running.until("worker ready", times=count)
    except BaseException:
        running.__exit__()
        raise
    return running


def submit(url: str, cwd: Path, task: str, *args: str) -> str:
    """Submit a job; its id."""
    done = run_here("submit", "--url", url, "--task", task, *args, cwd=cwd)
    assert done.code == 0, done
    return done.out.strip()


def show(url: str, cwd: Path, job_id: str) -> dict[str, Any]:
    done = run_here("jobs", "show", job_id, "--url", url, "--json", cwd=cwd)
    assert done.code == 0, done
    document: dict[str, Any] = done.document
    return document


def wait_until(url: str, cwd: Path, job_id: str, status: str) -> None:
    """Return once the job has this status."""
    until = time.monotonic() + PATIENCE_S
    while (seen := show(url, cwd, job_id)["status"]) != status:
        assert time.monotonic() < until, f"{job_id} is {seen}, not {status}"
        time.sleep(0.02)  # only the record tells, and the worker needs the processor more


def listed(url: str, cwd: Path, query: str = "", *args: str) -> Sequence[dict[str, Any]]:
    done = run_here("jobs", "list", "--url", url, "--q", query, "--all", "--json", *args, cwd=cwd)
    assert done.code == 0, done
    items: Sequence[dict[str, Any]] = done.document["items"]
    return items
