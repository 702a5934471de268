"""What a worker's part in the mesh may be set to: names, defaults, checks.

An option that is not given is a setting: `port` is `mesh_port`, FLUXMESH_MESH_PORT, `--mesh-port`. Refusals
name the option by its setting and never show a key.
"""

from __future__ import annotations

import base64
import binascii
import math
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from fluxmesh.config import telling_arguments
from fluxmesh.errors import InvalidOption, shown
from fluxmesh.mesh.addresses import canonical, host_refusal, is_loopback, is_wide
from fluxmesh.mesh.keyfiles import KEYGEN_HINT, given_keys
from fluxmesh.mesh.messages import Meta
from fluxmesh.mesh.seal import KEY_BYTES, KEYS_MAX, Envelope, Keyring, Plain, Sealed
from fluxmesh.mesh.timing import MS, Timing
from fluxmesh.mesh.wire import meta_refusal, name_refusal

SETTING_PREFIX: Final = "mesh_"
DEFAULT_PORT: Final = 7_946
PORTS_EACH: Final = 2  # datagrams, and streams one above
SEEDS_MAX: Final = 256
LISTEN_HINT: Final = "let it listen beyond this machine: mesh_bind_addr, such as 0.0.0.0"
_HOST_MAX: Final = 253
_HOST_NAME: Final = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_-]{0,62})(\.[A-Za-z0-9_-]{1,63})*\.?")

# Numbers: default, least, most. One table for the checks here and the settings elsewhere.
NUMBERS: Final[dict[str, tuple[float, float, float]]] = {
    "port": (DEFAULT_PORT, 1_024, 65_534),
    "affinity_weight": (0.7, 0.0, 1.0),
    "local_buffer": (64, 0, 10_000),
    "steal_batch": (4, 1, 1_000),
    "steal_threshold": (2, 0, 10_000),
    "virtual_nodes": (150, 1, 1_000),
    "steal_rate_limit": (10.0, 0, 1_000_000),
    "protocol_period_ms": (500, 50, 60_000),
    "indirect_ping_count": (3, 0, 16),
    "suspicion_multiplier": (4, 1, 100),
}
NAMES: Final = (
    "port",
    "seeds",
    "steal",
    "affinity_weight",
    "local_buffer",
    "steal_batch",
    "steal_threshold",
    "virtual_nodes",
    "bind_addr",
    "advertise_addr",
    "encryption_key",
    "steal_rate_limit",
    "protocol_period_ms",
    "indirect_ping_count",
    "suspicion_multiplier",
    "insecure",
)


