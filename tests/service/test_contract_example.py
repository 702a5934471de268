"""The Python example of docs/contract.md, run as it stands there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from tests.architecture.gates import ROOT

CHECKS = """
worker = queue.worker(concurrency=2)
worker.start()
print([one.result(timeout=30) for one in (job, *jobs)], later.status)
again = process_order.options(delay=5, priority="low", idempotency_key="k1").delay(8)
print(again.id == later.id, again.deduplicated)
print(process_order.definition.spec.rate_limit, later.record.priority == Priority.LOW)
worker.stop()
print(ResourceDefinition.__name__, *(scope.name for scope in Scope))
print(*(kind.__name__ for kind in (Context, Snooze, RetryAfter, DeadLetter)))
print(worker.mesh, MeshWorker().port)
"""


def test_the_example_of_the_contract_runs(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "contract.md").read_text(encoding="utf-8")
    [example] = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    (tmp_path / "example.py").write_text(example + CHECKS, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "example.py"], cwd=tmp_path, capture_output=True, text=True, timeout=90, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "['done 7', 'done 1', 'done 2'] SCHEDULED",
        "True True",
        "100/m True",
        "ResourceDefinition WORKER THREAD TASK",
        "Context Snooze RetryAfter DeadLetter",
        "None 7946",
    ]
    assert (tmp_path / "tasks.db").exists()
