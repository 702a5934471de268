"""The suite that every storage backend must pass, split by verb family.

To bind a backend of your own, implement `Backend`, give it to pytest as the fixture `backend`, and import the
test classes; `pytest` does the rest:

    import pytest
    from fluxmesh.testing.contract import *  # noqa: F403  (the test classes)
    from fluxmesh.testing.contract import Backend, CorruptField

    class MyBackend(Backend):                # open, rows, corrupt, forget_worker: see their docstrings
        async def open(self, clock, *, namespace="fluxmesh", settings=None):
            return await open_my_storage(self.address, namespace, clock)
        ...

    @pytest.fixture
    def backend(tmp_path):                   # one empty storage for each test
        return MyBackend(tmp_path)

Each test is synchronous, runs its scenario with `asyncio.run` under a bound, and moves a `ManualClock` where
time matters: beside pytest it needs hypothesis, but no plugin for asyncio, and nothing sleeps to wait.
`FaultyStorage` loses replies on order. A new rule of the port lands here first.
"""

import pytest

_FAMILIES = (
    "enqueue", "exchange", "begin", "affinity", "settle", "limits", "ownership", "liveness", "reaping",
    "operators", "retention", "reads", "push", "mesh", "faults", "repetition", "machine",
)  # fmt: skip
# Before the modules are imported: their bare asserts shall explain themselves in the binder's run.
pytest.register_assert_rewrite(
    *(f"{__name__}.{name}" for name in (*_FAMILIES, "lab", "model", "scenes", "stage"))
)

from fluxmesh.testing.contract.affinity import (  # noqa: E402
    TestOwnFirst,
    TestStrictly,
    TestTellingOfAffinity,
    TestWakingTheOwner,
)
from fluxmesh.testing.contract.begin import TestBegin, TestSlotAndHops, TestSlotsLeft  # noqa: E402
from fluxmesh.testing.contract.enqueue import (  # noqa: E402
    TestEnqueue,
    TestIdempotencyKeys,
    TestOpaqueRecords,
    TestUniqueKeys,
)
from fluxmesh.testing.contract.exchange import TestClaim, TestStanding  # noqa: E402
from fluxmesh.testing.contract.faults import (  # noqa: E402
    TestClosedStorage,
    TestDeathBetweenVerbs,
    TestLostReplies,
)
from fluxmesh.testing.contract.faulty import FaultyStorage  # noqa: E402
from fluxmesh.testing.contract.harness import Backend, CorruptField  # noqa: E402
from fluxmesh.testing.contract.limits import (  # noqa: E402
    TestConcurrencyKey,
    TestExpiry,
    TestMaxConcurrent,
    TestParking,
    TestPausedQueues,
    TestRateLimit,
)
from fluxmesh.testing.contract.liveness import (  # noqa: E402
    TestBeats,
    TestLostClaims,
    TestOrphans,
)
from fluxmesh.testing.contract.machine import TestRandomVerbs  # noqa: E402
from fluxmesh.testing.contract.mesh import TestMeshViews  # noqa: E402
from fluxmesh.testing.contract.operators import (  # noqa: E402
    TestBatches,
    TestCancel,
    TestDiscard,
    TestReplay,
    TestReprioritise,
)
from fluxmesh.testing.contract.ownership import (  # noqa: E402
    TestProgress,
    TestRelease,
    TestTakeHeld,
    TestTransfer,
)
from fluxmesh.testing.contract.push import (  # noqa: E402
    TestEvents,
    TestLeader,
    TestNotices,
    TestWaitFor,
    TestWakeUps,
)
from fluxmesh.testing.contract.reads import (  # noqa: E402
    TestCounts,
    TestDeadLetterGroups,
    TestFind,
    TestFleet,
    TestGet,
    TestHistory,
    TestInfo,
)
from fluxmesh.testing.contract.reaping import TestArming, TestReaping, TestTending  # noqa: E402
from fluxmesh.testing.contract.repetition import TestRepetition  # noqa: E402
from fluxmesh.testing.contract.retention import TestRetention  # noqa: E402
from fluxmesh.testing.contract.settle import TestRequests, TestSettle  # noqa: E402

__all__ = [
    "Backend",
    "CorruptField",
    "FaultyStorage",
    "TestArming",
    "TestBatches",
    "TestBeats",
    "TestBegin",
    "TestCancel",
    "TestClaim",
    "TestClosedStorage",
    "TestConcurrencyKey",
    "TestCounts",
    "TestDeadLetterGroups",
    "TestDeathBetweenVerbs",
    "TestDiscard",
    "TestEnqueue",
    "TestEvents",
    "TestExpiry",
    "TestFind",
    "TestFleet",
    "TestGet",
    "TestHistory",
    "TestIdempotencyKeys",
    "TestInfo",
    "TestLeader",
    "TestLostClaims",
    "TestLostReplies",
    "TestMaxConcurrent",
    "TestMeshViews",
    "TestNotices",
    "TestOpaqueRecords",
    "TestOrphans",
    "TestOwnFirst",
    "TestParking",
    "TestPausedQueues",
    "TestProgress",
    "TestRandomVerbs",
    "TestRateLimit",
    "TestReaping",
    "TestRelease",
    "TestRepetition",
    "TestReplay",
    "TestReprioritise",
    "TestRequests",
    "TestRetention",
    "TestSettle",
    "TestSlotAndHops",
    "TestSlotsLeft",
    "TestStanding",
    "TestStrictly",
    "TestTakeHeld",
    "TestTellingOfAffinity",
    "TestTending",
    "TestTransfer",
    "TestUniqueKeys",
    "TestWaitFor",
    "TestWakeUps",
    "TestWakingTheOwner",
]
