"""What README.md and docs/tutorial.md show is run as it stands there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from fluxmesh.calls import SubmitOptions, TaskOptions
from tests.architecture.gates import ROOT
from tests.cli.harness import Running, environment, run
from tests.redis_server import free_port

README = (ROOT / "README.md").read_text(encoding="utf-8")
TUTORIAL = (ROOT / "docs" / "tutorial.md").read_text(encoding="utf-8")
_LONG_NAMES = {"timeout_seconds", "delay_seconds", "expires_in_seconds"}


def python_blocks(text: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", text, re.DOTALL)


def printed(folder: Path, script: str) -> str:
    done = subprocess.run(
        [sys.executable, script],
        cwd=folder,
        env=environment({"PYTHONPATH": str(folder)}),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_first_job_of_the_readme(tmp_path: Path) -> None:
    app, shop = python_blocks(README)
    (tmp_path / "app.py").write_text(app)
    (tmp_path / "shop.py").write_text(shop)
    with Running("worker", "--app", "app:queue", cwd=tmp_path) as worker:
        worker.until("worker ready")
        assert "done 7" in printed(tmp_path, "shop.py")
        listed = run("jobs", "list", cwd=tmp_path, env={"FLUXMESH_URL": "sqlite:///tasks.db"})
        assert "COMPLETED  app.process_order" in listed.out


def test_the_shop_of_the_tutorial(tmp_path: Path) -> None:
    jobs, script, more, orders = python_blocks(TUTORIAL)
    port = str(free_port())
    (tmp_path / "jobs.py").write_text(jobs + more)
    (tmp_path / "script.py").write_text(script)
    (tmp_path / "orders.py").write_text(orders.replace("8000", port))
    (tmp_path / "a.png").write_bytes(b"png")
    line = ("server", "--app", "jobs:queue", "--queues", "default,images", "--port", port)
    with Running(*line, cwd=tmp_path) as worker:
        worker.until("worker ready")
        assert "order 7: sent to ada@example.org" in printed(tmp_path, "script.py")
        (tmp_path / "kept.py").write_text("from jobs import keep\nprint(keep.delay(7).result(timeout=30))")
        assert printed(tmp_path, "kept.py") == "order 7 is kept\n"
        worker.until("run over")
        assert "COMPLETED order 7: sent to ada@example.org" in printed(tmp_path, "orders.py")


def test_the_shop_of_the_tutorial_has_types(tmp_path: Path) -> None:
    jobs, script, more, orders = python_blocks(TUTORIAL)
    names = {"jobs.py": jobs + more, "script.py": script, "orders.py": orders}
    for name, text in names.items():
        (tmp_path / name).write_text(text)
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", *(str(tmp_path / name) for name in names)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout


def test_the_tutorial_names_every_option() -> None:
    for name in (TaskOptions.__annotations__.keys() | SubmitOptions.__annotations__.keys()) - _LONG_NAMES:
        assert f"`{name}`" in TUTORIAL, name


def test_links_between_the_pages_lead_somewhere() -> None:
    for page in (*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")):
        for target in re.findall(r"\]\(([^):]*)\)", page.read_text(encoding="utf-8")):
            path, _, anchor = target.partition("#")
            found = page.parent / path if path else page
            assert found.exists(), (page.name, target)
            assert not anchor or anchor in anchors(found), (page.name, target)


def anchors(page: Path) -> set[str]:
    """The names of a page's headings, as links write them."""
    heads = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


def test_every_page_is_named_by_another() -> None:
    pages = {page: page.read_text(encoding="utf-8") for page in (ROOT / "docs").glob("*.md")}
    texts = [README, *pages.values()]
    for page, own in pages.items():
        assert any(f"{page.name})" in text or f"{page.name}#" in text for text in texts if text != own), page
