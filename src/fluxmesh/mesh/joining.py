"""How a node finds others, and finds them again: seeds for ever, the dead every half minute."""

from __future__ import annotations

import random
from typing import Final

from fluxmesh.mesh.addresses import canonical, host_refusal
from fluxmesh.mesh.effects import Resolve
from fluxmesh.mesh.member import Member
from fluxmesh.mesh.messages import Address, NodeRef, Standing
from fluxmesh.mesh.probe import Prober
from fluxmesh.mesh.pushpull import PushPull
from fluxmesh.mesh.seeds import SeedReport
from fluxmesh.mesh.timing import S
from fluxmesh.mesh.voice import Voice

RETRY_FIRST_NS: Final = S
RETRY_MAX_NS: Final = 60 * S  # and so often seeds that are not alive are dialled by a node that has joined
REDIAL_NS: Final = 30 * S
DIALS_AT_ONCE: Final = 3
ADDRESSES_MAX: Final = 64  # of all seeds, at one try
REDIAL_PINGS: Final = 32  # of the dead, those who waited longest
REDIAL_UNMET: Final = 8  # kept for those of them that never answered us
REDIAL_CALLS: Final = 3
_RETURN_GAP_NS: Final = 5 * S  # between push-pulls with those who came back


class Joiner:
    """Dials; what an exchange brings is taken in by others."""

    def __init__(
        self,
        *,
        voice: Voice,
        pushpull: PushPull,
        prober: Prober,
        rng: random.Random,
        seeds: tuple[str, ...],
        address: Address,
    ) -> None:
        self.voice = voice
        self.pushpull = pushpull
        self.prober = prober
        self.seeds = seeds
        self.has_joined = False
        self._rng = rng
        self._retry_ns = RETRY_FIRST_NS
        self._ours: dict[Address, None] = {address: None}  # addresses at which we met ourselves
        self._ids: dict[Address, NodeRef] = {}  # who answered at a seed's address, whatever it advertises
        self._queue: list[Address] = []
        self._dialled: dict[Address, None] = {}
        self._returned_ns: int | None = None
        self._report = SeedReport(voice)

    # --- seeds ------------------------------------------------------------------------------------------

    def on_seeds_timer(self, now: int) -> None:
        """One try: every name is looked up again, because the answer of the last try may have been a lie."""
        if not self.seeds:
            return
        alone = not self.voice.table.living
        wait = self._retry_ns if alone else RETRY_MAX_NS
        self._retry_ns = min(2 * self._retry_ns, RETRY_MAX_NS) if alone else RETRY_FIRST_NS
        # A tenth of chance, so that a fleet that starts together does not dial together.
        wait = int(wait * (1 + 0.1 * self._rng.random()))
        self._report.next_try_ns = now + wait
        self.voice.arm(("seeds", 0), now + wait)
        self.voice.put(Resolve(self.seeds))

    def on_resolved(self, addresses: dict[str, list[Address]], now: int) -> None:
        alive = {row.address for row in self.voice.table.living if row.record.standing == Standing.ALIVE}
        by_seed: dict[str, list[Address]] = {}
        for seed in self.seeds:
            plain = (_plain(address) for address in addresses.get(seed, ()))
            by_seed[seed] = list(dict.fromkeys(address for address in plain if address is not None))
        found = list(dict.fromkeys(address for several in by_seed.values() for address in several))
        if len(found) > ADDRESSES_MAX:
            found = self._rng.sample(found, ADDRESSES_MAX)
        self._queue = [
            address
            for address in found
            if address not in self._ours and address not in alive and not self._is_alive_there(address)
        ]
        self._report.begin(by_seed, found=found, dialled=self._queue, now=now)
        self._dial()

    def _is_alive_there(self, address: Address) -> bool:
        """Whether the node that last answered there is alive: by its id, since it may be known under another
        address than the one that was dialled."""
        ref = self._ids.get(address)
        row = self.voice.table.find(ref) if ref is not None else None
        return row is not None and row.record.standing == Standing.ALIVE

    def _dial(self) -> None:
        while self._queue and len(self._dialled) < DIALS_AT_ONCE:
            address = self._queue.pop(0)
            if address not in self._dialled and self.pushpull.start(address, why="seed"):
                self._dialled[address] = None

    def ended(self, to: Address, why: str, sender: NodeRef | None, now: int) -> None:
        """A dial is over: the next may begin. `sender` is who answered."""
        if why != "seed":
            return
        self._dialled.pop(to, None)
        if sender is not None and sender.worker_id == self.voice.me.worker_id:
            _remember(self._ours, to, None)
        elif sender is not None:
            _remember(self._ids, to, sender)
        self._report.dialled(to, now, answered=sender is not None)
        self._dial()

    def succeeded(self, sender: NodeRef) -> None:
        """A push-pull with somebody else is complete."""
        if not self.has_joined:
            self.has_joined = True
            self._retry_ns = RETRY_FIRST_NS
            row = self.voice.table.find(sender)
            record = row.record if row is not None else None
            self.voice.tell("joined", record, text=f"by way of {sender.worker_id}")

    # --- the dead ---------------------------------------------------------------------------------------

    def on_redial_timer(self, now: int) -> None:
        """Look for the dead, those first who waited longest: a partition that outlived them heals by this."""
        self.voice.arm(("redial", 0), now + REDIAL_NS)
        dead = [row for row in self.voice.table.tombs.values() if row.record.standing == Standing.DEAD]
        dead.sort(key=lambda row: row.dialled_ns)
        known = [row for row in dead if row.answered]
        unknown = [row for row in dead if not row.answered]
        due = known[: REDIAL_PINGS - min(len(unknown), REDIAL_UNMET)]
        due += unknown[: REDIAL_PINGS - len(due)]
        for index, row in enumerate(due):
            row.dialled_ns = now
            self.prober.hello(row, now)
            if index < REDIAL_CALLS:
                self.pushpull.start(row.address, why="redial")

    def returned(self, member: Member, now: int) -> None:
        """One that was dead here is alive: what its side believes and what ours does may be far apart."""
        last = self._returned_ns
        if last is None or now - last >= _RETURN_GAP_NS:
            self._returned_ns = now
            self.pushpull.start(member.address, why="return")

    def on_push_pull_timer(self, now: int) -> None:
        """One peer by chance, so that what gossip lost is found."""
        table = self.voice.table
        self.voice.arm(("push_pull", 0), now + self.voice.timing.push_pull_every_ns(table.population))
        peers = table.choose(self._rng, 1, _is_alive, among=table.met.rows)
        for peer in peers or table.choose(self._rng, 1, _is_alive):
            self.pushpull.start(peer.address, why="regular")


def _is_alive(row: Member) -> bool:
    return row.record.standing == Standing.ALIVE


def _plain(address: Address) -> Address | None:
    host = canonical(address.host)
    return None if host is None or host_refusal(host) else Address(host, address.port)


def _remember(memory: dict[Address, NodeRef] | dict[Address, None], key: Address, value: object) -> None:
    memory.pop(key, None)
    if len(memory) >= ADDRESSES_MAX:
        del memory[next(iter(memory))]
    memory[key] = value  # type: ignore[assignment]
