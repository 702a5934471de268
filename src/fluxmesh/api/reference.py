"""The page at /docs: the routes of the OpenAPI document, as plain HTML that loads nothing from anywhere."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterator
from html import escape
from typing import Any, Final

import msgspec

_STYLE: Final = """
body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#1b1f24}
h2{margin-top:2.5rem}code,pre{font:14px/1.45 ui-monospace,monospace;background:#f3f4f6;border-radius:4px}
code{padding:.1em .3em}pre{padding:.8rem;overflow:auto}summary{cursor:pointer;padding:.3rem 0}
table{border-collapse:collapse}td,th{text-align:left;padding:.2rem 1rem .2rem 0;vertical-align:top}
.method{display:inline-block;min-width:3.2rem;font-weight:600}
@media(prefers-color-scheme:dark){body{background:#14171a;color:#e6e8ea}code,pre{background:#23272b}
a{color:#8ab4f8}}
"""
_DIGEST: Final = base64.b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode()
POLICY: Final = f"default-src 'none'; style-src 'sha256-{_DIGEST}'; frame-ancestors 'none'; base-uri 'none'"


def reference_page(document: dict[str, Any]) -> str:
    """HTML of an OpenAPI document: every route with its parameters, bodies and answers, then the schemas."""
    info = document["info"]
    parts = [
        "<!doctype html><html lang=en><meta charset=utf-8>",
        '<meta name=viewport content="width=device-width,initial-scale=1">',
        f"<title>{escape(info['title'])}</title><style>{_STYLE}</style>",
        f"<h1>{escape(info['title'])} {escape(info['version'])}</h1>",
        f"<p>{escape(info['description'])}</p>",
        '<p>The same for machines: <a href="/openapi.json">/openapi.json</a></p>',
    ]
    for tag, routes in _by_tag(document).items():
        parts.append(f"<h2>{escape(tag)}</h2>")
        parts += [_route(*route) for route in routes]
    parts.append("<h2>schemas</h2>")
    for name, schema in document["components"]["schemas"].items():
        head = f"<details id={escape(name)}><summary><code>{escape(name)}</code></summary>"
        parts.append(f"{head}{_json(schema)}</details>")
    return "".join(parts)


def _by_tag(document: dict[str, Any]) -> dict[str, list[tuple[str, str, dict[str, Any]]]]:
    tags: dict[str, list[tuple[str, str, dict[str, Any]]]] = {}
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            tags.setdefault(operation["tags"][0], []).append((method.upper(), path, operation))
    return tags


def _route(method: str, path: str, operation: dict[str, Any]) -> str:
    head = f"<span class=method>{escape(method)}</span> <code>{escape(path)}</code>"
    parts = [f"<details><summary>{head} {escape(operation['summary'])}</summary>"]
    if "description" in operation:
        parts.append(f"<p>{escape(operation['description'])}</p>")
    if operation.get("parameters"):
        parts.append(f"<table>{''.join(_parameters(operation['parameters']))}</table>")
    for content in operation.get("requestBody", {}).get("content", {}).values():
        parts.append(f"<p>body: {_schema_link(content['schema'])}</p>")
        for title, example in content.get("examples", {}).items():
            parts.append(f"<p>{escape(title)}</p>{_json(example['value'])}")
    parts.append(f"<table>{''.join(_answers(operation['responses']))}</table></details>")
    return "".join(parts)


def _parameters(parameters: list[dict[str, Any]]) -> Iterator[str]:
    for one in parameters:
        schema = one["schema"]
        bounds = ", ".join(
            f"{key} {schema[key]}" for key in ("default", "minimum", "maximum") if key in schema
        )
        yield (
            f"<tr><td><code>{escape(one['name'])}</code><td>{escape(one['in'])}"
            f"<td>{escape(one.get('description', ''))}<td>{escape(bounds)}"
        )


def _answers(responses: dict[str, dict[str, Any]]) -> Iterator[str]:
    for status, response in responses.items():
        schemas = (content["schema"] for content in response.get("content", {}).values())
        links = " ".join(_schema_link(schema) for schema in schemas)
        yield f"<tr><td>{escape(status)}<td>{escape(response['description'])}<td>{links}"


def _schema_link(schema: dict[str, Any]) -> str:
    name = schema.get("$ref", "").rpartition("/")[2]
    if name:
        return f'<a href="#{escape(name)}">{escape(name)}</a>'
    items = schema.get("properties", {}).get("items", {}).get("items")
    return f"a list of {_schema_link(items)}" if items else ""


def _json(value: Any) -> str:
    text = msgspec.json.format(msgspec.json.encode(value)).decode()
    return f"<pre>{escape(text)}</pre>"
