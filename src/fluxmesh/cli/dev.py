"""fluxmesh dev: the API, the worker and its housekeeping in one command, started anew with the code."""

from __future__ import annotations

from fluxmesh.cli.parser import Parser, examples
from fluxmesh.cli.server import add_options


def configure(parser: Parser) -> None:
    parser.epilog = examples("fluxmesh dev --app app:queue", "fluxmesh dev --port 8001 --reload-dir src")
    add_options(parser, reload=True)
    parser.set_defaults(standalone=True)
