"""fluxmesh demo mesh, end to end: in a pipe, on a terminal, interrupted; and its pure parts."""

from __future__ import annotations

import os
import pty
import random
import re
import select
import signal
import subprocess
import termios
import time
from collections import Counter
from itertools import combinations
from pathlib import Path
from typing import Any

import msgspec
import pytest

from fluxmesh.cli.demo_mesh.atlas import BUSY, REGIONS, ROUND_TRIPS_MS, round_trip_ms, weather_of
from fluxmesh.cli.demo_mesh.figures import (
    Rate,
    Summary,
    counted,
    ended_twice,
    has_doubled,
    lost_of,
    round_trips,
    standing_of,
)
from fluxmesh.cli.demo_mesh.play import _Hearing
from fluxmesh.cli.demo_mesh.screen import LEGEND
from fluxmesh.cli.demo_mesh.telling import Seen, Telling
from fluxmesh.cli.demo_mesh.traffic import BURST, WAVE, Traffic, tenants
from fluxmesh.job import Attempt, Job, Outcome, Status
from fluxmesh.mesh.delays import parse_weather
from fluxmesh.mesh.messages import Address
from fluxmesh.mesh.ring import Ring
from tests.cli.harness import FLUXMESH, Done, environment, run
from tests.cli.test_demo import processes_below
from tests.cli.test_terminal import ESCAPES

PATIENCE_S = 60.0


def demo_mesh(tmp_path: Path, *args: str) -> Done:
    """A demo whose temporary folder is below the test's own."""
    (tmp_path / "tmp").mkdir(exist_ok=True)
    env = {"TMPDIR": str(tmp_path / "tmp"), "FLUXMESH_MESH_PORT": "80"}  # settings are no business of it
    return run("demo", "mesh", *args, cwd=tmp_path, env=env, timeout=PATIENCE_S)


def nothing_left(tmp_path: Path) -> bool:
    return list((tmp_path / "tmp").iterdir()) == [] and processes_below(tmp_path) == []


def test_five_regions_share_their_work_and_lose_nothing_to_a_kill(tmp_path: Path) -> None:
    done = demo_mesh(tmp_path, "--seconds", "4", "--json")

    assert done.code == 0, done
    told: dict[str, Any] = done.document
    assert (told["lost"], told["unfinished"], told["doubled"], told["kills"]) == (0, 0, 0, 1)
    assert told["completed"] == told["jobs"] > 2 * BURST
    assert [line["region"] for line in told["regions"]] == list(REGIONS)
    assert all(line["completed"] > 0 for line in told["regions"])
    assert sum(line["completed"] for line in told["regions"]) == told["jobs"]
    assert sum(line["runs"] for line in told["regions"]) == len(REGIONS) + 1
    assert told["seconds"] < 20
    assert told["jobs_stolen_in"] + told["jobs_taken_held"] > 0
    assert told["steals_initiated"] >= told["steals_succeeded"]
    assert told["affinity_hits"] > 0
    assert told["starts_counted"] == sum(line["own"] + line["others"] for line in told["regions"]) > 0
    for theft in told["thefts"]:
        assert theft["thief"] != theft["victim"]
        assert theft["jobs"] > 0
    assert nothing_left(tmp_path)


def test_in_a_pipe_it_tells_what_happens_line_by_line(tmp_path: Path) -> None:
    done = demo_mesh(tmp_path, "--seconds", "2", "--no-steal")

    assert done.code == 0, done
    assert re.search(r"\* (\w+) is killed \(-9\) with \d+ jobs", done.out)
    assert f"a burst of {BURST} long jobs" in done.out
    assert " starts again" in done.out
    assert re.search(r"^ +\d+\.\d s  \d+/\d+ done, ", done.out, re.MULTILINE)
    assert re.search(r"affinity  \d+% of \d+ starts that were counted were at the owner", done.out)
    assert "not counted: what a killed region did last, and started before" in done.out
    assert "checked   0 lost, 0 doubled" in done.out
    assert "stolen    0 jobs by 0 of 0 requests over the mesh; 0 jobs by storage alone" in done.out
    assert "\x1b" not in done.out
    assert nothing_left(tmp_path)


