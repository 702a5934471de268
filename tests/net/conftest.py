"""Collected by `make net` alone: these tests make network namespaces, which takes root."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.net.network import Network, lacking

WANTED = "FLUXMESH_TEST_NET"

if not os.environ.get(WANTED):
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(scope="session", autouse=True)
def _able() -> None:
    why = lacking()
    if why:
        pytest.fail(f"the network of the tests cannot be made: {why}")


@pytest.fixture
def network() -> Iterator[Network]:
    with Network(6) as made:
        yield made
