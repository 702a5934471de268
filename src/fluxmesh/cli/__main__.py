"""`python -m fluxmesh.cli …` is the same program as `fluxmesh …`."""

import sys

from fluxmesh.cli.main import entry

if __name__ == "__main__":
    sys.exit(entry())