class MeshWorker:
    """A worker's part in the mesh. Every argument has a default, which is a setting; frozen.

    `port`: UDP for gossip, TCP one above. `seeds`: workers to join by, `host:port` or `host` (7946) each;
    empty for the first one. `steal`: take work from others and give it. `affinity_weight`: from 0, work
    goes anywhere, to 1, strictly where its key belongs. `local_buffer`: most jobs held and not started.
    `steal_batch`: most jobs of one steal; `steal_threshold`: ask others when no more than so many are held.
    `virtual_nodes`: points on the ring. `bind_addr`: 0.0.0.0 with a key, 127.0.0.1 without.
    `advertise_addr`: where others reach it, found out if not given. `encryption_key`: base64 of 32 bytes,
    or @FILE with it, or several; the first seals, all open. `steal_rate_limit`: requests per peer and
    second, 0 = any. `protocol_period_ms`, `indirect_ping_count`, `suspicion_multiplier`: how fast and how
    surely death is noticed. `insecure`: permit to listen beyond this machine, and seeds there, without a key.

    Raises InvalidOption. What options allow only together is checked by `resolved`, when it is known what
    the settings add.
    """

    __slots__ = ("_given", "_keys", "key_files_open", "sibling_seed", *NAMES)

    port: int
    seeds: tuple[str, ...]
    steal: bool
    affinity_weight: float
    local_buffer: int
    steal_batch: int
    steal_threshold: int
    virtual_nodes: int
    bind_addr: str | None
    advertise_addr: str | None
    encryption_key: tuple[str, ...]  # none: ()
    steal_rate_limit: float
    protocol_period_ms: int
    indirect_ping_count: int
    suspicion_multiplier: int
    insecure: bool
    sibling_seed: str | None  # the one among `seeds` that is the first process of the same worker
    key_files_open: tuple[str, ...]  # files of its keys that everybody on the machine may read
    _given: dict[str, Any]
    _keys: tuple[bytes, ...]

    @telling_arguments
    def __init__(
        self,
        *,
        port: int | None = None,
        seeds: Sequence[str] | str | None = None,
        steal: bool | None = None,
        affinity_weight: float | None = None,
        local_buffer: int | None = None,
        steal_batch: int | None = None,
        steal_threshold: int | None = None,
        virtual_nodes: int | None = None,
        bind_addr: str | None = None,
        advertise_addr: str | None = None,
        encryption_key: str | Sequence[str] | None = None,
        steal_rate_limit: float | None = None,
        protocol_period_ms: int | None = None,
        indirect_ping_count: int | None = None,
        suspicion_multiplier: int | None = None,
        insecure: bool | None = None,
    ) -> None:
        values = {name: value for name, value in locals().items() if name in NAMES and value is not None}
        put = object.__setattr__
        put(self, "_given", values)
        for name in NUMBERS:
            put(self, name, _number(name, values.get(name)))
        put(self, "seeds", _seeds(values.get("seeds", ())))
        put(self, "steal", _yes_or_no("steal", values.get("steal", True)))
        put(self, "insecure", _yes_or_no("insecure", values.get("insecure", False)))
        put(self, "bind_addr", _bind(values.get("bind_addr")))
        put(self, "advertise_addr", _advertise(values.get("advertise_addr")))
        texts, files_open = given_keys(_texts("encryption_key", values.get("encryption_key", ())))
        keys = _keys(texts)
        put(self, "encryption_key", tuple(keys))
        put(self, "key_files_open", files_open)
        put(self, "_keys", tuple(keys.values()))
        put(self, "sibling_seed", None)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"MeshWorker is frozen: make another one to change {name}")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, MeshWorker) and self._values() == other._values()

    def __hash__(self) -> int:
        return hash(self._values())

    def __reduce__(self) -> tuple[Any, ...]:
        return _made, (self._given, self.sibling_seed)

    def __repr__(self) -> str:
        """Only what differs from the defaults, and no key."""
        parts = []
        for name in NAMES:
            value = getattr(self, name)
            if value != getattr(_DEFAULT, name):
                parts.append(f"{name}=" + ("'***'" if name == "encryption_key" else repr(value)))
        return f"MeshWorker({', '.join(parts)})"

    def _values(self) -> tuple[Any, ...]:
        return tuple(getattr(self, name) for name in NAMES)

    # -- with the settings ---------------------------------------------------------------------------------
    def resolved(self, settings: object = None, *, child: int = 0) -> MeshWorker:
        """The same with `mesh_*` of `settings` for whatever was not given, all of it checked together.
        `child`: the number of this process among those of one worker. Each has two ports, and all but the
        first have that one as a seed, beside the others.

        Raises InvalidOption: a seed elsewhere, or listening to elsewhere, without a key.
        """
        values = {name: getattr(settings, SETTING_PREFIX + name, None) for name in NAMES} | self._given
        whole = MeshWorker(**values)
        whole._check_together()
        return whole._of_child(child) if child else whole

    def _of_child(self, child: int) -> MeshWorker:
        port = self.port + PORTS_EACH * child
        if port > NUMBERS["port"][2]:
            raise InvalidOption(
                "mesh_port", f"process {child} would have port {port:,}", hint="begin with a lower port"
            )
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.bind_host, self.bind_host)
        first = f"[{host}]:{self.port}" if ":" in host else f"{host}:{self.port}"
        seeds = dict.fromkeys([*self.seeds, first])
        given = {**self._given, "port": port, "seeds": tuple(seeds)}
        return _made(given, None if first in self.seeds else first)

    def _check_together(self) -> None:
        if self.advertise_addr is not None:
            self._check_advertised(self.advertise_addr)
        if self._keys:
            return
        elsewhere = [seed for seed in self.seeds if not is_loopback(parse_seed(seed)[0])]
        if elsewhere and not self.insecure:
            raise InvalidOption(
                "mesh_encryption_key",
                f"is missing, and the seed {shown(elsewhere[0])} may be on another machine",
                hint=f"{KEYGEN_HINT}; for workers of this machine alone localhost is the seed, without a key",
            )
        if not is_loopback(self.bind_host) and not self.insecure:
            raise InvalidOption(
                "mesh_bind_addr",
                f"{self.bind_host} can be reached from elsewhere, and there is no key",
                hint=f"{KEYGEN_HINT}, or set mesh_insecure where nobody else is on the network",
            )

    def _check_advertised(self, given: str) -> None:
        """A name is held to the same when it is looked up (mesh/advertise.py)."""
        host, _ = parse_host("mesh_advertise_addr", given)
        if canonical(host) is not None and is_loopback(self.bind_host) and not is_loopback(host):
            raise InvalidOption(
                "mesh_advertise_addr",
                f"{shown(given)} would be told to others, but this worker listens at {self.bind_host} only",
                hint=LISTEN_HINT,
            )

    # -- what follows --------------------------------------------------------------------------------------
    @property
    def seeds_elsewhere(self) -> bool:
        """Whether a seed is on another machine, so that nobody there could do with a loopback address."""
        return any(not is_loopback(parse_seed(seed)[0]) for seed in self.seeds if seed != self.sibling_seed)

    @property
    def bind_host(self) -> str:
        """Where it listens."""
        return self.bind_addr or ("0.0.0.0" if self._keys else "127.0.0.1")

    @property
    def is_exposed(self) -> bool:
        """It listens beyond this machine without a key: worth a warning."""
        return not self._keys and not is_loopback(self.bind_host)

    def timing(self) -> Timing:
        return Timing(
            period_ns=self.protocol_period_ms * MS,
            indirect_ping_count=self.indirect_ping_count,
            suspicion_multiplier=self.suspicion_multiplier,
        )

    def envelope(self, *, label: str, salt: bytes) -> Envelope:
        """What seals and opens for one run of a node. `label` keeps two meshes apart; `salt`: 12 random
        bytes, new in every run."""
        if not self._keys:
            return Plain(label=label)
        return Sealed(Keyring(self._keys, label=label), salt=salt)


