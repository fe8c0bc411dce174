"""Show the schema, tables, retention and versions; run doctor and audit on request."""

from __future__ import annotations

import asyncio
import platform
from datetime import datetime, timezone
from typing import Final, Literal

import fastapi
from starlette.requests import Request
from starlette.responses import Response

from queue_workflows import __version__, config, db
from queue_workflows.admin import audit, checks
from queue_workflows.db import statements
from queue_workflows.service import state
from queue_workflows.service.dashboard import forms, view
from queue_workflows.types import JsonDict

router = fastapi.APIRouter()
TABLES: Final = 30
KNOBS: Final = ("RUN_RETENTION_DAYS", "JOB_RETENTION_DAYS", "NODE_EVENT_RETENTION_DAYS")
WAITS_S: Final = 5.0
"""Seconds for which the reader waits for a check; an invariant of audit alone may take 60."""


@router.get("/health")
async def shown(request: Request) -> Response:
    """Show the health of the installation, and the last results of doctor and audit."""
    found = await view.read(request, _read)
    version, kind, _ = checks.driver()
    running = {name for name, task in request.app.state.checking.items() if not task.done()}
    return view.Page(
        request, "health.html", title="Health", command="queue-workflows doctor",
        results=request.app.state.results, running=running, package=__version__,
        python=platform.python_version(), driver=f"{version} ({kind})",
        retention=[(name, config.KNOBS[name].read()) for name in KNOBS], **found,
    )  # fmt: skip


def _read(conn: db.Connection) -> JsonDict:
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
