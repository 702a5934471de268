"""What a worker serves: queues, tiers and reserved slots, as its command line says it."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Final

from msgspec import Struct

from fluxmesh.cli.parser import Options, Parser, comma_list, count, flatten, seconds
from fluxmesh.errors import InvalidOption
from fluxmesh.job import TIER_NAMES
from fluxmesh.queue import checked_reserve
from fluxmesh.submission import RESERVED_QUEUES, checked_queue, checked_tier, split_queues

GRACE_MOST_S: Final = 86_400.0


class Serving(Struct, frozen=True):
    """`by_names`: tier names were given where queue names stand, and mean tiers of the default queue."""

    queues: tuple[str, ...]
    tiers: tuple[int, ...]
    reserve: dict[int, int]
    by_names: bool = False

    @property
    def sentence(self) -> str:
        tiers = ", ".join(TIER_NAMES[tier] for tier in self.tiers)
        word = "queue" if len(self.queues) == 1 else "queues"
        rule = " (tier names given as --queues mean --tiers on the default queue)" if self.by_names else ""
        kept = "".join(f", {slots} slots kept for {TIER_NAMES[tier]}" for tier, slots in self.reserve.items())
        return f"tiers {tiers} of {word} {', '.join(self.queues)}{kept}{rule}"


def add_serving_options(parser: Parser) -> None:
    group = parser.add_argument_group("what is run")
    group.add_argument(
        "--queues",
        type=comma_list,
        action="append",
        metavar="A,B",
        help="queue names, or tier names alone (default)",
    )
    group.add_argument(
        "--tiers", type=comma_list, action="append", metavar="A,B", help="only these tiers (all)"
    )
    group.add_argument(
        "--concurrency", type=count(1, 10_000), metavar="N", help="jobs at once per process (8)"
    )
    group.add_argument(
        "--reserve",
        type=comma_list,
        action="append",
        metavar="TIER=N",
        help="slots kept free for a tier: critical=1",
    )
    group.add_argument(
        "--grace",
        dest="grace_s",
        type=seconds(0, GRACE_MOST_S),
        metavar="S",
        help="time to finish when told to stop (8)",
    )
    group.add_argument(
        "--app", metavar="MODULE:QUEUE", help="where the Queue and its tasks are (FLUXMESH_APP)"
    )
    group.add_argument(
        "--builtins",
        action=argparse.BooleanOptionalAction,
        help="load the built-in tasks (if no --app is given)",
    )


def serving_of(options: Options, concurrency: int) -> Serving:
    """Raises InvalidOption with the flag's name."""
    names = flatten(options.queues)
    queues, tiers = split_queues(names or ("default",))
    by_names = not RESERVED_QUEUES.isdisjoint(names)
    if options.tiers:
        if by_names:
            raise InvalidOption(
                "--tiers", "given together with tier names in --queues", hint="give one of them"
            )
        tiers = tuple(sorted({_tier("--tiers", name) for name in flatten(options.tiers)}))
    for name in queues:
        checked_queue(name)
    return Serving(queues, tiers, _reserve(flatten(options.reserve), tiers, concurrency), by_names)


def _tier(flag: str, name: str) -> int:
    try:
        return checked_tier(int(name) if name.isdecimal() and len(name) < 10 else name)
    except InvalidOption as error:
        raise InvalidOption(flag, f"{name[:80]!r} is not a tier", hint=error.hint) from None


def _reserve(pairs: Sequence[str], tiers: Sequence[int], concurrency: int) -> dict[int, int]:
    reserve: dict[int | str, int] = {}
    for pair in pairs:
        name, _, number = pair.partition("=")
        tier = _tier("--reserve", name)
        if not number.isdecimal() or len(number) > 5:
            raise InvalidOption("--reserve", f"{pair[:80]!r} is not TIER=N", hint="--reserve critical=1")
        if tier in reserve:
            raise InvalidOption("--reserve", f"{name} is given twice")
        if tier not in tiers:
            raise InvalidOption("--reserve", f"{name} is not served by this worker", hint="see --tiers")
        reserve[tier] = int(number)
    return checked_reserve(reserve, concurrency)


def as_flags(serving: Serving) -> list[str]:
    """The same for a child's command line."""
    flags = ["--queues", ",".join(serving.queues), "--tiers", ",".join(str(tier) for tier in serving.tiers)]
    for tier, slots in serving.reserve.items():
        flags += ["--reserve", f"{tier}={slots}"]
    return flags
