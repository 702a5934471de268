"""The real seal around the datagrams of a simulated mesh, with keys that a seed makes."""

from __future__ import annotations

from hashlib import blake2b

from fluxmesh.mesh.seal import KEY_BYTES, SALT_BYTES, Keyring, Sealed

LABEL = "simulated"


def made(text: str, size: int) -> bytes:
    """Bytes that look like chance and are a function of the text. Fit for nothing but simulations."""
    return blake2b(text.encode(), digest_size=size).digest()


class NodeSeal:
    """One node's seal. `refused` counts, by reason, what it did not open."""

    def __init__(self, keys: list[bytes], *, label: str, salt: bytes) -> None:
        self._label = label
        self._sealed = Sealed(Keyring(keys, label=label), salt=salt)
        self.refused: dict[str, int] = {}

    def use(self, keys: list[bytes]) -> None:
        self._sealed.use(Keyring(keys, label=self._label))

    def seal(self, data: bytes) -> bytes:
        return self._sealed.seal(data)

    def open(self, data: bytes, now_ns: int) -> bytes | None:
        opened = self._sealed.open(data, now_ns)
        if isinstance(opened, bytes):
            return opened
        self.refused[str(opened)] = self.refused.get(str(opened), 0) + 1
        return None


class Sealing:
    """Keys and salts of one run."""

    def __init__(self, *, seed: int) -> None:
        self._seed = seed
        self.key = self.key_of("ours")

    def key_of(self, name: str) -> bytes:
        return made(f"key {name} of {self._seed}", KEY_BYTES)

    def of(self, name: str, epoch: int, *, keys: list[bytes] | None = None) -> NodeSeal:
        return NodeSeal(keys or [self.key], label=LABEL, salt=self._salt(f"{name} {epoch}"))

    def strange(self, what: str) -> NodeSeal:
        """Another key under our label, or our key under another label."""
        if what == "key":
            return NodeSeal([self.key_of("theirs")], label=LABEL, salt=self._salt(what))
        return NodeSeal([self.key], label="another", salt=self._salt(what))

    def _salt(self, text: str) -> bytes:
        return made(f"salt {text} of {self._seed}", SALT_BYTES)
