"""What many seeds came to, in tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from fluxmesh.mesh.timing import S
from fluxmesh.testing.simnet_faults import Kind
from fluxmesh.testing.simnet_points import every_point
from fluxmesh.testing.simnet_run import Outcome
from fluxmesh.testing.simnet_thefts import Stolen


def histogram(outcomes: Sequence[Outcome]) -> list[tuple[str, str, str]]:
    """For each kind of fault that happened: in how many seeds it was enabled, and how many of these broke a
    promise."""
    enabled = Counter(kind for outcome in outcomes for kind in outcome.kinds)
    failed = Counter(kind for outcome in outcomes if outcome.problem for kind in outcome.kinds)
    return [(str(kind), str(enabled[kind]), str(failed[kind])) for kind in Kind if enabled[kind]]


def summary(outcomes: Sequence[Outcome]) -> dict[str, object]:
    """Totals of a run of seeds; times are virtual. `healed_worst_s`: the longest from the last fault to one
    table everywhere."""
    happened: Counter[str] = Counter()
    emitted: Counter[str] = Counter()
    for outcome in outcomes:
        happened.update(outcome.happened)
        emitted.update(outcome.emitted)
    healed = sorted(outcome.healed_in_ns / S for outcome in outcomes if not outcome.problem)
    return {
        "seeds": len(outcomes),
        "failed": sum(1 for outcome in outcomes if outcome.problem),
        "severities": dict(sorted(Counter(str(outcome.severity) for outcome in outcomes).items())),
        "nodes": dict(
            sorted(Counter(str(outcome.nodes) for outcome in outcomes).items(), key=lambda p: int(p[0]))
        ),
        "events": sum(outcome.steps for outcome in outcomes),
        "changes_checked": sum(outcome.checks for outcome in outcomes),
        "virtual_seconds": round(sum(outcome.virtual_ns for outcome in outcomes) / S),
        "healed_worst_s": round(healed[-1], 2) if healed else None,
        "happened": dict(sorted(happened.items())),
        "told": dict(sorted(emitted.items())),
    }


def points_hit(played: Sequence[Stolen]) -> Counter[str]:
    """How often something went wrong at each boundary of a theft, also where nothing did."""
    hits = Counter(dict.fromkeys(every_point(), 0))
    for one in played:
        hits.update(one.hits)
    return hits


def theft_summary(played: Sequence[Stolen]) -> dict[str, object]:
    """Totals of seeds of stealing; times are virtual. `steals`: transfers by which at least one job changed
    hands."""
    verbs: Counter[str] = Counter()
    for one in played:
        verbs.update(one.verbs)
    hits = points_hit(played)
    return {
        "seeds": len(played),
        "steals": sum(one.thefts for one in played),
        "jobs_stolen": sum(one.moved for one in played),
        "jobs_taken_held": sum(one.taken_held for one in played),
        "requests": sum(one.asks for one in played),
        "jobs": sum(one.jobs for one in played),
        "deaths": sum(one.deaths for one in played),
        "faults": hits.total(),
        "boundaries": len(hits),
        "boundaries_hit": sum(1 for count in hits.values() if count),
        "violations": sum(1 for one in played if one.problem),
        "changes_checked": sum(one.checks for one in played),
        "changes": dict(sorted(verbs.items())),
        "events": sum(one.steps for one in played),
        "virtual_seconds": round(sum(one.virtual_ns for one in played) / S),
    }
