"""/api/v1/mesh over real HTTP, and the client's verbs for it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from fluxmesh.client import Client
from fluxmesh.errors import InvalidOption, NotInMesh
from fluxmesh.peers import Observation, OwnerView, RingView, Totals
from tests.api.serving import Api, problem, served
from tests.mesh.told import member, tell

COUNTERS = {
    "a": {
        "jobs_stolen_in": 4,
        "steals_initiated": 3,
        "steals_succeeded": 2,
        "steals_failed": 1,
        "affinity_hits": 9,
        "buffered": 7,
    },
    "b": {
        "jobs_stolen_out": 4,
        "jobs_taken_held": 1,
        "affinity_misses": 2,
        "steal_requests": 3,
        "steals_refused": 2,
    },
}
TOTALS = {
    "workers": 2,
    "buffered": 7,
    "jobs_stolen_in": 4,
    "jobs_stolen_out": 4,
    "steals_initiated": 3,
    "steals_succeeded": 2,
    "steals_empty": 0,
    "steals_lost": 0,
    "steals_dropped": 0,
    "steals_failed": 1,
    "steal_requests": 3,
    "steals_refused": 2,
    "jobs_taken_held": 1,
    "affinity_hits": 9,
    "affinity_misses": 2,
}


@pytest.fixture(scope="module")
def meshed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    with served(tmp_path_factory.mktemp("mesh") / "jobs.db") as api:
        mail = member("c", queues=("mail",))
        views = {name: (member("a"), member("b"), mail) for name in ("a", "b")}
        api.run(tell(api.storage, views, COUNTERS))
        yield api


def test_members_are_shown_as_each_worker_sees_them(meshed: Api) -> None:
    document = meshed.client.get("/api/v1/mesh").json()
    assert document["next_cursor"] is None
    assert [item["worker_id"] for item in document["items"]] == ["a", "b"]
    assert [one["worker_id"] for one in document["items"][0]["members"]] == ["a", "b", "c"]
    wanted = {"standing": "alive", "in_ring": True, "running": 3, "flags": ["ready"], "queues": ["default"]}
    first = document["items"][0]["members"][0]
    assert {name: first[name] for name in wanted} == wanted


def test_each_worker_tells_what_it_did_and_all_of_it_is_summed(meshed: Api) -> None:
    document = meshed.client.get("/api/v1/mesh").json()
    a, b = document["items"]
    assert (a["counters"], a["buffered"], a["adaptive_prefetch"]) == (COUNTERS["a"], 7, 5)
    assert (b["jobs_stolen_in"], b["jobs_stolen_out"], b["buffered"]) == (0, 4, 0)
    assert document["totals"] == TOTALS


def test_rings_are_shown_by_queue(meshed: Api) -> None:
    items = meshed.client.get("/api/v1/mesh/ring").json()["items"]
    assert [(item["queue"], [one["worker_id"] for one in item["members"]]) for item in items] == [
        ("default", ["a", "b"]),
        ("mail", ["c"]),
    ]
    (mail,) = meshed.client.get("/api/v1/mesh/ring?queue=mail").json()["items"]
    assert mail == items[1]
    assert mail["members"][0]["share"] == 1.0


def test_a_key_has_an_owner_by_queue(meshed: Api) -> None:
    document = meshed.client.get("/api/v1/mesh/owner", params={"key": "tenant-7"}).json()
    assert document["owner"] in {"a", "b"}
    assert (document["queue"], document["agreed"], document["seen_by"]) == ("default", True, ["a", "b"])
    mail = meshed.client.get("/api/v1/mesh/owner", params={"key": "tenant-7", "queue": "mail"}).json()
    assert mail["owner"] == "c"


def test_what_cannot_be_answered_is_a_problem(meshed: Api) -> None:
    problem(meshed.client.get("/api/v1/mesh/owner"), 422, "key")
    problem(meshed.client.get("/api/v1/mesh/owner?key="), 422, "key")
    problem(meshed.client.get("/api/v1/mesh/ring?queue=a%7Bb"), 422, "queue")
    problem(meshed.client.get("/api/v1/mesh?queue=a"), 422, "queue")
    response = meshed.client.get("/api/v1/mesh/owner?key=k&queue=nobodys")
    assert (response.status_code, response.json()["code"]) == (404, "not_in_mesh")


def test_without_a_mesh_lists_are_empty(tmp_path: Path) -> None:
    with served(tmp_path / "jobs.db") as api:
        nothing = {"items": [], "next_cursor": None}
        assert api.client.get("/api/v1/mesh/ring").json() == nothing
        assert api.client.get("/api/v1/mesh").json() == nothing | {"totals": dict.fromkeys(TOTALS, 0)}


def test_the_client_gets_values(meshed: Api) -> None:
    with Client(str(meshed.client.base_url)) as client:
        seen = client.mesh()
        assert all(isinstance(one, Observation) for one in seen)
        assert seen[0].members[0] == member("a")
        assert client.mesh_totals() == Totals(**TOTALS)
        told = client.mesh_rings("default")
        assert isinstance(told[0], RingView)
        owner = client.mesh_owner("tenant-7")
        assert isinstance(owner, OwnerView)
        assert owner.owner in {"a", "b"}
        with pytest.raises(NotInMesh):
            client.mesh_owner("k", queue="nobodys")
        with pytest.raises(InvalidOption):
            client.mesh_owner("")
