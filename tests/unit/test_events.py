"""Events: small, and junk is nothing."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fluxmesh.errors import InvalidOption
from fluxmesh.events import MAX_EVENT_BYTES, Event, decode_event, encode_event


@given(topic=st.text(st.characters(exclude_categories=["Cs"]), max_size=50), body=st.binary(max_size=200))
def test_an_event_arrives_as_it_was_sent(topic: str, body: bytes) -> None:
    assert decode_event(encode_event(Event(topic, body))) == Event(topic, body)


def test_an_event_that_is_too_large_is_refused() -> None:
    room = MAX_EVENT_BYTES - len(encode_event(Event("jobs", b"x" * 1_000))) + 1_000
    assert len(encode_event(Event("jobs", b"x" * room))) == MAX_EVENT_BYTES
    with pytest.raises(InvalidOption, match="8,193 bytes"):
        encode_event(Event("jobs", b"x" * (room + 1)))


@given(blob=st.binary(max_size=64))
def test_any_datagram_is_an_event_or_nothing(blob: bytes) -> None:
    found = decode_event(blob)
    assert found is None or isinstance(found, Event)


@pytest.mark.parametrize(
    "blob", [b"", b"\xff", b"\x90", b"\x92\x01\x02", b"\x91" * 100_000, b"\x92\xa2\xff\xff\xc4\x00"]
)
def test_known_junk_is_nothing(blob: bytes) -> None:
    assert decode_event(blob) is None
