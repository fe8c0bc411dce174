"""Show the schema, tables, retention and versions; run doctor and audit on request."""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping
from datetime import datetime, timezone
from typing import Final, Literal

import fastapi
from starlette.requests import Request
from starlette.responses import Response

from queue_workflows import __version__, config, db
from queue_workflows.admin import audit, checks
from queue_workflows.db import statements
from queue_workflows.service.dashboard import forms, view
from queue_workflows.types import JsonDict

router = fastapi.APIRouter()
TABLES: Final = 30
KNOBS: Final = ("RUN_RETENTION_DAYS", "JOB_RETENTION_DAYS", "NODE_EVENT_RETENTION_DAYS")


@router.get("/health")
async def shown(request: Request) -> Response:
    """Show the health of the installation, and the last results of doctor and audit."""
    found = await view.read(request, _read)
    version, kind, _ = checks.driver()
    text = "It only reads the live system, and may take a minute."
    return view.page(
        request, "health.html", title="Health", command="queue-workflows doctor",
        results=request.app.state.results, python=platform.python_version(), package=__version__,
        driver=f"{version} ({kind})", **found,
        retention=[(name, config.KNOBS[name].read()) for name in KNOBS],
        actions=[forms.Action(f"/health/{name}", f"Run {name}", "operate", {}, "makes", text)
                 for name in _CHECKS],
    )  # fmt: skip


def _read(conn: db.Connection) -> JsonDict:
    return {
        "findings": [checks.schema(conn), checks.dead_rows(conn)],
        "tables": statements.pages.tables(conn, limit=TABLES),
        "server": statements.doctor.server(conn)["version"],
    }


@router.post("/health/{name}")
async def check(request: Request, name: Literal["doctor", "audit"]) -> Response:
    """Run doctor or audit, and keep the result, also if the reader has gone meanwhile."""
    form = await forms.act(request, "operate")
    results = request.app.state.results

    def run() -> None:
        with db.connect() as conn:
            results[name] = datetime.now(timezone.utc), _CHECKS[name](conn)

    await form.run(run)
    return form.done(f"The result of {name} is below.", back="/health")


def _doctor(conn: db.Connection) -> list[checks.Finding]:
    found = list[checks.Finding]()
    for each in checks.CHECKS:
        found += each.answer(conn, "work")
        if each.ask is checks.schema and found[-1].level == checks.ERROR:
            break  # the others need the tables
    return found


def _audit(conn: db.Connection) -> list[checks.Finding]:
    values, found = audit.parameters(conn, since_s=86_400.0, limit=5), list[checks.Finding]()
    for each in audit.INVARIANTS:
        if each.statement is not None:
            outcome = audit.check(conn, each, values)
            level = checks.ERROR if outcome else checks.OK
            if isinstance(outcome, str):
                level, outcome = checks.WARNING, [audit.Offender("not finished", outcome)]
            rows = "; ".join(f"{one.id}: {one.text}" for one in outcome)
            found.append(checks.Finding(each.name, level, each.sentence, rows))
    return found


_CHECKS: Final[Mapping[str, Callable[[db.Connection], list[checks.Finding]]]] = {
    "doctor": _doctor, "audit": _audit,
}  # fmt: skip
