"""The promises about jobs, checked while simulated workers claim, hold, steal and run them.

The books follow every change that storage tells and every body that a worker starts, and hold them against
what ought to be: they trust neither the rows of the storage nor what a worker believes.
"""

from __future__ import annotations

from collections import Counter
from typing import Final

from msgspec import Struct, field

from fluxmesh.mesh.messages import NodeRef
from fluxmesh.mesh.timing import MS, S
from fluxmesh.testing.simnet_store import MAX_HOPS, TIERS, Change, Place, Row, Store
from fluxmesh.testing.simnet_trace import Trace, Violation

TAKEN_AFTER_NS: Final = 100 * MS
_NEW_OWNER: Final = frozenset({"claim", "transfer", "take_held", "release"})


class Account(Struct):
    """One job as it ought to stand. `bodies`: the runs in which a body of it goes on."""

    tier: int
    place: Place = Place.READY
    owner: NodeRef | None = None
    token: int = 0
    hops: int = 0
    since_ns: int = 0
    told: bool = False  # its owner has heard that it owns it, and has not let go of it
    starts: int = 0
    ends: int = 0
    reaps: int = 0  # from a run that was declared dead or fell silent
    bodies: list[NodeRef] = field(default_factory=list)
    silent: set[NodeRef] = field(
        default_factory=set
    )  # owners that lost it by silence; their bodies may go on


