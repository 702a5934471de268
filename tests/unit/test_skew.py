"""A wrong clock is told of, once; what lies within the time that an answer took is no wrong clock."""

from __future__ import annotations

import pytest

from fluxmesh.clock import US, WallUs
from fluxmesh.worker.skew import SkewWatch, skew_s
from tests.service.log_tap import tapped


@pytest.mark.parametrize(
    ("sent_s", "received_s", "storage_s", "expected_s"),
    [
        (100, 101, 100.5, 0.0),
        (100, 101, 100, 0.0),
        (100, 101, 101, 0.0),
        (100, 130, 101, 0.0),  # an answer that took long says little
        (100, 101, 98, 2.0),
        (100, 101, 103.5, -2.5),
        (3_700, 3_700, 100, 3_600.0),
        (3_700, 3_700, 7_300, -3_600.0),
    ],
)
def test_a_clock_is_only_as_wrong_as_can_be_known(
    sent_s: float, received_s: float, storage_s: float, expected_s: float
) -> None:
    sent, received = WallUs(round(sent_s * US)), WallUs(round(received_s * US))
    assert skew_s(sent, received, round(storage_s * US)) == expected_s


def test_it_is_told_once_and_again_when_it_was_right_meanwhile() -> None:
    watch = SkewWatch("w1")
    with tapped() as tap:
        for ahead_s in (0, 0.9, 1.1, 3_600, 3_600, 0.5, -2):
            watch.look(WallUs(round((100 + ahead_s) * US)), WallUs(round((100 + ahead_s) * US)), 100 * US)
    assert [event["ahead_s"] for event in tap.found("clock differs from the storage's")] == [1.1, -2.0]
    assert len(tap.found("clock agrees with the storage's again")) == 1
