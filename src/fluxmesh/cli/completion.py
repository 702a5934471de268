"""fluxmesh completion: what a shell needs to complete our command lines."""

from __future__ import annotations

from typing import Final

from fluxmesh.cli import output
from fluxmesh.cli.parser import Options, Parser, examples

SHELLS: Final = ("bash", "zsh", "fish")
WHERE: Final = """Print the script by which a shell completes our commands. Write it to a file there:
  bash  ~/.local/share/bash-completion/completions/fluxmesh
  zsh   _fluxmesh in a directory of $fpath
  fish  ~/.config/fish/completions/fluxmesh.fish"""


def configure(parser: Parser) -> None:
    parser.description = WHERE
    parser.epilog = examples("fluxmesh completion bash", "fluxmesh completion fish")
    parser.add_argument("shell", choices=SHELLS, help="the shell that the script is for")
    parser.set_defaults(run=_run)


def _run(options: Options) -> int:
    import shtab  # loaded only here: no other command needs it

    from fluxmesh.cli.main import COMMANDS, build_parser

    script = shtab.complete(build_parser(tuple(COMMANDS)), options.shell)
    with output.writing():
        print(script)
    return 0
