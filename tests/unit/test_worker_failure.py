"""An exception as data: bounded, and made without trust in the exception."""

from __future__ import annotations

from typing import Any

import msgspec

from fluxmesh.job import JobError
from fluxmesh.worker.failure import MAX_FRAMES, MAX_MESSAGE_CHARS, MAX_TEXT_BYTES, describe, without_tail


def caught(raiser: Any) -> JobError:
    try:
        raiser()
    except BaseException as error:
        found = describe(error)
        msgspec.msgpack.encode(found)  # storage can take it
        return found
    raise AssertionError("nothing was raised")


def test_frames_run_from_the_first_cause_to_the_errors_own_innermost_frame() -> None:
    def deep() -> None:
        raise KeyError("first")

    def middle() -> None:
        try:
            deep()
        except KeyError as error:
            raise ValueError("second") from error

    error = caught(middle)
    names = [frame.split(" ")[1].split(".")[-1] for frame in error.frames]
    assert names == ["middle", "deep", "caught", "middle"]
    assert error.frames[-1].startswith(__file__ + ":")
    assert (error.type, error.message) == ("ValueError", "second")
    assert "KeyError: 'first'" in error.text


def test_an_exception_of_a_module_is_named_with_it() -> None:
    class Odd(Exception):
        pass

    def raiser() -> None:
        raise Odd

    assert caught(raiser).type == f"{__name__}.{Odd.__qualname__}"


def test_a_suppressed_context_is_left_out() -> None:
    def raiser() -> None:
        try:
            raise KeyError("hidden")
        except KeyError:
            raise ValueError("shown") from None

    error = caught(raiser)
    assert len(error.frames) == 2
    assert "hidden" not in error.text


def test_message_frames_and_text_are_bounded() -> None:
    def recurse(depth: int) -> None:
        if depth == 0:
            raise ValueError("x" * 100_000)
        recurse(depth - 1)

    error = caught(lambda: recurse(300))
    assert len(error.message) == MAX_MESSAGE_CHARS
    assert len(error.frames) == MAX_FRAMES
    assert error.frames[-1].endswith("recurse")
    assert len(error.text.encode()) <= MAX_TEXT_BYTES


def test_a_ring_of_causes_and_a_long_chain_end() -> None:
    def ring() -> None:
        first, second = ValueError("a"), ValueError("b")
        first.__cause__, second.__cause__ = second, first
        raise first

    def chain() -> None:
        link: Exception | None = None
        for number in range(200):
            following = ValueError(number)
            following.__cause__ = link
            link = following
        assert link is not None
        raise link

    assert caught(ring).message == "a"
    assert caught(chain).message == "199"


def test_no_method_of_the_exception_can_spoil_the_report() -> None:
    class Hostile(Exception):
        def __str__(self) -> str:
            raise SystemExit("str")

        def __repr__(self) -> str:
            raise KeyboardInterrupt("repr")

        @property
        def __cause__(self) -> Any:  # type: ignore[override]
            raise RuntimeError("cause")

        __notes__ = 7  # type: ignore[assignment]

    def raiser() -> None:
        raise Hostile

    error = caught(raiser)
    assert "__str__ raised" in error.message
    assert error.text


def test_a_cause_that_raises_whatever_it_likes_does_not_get_through() -> None:
    class Spiteful(Exception):
        @property
        def __cause__(self) -> BaseException:  # type: ignore[override]
            raise KeyboardInterrupt

    error = Spiteful("as it is")
    without_tail(error, test_a_cause_that_raises_whatever_it_likes_does_not_get_through.__code__)
    assert describe(error).message == "as it is"


def test_an_exception_group_keeps_its_members_in_the_text() -> None:
    def raiser() -> None:
        raise ExceptionGroup("several", [ValueError("one"), TypeError("two")])

    error = caught(raiser)
    assert error.type == "ExceptionGroup"
    assert "ValueError: one" in error.text
    assert "TypeError: two" in error.text


def test_what_is_not_unicode_is_written_as_its_escape() -> None:
    def raiser() -> None:
        raise ValueError("\udc80")

    assert caught(raiser).message == "\\udc80"
