"""Every verb that changes something, its reply lost once, and repeated: nothing more happens."""

from __future__ import annotations

from typing import Final

import pytest

from fluxmesh.errors import OutcomeUnknown
from fluxmesh.storage.base import Storage
from fluxmesh.testing.contract.faulty import FaultyStorage
from fluxmesh.testing.contract.lab import Lab, scenario
from fluxmesh.testing.contract.scenes import SCENES, VERB_OF
from fluxmesh.testing.contract.walk import walked_counts

# The verbs of the port: those that change something, and so must bear to be repeated, and the others.
CHANGE: Final = frozenset(
    {
        "enqueue", "register", "exchange", "release", "transfer", "take_held", "progress", "beat",
        "declare_dead", "orphans", "reap", "command", "lead", "promote", "tend", "prune", "cancel", "replay",
        "discard", "reprioritise", "pause", "resume",
    }
)  # fmt: skip
CHANGE_NOTHING: Final = frozenset(
    {
        "wait_for", "wait_for_work", "wait_for_notice", "get", "history", "find", "counts", "queue_stats",
        "dlq_groups", "fleet", "mesh_views", "info", "publish", "subscribe", "close",
    }
)  # fmt: skip


# Verbs and scenes after which every job looks as before.
LEAVE_JOBS_ALONE: Final = frozenset(
    {"register", "declare_dead", "orphans", "command", "lead", "resume", "beat_of_a_forgotten_worker"}
)


async def told(lab: Lab, storage: Storage) -> list[tuple[object, ...]]:
    """Every job as it is, without instants and tokens; counts that agree with them."""
    jobs = await lab.everything()
    counts = await storage.counts()
    queued = {place: n for place, n in counts.queued.items() if n}
    by_status = {status: n for status, n in counts.by_status.items() if n}
    assert (by_status, queued, counts.failed) == walked_counts(jobs)
    return [
        (
            job.id, job.status, job.priority, job.attempts, job.crashes, job.life, job.cancel_requested,
            job.progress, job.worker_id,
        )
        for job in jobs
    ]  # fmt: skip


def leaves_jobs_alone(name: str) -> bool:
    return bool({name, VERB_OF[name]} & LEAVE_JOBS_ALONE)


class TestRepetition:
    def test_every_verb_of_the_port_that_changes_something_has_a_scene(self) -> None:
        """So that a verb added to the port cannot be forgotten."""
        assert {name for name in vars(Storage) if not name.startswith("_")} == CHANGE | CHANGE_NOTHING
        assert set(VERB_OF.values()) == CHANGE

    @pytest.mark.parametrize("name", sorted(SCENES))
    @scenario
    async def test_a_verb_whose_reply_was_lost_changes_nothing_more_when_it_is_repeated(
        self, lab: Lab, name: str
    ) -> None:
        storage = lab.storage
        faults = FaultyStorage(storage)
        act = await SCENES[name](lab)
        before = await told(lab, storage)
        lab.storage = faults.as_storage()
        faults.lose_replies(VERB_OF[name])
        with pytest.raises(OutcomeUnknown):
            await act()
        assert faults.is_spent
        lab.storage = storage
        once = await told(lab, storage)
        assert (once == before) == leaves_jobs_alone(name)
        await act()
        assert await told(lab, storage) == once
