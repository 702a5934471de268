"""What the mesh did, as the server of its own tells it: nothing of the mesh is imported here."""

from __future__ import annotations

import json
import time
import urllib.request
from typing import Any, Final

from tests.cases.harness import Lab

_ANSWERS_S: Final = 10.0
_LOOK_S: Final = 0.05


class Figures:
    """GET /api/v1/mesh of a `fluxmesh server --no-standalone`."""

    def __init__(self, lab: Lab, name: str = "api") -> None:
        _, self._url = lab.api(name)

    def read(self) -> dict[str, Any]:
        with urllib.request.urlopen(f"{self._url}/api/v1/mesh", timeout=_ANSWERS_S) as answer:
            found: dict[str, Any] = json.load(answer)
        return found

    def total(self, name: str) -> int:
        """Over all workers that live, since their starts."""
        return int(self.read()["totals"][name])

    def of(self, worker_id: str) -> dict[str, Any]:
        """What this worker told last; empty: nothing yet."""
        found = [one for one in self.read()["items"] if one["worker_id"] == worker_id]
        return dict(found[0]) if found else {}

    def sees(self, worker_id: str) -> set[str]:
        """Whom this worker sees alive, itself included."""
        members = self.of(worker_id).get("members", ())
        return {one["worker_id"] for one in members if one["standing"] == "alive"}

    def await_even(self, within_s: float) -> dict[str, int]:
        """The totals, once something was stolen and as much was given as was taken in all that was told."""
        deadline = time.monotonic() + within_s
        while True:
            found = self.read()
            totals: dict[str, int] = found["totals"]
            if 0 < totals["jobs_stolen_in"] == totals["jobs_stolen_out"]:
                return totals
            if time.monotonic() > deadline:
                counters = {one["worker_id"]: one["counters"] for one in found["items"]}
                raise AssertionError(f"not as much was given as was stolen: {totals}, {counters}")
            time.sleep(_LOOK_S)
