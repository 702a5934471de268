"""Nodes as processes, and what they say, for whoever kills, stops and restarts them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec

from tests.mesh.peer import Orders

BOUND_S = 30.0


class Peer:
    """One process. `said` is what it has said since it was started last; `lives` counts its starts."""

    def __init__(self, orders: Orders, *, prefix: Sequence[str] = ()) -> None:
        self.orders = orders
        self.prefix = tuple(prefix)
        self.said: list[dict[str, Any]] = []
        self._changed = threading.Condition()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def worker_id(self) -> str:
        return self.orders.worker_id

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def seed(self) -> str:
        return f"{self.orders.host}:{self.orders.port}"

    def start(self, **changes: Any) -> Peer:
        """Start it, or start it anew under the next epoch."""
        if self._process is not None:
            changes.setdefault("epoch", self.orders.epoch + 1)
        self.orders = msgspec.structs.replace(self.orders, **changes)
        self.said = []
        words = msgspec.json.encode(self.orders).decode()
        self._process = subprocess.Popen(
            [*self.prefix, sys.executable, "-m", "tests.mesh.peer", words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        threading.Thread(target=self._listen, args=(self._process, self.said), daemon=True).start()
        return self

    def _listen(self, process: subprocess.Popen[bytes], said: list[dict[str, Any]]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            with self._changed:
                said.append(json.loads(line))
                self._changed.notify_all()
        process.stdout.close()

    def wait(self, holds: Callable[[], bool], bound_s: float = BOUND_S, why: str = "") -> None:
        with self._changed:
            assert self._changed.wait_for(holds, bound_s), (why, self.worker_id, self.said[-15:])

    def ask(self, word: str) -> dict[str, Any]:
        """The answer to a word."""
        process = self._process
        assert process is not None
        assert process.stdin is not None
        before = len(self.said)
        process.stdin.write(word.encode() + b"\n")
        process.stdin.flush()
        key = {"leave": "done"}.get(word, word)
        self.wait(lambda: any(key in one for one in self.said[before:]), why=f"no answer to {word}")
        return next(one for one in self.said[before:] if key in one)

    def members(self) -> dict[str, str]:
        found: dict[str, str] = self.ask("members")["members"]
        return found

    def metrics(self) -> dict[str, int]:
        found: dict[str, int] = self.ask("metrics")["metrics"]
        return found

    def events(self, kind: str, who: str | None = None, since: float = 0.0) -> list[dict[str, Any]]:
        return [
            one
            for one in list(self.said)
            if one.get("event") == kind and one["at"] >= since and who in (None, one["who"])
        ]

    def first(self, kind: str, who: str, since: float, bound_s: float = BOUND_S) -> dict[str, Any]:
        """The first such event since then, awaited."""
        self.wait(lambda: bool(self.events(kind, who, since)), bound_s, f"no {kind} of {who}")
        return self.events(kind, who, since)[0]

    def send(self, number: signal.Signals) -> float:
        """Signal it; the instant before."""
        at = time.monotonic()
        os.kill(self.pid, number)
        return at

    def kill(self) -> float:
        at = self.send(signal.SIGKILL)
        self.end()
        return at

    def end(self) -> None:
        process = self._process
        if process is None:
            return
        if process.poll() is None:
            process.kill()
        process.wait()
        if process.stdin is not None and not process.stdin.closed:
            try:
                process.stdin.close()
            except BrokenPipeError:
                pass


@contextmanager
def running(*peers: Peer) -> Iterator[None]:
    try:
        for peer in peers:
            peer.start()
        yield
    finally:
        for peer in peers:
            peer.end()


def met(peers: Sequence[Peer], bound_s: float = BOUND_S) -> None:
    """Return when each of them sees each other alive."""
    wanted = {peer.worker_id for peer in peers}
    end_s = time.monotonic() + bound_s
    while True:
        lacking = [
            (peer.worker_id, other, seen.get(other))
            for peer in peers
            if (seen := peer.members()) is not None
            for other in wanted - {peer.worker_id}
            if seen.get(other) != "alive"
        ]
        if not lacking:
            return
        assert time.monotonic() < end_s, lacking[:10]
        time.sleep(0.05)
