"""List, pause, resume and limit queues."""

from __future__ import annotations

import fastapi
from starlette.responses import Response

from queue_workflows import queues as api
from queue_workflows.service import responses, schemas, state
from queue_workflows.service.routes import parameters

router = fastapi.APIRouter(prefix="/api/v1/queues", tags=["queues"])
_ERRORS = parameters.problems(401, 403, 404, 422, 503)


@router.get("", responses=parameters.problems(401, 403, 422, 503))
async def list_(request: fastapi.Request) -> Response:
    """Return the queues with their depth, age, rates, limits and state."""
    return responses.reply({"items": await state.of(request).calls.run(api.list)})


@router.get("/{queue}", responses=_ERRORS)
async def show(request: fastapi.Request, queue: parameters.QueueName) -> Response:
    """Return one queue."""
    return await parameters.of_queue(request, api.get, queue)


@router.post("/{queue}/pause", responses=_ERRORS)
async def pause(
    request: fastapi.Request, queue: parameters.QueueName, body: schemas.Pause | None = None
) -> Response:
    """Stop claims of a queue, or of one partition; running jobs go on."""
    chosen = body or schemas.Pause()
    return await parameters.of_queue(
        request,
        api.pause,
        queue,
        partition=chosen.partition,
        until=parameters.span(chosen.for_s),
        requested_by=parameters.actor(request),
    )


@router.post("/{queue}/resume", responses=_ERRORS)
async def resume(
    request: fastapi.Request, queue: parameters.QueueName, body: schemas.Resume | None = None
) -> Response:
    """Resume a queue, or one partition; `resumed` is false if it was not paused."""
    partition = None if body is None else body.partition

    def call() -> dict[str, bool]:
        return {"resumed": api.resume(queue, partition=partition)}

    return await parameters.of_queue(request, call)


@router.post("/{queue}/limits", responses=_ERRORS)
async def limits(
    request: fastapi.Request, queue: parameters.QueueName, body: schemas.Limits
) -> Response:
    """Set or remove limits of an ingest queue, or of one partition."""
    given = body.model_dump(exclude_unset=True)
    return await parameters.of_queue(request, api.limit, queue, **given)
