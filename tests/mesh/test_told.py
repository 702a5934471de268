"""The bound of the log."""

from __future__ import annotations

from fluxmesh.mesh.messages import PROTOCOL, Gossip, NodeRef, Packet, Record, Standing
from fluxmesh.mesh.seal import Plain
from fluxmesh.mesh.told import LINES_MOST, WINDOW_S, Bounded
from fluxmesh.mesh.wire import encode_packet
from tests.mesh.nodes import Host, eventually, hosts


class Said:
    """What came through, and a clock that a test turns."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.lines: list[tuple[str, str, dict[str, object]]] = []
        self.bounded = Bounded(lambda *line: self.lines.append(line), lambda: self.now_s)

    def tell(self, event: str, times: int) -> None:
        for number in range(times):
            self.bounded.tell("info", event, {"number": number})


def test_of_each_kind_so_many_lines_are_told_and_then_one_that_counts_the_rest() -> None:
    said = Said()
    said.tell("peer discovered", 1_000)
    said.tell("member dead", 3)
    assert len(said.lines) == LINES_MOST + 3
    said.now_s += WINDOW_S
    said.bounded.look()
    assert said.lines[LINES_MOST + 3 :] == [
        (
            "info",
            "more of the same",
            {"of": "peer discovered", "more": 1_000 - LINES_MOST, "within_s": WINDOW_S},
        )
    ]


def test_a_flood_that_goes_on_has_as_many_lines_in_the_next_window() -> None:
    said = Said()
    for _ in range(3):
        said.tell("peer discovered", 50)
        said.now_s += WINDOW_S
    said.bounded.end()
    assert sum(event == "peer discovered" for _, event, _ in said.lines) == 3 * LINES_MOST
    more = [fields["more"] for _, event, fields in said.lines if event == "more of the same"]
    assert more == [50 - LINES_MOST] * 3


def test_what_stays_within_the_bound_is_told_whole_and_leaves_nothing_to_say() -> None:
    said = Said()
    said.tell("peer discovered", LINES_MOST)
    said.bounded.end()
    assert len(said.lines) == LINES_MOST


def test_a_node_that_hears_of_very_many_members_counts_them_all_and_tells_of_few() -> None:
    one = Host("one")
    with hosts(one):
        made_up = [
            Record(f"m{number}", 1, 0, int(Standing.ALIVE), "127.0.0.1", 7_946, 1) for number in range(200)
        ]
        for start in range(0, 200, 10):
            packet = Packet(PROTOCOL, NodeRef("evil", 1), 0, Gossip())
            data, *_ = encode_packet(packet, made_up[start : start + 10], [], 1_160)
            one.send(Plain(label="fluxmesh").seal(data))
        eventually(lambda: one.node.metrics().get("event_discovered", 0) >= 200)
        assert one.told.words().count("peer discovered") == LINES_MOST
    (more,) = [fields for _, _, fields in one.told.lines if fields.get("of") == "peer discovered"]
    assert more["more"] == one.node.metrics()["event_discovered"] - LINES_MOST
