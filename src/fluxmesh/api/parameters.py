"""Parameters of queries: their bounds, and the refusal of those that nobody reads."""

from __future__ import annotations

from typing import Annotated, Final

from fastapi import Path, Query, Request

from fluxmesh.errors import InvalidOption
from fluxmesh.query import PAGE_DEFAULT, PAGE_MAX, SCAN_CAP

WAIT_DEFAULT_S: Final = 30.0
WAIT_MOST_S: Final = 60.0

Q = Annotated[
    str,
    Query(
        max_length=4_000,
        description="space-separated field:value of state, queue, task, tag, worker, created>t, created<t",
        examples=["state:DEAD_LETTER queue:default"],
    ),
]
Limit = Annotated[int, Query(ge=1, le=PAGE_MAX, description="items on the page")]
Offset = Annotated[int, Query(ge=0, le=SCAN_CAP, description="items to pass over")]
Cursor = Annotated[str | None, Query(description="next_cursor of the page before, with the same q")]
Timeout = Annotated[
    float, Query(ge=0, le=WAIT_MOST_S, allow_inf_nan=False, description="seconds to wait at most")
]
JobId = Annotated[str, Path(description="a UUIDv7 in lower case")]
QueueName = Annotated[str, Path(description="1 to 200 printable characters without braces and colons")]
LIMIT_DEFAULT: Final = PAGE_DEFAULT


async def only_known(request: Request) -> None:
    """Raises InvalidOption for a parameter that the route does not read, or one given twice."""
    known = {field.alias for field in request.scope["route"].dependant.query_params}
    seen: set[str] = set()
    for name, _ in request.query_params.multi_items():
        if name not in known:
            names = f"known: {', '.join(sorted(known))}" if known else "this route takes none"
            raise InvalidOption(name[:80], "unknown parameter", hint=names)
        if name in seen:
            raise InvalidOption(name, "given twice", hint="give it once")
        seen.add(name)
