"""List, search, show, retry and explain jobs."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated

import fastapi
from starlette.responses import Response

from queue_workflows import errors, history
from queue_workflows import jobs as api
from queue_workflows.service import job_states, problems, responses, schemas, state
from queue_workflows.service.routes import etl, parameters
from queue_workflows.types import JsonDict, Row

router = fastapi.APIRouter(prefix="/api/v1/jobs", tags=["jobs"])
_ERRORS = parameters.problems(401, 403, 404, 422, 503)


@router.get("", responses={200: {"model": schemas.Page}} | parameters.problems(401, 403, 422, 503))
async def list_(
    request: fastapi.Request,
    queue: parameters.Filter = None,
    task: parameters.Filter = None,
    status: Annotated[list[str] | None, fastapi.Query(max_length=10)] = None,
    since: Annotated[datetime | None, fastapi.Query(description="with its time zone")] = None,
    key: parameters.Filter = None,
    q: Annotated[
        str | None, fastapi.Query(max_length=200, description="part of id, task, key or error")
    ] = None,
    limit: parameters.Limit = 50,
    cursor: parameters.Cursor = None,
) -> Response:
    """Return a page of jobs that match every filter, the newest first."""
    place = parameters.decode_cursor(cursor, int)
    rows = await state.of(request).calls.run(
        api.list,
        queue=queue,
        task_name=task,
        since=since,
        key=key,
        text=q,
        before=place[0] if place else None,
        limit=limit + 1,
        **job_states.wanted(status),
    )
    more = len(rows) > limit
    content: JsonDict = {
        "items": [_listed(row) for row in rows[:limit]],
        "next": parameters.encode_cursor(rows[limit - 1]["seq"]) if more else None,
    }
    return responses.reply(content)


def _listed(row: Row) -> JsonDict:
    return job_states.named({name: value for name, value in row.items() if name != "seq"})


@router.get("/{job_id}", responses=_ERRORS | parameters.UNCHANGED)
async def show(request: fastapi.Request, job_id: parameters.JobId) -> Response:
    """Return a job with its attempts, their events and logs."""
    found = await state.of(request).calls.run(history.get_job, job_id)
    return responses.tagged(request, job_states.named(parameters.found(found, "job", job_id)))


@router.get("/{job_id}/events", responses=_ERRORS)
async def events(request: fastapi.Request, job_id: parameters.JobId) -> Response:
    """Return the events of a job, the oldest first, from `queued` on."""
    found = await state.of(request).calls.run(history.events, job_id)
    return responses.reply({"job_id": job_id, "events": parameters.found(found, "job", job_id)})


@router.get("/{job_id}/why", responses=_ERRORS)
async def why(request: fastapi.Request, job_id: parameters.JobId) -> Response:
    """Return why a job does not run, for each live worker."""
    found = await state.of(request).calls.run(api.explain, job_id)
    return responses.reply(job_states.named(parameters.found(found, "job", job_id)))


@router.post("/{job_id}/retry", responses=_ERRORS | parameters.problems(409))
async def retry(request: fastapi.Request, job_id: parameters.JobId) -> Response:
    """Queue a failed or canceled job again, with all its attempts; return how far it is."""
    own = state.of(request)
    (done,) = await own.calls.run(api.retry_many, [job_id], by=parameters.actor(request))
    if done["outcome"] == "unknown":
        raise errors.UnknownJob(f"there is no job {job_id!r:.80}")
    if done["outcome"] != "queued":
        return problems.problem(409, f"job {job_id!r:.80}: {done['reason']}", kind="NotRetried")
    row = await own.calls.run(api.state, job_id)
    return responses.reply(etl.status_view(parameters.found(row, "job", job_id)))
