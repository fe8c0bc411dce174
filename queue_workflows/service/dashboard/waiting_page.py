"""Show why jobs wait: all of them in groups, and one with the reason of each worker."""

from __future__ import annotations

import shlex

import fastapi
from starlette.requests import Request
from starlette.responses import Response

from queue_workflows import db, jobs
from queue_workflows.admin import waiting_reasons
from queue_workflows.dag import payload
from queue_workflows.runtime import display
from queue_workflows.service.dashboard import view
from queue_workflows.types import JsonDict

router = fastapi.APIRouter()


@router.get("/waiting")
async def listed(request: Request, job: view.Text = None) -> Response:
    """Show the queued jobs in groups by the reasons of their waits, or the reasons of one."""
    if job:
        return await _one(request, job)
    found = await view.read(request, waiting_reasons.groups)
    command = "queue-workflows why"
    return view.page(request, "waiting.html", title="Waiting", command=command, **found)


@router.get("/waiting/groups")
async def groups(request: Request) -> Response:
    """Return the groups alone."""
    return await view.fragment(
        request, "waiting_groups.html", lambda: view.read(request, waiting_reasons.groups)
    )


async def _one(request: Request, job_id: str) -> Response:
    def read(conn: db.Connection) -> JsonDict | None:
        return jobs.explain(job_id, conn=conn) if payload.is_storable(job_id) else None

    found = await view.read(request, read)
    if found is None:
        text = f"no job {display.line(job_id, 80)}: it never was here, or it was deleted"
        raise view.NotFound(text, near=[("all that waits", "/waiting")])
    title = f"Why {display.line(found['name'], 120)} waits"
    command = f"queue-workflows why {shlex.quote(job_id)}"
    return view.page(request, "waiting_job.html", title=title, command=command, job=found)