class Terminal:
    """A demo on a terminal of its own, at which somebody may press keys."""

    def __init__(self, tmp_path: Path, *args: str) -> None:
        (tmp_path / "tmp").mkdir()
        self.ours, theirs = pty.openpty()
        self.before = termios.tcgetattr(theirs)
        size = {"TERM": "xterm-256color", "COLUMNS": "120", "LINES": "50"}
        self.process = subprocess.Popen(
            [*FLUXMESH, "demo", "mesh", *args],
            cwd=tmp_path,
            env=environment({**size, "TMPDIR": str(tmp_path / "tmp")}),
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
        )
        self.theirs = theirs
        self.seen = ""

    def until(self, pattern: str) -> None:
        """Read what is drawn until it says this."""
        ends_s = time.monotonic() + PATIENCE_S
        while not re.search(pattern, self.plain):
            ready, _, _ = select.select([self.ours], [], [], max(0.0, ends_s - time.monotonic()))
            assert ready, f"{pattern!r} did not come: {self.plain[-3000:]}"
            self.seen += os.read(self.ours, 65_536).decode("utf-8", "replace")

    def end(self) -> int:
        """Read what is still drawn, for a terminal that nobody reads holds its program up; its exit code."""
        ends_s = time.monotonic() + PATIENCE_S
        while self.process.poll() is None:
            assert time.monotonic() < ends_s, self.plain[-3000:]
            if select.select([self.ours], [], [], 0.05)[0]:
                self.seen += os.read(self.ours, 65_536).decode("utf-8", "replace")
        return self.process.returncode

    @property
    def plain(self) -> str:
        return ESCAPES.sub("", self.seen)

    def press(self, key: str) -> None:
        os.write(self.ours, key.encode())

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            self.process.wait(30)
        os.close(self.theirs)
        os.close(self.ours)


def test_keys_bring_a_burst_kill_a_region_and_end_it(tmp_path: Path) -> None:
    with Terminal(tmp_path) as terminal:
        terminal.until("RTT MS, FROM")
        assert LEGEND in terminal.plain
        terminal.until(r"frankfurt +alive")
        seen = terminal.plain.count(f"a burst of {BURST}")
        terminal.press("b")
        terminal.until(f"(?s)(a burst of {BURST}.*){{{seen + 1}}}")
        terminal.press("k")
        terminal.until(r"(\w+) is killed \(-9\)")
        terminal.press("r")
        terminal.until(r"(\w+) starts again")
        terminal.press("q")
        terminal.until(r"checked   0 lost, 0 doubled")
        assert terminal.end() == 0
        assert "killed    once; " in terminal.plain
        assert termios.tcgetattr(terminal.theirs) == terminal.before
    assert nothing_left(tmp_path)


