"""The text of a script: keys written out, and nothing in it that the script does not use."""

from __future__ import annotations

from pathlib import Path

import pytest

import fluxmesh.storage.redis.assembly as assembly
from fluxmesh.storage.redis.assembly import folded, script_text, used_of
from fluxmesh.storage.redis.keys import written_out

LUA = Path(assembly.__file__).with_name("lua")
VERBS = [path.stem for path in LUA.glob("*.lua") if "return finish(" in path.read_text("utf-8")]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("K.tally()", "(P .. 'tally')"),
        ("call('GET', K.job(id), 1)", "call('GET', (P .. 'jobs:' .. id), 1)"),
        ("K.ready(r.queue, 2)", "(P .. 'queue:' .. r.queue .. ':' .. 2)"),
        ("K.in_flight(a or '', b)", "(P .. 'in_flight:' .. (a or '') .. '.' .. b)"),
        ("K.ended(ENDED[at])", "(P .. 'ended:' .. (ENDED[at]))"),
        ("K.parked(K.job(f(x, y)))", "(P .. 'parked:' .. ((P .. 'jobs:' .. (f(x, y)))))"),
    ],
)
def test_a_key_is_written_out_as_the_expression_that_builds_it(text: str, expected: str) -> None:
    assert written_out(text) == expected


@pytest.mark.parametrize("text", ["K.tally(x)", "K.job()", "K.job(id", "K.ready(queue)"])
def test_a_key_with_too_few_or_too_many_parts_is_a_mistake(text: str) -> None:
    with pytest.raises(ValueError, match=r"K\.|a call that does not end"):
        written_out(text)


def test_what_nothing_mentions_is_left_out_and_what_acts_stays() -> None:
    libraries = (
        "local a, b = 1, 2\nlocal function used()\n  return a\nend\n-- says unused\n"
        "local function unused()\n  return other()\nend\nif a then\n  b = 3\nend\n"
    )
    kept = used_of(libraries, "return used()")
    assert "unused" not in kept
    assert kept.index("local a, b") < kept.index("local function used") < kept.index("if a then")


def test_what_is_rare_is_made_when_it_is_first_called() -> None:
    text = (
        "local a = 1\n-- rare\nlocal function seldom(x)\n  return x + a\nend\nlocal function often(x)\n"
        "  local seldom_ = x\n  return x and seldom(x) or x.seldom\nend"
    )
    kept = folded(text, ("R", "rare"), "return often(seldom(1))")
    assert kept.splitlines() == [
        "local R, rare", "local a = 1", "rare = function()", "if not R then", "local function seldom(x)",
        "  return x + a", "end", "R = {seldom = seldom}", "end", "return R", "end",
        "local function often(x)", "  local seldom_ = x",
        "  return x and rare().seldom(x) or x.seldom", "end",
        "return often(rare().seldom(1))",
    ]  # fmt: skip
    assert folded("local a = 1", ("R", "rare"), "return a") == "local a = 1\nreturn a"


@pytest.mark.parametrize("verb", VERBS)
def test_no_script_defines_what_it_does_not_use(verb: str) -> None:
    text = script_text(verb)
    assert "K." not in text
    names = [
        line.split("(")[0].split()[-1] for line in text.splitlines() if line.startswith("local function ")
    ]
    assert len(names) == len(set(names))
    unused = [name for name in names if text.count(name) < 2]
    assert not unused
