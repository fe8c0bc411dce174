"""Show whether anybody is needed: the page Now."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import fastapi
from starlette.requests import Request
from starlette.responses import Response

from queue_workflows import db, queues
from queue_workflows.admin import attention
from queue_workflows.db import statements
from queue_workflows.service.dashboard import machines_page, view
from queue_workflows.types import JsonDict

router = fastapi.APIRouter()
RUNNING: Final = 10
"""Running jobs that are shown."""
SHOWN: Final = 20
"""Machines, and queues, that are shown."""
_PAGES: Final[Mapping[str, str]] = {
    "question": "/inbox", "failure": "/failures", "model": "/waiting", "switch": "/machines",
    "machine": "/machines", "queue": "/waiting", "schedule": "/schedules",
}  # fmt: skip
"""Where the needs of each kind are seen to; those of other kinds at `/health`."""
_WAITING: Final = ("ready", "limited", "locked", "not_due")


@router.get("/")
async def now(request: Request) -> Response:
    """Show the needs for a person, machines, queues, and the jobs that run longest."""
    pages: view.Pages = request.app.state.pages
    facts = await pages.head(request)
    command = "queue-workflows status"
    return await view.live(request, "now.html", _read, facts, title="Now", command=command)


def _read(conn: db.Connection, facts: attention.Facts) -> JsonDict:
    found = queues.list(used_only=True, conn=conn)
    found.sort(key=lambda row: (-(row["oldest_s"] or 0.0), -row["running"], row["queue"]))
    oldest = [row["oldest_s"] for row in found if row["oldest_s"] is not None]
    return machines_page.shown(conn, facts.awaited, most=SHOWN) | {
        "needs": facts.needs,
        "links": _PAGES,
        "last_failure_at": facts.failed_at,
        "any_run": facts.any_run,
        "queues": found[:SHOWN],
        "left_out": len(found[SHOWN:]),
        "chosen": None,
        "running": statements.pages.running(conn, workers=None, limit=RUNNING),
        "runs": sum(row["running"] for row in found),
        "waits": sum(row[name] for row in found for name in _WAITING),
        "oldest_s": max(oldest, default=None),
        "database": db.describe(),
        "hints": "jobs runs 5s",
    }
