"""Answer the requests of `requests.catalog` over HTTP."""

from __future__ import annotations

import asyncio
import base64
import json
import time
from collections.abc import Callable, Collection, Sequence
from datetime import datetime
from typing import Any, Final, TypeVar, cast

import fastapi
from starlette.responses import PlainTextResponse, Response

import queue_workflows
from queue_workflows import acts, config, errors, jobs, runs, workers
from queue_workflows import check as workflow_check
from queue_workflows.requests import catalog
from queue_workflows.service import problems, responses, state
from queue_workflows.service.routes import endpoints, sent_events
from queue_workflows.telemetry import metrics_page
from queue_workflows.types import TERMINAL_RUN_STATUSES, JsonDict, Row

T = TypeVar("T")
router = fastapi.APIRouter()
READY_S: Final = 2.0
"""Longest wait for the database in /ready."""
RECHECK_S: Final = 1.0
"""Longest time between two reads of a state that a long poll waits for."""
_HIDDEN: Final = frozenset({"definition", "definition_hash", "celery_task_id"})


def _found(value: T | None, what: str, name: str) -> T:
    """Return the value; raise `UnknownJob` if there is none."""
    if value is None:
        raise errors.UnknownJob(f"there is no {what} {name!r:.80}")
    return value


# --- long polls --------------------------------------------------------------------------------


async def _watched(
    http: fastapi.Request,
    wait_s: float | None,
    read: Callable[[], JsonDict],
    final: Collection[str],
    **wanted: Any,
) -> Response:
    """Return the result of `read`, at once or when it has changed or its status is `final`.

    `wanted`: which changes count.
    """

    def look() -> tuple[Response, bool]:
        """Return the reply, and whether it is news. On a thread, as a large value takes long."""
        found, has_tag = read(), "if-none-match" in http.headers
        reply = responses.tagged(http, found)
        return reply, reply.status_code != 304 if has_tag else found["status"] in final

    own = state.of(http)
    reply, is_news = await own.calls.run(look)
    if wait_s and not is_news:
        deadline = time.monotonic() + wait_s
        async with own.changes.reading(**wanted) as reader:
            while True:
                reply, is_news = await own.calls.run(look)
                left_s = deadline - time.monotonic()
                if left_s <= 0 or reader.closed or is_news or await http.is_disconnected():
                    break
                await reader.next(min(left_s, RECHECK_S))
    return reply


# --- pages -------------------------------------------------------------------------------------


def _page(
    rows: list[Row], limit: int, place: tuple[str, ...], shown: Callable[[Row], JsonDict] = dict
) -> JsonDict:
    """Return a page of at most `limit` rows; its cursor has columns `place` of the last."""
    last = [rows[limit - 1][name] for name in place] if len(rows) > limit else None
    return {"items": [shown(row) for row in rows[:limit]], "next": _cursor(last)}


def _cursor(place: Sequence[Any] | None) -> str | None:
    """Return the cursor of a place in a list, None for its end."""
    if place is None:
        return None
    text = json.dumps(place, default=datetime.isoformat)
    return base64.urlsafe_b64encode(text.encode()).decode().rstrip("=")


def _place(cursor: str | None, *kinds: type) -> list[Any] | None:
    """Return a cursor's place, None without one; raise `InvalidConfig` for another list's."""
    if cursor is None:
        return None
    try:
        padded = cursor + "=" * (-len(cursor) % 4)
        parts: Any = json.loads(base64.b64decode(padded, altchars=b"-_", validate=True))
        if datetime in kinds:
            parts[0] = datetime.fromisoformat(parts[0])
        is_naive = datetime in kinds and parts[0].tzinfo is None
        if [type(each) for each in parts] == [*kinds] and not is_naive:
            return parts
    except (ValueError, TypeError, LookupError, RecursionError):
        pass
    raise errors.InvalidConfig(
        "cursor is not `next` of a page of this list: leave it out to begin with the first page"
    )


# --- jobs --------------------------------------------------------------------------------------


def _enqueue(asked: catalog.Enqueue, http: fastapi.Request) -> JsonDict | Response:
    own = asked.idempotency_key
    try:
        job_id, found = asked.run(reason="http")
    except errors.IdempotencyClash as clash:
        row: Any = jobs.get(clash.job_id, kind="ingest")
        names = ("queue", "args", "idempotency_key", "lock_key", "partition_key", "priority")
        existing = row and {"job_id": row["id"], "task": row["task_name"]} | {
            name: row[name] for name in names
        }
        requested = http.state.body.model_dump(mode="json") | {"idempotency_key": own}
        more: JsonDict = {"existing": existing, "requested": requested}
        return problems.problem(409, str(clash), kind="IdempotencyClash", **more)
    return {"job_id": job_id, "status": responses.state_name(found)}


