"""Mutants of stealing: each breaks one promise in the core, the buffer, the worker or storage, and the
simulator has to notice within 50 seeds."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, NamedTuple

import pytest

from fluxmesh.mesh.buffer import Held
from fluxmesh.mesh.donating import Donor
from fluxmesh.mesh.effects import Take
from fluxmesh.mesh.member import Member
from fluxmesh.mesh.messages import NodeRef, Noted, Offer, Offered, Steal
from fluxmesh.mesh.stealing import Peer, Thief
from fluxmesh.testing import simnet_shelf
from fluxmesh.testing.simnet_shelf import ModelShelf
from fluxmesh.testing.simnet_shop import Onlooker
from fluxmesh.testing.simnet_store import Begun, Exchanged, Given, Place, Row, Store
from fluxmesh.testing.simnet_thefts import Scheme, draw_scheme, run_thefts
from fluxmesh.testing.simnet_workers import Flight, SimWorker
from tests.sim.thefts import debit_is_undone, one_thief_takes_half, who_stands_still_asks

Patch = pytest.MonkeyPatch
Favours = Callable[[Scheme], bool]


class Mutant(NamedTuple):
    """`favours`: schemes that bring it out, which are played first. `play`: what one seed of it finds broken;
    empty if nothing."""

    apply: Callable[[Patch], None]
    favours: Favours
    play: Callable[[int], str]


MUTANTS: Final[dict[str, Mutant]] = {}


def _thefts(seed: int) -> str:
    return run_thefts(seed).problem


def _any(_scheme: Scheme) -> bool:
    return True


def mutant(
    favours: Favours = _any, play: Callable[[int], str] = _thefts
) -> Callable[[Callable[[Patch], None]], None]:
    def keep(function: Callable[[Patch], None]) -> None:
        MUTANTS[function.__name__.replace("_", " ")] = Mutant(function, favours, play)

    return keep


def seeds_of(mutant: Mutant, seeds: range) -> list[int]:
    return sorted(seeds, key=lambda seed: not mutant.favours(draw_scheme(seed)))


# -- who owns a job --------------------------------------------------------------------------------------


def _given(worker: SimWorker, item: Offered) -> Given:
    row = worker.shop.store.jobs[item.id]
    return Given(row.id, item.token, row.tier, row.run_ns, row.hops, row.seq)


@mutant()
def a_thief_runs_what_it_is_offered_without_transfer(patch: Patch) -> None:
    def run(self: SimWorker, take: Take) -> None:
        for item in take.jobs:
            self._start(_given(self, item))

    patch.setattr(SimWorker, "_transfer", run)


@mutant()
def a_thief_holds_what_it_is_offered_without_transfer(patch: Patch) -> None:
    """Its begin tells it that they are lost; what it counts is not what storage moved."""

    def hold(self: SimWorker, take: Take) -> None:
        self._hold([_given(self, item) for item in take.jobs])
        self._took(take, take.jobs)

    patch.setattr(SimWorker, "_transfer", hold)


@mutant()
def a_stolen_job_is_started_without_begin(patch: Patch) -> None:
    def start(self: SimWorker, take: Take, _sent_ns: int, given: list[Given] | None) -> None:
        for job in given or ():
            self._start(job)

    patch.setattr(SimWorker, "_transferred", start)


@mutant()
def a_victim_forgets_what_it_offers(patch: Patch) -> None:
    def offer(self: ModelShelf, wish: Steal, most: int, thief: NodeRef) -> Offer:
        made = real(self, wish, most, thief)
        self.lost(made.jobs)
        return made

    real = ModelShelf.offer
    patch.setattr(ModelShelf, "offer", offer)
    patch.setattr(Onlooker, "offers", lambda *_given: None)  # it would see it at once


@mutant()
def a_transfer_ignores_the_token(patch: Patch) -> None:
    def may_move(_self: Store, row: Row, _item: Offered, thief: NodeRef) -> bool:
        return row.place is Place.HELD and row.owner != thief and row.hops < 2

    patch.setattr(Store, "_may_move", may_move)


@mutant()
def a_begin_is_not_checked(patch: Patch) -> None:
    def begin(self: Store, worker: NodeRef, item: Offered) -> Begun:
        return Begun.LOST if self.jobs[item.id].place is not Place.HELD else real(self, worker, item)

    real = Store._begin
    patch.setattr(Store, "_is_own", lambda self, worker, item, place: self.jobs[item.id].place is place)
    patch.setattr(Store, "_begin", begin)


@mutant(lambda scheme: scheme.blows > 0)
def an_answer_that_comes_too_late_is_acted_on(patch: Patch) -> None:
    def exchanged(self: SimWorker, answer: Exchanged | None) -> None:
        if self.flight is not None:
            self.flight.sent_ns = self.shop.net.now
            self.deadline_ns = max(self.deadline_ns, self.shop.net.now + 1)
        real(self, answer)

    real = SimWorker._exchanged
    patch.setattr(SimWorker, "_exchanged", exchanged)


@mutant()
def hops_are_not_counted(patch: Patch) -> None:
    def may_move(self: Store, row: Row, item: Offered, thief: NodeRef) -> bool:
        row.hops = -1  # the transfer makes a nought of it
        return real(self, row, item, thief)

    real = Store._may_move
    patch.setattr(Store, "_may_move", may_move)


# -- in what order ---------------------------------------------------------------------------------------


@mutant()
def a_begin_is_never_outranked(patch: Patch) -> None:
    def begin(self: Store, worker: NodeRef, item: Offered) -> Begun:
        ready, self.ready = self.ready, [{} for _ in self.ready]
        try:
            return real(self, worker, item)
        finally:
            self.ready = ready

    real = Store._begin
    patch.setattr(Store, "_begin", begin)


@mutant(lambda scheme: len(set(scheme.tiers)) > 1)
def the_lowest_tier_is_offered_first(patch: Patch) -> None:
    def lowest(held: Iterable[Held], most: int, **_given: Any) -> list[Held]:
        return heapq.nlargest(most, (job for job in held if job.hops < 2), key=lambda job: job.tier)

    patch.setattr(simnet_shelf, "offered", lowest)


# -- how much, how often ---------------------------------------------------------------------------------


@mutant(play=one_thief_takes_half)
def half_of_the_surplus_and_a_batch_are_no_limits(patch: Patch) -> None:
    def choose(self: Thief, found: list[tuple[Member, int]]) -> tuple[Member, int]:
        self._batch = 1_000
        member, surplus = max(found, key=lambda one: one[1])
        return member, 2 * surplus

    def offer(self: Donor, wish: Steal, thief: NodeRef, now: int) -> Any:
        made = self._shelf.offer(wish, wish.want, thief)
        self._remember(made.jobs, thief, now)
        return made

    patch.setattr(Thief, "_choose", choose)
    patch.setattr(Donor, "_offer", offer)
    patch.setattr(Onlooker, "offers", lambda *_given: None)


@mutant()
def a_victim_gives_all_that_is_asked_for(patch: Patch) -> None:
    def offer(self: Donor, wish: Steal, thief: NodeRef, now: int) -> Any:
        found = self._shelf.offer(wish, wish.want + 60, thief)
        self._remember(found.jobs, thief, now)
        return found

    patch.setattr(Donor, "_offer", offer)


@mutant(play=debit_is_undone)
def a_debit_is_never_undone(patch: Patch) -> None:
    def surplus(self: Thief, member: Member, now: int) -> int:
        peer = self._peers.get(member.ref) or Peer()
        load = member.load
        return 0 if load is None or now < peer.pause_until_ns else load.stealable - peer.debit

    patch.setattr(Thief, "_surplus", surplus)


@mutant(play=who_stands_still_asks)
def a_thief_asks_while_it_drains_or_stands_still(patch: Patch) -> None:
    patch.setattr(Thief, "wish", property(lambda self: self._wish if self._steals else 0))


@mutant(lambda scheme: len(scheme.favourites) > 1)
def who_has_just_taken_is_asked(patch: Patch) -> None:
    patch.setattr(Donor, "took_lately", lambda _self, _thief, _now, _within_ns: False)


@mutant(lambda scheme: len(scheme.favourites) > 1)
def two_are_asked_at_once(patch: Patch) -> None:
    def ask(self: Thief, now: int) -> None:
        real(self, now)
        first, self._busy = self._busy, None
        real(self, now)
        self._busy = self._busy or first

    real = Thief._ask_one
    patch.setattr(Thief, "_ask_one", ask)


# -- what is counted -------------------------------------------------------------------------------------


@mutant()
def what_was_taken_is_ignored(patch: Patch) -> None:
    patch.setattr(Thief, "took", lambda _self, _ref, _jobs, _got, _now: None)


@mutant()
def the_victim_is_not_told(patch: Patch) -> None:
    patch.setattr(Thief, "_tell", lambda _self, _ref, _jobs, _now: None)


@mutant(lambda scheme: scheme.share > 0)
def what_is_told_twice_is_counted_twice(patch: Patch) -> None:
    def told(self: Donor, jobs: tuple[Offered, ...], thief: NodeRef, _now: int) -> Noted:
        self._shelf.taken(jobs, thief)
        return Noted()

    def taken(self: ModelShelf, jobs: Sequence[Offered], thief: NodeRef) -> int:
        self._counted.clear()
        return real(self, jobs, thief)

    real = ModelShelf.taken
    patch.setattr(Donor, "taken", told)
    patch.setattr(ModelShelf, "taken", taken)


@mutant(lambda scheme: scheme.share > 0)
def what_became_of_a_lost_exchange_is_not_told_again(patch: Patch) -> None:
    """Ends that storage never confirmed are forgotten: their jobs hang."""

    def send(self: SimWorker) -> None:
        flight = self.flight
        assert flight is not None
        real(self)
        self.flight = Flight(flight.number, (), flight.begin, flight.slots, flight.extra, flight.sent_ns, 3)

    real = SimWorker._send
    patch.setattr(SimWorker, "_send", send)
