"""Only who has the key and the label is heard, each thing once, and a key can be changed while all talk."""

from __future__ import annotations

import random
import tracemalloc
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fluxmesh.mesh import seal
from fluxmesh.mesh.seal import Keyring, Opener, Plain, Refusal, Sealed, SealedSession, Sealer, Session
from fluxmesh.mesh.timing import FRAME_MAX_BYTES, SEAL_BYTES, S

OLD, NEW, THIRD = bytes(range(32)), bytes(range(32, 64)), b"\x07" * 32


def ring(*keys: bytes, label: str = "fluxmesh") -> Keyring:
    return Keyring(keys or (OLD,), label=label)


def salt(number: int = 1) -> bytes:
    return number.to_bytes(12, "big")


def a_sealer(*keys: bytes, number: int = 1, label: str = "fluxmesh") -> Sealer:
    return Sealer(ring(*keys, label=label), salt=salt(number))


# --- datagrams ------------------------------------------------------------------------------------------


@settings(max_examples=100, deadline=None)
@given(st.lists(st.binary(max_size=1_160), max_size=5), st.text(max_size=20))
def test_what_was_sealed_opens_and_is_40_bytes_longer(packets: list[bytes], label: str) -> None:
    sealer, opener = a_sealer(label=label), Opener(ring(label=label))
    for data in packets:
        sealed = sealer.seal(data)
        assert len(sealed) == len(data) + SEAL_BYTES
        assert opener.open(sealed, 0) == data


def test_no_two_packets_look_the_same_and_none_shows_what_it_says() -> None:
    first, other = a_sealer(number=1), a_sealer(number=2)
    sealed = [first.seal(b"secret words"), first.seal(b"secret words"), other.seal(b"secret words")]
    assert len({data[24:] for data in sealed}) == 3
    assert all(b"secret" not in data for data in sealed)


def test_another_key_is_told_from_another_label() -> None:
    opener = Opener(ring())
    assert opener.open(a_sealer(NEW).seal(b"x"), 0) is Refusal.WRONG_KEY
    assert opener.open(a_sealer(label="other").seal(b"x"), 0) is Refusal.WRONG_LABEL
    assert len(opener) == 0


def test_d15_no_label_opens_another_even_if_its_mark_is_put_right() -> None:
    right, wrong = a_sealer().seal(b"x"), a_sealer(label="other").seal(b"x")
    assert Opener(ring()).open(wrong[:3] + right[3:4] + wrong[4:], 0) is Refusal.FORGED


def test_a_packet_that_was_heard_is_not_heard_again() -> None:
    sealer, opener = a_sealer(), Opener(ring())
    sealed = [sealer.seal(bytes((number,))) for number in range(10)]
    assert opener.open(sealed[5], 0) == b"\x05"
    assert opener.open(sealed[5], 0) is Refusal.REPLAY
    assert opener.open(sealed[2], 0) == b"\x02"  # overtaken, and new
    assert opener.open(sealed[2], 0) is Refusal.REPLAY


def test_a_packet_may_be_1023_behind_and_no_more() -> None:
    sealer, opener = a_sealer(), Opener(ring())
    sealed = [sealer.seal(b"x") for _ in range(2_000)]
    assert opener.open(sealed[1_999], 0) == b"x"
    assert opener.open(sealed[1_999 - 1_023], 0) == b"x"
    assert opener.open(sealed[1_999 - 1_023], 0) is Refusal.REPLAY
    assert opener.open(sealed[1_999 - 1_024], 0) is Refusal.REPLAY


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 3_000), max_size=80))
def test_the_window_agrees_with_a_set_of_all_that_came(order: list[int]) -> None:
    window, seen, highest = seal._Run(), set[int](), 0
    for number in order:
        counter = number + 1
        expected = counter not in seen and counter > highest - seal.REPLAY_WINDOW
        assert window.is_new(counter) == expected
        if expected:
            window.note(counter)
            seen.add(counter)
            highest = max(highest, counter)


