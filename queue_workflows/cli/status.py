"""Define `queue-workflows status`, `workers`, `health` and `models`: show what runs where."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from typing import Any

from queue_workflows import config, db, errors, schedules
from queue_workflows import models as model_api
from queue_workflows import workers as worker_api
from queue_workflows.admin import waiting_reasons
from queue_workflows.claim import record
from queue_workflows.cli import command, define, output, texts
from queue_workflows.dag import confinement
from queue_workflows.db import database_url, ledger, statements
from queue_workflows.runtime import app_loading, display, exit_codes, signals, stored_json
from queue_workflows.types import Row

PATIENCE_S = 2.0
"""A run that has been queued for more seconds than this is shown as not started."""
PARTITIONS = 5_000
"""The most partitions with settings that are read to find the paused ones."""


@define.command("status", reads=False)
def status(*, app: str | None) -> define.Shown:
    """Show queues, workers, runs, the orchestrator's lag, the schema."""
    chosen = app_loading.load_app(app)
    with command.database(create=False) as words:
        db.wait_until_reachable(timeout_s=0)
        found = _collect(words, config.queues() if chosen else config.DAG_QUEUES)
        keywords = database_url.keywords(db.db_url()) if found["embedded"] else ""
    return define.Shown(found, lambda: _show(found, keywords))


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
        **{
            key: list[Any]()
            for key in (
                "queues", "workers", "switched_off", "unassignable", "unserved", "unknown_nodes",
                "paused", "schedules",
            )
        },
        "runs": {},
        "orchestrator": None,
    }  # fmt: skip
    if version < db.REQUIRED_VERSION or of_others is not None:
        return found
    with db.transaction() as conn:
        own = statements.overview
        live = waiting_reasons.live_queues(conn, partitions=PARTITIONS)
        found["runs"] = own.runs_by_status(conn)
        events = own.open_events(conn)
        found["orchestrator"] = {
            "open_events": events["n"],
            "lag_s": events["lag_s"],
            **own.answers(conn),
            "not_started": [row["id"] for row in own.late_runs(conn, patience_s=PATIENCE_S)],
        }
        found["switched_off"] = statements.workers.switched_off(conn)
        found["unassignable"] = statements.models.flagged(conn)
        found["unserved"] = waiting_reasons.passed_over(live)
        within_s = record.UNKNOWN_MAX_S
        found["unknown_nodes"] = statements.handback.waiting_unknown(conn, within_s=within_s)
        found["paused"] = waiting_reasons.paused(live)
        found["schedules"] = [
            {"name": row["name"], "problem": schedules.problem(row)}
            for row in schedules.troubled(conn=conn)
        ]
    found["workers"] = worker_api.list(absent=False)
    found["queues"] = _queues(known, live, found["workers"])
    return found


def _queues(known: frozenset[str], live: list[Row], workers: list[Row]) -> list[dict[str, Any]]:
    """Return one entry per queue that the app names, that has work, or that a worker serves."""
    counts = [row for row in live if row["running"] or row["ready"] or row["blocked"]]
    names = known | {row["queue"] for row in counts} | {row["queue"] for row in workers}
    queues: dict[str, dict[str, Any]] = {
        name: {
            "queue": name, "queued": 0, "running": 0, "not_due": 0, "oldest_s": None, "workers": 0,
        }
        for name in sorted(names)
    }  # fmt: skip
    for row in counts:
        # Blocked jobs may not start yet.
        queues[row["queue"]] |= {
            "queued": row["ready"], "running": row["running"], "not_due": row["blocked"],
            "oldest_s": row["ready_s"],
        }  # fmt: skip
    for row in workers:
        queues[row["queue"]]["workers"] += row["state"] in worker_api.TAKING
    return list(queues.values())


