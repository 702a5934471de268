"""`fluxmesh`, with a mutant or a skewed clock if the environment names one.

python -m tests.chaos.entry worker …

The children of a worker import tests.chaos.app, which applies the same.
"""

from __future__ import annotations

import sys

from fluxmesh.cli.main import entry
from tests.chaos import mutants, skew

if __name__ == "__main__":
    mutants.apply_named()
    skew.apply_named()
    sys.exit(entry())
