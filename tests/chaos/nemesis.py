"""Carries the faults of a plan out, each at its time, and counts those that came about."""

from __future__ import annotations

import random
import signal
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

from msgspec import Struct

from fluxmesh.errors import StorageError
from fluxmesh.testing.history import Happening
from tests.chaos.fleet import ChaosWorker, Watch
from tests.chaos.plan import HOARD_S, LONG_STOP, Fault, Plan
from tests.chaos.storages import NotDone, Spoilt
from tests.mesh.sockets import free_port

ALONE: Final = "the worker had ended by itself"
TOLD_S: Final = 15.0  # a worker that was told to stop has ended; its grace is 2 s
ORPHANS_S: Final = 15.0  # and so have the children of one that was killed
UNREACHABLE: Final = StorageError.exit_code  # of a worker that meets no storage when it starts
_MANAGE_S: Final = 0.5
_RELEASED_S: Final = 0.3  # a storage that was frozen lets nobody be reaped for a lease: a little more
_LOOK_S: Final = 0.02
_READY_S: Final = 10.0
_LATE: Final = 0.3  # of a lease: so much later than others a worker finds its storage back
_EARLY: Final = 5  # one in so many
_MOST_AT_ONCE: Final = 12


class Done(Struct, frozen=True):
    """One fault as it came about, or why it did not. Seconds since the run began."""

    at_s: float
    until_s: float
    kind: str
    what: str
    counts: bool


