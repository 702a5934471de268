"""The query language of lists, and cursors that belong to one query."""

from __future__ import annotations

import base64
import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fluxmesh.errors import InvalidOption
from fluxmesh.job import Status
from fluxmesh.query import PAGE_MAX, Query, checked_limit, decode_cursor, encode_cursor, parse_query


@pytest.mark.parametrize(
    ("text", "query"),
    [
        ("", Query()),
        ("   ", Query()),
        ("state:COMPLETED", Query(state=Status.COMPLETED)),
        ("state:dead_letter", Query(state=Status.DEAD_LETTER)),
        ("queue:mail task:shop.orders:run", Query(queue="mail", task="shop.orders:run")),
        ("tag:a>b", Query(tag="a>b")),
        ("worker:w1", Query(worker="w1")),
        ("created>1.5", Query(created_after_us=1_500_000)),
        ("created<1700000000", Query(created_before_us=1_700_000_000_000_000)),
        ("created>1 created<2", Query(created_after_us=1_000_000, created_before_us=2_000_000)),
        ("state:PENDING queue:a task:b tag:c worker:d", Query(Status.PENDING, "a", "b", "c", "d")),
    ],
)
def test_every_part_names_a_field(text: str, query: Query) -> None:
    assert parse_query(text) == query


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("state:DONE", "COMPLETED, DEAD_LETTER"),
        ("stat:DONE", "did you mean 'state'"),
        ("status:PENDING", "not field:value"),
        ("mail", "not field:value"),
        (":x", "not field:value"),
        ("queue:", "no value"),
        ("created>", "no value"),
        ("created:5", "not field:value"),
        ("created>yesterday", "not epoch seconds"),
        ("created>2026-01-01", "such as 1767225600"),
        ("created>nan", "not epoch seconds"),
        ("created>inf", "not epoch seconds"),
        ("created>1e400", "not epoch seconds"),
        ("created>9e99", "not epoch seconds"),
        ("queue:a queue:b", "twice"),
        ("created>1 created>2", "twice"),
        ("x" * 4_001, "4,001 characters"),
        ("queue:" + "x" * 3_000, "printable"),
        ("task:\udcff", "printable"),
        ("tag:a\x00", "printable"),
    ],
)
def test_anything_else_is_refused_with_advice(text: str, message: str) -> None:
    with pytest.raises(InvalidOption, match=message) as caught:
        parse_query(text)
    assert caught.value.field == "q"
    assert len(str(caught.value)) < 300


@given(
    text=st.text(max_size=60)
    | st.lists(st.sampled_from(["state:", "queue:a", "created>", ":", " "])).map("".join)
)
def test_any_text_is_a_query_or_a_mistake(text: str) -> None:
    with contextlib.suppress(InvalidOption):
        decode_cursor(parse_query(text), encode_cursor(parse_query(text), (1,)))


@given(place=st.lists(st.integers(-(2**63), 2**63 - 1) | st.text(st.characters(exclude_categories=["Cs"]))))
def test_a_cursor_brings_back_its_place(place: list[int | str]) -> None:
    query = Query(queue="mail")
    cursor = encode_cursor(query, tuple(place))
    assert decode_cursor(query, cursor) == tuple(place)
    assert cursor.isascii()
    assert not set(cursor) & set("=+/&? ")


def test_a_cursor_belongs_to_the_query_it_came_from() -> None:
    cursor = encode_cursor(Query(queue="mail"), (1,))
    for other in (Query(), Query(queue="sms"), Query(task="mail"), Query(queue="mail", state=Status.PENDING)):
        with pytest.raises(InvalidOption, match="another query"):
            decode_cursor(other, cursor)


@given(cursor=st.text(max_size=80))
def test_any_other_text_is_no_cursor(cursor: str) -> None:
    with pytest.raises(InvalidOption) as caught:
        decode_cursor(Query(), cursor)
    assert caught.value.field == "cursor"


@pytest.mark.parametrize(
    "inner", [b"", b"[]", b"{}", b"null", b"[1.5]", b'["x", null]', b"[" * 10_000, b"\xff"]
)
def test_forged_cursors_are_refused(inner: bytes) -> None:
    with pytest.raises(InvalidOption):
        decode_cursor(Query(), base64.urlsafe_b64encode(inner).decode())


@pytest.mark.parametrize("limit", [1, 50, PAGE_MAX])
def test_a_page_has_up_to_a_thousand_jobs(limit: int) -> None:
    assert checked_limit(limit) == limit


@pytest.mark.parametrize("limit", [0, -1, PAGE_MAX + 1, True, 10**400])
def test_other_pages_are_refused(limit: int) -> None:
    with pytest.raises(InvalidOption, match="limit"):
        checked_limit(limit)