def keygen() -> str:
    """A new key, as the options take it."""
    return base64.b64encode(os.urandom(KEY_BYTES)).decode()


def check_member(worker_id: str, meta: Meta) -> None:
    """Raises InvalidOption for an id or particulars that every other member would refuse."""
    if refusal := name_refusal(worker_id):
        raise InvalidOption(
            "id", f"{shown(worker_id)} cannot be in the mesh: {refusal}", hint="a shorter name"
        )
    if refusal := meta_refusal(meta):
        raise InvalidOption(
            "queues",
            f"what the mesh tells of this worker is refused: {refusal}",
            hint="fewer queues, or shorter names",
        )


def parse_seed(seed: str) -> tuple[str, int | None]:
    """The host and the port (None: the default one) of `host`, `host:port`, `[v6]`, `[v6]:port` or a bare v6
    address. Raises InvalidOption."""
    return parse_host("mesh_seeds", seed)


def parse_host(option: str, text: str) -> tuple[str, int | None]:
    """The same for any option."""
    given = text.strip()
    host, port_text = given, None
    if given.startswith("["):
        host, closed, rest = given[1:].partition("]")
        if not closed or (rest and not rest.startswith(":")) or ":" not in host:
            raise _no_host(option, text)
        port_text = rest[1:] if rest else None
    elif given.count(":") == 1:
        host, _, port_text = given.partition(":")
    address = canonical(host)
    if address is None and (len(host) > _HOST_MAX or not _HOST_NAME.fullmatch(host) or _is_number(host)):
        raise _no_host(option, text)
    return address or host, None if port_text is None else _port(option, text, port_text)


def _no_host(option: str, text: str) -> InvalidOption:
    return InvalidOption(option, f"{shown(text)} is no host", hint="host, host:port, or [IPv6 address]:port")


def _is_number(host: str) -> bool:
    """Digits and dots that are no address: a mistake, not a name."""
    return host.replace(".", "").isdigit()


def _port(option: str, text: str, port: str) -> int:
    _, least, most = NUMBERS["port"]
    if not (port.isascii() and port.isdigit() and len(port) <= 5 and least <= int(port) <= most):
        raise InvalidOption(
            option,
            f"the port of {shown(text)} is not from {least:,} to {most:,}",
            hint=f"such as {DEFAULT_PORT}",
        )
    return int(port)


