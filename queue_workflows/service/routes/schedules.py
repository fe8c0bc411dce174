"""List, preview, pause, resume and fire schedules."""

from __future__ import annotations

from typing import Annotated

import fastapi
from starlette.responses import Response

from queue_workflows import schedules as api
from queue_workflows.service import responses, state
from queue_workflows.service.routes import parameters

router = fastapi.APIRouter(prefix="/api/v1/schedules", tags=["schedules"])
_ERRORS = parameters.problems(401, 403, 404, 422, 503)


@router.get("", responses=parameters.problems(401, 403, 422, 503))
async def list_(request: fastapi.Request) -> Response:
    """Return the schedules, the next to fire first."""
    return responses.reply({"items": await state.of(request).calls.run(api.list)})


@router.get("/{name}/preview", responses=_ERRORS)
async def preview(
    request: fastapi.Request,
    name: parameters.ScheduleName,
    days: Annotated[float, fastapi.Query(gt=0, le=366, allow_inf_nan=False)] = 7.0,
    limit: parameters.Limit = 100,
) -> Response:
    """Return the coming instants of a schedule."""
    found = await state.of(request).calls.run(api.preview, name, days=days, limit=limit)
    return responses.reply({"name": name, "items": [one._asdict() for one in found]})


@router.post("/{name}/pause", responses=_ERRORS)
async def pause(request: fastapi.Request, name: parameters.ScheduleName) -> Response:
    """Stop a schedule until it is resumed."""
    await state.of(request).calls.run(api.pause, name)
    return responses.reply({"name": name, "paused": True})


@router.post("/{name}/resume", responses=_ERRORS)
async def resume(request: fastapi.Request, name: parameters.ScheduleName) -> Response:
    """Let a paused schedule fire again."""
    await state.of(request).calls.run(api.resume, name)
    return responses.reply({"name": name, "paused": False})


@router.post("/{name}/run", responses=_ERRORS)
async def run(request: fastapi.Request, name: parameters.ScheduleName) -> Response:
    """Fire a schedule now; `id` is null, and `skipped` says why, if something holds it back."""
    fired = await state.of(request).calls.run(api.fire_now, name)
    return responses.reply({"name": name, "id": fired.id, "skipped": fired.skipped})
