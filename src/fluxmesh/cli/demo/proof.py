"""The proof: another process reads the results by the command line, and they are compared to the files."""

from __future__ import annotations

import asyncio
import hashlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from fluxmesh.cli.demo import stage
from fluxmesh.cli.demo.scene import Scene

READ_MOST_S: Final = 120.0
WRONG_SHOWN: Final = 5


class _Item(msgspec.Struct):
    """What is looked at of a listed job."""

    args: list[Any]
    result: Any = None


class _Document(msgspec.Struct):
    items: list[_Item]


async def prove(scene: Scene, files: Sequence[str]) -> bool:
    """True if the result of every file is that file's sha256."""
    results = await _results(scene)
    if results is None:
        return False
    wrong = [path for path in files if results.get(path) != await asyncio.to_thread(sha256_of, path)]
    right = len(files) - len(wrong)
    stage.say(
        f"checked   {right:,} of {len(files):,} sha256, read by another process with `jobs list --json`"
    )
    for path in wrong[:WRONG_SHOWN]:
        why = (
            "wrong     {} (did it change meanwhile?)" if path in results else "missing   {} (its job failed)"
        )
        stage.say(why.format(path))
    return not wrong


async def _results(scene: Scene) -> Mapping[str, str] | None:
    argv = [sys.executable, "-m", "fluxmesh.cli", "jobs", "list", "--all", "--json"]
    argv += ["--url", scene.url, "--namespace", scene.settings.namespace]
    argv += ["--q", f"queue:{scene.queue} task:file_digest"]
    process = await asyncio.create_subprocess_exec(
        *argv,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        text, errors = await asyncio.wait_for(process.communicate(), READ_MOST_S)
    except TimeoutError:
        stage.say(f"checked   nothing: no answer in {READ_MOST_S:g} s")
        return None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode != 0:
        stage.say(f"checked   nothing: {errors.decode('utf-8', 'replace')[-500:]}")
        return None
    items = msgspec.json.decode(text, type=_Document).items
    return {item.args[0]: item.result["sha256"] for item in items if isinstance(item.result, dict)}


def sha256_of(path: str) -> str:
    """Of the file as it is now; empty if it cannot be read any more."""
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError:
        return ""
