"""A server's refusals, in the words of several versions, and what each means for the caller."""

from __future__ import annotations

import pytest
from redis._parsers.base import BaseParser

from fluxmesh import Queue
from fluxmesh.errors import InvalidOption, StorageRefused, StorageUnreachable
from fluxmesh.storage.redis.refusals import ELSEWHERE, is_full, refusal, word_of


def said(line: str) -> Exception:
    """As the driver makes an error of a line: it cuts the first word off those that it knows."""
    error = BaseParser.parse_error(line)
    assert isinstance(error, Exception)
    return error


OLD = "ERR Error running script (call to f_4401): @user_script:73: @user_script: 73: -{}"


@pytest.mark.parametrize(
    ("line", "word"),
    [
        ("READONLY You can't write against a read only replica.", "READONLY"),
        (OLD.format("READONLY You can't write against a read only replica."), "READONLY"),
        ("OOM command not allowed when used memory > 'maxmemory'.", "OOM"),
        (OLD.format("OOM command not allowed when used memory > 'maxmemory'."), "OOM"),
        (OLD.format("NOREPLICAS Not enough good replicas to write."), "NOREPLICAS"),
        ("MOVED 3999 127.0.0.1:6381", "MOVED"),
        ("ASK 3999 127.0.0.1:6381", "ASK"),
        ("CLUSTERDOWN The cluster is down", "CLUSTERDOWN"),
        ("TRYAGAIN Multiple keys request during rehashing of slot", "TRYAGAIN"),
        ("MASTERDOWN Link with MASTER is down and replica-serve-stale-data is set to 'no'.", "MASTERDOWN"),
        ("LOADING Redis is loading the dataset in memory", "LOADING"),
        ("BUSY Redis is busy running a script.", "BUSY"),
        ("MISCONF Redis is configured to save RDB snapshots", "MISCONF"),
    ],
)
def test_what_may_be_over_soon_has_done_nothing(line: str, word: str) -> None:
    error = said(line)
    assert word_of(error) == word
    told = refusal("redis://h", error)
    assert isinstance(told, StorageUnreachable)
    assert word in told.message
    assert told.hint


def test_only_a_server_that_is_not_in_charge_sends_us_elsewhere() -> None:
    assert {"MOVED", "READONLY"} == ELSEWHERE


@pytest.mark.parametrize(
    "line",
    [
        "ERR unknown command 'FOO'",
        "WRONGTYPE Operation against a key holding the wrong kind of value",
        "NOPERM this user has no permissions to run the 'evalsha' command",
        "WRONGPASS invalid username-password pair or user is disabled.",
        "NOAUTH Authentication required.",
        OLD.format("WRONGTYPE Operation against a key"),
        "ERR user_script:3: attempt to index a nil value",
    ],
)
def test_what_somebody_has_to_mend_is_refused(line: str) -> None:
    assert isinstance(refusal("redis://h", said(line)), StorageRefused)


def test_a_client_too_many_was_not_heard() -> None:
    error = said("ERR max number of clients reached")
    assert is_full(error)
    assert isinstance(refusal("redis://h", error), StorageUnreachable)


@pytest.mark.parametrize("answer", [b"READONLY", 3, None, [b"OOM x"]])
def test_other_answers_are_no_refusals(answer: object) -> None:
    assert word_of(answer) == ""


@pytest.mark.parametrize(
    "url", ["redis://127.0.0.1:1/0", "memory://power", "redis+sentinel://127.0.0.1:1/a/0"]
)
def test_power_is_not_promised_by_what_cannot_keep_it(url: str) -> None:
    with pytest.raises(InvalidOption, match="'power' is a promise of SQLite"):
        Queue(url, durability="power")
