"""The contract suite, bound to a cluster of one node. Run by its name (docs/testing.md)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest

from fluxmesh.storage.values import WorkerRef
from fluxmesh.testing.contract import *  # noqa: F403
from fluxmesh.testing.contract import CorruptField
from tests.contract.test_redis import _ELEMENTS, RedisBackend
from tests.redis_fleet import Cluster

pytestmark = pytest.mark.slow


class ClusterBackend(RedisBackend):
    """The same keys behind a hash tag."""

    def rows(self, namespace: str = "fluxmesh") -> dict[str, int]:
        found: Counter[str] = Counter()
        for name in self.client.scan_iter(f"{{{namespace}}}:*", count=1_000):
            kind = name.decode().split(":")[1]
            count = _ELEMENTS.get(self.client.type(name))
            is_record = kind in ("jobs", "worker", "idempotency")
            found[kind] += 1 if is_record or count is None else self.client.execute_command(count, name)
        return dict(found)

    def corrupt(self, job_id: str, field: CorruptField, blob: bytes, namespace: str = "fluxmesh") -> None:
        super().corrupt(job_id, field, blob, f"{{{namespace}}}")

    def forget_worker(self, worker: WorkerRef, namespace: str = "fluxmesh") -> None:
        super().forget_worker(worker, f"{{{namespace}}}")


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path_factory.mktemp("cluster"))
    yield cluster
    cluster.stop()


@pytest.fixture
def backend(cluster: Cluster) -> Iterator[ClusterBackend]:
    backend = ClusterBackend(cluster.nodes[0], 0)
    yield backend
    backend.client.close()
