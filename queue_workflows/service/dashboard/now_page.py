"""Show whether anybody is needed: the page Now."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

import fastapi
from starlette.requests import Request
from starlette.responses import Response

from queue_workflows import db, queues, workers
from queue_workflows.db import statements
from queue_workflows.service.dashboard import view
from queue_workflows.types import Row, Rows

router = fastapi.APIRouter()
RUNNING: Final = 10
"""Running jobs that are shown."""
MACHINES: Final = 50
QUEUES: Final = 50
_PAGES: Final[Mapping[str, str]] = {
    "question": "/inbox", "failure": "/failures", "model": "/waiting", "switch": "/machines",
    "machine": "/machines", "queue": "/waiting", "schedule": "/schedules", "alert": "/health",
    "orchestrator": "/health",
}  # fmt: skip
"""Where the needs of each kind are seen to."""


@router.get("/")
async def now(request: Request) -> Response:
    """Show the needs for a person, machines, queues, and the jobs that run longest."""
    values = await _values(request)
    return view.page(request, "now.html", title="Now", command="queue-workflows status", **values)


@router.get("/now")
async def body(request: Request) -> Response:
    """Return the page without its layout."""
    return await view.fragment(request, "now_body.html", lambda: _values(request))


async def _values(request: Request) -> dict[str, Any]:
    pages: view.Pages = request.app.state.pages
    facts = await pages.head(request)
    found = await view.read(request, _read)
    return found | {
        "needs": facts.needs,
        "links": _PAGES,
        "last_failure_at": facts.failed_at,
        "any_run": facts.any_run,
    }


def _read(conn: db.Connection) -> dict[str, Any]:
    every = [_queue(row) for row in queues.list(used_only=True, conn=conn)]
    every.sort(key=lambda row: (-(row["oldest_s"] or 0.0), -row["running"], row["queue"]))
    oldest = [row["oldest_s"] for row in every if row["oldest_s"] is not None]
    return {
        "machines": _machines(workers.list(conn=conn))[:MACHINES],
        "queues": every[:QUEUES],
        "running": statements.pages.running(conn, limit=RUNNING),
        "runs": sum(row["running"] for row in every),
        "waits": sum(row["waiting"] for row in every),
        "oldest_s": max(oldest, default=None),
        "database": db.describe(),
    }


def _queue(row: Row) -> Row:
    """Return a queue with all that waits, and how long that takes at the rate of now."""
    waiting = row["ready"] + row["limited"] + row["locked"] + row["not_due"]
    rate = row["out_per_min"] - row["in_per_min"]
    empty_s = waiting / rate * 60 if waiting and rate > 0 else None
    return row | {"waiting": waiting, "empty_s": empty_s}


def _machines(rows: Rows) -> list[dict[str, Any]]:
    """Return a line for each machine: its workers, their worst state first, models and jobs."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(row["host_label"], []).append(row)
    return [
        {
            "host": host,
            "workers": sorted(of, key=lambda row: (_RANK.get(row["state"], 1), row["queue"])),
            "models": _distinct(row["current_model"] for row in of),
            "jobs": sum(len(row["job_ids"]) for row in of),
            "seen_at": max((row["last_seen"] for row in of if row["last_seen"]), default=None),
        }
        for host, of in sorted(found.items())
    ]


_RANK: Final[Mapping[str, int]] = {"dead": 0, "busy": 2, "idle": 3}


def _distinct(values: Iterable[str | None]) -> list[str]:
    return sorted({value for value in values if value})
