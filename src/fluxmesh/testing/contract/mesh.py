"""What workers tell of the mesh: kept beside them, and gone with them."""

from __future__ import annotations

from fluxmesh.storage.values import MESH_VIEW_BYTES, PROCESS_GONE, Retention
from fluxmesh.testing.contract.lab import LEASE_S, Lab, Puppet, scenario

VIEW = b'{"members": "\x00\xff"}'
A_DAY_S = 86_400.0


async def told(lab: Lab) -> list[tuple[str, bytes]]:
    return [(view.worker_id, view.view) for view in await lab.storage.mesh_views()]


async def worker_with_view(lab: Lab, name: str = "w1", view: bytes = VIEW) -> Puppet:
    worker = await lab.worker(name)
    await worker.beat_listing([], mesh=view)
    return worker


class TestMeshViews:
    @scenario
    async def test_a_view_is_kept_as_it_was_told_with_the_storages_time(self, lab: Lab) -> None:
        worker = await lab.worker("w1")
        assert await lab.storage.mesh_views() == []
        lab.clock.advance(1.25)
        await worker.beat_listing([], mesh=VIEW)
        (view,) = await lab.storage.mesh_views()
        assert (view.worker_id, view.epoch, view.view) == ("w1", worker.ref.epoch, VIEW)
        assert view.told_at == lab.clock.wall_us() / 1e6

    @scenario
    async def test_a_beat_that_tells_nothing_leaves_what_was_told(self, lab: Lab) -> None:
        worker = await worker_with_view(lab)
        await worker.beat()
        await worker.beat_listing(None)
        assert await told(lab) == [("w1", VIEW)]

    @scenario
    async def test_a_new_view_replaces_the_old_one_and_an_empty_one_removes_it(self, lab: Lab) -> None:
        worker = await worker_with_view(lab)
        await worker.beat_listing([], mesh=b"2")
        assert await told(lab) == [("w1", b"2")]
        await worker.beat_listing([], mesh=b"")
        assert await told(lab) == []

    @scenario
    async def test_a_view_may_have_the_size_of_the_bound_and_not_a_byte_more(self, lab: Lab) -> None:
        worker = await worker_with_view(lab, view=b"x" * MESH_VIEW_BYTES)
        assert await told(lab) == [("w1", b"x" * MESH_VIEW_BYTES)]
        await worker.beat_listing([], mesh=b"x" * (MESH_VIEW_BYTES + 1))
        assert await told(lab) == []

    @scenario
    async def test_views_come_in_the_order_of_the_registrations(self, lab: Lab) -> None:
        for name in ("w2", "w1", "w3"):
            await worker_with_view(lab, name, name.encode())
        assert await told(lab) == [("w2", b"w2"), ("w1", b"w1"), ("w3", b"w3")]

    @scenario
    async def test_a_worker_that_has_left_has_no_view(self, lab: Lab) -> None:
        worker = await worker_with_view(lab)
        await lab.storage.declare_dead(worker.ref, "left")
        assert await told(lab) == []

    @scenario
    async def test_a_worker_whose_death_is_proven_has_no_view_although_it_owns_jobs(self, lab: Lab) -> None:
        await lab.put()
        worker = await worker_with_view(lab)
        await worker.claim_one()
        await lab.storage.declare_dead(worker.ref, PROCESS_GONE)
        assert await told(lab) == []

    @scenario
    async def test_a_newer_run_of_the_id_takes_the_view_of_the_older_away_for_good(self, lab: Lab) -> None:
        older = await worker_with_view(lab)
        newer = await lab.worker("w1")
        assert await told(lab) == []
        await older.beat_listing([], mesh=VIEW)
        assert await told(lab) == []
        await newer.beat_listing([], mesh=b"new")
        assert await told(lab) == [("w1", b"new")]

    @scenario
    async def test_a_row_that_a_beat_puts_back_may_bring_its_view(self, lab: Lab) -> None:
        worker = await worker_with_view(lab)
        lab.backend.forget_worker(worker.ref)
        assert await told(lab) == []
        await worker.beat_listing([], mesh=VIEW)
        assert await told(lab) == [("w1", VIEW)]

    @scenario
    async def test_views_of_workers_long_gone_are_pruned_with_them(self, lab: Lab) -> None:
        await worker_with_view(lab)
        survivor = await worker_with_view(lab, "survivor", b"s")
        lab.clock.advance(A_DAY_S)
        await survivor.beat()
        lab.clock.advance(LEASE_S)
        await survivor.beat()
        retention = Retention(A_DAY_S, A_DAY_S, A_DAY_S, worker_ttl_s=60.0)
        await lab.storage.prune(retention, 100)
        assert await told(lab) == [("survivor", b"s")]