def _show(found: dict[str, Any], keywords: str) -> None:
    output.echo(found["database"])
    if keywords:
        psql = f"psql {shlex.quote(keywords)}"
        output.echo(f"{psql} connects to it while `up`, `serve`, `run` or `demo` runs")
    version, required = found["schema_version"], found["required_version"]
    if found["schema_problem"]:
        output.echo(f"schema {found['schema_problem']}")
        return
    if version < required:
        remedy = "run `queue-workflows migrate`, or start queue-orchestrator"
        output.echo(f"schema version {version}, this code needs {required}: {remedy}")
        return
    newer = f" (this code knows {required})" if version > required else ""
    output.echo(f"schema version {version}{newer}")
    output.echo(f"runs without an out_dir keep their files in {found['outputs']}")
    output.echo()
    keys = ("queue", "workers", "queued", "running", "not_due")
    output.table(
        ("queue", "workers", "queued", "running", "not due", "oldest"),
        [(*(q[key] for key in keys), output.seconds(q["oldest_s"])) for q in found["queues"]],
    )
    output.echo()
    for text in _notes(found):
        output.echo(text)
    if found["workers"]:
        output.echo()
        output.table(_WORKERS_HEAD, map(_worker_cells, found["workers"]))


def _notes(found: dict[str, Any]) -> Iterator[str]:
    """Yield a line about runs, the orchestrator, and each thing that may need a person."""
    runs = ", ".join(f"{n} {name}" for name, n in sorted(found["runs"].items())) or "none"
    yield f"runs: {runs}"
    state = found["orchestrator"]
    lag = f"orchestrator: {output.counted(state['open_events'], 'open event')}"
    yield f"{lag}, lag {output.seconds(state['lag_s'])}"
    if state["awaiting_input"]:
        nodes = output.counted(state["awaiting_input"], "node")
        yield f"waiting for a person: {nodes}; `{command.PROG} inputs` lists them"
    if late := state["not_started"]:
        others = " and others" if len(late) > 1 else ""
        waits = f"{output.counted(len(late), 'run')} ({late[0]}{others})"
        provider = "is an orchestrator running, with --app?"
        yield f"waiting for a workflow provider: {waits}; {provider}"
    yield from map(texts.switch_text, found["switched_off"])
    yield from map(texts.pause_text, found["paused"])
    for row in found["unassignable"]:
        yield output.line(waiting_reasons.unassignable_text(row))
    for row in found["schedules"]:
        yield output.line(f"schedule {row['name']}: {row['problem']}")
    for row in found["unknown_nodes"]:
        jobs = output.counted(row["n"], "job")
        what = f"queue {row['queue']}: no worker so far knows node module {row['node_module']}"
        names = f"`{command.PROG} why {shlex.quote(row['run_id'])}` names"
        yield output.line(f"{what} of {jobs}; {names} the workers that met it", 500)
    yield from map(waiting_reasons.passed_over_text, found["unserved"])


ALIVE, SILENT, UNKNOWN = "alive", "silent", "unknown"
_SILENT = "no heartbeat"
_WORKERS_HEAD = ("host", "queue", "pid", "state", "switch", "model", "jobs", "seen", "why")


@define.command("workers")
def workers() -> define.Shown:
    """List worker processes: state, jobs, who switched them off."""
    return define.listed(worker_api.list(), _WORKERS_HEAD, _worker_cells)


def _worker_cells(row: Row) -> tuple[object, ...]:
    return (
        row["host_label"],
        row["queue"] if row["card"] is None else f"{row['queue']} {row['card']}",
        row["pid"] or "-", row["state"], row["desired_state"], row["current_model"] or "",
        ", ".join(row["job_ids"]),
        "-" if row["age_s"] is None else f"{output.seconds(row['age_s'])} ago",
        _why(row),
    )  # fmt: skip


def _why(row: Row) -> str:
    """Return `killed by SIGKILL, flagged; drain by ops, on again in 29 min 10 s: new disk`."""
    death = output.listed(row["death"], row["death"] and row["last_flagged_dead_at"] and "flagged")
    switch = ""
    if row["desired_state"] == "off":
        by = f" by {row['requested_by']}" if row["requested_by"] else ""
        ends = "" if row["until_s"] is None else f", on again in {output.seconds(row['until_s'])}"
        switch = f"{row['stop_policy']}{by}{ends}"
        switch += f": {row['reason']}" if row["reason"] else ""
    return "; ".join(filter(None, (death, row["throttle"], switch)))


