"""What waits between a worker and its node: bounded, of each kind the last word, in the right order."""

from __future__ import annotations

from fluxmesh.mesh.effects import Seek, Took, UpdateLoad
from fluxmesh.mesh.inbox import TOOK_MAX, Inbox
from fluxmesh.mesh.messages import Load, NodeRef, Offered

PEER = NodeRef("peer", 1)
NONE = Load("me", 1, 0)


def a_load(running: int) -> Load:
    return Load("me", 1, 0, running=running)


def took(number: int) -> Took:
    return Took(PEER, (Offered(f"{number:036}", 1),), ())


class Posts:
    def __init__(self, *, there: bool = True) -> None:
        self.there = there
        self.count = 0

    def __call__(self) -> bool:
        self.count += 1
        return self.there


def test_of_several_loads_and_wishes_the_last_counts_and_every_answer() -> None:
    posts = Posts()
    inbox = Inbox(NONE, posts)
    inbox.put_wish(3)
    inbox.put_took(took(1))
    for running in (1, 2, 3):
        inbox.put_load(a_load(running))
    inbox.put_wish(5)
    inbox.put_took(took(2))
    assert posts.count == 1  # one call for all of it
    assert inbox.take() == [UpdateLoad(a_load(3)), took(1), took(2), Seek(5)]
    assert inbox.take() == []
    assert (inbox.load, inbox.wish) == (a_load(3), 5)


def test_what_was_told_already_wakes_nobody() -> None:
    posts = Posts()
    inbox = Inbox(NONE, posts)
    inbox.put_load(NONE)
    inbox.put_wish(0)
    assert posts.count == 0
    inbox.put_wish(2)
    inbox.take()
    inbox.put_wish(2)  # it may have got two since
    assert inbox.take() == [Seek(2)]
    inbox.put_wish(0)
    inbox.put_wish(0)
    assert inbox.take() == [Seek(0)]
    assert posts.count == 3


def test_without_a_thread_it_waits_and_each_thing_tries_again() -> None:
    posts = Posts(there=False)
    inbox = Inbox(NONE, posts)
    inbox.put_wish(2)
    inbox.put_load(a_load(1))
    assert posts.count == 2
    assert inbox.take() == [UpdateLoad(a_load(1)), Seek(2)]


def test_answers_beyond_the_bound_push_out_the_oldest() -> None:
    inbox = Inbox(NONE, Posts())
    for number in range(TOOK_MAX + 3):
        inbox.put_took(took(number))
    assert inbox.take() == [took(number) for number in range(3, TOOK_MAX + 3)]
