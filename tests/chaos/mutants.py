"""Eleven mutants of our own code: each breaks one promise, and the history checker has to notice.

A mutant is a list of edits of texts: of a Python function, of an SQL statement, of a Lua script. An edit
whose text is not found exactly once is an error, so that no mutant turns into a silent no-op.
Applied by the processes of a chaos run to themselves, before they use what is edited.
"""

from __future__ import annotations

import builtins
import dis
import importlib
import inspect
import os
import textwrap
from collections.abc import Callable
from types import CodeType
from typing import Any, Final

from msgspec import Struct

MUTANT_ENV: Final = "FLUXMESH_TEST_MUTANT"
_SQLITE: Final = "fluxmesh.storage.sqlite"
_applied: list[str] = []


class MutantStale(Exception):
    """The code does not have the text any more that this mutant changes."""


class Edit(Struct, frozen=True):
    """`where`: "package.module:function" or "package.module:Class.method", "sql:file.name" or "lua:file"."""

    where: str
    old: str
    new: str


class Mutant(Struct, frozen=True):
    """`storage`: on which it is shown. `favours`: kinds of faults that bring it out; empty: all.
    `busy`: it takes many long jobs. `mesh`: it takes workers that steal from each other."""

    name: str
    storage: str
    breaks: str
    edits: tuple[Edit, ...]
    favours: tuple[str, ...] = ()
    busy: bool = False
    mesh: bool = False


_ACK_FIRST: Final = """\
        self._table.add(run)
        done = decide(job.task, ending.returned(None, 99), job.counters, plan.policy, self._rng)
        self._deliver(run, Settle(job.id, job.token, done))
"""

MUTANTS: Final = {
    mutant.name: mutant
    for mutant in (
        Mutant(
            "no_token_check",
            "redis",
            "the end of a run is taken from whoever reports one",
            (
                Edit("lua:exchange", "v[1] ~= '4' or v[2] ~= item[2] or v[3] ~= epoch or", "v[1] ~= '4' or"),
                Edit("lua:exchange", "if not r or r.token ~= tonumber(item[2]) then", "if not r then"),
                Edit("lua:exchange", "if r.place == 4 and r.lane == epoch then", "if r.place == 4 then"),
                Edit(
                    f"{_SQLITE}.exchange:_note_completed",
                    "row[1] != item.token or row[2] != place.RUNNING or row[3] != lane",
                    "row[2] != place.RUNNING",
                ),
                Edit(f"{_SQLITE}.exchange:settle", "row is None or row.token != item.token", "row is None"),
                Edit(
                    f"{_SQLITE}.exchange:settle",
                    "row.place == place.RUNNING and row.lane == lane",
                    "row.place == place.RUNNING",
                ),
            ),
            ("stop_child", "stop_group"),
        ),
        Mutant(
            "release_without_token",
            "redis",
            "a job is given back by whoever says so, whoever runs it by now",
            (
                Edit(
                    "lua:release",
                    "r and r.token == item[2] and r.lane == S.asking and (r.place == 3 or r.place == 4)",
                    "r and (r.place == 3 or r.place == 4)",
                ),
                Edit(
                    f"{_SQLITE}.ownership:release",
                    "row = owned_row(step, worker, job.id, job.token)",
                    "row = step.row(job.id)\n        row = row if row and row.place in (3, 4) else None",
                ),
            ),
            ("freeze_both",),
            busy=True,
        ),
        Mutant(
            "begin_by_anybody",
            "sqlite",
            "a held job is begun by whoever holds it in its own mind, whose it is by now",
            (
                Edit(
                    "lua:exchange",
                    "not r or r.token ~= item[2] or r.lane ~= epoch or (r.place ~= 3 and r.place ~= 4)",
                    "not r or (r.place ~= 3 and r.place ~= 4)",
                ),
                Edit(
                    f"{_SQLITE}.exchange:begin",
                    "row is None or row.token != item.token or row.lane != lane",
                    "row is None",
                ),
            ),
            mesh=True,
        ),
        Mutant(
            "reap_ignores_lease",
            "sqlite",
            "whoever owns jobs counts as dead",
            (
                Edit("lua:fleet", "me and armed and me.beat_at_us + me.lease_us < now", "me and armed"),
                Edit("sql:liveness.gone", "beat_at_us + lease_us < ?", "? > 0"),
            ),
        ),
        Mutant(
            "ack_before_run",
            "sqlite",
            "a job counts as completed when its body begins",
            (
                Edit(
                    "fluxmesh.worker.runner:Runner.admit",
                    "        self._table.add(run)\n        self._deadlines.watch(run.deadline)\n",
                    _ACK_FIRST + "        self._deadlines.watch(run.deadline)\n",
                ),
            ),
        ),
        Mutant(
            "double_promote",
            "redis",
            "what was promoted is promoted again, wherever it is by then",
            (
                Edit("lua:due", "call('ZREM', K.delayed(tier), unpack(gone))", "gone = {}"),
                Edit("lua:due", "if not v.err and v[1] and v[3] == '0' then", "if not v.err and v[1] then"),
            ),
        ),
        Mutant(
            "permit_kept_at_reap",
            "redis",
            "a dead owner's jobs keep their permits when they are taken back",
            (Edit("lua:reap", "local armed = arm()", "freed = function() end\nlocal armed = arm()"),),
            ("kill_child", "kill_group"),
        ),
        Mutant(
            "settle_not_repeatable",
            "redis",
            "an end that is reported again is taken as another end",
            (
                Edit(
                    "lua:exchange",
                    "v[1] ~= '4' or v[2] ~= item[2]",
                    "v[1] ~= '5' and v[1] ~= '4' or v[2] ~= item[2]",
                ),
                Edit(
                    "lua:exchange", "or v[3] ~= epoch or not (v[4]", "or v[3] and v[3] ~= epoch or not (v[4]"
                ),
                Edit(
                    "lua:exchange",
                    "if r.place == 4 and r.lane == epoch then",
                    "if r.place ~= 3 and (r.place ~= 4 or r.lane == epoch) then",
                ),
            ),
            ("replies_lost",),
        ),
        Mutant(
            "hand_back_before_body_ended",
            "sqlite",
            "a worker that is told to stop hands back at once what still runs",
            (
                Edit(
                    "fluxmesh.worker.worker:Worker._drain",
                    "        self._housekeeper.request_stop()\n",
                    "        self._housekeeper.request_stop()\n"
                    "        self._fetcher._release([run.job for run in self._table.bodies()], 'too soon')\n",
                ),
            ),
            ("term",),
            busy=True,
        ),
        Mutant(
            "lost_claim_reply",
            "redis",
            "jobs given in an answer that never arrives are forgotten",
            (
                Edit("lua:exchange", "running, held = given_before()", "running, held = nil, nil"),
                Edit("lua:beat", "if r then\n      give_back(r, token_after(r.token))\n    end", "r = nil"),
            ),
            ("replies_lost",),
        ),
        Mutant(
            "reap_right_after_outage",
            "redis",
            "after an outage leases count as lapsed that nobody could renew",
            (
                Edit("lua:fleet", "return now >= not_before_us", "return true"),
                Edit(
                    f"{_SQLITE}.liveness:arm",
                    'return step.boot_us >= int(_meta(step, "reap_not_before_us"))',
                    "return True",
                ),
                Edit(
                    f"{_SQLITE}.liveness:arm",
                    'step.run("liveness.restamp", step.boot_us, boot_id, boot_id, step.boot_us)',
                    "pass",
                ),
            ),
            ("late_back",),
            busy=True,
        ),
    )
}