@define.command(
    "health",
    """--queue Q  A queue that must have a worker; repeatable.
    --host LABEL  The host label of the workers; default: this machine's.
    --within SECONDS 1.0..  Largest age of a heartbeat.
    --strict  Exit with 1 also if the database does not answer.""",
    reads=False,
)
def health(
    queue: list[str] | None = None, host: str | None = None, within: float = 60.0,
    strict: bool = False, *, app: str | None,
) -> define.Shown:  # fmt: skip
    """Report whether the workers of this machine are alive.

    Exit code 0: each queue has a live worker, 1: one has none. A database that does not answer
    proves nothing about a worker: the exit code is 0, and the outage is printed.
    """
    label, why = "", ""
    found: dict[str, str] = {}
    try:
        with command.reading(app):
            label = host or config.host_label()
            found = _judge(worker_api.list(absent=False), label, queue or [], within)
    except (errors.DatabaseUnavailable, errors.SchemaTimeout) as error:
        why = str(error)
    except db.OperationalError as error:  # it was lost, or took too long, in the middle
        why = define.why_away(error)
    state = UNKNOWN if why else SILENT if SILENT in found.values() or not found else ALIVE
    states = ", ".join(f"{name} {how}" for name, how in sorted(found.items()))
    text = f"{state}: {output.line(why, 500) or states or f'no worker of {label}'}"
    return define.Shown(
        {"host_label": label, "state": state, "queues": found, "reason": why},
        lambda: output.echo(text),
        int(state == SILENT or (strict and state == UNKNOWN)),
    )


def _judge(rows: list[Row], label: str, queues: list[str], within_s: float) -> dict[str, str]:
    """Return `alive` or `silent` for these queues and for every queue with a worker here.

    A queue whose only workers were reaped is silent if it was named, else it is left out.
    """
    found = dict.fromkeys(queues, SILENT)
    for row in rows:
        name: str = row["queue"]
        reaped = row["death"] not in (None, _SILENT)
        if row["host_label"] != label or reaped or (queues and name not in queues):
            continue
        alive = row["age_s"] <= within_s
        found[name] = ALIVE if alive or found.get(name) == ALIVE else SILENT
    return found


POLL_S = 0.25
_OVER = frozenset({"done", "failed", "refused"})
_MODELS_HEAD = ("host", "pid", "state", "model", "held", "load", "needs", "gpus", "request")

models = define.group("models", "Show the models of gpu workers, or load or unload one.")


@define.command("list", "--host H  Only of this host label.", app=models)
def list_(host: str | None = None) -> define.Shown:
    """List the gpu workers with their models."""
    rows = model_api.list(host)
    return define.listed(rows, _MODELS_HEAD, _model_cells)


def _asking(action: str, help_: str, doc: str) -> None:
    """Add a subcommand that asks workers to act on a model; `help_`: of its argument."""

    def ask(
        model: str | None = None, host: str | None = None, worker: str | None = None,
        no_wait: bool = False,
    ) -> int | define.Shown:  # fmt: skip
        if action == "load" and not model:
            raise errors.InvalidConfig("load needs the id of a model: models load MODEL --host H")
        request, asked = _send(action, host or config.host_label(), model, worker)
        if no_wait:
            return define.listed(asked, _MODELS_HEAD, _model_cells)
        with command.until_stopped() as stop:
            rows = _answers(request, asked, stop)
            if stop.requested.is_set():
                command.print_message("stopped waiting; the request remains")
                return exit_codes.INTERRUPTED
        is_done = all(row["answer"]["state"] == "done" for row in rows)
        return define.Shown(rows, lambda: _print_answers(rows), 0 if is_done else 1)

    ask.__doc__ = doc
    lines = """--host H  Host label; default: this machine's.
    --worker ID|PID  One gpu worker of the machine; default: each of them.
    --no-wait  Send the request, and do not wait for the answer."""
    define.command(action, f"MODEL  {help_}", lines, takes=define.ACT, app=models)(ask)


_asking(
    "load",
    "The model's id.",
    "Load a model, between two jobs of each worker.\n\n"
    "Exit code 0: all workers succeeded, 1: one failed, refused or died, 130: Ctrl-C.",
)
_asking(
    "unload",
    "Its id; default: the loaded model.",
    "Unload a model, between two jobs of each worker. Exit codes are as for `load`.",
)


