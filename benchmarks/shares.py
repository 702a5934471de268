"""Keys and the workers to whom they belong: what ran where, and how evenly. Pure but for `submit_naps`."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Final

from msgspec import Struct

from benchmarks.figures import CheckFailed
from benchmarks.seen import Seen
from fluxmesh.config import Settings
from fluxmesh.mesh.ring import Ring
from fluxmesh.submission import prepare

if TYPE_CHECKING:
    from benchmarks.bench import Site

VIRTUAL_NODES: Final = Settings().mesh_virtual_nodes
QUEUE_CAP: Final = 1_000_000
KEYS_TRIED: Final = 10_000


def key_of(number: int, keys: int) -> str:
    return f"customer-{number % keys}"


def owners(names: Iterable[str]) -> Callable[[str], str | None]:
    """Whose a key is, by the ring of all these workers and nothing else."""
    return Ring(dict.fromkeys(names, VIRTUAL_NODES)).owner


def keys_of(name: str, names: Iterable[str], many: int) -> list[str]:
    """So many keys that belong to this worker."""
    owner = owners(names)
    found = [
        key for key in (key_of(number, KEYS_TRIED) for number in range(KEYS_TRIED)) if owner(key) == name
    ]
    if len(found) < many:
        raise CheckFailed(f"{name} owns {len(found)} of {KEYS_TRIED:,} keys, not {many}")
    return found[:many]


def drawn(count: int, keys: int, *, hot: float, seed: int) -> list[str]:
    """A key for each job, by chance, the same for the same seed. `hot`: how many of all have the first key,
    beside those that are drawn with it."""
    rng = random.Random(seed)
    return [key_of(0 if rng.random() < hot else rng.randrange(keys), keys) for _ in range(count)]


class Shares(Struct, frozen=True):
    """`hits`: of the jobs that ran on the owner of their key, the part of all. `busiest`, `idlest`: jobs of
    one worker over the mean of all."""

    hits: float
    busiest: float
    idlest: float
    jobs: dict[str, int]


def shares(seen: Sequence[Seen], keys: dict[int, str], names: Sequence[str]) -> Shares:
    """`keys`: of each number."""
    owner = owners(names)
    ran = Counter(dict.fromkeys(names, 0))
    ran.update(str(job.worker_id) for job in seen)
    if set(ran) != set(names):
        raise CheckFailed(f"jobs ran on {sorted(set(ran) - set(names))}")
    mean = len(seen) / len(names)
    return Shares(
        hits=sum(owner(keys[job.number]) == job.worker_id for job in seen) / len(seen),
        busiest=max(ran.values()) / mean,
        idlest=min(ran.values()) / mean,
        jobs=dict(sorted(ran.items())),
    )


def load_bound(weight: float) -> float:
    """How far above the mean an owner may be loaded at this weight before its keys are passed on; at 1 it is
    not bounded."""
    return float("inf") if weight >= 1 else max(1.25, 1 / (1 - weight))


def falls(rates: Sequence[float]) -> float:
    """How far it falls from one to the next at most; 0 where it never does."""
    return max([0.0, *(before - after for before, after in pairwise(rates))])


def started(counted: Mapping[str, int]) -> int:
    """Starts of jobs that workers have counted, on the owner of their key and elsewhere."""
    return counted.get("affinity_hits", 0) + counted.get("affinity_misses", 0)


class LoadSums:
    """Loads of workers, looked at again and again: jobs running and held over slots."""

    def __init__(self, names: Iterable[str]) -> None:
        self._sums = dict.fromkeys(names, 0.0)
        self._looks = 0

    def look(self, loads: dict[str, float]) -> None:
        """One look. A time at which nobody has anything is none."""
        if any(loads.values()):
            self._looks += 1
            for name in self._sums:
                self._sums[name] += loads.get(name, 0.0)

    def over_mean(self) -> dict[str, float]:
        """The load of each over the mean of all, over the time in which there was any."""
        mean = sum(self._sums.values()) / len(self._sums)
        return {name: total / mean if mean else 0.0 for name, total in self._sums.items()}


async def submit_naps(
    site: Site, jobs: Sequence[tuple[int, str | None]], nap_s: float, *, queue: str = "default"
) -> None:
    """All of them in as few calls as may be: number and key of each."""
    task = {"task": "nap", "queue": queue}
    plain = prepare(task)
    keyed = {key: prepare(task | {"affinity_key": key}) for _, key in jobs if key is not None}
    new = [(plain if key is None else keyed[key]).job([number, nap_s], {}) for number, key in jobs]
    for start in range(0, len(new), 1_000):
        await site.storage.enqueue(new[start : start + 1_000], queue_cap=QUEUE_CAP)
