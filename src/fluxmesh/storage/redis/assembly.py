"""The text of a verb's script: its file, behind what it uses of the prelude and of its libraries.

A script runs anew for each call, and each function that it only defines costs the server more than a small
command does. So a definition that nothing mentions is left out, names of keys are written out in place, and
functions marked `-- rare` are defined when the first of them is called: they are wrapped into one function,
and a mention of `name` elsewhere becomes `rare().name`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Final

from fluxmesh.storage.redis.keys import written_out

_FOLDER: Final = Path(__file__).with_name("lua")
_ALWAYS: Final = ("prelude", "moves", "workers", "finish")
_USES: Final = re.compile(r"^-- uses: (.+)$", re.MULTILINE)
_COMMENT: Final = re.compile(r"^ *--.*\n", re.MULTILINE)
_GOES_ON: Final = re.compile(r"[\s)}]|end\b|else")
_DEFINES: Final = re.compile(r"local (?:function (\w+)|([\w, ]+?)\s*(?:=|$))")
_WORD: Final = re.compile(r"\w+")
_RARE: Final = "-- rare\n"


def _file(name: str) -> str:
    return (_FOLDER / f"{name}.lua").read_text(encoding="utf-8")


def _statements(text: str) -> Iterator[str]:
    """The statements of a file at its outermost level. They begin at the margin, and nothing else does. Those
    marked as rare keep the mark at their beginning."""
    text = text.replace(_RARE, "@")
    begun: list[str] = []
    for line in _COMMENT.sub("", text).splitlines():
        if begun and line and not _GOES_ON.match(line):
            yield "\n".join(begun)
            begun = []
        if line:
            begun.append(line)
    if begun:
        yield "\n".join(begun)


def _defined(statement: str) -> set[str]:
    """The names that a statement only defines; none for one that also does something."""
    found = _DEFINES.match(statement.removeprefix("@"))
    return set(_WORD.findall(found[1] or found[2])) if found else set()


def used_of(libraries: str, body: str) -> str:
    """The statements of the libraries that the body needs, in order."""
    wanted, kept = set(_WORD.findall(body)), []
    for statement in reversed(list(_statements(libraries))):
        names = _defined(statement)
        if not names or names & wanted:
            kept.append(statement)
            wanted |= set(_WORD.findall(statement))
    return "\n".join(reversed(kept))


def folded(text: str, names: tuple[str, str], followed_by: str = "") -> str:
    """The same statements, those that are rare in one function, called when the first of them is needed.

    `names`: of the table of what is rare, and of that function. `followed_by`: what knows them too."""
    statements = list(_statements(text))
    rare = [statement[1:] for statement in statements if statement.startswith("@")]
    if not rare:
        return f"{text}\n{followed_by}"
    table, function = names
    defined = sorted(set().union(*map(_defined, rare)))
    mention = re.compile(rf"(?<![\w.:'\"])(?:{'|'.join(defined)})(?=\()")

    def called(part: str) -> str:
        return mention.sub(rf"{function}().\g<0>", part)

    known = ", ".join(f"{name} = {name}" for name in defined)
    made = "\n".join([*rare, f"{table} = {{{known}}}"])
    lazy = f"{function} = function()\nif not {table} then\n{made}\nend\nreturn {table}\nend"
    # Where the last of them stood: all that they use is defined by then, and nothing has been done yet.
    last = max(at for at, statement in enumerate(statements) if statement.startswith("@"))
    usual = [
        lazy if at == last else called(statement)
        for at, statement in enumerate(statements)
        if at == last or not statement.startswith("@")
    ]
    return "\n".join([f"local {table}, {function}", *usual, called(followed_by)])


@cache
def script_text(verb: str, *, has_msgpack: bool = True) -> str:
    """The whole script of a verb, without a header. `has_msgpack`: the server brings its own."""
    body = _file(verb)
    found = _USES.search(body)
    names = [*_ALWAYS, *(found[1].replace(" ", "").split(",") if found else [])]
    body = folded(written_out(body), ("Q", "rare_here"))
    body = f"return run(function()\n{body}\nend)\n"
    text = folded(used_of(written_out("\n".join(map(_file, names))), body), ("R", "rare"), body)
    own = (
        "" if has_msgpack else f"local cmsgpack = (function()\n{_file('cmsgpack')}\nreturn cmsgpack\nend)()\n"
    )
    return f"local P = KEYS[1]\n{own}{text}"
