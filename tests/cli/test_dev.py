"""fluxmesh dev: API, worker and housekeeping in one command that follows the code."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Call
from tests.cli.harness import Running, run

APP = """
from fluxmesh import Queue
queue = Queue()

@queue.task(name="version")
def version():
    return {version}
"""


def ask(url: str, path: str, fields: dict[str, Any] | None = None) -> Any:
    data = None if fields is None else json.dumps(fields).encode()
    request = urllib.request.Request(f"{url}/api/v1{path}", data, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=30) as answer:
        return json.load(answer)


def result_of(running: Running, fields: dict[str, Any]) -> Any:
    """What the job of these fields returns, submitted to the API which was started last."""
    url = re.findall(r"server: (http://\S+)", running.err)[-1]
    job_id = ask(url, "/jobs", fields)["id"]
    job = ask(url, f"/jobs/{job_id}/wait?timeout=30")
    assert job["status"] == "COMPLETED", job
    return job["result"]


def test_code_is_followed_through_mistakes_and_ctrl_c_ends_it_with_0(tmp_path: Path) -> None:
    app = tmp_path / "code" / "app.py"
    app.parent.mkdir()
    app.write_text("1 +\n")
    path = os.pathsep.join([str(app.parent), os.environ.get("PYTHONPATH", "")])
    line = ("dev", "--port", "0", "--app", "app:queue", "--builtins", "--reload-dir", "code")
    with Running(*line, cwd=tmp_path, env={"PYTHONPATH": path}) as running:
        running.until("when a file changes")
        assert "SyntaxError" in running.err
        app.write_text(APP.format(version=1))
        running.until("worker ready")
        assert result_of(running, {"task": "version"}) == 1
        # Refused with exit code 2, but for the change of the code and not for the command line.
        app.write_text(APP.format(version=2).replace('"version"', '"file_digest"'))
        running.until("when a file changes", times=2)
        assert "already defined" in running.err
        assert running.end(signal.SIGINT) == 0
        assert "Traceback" not in running.err
    assert run("workers", "--json", cwd=tmp_path).document["items"] == []  # and fluxmesh.db was made here


def test_an_end_while_it_waits_for_a_change_is_0(tmp_path: Path) -> None:
    with Running("dev", "--port", "0", "--app", "missing:queue", cwd=tmp_path) as running:
        running.until("when a file changes")
        assert running.end(signal.SIGINT) == 0


@pytest.mark.parametrize(
    ("args", "code", "word"),
    [
        (("--reload-dir", "nowhere"), 2, "--reload-dir"),
        (("--no-reload", "--host", "0.0.0.0"), 2, "--insecure"),
        (("--no-reload", "--url", "memory://"), 2, "sqlite:///"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused(
    args: tuple[str, ...], code: int, word: str, tmp_path: Path, call: Call
) -> None:
    call("dev", "--port", "0", *args, cwd=tmp_path).refused(code, word)
    assert list(tmp_path.iterdir()) == []


def test_what_no_change_of_the_code_would_mend_is_told_once(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        done = run("dev", "--port", port, cwd=tmp_path)
    done.refused(1, port, "--port 0")
    assert done.err.count("error: ") == 1
