"""List workers, and switch them on, off, or off after their jobs."""

from __future__ import annotations

import fastapi
from starlette.responses import Response

from queue_workflows import workers as api
from queue_workflows.service import responses, schemas, state
from queue_workflows.service.routes import parameters

router = fastapi.APIRouter(prefix="/api/v1/workers", tags=["workers"])
_ERRORS = parameters.problems(401, 403, 422, 503)


@router.get("", responses=_ERRORS)
async def list_(request: fastapi.Request) -> Response:
    """Return the worker processes seen within a day, and switches without a worker."""
    return responses.reply({"items": await state.of(request).calls.run(api.list)})


@router.post("/{host}/{queue}/on", responses=_ERRORS)
async def on(
    request: fastapi.Request,
    host: parameters.HostLabel,
    queue: parameters.QueueName,
    body: schemas.Switch | None = None,
) -> Response:
    """Switch the workers of a machine and queue on; `all`: of each queue of the machine."""
    chosen = body or schemas.Switch()
    row = await state.of(request).calls.run(
        api.enable, host, queue, requested_by=parameters.actor(request), reason=chosen.reason
    )
    return responses.reply(row)


@router.post("/{host}/{queue}/off", responses=_ERRORS)
async def off(
    request: fastapi.Request,
    host: parameters.HostLabel,
    queue: parameters.QueueName,
    body: schemas.SwitchOff | None = None,
) -> Response:
    """Switch the workers of a machine and queue off, by a stop policy."""
    chosen = body or schemas.SwitchOff()
    row = await state.of(request).calls.run(
        api.disable,
        host,
        queue,
        stop_policy=chosen.policy,
        requested_by=parameters.actor(request),
        reason=chosen.reason,
        until=parameters.span(chosen.for_s),
    )
    return responses.reply(row)


@router.post("/{host}/{queue}/drain", responses=_ERRORS)
async def drain(
    request: fastapi.Request,
    host: parameters.HostLabel,
    queue: parameters.QueueName,
    body: schemas.Drain | None = None,
) -> Response:
    """Switch the workers of a machine and queue off once their running jobs have ended."""
    chosen = body or schemas.Drain()
    row = await state.of(request).calls.run(
        api.drain,
        host,
        queue,
        requested_by=parameters.actor(request),
        reason=chosen.reason,
        until=parameters.span(chosen.for_s),
    )
    return responses.reply(row)
