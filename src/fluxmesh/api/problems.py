"""Refusals over HTTP: problem documents (RFC 9457), made from the one error tree."""

from __future__ import annotations

import re
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any, Final

import msgspec
from starlette.responses import Response

from fluxmesh.errors import (
    FluxMeshError,
    InvalidPayload,
    NotAuthorised,
    PayloadTooLarge,
    QueueFull,
    StorageError,
    UsageError,
)

MEDIA_TYPE: Final = "application/problem+json"
RETRY_AFTER_S: Final = 1
_BLAMED: Final = re.compile(r"(args|kwargs)\b|the (arguments|body)\b")
_encode = msgspec.json.Encoder().encode


class HttpRefusal(UsageError):
    """What only HTTP has a word for. `field` names the part of the request, if it is one."""

    def __init__(self, message: str, *, field: str | None = None, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.field = field


class MalformedRequest(HttpRefusal):
    code = "malformed_request"
    http_status = 400


class MalformedBody(HttpRefusal):
    code = "malformed_body"
    http_status = 400


class ForeignOrigin(HttpRefusal):
    """A page of another site, or a name that this server does not go by."""

    code = "foreign_origin"
    http_status = 403


class NoSuchRoute(HttpRefusal):
    code = "no_such_route"
    http_status = 404


class MethodNotAllowed(HttpRefusal):
    code = "method_not_allowed"
    http_status = 405


class RequestTooSlow(HttpRefusal):
    code = "request_too_slow"
    http_status = 408


class UnsupportedMediaType(HttpRefusal):
    code = "unsupported_media_type"
    http_status = 415


class TooBusy(HttpRefusal):
    code = "too_busy"
    http_status = 503
    retryable = True


class InternalError(HttpRefusal):
    code = "internal_error"
    http_status = 500


def clean(text: str) -> str:
    """Text that UTF-8 can carry: a lone surrogate of the request is shown escaped."""
    return text.encode("utf-8", "backslashreplace").decode()


def problem_of(error: FluxMeshError) -> dict[str, Any]:
    """The document of a refusal. `code` is stable; `field` is there where one field is to blame."""
    status = error.http_status
    document: dict[str, Any] = {
        "type": f"urn:fluxmesh:problem:{error.code}",
        "title": HTTPStatus(status).phrase,
        "status": status,
        "detail": clean(error.message),
        "code": error.code,
    }
    field = _field_of(error)
    if field is not None:
        document["field"] = clean(field)
    if error.hint:
        document["hint"] = clean(error.hint)
    return document


def _field_of(error: FluxMeshError) -> str | None:
    named = getattr(error, "field", None)
    if isinstance(named, str):
        return named
    if isinstance(error, InvalidPayload | PayloadTooLarge):
        found = _BLAMED.match(error.message)
        return {"arguments": "args"}.get(found[2], found[1] or found[2]) if found else None
    return None


def headers_of(error: FluxMeshError) -> dict[str, str]:
    headers: dict[str, str] = {}
    if isinstance(error, NotAuthorised):
        headers["WWW-Authenticate"] = 'Bearer realm="fluxmesh"'
    if isinstance(error, QueueFull | StorageError | TooBusy):
        headers["Retry-After"] = str(RETRY_AFTER_S)
    if isinstance(error, RequestTooSlow):
        headers["Connection"] = "close"
    return headers


def encoded_problem(error: FluxMeshError) -> bytes:
    """Its document, as it is sent."""
    return _encode(problem_of(error))


def refusal(error: FluxMeshError, headers: Mapping[str, str] | None = None) -> Response:
    """The response that tells this error."""
    return Response(
        encoded_problem(error),
        status_code=error.http_status,
        headers=headers_of(error) | dict(headers or {}),
        media_type=MEDIA_TYPE,
    )