def _send(action: str, host: str, model: str | None, worker: str | None) -> tuple[Row, list[Row]]:
    """Send a request; return it, and the live workers that it is for."""
    # In one transaction: a worker may answer, or die, within milliseconds of the commit.
    with db.transaction() as conn:
        live = [row for row in model_api.list(host, conn=conn) if row["state"] != "dead"]
        by_pid = {str(row["pid"]): row["worker_id"] for row in live}
        worker_id = None if worker is None else by_pid.get(worker, worker)
        if action == "load":
            request = model_api.load(host, model or "", worker_id=worker_id, conn=conn)
        else:
            request = model_api.unload(host, model, worker_id=worker_id, conn=conn)
    return request, [row for row in live if worker_id in (None, row["worker_id"])]


def _answers(request: Row, asked: list[Row], stop: signals.StopRequest) -> list[Row]:
    """Wait until each worker has answered, died or got another request; return the workers."""
    number = request["request_no"]
    rows = {row["worker_id"]: row for row in asked}
    reported: set[str] = set()
    while True:
        now = {row["worker_id"]: row for row in model_api.list(request["host_label"])}
        for worker_id, row in rows.items():
            seen = now.get(worker_id, row | {"state": "dead"})
            answer = _answer(seen, number)
            rows[worker_id] = seen | {"answer": answer}
            waits = answer["state"] == "waiting"
            if seen["job_ids"] and waits and worker_id not in reported:
                reported.add(worker_id)
                command.print_message(f"{_name(seen)} obeys after job {', '.join(seen['job_ids'])}")
        over = all(row["answer"]["state"] in _OVER for row in rows.values())
        if over or stop.requested.wait(POLL_S):
            return list(rows.values())


def _answer(row: Row, number: int) -> Row:
    request = stored_json.mapping(row["request"])
    own = stored_json.number(request.get("no")) or 0
    if own > number:
        return {"state": "failed", "error": "another request took its place"}
    if own == number and request.get("state") in _OVER:
        return {"seconds": None, "error": None} | request
    if row["state"] == "dead":
        return {"state": "failed", "error": "the worker is dead"}
    return {"state": "waiting"}


def _print_answers(rows: list[Row]) -> None:
    for row in rows:
        answer = row["answer"]
        if answer["state"] == "done":
            what = f"holds {row['model']}" if row["model"] else "holds no model"
            output.echo(f"{_name(row)} {what}, after {output.seconds(answer['seconds'])}")
        else:
            output.echo(f"{_name(row)} {answer['state']}: {output.line(answer['error'])}")


def _name(row: Row) -> str:
    return f"{row['host_label']} pid {row['pid']}"


def _model_cells(row: Row) -> tuple[object, ...]:
    gpus = map(stored_json.mapping, stored_json.sequence(row["gpus"]))
    memory = [texts.used(gpu.get("vram_used_mb"), gpu.get("vram_total_mb")) for gpu in gpus]
    return (
        row["host_label"] if row["card"] is None else f"{row['host_label']} {row['card']}",
        row["pid"],
        row["state"],
        f"{row['model']} (loading)" if row["loading"] else row["model"] or "",
        output.seconds(row["held_s"]),
        output.seconds(row["load_s"]),
        display.number(row["est_vram_gb"], "g", " GB") if row["est_vram_gb"] else "-",
        # The memory in use of each GPU, as in `21.3/24.0, 0.2/24.0 GB`.
        ", ".join(each.removesuffix(" GB") for each in memory) + " GB" if memory else "-",
        _request(row["request"]),
    )


def _request(request: Any) -> str:
    if request is None:
        return ""
    members = stored_json.mapping(request).items()
    answer = {key: output.line(value) for key, value in members if value}
    by = f" by {answer['requested_by']}" if "requested_by" in answer else ""
    error = f": {answer['error']}" if "error" in answer else ""
    text = f"{answer.get('action', '-')} {answer.get('model', 'the loaded model')}{by}"
    return f"{text} {answer.get('state', '-')}{error}"
