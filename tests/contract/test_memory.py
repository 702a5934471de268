"""The contract suite, bound to memory://: one server in this process per test."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
from fakeredis import FakeStrictRedis

from fluxmesh.storage.redis import memory
from fluxmesh.testing.contract import *  # noqa: F403
from fluxmesh.testing.contract.machine import play
from tests.contract.test_redis import RedisBackend

_names = itertools.count()


class MemoryBackend(RedisBackend):
    def __init__(self, name: str) -> None:
        self.url = f"memory://{name}"
        self.client = FakeStrictRedis(server=memory.server_of(name))


class TestRandomVerbs:
    """Fewer than elsewhere: Lua in Lua's own msgpack, called from Python, is slow."""

    def test_random_verbs_agree_with_a_brute_force_walk_and_a_simple_model(
        self, backend: MemoryBackend
    ) -> None:
        play(backend, examples=4, steps=40)

    @pytest.mark.slow
    def test_many_more_random_verbs_agree(self, backend: MemoryBackend) -> None:
        play(backend, examples=60, steps=60)


@pytest.fixture
def backend() -> Iterator[MemoryBackend]:
    backend = MemoryBackend(f"contract{next(_names)}")
    yield backend
    backend.client.close()
