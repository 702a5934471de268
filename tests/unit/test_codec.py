"""Bytes and values: what can be carried, what is refused and where it stands, and junk on the way out."""

from __future__ import annotations

import collections
import datetime
import decimal
import enum
import json
import math
import uuid
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fluxmesh import codec
from fluxmesh.errors import InvalidPayload, PayloadTooLarge
from fluxmesh.job import HISTORY_KEPT, JobError, JobOptions, Outcome

LIMIT = codec.MAX_PAYLOAD_BYTES
scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"]))
)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=5), inner, max_size=5),
)


class Colour(enum.IntEnum):
    RED = 1


class Word(str):
    __slots__ = ()


class Number(int):
    pass


class Ratio(float):
    pass


Point = collections.namedtuple("Point", "x y")


def nested(levels: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(levels - 1):
        value = [value]
    return value


@given(args=st.lists(values, max_size=4), kwargs=st.dictionaries(st.text(min_size=1), values, max_size=4))
def test_what_json_can_hold_comes_back_as_it_was(args: list[Any], kwargs: dict[str, Any]) -> None:
    got = codec.decode_payload(codec.encode_payload(args, kwargs))
    assert got == (args, kwargs)
    assert json.loads(json.dumps(got)) == [args, kwargs]


@given(value=values)
def test_a_result_comes_back_as_it_was(value: Any) -> None:
    assert codec.decode_result(codec.encode_result(value)) == value


def test_no_result_is_none() -> None:
    assert codec.decode_result(None) is None
    assert codec.decode_result(codec.encode_result(None)) is None


@pytest.mark.parametrize(
    ("value", "arrives"),
    [
        ((1, (2,)), [1, [2]]),
        (Colour.RED, 1),
        (Word("w"), "w"),
        ({"k": Word("w")}, {"k": "w"}),
        (Number(7), 7),
        (Ratio(0.5), 0.5),
        (collections.OrderedDict(a=1), {"a": 1}),
        (collections.defaultdict(list, a=[1]), {"a": [1]}),
        (Point(1, 2), [1, 2]),
    ],
)
def test_a_subclass_of_what_can_be_carried_arrives_as_the_plain_value(value: Any, arrives: Any) -> None:
    assert codec.decode_payload(codec.encode_payload([value], {})) == ([arrives], {})
    assert codec.decode_result(codec.encode_result(value)) == arrives
    assert len(codec.payload_hash("t", [value], {})) == 16


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (b"x", "base64"),
        (bytearray(b"x"), "base64"),
        ({1, 2}, "send a list"),
        (frozenset(), "send a list"),
        (datetime.datetime(2030, 1, 1, tzinfo=datetime.UTC), "isoformat"),
        (datetime.date(2030, 1, 1), "isoformat"),
        (decimal.Decimal(1), "str"),
        (uuid.uuid4(), "str"),
        (object(), "object"),
        (1j, "complex"),
        (iter([]), "list_iterator"),
        (math.nan, "not a finite number"),
        (math.inf, "not a finite number"),
        (2**64, "64 bits"),
        (-(2**63) - 1, "64 bits"),
        ({1: 2}, "not text"),
        ({None: 2}, "not text"),
        ("\ud800", "Unicode"),
        ({"\ud800": 1}, "Unicode"),
    ],
)
@pytest.mark.parametrize("wrap", [lambda v: v, lambda v: [1, {"deep": v}]], ids=["bare", "nested"])
def test_what_cannot_be_carried_is_refused_with_advice(value: object, message: str, wrap: Any) -> None:
    for call in (
        lambda: codec.encode_payload([wrap(value)], {}),
        lambda: codec.encode_payload([], {"k": wrap(value)}),
        lambda: codec.encode_result(wrap(value)),
    ):
        with pytest.raises(InvalidPayload, match=message):
            call()


