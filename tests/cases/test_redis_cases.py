"""What only a server of its own can do to its workers: it is restarted (C07), full (C22 b), set up so that it
throws keys away (C22 c), frozen, and asked through two servers of the API at once (C21)."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import httpx
import pytest
from redis.exceptions import OutOfMemoryError

from fluxmesh.errors import StorageError, StorageUnreachable
from fluxmesh.handle import JobHandle
from fluxmesh.job import Outcome, Status
from tests.cases.backdoor import RedisOpener
from tests.cases.beside import beside
from tests.cases.harness import START_S, Lab, Site, wait_until
from tests.cases.report import FULL, Case, scaled
from tests.cases.test_outages import Busy, kill_and_await_reaping
from tests.redis_server import Server

pytestmark = pytest.mark.only("redis")


@contextmanager
def own_server(site: Site, *options: str) -> Iterator[tuple[Server, Site]]:
    """A server that nobody else has, and a site on it."""
    folder = site.folder / "server"
    folder.mkdir()
    server = Server(folder, *options)
    try:
        yield server, Site(site.folder, RedisOpener(server))
    finally:
        server.stop()


def let_pass(seconds: float) -> None:
    """Time is what the scenario is about here: nothing can tell when enough of it has passed."""
    threading.Event().wait(seconds)


def let_pass_until(at: float) -> None:
    let_pass(max(0.0, at - time.monotonic()))


# -- C07 -------------------------------------------------------------------------------------------------
DOWN_S = 0.3
DELAY_S = 6.0 if FULL else 3.2  # past the restarts


@beside
def test_c07_a_worker_does_not_go_deaf_when_its_server_restarts(site: Site) -> None:
    """Stopped, killed and stopped again. (The schedule of the case comes with schedules.)"""
    with own_server(site, "--appendonly", "yes") as (server, own), own.lab() as lab:
        case = lab.case("C07", aof="everysec", restarts=3, workers=2)
        first, second = lab.launch("w1"), lab.launch("w2")
        lab.await_workers(first, second)
        before = {row.worker_id: (row.pid, row.epoch) for row in lab.queue.list_workers()}
        began_at = time.monotonic()
        delayed = lab.submit("tick", "delayed", delay=DELAY_S)
        submitting_s = time.monotonic() - began_at
        due_at = began_at + DELAY_S
        let_pass_until(began_at + scaled(2))
        restarting_at = time.monotonic()
        for number, end in enumerate((server.stop, server.kill, server.stop)):
            let_pass_until(restarting_at + 0.8 * number)
            end()
            let_pass(DOWN_S)
            server.start()
        case.at_most("three_restarts_took_s", time.monotonic() - restarting_at, 3.0)
        lab.await_starts(1, 20, note="delayed")
        case.at_most("delayed_late_by_s", lab.marks.starts(note="delayed")[0].at - due_at - submitting_s, 2.0)
        case.equal("delayed_early", lab.marks.starts(note="delayed")[0].at < due_at, False)
        let_pass_until(began_at + scaled(8))
        submitted_at = time.monotonic()
        twenty = lab.submit_many("nap", [(0.1, "twenty")] * 20)
        lab.await_ended([delayed, *twenty], 20)
        done_at = max(mark.at for mark in lab.marks.ends(note="twenty"))
        case.at_most("twenty_done_after_s", done_at - submitted_at, 7.0)
        pids = {mark.pid for mark in lab.marks.starts(note="twenty")}
        case.equal("workers_that_took_part", len(pids), 2)
        after = {row.worker_id: (row.pid, row.epoch) for row in lab.queue.list_workers()}
        case.equal("processes_and_epochs_are_the_same", after == before, True)
        case.equal("starts", {len(lab.marks.starts(job=job.id)) for job in (delayed, *twenty)}, {1})
        lab.close(case)


# -- C22 b -----------------------------------------------------------------------------------------------
LARGE = "x" * 1_000_000
ROOM_BYTES = 6_000_000
RUNNING = 5


@beside
def test_c22_a_full_memory_refuses_new_jobs_and_takes_the_ends_of_running_ones(site: Site) -> None:
    with own_server(site) as (server, own), own.lab(result_ttl=scaled(8)) as lab:
        case = lab.case("C22b", running=RUNNING, payload_bytes=len(LARGE), policy="noeviction")
        lab.worker("w1", concurrency=RUNNING)
        held, door = lab.submit_held(RUNNING, "held")
        lab.await_starts(RUNNING, 10, note="held")
        with server.client() as client:
            client.config_set("maxmemory", client.info("memory")["used_memory"] + ROOM_BYTES)
        large: list[JobHandle[object]] = []
        refusal = fill(lab, large)
        case.equal("refused_as", type(refusal), StorageUnreachable)
        case.equal("the_refusal_says_why", "maxmemory" in str(refusal), True)
        case.equal("accepted_before", 1 <= len(large) < ROOM_BYTES / len(LARGE), True)
        case.equal("stored", lab.queue.counts().total, RUNNING + len(large))
        with server.client() as client:
            client.config_set("maxmemory", client.info("memory")["used_memory"] - ROOM_BYTES // 6)
            with pytest.raises(OutOfMemoryError):
                client.set("no room for anything", "x")

        # A worker that starts now is as good as one that was there: else a deploy would stop everything.
        lab.worker("w2", concurrency=RUNNING)
        door.touch()
        ended_at = time.monotonic()
        lab.await_ended([*held, *large], 20)
        case.at_most("ends_stored_after_s", time.monotonic() - ended_at, 5.0)
        jobs = [*held, *large]
        case.equal("outcomes", {tuple(lab.outcomes(job)) for job in jobs}, {(Outcome.COMPLETED,)})
        case.equal("starts", {len(lab.marks.starts(job=job.id)) for job in jobs}, {1})
        found = lab.disagreements()

        # Retention makes room; nobody need free memory by hand.
        wait_until(lambda: not lab.door.places(), scaled(8) + 10, "they are pruned")
        lab.ids.clear()  # the next one is all there is
        last = lab.submit("swallow", LARGE, "last")
        lab.await_ended([last], 10)
        case.equal("a_job_that_is_accepted_afterwards", last.status, Status.COMPLETED)
        case.close(found or lab.judged())


def fill(lab: Lab, accepted: list[JobHandle[object]]) -> StorageError:
    """Submit large jobs until one is refused; that refusal."""
    for number in range(100):
        try:
            accepted.append(lab.submit("swallow", LARGE, f"large {number}"))
        except StorageError as error:
            return error
    raise AssertionError("nothing was refused")


# -- C22 c -----------------------------------------------------------------------------------------------
@beside
def test_c22_a_server_that_throws_keys_away_is_refused_and_told(site: Site) -> None:
    with own_server(site) as (server, own), own.lab() as lab, server.client() as client:
        case = lab.case("C22c", policy="allkeys-lru")
        _, url = lab.api("api")
        case.equal("ready_before", httpx.get(f"{url}/readyz").status_code, 200)
        client.config_set("maxmemory-policy", "allkeys-lru")
        told = httpx.get(f"{url}/readyz")
        case.equal("ready_when_it_was_changed", told.status_code, 503)
        case.equal("told_why", "allkeys-lru" in told.text, True)
        case.equal("alive_all_the_same", httpx.get(f"{url}/healthz").status_code, 200)
        for program in ("worker", "server", "submit"):
            done = refused(lab, program)
            case.equal(f"{program}_exit_code", done.returncode, 4)
            case.equal(f"{program}_says_why", "allkeys-lru" in done.stderr, True)
        client.config_set("maxmemory-policy", "noeviction")
        case.equal("ready_again", httpx.get(f"{url}/readyz").status_code, 200)
        lab.close(case)


def refused(lab: Lab, program: str) -> subprocess.CompletedProcess[str]:
    flags = {
        "worker": ("--app", "tests.cases.app:queue"),
        "server": ("--port", "0"),
        "submit": ("--task", "tick"),
    }
    argv = [sys.executable, "-m", "fluxmesh.cli", program, *flags[program]]
    return subprocess.run(
        argv,
        env=lab.env(),
        cwd=lab.folder,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=START_S,
        check=False,
    )


# -- a frozen server -------------------------------------------------------------------------------------
LEASE_S = 6.0 if FULL else 2.0
FROZEN_S = scaled(20)
ANSWER_S = 10.0  # for which a producer waits
LONG, SHORT = 20, 400


@pytest.mark.slow
@beside
def test_a_server_frozen_under_claims_strands_nothing_and_nobody_is_reaped(site: Site) -> None:
    with own_server(site) as (_, own), own.lab(lease_s=LEASE_S, beat_s=LEASE_S / 3) as lab:
        case = lab.case("outage", frozen_s=FROZEN_S, lease_s=LEASE_S, long=LONG, short=SHORT)
        # Neither can take all the long ones, and both have slots left for short ones.
        first, second = lab.launch("w1", concurrency=15), lab.launch("w2", concurrency=15)
        lab.await_workers(first, second)
        long = Busy(*lab.submit_held(LONG, "long"))
        lab.await_starts(LONG, 20, note="long")
        short = lab.submit_many("anap", [(0.05, "short")] * SHORT)
        lab.await_starts(SHORT // 8, 20, note="short")
        with lab.door.out_of_reach():
            told = submit_meanwhile(lab)
            let_pass(FROZEN_S)
        thawed_at = time.monotonic()
        case.equal("a_producer_is_told", told(), "OutcomeUnknown" if FROZEN_S > ANSWER_S else "accepted")
        meanwhile = lab.submit("tick", "meanwhile", idempotency_key="meanwhile")
        if meanwhile.id not in lab.ids:
            lab.ids.append(meanwhile.id)

        lab.await_ended([*short, meanwhile], 60)
        done_at = max(mark.at for mark in lab.marks.ends(note="short"))
        case.at_most("short_ones_done_after_thaw_s", done_at - thawed_at, 2 * LEASE_S)
        jobs = [*short, meanwhile]
        case.equal("starts", {len(lab.marks.starts(job=job.id)) for job in jobs}, {1})
        case.equal("outcomes", {tuple(lab.outcomes(job)) for job in jobs}, {(Outcome.COMPLETED,)})
        reaped = sum(group.log.read_text("utf-8").count("jobs reaped") for group in (first, second))
        case.equal("recoveries_logged", reaped, 0)
        case.equal("both_live", (first.running, second.running), (True, True))
        let_pass(LEASE_S)
        kill_and_await_reaping(lab, case, first, second, long)


def submit_meanwhile(lab: Lab):  # type: ignore[no-untyped-def]
    """Submit in a thread; answers what tells how that went."""
    outcome: list[str] = []

    def submit() -> None:
        try:
            lab.submit("tick", "meanwhile", idempotency_key="meanwhile")
        except StorageError as error:
            outcome.append(type(error).__name__)
        else:
            outcome.append("accepted")

    caller = threading.Thread(target=submit)
    caller.start()

    def told() -> str:
        caller.join(ANSWER_S + 10)
        return "".join(outcome)

    return told


# -- C21 -------------------------------------------------------------------------------------------------
PARALLEL = 50
KEY = "order-881"


class Shop:
    """Sends orders to servers of the API, each as one POST."""

    def __init__(self, client: httpx.Client) -> None:
        self._client = client

    def order(self, url: str, kwargs: str) -> httpx.Response:
        body = f'{{"task": "order", "kwargs": {kwargs}, "idempotency_key": "{KEY}"}}'
        headers = {"content-type": "application/json"}
        return self._client.post(f"{url}/api/v1/jobs", content=body, headers=headers)

    def parallel(self, urls: list[str], kwargs: str) -> list[httpx.Response]:
        gate = threading.Barrier(PARALLEL)

        def one(number: int) -> httpx.Response:
            gate.wait(START_S)
            return self.order(urls[number % len(urls)], kwargs)

        with ThreadPoolExecutor(PARALLEL) as pool:
            return list(pool.map(one, range(PARALLEL)))


@pytest.mark.slow
@beside
def test_c21_fifty_parallel_posts_to_two_servers_make_one_job(site: Site) -> None:
    limits = httpx.Limits(max_connections=PARALLEL)
    with site.lab() as lab, httpx.Client(limits=limits, timeout=START_S) as client:
        case = lab.case("C21", posts=PARALLEL, servers=2, key=KEY)
        shop = Shop(client)
        servers = [lab.api(f"api-{number}") for number in (1, 2)]
        urls = [url for _, url in servers]
        body = '{"amount": 10, "cur": "EUR"}'
        answers = shop.parallel(urls, body)
        codes = sorted(answer.status_code for answer in answers)
        case.equal("codes", {code: codes.count(code) for code in set(codes)}, {200: 49, 201: 1})
        [only] = {answer.json()["id"] for answer in answers}
        lab.ids.append(only)
        reordered = shop.order(urls[0], '{"cur": "EUR", "amount": 10}')
        case.equal("reordered_is_the_same", (reordered.status_code, reordered.json()["id"]), (200, only))
        other = shop.order(urls[1], '{"amount": 11, "cur": "EUR"}')
        case.equal("other_amount", other.status_code, 409)
        case.equal("stored", lab.queue.counts().total, 1)
        for server, _ in servers:
            server.tell()
        case.equal("exit_codes", [server.wait(START_S) for server, _ in servers], [0, 0])
        in_beta_and_after_a_restart(lab, case, shop, only, body)


def in_beta_and_after_a_restart(lab: Lab, case: Case, shop: Shop, only: str, body: str) -> None:
    with lab.beside("beta") as beta:
        _, beta_url = beta.api("api-beta")
        first = shop.order(beta_url, body)
        beta.ids.append(first.json()["id"])
        case.equal("beta_has_its_own", (first.status_code, first.json()["id"] == only), (201, False))
        _, url = lab.api("api-3")
        again = shop.order(url, body)
        case.equal("same_after_a_restart", (again.status_code, again.json()["id"]), (200, only))
        lab.worker("w1")
        beta.worker("beta-w1")
        lab.await_ended([lab.queue.get(only)], 20)
        beta.await_ended([beta.queue.get(first.json()["id"])], 20)
        case.equal("starts", len(lab.marks.starts(job=only)), 1)
        case.close([*lab.judged(), *beta.judged()])