def test_a_forged_packet_moves_no_window() -> None:
    sealer, opener = a_sealer(), Opener(ring())
    first, second = sealer.seal(b"1"), sealer.seal(b"2")
    assert opener.open(first, 0) == b"1"
    far = second[:16] + (1 << 40).to_bytes(8, "big") + second[24:]
    assert opener.open(far, 0) is Refusal.FORGED
    assert opener.open(second, 0) == b"2"


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=100), st.data())
def test_a_bit_turned_anywhere_is_refused(data: bytes, draw: st.DataObject) -> None:
    sealed = bytearray(a_sealer().seal(data))
    bit = draw.draw(st.integers(0, len(sealed) * 8 - 1))
    sealed[bit // 8] ^= 1 << bit % 8
    assert isinstance(Opener(ring()).open(bytes(sealed), 0), Refusal)


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=200))
def test_any_bytes_are_refused_and_nothing_of_them_is_kept(data: bytes) -> None:
    opener, plain = Opener(ring()), Plain(label="fluxmesh")
    for junk in (data, b"\xf1" + data, a_sealer().seal(b"x")[:24] + data, b"\xf0" + data):
        assert isinstance(opener.open(junk, 0), Refusal)
        assert isinstance(plain.open(junk, 0), Refusal)
    assert len(opener) == 0


def test_each_refusal_says_why() -> None:
    opener, whole = Opener(ring()), a_sealer().seal(b"x")
    assert opener.open(b"", 0) is Refusal.TRUNCATED
    assert opener.open(whole[: SEAL_BYTES - 1], 0) is Refusal.TRUNCATED
    assert opener.open(whole[:-1], 0) is Refusal.FORGED
    assert opener.open(b"\xf2" + whole[1:], 0) is Refusal.VERSION
    assert opener.open(b"\x96\x01" + bytes(60), 0) is Refusal.PLAINTEXT
    assert opener.open(Plain(label="fluxmesh").seal(bytes(60)), 0) is Refusal.PLAINTEXT
    assert opener.open(Plain(label="fluxmesh").seal(b""), 0) is Refusal.PLAINTEXT


def test_ten_thousand_strangers_fill_no_memory() -> None:
    opener, packet = Opener(ring()), a_sealer().seal(b"x" * 100)
    rng = random.Random(1)
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for _ in range(10_000):
            opener.open(packet[:4] + rng.randbytes(20) + packet[24:], 0)
        grown = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert len(opener) == 0
    assert grown < 8_192


def test_runs_are_forgotten_the_longest_silent_first_and_all_of_them_in_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(seal, "SALTS_MAX", 3)
    monkeypatch.setattr(seal, "CIPHERS_MAX", 2)
    opener = Opener(ring())
    sealers = [a_sealer(number=number) for number in range(1, 6)]
    kept = [sealer.seal(b"x") for sealer in sealers[:3]]
    for now, data in enumerate(kept):
        assert opener.open(data, now) == b"x"
    assert opener.open(sealers[0].seal(b"y"), 3) == b"y"  # the second is the longest silent now
    assert opener.open(sealers[3].seal(b"x"), 4) == b"x"
    assert len(opener) == 3
    assert opener.open(kept[0], 5) is Refusal.REPLAY
    assert opener.open(kept[2], 5) is Refusal.REPLAY
    assert len(opener._ready) == 2
    assert opener.open(sealers[4].seal(b"x"), 6 + seal.SALT_IDLE_NS) == b"x"
    assert len(opener) == 1
    assert len(opener._ready) == 1


def test_a_run_takes_less_than_a_kilobyte() -> None:
    opener = Opener(ring())
    sealers = [a_sealer(number=number) for number in range(1, 1_001)]
    packets = [[sealer.seal(b"x") for _ in range(40)] for sealer in sealers]
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for some in packets:
            for data in some:
                opener.open(data, 0)
        each = (tracemalloc.get_traced_memory()[0] - before) / 1_000
    finally:
        tracemalloc.stop()
    assert len(opener) == 1_000
    assert each < 1_024


# --- keys -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "keys", [(), (OLD[:31],), (OLD + b"x",), (OLD, OLD), (OLD, NEW, THIRD, b"\x01" * 32, b"\x02" * 32)]
)
def test_a_ring_takes_one_to_four_keys_of_32_bytes(keys: tuple[bytes, ...]) -> None:
    with pytest.raises(ValueError) as failed:
        Keyring(keys, label="x")
    assert OLD.hex() not in str(failed.value)


def test_a_ring_does_not_show_its_keys() -> None:
    shown = repr(ring(OLD, NEW))
    assert shown == "<Keyring of 2, label 'fluxmesh'>"


