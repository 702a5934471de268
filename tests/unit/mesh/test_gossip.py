"""The queue of news."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from fluxmesh.mesh.gossip import SLOTS_MAX, Circle, News
from fluxmesh.mesh.member import Table
from fluxmesh.mesh.messages import Standing
from tests.unit.mesh.driving import ME, a_record, about_me


def ids(news: News, limit: int = 100) -> list[str]:
    return [record.worker_id for record in news.candidates(limit)]


def test_of_two_records_of_one_node_only_the_last_is_told() -> None:
    news = News("me")
    news.put(a_record(1))
    news.put(a_record(1, incarnation=1))
    assert news.candidates(9) == [a_record(1, incarnation=1)]
    assert len(news) == 1


def test_our_own_word_comes_first_then_the_gone_then_suspects_then_the_rest() -> None:
    news = News(ME.worker_id)
    news.put(a_record(1))
    news.put(a_record(2, standing=Standing.SUSPECT))
    news.put(a_record(3, standing=Standing.LEFT))
    news.put(about_me(Standing.ALIVE))
    assert ids(news) == ["me", "peer-3", "peer-2", "peer-1"]


def test_what_was_told_less_often_comes_first_but_for_our_own_word() -> None:
    news = News(ME.worker_id)
    news.put(a_record(1, standing=Standing.DEAD))
    news.put(a_record(2))
    news.put(about_me(Standing.ALIVE))
    news.sent(["peer-1", "me"], limit=9)
    assert ids(news) == ["me", "peer-2", "peer-1"]


def test_news_is_sent_exactly_so_often_and_then_never() -> None:
    news = News("me")
    news.put(a_record(1))
    for times in range(1, 4):
        assert news.sends("peer-1") == times - 1
        news.sent(["peer-1"], limit=3)
    assert news.sends("peer-1") is None
    assert not len(news)
    assert news.candidates(9) == []
    news.sent(["peer-1"], limit=3)


def test_newer_news_of_a_node_starts_from_the_beginning() -> None:
    news = News("me")
    news.put(a_record(1))
    news.sent(["peer-1"], limit=9)
    news.put(a_record(1, incarnation=1))
    assert news.sends("peer-1") == 0


def test_a_full_queue_drops_what_was_told_most_often_and_never_our_own_word() -> None:
    news = News(ME.worker_id)
    news.put(about_me(Standing.ALIVE))
    for number in range(SLOTS_MAX - 1):
        news.put(a_record(number))
    news.sent(["me", "peer-7"], limit=99)
    news.put(a_record(99_999))
    assert len(news) == SLOTS_MAX
    assert news.dropped == 1
    assert news.sends("peer-7") is None
    assert news.sends("me") == 1


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 3)), max_size=40), st.integers(1, 6))
def test_whatever_comes_the_queue_drains_after_a_bounded_number_of_sends(
    steps: list[tuple[int, int]], limit: int
) -> None:
    news = News("me")
    for incarnation, (number, standing) in enumerate(steps):
        news.put(a_record(number, standing=Standing(standing), incarnation=incarnation))
        news.sent(ids(news, 2), limit=limit)
    sent = 0
    while len(news):
        picked = ids(news, 2)
        assert picked
        news.sent(picked, limit=limit)
        sent += len(picked)
        assert sent <= 6 * limit


# --- whom to tell ---------------------------------------------------------------------------------------


def a_table(n: int) -> Table:
    table = Table()
    for number in range(n):
        table.put(a_record(number), 0)
    return table


@given(st.integers(0, 30), st.integers(1, 4), st.integers(0, 99))
def test_everybody_is_told_once_before_anybody_is_told_twice(n: int, fanout: int, seed: int) -> None:
    table, circle = a_table(n), Circle(rng=random.Random(seed))
    told: list[int] = []
    while len(told) < n - n % fanout:
        told += [member.number for member in circle.pick(table.living, fanout, but=[])]
    assert len(set(told)) == len(told)


@given(st.integers(0, 9), st.integers(1, 4), st.integers(0, 9), st.integers(0, 99))
def test_a_tick_meets_nobody_twice_and_none_of_those_it_greets(
    n: int, fanout: int, greeted: int, seed: int
) -> None:
    table, circle = a_table(n), Circle(rng=random.Random(seed))
    but = table.living[:greeted]
    for _ in range(20):
        picked = circle.pick(table.living, fanout, but=but)
        assert len({member.number for member in picked}) == len(picked)
        assert not any(member in but for member in picked)
        assert len(picked) == min(fanout, n - len(but))


def test_who_died_since_the_circle_began_is_passed_over() -> None:
    table, circle = a_table(6), Circle(rng=random.Random(1))
    circle.pick(table.living, 1, but=[])
    for number in range(5):
        table.put(a_record(number, standing=Standing.DEAD), 0)
    assert [row.record for row in circle.pick(table.living, 3, but=[])] == [a_record(5)]
