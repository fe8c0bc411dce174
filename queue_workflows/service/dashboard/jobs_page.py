"""List jobs of both families, show an ingest job, change it, and queue another with its args."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Annotated, Any, Final, Literal

import fastapi
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from queue_workflows import db, errors, failures, history, jobs
from queue_workflows.dag import payload
from queue_workflows.db import statements
from queue_workflows.requests import catalog
from queue_workflows.runtime import display
from queue_workflows.service import tokens
from queue_workflows.service.dashboard import failures_page, forms, run_page, session, view
from queue_workflows.types import JsonDict, Row

router = fastapi.APIRouter()
PAGE: Final = 50
LIVE: Final = ("queued", "running")
"""The states of nodes that the list has besides failed; others are read with their run."""
KINDS: Final = ("ingest job", "node job")
Text = Annotated[str, fastapi.Query(max_length=1000)]
_Act = tuple[
    Callable[[str], list[JsonDict]], tokens.Scope, Literal["makes", "ends"], Sequence[str], str
]
ACTS: Final[Mapping[str, _Act]] = {
    "retry": (jobs.retry_many, "submit", "makes", ("failed", "cancelled"),
              "Queue job {} again, with all its attempts."),
    "cancel": (jobs.cancel_many, "submit", "ends", LIVE,
               "Cancel job {}. If it waits, it ends at once; if it runs, it is asked to stop."),
    "delete": (jobs.delete_many, "operate", "ends", [s for s in jobs.STATUSES if s != "running"],
               "Delete job {}. Its history stays until it is pruned."),
}  # fmt: skip
"""What is done to a job: the call, the scope, the kind of its action, its states, a sentence."""


@router.get("/jobs")
async def listed(
    request: Request, queue: Text = "", task: Text = "", status: Text = "", key: Text = "",
    before: Annotated[int | None, fastapi.Query(ge=0, lt=2**63)] = None,
) -> Response:  # fmt: skip
    """Show failed jobs, nodes that run or have the chosen state, and ingest jobs."""
    given = {"queue": queue, "task": task, "status": status, "key": key}
    query = {name: text.strip() for name, text in given.items() if text.strip()}
    if "key" in query and not session.of(request).sees_values:
        raise forms.Refused(403, "Your session has scope look, which does not search keys.")
    if query.get("status", "failed") not in jobs.STATUSES:
        raise errors.InvalidConfig(f"status: it is one of {', '.join(jobs.STATUSES)}")
    found = await view.read(request, _read, query, before)
    return view.page(
        request, "jobs.html", title="Jobs", filters=query, states=jobs.STATUSES,
        command=view.command("queue-workflows jobs list", query), **found,
    )  # fmt: skip


def _read(conn: db.Connection, query: dict[str, str], before: int | None) -> dict[str, Any]:
    queue, task, status, key = (query.get(name) for name in ("queue", "task", "status", "key"))
    failed, nodes, ingest = list[Row](), list[Row](), list[Row]()
    more: dict[str, Any] | None = None
    only_failed = status == "failed" and key is None
    is_first = before is None
    if is_first and (only_failed or not query.keys() & {"status", "key"}):
        rows = statements.failures.newest(
            conn, since=None, since_ago=None, until=None, until_ago=None, queue=queue,
            workflow=task, machine=None, text=None, most=failures.NEWEST, cut=400,
        )  # fmt: skip
        fits = [row for row in rows if row["place"] is not None and row["fits"]]
        fits = fits[: PAGE if only_failed else 10]
        failed = [row | {"path": failures_page.path(row)} for row in fits]
    if is_first and (status or "running") in LIVE:
        nodes = statements.pages.node_jobs(
            conn, status=status or "running", queue=queue, task=task, key=key, limit=PAGE
        )
    if not only_failed:
        others = [each for each in jobs.STATUSES if each != "failed" or key is not None]
        ingest = jobs.list(
            queue=queue, task_name=task, status=status or others, key=key, before=before,
            limit=PAGE + 1, conn=conn,
        )  # fmt: skip
        more = {**query, "before": ingest[PAGE - 1]["seq"]} if len(ingest) > PAGE else None
    pages = {"path": "/jobs", "query": query, "next": more, "first": is_first, "searched": None}
    return {"failed": failed, "nodes": nodes, "jobs": ingest[:PAGE], "pages": pages}


@router.get("/jobs/{job_id}")
async def one(request: Request, job_id: view.Segment) -> Response:
    """Show an ingest job with its attempts; the job of a node is shown with its run."""
    found = await view.read(request, _one, job_id)
    if found["kind"] == "node job":
        where = session.url(request, view.path("/runs/", found["run_id"]), node=found["name"])
        return RedirectResponse(where, 303)
    return view.page(
        request, "job.html", title=f"Job of {display.line(found['task_name'], 120)}", job=found,
        command=f"queue-workflows jobs show {shlex.quote(job_id)}", actions=[
            forms.Action(
                view.path("/jobs/", job_id, verb), verb.capitalize(), needs, {}, kind,
                text.format(display.line(job_id, 80)), asks_reason=kind == "ends",
            )
            for verb, (_, needs, kind, states, text) in ACTS.items() if found["status"] in states
        ],
        attempts=found["attempts"][-20:][::-1],
    )  # fmt: skip


def _one(conn: db.Connection, job_id: str, kinds: Container[str] = KINDS) -> JsonDict:
    """Return an ingest job as `history.get_job` does, or where the job of a node is."""
    found = None
    if payload.is_storable(job_id):
        found = statements.overview.find(conn, id=job_id, jobs_first=True)
    if found is not None and found["kind"] == "ingest job":
        found = history.get_job(job_id, conn=conn)
    if found is None or found["kind"] not in kinds:
        text = f"no job {display.line(job_id, 80)}: it never was here, or it was deleted"
        raise view.NotFound(text, near=[("all jobs", "/jobs")])
    return found


@router.get("/jobs/{job_id}/again")
async def changed(request: Request, job_id: view.Segment) -> Response:
    """Show a form with the args of a job, for another job with changed ones."""
    run_page.check_values(request)
    job = await view.read(request, _one, job_id, KINDS[:1])
    args = view.editable(job["inputs"]) or ""
    return view.page(
        request, "job_again.html", title=f"Another job of {display.line(job['task_name'], 120)}",
        command=f"queue-workflows jobs show {shlex.quote(job_id)}", job=job,
        args=args if 0 < len(args) <= view.DOWNLOADED else None,
    )  # fmt: skip


@router.post("/jobs/{job_id}/again")
async def again(request: Request, job_id: view.Segment) -> Response:
    """Queue a job of the same task with the args of the form."""
    form = await forms.act(request, "submit")
    job = await view.read(request, _one, job_id, KINDS[:1])
    made, _ = await form.run(
        jobs.enqueue_once, job["task_name"], queue=job["queue"], priority=job["priority"],
        args=catalog.json_object(form.values.get("args", "")), max_attempts=job["max_attempts"],
        lock_key=job["lock_key"], partition_key=job["partition_key"], headers={"again_of": job_id},
    )  # fmt: skip
    return form.done(f"Job {made} is queued.", back=view.path("/jobs/", made))


@router.post("/jobs/{job_id}/{verb}")
async def change(
    request: Request, job_id: view.Segment, verb: Literal["retry", "cancel", "delete"]
) -> Response:
    """Retry, cancel or delete a job."""
    call, needs, *_ = ACTS[verb]
    form = await forms.act(request, needs)
    (done,) = await form.run(call, job_id)
    reason = f", {display.line(done['reason'])}" if done["reason"] else ""
    back = "/jobs" if done["outcome"] in ("deleted", "unknown") else view.path("/jobs/", job_id)
    return form.done(f"Job {display.line(job_id, 80)}: {done['outcome']}{reason}.", back=back)