class Slot:
    """The place of one worker: who is in it, and who may do something to it."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.lock = threading.Lock()
        self.worker: ChaosWorker | None = None
        self.generation = 0


class Nemesis:
    def __init__(
        self,
        plan: Plan,
        storage: Spoilt,
        watch: Watch,
        *,
        folder: Path,
        env: Callable[[int], Mapping[str, str]],
        lease_s: float,
    ) -> None:
        self.done: list[Done] = []
        self.leftovers: list[str] = []
        self.ended_alone: list[str] = []
        self.slots = [Slot(number) for number in range(len(plan.workers))]
        self._plan = plan
        self._storage = storage
        self._watch = watch
        self._folder = folder
        self._env = env
        self._lease_s = lease_s
        self._storage_lock = threading.Lock()
        self._start_s = 0.0
        self._aside: list[ChaosWorker] = []
        self._endings: list[threading.Thread] = []

    # -- workers -----------------------------------------------------------------------------------------
    def start_worker(self, slot: Slot) -> ChaosWorker:
        """Another worker in this place, under a name that none had before it."""
        slot.generation += 1
        name = f"w{slot.number}-{slot.generation}"
        spec = self._plan.workers[slot.number]
        port, seeds = None, ()
        if self._plan.mesh:
            port = free_port()  # the one before it in this place may not be gone yet
            others = [other.worker for other in self.slots if other is not slot]
            seeds = tuple(one.mesh_port for one in others if one is not None and one.mesh_port is not None)
        slot.worker = ChaosWorker(
            name, spec, env=self._env(slot.number), folder=self._folder, mesh_port=port, seeds=seeds
        )
        self._watch.follow(slot.worker)
        return slot.worker

    def kill_all(self) -> None:
        for worker in [*self._aside, *(slot.worker for slot in self.slots)]:
            if worker is not None:
                for pid in self._watch.members(worker.pid):
                    self._watch.note(Happening.KILLED, pid)
                worker.kill()

    # -- the run -----------------------------------------------------------------------------------------
    def run(self, start_s: float) -> None:
        """All faults, and at the end everything mended. Returns when the plan's time is over."""
        self._start_s = start_s
        over = threading.Event()
        manager = threading.Thread(target=self._manage, args=(over,), name="manager", daemon=True)
        manager.start()
        hoarding = threading.Thread(target=self._hoard, args=(over,), name="hoarding", daemon=True)
        hoarding.start()
        try:
            with ThreadPoolExecutor(_MOST_AT_ONCE, "fault") as pool:
                for number, fault in enumerate(self._plan.faults):
                    time.sleep(max(0.0, start_s + fault.at_s - time.monotonic()))
                    pool.submit(self._carry_out, fault, random.Random(f"{self._plan.seed} fault {number}"))
                time.sleep(max(0.0, start_s + self._plan.seconds - time.monotonic()))
        finally:
            over.set()  # or it would go on starting workers when this run was told to end
            manager.join(_READY_S)
            hoarding.join(_READY_S)
        self._replace_ended()
        for thread in self._endings:
            thread.join(TOLD_S + 5)

    def _hoard(self, over: threading.Event) -> None:
        """Have one worker claim alone, by turns. To whom a fault is being done is left alone."""
        for hoard in self._plan.hoards:
            if over.wait(max(0.0, self._start_s + hoard.at_s - time.monotonic())):
                return
            with ExitStack() as stack:
                stopped: list[int] = []
                stack.callback(lambda stopped=stopped: self._watch.continue_them(stopped))
                for slot in self.slots:
                    if slot.number != hoard.slot and slot.lock.acquire(blocking=False):
                        stack.callback(slot.lock.release)
                        if slot.worker is not None and slot.worker.running:
                            stopped += self._watch.stop_them(self._watch.children(slot.worker.pid))
                over.wait(HOARD_S)

    def _manage(self, over: threading.Event) -> None:
        """Start workers anew that have ended by themselves, as a service manager does."""
        while not over.wait(_MANAGE_S):
            self._replace_ended()

    def _replace_ended(self) -> None:
        for slot in self.slots:
            with slot.lock:
                self._standing(slot)

    def _standing(self, slot: Slot) -> ChaosWorker:
        """Who is in this place; another, if that one has ended by itself."""
        worker = slot.worker
        if worker is not None and worker.running:
            return worker
        if worker is not None:
            code = worker.wait(1)
            self.ended_alone.append(f"{worker.name} with {code}")
            if code != UNREACHABLE:
                self.leftovers.append(f"worker {worker.name} ended by itself with {code}")
            self._aside.append(worker)
        return self.start_worker(slot)

    def counted(self) -> dict[str, int]:
        return dict(Counter(one.kind for one in self.done if one.counts))

    def _carry_out(self, fault: Fault, rng: random.Random) -> None:
        at_s = time.monotonic() - self._start_s
        counts, what = True, ""
        try:
            if fault.kind == "freeze_both":
                what = self._freeze_both(fault, rng)
            elif fault.kind == "late_back":
                what = self._late_back(fault, rng)
            elif hasattr(self, f"_{fault.kind}"):
                slot = self.slots[fault.slot]
                with slot.lock:
                    self._must_not_be_over()
                    what = getattr(self, f"_{fault.kind}")(fault, slot)
            else:
                with self._storage_spoilt(fault.kind, rng, fault.amount):
                    time.sleep(fault.length_s)
                what = f"{fault.amount:+g} s" if fault.amount else ""
        except NotDone as error:
            counts, what = False, str(error)
        except Exception as error:
            counts, what = False, f"{type(error).__name__}: {error}"
            self.leftovers.append(f"the fault {fault.kind} failed: {what}")
        until_s = time.monotonic() - self._start_s
        self.done.append(Done(round(at_s, 3), round(until_s, 3), fault.kind, what, counts))

    @contextmanager
    def _storage_spoilt(self, kind: str, rng: random.Random, amount: float = 0.0) -> Iterator[None]:
        """One at a time: a fault that had to wait for its worker may come when the next one is due."""
        with self._storage_lock:
            self._must_not_be_over()
            with self._storage.fault(kind, rng, amount):  # type: ignore[attr-defined]
                yield

    def _must_not_be_over(self) -> None:
        if time.monotonic() > self._start_s + self._plan.seconds:
            raise NotDone("the run was over before its turn came")

    # -- faults of workers -------------------------------------------------------------------------------
    def _child_of(self, worker: ChaosWorker, fault: Fault) -> int:
        """One that takes jobs, if it comes to that soon; now and then one that only exists."""
        early = round(fault.at_s * 100) % _EARLY == 0
        deadline = time.monotonic() + _READY_S
        children: list[int] = []
        while time.monotonic() < deadline and worker.running:
            children = self._watch.children(worker.pid)
            ready = [pid for pid in children if early or pid in worker.ready()]
            if ready:
                return ready[worker.pid % len(ready)]
            time.sleep(_LOOK_S)
        if not children:
            raise NotDone("the worker has no child" if worker.running else ALONE)
        return children[worker.pid % len(children)]

    def _kill_child(self, fault: Fault, slot: Slot) -> str:
        killed = self._watch.kill([self._child_of(self._standing(slot), fault)])
        if not killed:
            raise NotDone("it was gone already")
        return f"pid {killed}"

    def _kill_supervisor(self, fault: Fault, slot: Slot) -> str:
        worker = self._standing(slot)
        self._child_of(worker, fault)
        killed = self._watch.kill([worker.pid])
        if not killed:
            raise NotDone("it was gone already")
        self._put_aside(worker, "whose supervisor was killed", ORPHANS_S, code=-signal.SIGKILL)
        self.start_worker(slot)
        return f"{worker.name} pid {killed}"

    def _kill_group(self, fault: Fault, slot: Slot) -> str:
        worker = self._standing(slot)
        killed = self._watch.kill(self._watch.members(worker.pid))
        if worker.pid not in killed:
            raise NotDone("it was gone already")
        self._aside.append(worker)
        worker.wait(TOLD_S)
        self.start_worker(slot)
        return f"{worker.name} pids {killed}"

    def _term(self, fault: Fault, slot: Slot) -> str:
        worker = self._standing(slot)
        self._child_of(worker, fault)
        worker.tell()
        self._put_aside(worker, "which was told to stop", TOLD_S, code=0)
        self.start_worker(slot)
        return worker.name

    def _stop_child(self, fault: Fault, slot: Slot) -> str:
        return self._stopped([self._child_of(self._standing(slot), fault)], fault.length_s)

    def _stop_group(self, fault: Fault, slot: Slot) -> str:
        worker = self._standing(slot)
        self._child_of(worker, fault)
        return self._stopped(self._watch.members(worker.pid), fault.length_s)

    def _stopped(self, pids: list[int], length_s: float) -> str:
        stopped = self._watch.stop_them(pids)
        try:
            if not stopped:
                raise NotDone("nothing stands still")
            time.sleep(length_s)
        finally:
            self._watch.continue_them(stopped)
        return f"pids {stopped} for {length_s:g} s"

    def _streams_cut(self, fault: Fault, slot: Slot) -> str:
        """Every connection with its port is reset, wherever in a question or answer it is."""
        worker = self._standing(slot)
        assert worker.mesh_port is not None
        port = f":{worker.mesh_port + 1}"
        deadline, cut = time.monotonic() + fault.length_s, 0
        while time.monotonic() < deadline:
            asked = [
                "ss",
                "-KHtn",
                "state",
                "established",
                "(",
                "sport",
                "=",
                port,
                "or",
                "dport",
                "=",
                port,
                ")",
            ]
            done = subprocess.run(asked, capture_output=True, check=False)
            cut += len(done.stdout.splitlines())
            time.sleep(_LOOK_S)
        if not cut:
            raise NotDone("no stream was open, or none can be cut here")
        return f"{cut} sockets of {worker.name}"

    def _freeze_both(self, fault: Fault, rng: random.Random) -> str:
        """The storage, then a worker that waits for its answer; the storage goes on long before it."""
        slot = self.slots[fault.slot]
        with slot.lock, ExitStack() as stack:
            worker = self._standing(slot)
            self._child_of(worker, fault)
            frozen = ExitStack()
            stack.enter_context(frozen)
            frozen.enter_context(self._storage_spoilt("storage_frozen", rng))
            time.sleep(fault.length_s)
            stopped = self._watch.stop_them(self._watch.children(worker.pid))
            try:
                frozen.close()
                if not stopped:
                    raise NotDone("nothing stands still")
                time.sleep(self._lease_s * rng.uniform(*LONG_STOP) + _RELEASED_S)
            finally:
                self._watch.continue_them(stopped)
        return f"pids {stopped}"

    def _late_back(self, fault: Fault, rng: random.Random) -> str:
        """The storage is away for longer than a lease, and one worker is the last to notice its return: it
        is stopped meanwhile, for much less than a lease."""
        kind = "storage_killed" if self._plan.storage == "redis" else "storage_frozen"
        slot = self.slots[fault.slot]
        with slot.lock:
            worker = self._standing(slot)
            self._child_of(worker, fault)
            with ExitStack() as away:
                away.enter_context(self._storage_spoilt(kind, rng))
                time.sleep(self._lease_s * fault.length_s)
                stopped = self._watch.stop_them(self._watch.children(worker.pid))
                try:
                    away.close()
                    if not stopped:
                        raise NotDone("nothing stands still")
                    time.sleep(self._lease_s * _LATE)
                finally:
                    self._watch.continue_them(stopped)
        return f"pids {stopped}"

    def _put_aside(self, worker: ChaosWorker, why: str, within_s: float, *, code: int) -> None:
        """It has to end by itself, with everything it started."""
        self._aside.append(worker)

        def see_it_end() -> None:
            deadline = time.monotonic() + within_s
            while time.monotonic() < deadline:
                if not worker.running and not self._watch.members(worker.pid):
                    ended = worker.wait(1)
                    met_no_storage = ended == UNREACHABLE and not worker.ready()
                    if ended != code and not met_no_storage:
                        self.leftovers.append(f"worker {worker.name}, {why}, ended with {ended}, not {code}")
                    return
                time.sleep(_LOOK_S)
            left = self._watch.members(worker.pid)
            self.leftovers.append(
                f"worker {worker.name}, {why}, has not ended in {within_s:g} s: pids {left}"
            )

        thread = threading.Thread(target=see_it_end, name=f"ending {worker.name}", daemon=True)
        thread.start()
        self._endings.append(thread)
