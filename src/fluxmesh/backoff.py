"""Retry delays. The k-th delay follows the k-th charged end (k = 1, 2, …).

exponential: min(max, base * 2^(k-1)) · linear: min(max, base * k) · fixed: base; then jitter:
half = x U(0.5, 1.0), full = U(0, d), none. (Exponential backoff and jitter: AWS Architecture Blog, 2015.)
"""

from __future__ import annotations

import random
from typing import Final, Literal, get_args

from msgspec import Struct

Strategy = Literal["exponential", "linear", "fixed"]
Jitter = Literal["half", "full", "none"]
STRATEGIES: Final[tuple[str, ...]] = get_args(Strategy)
JITTERS: Final[tuple[str, ...]] = get_args(Jitter)
_MAX_DOUBLINGS: Final = 60  # 2^60 s is past every cap; a larger exponent would only overflow


class Backoff(Struct, frozen=True):
    """How long to wait before a job is tried again. Seconds."""

    strategy: Strategy = "exponential"
    base_s: float = 1.0
    max_s: float = 60.0
    jitter: Jitter = "half"


def retry_delay_s(backoff: Backoff, k: int, rng: random.Random) -> float:
    """Seconds to wait after the k-th charged end (k >= 1)."""
    if backoff.strategy == "exponential":
        delay = min(backoff.max_s, backoff.base_s * 2.0 ** min(k - 1, _MAX_DOUBLINGS))
    elif backoff.strategy == "linear":
        delay = min(backoff.max_s, backoff.base_s * k)
    else:
        delay = backoff.base_s
    if backoff.jitter == "half":
        return delay * rng.uniform(0.5, 1.0)
    if backoff.jitter == "full":
        return rng.uniform(0.0, delay)
    return delay
