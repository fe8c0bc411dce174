"""List jobs, and why they wait; show an ingest job, change it, and queue another with its args."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Annotated, Any, Final, Literal

import fastapi
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from queue_workflows import db, errors, failures, history, jobs
from queue_workflows.admin import waiting_reasons
from queue_workflows.db import statements
from queue_workflows.requests import catalog
from queue_workflows.runtime import display
from queue_workflows.service import state, tokens
from queue_workflows.service.dashboard import (
    failures_page,
    forms,
    run_page,
    runs_page,
    session,
    view,
)
from queue_workflows.types import JsonDict, Row

router = fastapi.APIRouter()
FIRST: Final = 10
"""Failed jobs above the other ones."""
QUICK: Final = 100
"""Failed jobs that are examined first, as most pages are full with these."""
EXAMINED: Final = 50_000
"""Ingest jobs that a page examines at most."""
LIVE: Final = ("queued", "running")
"""The states of nodes that the list has besides failed; others are read with their run."""
KINDS: Final = ("ingest job", "node job")
_FILTERS: Final = ("queue", "task", "status", "key")
_ACTS: Final[Mapping[str, tuple[Callable[[str], list[JsonDict]], tokens.Scope]]] = {
    "retry": (jobs.retry_many, "submit"),
    "cancel": (jobs.cancel_many, "submit"),
    "delete": (jobs.delete_many, "operate"),
}
"""The call and the scope of each act on a job; its template says in which states it works."""


@router.get("/jobs")
async def listed(
    request: Request, place: runs_page.Place,
    node: Annotated[str, fastapi.Query(pattern=r"^-?[0-9]{1,5}\.[0-9]{1,18}$")] = "",
    before: Annotated[int | None, fastapi.Query(ge=0, lt=2**63)] = None,
) -> Response:  # fmt: skip
    """Show failed jobs, nodes that run or have the chosen state, and ingest jobs.

    The next page continues each list: nodes behind the priority and the `seq` in `node`, ingest
    jobs behind the `seq` in `before`. Failed jobs have further pages if they are chosen.
    """
    query, _ = runs_page.filters(request, *_FILTERS)
    if (status := query.get("status", "failed")) not in jobs.STATUSES:
        states = ", ".join(jobs.STATUSES)
        raise errors.InvalidConfig(f"status {status!r:.80} is not known; the states are {states}")
    found = await view.read(request, _read, query, place, node, before)
    return view.Page(
        request, "jobs.html", title="Jobs", filters=query, states=jobs.STATUSES,
        command=view.command("queue-workflows jobs list", query), **found,
    )  # fmt: skip


def _read(
    conn: db.Connection,
    query: dict[str, str],
    place: tuple[datetime, str] | None,
    node: str,
    before: int | None,
) -> dict[str, Any]:
    if query.get("status") == "failed" and "key" not in query:
        failed, pages = _failed(conn, query, place)
        return {"failed": failed, "nodes": [], "jobs": [], "pages": pages}
    queue, task, status, key = (query.get(name) for name in _FILTERS)
    is_first = not node and before is None
    failed, nodes, ingest = list[Row](), list[Row](), list[Row]()
    more, searched = dict[str, Any](), None
    if is_first and status is None and key is None:
        failed = _failed(conn, query, None)[0][:FIRST]
    if (is_first or node) and (status or "running") in LIVE:
        priority, seq = map(int, node.split(".")) if node else (None, None)
        nodes = statements.pages.node_jobs(
            conn, status=status or "running", queue=queue, task=task, key=key, priority=priority,
            seq=seq, limit=view.PAGE + 1,
        )  # fmt: skip
        if len(nodes) > view.PAGE:
            more["node"] = f"{nodes[view.PAGE - 1]['priority']}.{nodes[view.PAGE - 1]['seq']}"
    if is_first or before is not None:
        others = [each for each in jobs.STATUSES if each != "failed" or key is not None]
        read = statements.pages.task_jobs(
            conn, queue=queue, task=task, statuses=[status] if status else others, key=key,
            before=before, most=EXAMINED, limit=view.PAGE + 1,
        )  # fmt: skip
        ingest = [row for row in read if row["fits"]]
        if len(ingest) > view.PAGE:
            more["before"] = ingest[view.PAGE - 1]["seq"]
        elif read and read[-1]["place"] == EXAMINED:
            last = read[-1]
            more["before"] = last["seq"]
            searched = f"searched {EXAMINED:,} jobs, back to {display.moment(last['created_at'])}"
    pages = view.Pager("/jobs", query, query | more if more else None, is_first, searched)
    shown = slice(view.PAGE)
    return {"failed": failed, "nodes": nodes[shown], "jobs": ingest[shown], "pages": pages}


def _failed(
    conn: db.Connection, query: dict[str, str], place: tuple[datetime, str] | None
) -> tuple[Sequence[Row], view.Pager]:
    """Return failed jobs of both families behind a place, the last one first, and the links."""
    most = min(QUICK, failures.NEWEST)
    while True:
        read = statements.failures.newest(
            conn, since=None, since_ago=None, until=place and place[0], until_ago=None,
            queue=query.get("queue"), workflow=query.get("task"), machine=None, text=None,
            most=most, cut=failures.EXAMINED,
        )  # fmt: skip
        fitting = [row for row in read if row["fits"]]
        shown, pages = failures_page.paged("/jobs", query, fitting, place)
        is_over = pages.next is not None or read[-1]["place"] != most
        if is_over or most == failures.NEWEST:
            break
        most = failures.NEWEST
    if not is_over:
        at, job_id = read[-1]["at"], read[-1]["id"]
        searched = f"searched {failures.NEWEST:,} failed jobs"
        if place is not None and place[0] == at:
            # A search from this time on would find the same ones again.
            searched = f"not all of those that failed at {display.moment(at)} are listed"
            at, job_id = at - timedelta(microseconds=1), ""
        pages = pages._replace(next=runs_page.following(query, at, job_id), searched=searched)
    return [row | {"path": failures_page.path(row)} for row in shown], pages


@router.get("/jobs/{job_id}")
async def one(request: Request, job_id: view.Segment) -> Response:
    """Show an ingest job with its attempts; the job of a node is shown with its run."""
    found = await view.read(request, _one, job_id)
    if found["kind"] == "node job":
        where = session.url(request, view.path("/runs/", found["run_id"]), node=found["name"])
        return RedirectResponse(where, 303)
    return view.Page(
        request, "job.html", title=f"Job of {display.line(found['task_name'], 120)}", job=found,
        command=f"queue-workflows jobs show {shlex.quote(job_id)}",
        needs={verb: needs for verb, (_, needs) in _ACTS.items()},
        large=await state.of(request).renders.run(_large, found),
        attempts=found["attempts"][-20:][::-1],
    )  # fmt: skip


def _large(job: JsonDict) -> set[str]:
    """Return the names of the values of a job that are too large for its page."""
    sizes = {name: len(json.dumps(job[name], default=str)) for name in ("inputs", "output")}
    return {name for name, size in sizes.items() if size > run_page.MOST_BYTES}


def _one(conn: db.Connection, job_id: str, kinds: Sequence[str] = KINDS) -> JsonDict:
    """Return an ingest job as `history.get_job` does, or where the job of a node is."""
    found = statements.overview.find(conn, id=job_id, jobs_first=True)
    if found is not None and found["kind"] == "ingest job":
        found = history.get_job(job_id, conn=conn)
    if found is None or found["kind"] not in kinds:
        text = f"no job {display.line(job_id, 80)}: it never was here, or it was deleted"
        near = run_page.ids_with(conn, job_id, *kinds) or [("all jobs", "/jobs")]
        raise view.NotFound(text, near=near)
    return found


@router.get("/jobs/{job_id}/value")
async def value(
    request: Request, job_id: view.Segment, name: Literal["inputs", "output", "log"]
) -> Response:
    """Return the args or the result of a job, or the log of its newest attempt, whole."""
    run_page.check_values(request)
    job = await view.read(request, _one, job_id, KINDS[:1])
    if name != "log":
        return await run_page.value_file(request, job[name], f"{name}.json")
    log = job["attempts"][-1]["log"] if job["attempts"] else None
    if log is None:
        raise view.NotFound("no log is stored", near=[(job_id, view.path("/jobs/", job_id))])
    return await run_page.log_file(request, log, "newest")


@router.get("/jobs/{job_id}/again")
async def changed(request: Request, job_id: view.Segment) -> Response:
    """Show a form with the args of a job, for another job with changed ones."""
    run_page.check_values(request)
    job = await view.read(request, _one, job_id, KINDS[:1])
    return view.Page(
        request, "again.html", title=f"Another job of {display.line(job['task_name'], 120)}",
        command=f"queue-workflows jobs show {shlex.quote(job_id)}", kind="job", id=job_id,
        name=job["task_name"], own=view.path("/jobs/", job_id), values=job["inputs"],
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
    call, needs = _ACTS[verb]
    form = await forms.act(request, needs)
    (done,) = await form.run(call, job_id)
    reason = f", {display.line(done['reason'])}" if done["reason"] else ""
    back = "/jobs" if done["outcome"] in ("deleted", "unknown") else view.path("/jobs/", job_id)
    return form.done(f"Job {display.line(job_id, 80)}: {done['outcome']}{reason}.", back=back)


# --- waits -------------------------------------------------------------------------------------


@router.get("/waiting")
async def waiting(request: Request, job: view.Text = None) -> Response:
    """Show the queued jobs in groups by the reasons of their waits, or the reasons of one."""
    if not job:
        return await view.live(
            request, "waiting.html", waiting_reasons.groups, title="Waiting",
            command="queue-workflows why",
        )  # fmt: skip
    found = await view.read(request, _explained, job)
    title = f"Why {display.line(found['name'], 120)} waits"
    command = f"queue-workflows why {shlex.quote(job)}"
    return view.Page(request, "waiting_job.html", title=title, command=command, job=found)


def _explained(conn: db.Connection, job_id: str) -> JsonDict:
    found = jobs.explain(job_id, conn=conn)
    if found is None:
        text = f"no job {display.line(job_id, 80)}: it never was here, or it was deleted"
        raise view.NotFound(text, near=[("all that waits", "/waiting")])
    return found