def _job(asked: catalog.GetJob | catalog.ExplainJob) -> JsonDict:
    return responses.named(_found(asked.run(), "job", asked.job_id))


async def _status(
    asked: catalog.GetJobStatus, http: fastapi.Request, wait: float | None
) -> Response:
    job_id = asked.job_id
    return await _watched(http, wait, lambda: _state(job_id), catalog.FINAL, job_id=job_id)


def _state(job_id: str) -> JsonDict:
    """Return how far a job is; `attempt`: the number of its present or last attempt."""
    row = _found(jobs.state(job_id), "job", job_id)
    failed = row["attempts"]
    names = ("started_at", "finished_at", "heartbeat_at", "error")
    return {
        "job_id": row["id"],
        "status": responses.state_name(row["status"], lost=row["lost"]),
        "attempt": max(failed, min(failed + 1, row["max_attempts"])),
        **{name: row[name] for name in names},
        "progress": {} if row["progress"] is None else row["progress"],
    }


def _cancel_job(asked: catalog.CancelJob, _: object) -> JsonDict:
    _state(asked.job_id)
    asked.run()
    return _state(asked.job_id)


def _retry_job(asked: catalog.RetryJob, _: object) -> JsonDict | Response:
    _state(asked.job_id)
    (done,) = asked.run()
    if done["outcome"] != "queued":
        text = f"job {asked.job_id!r:.80}: {done['reason']}"
        return problems.problem(409, text, kind="NotRetried")
    return _state(asked.job_id)


def _many_jobs(asked: catalog.CancelJobs | catalog.RetryJobs, _: object) -> JsonDict:
    return {
        "items": [
            one | {"status": one["status"] and responses.state_name(one["status"])}
            for one in asked.run()
        ]
    }


def _jobs(asked: catalog.ListJobs, _: object, cursor: str | None) -> JsonDict:
    place = _place(cursor, int)
    rows = jobs.list(
        queue=asked.queue, task_name=asked.task_name, since=asked.since, key=asked.key,
        text=asked.text, before=place[0] if place else None, limit=asked.limit + 1,
        **responses.wanted_states(cast("list[str] | None", asked.status)),
    )  # fmt: skip
    return _page(rows, asked.limit, ("seq",), responses.named)


# --- runs --------------------------------------------------------------------------------------


def _submit(asked: catalog.Submit, http: fastapi.Request) -> Response:
    """Return the new run (201), or the earlier run that has the idempotency key (200)."""
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


def _shown(row: Any) -> JsonDict:
    return {name: value for name, value in row.items() if name not in _HIDDEN}


async def _run(asked: catalog.GetRun, http: fastapi.Request, wait: float | None) -> Response:
    def read() -> JsonDict:
        row = _found(asked.run(), "run", asked.run_id)
        return _shown(row) | {"output": runs.output(row["id"])}

    return await _watched(http, wait, read, TERMINAL_RUN_STATUSES, run_id=asked.run_id)


def _runs(asked: catalog.ListRuns, _: object, cursor: str | None) -> JsonDict:
    place = _place(cursor, datetime, str)
    items, following = asked.run(before=place and (place[0], place[1]))
    return {"items": items, "next": _cursor(following)}


def _retry_run(asked: catalog.RetryRun, _: object) -> JsonDict:
    try:
        return _shown(asked.run())
    except errors.InvalidConfig as error:
        raise errors.InputRefused(str(error)) from None  # a conflict with the run's state


# --- workers, queues, schedules ----------------------------------------------------------------


def _switched(asked: Any, _: object) -> Any:
    """Return the control row; a machine or queue in the path that is unknown is not found."""
    workers.refuse_unknown(asked.queue, host=asked.host)
    return asked.run()


def _fired(asked: catalog.RunSchedule, _: object) -> JsonDict:
    fired = asked.run()
    return {"name": asked.name, "id": fired.id, "skipped": fired.skipped}


def _paused(asked: catalog.PauseSchedule | catalog.ResumeSchedule, _: object) -> JsonDict:
    asked.run()
    return {"name": asked.name, "paused": isinstance(asked, catalog.PauseSchedule)}


def _acts(asked: catalog.ListActs, _: object, cursor: str | None) -> JsonDict:
    place = _place(cursor, int)
    before = place[0] if place else None
    rows = acts.list(
        since=asked.since, actor=asked.actor, action=asked.action, kind=asked.kind,
        subject=asked.subject, before=before, limit=asked.limit + 1,
    )  # fmt: skip
    return _page(rows, asked.limit, ("id",))


# --- the service -------------------------------------------------------------------------------


async def _health(*_: object) -> JsonDict:
    return {"status": "ok"}


