"""The four commands that everybody tries first, as they are written, side by side on one file."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from tests.cli.harness import Running, run
from tests.redis_server import free_port


def test_server_worker_scheduler_and_submit_work_as_they_are_written(tmp_path: Path) -> None:
    lines = {
        f"server --host 127.0.0.1 --port {free_port()}": "worker ready",
        "worker --concurrency 8 --queues critical,high,default,low": "worker ready",
        "scheduler --interval 0.2": "scheduler started",
    }
    with ExitStack() as stack:
        daemons = [stack.enter_context(Running(*line.split(), cwd=tmp_path)) for line in lines]
        for daemon, ready in zip(daemons, lines.values(), strict=True):
            daemon.until(ready)
        kwargs = '{"items": ["taskA", "taskB"]}'
        line = ("submit", "--task", "batch_process", "--kwargs", kwargs, "--priority", "high")
        done = run(*line, cwd=tmp_path)
        assert done.code == 0, done
        ended = run("jobs", "wait", done.out.strip(), "--json", "--timeout", "20", cwd=tmp_path)
        assert ended.code == 0, ended
        job = ended.document
        assert (job["priority"], job["result"]["processed_count"]) == (1, 2)
        assert [daemon.end() for daemon in daemons] == [0, 0, 0]
    assert (tmp_path / "fluxmesh.db").exists()
