"""Redis: scripts that fail in the middle, requests and answers that are lost, memory that is full.

No job is lost or done by half, and the verb can be repeated. A script is not rolled back: what one has
begun it carries through.
"""

from __future__ import annotations

import contextlib
import hashlib
from typing import Final

import pytest

from fluxmesh.config import Settings
from fluxmesh.errors import OutcomeUnknown, StorageError, StorageUnreachable
from fluxmesh.storage.redis.backend import RedisStorage
from fluxmesh.storage.redis.scripts import Scripts
from fluxmesh.storage.registry import open_storage
from fluxmesh.testing.contract.lab import Lab, scenario
from fluxmesh.testing.contract.scenes import SCENES, VERB_OF
from tests.contract.cutting import cutting
from tests.contract.redis_walk import Keys, faults, lost, miscounts, restore, snapshot
from tests.contract.test_redis import RedisBackend, backend, redis_server  # noqa: F401

# Stands in for `local call = redis.call`: the write whose number is stored fails, and each is noted.
_CALL: Final = "local call = redis.call\n"
_FAULTY: Final = """
local call = (function()
  local at, n = tonumber(redis.call('GET', 'fault') or 0), 0
  local reads = {HGET = 1, HMGET = 1, HGETALL = 1, HEXISTS = 1, HKEYS = 1, ZRANGE = 1, ZRANGEBYSCORE = 1,
    EXISTS = 1, GET = 1, SMEMBERS = 1, TIME = 1, ZCARD = 1, ZSCORE = 1, TYPE = 1, PUBLISH = 1, SISMEMBER = 1,
    HLEN = 1, SCARD = 1, PUBSUB = 1}
  return function(name, key, ...)
    if not reads[name] then
      n = n + 1
      redis.call('RPUSH', 'written', name .. ' ' .. key)
      if n == at then
        error('an ordered fault')
      end
    end
    return redis.call(name, key, ...)
  end
end)()
"""