def test_nobody_has_to_press_a_key_for_its_end(tmp_path: Path) -> None:
    with Terminal(tmp_path, "--seconds", "1") as terminal:
        terminal.until(r"checked   0 lost, 0 doubled")
        assert terminal.end() == 0
        result = terminal.plain.partition("Result")[2]
        assert "killed " not in result
        assert "not counted" not in result


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)], ids=str
)
def test_an_interrupted_demo_leaves_no_process_and_no_file(
    number: signal.Signals, code: int, tmp_path: Path
) -> None:
    (tmp_path / "tmp").mkdir()
    with subprocess.Popen(
        [*FLUXMESH, "demo", "mesh"],
        cwd=tmp_path,
        env=environment({"TMPDIR": str(tmp_path / "tmp")}),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        assert process.stdout is not None
        try:
            pids: list[str] = []
            for line in process.stdout:
                if line.startswith("regions "):
                    pids = re.findall(r" (\d+)", line)
                    break
            handles = [os.pidfd_open(int(pid)) for pid in pids]
            assert len(handles) == len(REGIONS)
            process.send_signal(number)
            assert process.wait(30) == code
        finally:
            process.kill()
        for handle in handles:
            assert select.select([handle], [], [], 20)[0]
            os.close(handle)
    if number is not signal.SIGKILL:
        assert nothing_left(tmp_path)


def test_a_signal_on_a_terminal_gives_it_back_as_it_was(tmp_path: Path) -> None:
    with Terminal(tmp_path) as terminal:
        terminal.until("RTT MS, FROM")
        terminal.process.send_signal(signal.SIGINT)
        assert terminal.end() == 130
        assert termios.tcgetattr(terminal.theirs) == terminal.before
    assert nothing_left(tmp_path)


@pytest.mark.parametrize(
    "line",
    [
        ("demo", "mesh", "--url", "sqlite:///x.db"),
        ("demo", "--db", "x.db", "mesh"),
        ("demo", "--dir", ".", "mesh"),
        ("demo", "mesh", "--namespace", "n"),
    ],
    ids=" ".join,
)
def test_what_belongs_to_the_other_demo_is_refused(line: tuple[str, ...], tmp_path: Path) -> None:
    run(*line, cwd=tmp_path).refused(2, "a storage of its own")
    assert list(tmp_path.iterdir()) == []


def test_what_it_refuses_it_does_not_offer(tmp_path: Path) -> None:
    told = run("demo", "mesh", "--help", cwd=tmp_path).out
    assert "--log-level" in told
    assert "--url" not in told
    assert "--namespace" not in told
    assert "--url" in run("demo", "--help", cwd=tmp_path).out


# -- pure parts ----------------------------------------------------------------------------------------


def test_every_two_regions_have_a_distance_and_both_ways_make_a_round_trip() -> None:
    pairs = {frozenset(pair) for pair in combinations(REGIONS, 2)}
    assert {frozenset(pair) for pair in ROUND_TRIPS_MS} == pairs
    ports = {region: 20_000 + 2 * number for number, region in enumerate(REGIONS)}
    weathers = {region: parse_weather(weather_of(region, ports)) for region in REGIONS}
    for one, other in combinations(REGIONS, 2):
        there = weathers[one].to_ms[Address("127.0.0.1", ports[other])]
        back = weathers[other].to_ms[Address("127.0.0.1", ports[one])]
        assert there + back == round_trip_ms(one, other) == round_trip_ms(other, one)


def test_most_requests_are_of_tenants_of_the_busy_regions() -> None:
    ring = Ring(dict.fromkeys(REGIONS, 150))
    for region, keys in tenants().items():
        assert {ring.owner(key) for key in keys} == {region}
    traffic = Traffic("serve", "demo", random.Random(1))
    jobs = [*(job for _ in range(10) for job in traffic.wave()), *traffic.burst()]
    assert len(jobs) == 10 * WAVE + BURST
    owners = Counter(ring.owner_of_slot(job.slot) for job in jobs if job.slot is not None)
    assert sum(owners[region] for region in BUSY) > 0.8 * len(jobs)
    assert all(owners[region] > 0 for region in REGIONS)


def attempt(started_at: float, ended_at: float, outcome: Outcome = Outcome.CRASHED) -> Attempt:
    return Attempt(1, 1, started_at, ended_at, "w", outcome)


@pytest.mark.parametrize(
    ("history", "doubled"),
    [
        ([], False),
        ([attempt(1, 2), attempt(2, 3, Outcome.COMPLETED)], False),
        ([attempt(1, 2, Outcome.COMPLETED), attempt(2, 3, Outcome.COMPLETED)], True),
        ([attempt(1, 3), attempt(2, 4, Outcome.COMPLETED)], True),
    ],
)
def test_a_job_has_doubled_if_it_completed_twice_or_overlapped_itself(
    history: list[Attempt], doubled: bool
) -> None:
    assert has_doubled(history) is doubled


def test_a_body_that_ended_twice_has_doubled_unless_one_of_them_was_killed() -> None:
    assert ended_twice([(False, ["a", "b"]), (False, ["b", "c"])]) == {"b"}
    assert ended_twice([(True, ["a", "b"]), (False, ["b", "c"])]) == set()
    assert ended_twice([(False, ["a", "a"])]) == {"a"}


def test_a_job_that_is_gone_or_ended_without_completing_is_lost_one_that_runs_is_not() -> None:
    def job(name: str, status: Status) -> Job:
        return Job(id=name, task="t", queue="q", priority=2, status=status)

    jobs = {
        "a": job("a", Status.COMPLETED),
        "b": job("b", Status.RUNNING),
        "c": job("c", Status.CANCELLED),
    }
    assert lost_of(["a", "b", "c", "d"], jobs) == ["c", "d"]


@pytest.mark.parametrize(
    ("lost", "unfinished", "doubled", "ended_by_key", "well"),
    [
        (0, 0, 0, False, True),
        (1, 0, 0, True, False),
        (0, 0, 1, True, False),
        (0, 3, 0, False, False),
        (0, 3, 0, True, True),
    ],
)
def test_it_went_well_if_nothing_was_lost_or_doubled_and_what_is_left_was_left_on_purpose(
    *, lost: int, unfinished: int, doubled: int, ended_by_key: bool, well: bool
) -> None:
    numbers = dict.fromkeys(Summary.__struct_fields__, 0) | {"regions": (), "thefts": ()}
    made = {"lost": lost, "unfinished": unfinished, "doubled": doubled, "ended_by_key": ended_by_key}
    assert msgspec.convert(numbers | made, Summary, strict=False).well is well


def telling(region: str, seen: tuple[Seen, ...] = (), **counters: int) -> Telling:
    return Telling(
        region=region, epoch=1, on_ring=5, running=0, held=0, counters=counters, seen=seen, ended=()
    )


def test_the_standing_of_a_region_is_what_the_others_see() -> None:
    alive, dead = Seen("oregon", "alive", 65.2), Seen("oregon", "dead", None)
    tellings = {"frankfurt": telling("frankfurt", (alive,)), "virginia": telling("virginia", (alive,))}
    assert standing_of("oregon", tellings) == "alive"
    assert standing_of("virginia", tellings) == ""
    tellings["saopaulo"] = telling("saopaulo", (dead,))
    assert standing_of("oregon", tellings) == "alive 2, dead 1"
    assert round_trips(tellings) == {("frankfurt", "oregon"): 65.2, ("virginia", "oregon"): 65.2}


def test_counters_of_all_runs_are_summed_and_rates_are_of_the_last_seconds() -> None:
    assert counted([telling("a", x=1), None, telling("a", x=2, y=3)]) == Counter(x=3, y=3)
    rate = Rate()
    assert rate.note(0.0, 0) == 0
    assert rate.note(1.0, 50) == 50
    assert rate.note(10.0, 60) == 0
    assert rate.note(12.0, 100) == 20


def test_what_regions_log_becomes_remarks_and_a_count_by_pair() -> None:
    hear = _Hearing()
    hear("oregon", {"event": "jobs stolen", "member": "virginia", "jobs": 4})
    hear("oregon", {"event": "jobs stolen", "member": "virginia", "jobs": 2})
    hear("oregon", {"event": "member dead", "member": "saopaulo"})
    hear("virginia", {"event": "member dead", "member": "saopaulo"})
    hear("virginia", {"event": "gossip listening"})
    assert list(hear.remarks()) == ["oregon took 6 from virginia", "saopaulo is dead, says oregon, virginia"]
    assert list(hear.remarks()) == []
    assert hear.thefts == {("oregon", "virginia"): 6}


def test_what_a_region_tells_is_read_back() -> None:
    told = telling("oregon", (Seen("virginia", "alive", None),), local_pops=2)
    assert msgspec.json.decode(msgspec.json.encode(told), type=Telling) == told
