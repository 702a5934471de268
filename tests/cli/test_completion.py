"""fluxmesh completion: the scripts, and what bash makes of one."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from fluxmesh.cli.completion import SHELLS
from fluxmesh.cli.main import COMMANDS
from tests.cli.harness import PATIENCE_S, environment, run


@pytest.mark.parametrize("shell", SHELLS)
def test_the_script_knows_every_command_and_verb(shell: str, tmp_path: Path) -> None:
    done = run("completion", shell, cwd=tmp_path)

    assert (done.code, done.err) == (0, "")
    for word in (*COMMANDS, "groups", "history", "idempotency-key"):
        assert word in done.out, word


def test_a_script_of_a_shell_that_is_there_has_no_mistakes_of_syntax(tmp_path: Path) -> None:
    checked = 0
    for shell in SHELLS:
        program = shutil.which(shell)
        if program is not None:
            script = run("completion", shell, cwd=tmp_path).out
            subprocess.run(
                [program, "-n", "/dev/stdin"], input=script, text=True, check=True, timeout=PATIENCE_S
            )
            checked += 1
    assert checked


@pytest.mark.parametrize(
    ("typed", "wanted"),
    [
        (("wor",), {"worker", "workers"}),
        (("jobs", "hi"), {"history"}),
        (("dlq", "list", "--js"), {"--json"}),
        (("completion", ""), set(SHELLS)),
    ],
)
def test_bash_completes_commands_verbs_options_and_choices(
    typed: tuple[str, ...], wanted: set[str], tmp_path: Path
) -> None:
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("no bash here")
    (tmp_path / "completions").write_text(run("completion", "bash", cwd=tmp_path).out)
    words = " ".join(f"'{word}'" for word in ("fluxmesh", *typed))
    lines = (
        "source completions",
        f"COMP_WORDS=({words}); COMP_CWORD={len(typed)}; COMPREPLY=()",
        f"_shtab_fluxmesh fluxmesh '{typed[-1]}' '' || true",
        "printf '%s\\n' \"${COMPREPLY[@]}\"",
    )
    done = subprocess.run(
        [bash, "--norc", "-c", "\n".join(lines)],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=True,
    )
    assert set(done.stdout.split()) - {"-h", "--help"} == wanted, done


def test_another_shell_is_refused_with_those_there_are(tmp_path: Path) -> None:
    run("completion", "tcsh", cwd=tmp_path).refused(2, "zsh")
    run("completion", cwd=tmp_path).refused(2, "shell")
