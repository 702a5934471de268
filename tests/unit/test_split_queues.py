"""What a worker's list of names means: queues, or tiers of the default queue, never both."""

from __future__ import annotations

import pytest

from fluxmesh.errors import InvalidOption
from fluxmesh.submission import split_queues

ALL = (0, 1, 2, 3)


@pytest.mark.parametrize(
    ("names", "queues", "tiers"),
    [
        (["critical", "high", "default", "low"], ("default",), ALL),
        (["low", "critical"], ("default",), (0, 3)),
        (["high"], ("default",), (1,)),
        (["default"], ("default",), ALL),
        (["default", "mail"], ("default", "mail"), ALL),
        (("mail", "sms", "mail"), ("mail", "sms"), ALL),
        (["high", "high"], ("default",), (1,)),
    ],
)
def test_a_list_names_queues_or_tiers(
    names: list[str], queues: tuple[str, ...], tiers: tuple[int, ...]
) -> None:
    assert split_queues(names) == (queues, tiers)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["critical", "mail"], "'critical' is a tier and 'mail' is a queue"),
        (["mail", "default", "low"], "'low' is a tier and 'mail' is a queue"),
        ([], "empty"),
        ("default", "not a list"),
        (["a:b"], "colon"),
        ([""], "empty"),
        ([7], "int is not text"),
    ],
)
def test_a_mixture_and_anything_else_is_refused(names: list[str], message: str) -> None:
    with pytest.raises(InvalidOption, match=message):
        split_queues(names)
