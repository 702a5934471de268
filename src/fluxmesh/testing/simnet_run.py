"""One seed from start to end: a mesh forms, the plan does its worst, all heals, tables must become one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Final

from msgspec import Struct

from fluxmesh.mesh.messages import Standing
from fluxmesh.mesh.swim import Swim
from fluxmesh.mesh.timing import S, Timing, sends_of_news
from fluxmesh.mesh.voice import CORRECTIONS_MAX
from fluxmesh.testing.simnet import Simnet
from fluxmesh.testing.simnet_acts import Stage
from fluxmesh.testing.simnet_faults import CHAOS_TO_NS, Kind, Plan, Severity, draw
from fluxmesh.testing.simnet_network import LINKS
from fluxmesh.testing.simnet_node import MakeCore, SimNode
from fluxmesh.testing.simnet_rules import CANARY, Expect, Rules
from fluxmesh.testing.simnet_trace import Trace, Violation

STARTS_WITHIN_NS: Final = 2 * S
# The dead are dialled every 30 s, seeds and what never joined every 60 s; the rest is for gossip and for a
# refutation.
CONVERGES_WITHIN_NS: Final = 90 * S
SETTLE_NS: Final = 6 * S  # what the last faults began: a probe of a slow observer takes up to 8 periods
QUIET_NS: Final = 4 * S
ROUNDS_TO_A_PLACE: Final = 3


class Outcome(Struct, frozen=True, kw_only=True):
    """What became of a seed. `problem` is empty if every promise was kept."""

    seed: int
    nodes: int
    severity: Severity
    kinds: tuple[Kind, ...]
    rule: str
    problem: str
    told: str  # the plan and the last events about the offended node; empty if all was well
    hash: str
    steps: int
    checks: int
    virtual_ns: int
    healed_in_ns: int
    happened: dict[str, int]
    emitted: dict[str, int]


def run_seed(seed: int, *, make_core: MakeCore = Swim, nodes: int | None = None) -> Outcome:
    return run_plan(draw(seed, nodes=nodes), make_core=make_core)


def run_plan(plan: Plan, *, make_core: MakeCore = Swim, rules: Callable[..., Rules] = Rules) -> Outcome:
    """Never raises for what the core does: a broken promise is in the outcome."""
    trace = Trace()
    timing = Timing()
    expect = Expect(
        no_dead=plan.severity is not Severity.HARSH,
        no_suspect=plan.severity is Severity.CLEAN,
        news_sends=sends_of_news(plan.nodes + 6) + CORRECTIONS_MAX,
    )
    watch = rules(timing=timing, expect=expect, trace=trace)
    net = Simnet(
        seed=plan.seed,
        link=LINKS[plan.link],
        timing=timing,
        make_core=make_core,
        watch=watch,
        trace=trace,
    )
    rule = problem = told = ""
    healed_ns = 0
    try:
        healed_ns = _play(net, plan, watch)
    except Violation as violation:
        rule, problem = violation.rule, str(violation)
        told = (
            f"{plan.tell()}\n{problem}\nat {net.now / S:.4f} s; the last events about"
            f" {', '.join(violation.about)}:\n{trace.tell(violation.about)}"
        )
    return Outcome(
        seed=plan.seed,
        nodes=plan.nodes,
        severity=plan.severity,
        kinds=plan.kinds,
        rule=rule,
        problem=problem,
        told=told,
        hash=trace.hash,
        steps=net.steps,
        checks=watch.checks,
        virtual_ns=net.now,
        healed_in_ns=healed_ns,
        happened=dict(sorted(net.network.happened.items())),
        emitted=dict(sorted(net.emits.items())),
    )


def _play(net: Simnet, plan: Plan, watch: Rules) -> int:
    stage = Stage(net, plan)
    for number in range(plan.nodes):
        net.push(net.chance(STARTS_WITHIN_NS), stage.start, number)
    for act in plan.acts:
        net.push(act.at_ns, stage.begin, act)
    net.run(CHAOS_TO_NS)
    stage.heal()
    healed_at = net.now
    if not net.run(healed_at + CONVERGES_WITHIN_NS, done=lambda: not unlike(net)):
        raise Violation(
            "convergence",
            f"{CONVERGES_WITHIN_NS / S:.0f} s after the last fault: {unlike(net)}",
            about=tuple(sorted(node.name for node in members(net))[:1]),
        )
    healed_in = net.now - healed_at
    net.run(net.now + SETTLE_NS)
    watch.relax(
        Expect(no_dead=True, no_suspect=True, news_sends=sends_of_news(plan.nodes + 6) + CORRECTIONS_MAX)
    )  # the network is whole
    net.run(net.now + QUIET_NS)
    difference = unlike(net)
    if difference:
        raise Violation("convergence", f"tables were the same and are not any more: {difference}")
    unready = strange_views(net, places=plan.severity is not Severity.HARSH)
    if unready:
        raise Violation("views", f"{(net.now - healed_at) / S:.0f} s after the last fault: {unready}")
    if net.now - watch.last_news_ns < QUIET_NS // 4:
        raise Violation("queues drain", f"news was sent {(net.now - watch.last_news_ns) / S:.2f} s ago")
    return healed_in


def members(net: Simnet) -> list[SimNode]:
    """The nodes that ought to know each other."""
    return [
        node
        for node in net.living
        if node.name != CANARY and not node.spec.realm.startswith("strange") and not node.gone
    ]


def unlike(net: Simnet) -> str:
    """Where tables differ from each other or from what is; empty when all have become one."""
    living = members(net)
    newest = {node.name: node for node in living if net.nodes[node.name] is node}
    if len(newest) != len(living):
        return f"{len(living) - len(newest)} old runs go on"
    first: dict[str, tuple[int, int]] = {}
    given_up: Counter[str] = Counter()
    for node in living:
        seen = 0
        for view in node.core.members(node.now):
            record = view.record
            name = record.worker_id
            if name not in newest:
                if record.standing < Standing.DEAD:
                    return f"{node.name} believes that {name}.{record.epoch} lives"
                given_up[name] += 1
                continue
            if name == node.name:
                continue
            seen += 1
            state = (record.epoch, record.incarnation)
            if record.standing != Standing.ALIVE or record.epoch != newest[name].me.epoch:
                return f"{node.name} holds {name}.{state} as {Standing(record.standing).name}"
            if first.setdefault(name, state) != state:
                return f"{node.name} holds {name} at {state}, another at {first[name]}"
        if seen != len(newest) - 1:
            return f"{node.name} knows {seen} of {len(newest) - 1}"
    return ""


def strange_views(net: Simnet, *, places: bool) -> str:
    """What nodes of a calm mesh ought to know of each other beyond who is there: particulars, a place in the
    ring. Loads are hints: the larger the mesh, the more of them are too old to say anything."""
    living = members(net)
    # A member that has come back has its place when it has answered a probe, of which a round has one. After
    # harsh faults rounds are slow for a while, up to eight times: nothing is asked for then.
    calm_ns = ROUNDS_TO_A_PLACE * len(living) * net.timing.period_ns
    for node in living:
        for view in node.core.members(node.now):
            name = view.record.worker_id
            subject = net.nodes.get(name)
            if subject is None or not subject.alive or name == node.name:
                continue
            if view.meta != subject.spec.meta:
                return f"{node.name} has not the particulars of {name}"
            calm = places and node.now - view.since_ns > calm_ns
            if calm and not (view.answered and view.eligible):
                return f"{name} has no place in the ring of {node.name}"
    return ""


def run_seeds(
    seeds: range, *, make_core: MakeCore = Swim, tell: Callable[[Outcome], None] = lambda _outcome: None
) -> list[Outcome]:
    outcomes = []
    for seed in seeds:
        outcome = run_seed(seed, make_core=make_core)
        tell(outcome)
        outcomes.append(outcome)
    return outcomes