@pytest.fixture
def failing_scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every script fails at the write that the key `fault` names."""
    real = Scripts._text

    def text(self: Scripts, verb: str) -> tuple[str, str]:
        script, _ = real(self, verb)
        assert script.count(_CALL) == 1
        script = script.replace(_CALL, _FAULTY)
        return script, hashlib.sha1(script.encode()).hexdigest()

    monkeypatch.setattr(Scripts, "_text", text)


TOLD: Final = ("place", "tier", "attempts", "crashes", "life", "cancel", "percent", "reason")


def outcome(keys: Keys) -> dict[str, list[str]]:
    """What a verb did to each job, without its instants. What is not stored is 0."""
    return {job_id: [job.get(name, "0") for name in TOLD] for job_id, job in keys.jobs.items()}


class TestFailingScripts:
    @pytest.mark.usefixtures("failing_scripts")
    @pytest.mark.parametrize("name", sorted(SCENES))
    @scenario
    async def test_a_verb_that_failed_at_any_write_loses_nothing_and_can_be_repeated(
        self, lab: Lab, name: str
    ) -> None:
        assert isinstance(lab.backend, RedisBackend)
        client = lab.backend.client
        act = await SCENES[name](lab)
        client.delete("written")
        before = snapshot(client)
        await act()
        writes = [line.decode() for line in client.lrange("written", 0, -1)]
        client.delete("written")
        assert writes, "the scene writes nothing"
        keys = Keys(client)
        assert faults(keys) == []
        right = outcome(keys)
        wrong: list[str] = []
        for at, write in enumerate(writes, 1):
            restore(client, before)
            client.set("fault", at)
            with pytest.raises(StorageError, match="an ordered fault"):
                await act()
            client.delete("fault", "written")
            keys = Keys(client)
            broken = [f"afterwards: {fault}" for fault in (*lost(keys), *miscounts(keys))]
            await act()
            client.delete("written")
            keys = Keys(client)
            broken += [f"repeated: {fault}" for fault in faults(keys)]
            if outcome(keys) != right:
                broken.append(f"repeated: {outcome(keys)} and not {right}")
            wrong += [f"{at} {write}: {fault}" for fault in broken]
        assert not wrong, "\n".join(wrong)

    @pytest.mark.usefixtures("failing_scripts")
    @pytest.mark.parametrize("name", sorted(SCENES))
    @scenario
    async def test_a_key_of_another_type_takes_no_job_with_it(self, lab: Lab, name: str) -> None:
        """What a verb could not write for the sake of one key, it has written to all the others."""
        assert isinstance(lab.backend, RedisBackend)
        client = lab.backend.client
        act = await SCENES[name](lab)
        client.delete("written")
        before = snapshot(client)
        await act()
        written = {line.split(b" ", 1)[1] for line in client.lrange("written", 0, -1)}
        wrong: list[str] = []
        for key in sorted(key for key in written if not key.startswith(b"fluxmesh:jobs:")):
            restore(client, before)
            client.delete(key)
            if key.startswith(b"fluxmesh:unique:"):
                client.hset(key, "another", "type")
            else:
                client.set(key, "another type")
            with contextlib.suppress(StorageError):
                await act()
            client.delete(key, "written")
            keys = Keys(client)
            name_ = key.decode().removeprefix("fluxmesh:")
            broken = [fault for fault in lost(keys) if name_ not in fault]
            broken += [fault for fault in miscounts(keys) if name_ not in ("tally", "running", "counters")]
            wrong += [f"{name_}: {fault}" for fault in broken]
        assert not wrong, "\n".join(wrong)


class TestCutConnections:
    @pytest.mark.parametrize("name", sorted(SCENES))
    @scenario
    async def test_a_verb_cut_off_before_it_was_heard_or_after_it_was_done_is_repeated(
        self, lab: Lab, name: str
    ) -> None:
        assert isinstance(lab.backend, RedisBackend)
        client, straight = lab.backend.client, lab.storage
        act = await SCENES[name](lab)
        before, untouched = snapshot(client), vars(Keys(client))
        await act()
        right = outcome(Keys(client))
        server, _, database = lab.backend.url.rpartition("/")
        async with cutting(int(server.rpartition(":")[2])) as cut:
            url = f"redis://127.0.0.1:{cut.port}/{database}"
            lab.storage = await open_storage(url, Settings(), create=True, clock=lab.clock)
            try:
                restore(client, before)
                cut.armed = "before"
                with pytest.raises(OutcomeUnknown):
                    await act()
                assert vars(Keys(client)) == untouched, "nobody has heard of it"
                cut.armed = "after"
                with pytest.raises(OutcomeUnknown):
                    await act()
                assert outcome(Keys(client)) == right, "it was done"
                await act()
                assert (cut.cuts, outcome(Keys(client)), faults(Keys(client))) == (2, right, [])
            finally:
                await lab.storage.close()
                lab.storage = straight


REFUSED_WHEN_MEMORY_IS_FULL: Final = {"enqueue", "replay"}


class TestFullMemory:
    @pytest.mark.parametrize("name", sorted(SCENES))
    @scenario
    async def test_only_what_takes_work_in_is_refused(self, lab: Lab, name: str) -> None:
        answer = await full_memory(lab, name)
        assert (answer is not None) == (VERB_OF[name] in REFUSED_WHEN_MEMORY_IS_FULL)

    @pytest.mark.parametrize("name", sorted(SCENES))
    @scenario
    async def test_of_a_server_that_knows_no_exceptions_too_nothing_is_done_by_half(
        self, lab: Lab, name: str
    ) -> None:
        """Redis 6.2: a script is refused at its first write."""
        assert isinstance(lab.storage, RedisStorage)
        lab.storage._connections.knows_flags = False
        await full_memory(lab, name)


async def full_memory(lab: Lab, name: str) -> StorageError | None:
    """Play it with full memory: it is done, or refused and then nothing of it was done."""
    assert isinstance(lab.backend, RedisBackend)
    client, refusal = lab.backend.client, None
    act = await SCENES[name](lab)
    before, untouched = snapshot(client), vars(Keys(client))
    await act()
    right = outcome(Keys(client))
    restore(client, before)
    client.config_set("maxmemory", 1)
    try:
        await act()
        assert outcome(Keys(client)) == right
    except StorageUnreachable as error:
        refusal = error
    finally:
        client.config_set("maxmemory", 0)
    if refusal is not None:
        assert "memory" in str(refusal)
        assert vars(Keys(client)) == untouched
    await act()
    assert (outcome(Keys(client)), faults(Keys(client))) == (right, [])
    return refusal