def test_the_place_of_a_bad_value_is_named() -> None:
    with pytest.raises(InvalidPayload, match=r"args\[1\]\['items'\]\[2\]"):
        codec.encode_payload([0, {"items": [1, 2, {3}]}], {})
    with pytest.raises(InvalidPayload, match=r"kwargs\['when'\]"):
        codec.encode_payload([], {"when": b""})


class TestBounds:
    def test_a_payload_of_exactly_the_limit_is_carried_and_one_more_byte_is_not(self) -> None:
        text = "x" * (LIMIT - len(codec.encode_payload([""], {})) - 4)
        assert len(codec.encode_payload([text], {})) == LIMIT
        with pytest.raises(PayloadTooLarge, match="1,048,577 bytes"):
            codec.encode_payload([text + "x"], {})

    def test_a_result_of_exactly_the_limit_is_carried_and_one_more_byte_is_not(self) -> None:
        text = "x" * (LIMIT - 5)
        assert len(codec.encode_result(text)) == LIMIT
        with pytest.raises(PayloadTooLarge):
            codec.encode_result(text + "x")

    def test_the_limit_is_a_setting(self) -> None:
        with pytest.raises(PayloadTooLarge, match="the limit is 10"):
            codec.encode_payload(["0123456789"], {}, limit=10)

    @pytest.mark.parametrize("levels", [101, 10_000, 100_000])
    def test_more_than_100_levels_are_refused_and_not_crashed_on(self, levels: int) -> None:
        for call in (
            lambda: codec.encode_payload([nested(levels)], {}),
            lambda: codec.encode_result(nested(levels)),
        ):
            with pytest.raises(PayloadTooLarge, match="100 levels"):
                call()

    def test_100_levels_are_carried(self) -> None:
        assert codec.decode_payload(codec.encode_payload([nested(100)], {})) == ([nested(100)], {})

    def test_a_value_that_holds_itself_is_refused(self) -> None:
        ring: list[Any] = []
        ring.append(ring)
        with pytest.raises(PayloadTooLarge):
            codec.encode_payload([ring], {})

    def test_a_small_value_that_unfolds_into_a_huge_one_is_refused_at_once(self) -> None:
        value: list[Any] = [1]
        for _ in range(60):
            value = [value, value]
        with pytest.raises(PayloadTooLarge):
            codec.encode_payload([value], {})


class TestHash:
    def test_the_order_of_keys_does_not_matter_at_any_depth(self) -> None:
        one = codec.payload_hash("t", [{"a": 1, "b": {"x": 1, "y": 2}}], {"p": 1, "q": 2})
        two = codec.payload_hash("t", [{"b": {"y": 2, "x": 1}, "a": 1}], {"q": 2, "p": 1})
        assert one == two

    def test_a_tuple_is_a_list(self) -> None:
        assert codec.payload_hash("t", ((1, 2),), {}) == codec.payload_hash("t", [[1, 2]], {})

    @pytest.mark.parametrize(
        ("task", "args", "kwargs"),
        [
            ("u", [1, 2], {}),
            ("t", [2, 1], {}),
            ("t", [1], {}),
            ("t", ["1", 2], {}),
            ("t", [1, 2], {"k": None}),
        ],
    )
    def test_task_order_of_arguments_and_types_do(
        self, task: str, args: list[Any], kwargs: dict[str, Any]
    ) -> None:
        assert codec.payload_hash(task, args, kwargs) != codec.payload_hash("t", [1, 2], {})


