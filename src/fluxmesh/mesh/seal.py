"""Authenticated encryption of datagrams and streams (AES-256-GCM), and the replay windows.

A sealed datagram is

    version 1 | key mark 2 | label mark 1 | process salt 12 | counter 8 | ciphertext | tag 16

which is SEAL_BYTES more than what it carries. Its key is BLAKE2b(key, salt, label), so no two processes ever
seal under the same one, and the counter of a process is its nonce. Header and label are associated data. The
marks only say which key is meant and whose mesh it is, so that a refusal can name its reason; nothing is
believed because of them.

A stream begins with one greeting of each side, a nonce in it. Each direction has a key of its own, derived
from both nonces, and a counter as its nonce: nothing of one connection, side or place can be used in another.

Without a key there is `Plain`, a class of its own: what seals never falls back to it, and never opens it.
"""

from __future__ import annotations

import struct
from collections import OrderedDict
from collections.abc import Sequence
from enum import StrEnum
from hashlib import blake2b
from typing import Final, Protocol

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from fluxmesh.mesh.timing import FRAME_MAX_BYTES, MEMBERS_MAX, SEAL_BYTES, TOMBSTONE_NS, S

KEY_BYTES: Final = 32
KEYS_MAX: Final = 4
SALT_BYTES: Final = 12
GREETING_BYTES: Final = 16
REPLAY_WINDOW: Final = 1_024  # packets of one process that may overtake each other
SALTS_MAX: Final = MEMBERS_MAX + MEMBERS_MAX // 4  # runs of which a window is kept
SALT_IDLE_NS: Final = TOMBSTONE_NS  # and for how long after their last packet
SWEEP_NS: Final = 600 * S  # how often those are looked for
CIPHERS_MAX: Final = 256  # ready to use; one takes 3 kB, and another is made in 2 us

_SEALED: Final = 0xF1  # none of these begins a msgpack array
_PLAIN: Final = 0xF0
_HEADER_BYTES: Final = 24
_COUNTER: Final = struct.Struct(">Q")
_NONCE_HEAD: Final = bytes(4)
_TAG_BYTES: Final = 16
_WINDOW_MASK: Final = (1 << REPLAY_WINDOW) - 1
_GREETING: Final = struct.Struct(">B3s12s")
_LENGTH: Final = struct.Struct(">I")


class Refusal(StrEnum):
    """Why something does not open."""

    TRUNCATED = "truncated"
    VERSION = "seal version"
    PLAINTEXT = "plaintext where a key is needed"
    SEALED = "sealed, and no key here"
    WRONG_KEY = "wrong key"
    WRONG_LABEL = "wrong label"
    REPLAY = "replay"
    FORGED = "forged or damaged"
    REFLECTED = "reflected"
    TOO_LARGE = "frame too large"


class Session(Protocol):
    """One side of one connection. Obligations: never raises on any bytes. `greeting` is sent before the first
    frame, `greeted` takes that of the other side: False if it is none of ours. After a False or a None the
    connection is over, and `refusal` says why."""

    greeting_bytes: int
    refusal: Refusal | None

    def greeting(self) -> bytes: ...
    def greeted(self, data: bytes) -> bool: ...
    def seal(self, frame: bytes) -> bytes: ...
    def open(self, sealed: bytes) -> bytes | None: ...


class Envelope(Protocol):
    """What a node wraps everything in that it says. Obligations: never raises on any bytes; one per run of a
    node, used by one thread."""

    def seal(self, data: bytes) -> bytes: ...
    def open(self, data: bytes, now: int) -> bytes | Refusal: ...
    def session(self, nonce: bytes) -> Session: ...