def test_the_first_key_seals_and_all_of_them_open() -> None:
    data = a_sealer(NEW, OLD).seal(b"x")
    assert Opener(ring(OLD, NEW)).open(data, 0) == b"x"
    assert Opener(ring(NEW)).open(data, 0) == b"x"
    assert Opener(ring(OLD)).open(data, 0) is Refusal.WRONG_KEY


def test_d23_a_ring_changed_between_packets_loses_none_and_opens_none_twice() -> None:
    one, other = Sealed(ring(OLD, NEW), salt=salt(1)), Sealed(ring(OLD, NEW), salt=salt(2))
    under_way: list[bytes] = []
    for number in range(600):
        under_way.append(one.seal(number.to_bytes(2, "big")))
        if number % 100 == 50:
            one.use(ring(NEW, OLD) if number % 200 == 50 else ring(OLD, NEW))
            other.use(ring(NEW, OLD) if number % 200 == 50 else ring(OLD, NEW))
    assert [other.open(data, 0) for data in under_way] == [n.to_bytes(2, "big") for n in range(600)]
    one.use(ring(NEW, OLD))
    other.use(ring(NEW, OLD))
    assert {other.open(data, 0) for data in under_way} == {Refusal.REPLAY}


def test_a_key_that_was_taken_off_the_ring_opens_nothing_any_more() -> None:
    sealer, opener = a_sealer(OLD), Opener(ring(NEW, OLD))
    assert opener.open(sealer.seal(b"x"), 0) == b"x"
    opener.use(ring(NEW))
    assert opener.open(sealer.seal(b"x"), 0) is Refusal.WRONG_KEY


STAGES = ((OLD,), (OLD, NEW), (NEW, OLD), (NEW,))


def stage_at(now: int, late: int) -> int:
    """The stage of a node that hears of each `late` ns after the fleet begins it, one a minute."""
    return max(0, min(3, (now - late) // (60 * S)))


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 30 * S), min_size=2, max_size=6), st.integers(1, 5 * S), st.randoms())
def test_d24_three_stages_with_nodes_30_s_apart_lose_nothing(
    lateness: list[int], delay: int, rng: random.Random
) -> None:
    nodes = [Sealed(ring(OLD), salt=salt(number)) for number in range(len(lateness))]
    held = [0] * len(nodes)
    failures = heard = 0
    for now in range(0, 240 * S, 2 * S):
        flying: list[tuple[int, int, bytes]] = []
        for step in (now, now + delay):  # sealed before, opened after whatever the delay changed
            for number, node in enumerate(nodes):
                if held[number] < (stage := stage_at(step, lateness[number])):
                    held[number] = stage
                    node.use(ring(*STAGES[stage]))
                if step == now:
                    flying += [(number, to, node.seal(b"x")) for to in range(len(nodes)) if to != number]
        rng.shuffle(flying)
        for _, to, data in flying:
            heard += 1
            failures += nodes[to].open(data, now) != b"x"
    assert {*held} == {3}
    assert heard > 0
    assert failures == 0


def test_d24_a_ring_that_skips_the_first_stage_would_lose() -> None:
    assert Opener(ring(OLD)).open(a_sealer(NEW, OLD).seal(b"x"), 0) is Refusal.WRONG_KEY


# --- without a key --------------------------------------------------------------------------------------


def test_plain_meshes_of_different_labels_do_not_hear_each_other() -> None:
    ours, same, other = Plain(label="a"), Plain(label="a"), Plain(label="b")
    assert same.open(ours.seal(b"words"), 0) == b"words"
    assert other.open(ours.seal(b"words"), 0) is Refusal.WRONG_LABEL
    assert len(ours.seal(b"")) <= SEAL_BYTES


def test_plain_opens_nothing_sealed_and_says_so() -> None:
    plain = Plain(label="fluxmesh")
    assert plain.open(a_sealer().seal(b"x"), 0) is Refusal.SEALED
    assert plain.open(b"", 0) is Refusal.TRUNCATED
    assert plain.open(plain.seal(b"")[:5], 0) is Refusal.TRUNCATED
    assert plain.open(b"\x96\x01" + bytes(60), 0) is Refusal.VERSION


# --- streams --------------------------------------------------------------------------------------------


