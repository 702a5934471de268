"""Names of seeds to addresses, on threads, in bounded time. Nothing is remembered: every try asks anew."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
import threading
from collections.abc import Callable, Sequence
from typing import Final

LOOKUP_S: Final = 5.0
LOOKUPS_MOST: Final = 16  # threads that may wait for a name service at once
ADDRESSES_MOST: Final = 32  # of one name

Lookup = Callable[[str], Sequence[str]]


def look_up(host: str) -> list[str]:
    """The addresses of a name, of both families, each once, in the order of the system. Blocks. Raises
    OSError, UnicodeError."""
    found = socket.getaddrinfo(host, None, type=socket.SOCK_DGRAM)
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))[:ADDRESSES_MOST]


def literal(host: str) -> str | None:
    """The host itself if it is an address already."""
    try:
        return str(ipaddress.ip_address(host))
    except ValueError:
        return None


class Names:
    """Looks names up. A name whose last lookup still hangs is not asked for a second time: it has no
    addresses until then. The threads are daemons: nothing waits for a name service at the end."""

    def __init__(self, lookup: Lookup = look_up, *, within_s: float = LOOKUP_S) -> None:
        self._lookup = lookup
        self._within_s = within_s
        self._under_way: set[str] = set()

    async def addresses(self, hosts: Sequence[str]) -> dict[str, list[str]]:
        """For each host its addresses; none if that failed or took too long."""
        names = dict.fromkeys(hosts)
        found = await asyncio.gather(*(self._addresses_of(host) for host in names))
        return dict(zip(names, found, strict=True))

    async def _addresses_of(self, host: str) -> list[str]:
        own = literal(host)
        if own is not None:
            return [own]
        if host in self._under_way or len(self._under_way) >= LOOKUPS_MOST:
            return []
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[list[str]] = loop.create_future()
        self._under_way.add(host)

        def settle(value: list[str]) -> None:
            self._under_way.discard(host)
            if not answer.done():
                answer.set_result(value)

        def work() -> None:
            value: list[str] = []
            try:
                value = list(self._lookup(host))
            except Exception:  # OSError, UnicodeError, and whatever else a name service comes up with
                value = []
            finally:  # a name that stays under way would never be asked for again
                with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
                    loop.call_soon_threadsafe(settle, value)

        try:
            threading.Thread(target=work, name="fluxmesh-mesh-name", daemon=True).start()
        except RuntimeError:  # this machine has no thread to spare now
            self._under_way.discard(host)
            return []
        try:
            return await asyncio.wait_for(answer, self._within_s)
        except TimeoutError:
            return []
