"""What a run will do, all of it drawn from a seed beforehand: jobs, faults, and when. Pure.

The same seed gives the same choices; what the machine makes of them is another matter.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from typing import Any, Final

import msgspec
from msgspec import Struct

from fluxmesh.job import Status

EFFECTS_ENV: Final = "FLUXMESH_TEST_EFFECTS"  # names the file that bodies write to
PAIR_LIMIT: Final = 2  # max_concurrent of the task "pair"
STORAGES: Final = ("sqlite", "redis", "replicas")
LEASE_S: Final = {"sqlite": 3.0, "redis": 2.0, "replicas": 2.0}  # the shortest there are
KEYS: Final = {"key-a": 1, "key-b": 2, "key-c": 1}  # concurrency keys and their limits
UNIQUES: Final = ("one-x", "one-y", "one-z")

PROCESS_KINDS: Final = ("kill_child", "kill_supervisor", "kill_group", "stop_child", "stop_group", "term")
STORAGE_KINDS: Final = {
    "sqlite": ("storage_frozen", "storage_slow", "storage_full", "clock", "freeze_both", "late_back"),
    "redis": (
        "storage_killed",
        "storage_frozen",
        "storage_slow",
        "storage_full",
        "replies_lost",
        "clock",
        "freeze_both",
        "late_back",
    ),
    "replicas": (),
}
# Of workers in a mesh. A frozen one is a frozen victim, or thief; a cut stream is a lost answer.
MESH_PROCESS_KINDS: Final = ("kill_child", "kill_group", "stop_child", "term", "streams_cut")
MESH_STORAGE_KINDS: Final = {
    "sqlite": ("storage_frozen", "storage_slow"),
    "redis": ("replies_lost", "storage_frozen"),
}
STREAMS_CUT_S: Final = (0.5, 2.0)
# kind -> least and most seconds it lasts. Those of a stop, and of late_back, are in leases.
LENGTHS: Final = {
    "storage_killed": (0.3, 4.0),
    "storage_frozen": (0.5, 5.0),
    "storage_slow": (2.0, 5.0),
    "storage_full": (1.0, 4.0),
    "replies_lost": (0.3, 1.5),
    "clock": (2.0, 6.0),
    "freeze_both": (0.8, 2.0),
    "late_back": (1.1, 1.6),
}
SHORT_STOP: Final = (0.2, 0.55)
LONG_STOP: Final = (1.5, 2.3)
CLOCK_STEP_MOST_S: Final = 15.0
FAULTS_EACH_60_S: Final = 20
KINDS_LEAST: Final = 4

DONE: Final = (Status.COMPLETED,)
DEAD: Final = (Status.DEAD_LETTER,)
LATE: Final = (
    Status.DEAD_LETTER,
    Status.COMPLETED,
)  # where its process was stopped meanwhile, it may be done
STOPPED: Final = (Status.COMPLETED, Status.CANCELLED)
# kind of job -> weight, how it ends. Poison is drawn apart: a few are enough.
JOBS: Final[dict[str, tuple[int, tuple[Status, ...]]]] = {
    "quick": (26, DONE),
    "sync": (14, DONE),
    "retried": (9, DONE),
    "failing": (3, DEAD),
    "doomed": (2, DEAD),
    "snoozing": (5, DONE),
    "long": (6, DONE),
    "deaf": (4, DONE),
    "keyed": (9, DONE),
    "pair": (5, DONE),
    "unique": (5, DONE),
    "delayed": (7, DONE),
    "cancelled_early": (3, STOPPED),
    "cancelled_late": (3, STOPPED),
    "expiring": (2, (Status.COMPLETED, Status.EXPIRED)),
    "timed_out": (3, LATE),
    "overdue": (2, LATE),
    "apart": (4, DONE),
    "stuck": (1, DEAD),
    "poison_apart": (1, DEAD),
    "batch": (2, DONE),
}
LONG: Final = ("long", "deaf")
POISON_EACH_S: Final = 40
JOBS_EACH_S: Final = 8.0
EXPECTED: Final = {
    **{kind: ends for kind, (_, ends) in JOBS.items()},
    "poison": DEAD,
    "warm": DONE,
    "burst": DONE,
}
STOLEN_KINDS: Final = ("warm", "burst")
MESH_BURST_EACH_S: Final = {"sqlite": 0.9, "redis": 1.1}
MESH_JOBS_EACH_S: Final = 2.0
MESH_SLOTS: Final = (1, 1, 4)
# For so long the others stand still when a burst comes, so that one worker has it all when they go on.
HOARD_S: Final = 0.13
_HOARD_BEFORE_S: Final = 0.06


class Submission(Struct, frozen=True):
    """One job, or with `batch` so many of a kind in one call. `cancel_after_s`: its producer thinks again."""

    at_s: float
    kind: str
    task: str
    args: tuple[Any, ...]
    options: dict[str, Any]
    cancel_after_s: float | None = None
    batch: int = 0


class Fault(Struct, frozen=True):
    """`slot`: which of the workers, for what is done to workers; `length_s`: how long it lasts; `amount`: by
    how much, for a clock."""

    at_s: float
    kind: str
    slot: int
    length_s: float = 0.0
    amount: float = 0.0


class Hoard(Struct, frozen=True):
    """All workers but this one stand still for HOARD_S: no fault, but what makes work lie where others want
    it."""

    at_s: float
    slot: int


class WorkerSpec(Struct, frozen=True):
    processes: int | None
    concurrency: int
    flags: tuple[str, ...] = ()


class Plan(Struct, frozen=True):
    seed: int
    storage: str
    seconds: float
    workers: tuple[WorkerSpec, ...]
    jobs: tuple[Submission, ...]
    faults: tuple[Fault, ...]
    replays_at_s: tuple[float, ...] = ()
    mesh: bool = False
    hoards: tuple[Hoard, ...] = ()

    @property
    def digest(self) -> str:
        """The same for the same choices."""
        return hashlib.blake2b(msgspec.json.encode(self), digest_size=6).hexdigest()


def make_plan(
    seed: int,
    storage: str,
    seconds: float,
    *,
    favours: tuple[str, ...] = (),
    without: tuple[str, ...] = (),
    busy: bool = False,
) -> Plan:
    """All choices of a run. `favours`: no other faults than these; `without`: none of these; `busy`: with
    many more long jobs than usual."""
    rng = random.Random(f"{seed} {storage}")
    workers = tuple(
        WorkerSpec(2 if rng.random() < 0.25 else None, rng.randint(3, 5)) for _ in range(rng.randint(2, 3))
    )
    if not any(worker.processes for worker in workers):
        workers = (WorkerSpec(2, 3), *workers[1:])
    jobs = _jobs(rng, seconds, busy=busy)
    least = round(FAULTS_EACH_60_S * seconds / 60)
    faults: tuple[Fault, ...] = ()
    for _ in range(100):
        of_workers = _chosen(PROCESS_KINDS, favours, without)
        of_storage = _chosen(STORAGE_KINDS[storage], favours, without)
        faults = _faults(
            rng,
            seconds,
            len(workers),
            of_workers,
            of_storage,
            LEASE_S[storage],
            hurry=0.6 if favours else 1.0,
        )
        if storage == "replicas":
            lost = Fault(round(rng.uniform(0.4, 0.6) * seconds, 2), "primary_lost", 0)
            faults = tuple(sorted((*faults, lost), key=lambda fault: fault.at_s))
        enough = len(faults) >= least and len({fault.kind for fault in faults}) >= KINDS_LEAST
        if favours or seconds < 30 or enough:
            break
    replays = tuple(sorted(round(rng.uniform(0.4, 0.9) * seconds, 2) for _ in range(3)))
    return Plan(seed, storage, seconds, workers, jobs, faults, replays)


def make_mesh_plan(seed: int, storage: str, seconds: float) -> Plan:
    """Workers in a mesh, and loads that make them steal: much short work, so that they fill their buffers;
    then as much of the same that lasts, which one of them claims alone."""
    rng = random.Random(f"{seed} {storage} mesh")
    flags = ("--mesh-steal-threshold", "6", "--mesh-steal-batch", "1", "--mesh-steal-rate-limit", "0")
    workers = tuple(WorkerSpec(None, slots, flags) for slots in MESH_SLOTS)
    others = [job for job in _jobs(rng, seconds, busy=False, each_s=MESH_JOBS_EACH_S) if job.kind != "poison"]
    bursts = list(_bursts(rng, seconds, MESH_BURST_EACH_S[storage]))
    hoards = tuple(
        Hoard(round(job.at_s - _HOARD_BEFORE_S, 3), number % 2)
        for number, job in enumerate(job for job in bursts if job.kind == "burst")
    )
    jobs = tuple(sorted([*others, *bursts], key=_at))
    of_workers, of_storage = MESH_PROCESS_KINDS, MESH_STORAGE_KINDS[storage]
    faults = _faults(rng, seconds, len(workers), of_workers, of_storage, LEASE_S[storage], hurry=2.0)
    return Plan(seed, storage, seconds, workers, jobs, faults, mesh=True, hoards=hoards)


def _at(job: Submission) -> float:
    return job.at_s


# -- jobs ------------------------------------------------------------------------------------------------
def _bursts(rng: random.Random, seconds: float, each_s: float) -> Iterator[Submission]:
    options = {"max_retries": 3, "max_crashes": 8, "backoff_base_seconds": 0.2, "timeout": 60}
    at_s = 0.0
    while at_s < seconds:
        yield Submission(round(at_s, 3), "warm", "quick", (0.0,), options, batch=rng.randint(90, 120))
        length_s = round(rng.uniform(0.03, 0.05), 3)
        later_s = round(at_s + 0.35, 3)
        yield Submission(later_s, "burst", "quick", (length_s,), options, batch=rng.randint(40, 64))
        at_s += rng.uniform(0.8, 1.2) * each_s


def _jobs(
    rng: random.Random, seconds: float, *, busy: bool, each_s: float = JOBS_EACH_S
) -> tuple[Submission, ...]:
    kinds = list(JOBS)
    weights = [JOBS[kind][0] * (4 if busy and kind in LONG else 1) for kind in kinds]
    made = []
    at_s = 0.0
    while at_s < seconds:
        [kind] = rng.choices(kinds, weights)
        made.append(_job(rng, round(at_s, 3), kind))
        at_s += rng.expovariate(each_s)
    made += [
        _job(rng, round(rng.uniform(0.1, 0.7) * seconds, 3), "poison")
        for _ in range(max(1, round(seconds / POISON_EACH_S)))
    ]
    return tuple(sorted(made, key=lambda job: job.at_s))


def _job(rng: random.Random, at_s: float, kind: str) -> Submission:
    options: dict[str, Any] = {
        "max_retries": 3,
        "max_crashes": 8,
        "backoff_base_seconds": 0.2,
        "max_backoff_seconds": 1.0,
        "timeout": 60,
        "priority": rng.choice(("high", "default", "default", "low")),
    }

    def lasting(low: float, high: float) -> float:
        return round(rng.uniform(low, high), 3)

    task, args = "quick", (lasting(0.0, 0.06),)
    cancel_after_s, batch = None, 0
    match kind:
        case "sync":
            task, args = "sync", (lasting(0.05, 0.4),)
        case "retried":
            task, args = "retried", (rng.randint(1, 2), lasting(0.0, 0.1))  # type: ignore[assignment]
        case "failing":
            task, args = "retried", (99, 0.01)  # type: ignore[assignment]
            options["max_retries"] = rng.randint(0, 2)
        case "doomed":
            task, args = "doomed", (0.05,)
        case "snoozing":
            task, args = "snoozing", (lasting(0.3, 2.0),)
        case "long":
            task, args = "long", (lasting(3.0, 6.0),)
        case "deaf":
            task, args = "deaf", (lasting(0.5, 2.5),)
        case "keyed":
            key = rng.choice(list(KEYS))
            args = (lasting(0.05, 0.4),)
            options |= {"concurrency_key": key, "concurrency_limit": KEYS[key]}
        case "pair":
            task, args = "pair", (lasting(0.05, 0.4),)
        case "unique":
            args = (lasting(0.1, 0.6),)
            options["unique_key"] = rng.choice(UNIQUES)
        case "delayed":
            options["delay"] = lasting(0.3, 4.0)
        case "cancelled_early":
            options["delay"] = lasting(1.0, 2.5)
            cancel_after_s = lasting(0.2, 2.5)
        case "cancelled_late":
            task, args = rng.choice(("long", "sync")), (lasting(1.5, 3.0),)
            cancel_after_s = lasting(0.3, 1.5)
        case "expiring":
            options["expires_in_seconds"] = lasting(0.05, 3.0)
        case "timed_out":
            task, args = "long", (lasting(2.0, 4.0),)
            options |= {"timeout": lasting(0.2, 0.8), "max_retries": rng.randint(0, 1)}
        case "overdue":
            # Its timeout and the grace after that are over long before the one call that it is.
            task, args = "deaf", (lasting(2.5, 4.0),)
            options |= {"timeout": lasting(0.2, 0.8), "max_retries": rng.randint(0, 1)}
        case "apart":
            task, args = "apart", (lasting(0.05, 1.0),)
        case "stuck":
            task, args = "stuck", (30.0,)
            options |= {"timeout": lasting(0.2, 0.8), "max_retries": 0}
        case "poison_apart":
            task, args = "poison_apart", ()  # type: ignore[assignment]
            options["max_crashes"] = rng.randint(1, 3)
        case "batch":
            batch = rng.randint(5, 20)
        case "poison":
            task, args = "poison", ()  # type: ignore[assignment]
            options["max_crashes"] = rng.randint(2, 3)
    return Submission(at_s, kind, task, args, options, cancel_after_s, batch)


# -- faults ----------------------------------------------------------------------------------------------
class _Bag:
    """Draws every kind once before it draws one again."""

    def __init__(self, rng: random.Random, kinds: tuple[str, ...]) -> None:
        self._rng, self._kinds, self._left = rng, kinds, []  # type: ignore[var-annotated]

    def draw(self) -> str:
        if not self._left:
            self._left = self._rng.sample(self._kinds, len(self._kinds))
        return str(self._left.pop())


def _faults(
    rng: random.Random,
    seconds: float,
    slots: int,
    of_workers: tuple[str, ...],
    of_storage: tuple[str, ...],
    lease_s: float,
    *,
    hurry: float = 1.0,
) -> tuple[Fault, ...]:
    """Each worker has a row of faults of its own, and so has the storage: those of a row never overlap."""
    found: list[Fault] = []
    bag = _Bag(rng, of_workers)
    for slot in range(slots if of_workers else 0):
        at_s = rng.uniform(1.0, 4.0)
        while at_s < seconds - 1.0:
            fault = _of_worker(rng, round(at_s, 2), bag.draw(), slot, lease_s)
            found.append(fault)
            at_s += fault.length_s + rng.uniform(3.0, 6.5) * hurry
    bag = _Bag(rng, of_storage)
    at_s = rng.uniform(2.0, 4.0)
    while of_storage and at_s < seconds - 2.0:
        kind = bag.draw()
        length_s = round(rng.uniform(*LENGTHS[kind]), 2)
        amount = (
            round(rng.choice((-1, 1)) * rng.uniform(1.0, CLOCK_STEP_MOST_S), 1) if kind == "clock" else 0.0
        )
        found.append(Fault(round(at_s, 2), kind, rng.randrange(slots), length_s, amount))
        at_s += length_s + rng.uniform(2.0, 4.0) * hurry
    return tuple(sorted(found, key=lambda fault: fault.at_s))


def _chosen(kinds: tuple[str, ...], favours: tuple[str, ...], without: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(kind for kind in kinds if kind not in without and (not favours or kind in favours))


def _of_worker(rng: random.Random, at_s: float, kind: str, slot: int, lease_s: float) -> Fault:
    length_s = 0.0
    if kind.startswith("stop"):
        length_s = round(lease_s * rng.uniform(*(LONG_STOP if rng.random() < 0.6 else SHORT_STOP)), 2)
    if kind == "streams_cut":
        length_s = round(rng.uniform(*STREAMS_CUT_S), 2)
    return Fault(at_s, kind, slot, length_s)
