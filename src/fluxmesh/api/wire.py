"""HTTP/1.1 on one connection, as uvicorn speaks it, with two bounds more.

uvicorn waits for ever for the rest of a request's head, so that few clients could take all the server's
descriptors; and it tells in plain text of what is no HTTP.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from fluxmesh.api.problems import MEDIA_TYPE, MalformedRequest, encoded_problem

HEAD_MOST_S: Final = 20.0
_CAN_ANSWER: Final = (h11.IDLE, h11.SEND_RESPONSE)


class Wire(H11Protocol):
    """Ends a connection whose next request has not wholly begun HEAD_MOST_S after the one before."""

    _head_due: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._head_due is not None:
            self._head_due.cancel()
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        self._await_head()
        super().on_response_complete()

    def _await_head(self) -> None:
        if self._head_due is not None:
            self._head_due.cancel()
        self._head_due = self.loop.call_later(HEAD_MOST_S, self._close_if_idle)

    def _close_if_idle(self) -> None:
        # One that is being answered is bounded by whoever reads its body, and starts the timer again at its
        # end; what still comes of a body that was refused is passed over until then.
        if self.cycle is None or self.cycle.response_complete:
            self.transport.close()

    def send_400_response(self, msg: str) -> None:
        if self.conn.our_state in _CAN_ANSWER:
            body = encoded_problem(MalformedRequest("this is no HTTP/1.1 request", hint=msg))
            headers: list[tuple[bytes, Any]] = [
                (b"content-type", MEDIA_TYPE.encode()),
                (b"content-length", str(len(body)).encode()),
                (b"x-content-type-options", b"nosniff"),
                (b"connection", b"close"),
            ]
            for event in (
                h11.Response(status_code=400, headers=headers, reason=b"Bad Request"),
                h11.Data(data=body),
                h11.EndOfMessage(),
            ):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()