def _number(name: str, value: object) -> float:
    default, least, most = NUMBERS[name]
    if value is None:
        return default
    whole = isinstance(default, int)
    if isinstance(value, bool) or not isinstance(value, int if whole else int | float):
        kind = "a whole number" if whole else "a number"
        raise InvalidOption(SETTING_PREFIX + name, f"{shown(value)} is not {kind}", hint=f"such as {default}")
    if not least <= value <= most or not math.isfinite(value):
        raise InvalidOption(
            SETTING_PREFIX + name,
            f"{shown(value)} is not from {least:,} to {most:,}",
            hint=f"{default} is the default",
        )
    return value if whole else float(value)  # 1 and 1.0 are told to others by different bytes


def _yes_or_no(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise InvalidOption(SETTING_PREFIX + name, f"{shown(value)} is not True or False")
    return value


def _texts(name: str, value: object) -> list[str]:
    """A list of texts, or one text with commas; without empty ones."""
    items: Sequence[object] = value.split(",") if isinstance(value, str) else value  # type: ignore[assignment]
    if not isinstance(items, list | tuple) or not all(isinstance(item, str) for item in items):
        raise InvalidOption(
            SETTING_PREFIX + name, "is not text, nor a list of texts", hint="several are separated by commas"
        )
    return [text for item in items if (text := str(item).strip())]


def _seeds(value: object) -> tuple[str, ...]:
    seeds = tuple(dict.fromkeys(_texts("seeds", value)))
    if len(seeds) > SEEDS_MAX:
        raise InvalidOption("mesh_seeds", f"{len(seeds):,} seeds; a few will do", hint=f"at most {SEEDS_MAX}")
    for seed in seeds:
        host, _ = parse_seed(seed)
        if canonical(host) is not None and (refusal := host_refusal(host)):
            raise InvalidOption(
                "mesh_seeds", f"{shown(seed)}: {refusal}", hint="the address of a worker, or its name"
            )
    return seeds


def _bind(value: object) -> str | None:
    if value is None or value == "":
        return None
    address = canonical(value) if isinstance(value, str) else None
    if address is None:
        raise InvalidOption(
            "mesh_bind_addr",
            f"{shown(value)} is not an IP address",
            hint="an address of this machine, not a name; 0.0.0.0 means all of them",
        )
    if not is_wide(address) and (refusal := host_refusal(address)):
        raise InvalidOption("mesh_bind_addr", f"{shown(value)}: {refusal}", hint="an address of this machine")
    return address


def _advertise(value: object) -> str | None:
    if value is None or value == "":
        return None
    if not isinstance(value, str):
        raise InvalidOption(
            "mesh_advertise_addr", f"{shown(value)} is not text", hint="IP, name or host:port"
        )
    host, _ = parse_host("mesh_advertise_addr", value)
    if canonical(host) is not None and (refusal := host_refusal(host)):
        raise InvalidOption(
            "mesh_advertise_addr", f"{shown(value)}: {refusal}", hint="the address at which others reach it"
        )
    return value.strip()


def _keys(texts: Sequence[str]) -> Mapping[str, bytes]:
    """Each key as it was given and as its bytes. No message shows any of it."""
    if len(texts) > KEYS_MAX:
        raise InvalidOption(
            "mesh_encryption_key",
            f"{len(texts)} keys, at most {KEYS_MAX}",
            hint="drop those no longer in use",
        )
    keys: dict[str, bytes] = {}
    for number, text in enumerate(texts, 1):
        which = f"key {number} of {len(texts)}" if len(texts) > 1 else "the key"
        try:
            key = base64.b64decode(text, validate=True)
        except (binascii.Error, ValueError):
            raise InvalidOption("mesh_encryption_key", f"{which} is not base64", hint=KEYGEN_HINT) from None
        if len(key) != KEY_BYTES:
            raise InvalidOption(
                "mesh_encryption_key",
                f"{which} is base64 of {len(key)} bytes, not of {KEY_BYTES}",
                hint=KEYGEN_HINT,
            )
        if key in keys.values():
            raise InvalidOption("mesh_encryption_key", f"{which} is there twice", hint="each key once")
        keys[text] = key
    return keys


def _made(given: Mapping[str, Any], sibling_seed: str | None) -> MeshWorker:
    options = MeshWorker(**given)
    object.__setattr__(options, "sibling_seed", sibling_seed)
    return options


_DEFAULT: Final = MeshWorker()
