"""/healthz, /readyz, /docs and /openapi.json: the routes that want no token, and tell nothing of any job."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import HTMLResponse

from fluxmesh.api.reference import POLICY, reference_page
from fluxmesh.api.responses import Json, answers
from fluxmesh.api.store import store_of
from fluxmesh.errors import StorageError
from fluxmesh.obs.log import get_logger

_log = get_logger("api")
router = APIRouter(tags=["health"])
_STATUS = {"type": "object", "properties": {"status": {"type": "string"}}, "required": ["status"]}


@router.get(
    "/healthz",
    response_class=Json,
    summary="The process is alive",
    responses=answers({200: ("alive", _STATUS)}),
)
async def alive(request: Request) -> Json:
    return Json({"status": "ok"})


@router.get(
    "/readyz",
    response_class=Json,
    summary="The storage answers; 503 within a second if it does not",
    responses=answers({200: ("ready", _STATUS)}),
)
async def ready(request: Request) -> Json:
    try:
        await store_of(request).check_ready()
    except StorageError as error:
        if request.app.state.access.trusts(dict(request.scope["headers"])):
            raise
        # Which host it is on is nobody's business who may not ask for anything else.
        _log.warning("storage not ready", error=str(error))
        hint = "ask with a token, and it says why"
        raise type(error)("the storage is not ready", hint=hint) from error
    return Json({"status": "ready"})


@router.get("/openapi.json", include_in_schema=False)
async def document(request: Request) -> Json:
    return Json(request.app.openapi())


@router.get("/docs", include_in_schema=False)
async def docs(request: Request) -> HTMLResponse:
    return HTMLResponse(reference_page(request.app.openapi()), headers={"Content-Security-Policy": POLICY})
