"""Which texts are addresses that a node may be reached at."""

from __future__ import annotations

import ipaddress
from functools import lru_cache
from typing import Final

KEPT: Final = 1 << 14  # answers remembered; most fleets are smaller


@lru_cache(maxsize=KEPT)
def host_refusal(host: str) -> str:
    """Why nobody can be reached at `host`, or "". Only the one canonical text of an address is accepted, so
    that one address is never two nodes."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return "not an IP address"
    if address.is_unspecified:
        return "unspecified address"
    if address.is_multicast or host == "255.255.255.255":
        return "multicast address"
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is not None:
            return "IPv4 address in the form of IPv6"
        if address.scope_id is not None:
            return "address with a scope, which means nothing elsewhere"
    return "" if str(address) == host else "address not in its canonical form"


def canonical(host: str) -> str | None:
    """The one text for the address that `host` spells, or None if it spells none. IPv4 in the form of IPv6
    becomes IPv4, as sockets of both families report it."""
    try:
        address = ipaddress.ip_address(host.strip())
    except ValueError:
        return None
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(address)


def is_loopback(host: str) -> bool:
    """True for a loopback address and for the name localhost."""
    if host.lower().rstrip(".") == "localhost":
        return True
    address = canonical(host)
    return address is not None and ipaddress.ip_address(address).is_loopback


def is_wide(host: str) -> bool:
    """True for an address that means every interface."""
    address = canonical(host)
    return address is not None and ipaddress.ip_address(address).is_unspecified
