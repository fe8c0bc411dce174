"""Trigger, follow and cancel jobs: the three endpoints of the ETL job service."""

from __future__ import annotations

import fastapi
from starlette.responses import Response

from queue_workflows import errors, jobs
from queue_workflows.service import job_states, problems, responses, schemas, state
from queue_workflows.service.routes import bodies, long_polls, parameters
from queue_workflows.types import JobId, JsonDict, Row

router = fastapi.APIRouter(prefix="/api/v1/jobs", tags=["jobs"])


@router.post(
    "/trigger",
    responses={200: {"model": schemas.Triggered}}
    | parameters.problems(400, 401, 403, 409, 413, 415, 422, 503),
    openapi_extra=bodies.document(schemas.Trigger, parameters.KEY_HEADER),
)
async def trigger(request: fastapi.Request) -> Response:
    """Queue a job, or return the one that has its idempotency key for as long as that exists."""
    body = await bodies.read(request, schemas.Trigger)
    key = parameters.idempotency_key(body.idempotency_key, bodies.key_header(request))
    own = state.of(request)
    try:
        job_id, found = await own.calls.run(_queue, body, key, parameters.actor(request))
    except errors.IdempotencyClash as clash:
        existing = await own.calls.run(jobs.get, clash.job_id, kind="ingest")
        return problems.problem(
            409,
            str(clash),
            kind="IdempotencyClash",
            existing=None if existing is None else content_of(dict(existing)),
            requested=body.model_dump(mode="json") | {"idempotency_key": key},
        )
    return responses.reply({"job_id": job_id, "status": job_states.name(found)})


def _queue(body: schemas.Trigger, key: str | None, by: str) -> tuple[JobId, str]:
    return jobs.enqueue_once(
        body.task,
        queue=body.queue,
        reason="http",
        args=body.args,
        idempotency_key=key,
        lock_key=body.lock_key,
        partition_key=body.partition_key,
        priority=body.priority,
        available_at=body.available_at,
        max_attempts=body.max_attempts,
        by=by,
    )


@router.get(
    "/{job_id}/status",
    responses={200: {"model": schemas.JobStatus}}
    | parameters.UNCHANGED
    | parameters.problems(401, 403, 404, 422, 503),
)
async def status(
    request: fastapi.Request, job_id: parameters.JobId, wait: parameters.Wait = None
) -> Response:
    """Return how far a job is, with an ETag; `wait`: only when that has changed, or is final."""
    return await long_polls.watched(
        request,
        wait,
        lambda: _state(job_id),
        final=lambda found: found["status"] in job_states.FINAL,
        job_id=job_id,
    )


@router.post(
    "/{job_id}/cancel",
    responses={200: {"model": schemas.JobStatus}} | parameters.problems(401, 403, 404, 422, 503),
)
async def cancel(request: fastapi.Request, job_id: parameters.JobId) -> Response:
    """Cancel a queued job, or request that a running one ends; return how far it is."""
    own = state.of(request)
    return responses.reply(await own.calls.run(_cancel, job_id, parameters.actor(request)))


def _cancel(job_id: str, by: str) -> JsonDict:
    _state(job_id)
    jobs.cancel_many([job_id], by=by)
    return _state(job_id)


def _state(job_id: str) -> JsonDict:
    return status_view(parameters.found(jobs.state(job_id), "job", job_id))


def status_view(row: Row) -> JsonDict:
    """Return how far a job is; `attempt`: the number of its present or last attempt."""
    failed = row["attempts"]
    return {
        "job_id": row["id"],
        "status": job_states.name(row["status"], lost=row["lost"]),
        "attempt": max(failed, min(failed + 1, row["max_attempts"])),
        "started_at": row["started_at"],
        "finished_at": row["finished_at"],
        "heartbeat_at": row["heartbeat_at"],
        "error": row["error"],
        "progress": {} if row["progress"] is None else row["progress"],
    }


def content_of(row: Row) -> JsonDict:
    """Return what a job was triggered with."""
    names = ("queue", "args", "idempotency_key", "lock_key", "partition_key", "priority")
    return {"job_id": row["id"], "task": row["task_name"]} | {name: row[name] for name in names}