class TestJunk:
    """C06: bytes that nobody of ours wrote."""

    DEEP = b"\x92" + b"\x91" * 100_000
    KNOWN = (
        b"", b"\xff", b"\xc1", b"\x92", b"\x90", b"\x92\x90\x90", b"\x92\x80\x80", DEEP,
        b"\x92\x91\xd4\x05\x00\x80", b"\x92\x91\x81\x80\x01\x80",
        b"\x92\x91\xdd\xff\xff\xff\xff\x80", b"\x92\x91\xa2\xff\xff\x80",
    )  # fmt: skip

    @pytest.mark.parametrize("blob", KNOWN)
    def test_known_junk_is_no_payload(self, blob: bytes) -> None:
        with pytest.raises(msgspec.MsgspecError):
            codec.decode_payload(blob)

    @given(
        blob=st.binary(max_size=64) | st.binary(max_size=64).map(lambda tail: b"\x92\x91" + tail + b"\x80")
    )
    def test_any_bytes_are_a_payload_or_junk_and_nothing_else_is_raised(self, blob: bytes) -> None:
        for decode in (codec.decode_payload, codec.decode_options, codec.decode_error, codec.decode_result):
            try:
                decode(blob)
            except msgspec.MsgspecError:
                continue

    @given(blob=st.binary(min_size=1, max_size=64))
    def test_a_history_of_junk_takes_a_new_entry_all_the_same(self, blob: bytes) -> None:
        told = codec.decode_history(append(blob))
        assert told[-1].outcome is Outcome.FAILED

    @pytest.mark.parametrize("blob", [DEEP, b"\x91" * 100_000, b"\x91\x01", b"\x92\x90\xc0"])
    def test_known_junk_is_no_history_either(self, blob: bytes) -> None:
        (told,) = codec.decode_history(append(blob))
        assert told.outcome is Outcome.FAILED

    @pytest.mark.parametrize(
        "decode", [codec.decode_options, codec.decode_error, codec.decode_result, codec.decode_history]
    )
    def test_junk_of_any_depth_is_junk_and_no_more(self, decode: Callable[[bytes], object]) -> None:
        for blob in (self.DEEP, b"\x91" * 100_000, b"\x9f" + b"\xc0" * 11 + b"\x91" * 100_000):
            with pytest.raises(msgspec.MsgspecError):
                decode(blob)

    def test_options_of_junk_are_not_kept_in_mind(self) -> None:
        for _ in range(2):
            with pytest.raises(msgspec.MsgspecError):
                codec.decode_options(b"\xff")


def append(blob: bytes | None, attempt: int = 1) -> bytes:
    return codec.append_history(
        blob, life=1, attempt=attempt, started_us=1_000_000, ended_us=2_500_000, worker_id="w",
        outcome="failed", error=JobError("E", "m"),
    )  # fmt: skip


class TestHistory:
    def test_entries_are_told_oldest_first_in_seconds(self) -> None:
        one, two = codec.decode_history(append(append(None), 2))
        assert (one.attempt, two.attempt) == (1, 2)
        assert (one.started_at, one.ended_at, one.worker_id) == (1.0, 2.5, "w")
        assert (one.outcome, one.error) == (Outcome.FAILED, JobError("E", "m"))

    def test_the_last_50_are_kept(self) -> None:
        blob: bytes | None = None
        for attempt in range(1, 121):
            blob = append(blob, attempt)
        told = codec.decode_history(blob)
        assert len(told) == HISTORY_KEPT
        assert (told[0].attempt, told[-1].attempt) == (71, 120)

    def test_nothing_is_an_empty_history(self) -> None:
        assert codec.decode_history(None) == codec.decode_history(b"") == []


class TestOptions:
    def test_a_submission_that_leaves_everything_open_stores_nothing(self) -> None:
        assert codec.encode_options(JobOptions()) is None
        assert codec.decode_options(None) == JobOptions()

    def test_options_come_back_as_they_were_and_equal_ones_are_shared(self) -> None:
        options = JobOptions(max_retries=5, tags=("x",), headers={"h": "v"})
        blob = codec.encode_options(options)
        assert codec.decode_options(blob) == options
        assert codec.decode_options(blob) is codec.decode_options(bytes(blob or b""))

    def test_any_number_of_different_options_is_remembered_within_bounds(self) -> None:
        for index in range(1_000):
            options = JobOptions(max_retries=index)
            assert codec.decode_options(codec.encode_options(options)) == options
        assert len(codec._options_seen) <= 256
