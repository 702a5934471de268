"""What every request passes first: access, a bound on how many there are, and an end to every error."""

from __future__ import annotations

import asyncio
from typing import Final

from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from fluxmesh.api.access import OPEN_PATHS, Access
from fluxmesh.api.problems import InternalError, MalformedRequest, TooBusy, refusal
from fluxmesh.errors import FluxMeshError
from fluxmesh.obs.log import DEBUG, get_logger

IN_FLIGHT_MOST: Final = 1_000
_HEADERS: Final = ((b"x-content-type-options", b"nosniff"), (b"cache-control", b"no-store"))
_log = get_logger("api")


class Gate:
    """ASGI middleware around the whole of the API."""

    def __init__(self, app: ASGIApp, *, access: Access, in_flight_most: int = IN_FLIGHT_MOST) -> None:
        self._app = app
        self._access = access
        self._most = in_flight_most
        self._in_flight = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        answer = _Answer(send)
        began = asyncio.get_running_loop().time()
        self._in_flight += 1
        try:
            await self._pass(scope, receive, answer)
        except ClientDisconnect:
            pass  # nobody is left to be told
        except Exception:
            _log.exception("request failed", method=scope["method"], path=scope["path"])
            if answer.status is not None:
                raise
            problem = InternalError(
                "the server failed; its log tells where", hint="this is a mistake of ours"
            )
            await refusal(problem)(scope, receive, answer)
        finally:
            self._in_flight -= 1
            if _log.enabled(DEBUG):
                took_ms = round((asyncio.get_running_loop().time() - began) * 1e3, 1)
                _log.debug(
                    "request", method=scope["method"], path=scope["path"], status=answer.status, ms=took_ms
                )

    async def _pass(self, scope: Scope, receive: Receive, answer: _Answer) -> None:
        refused: FluxMeshError | None
        headers = dict(scope["headers"])
        if b"transfer-encoding" in headers and b"content-length" in headers:
            # Where one request ends and the next begins must not be read in two ways (RFC 9112, 6.1).
            refused = MalformedRequest("Content-Length is given together with Transfer-Encoding")
            await refusal(refused, {"Connection": "close"})(scope, receive, answer)
            return
        if self._in_flight > self._most and scope["path"] not in OPEN_PATHS:
            refused = TooBusy(f"{self._most:,} requests are being answered", hint="try again in a second")
        else:
            refused = self._access.refusal(scope["method"], scope["path"], headers)
        if refused is None:
            # The server sends no body in answer to HEAD, whatever the route says.
            asked = {**scope, "method": "GET"} if scope["method"] == "HEAD" else scope
            await self._app(asked, receive, answer)
        else:
            await refusal(refused)(scope, receive, answer)


class _Answer:
    """Sends a response with the headers that all have; knows whether it has begun."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.status: int | None = None

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            message = {**message, "headers": [*message.get("headers", ()), *_HEADERS]}
        await self._send(message)
