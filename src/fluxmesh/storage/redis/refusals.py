"""What a server's refusal means: whether anything happened, and who has to do something about it."""

from __future__ import annotations

import re
import ssl
from typing import Any, Final

from redis import exceptions as driver

from fluxmesh.errors import StorageError, StorageLoginRefused, StorageRefused, StorageUnreachable

# Refusals that leave everything as it was, and may be over soon.
_PASSING: Final = frozenset(
    {
        "LOADING",
        "BUSY",
        "READONLY",
        "MASTERDOWN",
        "CLUSTERDOWN",
        "TRYAGAIN",
        "OOM",
        "MISCONF",
        "NOREPLICAS",
        "MOVED",
        "ASK",
        "UNBLOCKED",
    }
)
# Another server has to be asked: nothing was done by this one.
ELSEWHERE: Final = frozenset({"MOVED", "READONLY"})
# Nor will this connection do for the next question.
DOUBTFUL: Final = ELSEWHERE | {"MASTERDOWN", "CLUSTERDOWN", "LOADING", "UNBLOCKED", "ASK"}
_HINTS: Final = {
    "OOM": "its memory is full (maxmemory): free some, or give it more",
    "ASK": "its keys are being moved to another node: try again when that is done",
    "CLUSTERDOWN": "`redis-cli cluster info` says what the cluster lacks",
    "MOVED": "the cluster is changing: try again in a second",
    "READONLY": "it is a replica: try again in a second, or name its primary",
    "NOREPLICAS": "min-replicas-to-write: it wants more replicas before it takes anything",
}
_WORD: Final = re.compile(r"[A-Z]+(?= |$)")
# Redis 6.2 wraps what a command inside a script was refused with.
_INSIDE: Final = re.compile(r"Error running script .*?: -?([A-Z]+) ")
_FULL: Final = "max number of clients reached"


def word_of(answer: Any) -> str:
    """The first word of a refusal, such as READONLY; empty for any other answer."""
    if not isinstance(answer, driver.RedisError):
        return ""
    code: str | None = answer.status_code
    text = str(answer)
    if code and code != "ERR":
        return code
    inside = _INSIDE.search(text)
    if inside is not None:
        return inside[1]
    found = _WORD.match(text)
    return found[0] if found else "ERR"


def checked(where: str, answer: Any) -> Any:
    """The answer, if it is none of the server's refusals."""
    if isinstance(answer, Exception):
        raise refusal(where, answer) from answer
    return answer


def refusal(where: str, error: Exception) -> StorageError:
    """The error for a refusal, after which everything is as it was."""
    word, text = word_of(error), str(error)
    told = text if text.startswith(word) or not word or word == "ERR" else f"{word} {text}"
    if isinstance(error, driver.AuthenticationError) or word in ("NOAUTH", "NOPERM", "WRONGPASS"):
        return StorageLoginRefused(f"{where}: {text}", hint="look at user and password of the URL")
    if word in _PASSING or is_full(error):
        return StorageUnreachable(f"{where}: {told}", hint=_HINTS.get(word, "the server refuses for now"))
    return StorageRefused(f"{where}: {told}")


def is_full(error: BaseException) -> bool:
    """True if the server has turned a client away because it has so many."""
    return _FULL in str(error)


def tls_trouble(where: str, error: BaseException | None) -> StorageRefused | None:
    """What to say if TLS is why a connection failed: asking again will not mend it."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if isinstance(error, ssl.SSLCertVerificationError):
            hint = "ssl_ca_certs=/path/to/ca.pem in the URL names the authority that signed it"
            if "match" in error.verify_message or "mismatch" in error.verify_message.lower():
                hint = "name the server as its certificate does, or ssl_check_hostname=false"
            return StorageRefused(
                f"{where}: the server's certificate is not accepted: {error.verify_message}", hint=hint
            )
        if isinstance(error, ssl.SSLError):
            reason = (error.reason or str(error)).replace("_", " ").lower()
            hint = "does this port speak TLS? redis:// is without it"
            if "certificate" in reason or "handshake" in reason:
                hint = "a certificate of ours: ssl_certfile=… and ssl_keyfile=… in the URL"
            return StorageRefused(f"{where}: TLS failed: {reason}", hint=hint)
        error = error.__cause__ or error.__context__
    return None
