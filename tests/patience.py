"""How long a test may wait for what has to be soon, on a machine that runs other tests beside it.

`make cases` and the benchmarks judge how soon; a test of the suite shows that it is soon and not late.
"""

from __future__ import annotations

from typing import Final

AMONG_OTHERS: Final = 3  # times as long may anything take that is run beside other tests


def soon(seconds: float) -> float:
    """The bound of what takes at most so long on a machine of its own."""
    return seconds * AMONG_OTHERS
