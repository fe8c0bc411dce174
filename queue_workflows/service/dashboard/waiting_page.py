"""Show why jobs wait: all of them in groups, and one with the reason of each worker."""

from __future__ import annotations

import shlex

import fastapi
from starlette.requests import Request
from starlette.responses import Response

from queue_workflows import db, jobs
from queue_workflows.admin import waiting_reasons
from queue_workflows.runtime import display
from queue_workflows.service.dashboard import view
from queue_workflows.types import JsonDict

router = fastapi.APIRouter()


@router.get("/waiting")
async def listed(request: Request, job: view.Text = None) -> Response:
    """Show the queued jobs in groups by the reasons of their waits, or the reasons of one."""
    if not job:
        return await view.live(
            request, "waiting.html", waiting_reasons.groups, title="Waiting",
            command="queue-workflows why",
        )  # fmt: skip
    found = await view.read(request, _one, job)
    title = f"Why {display.line(found['name'], 120)} waits"
    command = f"queue-workflows why {shlex.quote(job)}"
    return view.Page(request, "waiting_job.html", title=title, command=command, job=found)


def _one(conn: db.Connection, job_id: str) -> JsonDict:
    found = jobs.explain(job_id, conn=conn)
    if found is None:
        text = f"no job {display.line(job_id, 80)}: it never was here, or it was deleted"
        raise view.NotFound(text, near=[("all that waits", "/waiting")])
    return found