async def _service_status(_: object, http: fastapi.Request) -> JsonDict:
    own = state.of(http)
    return {
        "service": "queue_workflows",
        "version": queue_workflows.__version__,
        "uptime_s": round(time.monotonic() - own.started_at, 3),
        "read_only": own.settings.app_read_only,
        "queues": {entry.queue: entry.concurrency for entry in own.settings.pool},
    }


async def _ready(_: object, http: fastapi.Request) -> JsonDict | Response:
    own = state.of(http)
    try:
        await asyncio.wait_for(own.schema_check(), READY_S)
    except (asyncio.TimeoutError, Exception) as error:  # noqa: BLE001  any reason is one
        reason = str(error) or f"the database did not answer within {READY_S:g} s"
    else:
        reason = "; ".join(f"{name}: {text}" for name, text in sorted(own.problems.items()))
    if reason:
        return problems.problem(503, reason, kind="NotReady")
    return {"status": "ready"}


@router.get(
    "/metrics",
    response_class=PlainTextResponse,
    responses=endpoints.refusals("GET"),
    tags=["infrastructure"],
)
async def metrics(request: fastapi.Request) -> Response:
    """Return the metrics of the whole fleet in the text format of Prometheus."""
    text = await state.of(request).calls.run(metrics_page.scrape)
    return Response(text, media_type=metrics_page.CONTENT_TYPE)


# --- answers by request ------------------------------------------------------------------------

_ANSWERS: Final[dict[endpoints.Kind, Callable[[Any, fastapi.Request], Any]]] = {
    catalog.Enqueue: _enqueue,
    catalog.GetJob: lambda asked, _: _job(asked),
    catalog.CancelJob: _cancel_job,
    catalog.RetryJob: _retry_job,
    catalog.CancelJobs: _many_jobs,
    catalog.RetryJobs: _many_jobs,
    catalog.CancelRuns: lambda asked, _: {"items": asked.run()},
    catalog.RetryRuns: lambda asked, _: {"items": asked.run()},
    catalog.GetJobEvents: lambda asked, _: {
        "job_id": asked.job_id, "events": _found(asked.run(), "job", asked.job_id)
    },
    catalog.ExplainJob: lambda asked, _: _job(asked),
    catalog.Submit: _submit,
    catalog.ExplainRun: lambda asked, _: _found(asked.run(), "run", asked.run_id),
    catalog.CancelRun: lambda asked, _: _shown(
        _found(asked.run() or runs.get(asked.run_id), "run", asked.run_id)
    ),
    catalog.RetryRun: _retry_run,
    catalog.AnswerNode: lambda asked, _: {
        "submission_id": asked.run(check=True), "run_id": asked.run_id, "node_id": asked.node_id
    },
    catalog.ListWorkers: lambda asked, _: {"items": asked.run()},
    catalog.EnableWorkers: _switched,
    catalog.DisableWorkers: _switched,
    catalog.DrainWorkers: _switched,
    catalog.ListQueues: lambda asked, _: {"items": asked.run()},
    catalog.GetQueue: lambda asked, _: asked.run(),
    catalog.PauseQueue: lambda asked, _: asked.run(),
    catalog.ResumeQueue: lambda asked, _: {"resumed": asked.run()},
    catalog.LimitQueue: lambda asked, _: asked.run(),
    catalog.ListSchedules: lambda asked, _: {"items": asked.run()},
    catalog.PreviewSchedule: lambda asked, _: {
        "name": asked.name, "items": [one._asdict() for one in asked.run()]
    },
    catalog.PauseSchedule: _paused,
    catalog.ResumeSchedule: _paused,
    catalog.RunSchedule: _fired,
    catalog.FollowEvents: sent_events.changed,
    catalog.GetJobParts: sent_events.page,
    catalog.GetNodeParts: sent_events.page,
    catalog.FollowJob: sent_events.followed,
    catalog.FollowNode: sent_events.followed,
    catalog.Health: _health,
    catalog.ServiceStatus: _service_status,
    catalog.Ready: _ready,
}  # fmt: skip
_BESIDE: Final[dict[endpoints.Kind, Callable[[Any, fastapi.Request, Any], Any]]] = {
    catalog.GetJobStatus: _status,
    catalog.ListJobs: _jobs,
    catalog.GetRun: _run,
    catalog.ListRuns: _runs,
    catalog.ListActs: _acts,
    catalog.ListNodes: lambda asked, _, cursor: _found(
        asked.run(after=cursor), "run", asked.run_id
    ),
}
"""The answers that take a cursor, or the seconds of a long poll."""
_SUBMITTED: Final = {
    "status_code": 201,
    "responses": {
        200: {"description": "The run that has the key, which was there already"},
        201: {"description": "The new run"},
    },
}
for _kind, _answer in (_ANSWERS | _BESIDE).items():
    endpoints.add(router, _kind, _answer, **(_SUBMITTED if _kind is catalog.Submit else {}))
