"""Which server the next connection goes to. Looked up anew for each, by one of all who wait for it."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Final, Protocol

from redis import exceptions as driver
from redis.asyncio.connection import AbstractConnection

from fluxmesh.errors import StorageError, StorageRefused, StorageUnreachable
from fluxmesh.storage.redis.dialer import CONNECT_S, Dialer, shown
from fluxmesh.storage.redis.target import Address

_PAUSE_S: Final = 0.05
_PAUSE_MOST_S: Final = 1.0
_NODES_MOST: Final = 64


class Route(Protocol):
    async def connect(self) -> AbstractConnection:
        """A connection to the server in charge. Raises StorageUnreachable, StorageRefused."""
        ...

    def heard(self, refusal: Exception) -> None:
        """Learn from a refusal that names another server."""
        ...


class FixedRoute:
    """To the server that the URL names; of several the first that is reached."""

    def __init__(self, dialer: Dialer, hosts: Sequence[Address]) -> None:
        self._dialer = dialer
        self._hosts = hosts

    async def connect(self) -> AbstractConnection:
        failed: list[StorageError] = []
        for host in self._hosts:
            try:
                return await self._dialer.dial(host)
            except StorageError as error:
                failed.append(error)
        raise failed[-1]

    def heard(self, refusal: Exception) -> None:
        """It has nowhere else to go."""


class FoundRoute(ABC):
    """To a server that others name. Whoever comes while it is looked up waits for that answer; after a
    failure the next look-up comes later and later, and until then the failure is told again."""

    def __init__(self, dialer: Dialer) -> None:
        self._dialer = dialer
        self._looking: asyncio.Task[Address] | None = None
        self._failed: StorageError | None = None
        self._pause_s = _PAUSE_S
        self._again_at = 0.0

    async def connect(self) -> AbstractConnection:
        address = await self._looked_up()
        try:
            return await self._dialer.dial(address)
        except StorageError as error:
            self._fail(error)
            raise

    async def _looked_up(self) -> Address:
        loop = asyncio.get_running_loop()
        if self._failed is not None and loop.time() < self._again_at:
            raise type(self._failed)(self._failed.message, hint=self._failed.hint)
        if self._looking is None:
            self._looking = asyncio.create_task(self._look_up())
            self._looking.add_done_callback(_look_at)
        # One who gives up must not take the answer away from the others.
        return await asyncio.shield(self._looking)

    async def _look_up(self) -> Address:
        try:
            async with asyncio.timeout(CONNECT_S):
                found = await self._find()
        except TimeoutError as error:
            told = StorageUnreachable(
                f"{self._dialer.where}: nobody said in {CONNECT_S:g} s which server is in charge"
            )
            self._fail(told)
            raise told from error
        except StorageError as error:
            self._fail(error)
            raise
        finally:
            self._looking = None
        self._failed, self._pause_s = None, _PAUSE_S
        return found

    def _fail(self, error: StorageError) -> None:
        self._failed = error
        self._again_at = asyncio.get_running_loop().time() + self._pause_s
        self._pause_s = min(self._pause_s * 2, _PAUSE_MOST_S)

    @abstractmethod
    async def _find(self) -> Address:
        """Ask around. Raises StorageUnreachable if nobody knows, StorageRefused if nobody may tell us."""


def _look_at(task: asyncio.Task[Address]) -> None:
    """Whoever waited for it may have given up; then nobody is to be told of its failure."""
    if not task.cancelled():
        task.exception()


class SentinelRoute(FoundRoute):
    """To the primary that Sentinels name, once it has said itself that it is one: a Sentinel may be cut off,
    or behind the times."""

    def __init__(self, dialer: Dialer, sentinels: Sequence[Address], service: str) -> None:
        super().__init__(dialer)
        self._sentinels = list(sentinels)
        self._service = service

    async def _find(self) -> Address:
        failed: dict[str, str] = {}
        refused: StorageRefused | None = None
        for sentinel in list(self._sentinels):
            try:
                named = await self._ask(sentinel)
                if named is None:
                    failed[shown(sentinel)] = f"knows no service {self._service!r}"
                elif shown(named) in failed:
                    failed[shown(sentinel)] = f"names {shown(named)} as well"
                elif (role := await self._role(named)) != "master":
                    failed[shown(named)] = f"is a {role}, whatever Sentinel {shown(sentinel)} says"
                else:
                    self._sentinels.remove(sentinel)
                    self._sentinels.insert(0, sentinel)
                    return named
            except StorageError as error:
                refused = error if isinstance(error, StorageRefused) else refused
                failed[shown(sentinel)] = error.message.removeprefix(f"{self._dialer.where}: ")
        if refused is not None:
            raise refused
        said = "; ".join(f"{who}: {what}" for who, what in failed.items())
        raise StorageUnreachable(
            f"{self._dialer.where}: no primary found ({said})",
            hint="are the Sentinels running, and does one know a living primary of that service?",
        )

    async def _ask(self, sentinel: Address) -> Address | None:
        try:
            answer = await self._dialer.question(
                sentinel, "SENTINEL", "GET-MASTER-ADDR-BY-NAME", self._service, sentinel=True
            )
        except StorageRefused as error:
            if "unknown command" not in error.message.lower():
                raise
            raise StorageRefused(
                f"{self._dialer.where}: {shown(sentinel)} is no Sentinel, but a server",
                hint="name the Sentinels (their port is 26379 as a rule), or the server itself: redis://",
            ) from error
        return None if answer is None else (answer[0].decode(), int(answer[1]))

    async def _role(self, address: Address) -> str:
        answer = await self._dialer.question(address, "ROLE")
        return str(answer[0].decode())

    def heard(self, refusal: Exception) -> None:
        """Sentinels are asked anew in any case."""


class ClusterRoute(FoundRoute):
    """To the node of a cluster that owns one slot. Any node knows which; all that were named are kept."""

    def __init__(self, dialer: Dialer, nodes: Sequence[Address], slot: int) -> None:
        super().__init__(dialer)
        self._nodes = list(nodes)
        self._slot = slot

    async def connect(self) -> AbstractConnection:
        try:
            return await super().connect()
        except StorageError:
            self._nodes.append(self._nodes.pop(0))  # ask another one next time: this one may be cut off
            raise

    async def _find(self) -> Address:
        failed: list[str] = []
        for node in list(self._nodes):
            try:
                owner = self._owner(await self._dialer.question(node, "CLUSTER", "SLOTS"), node)
            except StorageRefused:
                raise
            except StorageError as error:
                failed.append(f"{shown(node)}: {error.message.removeprefix(f'{self._dialer.where}: ')}")
                continue
            if owner is not None:
                return owner
            failed.append(f"{shown(node)}: nobody owns slot {self._slot}")
        raise StorageUnreachable(
            f"{self._dialer.where}: no node found ({'; '.join(failed[-3:])})",
            hint="`redis-cli cluster info` says what the cluster lacks",
        )

    def _owner(self, ranges: Sequence[Sequence[Any]], asked: Address) -> Address | None:
        """The owner of the slot; all others are noted as nodes to ask."""
        owner = None
        for first, last, *nodes in ranges:
            addresses = [(node[0].decode() if node[0] else asked[0], int(node[1])) for node in nodes]
            for address in addresses:
                self._note(address)
            if first <= self._slot <= last:
                owner = addresses[0]
        if owner is not None:
            self._note(owner, first=True)
        return owner

    def _note(self, address: Address, *, first: bool = False) -> None:
        if address in self._nodes:
            if not first:
                return
            self._nodes.remove(address)
        self._nodes.insert(0 if first else len(self._nodes), address)
        del self._nodes[_NODES_MOST:]

    def heard(self, refusal: Exception) -> None:
        if isinstance(refusal, driver.MovedError) and refusal.host:
            self._note((refusal.host, refusal.port), first=True)
