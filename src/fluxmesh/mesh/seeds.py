"""Which seeds lead nowhere: worth a word when it begins, and seldom afterwards."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Final, Literal

from fluxmesh.mesh.messages import Address, Standing
from fluxmesh.mesh.timing import S
from fluxmesh.mesh.voice import Voice

TELL_AGAIN_NS: Final = 600 * S  # a seed that goes on failing for the same reason
ADDRESSES_TOLD: Final = 3

Why = Literal["no address", "no answer"]


class SeedReport:
    """Follows each try, from the look-up of all seeds to the last dial. A seed has failed when it has no
    address, or when nobody answered at any that was dialled; it is reached when somebody answers at one, be
    it ourselves, or is known to be alive there."""

    def __init__(self, voice: Voice) -> None:
        self.next_try_ns = 0
        self._voice = voice
        self._waits: dict[str, set[Address]] = {}  # by seed: addresses of this try that may still answer
        self._dialled: dict[str, list[Address]] = {}
        self._failed: dict[str, tuple[Why, int]] = {}  # what was told last, and when

    def begin(
        self,
        by_seed: Mapping[str, Sequence[Address]],
        *,
        found: Collection[Address],
        dialled: Collection[Address],
        now: int,
    ) -> None:
        """A try: `found` are the addresses that it can afford, `dialled` those of them where nobody is known
        to be alive."""
        self._waits.clear()
        self._dialled.clear()
        can_be, open_ = set(found), set(dialled)
        for seed, addresses in by_seed.items():
            afforded = [address for address in addresses if address in can_be]
            if not addresses:
                self._fail(seed, "no address", "no address is found for it", now)
            elif any(address not in open_ for address in afforded):
                self._reach(seed)
            elif afforded:
                self._waits[seed] = set(afforded)
                self._dialled[seed] = afforded

    def dialled(self, to: Address, now: int, *, answered: bool) -> None:
        """A dial of a seed is over."""
        for seed, waits in list(self._waits.items()):
            if to not in waits:
                continue
            waits.remove(to)
            if answered:
                del self._waits[seed]
                self._reach(seed)
            elif not waits:
                del self._waits[seed]
                self._fail(seed, "no answer", f"no answer from {_listed(self._dialled[seed])}", now)

    def _fail(self, seed: str, why: Why, text: str, now: int) -> None:
        if self._voice.record.standing == Standing.LEFT:
            return  # whoever leaves looks for nobody any more
        last = self._failed.get(seed)
        if last is None or last[0] != why or now - last[1] >= TELL_AGAIN_NS:
            self._failed[seed] = why, now
            self._voice.tell("seed_failed", text=text, seed=seed, again_ns=max(0, self.next_try_ns - now))

    def _reach(self, seed: str) -> None:
        if self._failed.pop(seed, None) is not None:
            self._voice.tell("seed_reached", seed=seed)


def _listed(addresses: Sequence[Address]) -> str:
    shown = ", ".join(f"{address.host} port {address.port}" for address in addresses[:ADDRESSES_TOLD])
    more = len(addresses) - ADDRESSES_TOLD
    return shown if more <= 0 else f"{shown} and {more} more"
