"""JSON answers, and what the OpenAPI document says of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

import msgspec
from starlette.responses import JSONResponse

from fluxmesh.api.problems import MEDIA_TYPE

JSON: Final = "application/json"
PROBLEMS: Final[Mapping[int, str]] = {
    400: "the body is not JSON",
    404: "unknown",
    409: "its state, or a key, does not allow it",
    410: "unknown, and the id is older than jobs are kept",
    413: "too large",
    415: "not JSON by its content type",
    422: "invalid or unknown field",
    429: "the queue is full",
}
BODY: Final = (400, 413, 415)
JOB: Final = (404, 410)
_ALWAYS: Final[Mapping[int, str]] = {
    401: "no bearer token that the server knows",
    403: "a page of another site",
    408: "the body did not come in time",
    422: PROBLEMS[422],
    500: "a mistake of the server's",
    503: "the storage does not answer, or too many requests are under way",
}
_encode = msgspec.json.Encoder().encode


class Json(JSONResponse):
    """Anything made of builtins and structs, as JSON."""

    def render(self, content: Any) -> bytes:
        return _encode(content)


def page(items: Iterable[Any], next_cursor: str | None = None, **more: Any) -> Json:
    """A list, as all lists are."""
    return Json({"items": list(items), "next_cursor": next_cursor, **more})


def ref(name: str) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{name}"}


def listed(name: str, **more: Mapping[str, Any]) -> dict[str, Any]:
    """The schema of a list of these, and of what stands beside it."""
    return {
        "type": "object",
        "required": ["items", "next_cursor", *more],
        "properties": {
            "items": {"type": "array", "items": ref(name)},
            "next_cursor": {"type": ["string", "null"]},
            **more,
        },
    }


def answers(
    ok: Mapping[int, tuple[str, Mapping[str, Any]]], *problems: int
) -> dict[int | str, dict[str, Any]]:
    """The `responses` of a route: what it says when it did it, and by which problems it refuses."""
    told: dict[int | str, dict[str, Any]] = {
        status: {"description": text, "content": {JSON: {"schema": dict(schema)}}}
        for status, (text, schema) in ok.items()
    }
    for status, text in sorted({**_ALWAYS, **{number: PROBLEMS[number] for number in problems}}.items()):
        told[status] = {"description": text, "content": {MEDIA_TYPE: {"schema": ref("Problem")}}}
    return told


def takes(name: str, *examples: tuple[str, Any], required: bool = True) -> dict[str, Any]:
    """The `openapi_extra` of a route with a body."""
    content: dict[str, Any] = {"schema": ref(name)}
    if examples:
        content["examples"] = {title: {"value": value} for title, value in examples}
    return {"requestBody": {"required": required, "content": {JSON: content}}}