def a_session(number: int, *keys: bytes, label: str = "fluxmesh") -> SealedSession:
    return SealedSession(ring(*keys, label=label), nonce=salt(number))


def pairs() -> Iterator[tuple[Session, Session]]:
    yield a_session(1), a_session(2)
    yield a_session(1, OLD, NEW), a_session(2, NEW, OLD)  # in the midst of a rotation
    plain = Plain(label="fluxmesh")
    yield plain.session(salt(1)), plain.session(salt(2))


def greeted(one: Session, other: Session) -> tuple[Session, Session]:
    assert len(one.greeting()) == one.greeting_bytes
    assert other.greeted(one.greeting())
    assert one.greeted(other.greeting())
    return one, other


def test_a_connection_carries_frames_both_ways_in_order() -> None:
    for one, other in pairs():
        greeted(one, other)
        for number in range(5):
            frame = bytes((number,)) * 1_000
            assert other.open(one.seal(frame)) == frame
            assert one.open(other.seal(frame + b"!")) == frame + b"!"


def test_a_frame_is_good_once_in_its_order_direction_and_connection() -> None:
    one, other = greeted(a_session(1), a_session(2))
    first, second = one.seal(b"1"), one.seal(b"2")
    assert other.open(second) is None
    assert other.refusal is Refusal.FORGED
    assert other.open(first) is None  # the connection is over
    one, other = greeted(a_session(1), a_session(3))
    assert other.open(first) is None
    one, other = greeted(a_session(1), a_session(2))
    assert one.open(one.seal(b"1")) is None
    one, other = greeted(a_session(1), a_session(2))
    again = one.seal(b"1")
    assert other.open(again) == b"1"
    assert other.open(again) is None


def test_a_greeting_says_whose_it_is() -> None:
    def refused(theirs: Session, ours: Session) -> Refusal | None:
        assert not ours.greeted(theirs.greeting())
        return ours.refusal

    plain = Plain(label="fluxmesh")
    assert refused(a_session(2, NEW), a_session(1)) is Refusal.WRONG_KEY
    assert refused(a_session(2, label="other"), a_session(1)) is Refusal.WRONG_LABEL
    assert refused(plain.session(salt(2)), a_session(1)) is Refusal.PLAINTEXT
    assert refused(a_session(2), plain.session(salt(1))) is Refusal.SEALED
    assert refused(Plain(label="other").session(salt(2)), plain.session(salt(1))) is Refusal.WRONG_LABEL
    ours = a_session(1)
    assert refused(ours, ours) is Refusal.REFLECTED
    for session in (a_session(1), plain.session(salt(1))):
        assert not session.greeted(b"short")
        assert session.refusal is Refusal.TRUNCATED


def test_d15_no_frame_of_another_label_opens_even_if_the_greetings_are_put_right() -> None:
    ours, theirs = a_session(1), a_session(2, label="other")
    mark, other_mark = ours.greeting()[1:4], theirs.greeting()[1:4]
    assert ours.greeted(theirs.greeting().replace(other_mark, mark))
    assert theirs.greeted(ours.greeting().replace(mark, other_mark))
    assert ours.open(theirs.seal(b"x")) is None
    assert ours.refusal is Refusal.FORGED


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=64))
def test_a_session_raises_on_no_bytes(data: bytes) -> None:
    for one, _ in pairs():
        one.greeted(data)
        one.greeted(data[:16].ljust(16, b"\0"))
    one, other = greeted(a_session(1), a_session(2))
    assert one.open(data) is None
    assert other.open(data) is None


def test_a_frame_beyond_a_mebibyte_is_neither_sealed_nor_opened() -> None:
    for one, other in pairs():
        greeted(one, other)
        with pytest.raises(ValueError, match="fit"):
            one.seal(bytes(FRAME_MAX_BYTES + 1))
        largest = bytes(FRAME_MAX_BYTES - 16)
        assert other.open(one.seal(largest)) == largest
        assert other.open(bytes(FRAME_MAX_BYTES + 1)) is None
        assert other.refusal is Refusal.TOO_LARGE


def test_nothing_is_sealed_or_opened_before_the_greeting() -> None:
    session = a_session(1)
    with pytest.raises(ValueError, match="greeted"):
        session.seal(b"x")
    assert session.open(bytes(40)) is None