class Books:
    """Raises Violation at the event that breaks a promise."""

    def __init__(self, *, store: Store, trace: Trace) -> None:
        self._store = store
        self._trace = trace
        self.accounts: dict[str, Account] = {}
        self.ready = [0] * TIERS
        self.runs: dict[NodeRef, tuple[int, ...]] = {}  # the tiers of each worker
        self.places: dict[Place, int] = dict.fromkeys(Place, 0)
        self.verbs: Counter[str] = Counter()
        self.releases: Counter[str] = Counter()  # by reason
        self.moved_to: Counter[NodeRef] = Counter()  # jobs, by transfer
        self.moved_from: Counter[NodeRef] = Counter()
        self.most_hops = 0
        self.last_move_ns = 0
        self.checks = 0

    # -- what storage tells ------------------------------------------------------------------------------

    def change(self, now: int, change: Change, row: Row) -> None:
        self.checks += 1
        self.verbs[change.verb] += 1
        by = change.by
        who = by.worker_id if by is not None else "producer"
        self._trace.event(
            now, who, change.verb, f"{change.job} {change.presented}->{change.token} {change.why}"
        )
        if change.verb == "enqueue":
            self.accounts[change.job] = Account(row.tier)
        else:
            account = self.accounts[change.job]
            self._check(now, change, account)
            self._count(account, -1)
            self._apply(now, change, account)
        account = self.accounts[change.job]
        self._count(account, 1)
        if (row.place, row.owner, row.token) != (account.place, account.owner, account.token):
            raise self._broken("row", change, f"storage holds {row}, it ought to be {account}")
        if self.places != self._store.places or sum(self.places.values()) != len(self.accounts):
            raise self._broken(
                "conservation", change, f"{self._store.places} of {len(self.accounts)}, counted {self.places}"
            )

    def _count(self, account: Account, by: int) -> None:
        self.places[account.place] += by
        if account.place is Place.READY:
            self.ready[account.tier] += by

    def _check(self, now: int, change: Change, account: Account) -> None:
        match change.verb:
            case "claim":
                self._expect(change, account, Place.READY)
                self._outranks_nothing(change, account)
            case "begin":
                self._expect(change, account, Place.HELD)
                self._is_owner(change, account)
                self._outranks_nothing(change, account)
            case "settle":
                self._expect(change, account, Place.RUNNING)
                self._is_owner(change, account)
            case "release":
                self._is_owner(change, account)
                if change.why.startswith("absent") and account.told:
                    raise self._broken(
                        "held by nobody", change, "its owner was told of it and has forgotten it"
                    )
            case "transfer" | "take_held":
                self._expect(change, account, Place.HELD)
                self._may_move(now, change, account)
            case _:
                raise self._broken("verb", change, "unknown")
        if change.verb in _NEW_OWNER and change.token <= account.token:
            raise self._broken("tokens grow", change, f"it was {account.token}")

    def _expect(self, change: Change, account: Account, place: Place) -> None:
        if account.place is not place:
            raise self._broken("one owner", change, f"it is {account.place}, by {account.owner}")

    def _is_owner(self, change: Change, account: Account) -> None:
        if account.owner != change.by or account.token != change.presented:
            raise self._broken("one owner", change, f"{account.owner} owns it under {account.token}")

    def _outranks_nothing(self, change: Change, account: Account) -> None:
        assert change.by is not None
        tiers = self.runs[change.by]
        if account.tier not in tiers:
            raise self._broken("cannot run", change, f"tier {account.tier}, it runs {tiers}")
        if any(self.ready[tier] for tier in tiers if tier < account.tier):
            raise self._broken("strict priority", change, f"tier {account.tier}, ready by tier {self.ready}")

    def _may_move(self, now: int, change: Change, account: Account) -> None:
        if account.token != change.presented:
            raise self._broken("token", change, f"{account.owner} owns it under {account.token}")
        if account.hops >= MAX_HOPS:
            raise self._broken("hops", change, f"it has changed hands {account.hops} times")
        if change.by is not None and account.tier not in self.runs[change.by]:
            raise self._broken("cannot run", change, f"tier {account.tier}, it runs {self.runs[change.by]}")
        if change.verb == "take_held":
            self._outranks_nothing(change, account)
            if now - account.since_ns < TAKEN_AFTER_NS:
                raise self._broken("take_held", change, "held for less than 100 ms")

    def _apply(self, now: int, change: Change, account: Account) -> None:
        verb = change.verb
        if verb == "transfer":
            assert account.owner is not None
            assert change.by is not None
            self.moved_from[account.owner] += 1
            self.moved_to[change.by] += 1
            self.last_move_ns = now
        if verb == "release":
            self.releases[change.why.partition(",")[0]] += 1
        if verb == "release" and change.why.startswith(("lapsed", "death")):
            account.reaps += account.place is Place.RUNNING
            if change.why.startswith("lapsed") and account.owner is not None:
                account.silent.add(account.owner)
        account.place = change.place
        account.token = change.token
        if verb in {"transfer", "take_held"}:
            account.hops += 1
            self.most_hops = max(self.most_hops, account.hops)
        if verb in {"claim", "release"}:
            account.hops = 0
        if verb in _NEW_OWNER:
            account.owner = None if verb == "release" else change.by
            account.since_ns, account.told = now, False
        if verb == "settle":
            account.owner = None

    # -- what workers do ---------------------------------------------------------------------------------

    def heard(self, worker: NodeRef, job: str, token: int, *, keeps: bool = True) -> None:
        """A worker has been told that this is its own; or it means to give it back, or cannot know."""
        account = self.accounts[job]
        if account.owner == worker and account.token == token:
            account.told = keeps

    def starts(self, now: int, worker: NodeRef, job: str, token: int) -> None:
        account = self.accounts[job]
        self._trace.event(now, worker.worker_id, "starts", f"{job} {token}")
        if (account.place, account.owner, account.token) != (Place.RUNNING, worker, token):
            raise Violation(
                "start",
                f"{worker} starts {job} under {token}: it is {account.place}, by {account.owner} under"
                f" {account.token}",
                about=(worker.worker_id, job),
            )
        others = [run for run in account.bodies if run not in account.silent]
        if others:
            raise Violation("overlap", f"{worker} starts {job}, it runs at {others}", about=(job,))
        account.bodies.append(worker)
        account.starts += 1
        if account.starts > 1 + account.reaps:
            raise Violation(
                "again", f"{job} starts for the {account.starts}th time, {account.reaps} reaps", about=(job,)
            )

    def ends(self, worker: NodeRef, job: str, *, whole: bool) -> None:
        account = self.accounts[job]
        account.bodies.remove(worker)
        account.ends += whole

    def dies(self, worker: NodeRef, bodies: list[str]) -> None:
        for job in bodies:
            self.ends(worker, job, whole=False)

    def walk(self) -> None:
        """Every row against the books, and the counts of storage against its rows."""
        counted = dict.fromkeys(Place, 0)
        for row in self._store.jobs.values():
            counted[row.place] += 1
        if counted != self._store.places:
            raise Violation("conservation", f"rows {counted}, counts {self._store.places}")
        for job, account in self.accounts.items():
            row = self._store.jobs[job]
            if (row.place, row.owner, row.token) != (account.place, account.owner, account.token):
                raise Violation("row", f"storage holds {row}, it ought to be {account}", about=(job,))
            if account.hops > MAX_HOPS or row.hops != account.hops:
                raise Violation("hops", f"{job}: {row.hops}, counted {account.hops}", about=(job,))

    def all_done(self) -> str:
        """What is wrong when every job should have been done; empty if nothing is."""
        for job, account in self.accounts.items():
            if account.place is not Place.DONE:
                return f"{job} is {account.place}, by {account.owner}, for {account.since_ns / S:.2f} s"
            if not account.ends:
                return f"{job} is done and no body of it came to its end"
            if account.ends > 1 + account.reaps:
                return f"{job} was run {account.ends} times, {account.reaps} reaps"
        return ""

    def _broken(self, rule: str, change: Change, text: str) -> Violation:
        by = change.by.worker_id if change.by is not None else ""
        message = f"{change.verb} of {change.job} for {change.by} under {change.presented}: {text}"
        return Violation(rule, message, about=tuple(name for name in (change.job, by) if name))
