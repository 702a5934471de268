"""Rosters, reports, and what doors make of them. Pure."""

from __future__ import annotations

import msgspec
import pytest

from fluxmesh.errors import NotInMesh
from fluxmesh.mesh.effects import MemberView
from fluxmesh.mesh.messages import Flag, Load, Meta, NodeRef, Record, Standing
from fluxmesh.mesh.options import NUMBERS
from fluxmesh.mesh.reports import REPORT_MEMBERS, Reporter
from fluxmesh.mesh.ring import Ring
from fluxmesh.mesh.roster import Roster
from fluxmesh.mesh.view import (
    REPORT_MAX_BYTES,
    MemberReport,
    NodeReport,
    decode_report,
    encode_report,
    essence,
    is_worth_telling,
    member_report,
)
from fluxmesh.peers import POINTS_MOST, Observation, owner, rings, unseen
from tests.mesh.told import member

ME = NodeRef("me", 1)
META = Meta(("default",), (0, 1, 2, 3), 4)
READY = int(Flag.READY)


def view_of(
    name: str,
    *,
    epoch: int = 1,
    standing: Standing = Standing.ALIVE,
    flags: int = READY,
    eligible: bool = True,
    meta: Meta | None = META,
    age_ms: int = 0,
) -> MemberView:
    record = Record(name, epoch, 0, int(standing), "127.0.0.1", 7_946, 0)
    load = Load(name, epoch, 1, flags=flags, age_ms=age_ms)
    return MemberView(record, meta, load, 0, answered=True, rtt_ns=400_000, eligible=eligible)


class TestRoster:
    def test_a_member_enters_once_it_is_eligible_and_alive_and_has_described_itself(self) -> None:
        roster = Roster(ME, META)
        for lacking in (
            view_of("a", eligible=False),
            view_of("a", standing=Standing.SUSPECT),
            view_of("a", meta=None),
        ):
            assert roster.look([lacking], READY, 0).in_ring == {"me"}
        assert roster.look([view_of("a")], READY, 0).in_ring == {"me", "a"}

    @pytest.mark.parametrize(
        ("later", "stays"),
        [
            (view_of("a", standing=Standing.SUSPECT, eligible=False), True),
            (view_of("a", flags=Flag.DEGRADED, eligible=False), True),
            (view_of("a", flags=0, age_ms=60_000, eligible=False), True),
            (view_of("a", flags=Flag.DRAINING, eligible=False), False),
            (view_of("a", standing=Standing.DEAD, eligible=False), False),
            (view_of("a", standing=Standing.LEFT, eligible=False), False),
            (view_of("a", epoch=2, eligible=False), False),
            (view_of("a", epoch=2), True),
        ],
        ids=["suspect", "degraded", "unknown", "draining", "dead", "left", "new run", "new run, ready"],
    )
    def test_who_is_in_stays_until_it_is_gone_drains_or_is_another_run(
        self, later: MemberView, stays: bool
    ) -> None:
        roster = Roster(ME, META)
        assert "a" in roster.look([view_of("a")], READY, 0).in_ring
        assert ("a" in roster.look([later], READY, 0).in_ring) is stays

    def test_we_are_in_while_we_are_ready_and_not_while_we_drain(self) -> None:
        roster = Roster(ME, META)
        assert roster.look([], 0, 0).in_ring == set()
        assert roster.look([], READY, 0).in_ring == {"me"}
        assert roster.look([], READY | Flag.DRAINING, 0).in_ring == set()

    def test_a_ring_is_made_anew_only_if_its_members_have_changed(self) -> None:
        roster = Roster(ME, META)
        first = roster.look([view_of("a")], READY, 0)
        again = roster.look([view_of("a", flags=Flag.DEGRADED, eligible=False)], READY, 1)
        assert again.rings["default"] is first.rings["default"]
        assert again.ring_recalculations == first.ring_recalculations == 1
        assert roster.look([], READY, 2).ring_recalculations == 2
        assert first.rings["default"] == Ring({"a": 150, "me": 150})