class Keyring:
    """Up to four keys of 32 bytes and the label of the mesh. The first key seals, all of them open: so a key
    is changed by rolling first [old, new], then [new, old], then [new] through the fleet."""

    def __init__(self, keys: Sequence[bytes], *, label: str) -> None:
        """Raises ValueError without ever showing a key; whoever reads keys from people checks them first."""
        if not 1 <= len(keys) <= KEYS_MAX:
            raise ValueError(f"{len(keys)} keys, not 1 to {KEYS_MAX}")
        if any(len(key) != KEY_BYTES for key in keys):
            raise ValueError(f"a key is not {KEY_BYTES} bytes long")
        self.label = label.encode()
        self._by_mark = {self._mark(key): key for key in keys}
        self.seals_with = self._mark(keys[0])
        if len(self._by_mark) < len(keys):
            raise ValueError("two keys are the same, or look the same from outside; make a new one")

    def __repr__(self) -> str:
        return f"<Keyring of {len(self._by_mark)}, label {self.label.decode()!r}>"

    def _mark(self, key: bytes) -> bytes:
        which = blake2b(key=key, digest_size=2, person=b"fluxmesh key").digest()
        return which + blake2b(self.label, key=key, digest_size=1, person=b"fluxmesh label").digest()

    def key_of(self, mark: bytes) -> bytes | Refusal:
        """The key that is meant by the mark of a packet."""
        key = self._by_mark.get(mark)
        if key is not None:
            return key
        known = any(own[:2] == mark[:2] for own in self._by_mark)
        return Refusal.WRONG_LABEL if known else Refusal.WRONG_KEY

    def derived(self, key: bytes, what: bytes, salt: bytes) -> AESGCM:
        """The cipher of BLAKE2b(key, salt, label) for one purpose (at most 16 bytes)."""
        return AESGCM(blake2b(salt + self.label, key=key, digest_size=32, person=what).digest())


class Sealer:
    """Seals the datagrams of one run of a node. `salt`: 12 random bytes that no other run ever had."""

    def __init__(self, keyring: Keyring, *, salt: bytes) -> None:
        if len(salt) != SALT_BYTES:
            raise ValueError(f"a salt has {SALT_BYTES} bytes, not {len(salt)}")
        self._salt = salt
        self._counter = 0
        self.use(keyring)

    def use(self, keyring: Keyring) -> None:
        """Seal by another ring from now on. The counter goes on, so no nonce comes twice."""
        key = keyring.key_of(keyring.seals_with)
        assert isinstance(key, bytes)
        self._label = keyring.label
        self._whose = bytes((_SEALED,)) + keyring.seals_with + self._salt
        self._cipher = keyring.derived(key, b"fluxmesh packet", self._salt)

    def seal(self, data: bytes) -> bytes:
        self._counter += 1
        counter = self._counter.to_bytes(8, "big")
        header = self._whose + counter
        return header + self._cipher.encrypt(_NONCE_HEAD + counter, data, header + self._label)


class _Run:
    """What was heard of one run of a node under one key: the highest counter, and which of the REPLAY_WINDOW
    below it."""

    __slots__ = ("cipher", "highest", "seen", "used_ns")

    def __init__(self) -> None:
        self.highest = 0
        self.seen = 0  # bit 0 is the highest
        self.used_ns = 0
        self.cipher: AESGCM | None = None

    def is_new(self, counter: int) -> bool:
        behind = self.highest - counter
        return behind < 0 or (behind < REPLAY_WINDOW and not self.seen >> behind & 1)

    def note(self, counter: int) -> None:
        ahead = counter - self.highest
        if ahead <= 0:
            self.seen |= 1 << -ahead
        else:
            self.seen = (self.seen << ahead | 1) & _WINDOW_MASK if ahead < REPLAY_WINDOW else 1
            self.highest = counter


