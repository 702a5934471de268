"""Job ids: UUIDv7 (RFC 9562), made by the producer, so that a lost reply can be repeated safely."""

from __future__ import annotations

import os
import re
from typing import Final

import uuid_utils

_ID: Final = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-7[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}")


def new_job_id() -> str:
    """A fresh UUIDv7 in its canonical lower-case form; ids of one process sort by creation."""
    return str(uuid_utils.uuid7())


def is_job_id(text: str) -> bool:
    """True for the canonical form of a UUIDv7."""
    return _ID.fullmatch(text) is not None


def job_id_time_ms(job_id: str) -> int:
    """Milliseconds since the epoch at which the producer made the id (by the producer's clock)."""
    return int(job_id[:8] + job_id[9:13], 16)


def new_nonce() -> str:
    """16 random hexadecimal digits, for names that must not be met twice."""
    return os.urandom(8).hex()


if hasattr(os, "register_at_fork"):
    # A forked child must not continue its parent's random sequence.
    os.register_at_fork(after_in_child=uuid_utils.reseed_rng)
