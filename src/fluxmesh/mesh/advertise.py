"""Under which address others reach a node: what it is told, else what the machine shows.

In this order: the address that is given (an IP address, a name, either with a port) · the address it listens
at, if that is a single one · the source address of a connection to the first seed that has one · that of the
default route. Never 0.0.0.0, ::, or multicast; loopback only if every seed is on loopback, too.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from fluxmesh.errors import InvalidOption
from fluxmesh.mesh.addresses import canonical, host_refusal, is_loopback, is_wide
from fluxmesh.mesh.messages import Address
from fluxmesh.mesh.options import DEFAULT_PORT, LISTEN_HINT, MeshWorker, parse_host, parse_seed

Lookup = Callable[[str], Sequence[str]]  # the addresses of a name; none if it has none
Source = Callable[[str, int], str | None]  # the own address of a connection to there; None: no way there

# Documentation networks (RFC 5737, RFC 3849): nobody is there, so only the default route leads to them.
_ANYWHERE: Final = ("198.51.100.1", "2001:db8::1")
_HINT: Final = "give mesh_advertise_addr, the address at which the other workers reach this one"


def advertised_address(options: MeshWorker, lookup: Lookup, source: Source) -> Address | str:
    """The address, or why there is none. Asks nobody but the two functions."""
    own = canonical(options.bind_host) or options.bind_host
    if options.advertise_addr is not None:
        return _explicit(options.advertise_addr, options, own, lookup)
    if not is_wide(own):
        if is_loopback(own) and options.seeds_elsewhere:
            return f"it listens at {own} only, which the seeds on other machines cannot reach"
        return Address(own, options.port)
    for host in _sources(options, own, lookup, source):
        if not host_refusal(host) and not (is_loopback(host) and options.seeds_elsewhere):
            return Address(host, options.port)
    return "no way leads to a seed, and there is no default route"


def _explicit(given: str, options: MeshWorker, own: str, lookup: Lookup) -> Address | str:
    host, port = parse_host("mesh_advertise_addr", given)
    looked_up = [host] if canonical(host) else lookup(host)
    found = _of_family(own, looked_up)
    if not looked_up:
        return f"{given} has no address: it does not resolve on this machine"
    if not found:
        return f"{given} has no address of the kind that {own} hears"
    refusal = ""
    for address in found:
        refusal = host_refusal(address)
        if not refusal and is_loopback(address) and options.seeds_elsewhere:
            refusal = "loopback, and there are seeds on other machines"
        if not refusal and is_loopback(own) and not is_loopback(address):
            refusal = f"{address} is told to others, but this worker listens at {own} only"
        if not refusal:
            return Address(address, options.port if port is None else port)
    return f"{given}: {refusal}"


def _sources(options: MeshWorker, own: str, lookup: Lookup, source: Source) -> Iterator[str]:
    for seed in options.seeds:
        if seed == options.sibling_seed:
            continue  # all processes of a worker tell the same
        host, port = parse_seed(seed)
        for address in _of_family(own, [host] if canonical(host) else lookup(host)):
            if found := source(address, port or DEFAULT_PORT):
                yield canonical(found) or found
    for address in _of_family(own, _ANYWHERE):
        if found := source(address, DEFAULT_PORT):
            yield canonical(found) or found


def _of_family(own: str, addresses: Sequence[str]) -> list[str]:
    """Those that a socket bound to `own` can reach; :: reaches both kinds."""
    plain = [canonical(address) or address for address in addresses]
    return [address for address in plain if own == "::" or (":" in address) == (":" in own)]


# --- asking this machine --------------------------------------------------------------------------------


def find_address(options: MeshWorker) -> Address:
    """The address under which others reach this node. Blocks while names are looked up. Raises
    InvalidOption."""
    found = advertised_address(options, _look_up, _source_of_connection)
    if isinstance(found, str):
        hint = LISTEN_HINT if is_loopback(options.bind_host) else _HINT
        raise InvalidOption("mesh_advertise_addr", f"no address to be reached at: {found}", hint=hint)
    return found


def _look_up(name: str) -> list[str]:
    try:
        entries = socket.getaddrinfo(name, None, type=socket.SOCK_DGRAM)
    except (OSError, UnicodeError):
        return []
    return list(dict.fromkeys(str(entry[4][0]) for entry in entries))


def _source_of_connection(host: str, port: int) -> str | None:
    """Connecting a UDP socket sends nothing: the kernel only picks the way."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as sock:
        sock.connect((host, port))
        return str(sock.getsockname()[0])
    return None
