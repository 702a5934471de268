"""Each gate is shown source that breaks its rule, and source that only looks like it."""

from __future__ import annotations

import pytest

from tests.architecture import gates


def test_a_file_over_the_limit_is_found() -> None:
    assert gates.long_file("x = 1\n" * 501, 500) == ["501 lines, at most 500"]
    assert gates.long_file("x = 1\n" * 500, 500) == []


@pytest.mark.parametrize("head", ["def f():", "async def f():"])
def test_a_function_over_the_limit_is_found(head: str) -> None:
    assert gates.long_functions(f"{head}\n" + "    x = 1\n" * 70) == ["1: f has 71 lines, at most 70"]
    assert gates.long_functions(f"{head}\n" + "    x = 1\n" * 69) == []


def test_a_long_method_of_a_nested_class_is_found() -> None:
    source = "class A:\n    class B:\n        def f(self):\n" + "            x = 1\n" * 70
    assert gates.long_functions(source) == ["3: f has 71 lines, at most 70"]


@pytest.mark.parametrize(
    ("source", "finding"),
    [
        ("import time\ntime.time()", "2: time.time"),
        ("import time as t\nt.monotonic_ns()", "2: time.monotonic_ns"),
        ("from time import monotonic\nnow = monotonic()", "2: time.monotonic"),
        ("from time import perf_counter as pc\npc()", "2: time.perf_counter"),
        ("import time\nstart = time.clock_gettime(time.CLOCK_BOOTTIME)", "2: time.clock_gettime"),
        ("import time\ndef f(clock=time.monotonic): ...", "2: time.monotonic"),
        ("import datetime\ndatetime.datetime.now()", "2: datetime.datetime.now"),
        ("from datetime import datetime, UTC\ndatetime.now(UTC)", "2: datetime.datetime.now"),
        ("import datetime as dt\ndt.date.today()", "2: datetime.date.today"),
        ("def f():\n    import time\n    return time.time_ns()", "3: time.time_ns"),
    ],
)
def test_a_clock_read_is_found(source: str, finding: str) -> None:
    assert gates.clock_reads(source) == [finding]


@pytest.mark.parametrize(
    "source",
    [
        "import time\ntime.sleep(1)",
        "import asyncio\nasyncio.get_running_loop().time()",
        "def f(loop):\n    return loop.time()",
        "from datetime import datetime, UTC\ndatetime.fromtimestamp(0, UTC)",
        "from fluxmesh.clock import monotonic\nmonotonic()",
        "def f(clock):\n    return clock.now()",
        "time = 1\nprint(time)",
    ],
)
def test_what_only_looks_like_a_clock_read_is_let_through(source: str) -> None:
    assert gates.clock_reads(source) == []


@pytest.mark.parametrize("word", ["TODO", "FIXME", "XXX", "NotImplementedError"])
def test_a_loose_end_is_found(word: str) -> None:
    assert gates.unfinished(f"x = 1\n# {word}: later\n") == [f"2: {word}"]
    assert gates.unfinished(f"{word.lower()}s = 1\nA{word}Z = 2\n") == []
