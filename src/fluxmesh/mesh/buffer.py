"""The jobs that a worker holds and has not started: in which order it begins them, and others take them.

Tier first. Inside a tier the worker's own jobs (by the ring) lie at the hot end, the rest at the cold end,
each by age, the oldest first: nothing that came later overtakes a job of its tier and kind, so none starves.
The worker begins at the hot end. A thief takes of the highest tier first, and inside it what belongs to the
thief, then what is not the worker's own, and of each the newest, which would wait here the longest.

`Buffer` is changed by one thread at a time. Others may copy `held.values()`, one step of the interpreter, and
judge the copy by `offered`.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Final

import xxhash
from msgspec import Struct

TIERS: Final = 4
HOPS_MAX: Final = 2  # what has changed hands so often stays where it is, as storage has it too
COVERS_S: Final = 0.1  # a full buffer keeps all slots busy for so long
GUESSED_RUN_S: Final = 1.0  # until enough runs are known
RUNS_KNOWN: Final = 5
_REMEMBERED: Final = 9
_STEP_S: Final = 0.001  # the clock of an event loop may count in milliseconds
_SHORTEST_RUN_S: Final = 1e-6


class Held(Struct, frozen=True, gc=False):
    """A held job as far as its order depends on it. `slot` None: its key is the name of its task. `hops`:
    how often it has changed hands. `since_ns`: monotonic, since when it is held here."""

    id: str
    token: int
    queue: str
    tier: int
    task: str
    slot: int | None
    hops: int
    since_ns: int


class Buffer:
    """At most `most` jobs. `owns` says whether one belongs to this worker; when its answers may have changed,
    `regard` asks again."""

    def __init__(self, most: int, owns: Callable[[Held], bool]) -> None:
        self.most: Final = most
        self.held: Final[dict[str, Held]] = {}  # in the order of their coming
        self._owns = owns
        # By tier: own jobs, others; and how many of each may change hands.
        self._lines: list[tuple[dict[str, Held], dict[str, Held]]] = [({}, {}) for _ in range(TIERS)]
        self._movable = [[0, 0] for _ in range(TIERS)]

    def __len__(self) -> int:
        return len(self.held)

    @property
    def room(self) -> int:
        return max(0, self.most - len(self.held))

    def put(self, held: Held) -> bool:
        """Hold a job, as the newest; an older token of the same job gives way. False: it does not fit."""
        before = self.held.get(held.id)
        if before is not None:
            self.remove(before.id, before.token)
        if not self.room:
            return False
        self.held[held.id] = held
        self._file(held)
        return True

    def remove(self, job_id: str, token: int) -> Held | None:
        """Hold it no longer; None: it was not held under this token."""
        held = self.held.get(job_id)
        if held is None or held.token != token:
            return None
        del self.held[job_id]
        own = job_id in self._lines[held.tier][0]
        del self._lines[held.tier][0 if own else 1][job_id]
        if held.hops < HOPS_MAX:
            self._movable[held.tier][0 if own else 1] -= 1
        return held

    def regard(self) -> None:
        """Ask anew of each job whether it is our own; the age of none is changed."""
        for line in self._lines:
            line[0].clear()
            line[1].clear()
        self._movable = [[0, 0] for _ in range(TIERS)]
        for held in self.held.values():
            self._file(held)

    def _file(self, held: Held) -> None:
        kind = 0 if self._owns(held) else 1
        self._lines[held.tier][kind][held.id] = held
        if held.hops < HOPS_MAX:
            self._movable[held.tier][kind] += 1

    def hot(self, most: int, lacking: Sequence[int] = ()) -> list[Held]:
        """What to begin next in `most` free slots, of which `lacking[t]` are only for jobs of tier t."""
        open_to_all = max(0, most - sum(lacking))
        left = most
        chosen: list[Held] = []
        for tier, lines in enumerate(self._lines):
            kept = lacking[tier] if lacking else 0
            usable = min(left, open_to_all + kept)
            before = len(chosen)
            for line in lines:
                for held in line.values():
                    if len(chosen) - before >= usable:
                        break
                    chosen.append(held)
            taken = len(chosen) - before
            left -= taken
            open_to_all -= max(0, taken - kept)
            if left <= 0:
                break
        return chosen

    def stealable(self, *, own_too: bool) -> tuple[int, int]:
        """How many jobs may change hands, and the best tier of them (the last tier if there is none)."""
        counts = [own + others if own_too else others for own, others in self._movable]
        best = next((tier for tier, count in enumerate(counts) if count), TIERS - 1)
        return sum(counts), best

    def older_than(self, instant_ns: int) -> list[Held]:
        """What has been held since that instant or longer."""
        old: list[Held] = []
        for held in self.held.values():
            if held.since_ns > instant_ns:
                break
            old.append(held)
        return old

    def oldest_ns(self) -> int | None:
        return next((held.since_ns for held in self.held.values()), None)


def offered(
    held: Iterable[Held],
    most: int,
    *,
    can_run: Callable[[Held], bool],
    is_thiefs: Callable[[Held], bool],
    is_own: Callable[[Held], bool],
    own_too: bool,
) -> list[Held]:
    """At most `most` of these jobs, which are in the order of their coming, for a thief. `own_too`: what
    belongs to their holder may change hands."""
    ranked = []
    for age, job in enumerate(held):
        if job.hops >= HOPS_MAX or not can_run(job):
            continue
        own = is_own(job)
        if own_too or not own:
            ranked.append((job.tier, not is_thiefs(job), own, -age, job))
    return [item[4] for item in heapq.nsmallest(most, ranked, key=lambda item: item[:4])]


# -- how much to hold ------------------------------------------------------------------------------------
class RunTimes:
    """How long one takes here: the middle one of the last nine, `guessed_s` until RUNS_KNOWN are known.

    A median, because a machine that has much else to do makes single runs many times as long as the rest: up
    to four of nine do not count at all. A true change counts from the fifth run on, and wholly (Tukey 1977,
    running medians)."""

    def __init__(self, guessed_s: float = GUESSED_RUN_S) -> None:
        self._last: deque[float] = deque(maxlen=_REMEMBERED)
        self._noted = 0
        self._found = (0, guessed_s)  # after how many were noted

    def note(self, run_s: float) -> None:
        self._last.append(run_s)
        self._noted += 1

    @property
    def run_s(self) -> float:
        """Any thread: at worst it is that of a moment ago."""
        noted, (when, found_s) = self._noted, self._found
        if noted == when or noted < RUNS_KNOWN:
            return found_s
        last = sorted(self._last)
        found_s = last[len(last) // 2]
        self._found = (noted, found_s)
        return found_s


def wanted(concurrency: int, run_s: float | None, local_buffer: int) -> int:
    """How many jobs to hold: what keeps all slots busy for COVERS_S. `run_s` None: not known yet."""
    each = math.ceil(COVERS_S / max(GUESSED_RUN_S if run_s is None else run_s, _SHORTEST_RUN_S))
    return min(local_buffer, concurrency * each)


def pays(run_s: float, trip_s: float, quiet_s: float) -> bool:
    """Whether it pays to hold jobs. Holding one costs storage two changes, by its claim and by its begin; to
    claim it and run it costs one. What ends sooner than an exchange is back (`trip_s`) is followed by the
    next claim anyway, and that brings as many as have ended: none would begin sooner for being held.
    `quiet_s`: for so long nothing has ended or was started here. If that is longer than an exchange, then
    what runs now is not as short as what ran before."""
    return max(run_s, quiet_s) - _STEP_S >= trip_s


def worth_asking(lacks: int, mark: int) -> bool:
    """Whether so many jobs are missing to the mark that a claim for them pays: a quarter of it. To ask for
    each by itself would cost storage as much as all else."""
    return lacks > 0 and lacks * 4 >= mark


def extra_of_claim(local_buffer: int, share: float) -> int:
    """How many jobs one claim holds at most beyond its free slots: a quarter of the buffer times this
    worker's share of the capacity of all, so that the first to ask does not take everything."""
    return min(local_buffer, max(1, int(local_buffer / 4 * share + 1e-9)))


def poll_jitter_s(worker_id: str, period_s: float) -> float:
    """From 0 to half a period, always the same for a worker: started together, they do not ask together."""
    half_us = max(1, int(period_s * 500_000))
    return (xxhash.xxh3_64_intdigest(worker_id.encode()) % half_us) / 1e6
