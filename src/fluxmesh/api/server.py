"""The API as a running server: one socket, one loop, an end that waits for those who are being answered."""

from __future__ import annotations

import contextlib
import errno
import socket
from collections.abc import Iterator
from typing import Final

import uvicorn

from fluxmesh.api.access import Access
from fluxmesh.api.app import create_app
from fluxmesh.api.store import Store
from fluxmesh.api.wire import Wire
from fluxmesh.errors import FluxMeshError

HEADERS_MOST_BYTES: Final = 32 << 10
KEEP_ALIVE_S: Final = 15
BACKLOG: Final = 1_024
_OF_PORT: Final = frozenset({errno.EADDRINUSE, errno.EACCES})


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 picks a free one. Raises FluxMeshError if it cannot be had."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listening = socket.create_server((host.strip("[]"), port), family=family, backlog=BACKLOG)
    except (OSError, UnicodeError) as error:
        why = getattr(error, "strerror", None) or str(error)
        hint = "--host names an address of this machine: 127.0.0.1, or 0.0.0.0 for all of them"
        if getattr(error, "errno", None) in _OF_PORT:
            hint = "another --port; --port 0 picks a free one"
        raise FluxMeshError(f"cannot listen on {host}:{port}: {why}", hint=hint) from None
    # Accepted sockets inherit it. asyncio sets it only for sockets that name their protocol; without it an
    # answer of two segments waits 40 ms for the delayed acknowledgement of the first.
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listening


class _Uvicorn(uvicorn.Server):
    """Without signal handlers of its own: whoever runs it tells it to stop."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class ApiServer:
    """Serves one store on one socket until it is told to stop."""

    def __init__(self, store: Store, access: Access, *, grace_s: float) -> None:
        self._store = store
        config = uvicorn.Config(
            create_app(store, access),
            http=Wire,
            ws="none",
            lifespan="on",
            loop="none",
            log_config=None,
            log_level="error",  # what strangers send is no news
            access_log=False,
            server_header=False,
            proxy_headers=False,
            h11_max_incomplete_event_size=HEADERS_MOST_BYTES,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=max(1, round(grace_s)),
        )
        self._uvicorn = _Uvicorn(config)

    async def serve(self, listening: socket.socket) -> None:
        """Returns when it was stopped. Raises FluxMeshError if it did not come up."""
        await self._uvicorn.serve(sockets=[listening])
        if not self._uvicorn.started:
            raise FluxMeshError("the server did not come up", hint="its log tells why")

    def stop(self) -> None:
        """Take no more requests, end waits with what is known, let the others be answered."""
        self._uvicorn.should_exit = True
        self._store.stopping.set()

    def hurry(self) -> None:
        """End without waiting for anybody."""
        self.stop()
        self._uvicorn.force_exit = True