class TestReports:
    def test_a_report_is_read_back_as_it_was_written(self) -> None:
        report = NodeReport(members_total=2, members=(member("a"), member("b", standing="dead")))
        assert decode_report(encode_report(report)) == report

    def test_a_report_of_a_crowd_is_cut_to_the_bound_the_troubled_first(self) -> None:
        members = tuple(
            member(f"w{number:05}", standing="dead" if number % 100 == 99 else "alive")
            for number in range(2_000)
        )
        data = encode_report(NodeReport(members_total=2_000, members=members))
        assert REPORT_MAX_BYTES - 500 < len(data) <= REPORT_MAX_BYTES
        report = decode_report(data)
        assert report is not None
        assert report.members_total == 2_000
        assert sum(one.standing == "dead" for one in report.members) == 20
        assert list(report.members) == sorted(report.members, key=lambda one: one.worker_id)

    @pytest.mark.parametrize(
        "data", [b"", b"{", b"null", b'{"members_total":1}', b"\xff" * 100, b"[" * 5_000]
    )
    def test_what_is_no_report_is_none(self, data: bytes) -> None:
        assert decode_report(data) is None

    def test_those_who_pass_on_are_told_unless_they_are_too_many(self) -> None:
        few = NodeReport(members_total=0, members=(), over={"default": ("a", "b")})
        assert decode_report(encode_report(few)) == few
        names = tuple(f"worker-{number:05}" for number in range(500))
        many = NodeReport(members_total=0, members=(), over={f"q{n}": names for n in range(20)})
        told = decode_report(encode_report(many))
        assert told is not None
        assert told.over == {}

    def test_a_report_of_a_later_version_is_none(self) -> None:
        told = msgspec.structs.replace(NodeReport(members_total=0, members=()), report=2)
        assert decode_report(msgspec.json.encode(told)) is None

    def test_round_trips_and_numbers_of_jobs_alone_never_make_another_report(self) -> None:
        one = NodeReport(members_total=1, members=(member("a"),))
        busier = msgspec.structs.replace(one.members[0], rtt_ms=0.7, running=7)
        other = msgspec.structs.replace(one, members=(busier,), buffered=3)
        assert one != other
        assert essence(one) == essence(other)
        assert essence(one) != essence(msgspec.structs.replace(one, counters={"steals_initiated": 1}))

    def test_a_report_that_says_nothing_new_is_repeated_every_15_seconds(self) -> None:
        reporter = Reporter()
        one = NodeReport(members_total=1, members=(member("a"),))
        told = reporter.due(one, 1, 100.0)
        assert told is not None
        reporter.told(told, 100.0)
        nearer = msgspec.structs.replace(one, members=(msgspec.structs.replace(one.members[0], rtt_ms=0.7),))
        assert reporter.due(nearer, 1, 114.9) is None
        again = reporter.due(nearer, 1, 115.0)
        assert again is not None
        assert decode_report(again) == nearer
        dead = msgspec.structs.replace(one, members=(member("a", standing="dead"),))
        assert reporter.due(dead, 1, 103.0) is not None
        crowd = 2 * REPORT_MEMBERS  # all of them tell as much together as that many do
        assert reporter.due(nearer, crowd, 129.9) is None
        assert reporter.due(nearer, crowd, 130.0) is not None

    def test_a_member_without_particulars_or_with_old_numbers_is_shown_without_them(self) -> None:
        shown = member_report(view_of("a", meta=None, age_ms=6_000), in_ring=False, wall_zero_s=1_000.0)
        assert (shown.capacity, shown.running, shown.queues, shown.flags) == (None, None, (), ())
        assert (shown.standing, shown.since, shown.rtt_ms) == ("alive", 1_000.0, 0.4)

    def test_what_it_says_of_itself_is_told_in_words(self) -> None:
        flags = Flag.READY | Flag.DRAINING | Flag.DEGRADED | Flag.STEALS
        shown = member_report(view_of("a", flags=flags), in_ring=False, wall_zero_s=0)
        assert shown.flags == ("ready", "draining", "degraded", "steals")

    def test_who_has_been_gone_for_an_hour_is_not_told_of_any_more(self) -> None:
        hour_ns = 3_600 * 10**9
        for standing in Standing:
            lives = standing in (Standing.ALIVE, Standing.SUSPECT)
            assert is_worth_telling(view_of("a", standing=standing), hour_ns - 1)
            assert is_worth_telling(view_of("a", standing=standing), hour_ns + 1) is lives

    def test_an_ipv6_address_is_written_in_brackets(self) -> None:
        record = Record("a", 1, 0, 0, "fd00::1", 7_946, 0)
        view = MemberView(record, META, None, 0, answered=True, rtt_ns=None)
        assert member_report(view, in_ring=True, wall_zero_s=0).address == "[fd00::1]:7946"


