"""Define `queue-workflows status`: show the whole system on one page."""

from __future__ import annotations

import shlex
from typing import Any
from urllib.parse import parse_qs, urlsplit

from queue_workflows import config, db, schedules
from queue_workflows import workers as worker_api
from queue_workflows.admin import overview
from queue_workflows.claim import admission, record
from queue_workflows.cli import command, define, output, unserved_queues
from queue_workflows.cli import workers as workers_command
from queue_workflows.dag import confinement
from queue_workflows.db import ledger, statements
from queue_workflows.runtime import app_loading
from queue_workflows.types import Row

PATIENCE_S = 2.0
"""Age in seconds at which a queued run counts as not started (it takes 2 s)."""
_NOT_SERVING = frozenset({"dead", "stopped", "parked", "paused", "draining"})


@define.command("status", reads=False)
def status(*, app: str | None) -> define.Shown:
    """Show queues, workers, runs, the orchestrator's lag, the schema."""
    chosen = app_loading.load_app(app)
    with command.database(create=False) as words:
        db.wait_until_reachable(timeout_s=0)
        found = _collect(words, config.queues() if chosen else config.DAG_QUEUES)
        psql = _psql(db.db_url()) if found["embedded"] else ""
    return define.Shown(found, lambda: _show(found, psql))


def _collect(words: str, known: frozenset[str]) -> dict[str, Any]:
    version = db.current_schema_version()
    with db.connect() as conn:
        of_others = ledger.of_others(conn)
    found: dict[str, Any] = {
        "database": words,
        "embedded": config.database_url() is None,
        "outputs": str(confinement.outputs_folder()),
        "schema_version": version,
        "required_version": db.REQUIRED_VERSION,
        "schema_problem": of_others and f"{of_others}: {ledger.OF_OTHERS_REMEDY}",
        "queues": [],
        "workers": [],
        "switched_off": [],
        "unassignable": [],
        "unserved": [],
        "unknown_nodes": [],
        "paused": [],
        "schedules": [],
        "runs": {},
        "orchestrator": None,
    }
    if version < db.REQUIRED_VERSION or of_others is not None:
        return found
    with db.transaction() as conn:
        counts = overview.queues(conn)
        found["runs"] = overview.runs_by_status(conn)
        found["orchestrator"] = overview.orchestration(conn, patience_s=PATIENCE_S)
        found["switched_off"] = statements.workers.switched_off(conn)
        found["unassignable"] = statements.models.flagged(conn)
        stale_s = config.STALE_WORKER_AFTER_S.read()
        found["unserved"] = admission.count_by_queue(conn, stale_s)
        found["unknown_nodes"] = statements.handback.waiting_unknown(
            conn, within_s=record.UNKNOWN_MAX_S
        )
        found["paused"] = statements.queues.paused(conn)
        troubled = schedules.troubled(conn=conn)
    found["schedules"] = [
        {"name": row["name"], "problem": schedules.problem(row)} for row in troubled
    ]
    found["workers"] = worker_api.list(absent=False)
    found["queues"] = _queues(known, counts, found["workers"])
    return found


def _queues(known: frozenset[str], counts: list[Row], workers: list[Row]) -> list[dict[str, Any]]:
    """Return one entry per queue that the app names, that has work, or that a worker serves."""
    names = known | {row["queue"] for row in counts} | {row["queue"] for row in workers}
    queues: dict[str, dict[str, Any]] = {
        name: {
            "queue": name,
            "queued": 0,
            "running": 0,
            "not_due": 0,
            "oldest_s": None,
            "workers": 0,
        }
        for name in sorted(names)
    }
    for row in counts:
        queue = queues[row["queue"]]
        queue[row["state"]] = row["n"]
        if row["state"] == "queued":
            queue["not_due"], queue["oldest_s"] = row["blocked"], row["oldest_s"]
    for row in workers:
        queues[row["queue"]]["workers"] += row["state"] not in _NOT_SERVING
    return list(queues.values())


def _psql(url: str) -> str:
    """Return the psql command that connects to the embedded server at this URL."""
    parts = urlsplit(url)
    found = {name: values[0] for name, values in parse_qs(parts.query).items()}
    found |= {"user": parts.username or "", "dbname": parts.path.lstrip("/")}
    return "psql " + shlex.quote(" ".join(f"{k}={_conninfo(v)}" for k, v in found.items()))


def _conninfo(value: str) -> str:
    plain = value.isascii() and not any(char in " \t\n'\\" for char in value)
    escaped = value.replace("\\", "\\\\").replace("'", "\\'")
    return value if plain and value else f"'{escaped}'"


def _schema_text(found: dict[str, Any]) -> tuple[str, bool]:
    """Return a line about the version of the schema, and whether this code can read its tables."""
    version, required = found["schema_version"], found["required_version"]
    if found["schema_problem"]:
        return f"schema {found['schema_problem']}", False
    if version < required:
        remedy = "run `queue-workflows migrate`, or start queue-orchestrator"
        return f"schema version {version}, this code needs {required}: {remedy}", False
    newer = f" (this code knows {required})" if version > required else ""
    return f"schema version {version}{newer}", True


def _show(found: dict[str, Any], psql: str) -> None:
    output.echo(found["database"])
    if psql:
        output.echo(f"{psql} connects to it while `up`, `serve`, `run` or `demo` runs")
    text, readable = _schema_text(found)
    output.echo(text)
    if not readable:
        return
    output.echo(f"runs without an out_dir keep their files in {found['outputs']}")
    output.echo()
    keys = ("queue", "workers", "queued", "running", "not_due")
    output.table(
        ("queue", "workers", "queued", "running", "not due", "oldest"),
        [(*(q[key] for key in keys), output.seconds(q["oldest_s"])) for q in found["queues"]],
    )
    output.echo()
    runs = ", ".join(f"{n} {name}" for name, n in sorted(found["runs"].items())) or "none"
    output.echo(f"runs: {runs}")
    _show_orchestrator(found["orchestrator"])
    for row in found["switched_off"]:
        output.echo(unserved_queues.switch_text(row))
    for row in found["paused"]:
        output.echo(unserved_queues.pause_text(row))
    for row in found["unassignable"]:
        of = f" of model {row['model']}" if row["model"] else " without a model"
        jobs = output.counted(row["jobs"], "queued gpu job")
        output.echo(output.line(f"no worker can take {jobs}{of}: {row['detail']}"))
    for row in found["schedules"]:
        output.echo(output.line(f"schedule {row['name']}: {row['problem']}"))
    for row in found["unknown_nodes"]:
        jobs = output.counted(row["n"], "job")
        what = f"queue {row['queue']}: no worker so far knows node module {row['node_module']}"
        output.echo(output.line(f"{what} of {jobs}; `why {row['run_id']}` names who met it", 500))
    for row in found["unserved"]:
        output.echo(unserved_queues.unserved_text(row))
    if found["workers"]:
        output.echo()
        workers_command.show(found["workers"])


def _show_orchestrator(state: dict[str, Any]) -> None:
    lag = f"orchestrator: {output.counted(state['open_events'], 'open event')}"
    output.echo(f"{lag}, lag {output.seconds(state['lag_s'])}")
    if state["awaiting_input"]:
        nodes = output.counted(state["awaiting_input"], "node")
        output.echo(f"waiting for a person: {nodes}; `{command.PROG} inputs` lists them")
    if late := state["not_started"]:
        output.echo(
            f"waiting for a workflow provider: {output.counted(len(late), 'run')} ({late[0]}"
            f"{' and others' if len(late) > 1 else ''}); is an orchestrator running, with --app?"
        )
