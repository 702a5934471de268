"""Mutants of the mesh's core: each breaks one promise, and the simulator has to notice within 50 seeds.

A mutant is a function that puts something wrong in the place of a function or method of the core.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NamedTuple

import pytest

from fluxmesh.mesh import member, membership, pushpull
from fluxmesh.mesh.detector import Suspicion
from fluxmesh.mesh.gossip import News
from fluxmesh.mesh.joining import Joiner
from fluxmesh.mesh.member import Member, with_standing
from fluxmesh.mesh.membership import Membership
from fluxmesh.mesh.messages import PROTOCOL, Packet, Record, Standing
from fluxmesh.mesh.probe import Order, Prober
from fluxmesh.mesh.swim import Phase, Swim
from fluxmesh.mesh.timing import S
from fluxmesh.mesh.voice import BUDGET_BYTES, Voice
from fluxmesh.mesh.wire import encode_packet
from fluxmesh.testing.simnet_faults import Kind

Patch = pytest.MonkeyPatch


class Mutant(NamedTuple):
    """`favours`: kinds of faults that bring it out, so that seeds with one of them are played first."""

    apply: Callable[[Patch], None]
    favours: frozenset[Kind]


MUTANTS: Final[dict[str, Mutant]] = {}


def mutant(*favours: Kind) -> Callable[[Callable[[Patch], None]], None]:
    def keep(function: Callable[[Patch], None]) -> None:
        MUTANTS[function.__name__.replace("_", " ")] = Mutant(function, frozenset(favours))

    return keep


def _everywhere(patch: Patch, outranks: Callable[[Record, Record | None], bool]) -> None:
    for module in (member, membership, pushpull):
        patch.setattr(module, "outranks", outranks)


def _state(record: Record) -> tuple[int, int, int]:
    return record.epoch, record.incarnation, record.standing


# -- refutations ---------------------------------------------------------------------------------------


@mutant(Kind.SUSPEND)
def no_refutation(patch: Patch) -> None:
    answer = Membership._answer

    def deaf(self: Membership, claim: Record, now: int, teller: Member | None) -> None:
        if claim.epoch != self.voice.me.epoch:
            answer(self, claim, now, teller)

    patch.setattr(Membership, "_answer", deaf)


@mutant(Kind.SUSPEND)
def incarnation_not_raised_when_refuting(patch: Patch) -> None:
    patch.setattr(Membership, "_raise_above", lambda self, _accused: self.announce(self.voice.record))


@mutant()
def an_accuser_raises_the_incarnation_of_others(patch: Patch) -> None:
    def suspect(self: Membership, row: Member, now: int) -> None:
        held = row.record
        accused = Record(
            held.worker_id,
            held.epoch,
            held.incarnation + 1,
            int(Standing.SUSPECT),
            held.host,
            held.port,
            held.meta_hash,
            self.voice.me.worker_id,
        )
        self._weigh(accused, row, now)

    patch.setattr(Membership, "suspect", suspect)


# -- suspicions ----------------------------------------------------------------------------------------


@mutant()
def suspect_before_the_window_ends(patch: Patch) -> None:
    detour = Prober.on_detour

    def hasty(self: Prober, seq: int, now: int) -> None:
        detour(self, seq, now)
        probe = self.open
        row = None if probe is None else self.voice.table.find(probe.ref)
        if probe is not None and probe.seq == seq and not probe.answered and row is not None:
            self.membership.suspect(row, now)

    patch.setattr(Prober, "on_detour", hasty)


@mutant()
def dead_before_the_shortest_suspicion(patch: Patch) -> None:
    patch.setattr(Suspicion, "deadline_ns", lambda self, timing: self.started_ns + timing.period_ns)


@mutant()
def duplicates_counted_as_confirmations(patch: Patch) -> None:
    def confirm(self: Suspicion, accuser: str, *, timing: Any) -> bool:
        self.accusers.append(accuser)
        return len(self.accusers) < 16

    patch.setattr(Suspicion, "confirm", confirm)


@mutant(Kind.CRASH)
def suspicions_never_end(patch: Patch) -> None:
    patch.setattr(Membership, "on_suspicion_timer", lambda _self, _number, _now: None)


@mutant(Kind.SUSPEND)
def an_ack_clears_a_suspicion(patch: Patch) -> None:
    on_ack = Prober.on_ack

    def forgiving(self: Prober, seq: int, sender: Any, now: int) -> None:
        on_ack(self, seq, sender, now)
        row = self.voice.table.find(sender)
        if row is not None and row.record.standing == Standing.SUSPECT:
            self.membership._adopt(with_standing(row.record, Standing.ALIVE, ""), row, now)

    patch.setattr(Prober, "on_ack", forgiving)


@mutant(Kind.WITNESS)
def stall_guard_off(patch: Patch) -> None:
    patch.setattr(Swim, "on_stall", lambda self, _late_ns, now: self._done(now))


# -- the order of claims -------------------------------------------------------------------------------


@mutant(Kind.SUSPEND)
def an_equal_incarnation_overrides(patch: Patch) -> None:
    def outranks(claim: Record, held: Record | None) -> bool:
        return held is None or (_state(claim) != _state(held) and _state(claim)[:2] >= _state(held)[:2])

    _everywhere(patch, outranks)


@mutant(Kind.PARTITION)
def a_tombstone_is_raised_by_an_alive_of_the_same_incarnation(patch: Patch) -> None:
    def outranks(claim: Record, held: Record | None) -> bool:
        if held is None or _state(claim) > _state(held):
            return True
        return held.standing == Standing.DEAD and _state(claim) == (held.epoch, held.incarnation, 0)

    _everywhere(patch, outranks)


@mutant(Kind.RESTART)
def a_restart_is_refused_by_its_epoch(patch: Patch) -> None:
    def outranks(claim: Record, held: Record | None) -> bool:
        return held is None or (claim.epoch == held.epoch and _state(claim) > _state(held))

    _everywhere(patch, outranks)


@mutant(Kind.RESTART)
def an_old_epoch_wins_by_its_incarnation(patch: Patch) -> None:
    def outranks(claim: Record, held: Record | None) -> bool:
        return held is None or _state(claim)[1:] > _state(held)[1:]

    _everywhere(patch, outranks)


@mutant(Kind.PARTITION)
def the_dead_of_a_push_pull_are_dead_at_once(patch: Patch) -> None:
    patch.setattr(membership, "softened", lambda claim, _teller: claim)


# -- probes --------------------------------------------------------------------------------------------


@mutant(Kind.PAIR_CUT)
def no_indirect_probes(patch: Patch) -> None:
    patch.setattr(Prober, "on_detour", lambda _self, _seq, _now: None)


@mutant(Kind.PAIR_CUT)
def helpers_do_not_help(patch: Patch) -> None:
    patch.setattr(Prober, "on_ping_req", lambda _self, _message, _asker, _src, _now: None)


@mutant(Kind.CRASH)
def a_nack_is_taken_for_an_answer(patch: Patch) -> None:
    def on_nack(self: Prober, seq: int, _sender: Any) -> None:
        if self.open is not None and self.open.seq == seq:
            self.open.answered = "relay"

    patch.setattr(Prober, "on_nack", on_nack)


@mutant(Kind.CRASH)
def always_the_same_is_probed(patch: Patch) -> None:
    def pick(self: Order) -> Member | None:
        living = self._table.living
        return min(living, key=lambda row: row.number) if living else None

    patch.setattr(Order, "pick", pick)


# -- news and exchanges --------------------------------------------------------------------------------


@mutant()
def news_sent_without_bound(patch: Patch) -> None:
    sent = News.sent
    patch.setattr(News, "sent", lambda self, ids, *, limit: sent(self, ids, limit=limit * 1_000))


@mutant(Kind.JUNK)
def strangers_get_more_than_they_ask(patch: Patch) -> None:
    def generous(self: Voice, to: Any, message: Any, request_bytes: int) -> None:
        head = Packet(PROTOCOL, self.me, self.record.incarnation, message)
        rows = [self.record, *(row.record for row in self.table.rows.values())]
        self._send(to, encode_packet(head, rows, (), BUDGET_BYTES)[0])

    patch.setattr(Voice, "answer_stranger", generous)


# -- coming and going ----------------------------------------------------------------------------------


@mutant(Kind.ISLANDS)
def itself_counts_as_a_seed_that_answered(patch: Patch) -> None:
    ended, on_timer = Joiner.ended, Joiner.on_seeds_timer

    def content(self: Joiner, to: Any, why: str, sender: Any) -> None:
        ended(self, to, why, sender)
        self.has_joined = self.has_joined or sender is not None

    def once(self: Joiner, now: int) -> None:
        if not self.has_joined:
            on_timer(self, now)

    patch.setattr(Joiner, "ended", content)
    patch.setattr(Joiner, "on_seeds_timer", once)


@mutant(Kind.ISLANDS)
def nobody_is_dialled_again(patch: Patch) -> None:
    on_timer = Joiner.on_seeds_timer

    def until_joined(self: Joiner, now: int) -> None:
        if not self.voice.table.rows:
            on_timer(self, now)

    patch.setattr(Joiner, "on_seeds_timer", until_joined)
    patch.setattr(Joiner, "on_redial_timer", lambda self, now: self.voice.arm(("redial", 0), now + 30 * S))


@mutant(Kind.LEAVE)
def a_leave_is_not_spread(patch: Patch) -> None:
    def vanish(self: Swim, _now: int) -> None:
        if self.phase is not Phase.GONE:
            self._go()

    patch.setattr(Swim, "_leave", vanish)


@mutant(Kind.CLONE)
def a_second_holder_of_the_id_is_not_noticed(patch: Patch) -> None:
    patch.setattr(Membership, "fence", lambda _self, _claim: None)
