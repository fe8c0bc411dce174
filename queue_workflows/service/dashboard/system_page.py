"""Show the whole system: what needs a person now, its health, and the acts of people."""

from __future__ import annotations

import asyncio
import platform
from collections.abc import Mapping
from datetime import datetime, timezone
from typing import Annotated, Final, Literal

import fastapi
from starlette.requests import Request
from starlette.responses import Response

from queue_workflows import __version__, acts, config, db, queues
from queue_workflows.admin import attention, audit, checks
from queue_workflows.db import statements
from queue_workflows.service import state
from queue_workflows.service.dashboard import forms, machines_page, runs_page, session, view
from queue_workflows.types import JsonDict, Rows

router = fastapi.APIRouter()


# --- now ---------------------------------------------------------------------------------------

RUNNING: Final = 10
"""Running jobs that are shown."""
SHOWN: Final = 20
"""Machines, and queues, that are shown."""
_PAGES: Final[Mapping[str, str]] = {
    "question": "/inbox", "failure": "/failures", "model": "/waiting", "switch": "/machines",
    "machine": "/machines", "queue": "/waiting", "schedule": "/schedules",
}  # fmt: skip
"""The page for the needs of each kind; other kinds have `/health`."""
_WAITING: Final = ("ready", "limited", "locked", "not_due")


@router.get("/")
async def now(request: Request) -> Response:
    """Show the needs for a person, machines, queues, and the jobs that run longest."""
    pages: view.Pages = request.app.state.pages
    facts = await pages.head(request)
    command = "queue-workflows status"
    return await view.live(request, "now.html", _now, facts, title="Now", command=command)


def _now(conn: db.Connection, facts: attention.Facts) -> JsonDict:
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


# --- health ------------------------------------------------------------------------------------

TABLES: Final = 30
KNOBS: Final = ("RUN_RETENTION_DAYS", "JOB_RETENTION_DAYS", "NODE_EVENT_RETENTION_DAYS")
WAITS_S: Final = 5.0
"""Seconds for which the reader waits for a check; an invariant of audit alone may take 60."""


@router.get("/health")
async def health(request: Request) -> Response:
    """Show the health of the installation, and the last results of doctor and audit."""
    found = await view.read(request, _health)
    version, kind, _ = checks.driver()
    running = {name for name, task in request.app.state.checking.items() if not task.done()}
    return view.Page(
        request, "health.html", title="Health", command="queue-workflows doctor",
        results=request.app.state.results, running=running, package=__version__,
        python=platform.python_version(), driver=f"{version} ({kind})",
        retention=[(name, config.KNOBS[name].read()) for name in KNOBS], **found,
    )  # fmt: skip


def _health(conn: db.Connection) -> JsonDict:
    return {
        "findings": [checks.schema(conn), checks.dead_rows(conn)],
        "tables": statements.pages.tables(conn, limit=TABLES),
        "server": conn.info.parameter_status("server_version"),
    }


@router.post("/health/{name}")
async def check(request: Request, name: Literal["doctor", "audit"]) -> Response:
    """Run doctor or audit unless it is running, and keep the result.

    A check that takes longer than WAITS_S, or whose reader has gone, goes on by itself.
    """
    form = await forms.act(request, "operate")
    results = request.app.state.results
    checking: dict[str, asyncio.Task[None]] = request.app.state.checking

    def run() -> None:
        with db.connect() as conn:
            found = [*(checks.findings(conn, "work") if name == "doctor" else _audit(conn))]
            results[name] = datetime.now(timezone.utc), found

    task = checking.get(name)
    if task is None or task.done():
        task = checking[name] = asyncio.create_task(form.run(run))
    # The guard ends a request that takes longer than its own limit.
    limit_s = min(WAITS_S, state.of(request).settings.app_request_timeout_sec / 2)
    await asyncio.wait([task], timeout=limit_s)
    if not task.done():
        text = f"{name.capitalize()} is still running. Reload this page later for its result."
        return form.done(text, back="/health")
    task.result()  # or its error
    return form.done(f"The result of {name} is below.", back="/health")


def _audit(conn: db.Connection) -> checks.Findings:
    values = audit.parameters(conn, since_s=86_400.0, limit=5)
    for each in audit.INVARIANTS:
        if each.statement is None:
            continue
        outcome = audit.check(conn, each, values)
        if isinstance(outcome, str):
            yield checks.Finding(
                each.name, checks.WARNING, each.sentence, f"not finished: {outcome}"
            )
        else:
            level = checks.ERROR if outcome else checks.OK
            rows = "; ".join(f"{one.id}: {one.text}" for one in outcome)
            yield checks.Finding(each.name, level, each.sentence, rows)


# --- acts --------------------------------------------------------------------------------------

KINDS: Final = ("run", "job", "queue", "schedule", "machine")
"""The kinds of subjects with a page. Other subjects may be values, such as error texts."""


@router.get("/acts")
async def listed(
    request: Request, before: Annotated[int | None, fastapi.Query(ge=0, lt=2**63)] = None
) -> Response:
    """Show a page of acts, the newest first."""
    query, given = runs_page.filters(request, "since", "actor", "action", "kind", "subject")
    guesses = "subject" in query and query.get("kind") not in KINDS
    if guesses and not session.of(request).sees_values:
        text = "Your session has scope look: beside an id or a name, choose its kind."
        raise forms.Refused(403, text)

    def read(conn: db.Connection) -> Rows:
        return acts.list(conn=conn, before=before, limit=view.PAGE + 1, **given)

    rows = await view.read(request, read)
    more = {**query, "before": rows[view.PAGE - 1]["id"]} if len(rows) > view.PAGE else None
    return view.Page(
        request, "acts.html", title="Acts", command=view.command("queue-workflows acts", query),
        acts=rows[:view.PAGE], filters=query, kinds=KINDS,
        pages=view.Pager("/acts", query, more, before is None),
    )  # fmt: skip