class Opener:
    """Opens the datagrams of all others; one per run of a node, since it remembers what it has opened.

    Only what is authentic is remembered, so strangers fill nothing. The runs that were silent longest are
    forgotten first: their packets could then be replayed, which the order of (epoch, incarnation) makes
    harmless.
    """

    def __init__(self, keyring: Keyring) -> None:
        self._runs: dict[bytes, _Run] = {}  # by mark and salt
        self._ready: OrderedDict[bytes, _Run] = OrderedDict()  # those with a cipher, the oldest first
        self._sweep_at_ns: int | None = None
        self.use(keyring)

    def use(self, keyring: Keyring) -> None:
        """Open by another ring from now on; what was seen stays seen."""
        self._keyring = keyring
        self._label = keyring.label
        for run in self._ready.values():
            run.cipher = None
        self._ready.clear()

    def __len__(self) -> int:
        return len(self._runs)

    def open(self, data: bytes, now: int) -> bytes | Refusal:
        """What was sealed, or why it is not known. `now`: ns of a monotonic clock."""
        if len(data) < SEAL_BYTES or data[0] != _SEALED:
            return _of_version(data[0]) if data and data[0] != _SEALED else Refusal.TRUNCATED
        whose = data[1:16]
        (counter,) = _COUNTER.unpack_from(data, 16)
        run = self._runs.get(whose)
        if run is not None and counter <= run.highest and not run.is_new(counter):
            return Refusal.REPLAY
        cipher = run.cipher if run is not None else None
        if cipher is None:
            key = self._keyring.key_of(whose[:3])
            if isinstance(key, Refusal):
                return key
            cipher = self._keyring.derived(key, b"fluxmesh packet", whose[3:])
        try:
            nonce = _NONCE_HEAD + data[16:24]
            opened = cipher.decrypt(nonce, data[_HEADER_BYTES:], data[:_HEADER_BYTES] + self._label)
        except InvalidTag:
            return Refusal.FORGED
        if run is None:
            run = self._added(whose, now)
        if run.cipher is None:
            self._keep_ready(whose, run, cipher)
        run.note(counter)
        run.used_ns = now
        return opened

    def _keep_ready(self, whose: bytes, run: _Run, cipher: AESGCM) -> None:
        run.cipher = cipher
        self._ready[whose] = run
        if len(self._ready) > CIPHERS_MAX:
            self._ready.popitem(last=False)[1].cipher = None

    def _added(self, whose: bytes, now: int) -> _Run:
        if self._sweep_at_ns is None or now >= self._sweep_at_ns:
            self._sweep_at_ns = now + SWEEP_NS
            self._forget([known for known, run in self._runs.items() if run.used_ns < now - SALT_IDLE_NS])
        if len(self._runs) >= SALTS_MAX:  # many at once, since looking for them takes as long as for one
            by_silence = sorted(self._runs, key=lambda known: self._runs[known].used_ns)
            self._forget(by_silence[: SALTS_MAX // 16 + 1])
        run = self._runs[whose] = _Run()
        return run

    def _forget(self, some: Sequence[bytes]) -> None:
        for whose in some:
            del self._runs[whose]
            self._ready.pop(whose, None)


def _of_version(version: int) -> Refusal:
    # A bare msgpack array is plaintext as well.
    return Refusal.PLAINTEXT if version == _PLAIN or version & 0xF0 == 0x90 else Refusal.VERSION


class SealedSession:
    """One side of one connection under a key. `nonce`: 12 random bytes."""

    greeting_bytes = GREETING_BYTES

    def __init__(self, keyring: Keyring, *, nonce: bytes) -> None:
        if len(nonce) != SALT_BYTES:
            raise ValueError(f"a nonce has {SALT_BYTES} bytes, not {len(nonce)}")
        self._keyring = keyring
        self._nonce = nonce
        self._sealing: AESGCM | None = None
        self._opening: AESGCM | None = None
        self._sealed = 0
        self._opened = 0
        self.refusal: Refusal | None = None

    def greeting(self) -> bytes:
        """Names the key that this side seals with."""
        return _GREETING.pack(_SEALED, self._keyring.seals_with, self._nonce)

    def greeted(self, data: bytes) -> bool:
        if len(data) != GREETING_BYTES:
            return self._refuse(Refusal.TRUNCATED)
        version, mark, theirs = _GREETING.unpack(data)
        if version != _SEALED:
            return self._refuse(_of_version(version))
        if theirs == self._nonce:
            return self._refuse(Refusal.REFLECTED)  # both directions would have one key
        key = self._keyring.key_of(mark)
        if isinstance(key, Refusal):
            return self._refuse(key)
        own = self._keyring.key_of(self._keyring.seals_with)
        assert isinstance(own, bytes)
        self._sealing = self._keyring.derived(own, b"fluxmesh stream", self._nonce + theirs)
        self._opening = self._keyring.derived(key, b"fluxmesh stream", theirs + self._nonce)
        return True

    def seal(self, frame: bytes) -> bytes:
        """Raises ValueError for a frame that would be too large sealed, or before the greeting came."""
        size = len(frame) + _TAG_BYTES
        if self._sealing is None:
            raise ValueError("nothing can be sealed before the other side has greeted")
        if size > FRAME_MAX_BYTES:
            raise ValueError(f"a frame of {len(frame):,} bytes; {FRAME_MAX_BYTES - _TAG_BYTES:,} fit")
        nonce = self._sealed.to_bytes(12, "big")
        self._sealed += 1
        return self._sealing.encrypt(nonce, frame, _LENGTH.pack(size))

    def open(self, sealed: bytes) -> bytes | None:
        if self._opening is None or self.refusal is not None or len(sealed) < _TAG_BYTES:
            self._refuse(self.refusal or Refusal.TRUNCATED)
            return None
        if len(sealed) > FRAME_MAX_BYTES:
            self._refuse(Refusal.TOO_LARGE)
            return None
        nonce = self._opened.to_bytes(12, "big")
        self._opened += 1
        try:
            return self._opening.decrypt(nonce, sealed, _LENGTH.pack(len(sealed)))
        except InvalidTag:
            self._refuse(Refusal.FORGED)
            return None

    def _refuse(self, why: Refusal) -> bool:
        self.refusal = why
        return False


class Sealed:
    """The envelope of a node that has keys. `salt`: 12 random bytes that no other run ever had."""

    def __init__(self, keyring: Keyring, *, salt: bytes) -> None:
        self._keyring = keyring
        self._sealer = Sealer(keyring, salt=salt)
        self._opener = Opener(keyring)
        self.seal: Final = self._sealer.seal  # without a step between: every packet takes it
        self.open: Final = self._opener.open

    def use(self, keyring: Keyring) -> None:
        """Change the ring while packets are under way; connections keep the one they began with."""
        self._keyring = keyring
        self._sealer.use(keyring)
        self._opener.use(keyring)

    def session(self, nonce: bytes) -> SealedSession:
        return SealedSession(self._keyring, nonce=nonce)


class Plain:
    """The envelope of a node without a key, for one machine only: anybody can read and forge what it says.
    It only keeps two meshes of different labels apart."""

    def __init__(self, *, label: str) -> None:
        self._head = (
            bytes((_PLAIN,)) + blake2b(label.encode(), digest_size=8, person=b"fluxmesh label").digest()
        )

    def seal(self, data: bytes) -> bytes:
        return self._head + data

    def open(self, data: bytes, now: int) -> bytes | Refusal:
        refusal = self._refusal(data)
        return data[len(self._head) :] if refusal is None else refusal

    def _refusal(self, data: bytes) -> Refusal | None:
        if data.startswith(self._head):
            return None
        if not data or (data[0] == _PLAIN and len(data) < len(self._head)):
            return Refusal.TRUNCATED
        if data[0] == _PLAIN:
            return Refusal.WRONG_LABEL
        return Refusal.SEALED if data[0] == _SEALED else Refusal.VERSION

    def session(self, nonce: bytes) -> PlainSession:
        return PlainSession(self)


class PlainSession:
    """One side of one connection without a key."""

    greeting_bytes = GREETING_BYTES

    def __init__(self, envelope: Plain) -> None:
        self._envelope = envelope
        self.refusal: Refusal | None = None

    def greeting(self) -> bytes:
        return self._envelope.seal(b"").ljust(GREETING_BYTES, b"\0")

    def greeted(self, data: bytes) -> bool:
        if len(data) != GREETING_BYTES:
            self.refusal = Refusal.TRUNCATED
        else:
            opened = self._envelope.open(data, 0)
            self.refusal = opened if isinstance(opened, Refusal) else None
        return self.refusal is None

    def seal(self, frame: bytes) -> bytes:
        """Raises ValueError for a frame that is too large."""
        if len(frame) > FRAME_MAX_BYTES:
            raise ValueError(f"a frame of {len(frame):,} bytes; {FRAME_MAX_BYTES:,} fit")
        return frame

    def open(self, sealed: bytes) -> bytes | None:
        if len(sealed) > FRAME_MAX_BYTES:
            self.refusal = Refusal.TOO_LARGE
            return None
        return sealed if self.refusal is None else None