def seen_by(name: str, *members: str) -> Observation:
    return Observation(
        worker_id=name,
        epoch=1,
        told_at=0.0,
        members_total=len(members),
        members=tuple(member(one) for one in members),
        jobs_stolen_in=0,
        jobs_stolen_out=0,
    )


class TestDoors:
    def test_workers_who_agree_see_one_ring_whose_shares_are_all_of_it(self) -> None:
        (ring,) = rings([seen_by("a", "a", "b"), seen_by("b", "a", "b")])
        assert (ring.queue, ring.seen_by, ring.agreed) == ("default", ("a", "b"), True)
        assert sum(one.share for one in ring.members) == 1.0

    def test_workers_who_differ_see_several_the_one_of_most_first(self) -> None:
        seen = [seen_by("a", "a", "b"), seen_by("b", "a", "b", "c"), seen_by("c", "a", "b", "c")]
        told = rings(seen, "default")
        assert [ring.seen_by for ring in told] == [("b", "c"), ("a",)]
        assert not any(ring.agreed for ring in told)
        assert rings(seen, "another") == []

    def test_the_owner_is_whom_most_name(self) -> None:
        seen = [seen_by("a", "a"), seen_by("b", "b", "c"), seen_by("c", "b", "c")]
        told = owner(seen, "key", "default")
        assert told.owner == Ring({"b": 150, "c": 150}).owner("key")
        assert (told.seen_by, told.agreed) == (("b", "c"), False)

    def test_as_many_points_are_taken_as_the_option_allows(self) -> None:
        assert NUMBERS["virtual_nodes"][1:] == (1, POINTS_MOST)

    @pytest.mark.parametrize("points", [0, -1, POINTS_MOST + 1, 10**9])
    def test_a_number_of_points_that_no_worker_can_have_is_nobodys(self, points: int) -> None:
        sound = seen_by("a", "a", "b")
        odd = msgspec.structs.replace(member("b"), virtual_nodes=points)
        view = msgspec.structs.replace(sound, members=(sound.members[0], odd))
        (ring,) = rings([view])
        assert [one.worker_id for one in ring.members] == ["a"]
        assert owner([view], "key", "default").owner == "a"

    def test_nobody_who_serves_a_queue_is_said_so(self) -> None:
        with pytest.raises(NotInMesh, match="serves the queue 'mail'"):
            owner([seen_by("a", "a")], "key", "mail")


def told_by(name: str, *members: MemberReport, total: int | None = None) -> Observation:
    return Observation(
        worker_id=name,
        epoch=1,
        told_at=0.0,
        members_total=len(members) if total is None else total,
        members=members,
        jobs_stolen_in=0,
        jobs_stolen_out=0,
    )


def test_who_does_not_see_whom_is_told_of_those_who_tell_alone() -> None:
    a, b, c = (member(name) for name in "abc")
    whole = [told_by(name, a, b, c) for name in "abc"]
    assert unseen(whole) == {}
    assert unseen([told_by("a", a), told_by("b", b, c), told_by("c", b, c)]) == {
        "a": ("b", "c"),
        "b": ("a",),
        "c": ("a",),
    }
    assert unseen([told_by("a", a, member("b", standing="dead")), told_by("b", a, b)]) == {"a": ("b",)}
    for standing in ("suspect", "left"):  # it is seen, and said goodbye before its lease was over
        assert unseen([told_by("a", a, member("b", standing=standing)), told_by("b", a, b)]) == {}
    assert unseen([told_by("a", a, b), told_by("b", a, b, c)]) == {}  # c tells nothing
    assert unseen([told_by("a", a, total=2), told_by("b", a, b)]) == {}  # a part of what it sees
