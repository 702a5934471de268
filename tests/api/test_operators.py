"""Dead letters, workers, queues, numbers and health over real HTTP."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import httpx
import pytest

from fluxmesh.clock import system_clock
from fluxmesh.config import Settings
from fluxmesh.ids import new_job_id
from fluxmesh.storage.base import Storage
from fluxmesh.storage.values import Registration
from fluxmesh.testing.contract.faulty import FaultyStorage
from tests.api.serving import Api, problem, served

DLQ = "/api/v1/dlq"
OLD_ID = "01000000-0000-7000-8000-000000000000"
METRICS = {
    "active_workers", "total_jobs", "pending_jobs", "scheduled_jobs", "running_jobs", "completed_jobs",
    "failed_jobs", "cancelled_jobs", "expired_jobs", "dead_letter_jobs", "queue_depths", "queues",
    "timestamp",
}  # fmt: skip


# -- dead letters ----------------------------------------------------------------------------------------


def test_dead_letters_are_listed_newest_first_by_offset_or_cursor(api: Api) -> None:
    ids = [api.dead_letter("listed") for _ in range(5)][::-1]
    q = {"q": "task:listed"}
    first = api.client.get(DLQ, params={**q, "limit": 2}).json()
    assert [job["id"] for job in first["items"]] == ids[:2]
    assert {job["status"] for job in first["items"]} == {"DEAD_LETTER"}
    for more in ({"offset": 2}, {"cursor": first["next_cursor"]}):
        page = api.client.get(DLQ, params={**q, "limit": 2, **more}).json()
        assert [job["id"] for job in page["items"]] == ids[2:4]
    last = api.client.get(DLQ, params={**q, "offset": 4}).json()
    assert ([job["id"] for job in last["items"]], last["next_cursor"]) == (ids[4:], None)
    for beyond in (5, 6, 10_000):
        assert api.client.get(DLQ, params={**q, "offset": beyond}).json()["items"] == []


@pytest.mark.parametrize(
    ("params", "field"),
    [
        ({"offset": -1}, "offset"),
        ({"offset": 10_001}, "offset"),
        ({"q": "state:PENDING"}, "q"),
        ({"x": 1}, "x"),
    ],
)
def test_a_list_of_dead_letters_refuses_what_it_cannot_read(api: Api, params: Any, field: str) -> None:
    problem(api.client.get(DLQ, params=params), 422, field)


def test_dead_letters_of_one_kind_are_one_group(api: Api) -> None:
    newest = [api.dead_letter("grouped", f"line {n}") for n in range(3)][-1]
    groups = api.client.get(f"{DLQ}/groups").json()["items"]
    [group] = [group for group in groups if group["task"] == "grouped"]
    assert (group["count"], group["example"], group["reason"]) == (3, newest, "error")
    assert group["error"]["type"] == "LuckError"


def test_a_dead_letter_is_replayed_by_one_of_many(api: Api) -> None:
    job_id = api.dead_letter("raced")
    answers: list[httpx.Response] = []
    ready = threading.Barrier(8)

    def replay() -> None:
        ready.wait()
        answers.append(api.client.post(f"{DLQ}/{job_id}/replay"))

    threads = [threading.Thread(target=replay) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    codes = sorted(answer.status_code for answer in answers)
    assert codes == [200] + [409] * 7
    [done] = [answer.json() for answer in answers if answer.status_code == 200]
    assert done == {"job_id": job_id, "status": "REPLAYED"}


def test_a_dead_letter_is_discarded_with_all_that_is_known_of_it(api: Api) -> None:
    job_id = api.dead_letter("discarded")
    answer = api.client.post(f"{DLQ}/{job_id}/discard")
    assert answer.json() == {"job_id": job_id, "status": "DISCARDED"}
    problem(api.client.get(f"/api/v1/jobs/{job_id}"), 404)
    problem(api.client.post(f"{DLQ}/{job_id}/discard"), 404)


@pytest.mark.parametrize("verb", ["replay", "discard"])
def test_only_dead_letters_are_replayed_or_discarded_here(api: Api, verb: str) -> None:
    problem(api.client.post(f"{DLQ}/{api.submit()['id']}/{verb}"), 409)
    problem(api.client.post(f"{DLQ}/{new_job_id()}/{verb}"), 404)
    problem(api.client.post(f"{DLQ}/{OLD_ID}/{verb}"), 410)


def test_all_dead_letters_of_a_query_are_replayed_after_a_look(api: Api) -> None:
    ids = {api.dead_letter("many") for _ in range(3)}
    other = api.dead_letter("other")
    look = api.client.post(f"{DLQ}/replay", json={"q": "task:many", "dry_run": True}).json()
    assert (look["count"], look["dry_run"], look["more"]) == (3, True, False)
    assert {item["job_id"] for item in look["items"]} == ids

    done = api.client.post(f"{DLQ}/replay", json={"q": "task:many"}).json()
    assert {(item["job_id"], item["status"]) for item in done["items"]} == {(i, "REPLAYED") for i in ids}
    assert api.client.get(f"/api/v1/jobs/{min(ids)}").json()["life"] == 2
    assert api.client.get(f"/api/v1/jobs/{other}").json()["status"] == "DEAD_LETTER"


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"q": 1}, "q"),
        ({"q": None}, "q"),
        ({"q": "state:RUNNING"}, "q"),
        ({"dry_run": "yes"}, "dry_run"),
        ({"dry_run": None}, "dry_run"),
        ({"dryrun": True}, "dryrun"),
    ],
)
def test_a_wrong_replay_of_many_replays_none(api: Api, body: Any, field: str) -> None:
    job_id = api.dead_letter("spared")
    problem(api.client.post(f"{DLQ}/replay", json=body), 422, field)
    assert api.client.get(f"/api/v1/jobs/{job_id}").json()["status"] == "DEAD_LETTER"


# -- workers, queues, numbers ----------------------------------------------------------------------------


def test_workers_are_shown_with_what_they_do(api: Api) -> None:
    registration = Registration("shown", ("a", "b"), (0, 1), (), 4, 60.0, 20.0, "host", 42)
    epoch = api.run(api.storage.register(registration))
    [worker] = [w for w in api.client.get("/api/v1/workers").json()["items"] if w["worker_id"] == "shown"]
    wanted = {
        "epoch": epoch, "hostname": "host", "pid": 42, "queues": ["a", "b"], "status": "ready",
        "capacity": 4, "running": 0,
    }  # fmt: skip
    assert {name: worker[name] for name in wanted} == wanted
    assert worker["last_heartbeat"] == pytest.approx(system_clock().wall_us() / 1e6, abs=60)


def test_a_queue_is_paused_and_resumed(api: Api) -> None:
    url = "/api/v1/queues/mail%2Fslow"
    api.submit(queue="mail/slow")
    assert api.client.post(f"{url}/pause").json() == {"queue": "mail/slow", "paused": True, "changed": True}
    assert api.client.post(f"{url}/pause").json()["changed"] is False
    [queue] = [q for q in api.client.get("/api/v1/queues").json()["items"] if q["queue"] == "mail/slow"]
    assert (queue["paused"], queue["queued"]) == (True, {"critical": 0, "high": 0, "default": 1, "low": 0})
    assert api.client.post(f"{url}/resume").json() == {"queue": "mail/slow", "paused": False, "changed": True}


@pytest.mark.parametrize("name", ["high", "a:b", "a%7Bb", "q" * 201, "%00"])
def test_what_cannot_be_a_queue_is_not_paused(api: Api, name: str) -> None:
    problem(api.client.post(f"/api/v1/queues/{name}/pause"), 422, "queue")


def test_the_numbers_are_the_contracts_and_true(tmp_path: Path) -> None:
    with served(tmp_path / "jobs.db") as api:
        api.submit(priority="critical")
        api.submit(queue="other", priority="low")
        api.submit(delay_seconds=600)
        api.client.post(f"/api/v1/jobs/{api.submit()['id']}/cancel")
        api.dead_letter("failing")
        api.submit(task="going", queue="going")
        api.start("going")

        told = api.client.get("/api/v1/metrics").json()

        assert set(told) == METRICS
        assert told["queue_depths"] == {"critical": 1, "high": 0, "default": 0, "low": 1}
        assert {name: told[name] for name in sorted(METRICS) if name.endswith(("_jobs", "_workers"))} == {
            "active_workers": 2,
            "cancelled_jobs": 1,
            "completed_jobs": 0,
            "dead_letter_jobs": 1,
            "expired_jobs": 0,
            "failed_jobs": 1,
            "pending_jobs": 2,
            "running_jobs": 1,
            "scheduled_jobs": 1,
            "total_jobs": 6,
        }
        assert told["queues"]["other"]["pending"] == told["queues"]["other"]["low"] == 1
        assert told["queues"]["going"]["running"] == 1
        assert told["timestamp"] == pytest.approx(system_clock().wall_us() / 1e6, abs=60)


# -- health ------------------------------------------------------------------------------------------------


def test_a_server_whose_storage_answers_is_alive_and_ready(api: Api) -> None:
    assert api.client.get("/healthz").json() == {"status": "ok"}
    assert api.client.get("/readyz").json() == {"status": "ready"}


class Silent(FaultyStorage):
    """A storage whose reads are never answered while `silent` is set."""

    silent = False

    def __getattr__(self, verb: str) -> Any:
        import asyncio

        real = super().__getattr__(verb)
        if verb == "get" and self.silent:

            async def never(*_: Any) -> None:
                await asyncio.Event().wait()

            return never
        return real


def test_a_server_whose_storage_is_silent_says_so_within_a_second(tmp_path: Path) -> None:
    made: list[Silent] = []

    def behind(storage: Storage) -> Storage:
        made.append(Silent(storage))
        return made[0].as_storage()

    with served(tmp_path / "jobs.db", behind=behind) as api:
        assert api.client.get("/readyz").status_code == 200
        made[0].silent = True
        answer = api.client.get("/readyz", timeout=5)
        assert problem(answer, 503)["code"] == "storage_unreachable"
        assert answer.elapsed.total_seconds() < 1
        assert api.client.get("/healthz").status_code == 200


def test_a_storage_that_fails_is_a_problem_and_a_lost_reply_is_repeated(tmp_path: Path) -> None:
    made: list[FaultyStorage] = []

    def behind(storage: Storage) -> Storage:
        made.append(FaultyStorage(storage))
        return made[0].as_storage()

    with served(tmp_path / "jobs.db", Settings(), behind=behind) as api:
        made[0].refuse("enqueue", "find", "counts")
        refused = api.client.post("/api/v1/jobs", json={"task": "t"})
        assert problem(refused, 503)["code"] == "storage_unreachable"
        assert refused.headers["retry-after"] == "1"
        problem(api.client.get("/api/v1/jobs"), 503)
        problem(api.client.get("/api/v1/metrics"), 503)

        made[0].lose_replies("enqueue")
        assert api.client.post("/api/v1/jobs", json={"task": "t"}).status_code == 201
        made[0].lose_replies("enqueue", times=3)
        assert problem(api.client.post("/api/v1/jobs", json={"task": "t"}), 503)["code"] == "outcome_unknown"
        assert api.client.get("/api/v1/metrics").json()["total_jobs"] == 2


def test_a_mistake_of_ours_is_a_problem_without_a_traceback(tmp_path: Path) -> None:
    class Broken(FaultyStorage):
        def __getattr__(self, verb: str) -> Any:
            if verb == "counts":
                raise ZeroDivisionError("secret")
            return super().__getattr__(verb)

    with served(tmp_path / "jobs.db", behind=lambda storage: Broken(storage).as_storage()) as api:
        answer = api.client.get("/api/v1/metrics")
        assert problem(answer, 500)["code"] == "internal_error"
        assert "secret" not in answer.text
