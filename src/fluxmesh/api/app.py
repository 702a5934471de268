"""The ASGI application: routes, the gate before them, problems for every error."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.metadata import version
from typing import Any, Final

from fastapi import APIRouter, Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import compile_path

from fluxmesh.api import dlq, fleet, health, jobs, mesh
from fluxmesh.api.access import OPEN_PATHS, Access
from fluxmesh.api.gate import Gate
from fluxmesh.api.parameters import only_known
from fluxmesh.api.problems import HttpRefusal, MethodNotAllowed, NoSuchRoute, refusal
from fluxmesh.api.schemas import schemas
from fluxmesh.api.store import Store
from fluxmesh.errors import FluxMeshError, InvalidOption
from fluxmesh.obs.log import get_logger

PREFIX: Final = "/api/v1"
DESCRIPTION: Final = (
    "Background jobs: submit, look, wait, cancel, retry. Times are epoch seconds, priorities 0 to 3 (0 is the"
    " first), statuses in capitals; refusals are problems as of RFC 9457. Where the server has tokens, send"
    " `Authorization: Bearer <token>`."
)
_ROUTERS: Final[tuple[tuple[str, APIRouter], ...]] = (
    *((PREFIX, part.router) for part in (jobs, dlq, fleet, mesh)),
    ("", health.router),
)
_log = get_logger("api")


def create_app(store: Store, access: Access) -> FastAPI:
    """The application over one store, which it opens and closes with its lifespan."""

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        await store.start()
        try:
            yield
        finally:
            await store.close()

    app = FastAPI(
        title="FluxMesh",
        version=version("fluxmesh"),
        description=DESCRIPTION,
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        redirect_slashes=False,
        lifespan=lifespan,
        generate_unique_id_function=lambda route: route.name,
    )
    app.state.store = store
    app.state.access = access
    for prefix, router in _ROUTERS:
        app.include_router(router, prefix=prefix, dependencies=[Depends(only_known)])
    app.add_middleware(Gate, access=access)
    app.add_exception_handler(FluxMeshError, _refused)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _http)
    _describe(app, wants_token=bool(access.digests))
    return app


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, FluxMeshError)
    if error.http_status >= 500:
        _log.warning("request refused", method=request.method, path=request.url.path, error=str(error))
    return refusal(error)


async def _invalid(_request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    message = str(first["msg"])
    return refusal(InvalidOption(str(first["loc"][-1]), f"{message[:1].lower()}{message[1:]}"))


async def _http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    what = f"{request.method} {request.url.path[:200]}"
    problem: HttpRefusal
    if error.status_code == 405:
        problem = MethodNotAllowed(f"{what}: the route has other methods", hint="see /docs")
        return refusal(problem, {"Allow": ", ".join(_allowed(request.url.path))})
    if error.status_code == 404:
        problem = NoSuchRoute(f"{what}: there is no such route", hint="see /docs for those there are")
    else:
        problem = HttpRefusal(str(error.detail))
    return refusal(problem, error.headers)


def _allowed(path: str) -> list[str]:
    """The methods of all routes with this path; the framework names those of the first."""
    methods: set[str] = set()
    for prefix, router in _ROUTERS:
        for route in router.routes:
            if isinstance(route, APIRoute) and compile_path(prefix + route.path)[0].match(path):
                methods.update(route.methods or ())
    return sorted(methods | ({"HEAD"} if "GET" in methods else set()))


def _describe(app: FastAPI, *, wants_token: bool) -> None:
    """Complete what FastAPI derives from the routes: schemas, and where a token is wanted."""
    derive = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            document = derive()
            document["components"] = {
                "schemas": schemas(),
                "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
            }
            security: list[dict[str, list[str]]] = [{"token": []}] if wants_token else []
            for path, operations in document["paths"].items():
                for operation in operations.values():
                    operation["security"] = [] if path in OPEN_PATHS else security
            app.openapi_schema = document
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]
