"""P12: the mesh is optional. With every packet dropped, and streams too, the results are those of no mesh."""

from __future__ import annotations

from typing import Any, Final

from tests.cases.harness import Lab, Site, together, wait_until
from tests.cases.report import Case
from tests.cases.starts import doubly_owned
from tests.stealing.figures import Figures
from tests.stealing.stock import fill, warm

WEATHER: Final = "FLUXMESH_TEST_MESH_WEATHER"
NOTHING_PASSES: Final = {WEATHER: "loss=1,delay_ms=60000"}  # what goes by a stream would come in a minute
WORKERS: Final = ("w1", "w2", "w3")
RUN_S: Final = 60.0


def launched(lab: Lab, fleet: str) -> None:
    for name in WORKERS:
        flags = () if fleet == "no mesh" else lab.in_mesh()
        environ = NOTHING_PASSES if fleet == "deaf mesh" else None
        lab.await_workers(lab.launch(name, *flags, concurrency=2, environ=environ))


def work(lab: Lab) -> dict[str, tuple[Any, ...]]:
    """What became of one of everything, by a name of its own."""
    made = {}
    for number in range(60):
        made[f"brief {number}"] = lab.submit(
            "brief", 0.002 * (number % 7), f"brief {number}", priority=number % 4
        )
    for number in range(6):
        made[f"fails {number}"] = lab.submit(
            "fail", number % 3, 0.0, f"fails {number}",
            max_retries=1, backoff_base_seconds=0.05, jitter="none",
        )  # fmt: skip
        made[f"few {number}"] = lab.submit(
            "nap", 0.02, f"few {number}", concurrency_key="one", concurrency_limit=1
        )
        made[f"later {number}"] = lab.submit("brief", 0.0, f"later {number}", delay=0.3)
    lab.await_ended(made.values(), RUN_S)
    return {name: outcome(lab, handle.id) for name, handle in made.items()}


def outcome(lab: Lab, job_id: str) -> tuple[Any, ...]:
    record = lab.queue.get(job_id).record
    reason = None if record.error is None else record.error.message
    return record.status.value, record.result, record.attempts, record.crashes, reason


def results(site: Site, fleet: str, into: dict[str, Any]) -> None:
    with site.lab(fleet.replace(" ", "-")) as lab:
        figures = Figures(lab)
        launched(lab, fleet)
        if fleet == "mesh":
            wait_until(lambda: all(figures.sees(name) == set(WORKERS) for name in WORKERS), 20, "all see all")
        with lab.audited() as audit:
            into[fleet] = work(lab)
            twice = doubly_owned(audit.moves())
        into[f"{fleet}: seen"] = {name: sorted(figures.sees(name)) for name in WORKERS}
        into[f"{fleet}: found"] = twice + lab.judged()


def test_p12_with_all_gossip_dropped_the_results_are_the_same(site: Site, storage: str) -> None:
    case = Case("P12", storage, dropped="all packets and streams", workers=len(WORKERS))
    into: dict[str, Any] = {}
    fleets = ("no mesh", "mesh", "deaf mesh")
    together(*(lambda fleet=fleet: results(site, fleet, into) for fleet in fleets))
    case.equal("in_a_mesh_as_without", into["mesh"] == into["no mesh"], True)
    case.equal("with_all_dropped_as_without", into["deaf mesh"] == into["no mesh"], True)
    case.equal("seen_with_all_dropped", into["deaf mesh: seen"], {name: [name] for name in WORKERS})
    case.tell("jobs", len(into["no mesh"]))
    case.close([what for fleet in fleets for what in into[f"{fleet}: found"]])


def test_p12_what_is_held_is_taken_all_the_same_through_the_storage(lab: Lab) -> None:
    case = lab.case("P12", dropped="all packets and streams", jobs=40, job_s=0.1)
    figures = Figures(lab)
    lab.await_workers(lab.launch("w1", *lab.in_mesh(), concurrency=1, environ=NOTHING_PASSES))
    warm(lab)
    jobs = fill(lab, 40, 0.1)
    lab.launch("w2", *lab.in_mesh(), concurrency=2, environ=NOTHING_PASSES)
    lab.await_ended(jobs, 20)
    totals = wait_until(
        lambda: (found := figures.read()["totals"])["jobs_taken_held"] and found, 10, "figures have come"
    )
    case.at_least("jobs_taken_held", totals["jobs_taken_held"], 1)
    case.equal("stolen_by_the_mesh", (totals["jobs_stolen_in"], totals["jobs_stolen_out"]), (0, 0))
    by = {mark.pid for mark in lab.marks.starts(note="work")}
    case.equal("workers_that_took_part", len(by), 2)
    lab.close(case)
