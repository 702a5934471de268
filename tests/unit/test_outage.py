"""How long a waiter bears with a storage that is away."""

from __future__ import annotations

import pytest

from fluxmesh.clock import MonoS
from fluxmesh.errors import OutcomeUnknown, StorageUnreachable
from fluxmesh.outage import BEAR_S, Outage

AWAY = StorageUnreachable("nobody answers")


def test_the_first_failure_begins_an_outage_and_pauses_grow() -> None:
    outage = Outage()
    pauses = [outage.bear(AWAY, MonoS(now), None) for now in (0.0, 0.1, 0.3, 0.7)]
    assert pauses == sorted(pauses)
    assert pauses[0] < pauses[-1] <= 1.0


def test_it_is_borne_for_half_a_minute_and_then_told() -> None:
    outage = Outage()
    outage.bear(AWAY, MonoS(5.0), None)
    assert outage.began
    outage.bear(OutcomeUnknown("no reply"), MonoS(5.0 + BEAR_S - 0.01), None)
    assert not outage.began
    with pytest.raises(StorageUnreachable, match="nobody answers"):
        outage.bear(AWAY, MonoS(5.0 + BEAR_S), None)


def test_an_answer_ends_the_outage() -> None:
    outage = Outage()
    outage.bear(AWAY, MonoS(0.0), None)
    outage.answered()
    assert outage.bear(AWAY, MonoS(BEAR_S), None) > 0
    assert outage.began


def test_nobody_waits_beyond_his_own_time() -> None:
    outage = Outage()
    assert outage.bear(AWAY, MonoS(0.95), MonoS(1.0)) == pytest.approx(0.05)
    with pytest.raises(StorageUnreachable):
        outage.bear(AWAY, MonoS(1.0), MonoS(1.0))
