"""How every command reads its arguments: one parser class, the options all share, checked value types."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Callable, Sequence
from typing import Any, Final, NoReturn

from rich_argparse import RawDescriptionRichHelpFormatter

from fluxmesh.cli import output

LOG_LEVELS: Final = ("debug", "info", "warning", "error")
LOG_FORMATS: Final = ("text", "json")
_NEAR_MOST: Final = 5  # words that are compared more closely
Options = argparse.Namespace
Run = Callable[[Options], int]
# What add_subparsers() returns; argparse has no public name for its type.
Verbs = Any


class HelpFormatter(RawDescriptionRichHelpFormatter):
    """Examples keep their lines; brackets in help texts are text, not markup."""

    group_name_formatter = str
    help_markup = False
    text_markup = False


class Parser(argparse.ArgumentParser):
    """No abbreviated options, and mistakes are told the way all our errors are."""

    def __init__(self, **options: Any) -> None:
        options.setdefault("allow_abbrev", False)
        options.setdefault("formatter_class", HelpFormatter)
        super().__init__(**options)

    def get_option(self, name: str) -> argparse.Action:
        return self._option_string_actions[name]

    def print_help(self, file: Any = None) -> None:
        with output.writing():
            super().print_help(file)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        # What a verb does not know is refused by the verb: its help is the one to look at.
        known, rest = super().parse_known_args(args, namespace)
        if rest:
            self._refuse(f"unrecognized arguments: {' '.join(rest)}", self._meant(rest))
        return known, rest

    def error(self, message: str) -> NoReturn:
        self._refuse(message, "")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as error:
            self._refuse(str(error), nearest(str(value), [str(one) for one in action.choices or ()]))

    def _meant(self, words: Sequence[str]) -> str:
        for word in words:
            known = list(self._option_string_actions)
            if word.startswith("--") and (close := nearest(word.partition("=")[0], known)):
                return close
        return ""

    def _refuse(self, message: str, meant: str) -> NoReturn:
        guess = f"did you mean {meant}? " if meant else ""
        help_ = f"`{self.prog} --help` shows the options and an example"
        self.exit(2, f"error: {message}\nhint: {guess}{help_}\n")


def nearest(word: str, known: Sequence[str]) -> str:
    """Which of the known words was meant; empty if none is near. Of several that are equally near it is the
    one that begins alike for longest: `--mesh-sead` is `--mesh-seeds` and not `--mesh-steal`."""

    def nearness(one: str) -> tuple[float, int]:
        pairs = zip(one, word, strict=False)
        alike = next((at for at, (ours, theirs) in enumerate(pairs) if ours != theirs), len(one))
        return difflib.SequenceMatcher(a=one, b=word).ratio(), alike

    return max(difflib.get_close_matches(word, known, n=_NEAR_MOST), key=nearness, default="")


def examples(*lines: str) -> str:
    """The epilog of a help text."""
    return "\n".join(("examples:" if len(lines) > 1 else "example:", *(f"  {line}" for line in lines)))


def common_options() -> Parser:
    """Options that every command takes, before the noun, after it or after the verb."""
    common = Parser(add_help=False, argument_default=argparse.SUPPRESS)
    group = common.add_argument_group("everywhere")
    group.add_argument("--url", metavar="URL", help="storage, such as sqlite:///tasks.db (FLUXMESH_URL)")
    group.add_argument(
        "--namespace", metavar="NAME", help="namespace inside the storage (FLUXMESH_NAMESPACE)"
    )
    group.add_argument("--log-level", choices=LOG_LEVELS, help="least level that is logged, on stderr")
    group.add_argument("--log-format", choices=LOG_FORMATS, help="how logs are written on stderr")
    return common


def json_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")


def add_verbs(parser: argparse.ArgumentParser) -> Verbs:
    # A given prog saves argparse from making a help formatter, which loads the whole of rich.
    return parser.add_subparsers(title="commands", metavar="COMMAND", required=True, prog=parser.prog)


def add_verb(verbs: Verbs, name: str, run: Run, summary: str, *lines: str) -> Parser:
    """One verb of a noun: its help sentence, its examples, the function that runs it."""
    verb: Parser = verbs.add_parser(
        name, help=summary, description=sentence(summary), epilog=examples(*lines), parents=[common_options()]
    )
    verb.set_defaults(run=run)
    return verb


def sentence(summary: str) -> str:
    return f"{summary[0].upper()}{summary[1:]}."


def comma_list(text: str) -> tuple[str, ...]:
    """ "a,b" as ("a", "b"); empty parts are refused."""
    parts = tuple(part.strip() for part in text.split(","))
    if not all(parts):
        raise argparse.ArgumentTypeError(f"{text!r} has an empty part; write a,b")
    return parts


def count(low: int, high: int) -> Callable[[str], int]:
    """A whole number in low..high."""

    def whole_number(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text[:80]!r} is not a whole number") from None
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"{value} is out of range, {low:,} to {high:,}")
        return value

    return whole_number


def seconds(low: float, high: float) -> Callable[[str], float]:
    """A finite number of seconds in low..high."""

    def number_of_seconds(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text[:80]!r} is not a number of seconds") from None
        if not low <= value <= high:  # NaN is in no range
            raise argparse.ArgumentTypeError(f"{text[:80]} s is out of range, {low:g} to {high:,.0f}")
        return value

    return number_of_seconds


def flatten(parts: Sequence[Sequence[str]] | None) -> tuple[str, ...]:
    """The values of an option that may be repeated and may hold lists."""
    return tuple(part for group in parts or () for part in group)
