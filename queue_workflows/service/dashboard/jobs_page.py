"""List jobs of both families, show an ingest job, change it, and queue another with its args."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Annotated, Any, Final, Literal, NamedTuple

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
from queue_workflows.types import IngestJob, JobId, JsonDict, Row

router = fastapi.APIRouter()
PAGE: Final = 50
FIRST: Final = 10
"""Failed jobs that stand above those in other states."""
LIVE: Final = ("queued", "running")
"""The states of nodes that the list has besides failed; others are read with their run."""
ATTEMPTS: Final = 20
"""The newest attempts of a job on its page."""
Text = Annotated[str, fastapi.Query(max_length=1000)]


class Asked(NamedTuple):
    """The filters that are set, and where the page begins."""

    query: dict[str, str]
    before: int | None
    start: int

    def command(self) -> str:
        """Return the command that lists the ingest jobs."""
        words = [f"--{name} {shlex.quote(text)}" for name, text in self.query.items()]
        return " ".join(["queue-workflows jobs list", *words])


def _asked(
    request: Request, queue: Text = "", task: Text = "", status: Text = "", key: Text = "",
    before: Annotated[int | None, fastapi.Query(ge=0, lt=2**63)] = None,
    start: Annotated[int, fastapi.Query(ge=0, le=failures.NEWEST)] = 0,
) -> Asked:  # fmt: skip
    given = {"queue": queue, "task": task, "status": status, "key": key}
    query = {name: text.strip() for name, text in given.items() if text.strip()}
    if "key" in query and not session.of(request).sees_values:
        raise forms.Refused(403, "Your session has scope look, which does not search keys.")
    if query.get("status", "failed") not in jobs.STATUSES:
        raise errors.InvalidConfig(f"status: it is one of {', '.join(jobs.STATUSES)}")
    return Asked(query, before, start)


@router.get("/jobs")
async def listed(request: Request, asked: Annotated[Asked, fastapi.Depends(_asked)]) -> Response:
    """Show the failed jobs, nodes that run or have the chosen state, and ingest jobs."""
    found = await view.read(request, _read, asked)
    return view.page(
        request, "jobs.html", title="Jobs", command=asked.command(), filters=asked.query,
        states=jobs.STATUSES, **found,
    )  # fmt: skip


def _read(conn: db.Connection, asked: Asked) -> dict[str, Any]:
    query = asked.query
    queue, task, status, key = (query.get(name) for name in ("queue", "task", "status", "key"))
    failed, nodes, ingest = list[Row](), list[Row](), list[Row]()
    more: dict[str, Any] | None = None
    if all(map(payload.is_storable, query.values())):
        only_failed = status == "failed" and key is None
        if only_failed or (not query.keys() & {"status", "key"} and asked.before is None):
            rows = _failed(conn, queue, task)[asked.start :]
            failed = rows[: PAGE if only_failed else FIRST]
            if only_failed and len(rows) > PAGE:
                more = {**query, "start": asked.start + PAGE}
        if asked.before is None and (status or "running") in LIVE:
            nodes = statements.pages.node_jobs(
                conn, status=status or "running", queue=queue, task=task, key=key, limit=PAGE
            )
        if not only_failed:
            others = [each for each in jobs.STATUSES if each != "failed" or key is not None]
            ingest = jobs.list(
                queue=queue, task_name=task, status=status or others, key=key,
                before=asked.before, limit=PAGE + 1, conn=conn,
            )  # fmt: skip
            if len(ingest) > PAGE:
                ingest.pop()
                more = {**query, "before": ingest[-1]["seq"]}
    first = asked.before is None and not asked.start
    pages = {"path": "/jobs", "query": query, "next": more, "first": first, "searched": None}
    return {"failed": failed, "nodes": nodes, "jobs": ingest, "pages": pages}


def _failed(conn: db.Connection, queue: str | None, task: str | None) -> list[Row]:
    """Return the failed jobs of both families that fit, of the newest ones, each with its path."""
    rows = statements.failures.newest(
        conn, since=None, since_ago=None, until=None, until_ago=None, queue=queue, workflow=task,
        machine=None, text=None, most=failures.NEWEST, cut=400,
    )  # fmt: skip
    return [
        row | {"path": failures_page.path(row)}
        for row in rows
        if row["place"] is not None and row["fits"]
    ]


# --- one job -----------------------------------------------------------------------------------


@router.get("/jobs/{job_id}")
async def one(request: Request, job_id: view.Segment) -> Response:
    """Show an ingest job with its attempts; the job of a node is shown with its run."""
    found = await view.read(request, _one, job_id)
    if found["kind"] == "node job":
        where = session.url(request, view.path("/runs/", found["run_id"]), node=found["name"])
        return RedirectResponse(where, 303)
    return view.page(
        request, "job.html", title=f"Job of {display.line(found['task_name'], 120)}", job=found,
        command=f"queue-workflows jobs show {shlex.quote(job_id)}", actions=_actions(found),
        attempts=found["attempts"][-ATTEMPTS:][::-1],
    )  # fmt: skip


def _one(conn: db.Connection, job_id: str) -> JsonDict:
    found = None
    if payload.is_storable(job_id):
        found = statements.overview.find(conn, id=job_id, jobs_first=True)
    if found is not None and found["kind"] == "ingest job":
        found = history.get_job(job_id, conn=conn)
    if found is None or found["kind"] == "run":
        raise _unknown(job_id)
    return found


def _unknown(job_id: str) -> view.NotFound:
    text = f"no job {display.line(job_id, 80)}: it never was here, or it was deleted"
    return view.NotFound(text, near=[("all jobs", "/jobs")])


def _actions(job: JsonDict) -> Sequence[forms.Action]:
    """Return the actions that work in the state of a job."""
    status, name = job["status"], display.line(job["id"], 80)
    made: list[forms.Action] = []

    def add(verb: str, label: str, needs: tokens.Scope, kind: Any, text: str) -> None:
        to = view.path("/jobs/", job["id"], verb)
        made.append(forms.Action(to, label, needs, {}, kind, text, asks_reason=kind == "ends"))

    if status in ("failed", "cancelled"):
        add("retry", "Retry", "submit", "makes", f"Queue job {name} again, with all its attempts.")
    if status in LIVE:
        effect = "is cancelled at once" if status == "queued" else "is asked to stop"
        add("cancel", "Cancel", "submit", "ends", f"Job {name} is {status}: it {effect}.")
    if status != "running":
        text = f"Delete job {name}. Its history stays until it is pruned."
        add("delete", "Delete", "operate", "ends", text)
    return made


@router.get("/jobs/{job_id}/again")
async def changed(request: Request, job_id: view.Segment) -> Response:
    """Show a form with the args of a job, for another job with changed ones."""
    run_page.check_values(request)
    job = await view.read(request, _ingest, job_id)
    text = "\n".join(display.pretty(job["args"]))
    # A form with a member that is masked would store the mask.
    is_whole = isinstance(job["args"], dict) and len(text) <= view.DOWNLOADED
    is_whole = is_whole and view.redacted(job["args"]) == job["args"] == catalog.json_object(text)
    title = f"Another job of {display.line(job['task_name'], 120)}"
    command = f"queue-workflows jobs show {shlex.quote(job_id)}"
    args = text if is_whole else None
    return view.page(request, "job_again.html", title=title, command=command, job=job, args=args)


def _ingest(conn: db.Connection, job_id: str) -> IngestJob:
    found = jobs.get(job_id, kind="ingest", conn=conn) if payload.is_storable(job_id) else None
    if found is None:
        raise _unknown(job_id)
    return found


@router.post("/jobs/{job_id}/again")
async def again(request: Request, job_id: view.Segment) -> Response:
    """Queue a job of the same task with the args of the form."""
    form = await forms.act(request, "submit")
    job = await view.read(request, _ingest, job_id)
    made, _ = await form.run(_enqueue, job, form.values.get("args", ""))
    return form.done(f"Job {made} is queued.", back=view.path("/jobs/", made))


def _enqueue(job: IngestJob, args: str) -> tuple[JobId, str]:
    return jobs.enqueue_once(
        job["task_name"], queue=job["queue"], args=catalog.json_object(args),
        priority=job["priority"], max_attempts=job["max_attempts"], lock_key=job["lock_key"],
        partition_key=job["partition_key"], headers={"again_of": job["id"]},
    )  # fmt: skip


@router.post("/jobs/{job_id}/{verb}")
async def change(
    request: Request, job_id: view.Segment, verb: Literal["retry", "cancel", "delete"]
) -> Response:
    """Retry, cancel or delete a job."""
    form = await forms.act(request, "operate" if verb == "delete" else "submit")
    call = {"retry": jobs.retry_many, "cancel": jobs.cancel_many, "delete": jobs.delete_many}[verb]
    (done,) = await form.run(call, job_id)
    text = f"Job {display.line(job_id, 80)}: {done['outcome']}"
    text += f", {display.line(done['reason'])}" if done["reason"] else ""
    gone = done["outcome"] in ("deleted", "unknown")
    return form.done(f"{text}.", back="/jobs" if gone else view.path("/jobs/", job_id))
