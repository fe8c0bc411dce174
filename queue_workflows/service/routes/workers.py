"""List workers, and switch them on, off, or off after their jobs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import fastapi
from starlette.responses import Response

from queue_workflows import workers as api
from queue_workflows.service import responses, schemas, state
from queue_workflows.service.routes import parameters
from queue_workflows.types import WorkerControl

router = fastapi.APIRouter(prefix="/api/v1/workers", tags=["workers"])
_ERRORS = parameters.problems(401, 403, 404, 422, 503)


@router.get("", responses=parameters.problems(401, 403, 422, 503))
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
    return await _switched(request, api.enable, host, queue, reason=chosen.reason)


@router.post("/{host}/{queue}/off", responses=_ERRORS)
async def off(
    request: fastapi.Request,
    host: parameters.HostLabel,
    queue: parameters.QueueName,
    body: schemas.SwitchOff | None = None,
) -> Response:
    """Switch the workers of a machine and queue off, by a stop policy."""
    chosen = body or schemas.SwitchOff()
    return await _switched(
        request,
        api.disable,
        host,
        queue,
        stop_policy=chosen.policy,
        reason=chosen.reason,
        until=parameters.span(chosen.for_s),
    )


@router.post("/{host}/{queue}/drain", responses=_ERRORS)
async def drain(
    request: fastapi.Request,
    host: parameters.HostLabel,
    queue: parameters.QueueName,
    body: schemas.Drain | None = None,
) -> Response:
    """Switch the workers of a machine and queue off once their running jobs have ended."""
    chosen = body or schemas.Drain()
    until = parameters.span(chosen.for_s)
    return await _switched(request, api.drain, host, queue, reason=chosen.reason, until=until)


async def _switched(
    request: fastapi.Request,
    switch: Callable[..., WorkerControl],
    host: str,
    queue: str,
    **keywords: Any,
) -> Response:
    """Return the control row; a machine or queue in the path that is unknown is not found."""

    def call() -> WorkerControl:
        api.refuse_unknown(queue, host=host)
        return switch(host, queue, requested_by=parameters.actor(request), **keywords)

    return await parameters.of_queue(request, call)