def apply_named() -> None:
    """Become the mutant that the environment names; none is named: nothing."""
    name = os.environ.get(MUTANT_ENV)
    if name and name not in _applied:
        apply(MUTANTS[name])
        _applied.append(name)


def apply(mutant: Mutant) -> None:
    """Edit the code of this process. Raises MutantStale."""
    functions: dict[str, str] = {}
    for edit in mutant.edits:
        kind, found, rest = edit.where.partition(":")
        if kind == "sql":
            _edit_sql(rest, edit)
        elif kind == "lua":
            _edit_lua(rest, edit)
        elif found:
            functions[edit.where] = _replaced(functions.get(edit.where) or _source_of(edit.where), edit)
        else:
            raise MutantStale(f"{edit.where!r} names nothing")
    for where, source in functions.items():
        _define(where, source)


def _replaced(text: str, edit: Edit) -> str:
    if text.count(edit.old) != 1:
        raise MutantStale(f"{edit.where}: found {text.count(edit.old)} times, not once: {edit.old!r}")
    return text.replace(edit.old, edit.new)


# -- SQL and Lua -----------------------------------------------------------------------------------------
def _edit_sql(name: str, edit: Edit) -> None:
    from fluxmesh.storage.sqlite import sqltext

    texts = sqltext._texts()
    texts[name] = _replaced(texts[name], edit)


def _edit_lua(name: str, edit: Edit) -> None:
    from fluxmesh.storage.redis import assembly

    read: Callable[[str], str] = assembly._file
    _replaced(read(name), edit)  # now, not when a server is first met

    def edited(wanted: str) -> str:
        text = read(wanted)
        return _replaced(text, edit) if wanted == name else text

    assembly._file = edited
    assembly.script_text.cache_clear()


# -- Python ----------------------------------------------------------------------------------------------
def _home(where: str) -> tuple[Any, Any, str]:
    """The module, what holds the function (the module or a class of it), the function's name."""
    module_name, _, path = where.partition(":")
    module = importlib.import_module(module_name)
    *owners, name = path.split(".")
    holder = module
    for owner in owners:
        holder = getattr(holder, owner)
    return module, holder, name


def _source_of(where: str) -> str:
    _, holder, name = _home(where)
    source = inspect.getsource(getattr(holder, name))
    # A method keeps its indentation, under a line that makes it a block: texts of edits stay as they stand.
    return f"if True:\n{source}" if source.startswith(" ") else source


def _define(where: str, source: str) -> None:
    module, holder, name = _home(where)
    scope: dict[str, Any] = {}
    exec(compile(textwrap.dedent(source), f"<mutant of {where}>", "exec"), vars(module), scope)
    unknown = _globals_of(scope[name].__code__) - {*vars(module), *vars(builtins)}
    if unknown:
        raise MutantStale(f"{where}: the module knows no {sorted(unknown)}")
    setattr(holder, name, scope[name])


def _globals_of(code: CodeType) -> set[str]:
    """The global names that a function reads, with those of the functions inside it."""
    found = {one.argval for one in dis.get_instructions(code) if one.opname == "LOAD_GLOBAL"}
    return found.union(*(_globals_of(inner) for inner in code.co_consts if isinstance(inner, CodeType)))
