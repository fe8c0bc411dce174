"""Answer the requests of `requests.catalog`: what each returns over HTTP."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import datetime
from typing import Any, Final, cast

import fastapi
from starlette.responses import Response

from queue_workflows import check as workflow_check
from queue_workflows import config, errors, jobs, runs, workers
from queue_workflows.requests import catalog, request
from queue_workflows.service import job_states, problems, responses, state
from queue_workflows.service.routes import endpoints, parameters
from queue_workflows.types import TERMINAL_RUN_STATUSES, JsonDict, Row

router = fastapi.APIRouter()
RECHECK_S: Final = 1.0
"""Longest time between two reads of a state that a long poll waits for."""
_HIDDEN: Final = frozenset({"definition", "definition_hash", "celery_task_id"})


# --- long polls --------------------------------------------------------------------------------


async def _watched(
    http: fastapi.Request,
    wait_s: float | None,
    read: Callable[[], JsonDict],
    *,
    final: Callable[[JsonDict], bool],
    **wanted: Any,
) -> Response:
    """Return what `read` returns, at once or when it has changed; `wanted`: which changes."""
    own = state.of(http)
    found = await own.calls.run(read)
    if not wait_s or _is_news(http, found, final):
        return responses.tagged(http, found)
    deadline = time.monotonic() + wait_s
    async with own.changes.reading(**wanted) as reader:
        while True:
            found = await own.calls.run(read)
            left_s = deadline - time.monotonic()
            if left_s <= 0 or reader.closed or _is_news(http, found, final):
                return responses.tagged(http, found)
            await reader.next(min(left_s, RECHECK_S))
            if await http.is_disconnected():
                return responses.tagged(http, found)  # nobody reads it; the slot is free


def _is_news(http: fastapi.Request, found: JsonDict, final: Callable[[JsonDict], bool]) -> bool:
    """Return whether a long poll ends with this state."""
    if "if-none-match" in http.headers:
        return not responses.matches(http, responses.etag(responses.body(found)))
    return final(found)


# --- jobs --------------------------------------------------------------------------------------


def _enqueue(asked: catalog.Enqueue, http: fastapi.Request) -> JsonDict | Response:
    own = asked.idempotency_key
    try:
        job_id, found = asked.run(parameters.actor(http), reason="http")
    except errors.IdempotencyClash as clash:
        existing = jobs.get(clash.job_id, kind="ingest")
        return problems.problem(
            409,
            str(clash),
            kind="IdempotencyClash",
            existing=None if existing is None else _content_of(dict(existing)),
            requested=http.state.body.model_dump(mode="json") | {"idempotency_key": own},
        )
    return {"job_id": job_id, "status": job_states.name(found)}


def _content_of(row: Row) -> JsonDict:
    """Return what a job was triggered with."""
    names = ("queue", "args", "idempotency_key", "lock_key", "partition_key", "priority")
    return {"job_id": row["id"], "task": row["task_name"]} | {name: row[name] for name in names}


async def _status(
    asked: catalog.GetJobStatus, http: fastapi.Request, wait: float | None
) -> Response:
    return await _watched(
        http,
        wait,
        lambda: _state(asked.job_id),
        final=lambda found: found["status"] in catalog.FINAL,
        job_id=asked.job_id,
    )


def _state(job_id: str) -> JsonDict:
    """Return how far a job is; `attempt`: the number of its present or last attempt."""
    row = parameters.found(jobs.state(job_id), "job", job_id)
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


def _cancel_job(asked: catalog.CancelJob, http: fastapi.Request) -> JsonDict:
    _state(asked.job_id)
    asked.run(parameters.actor(http))
    return _state(asked.job_id)


def _retry_job(asked: catalog.RetryJob, http: fastapi.Request) -> JsonDict | Response:
    (done,) = asked.run(parameters.actor(http))
    if done["outcome"] == "unknown":
        raise errors.UnknownJob(f"there is no job {asked.job_id!r:.80}")
    if done["outcome"] != "queued":
        text = f"job {asked.job_id!r:.80}: {done['reason']}"
        return problems.problem(409, text, kind="NotRetried")
    return _state(asked.job_id)


def _job(asked: catalog.GetJob | catalog.ExplainJob, _: object) -> JsonDict:
    return job_states.named(parameters.found(asked.run(), "job", asked.job_id))


def _job_events(asked: catalog.GetJobEvents, _: object) -> JsonDict:
    found = parameters.found(asked.run(), "job", asked.job_id)
    return {"job_id": asked.job_id, "events": found}


def _jobs(asked: catalog.ListJobs, _: object, cursor: str | None) -> JsonDict:
    place = parameters.decode_cursor(cursor, int)
    rows = jobs.list(
        queue=asked.queue, task_name=asked.task_name, since=asked.since, key=asked.key,
        text=asked.text, before=place[0] if place else None, limit=asked.limit + 1,
        **job_states.wanted(cast("list[str] | None", asked.status)),
    )  # fmt: skip
    return _page(rows, asked.limit, lambda row: (row["seq"],), _listed)


def _listed(row: Row) -> JsonDict:
    return job_states.named({name: value for name, value in row.items() if name != "seq"})


def _page(
    rows: list[Row], limit: int, place: Callable[[Row], Any], shown: Callable[[Row], JsonDict]
) -> JsonDict:
    """Return a page of rows, of which one more than `limit` was read; `place`: of its last row."""
    more = len(rows) > limit
    following = parameters.encode_cursor(*place(rows[limit - 1])) if more else None
    return {"items": [shown(row) for row in rows[:limit]], "next": following}


# --- runs --------------------------------------------------------------------------------------


def _submit(asked: catalog.Submit, http: fastapi.Request) -> Response:
    """Return the run; 200 if the one of the key was there already."""
    # A process without any workflow cannot know which ones the orchestrators have.
    if config.get_config().workflow_loader is not None:
        workflow_check.workflow(asked.workflow_name)
    given: JsonDict = {"inputs": asked.inputs, "priority": asked.priority}
    if asked.idempotency_key is None:
        row, created = runs.submit(asked.workflow_name, **given), True
    else:
        key = asked.idempotency_key
        row, created = runs.submit_once(asked.workflow_name, key=key, **given)
    where = {"location": f"{http.scope.get('root_path', '')}/api/v1/runs/{row['id']}"}
    return responses.reply(_shown(row), 201 if created else 200, where if created else None)


async def _run(asked: catalog.GetRun, http: fastapi.Request, wait: float | None) -> Response:
    return await _watched(
        http,
        wait,
        lambda: _with_output(parameters.found(asked.run(), "run", asked.run_id)),
        final=lambda found: found["status"] in TERMINAL_RUN_STATUSES,
        run_id=asked.run_id,
    )


def _runs(asked: catalog.ListRuns, _: object, cursor: str | None) -> JsonDict:
    place = parameters.decode_cursor(cursor, str, str)
    before = (_instant(place[0]), place[1]) if place else None
    rows = runs.list(
        limit=asked.limit + 1, status=asked.status, workflow_name=asked.workflow_name, before=before
    )
    return _page(
        rows, asked.limit, lambda row: (row["created_at"].isoformat(), row["id"]), lambda row: row
    )


def _instant(text: str) -> datetime:
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        found = None
    if found is None or found.tzinfo is None:
        raise errors.InvalidConfig(parameters.NO_CURSOR)
    return found


def _nodes(asked: catalog.ListNodes, _: object, cursor: str | None) -> JsonDict:
    found = asked.run(after=cursor)
    return parameters.found(found, "run", asked.run_id)


def _why(asked: catalog.ExplainRun, _: object) -> JsonDict:
    return parameters.found(asked.run(), "run", asked.run_id)


def _cancel_run(asked: catalog.CancelRun, _: object) -> JsonDict:
    return _shown(parameters.found(asked.run() or runs.get(asked.run_id), "run", asked.run_id))


def _retry_run(asked: catalog.RetryRun, _: object) -> JsonDict:
    try:
        return _shown(asked.run())
    except errors.InvalidConfig as error:
        raise errors.InputRefused(str(error)) from None  # a conflict with the run's state


def _answer(asked: catalog.AnswerNode, _: object) -> JsonDict:
    submission = asked.run(check=True)
    return {"submission_id": submission, "run_id": asked.run_id, "node_id": asked.node_id}


def _shown(row: Any) -> JsonDict:
    return {name: value for name, value in row.items() if name not in _HIDDEN}


def _with_output(row: Any) -> JsonDict:
    return _shown(row) | {"output": runs.output(row["id"])}


# --- workers, queues, schedules ----------------------------------------------------------------


def _switched(asked: Any, http: fastapi.Request) -> Any:
    """Return the control row; a machine or queue in the path that is unknown is not found."""
    workers.refuse_unknown(asked.queue, host=asked.host)
    return asked.run(parameters.actor(http))


def _resumed(asked: catalog.ResumeQueue, _: object) -> JsonDict:
    return {"resumed": asked.run()}


def _preview(asked: catalog.PreviewSchedule, _: object) -> JsonDict:
    return {"name": asked.name, "items": [one._asdict() for one in asked.run()]}


def _paused(asked: catalog.PauseSchedule | catalog.ResumeSchedule, _: object) -> JsonDict:
    asked.run()
    return {"name": asked.name, "paused": isinstance(asked, catalog.PauseSchedule)}


def _fired(asked: catalog.RunSchedule, _: object) -> JsonDict:
    fired = asked.run()
    return {"name": asked.name, "id": fired.id, "skipped": fired.skipped}


def _items(asked: request.Request[Any], _: object) -> JsonDict:
    return {"items": asked.run()}


def _row(asked: request.Request[Any], http: fastapi.Request) -> Any:
    return asked.run(parameters.actor(http))


_ANSWERS: Final[dict[endpoints.Kind, Callable[..., Any]]] = {
    catalog.Enqueue: _enqueue,
    catalog.GetJob: _job,
    catalog.GetJobStatus: _status,
    catalog.CancelJob: _cancel_job,
    catalog.RetryJob: _retry_job,
    catalog.GetJobEvents: _job_events,
    catalog.ExplainJob: _job,
    catalog.ListJobs: _jobs,
    catalog.Submit: _submit,
    catalog.GetRun: _run,
    catalog.ListRuns: _runs,
    catalog.ListNodes: _nodes,
    catalog.ExplainRun: _why,
    catalog.CancelRun: _cancel_run,
    catalog.RetryRun: _retry_run,
    catalog.AnswerNode: _answer,
    catalog.ListWorkers: _items,
    catalog.EnableWorkers: _switched,
    catalog.DisableWorkers: _switched,
    catalog.DrainWorkers: _switched,
    catalog.ListQueues: _items,
    catalog.GetQueue: _row,
    catalog.PauseQueue: _row,
    catalog.ResumeQueue: _resumed,
    catalog.LimitQueue: _row,
    catalog.ListSchedules: _items,
    catalog.PreviewSchedule: _preview,
    catalog.PauseSchedule: _paused,
    catalog.ResumeSchedule: _paused,
    catalog.RunSchedule: _fired,
}
_SUBMITTED: Final = {
    "status_code": 201,
    "responses": {
        200: {"description": "The run that has the key, which was there already"},
        201: {"description": "The new run"},
    },
}
for _kind, _answered in _ANSWERS.items():
    endpoints.add(router, _kind, _answered, **(_SUBMITTED if _kind is catalog.Submit else {}))
