"""Help, version, and what the parser takes and refuses."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from fluxmesh.cli.main import COMMANDS, build_parser
from tests.cli.harness import run

VERBS = {
    "jobs": ("list", "show", "cancel", "retry", "wait", "history"),
    "dlq": ("list", "groups", "replay", "discard"),
    "queues": ("list", "pause", "resume"),
    "config": ("show",),
    "mesh": ("members", "steals", "ring", "owner", "keygen", "simulate"),
}
LEAVES = [
    (noun, *verb) for noun in COMMANDS for verb in ([(v,) for v in VERBS[noun]] if noun in VERBS else [()])
] + [("demo", "mesh")]
ID = "0190a3e4-5b6c-7d8e-9f01-23456789abcd"
# Section 3 of the contract, the commands of this release.
CONTRACT = [
    "server --host 127.0.0.1 --port 8000",
    "server --reload --no-standalone --token t --token u",
    "server --standalone --insecure --host 0.0.0.0 --concurrency 2 --queues mail --app module:queue",
    "worker --concurrency 8 --queues critical,high,default,low",
    "worker --queues mail,default --tiers critical,high --app module:queue --id w --processes 2",
    "worker --reserve critical=1",
    "worker --builtins",
    "worker --no-builtins --grace 2",
    "scheduler --interval 0.2",
    """submit --task batch_process --args [] --kwargs {"items":["a","b"]} --priority high""",
    "submit --task t --delay 5 --queue q --idempotency-key k --wait --json",
    "submit --task t --unique-key k --tags a,b --timeout 3 --max-retries 0 --run-at 2030-01-01T00:00:00Z",
    "submit --task t --wait --wait-timeout 5",
    "jobs list --q state:PENDING --limit 10 --cursor c --json",
    "jobs list --all --json",
    f"jobs show {ID} --json",
    f"jobs cancel {ID}",
    f"jobs retry {ID} {ID}",
    f"jobs wait {ID} --json",
    f"jobs history {ID} --json",
    "dlq list --json",
    "dlq groups --json",
    f"dlq replay {ID}",
    f"dlq discard {ID}",
    "queues list --json",
    "queues pause default",
    "queues resume default",
    "workers --json",
    "demo --dir . --db x.db",
    "demo --keep",
    "doctor --json",
    "config show --json",
    "completion bash",
    "completion zsh",
    "completion fish",
]


@pytest.mark.parametrize("words", CONTRACT)
def test_the_parser_accepts_the_contract(words: str) -> None:
    arguments = words.split(" ")
    common = ["--url", "sqlite:///x.db", "--namespace", "n", "--log-level", "debug", "--log-format", "json"]

    for line in (arguments + common, common + arguments):
        options = build_parser(line).parse_args(line)
        assert callable(options.run)
        assert (options.url, options.namespace, options.log_level, options.log_format) == (
            "sqlite:///x.db",
            "n",
            "debug",
            "json",
        )


@pytest.mark.parametrize("words", LEAVES, ids=" ".join)
def test_every_command_shows_an_example_that_it_accepts(
    words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    line = [*words, "--help"]
    with pytest.raises(SystemExit) as ended:
        build_parser(line).parse_args(line)
    assert ended.value.code == 0

    text = capsys.readouterr().out
    assert "example" in text
    examples = [part.strip() for part in text.partition("example")[2].splitlines() if "fluxmesh" in part]
    assert examples
    for example in examples:
        parts = shlex.split(example)
        arguments = parts[parts.index("fluxmesh") + 1 :]
        build_parser(arguments).parse_args(arguments)


def test_help_of_the_program_names_every_command(tmp_path: Path) -> None:
    done = run("--help", cwd=tmp_path)
    assert done.code == 0
    assert done.err == ""
    for name in COMMANDS:
        assert f"\n    {name} " in done.out


def test_the_version_is_told_on_stdout(tmp_path: Path) -> None:
    done = run("--version", cwd=tmp_path)
    assert (done.code, done.err) == (0, "")
    assert done.out.startswith("fluxmesh ")


@pytest.mark.parametrize(
    "words",
    [
        (),
        ("wroker",),
        ("jobs",),
        ("jobs", "lits"),
        ("jobs", "list", "--lim", "3"),
        ("jobs", "list", "--limit", "0"),
        ("jobs", "list", "--limit", "1001"),
        ("jobs", "list", "--limit", "three"),
        ("jobs", "show"),
        ("worker", "--concurrency", "0"),
        ("worker", "--concurrency", "-3"),
        ("worker", "--processes", "0"),
        ("worker", "--grace", "nan"),
        ("worker", "--queues", "a,,b"),
        ("scheduler", "--interval", "0"),
        ("submit",),
        ("submit", "--task", "t", "--unknown", "1"),
        ("submit", "--task", "t", "--max-retries", "x"),
        ("submit", "--task", "t", "--wait", "--wait-timeout", "-1"),
        ("submit", "--task", "t", "--log-level", "loud"),
    ],
    ids=" ".join,
)
def test_wrong_usage_is_told_in_two_lines(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        build_parser(words).parse_args(words)
    assert ended.value.code == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert [line.split(":")[0] for line in told.err.splitlines()] == ["error", "hint"]


def test_an_option_nobody_knows_ends_a_command_with_2(tmp_path: Path) -> None:
    run("jobs", "list", "--unknown", cwd=tmp_path).refused(2, "--unknown", "hint: ")
    assert list(tmp_path.iterdir()) == []


def test_a_command_loads_no_more_than_it_needs() -> None:
    code = (
        "import sys; from fluxmesh.cli.main import build_parser as b; b(['--version']); print(*sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True
    )
    loaded = set(done.stdout.split())
    assert "fluxmesh.cli.main" in loaded
    late = {"apsw", "rich", "structlog", "fluxmesh.queue", "fluxmesh.worker.worker", "fluxmesh.cli.jobs"}
    assert loaded & late == set()
