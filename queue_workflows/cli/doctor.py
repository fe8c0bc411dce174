"""Define `queue-workflows doctor`: find what is wrong with an installation, and the remedies.

Its length is that of its list of checks: one short function each.
"""

from __future__ import annotations

import os
import platform
import shlex
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from queue_workflows import __version__, config, db, errors, schedules
from queue_workflows.admin import doctor as facts
from queue_workflows.claim import admission
from queue_workflows.cli import checks, command, define, output, unserved_queues
from queue_workflows.cli.checks import ERROR, OK, WARNING, Finding, Findings
from queue_workflows.dag import confinement
from queue_workflows.db import functions, ledger, schema, statements
from queue_workflows.runtime import app_loading, display, entry_point

OUTBOX_WARN_S, OUTBOX_ERROR_S = 10.0, 60.0
"""The orchestrator polls every second; a service manager restarts it within a minute."""
LAPSED_WARN_S = 60.0
"""Lapsed leases are swept every 5 s."""
WAIT_WARN_S = 30.0
"""Seconds that a worker needs to restart."""
ALERT_WARN_S = 150.0
"""A sender notes every 15 s that it is there. Nothing waits longer than the minute of its limit."""
SHOWN_BAD = 20
"""Bad rows that are shown per kind."""
SERVER_CHECKS = (
    checks.server,
    checks.settings,
    checks.clock,
    checks.listen,
    checks.transactions,
    checks.connections,
)

Check = Callable[[db.Connection], Findings]


@define.command("doctor", reads=False)
def doctor(*, app: str | None, as_json: bool) -> define.Shown:
    """Check this machine, the server and unfinished work. Exit code 1 for an error."""
    entry_point.setup_logging("error")
    app_loading.load_app(app)
    found = checks.masked(examine(), lambda found: as_json or checks.show(found))
    counts = {level: sum(f.level == level for f in found) for level in (ERROR, WARNING)}
    listed = [finding._asdict() for finding in found]
    report = {"findings": listed, "errors": counts[ERROR], "warnings": counts[WARNING]}
    errors_, warnings = (output.counted(n, word) for word, n in counts.items())
    shown = define.Shown(report, lambda: output.echo(f"{errors_}, {warnings}"))
    return shown._replace(code=int(counts[ERROR] > 0))


def examine() -> Findings:
    """Yield every finding in order; end early if nothing further can be checked."""
    yield Finding(
        "package", OK, f"queue_workflows {__version__}, Python {platform.python_version()}"
    )
    yield _driver()
    try:
        with command.database(create=False) as words:
            yield from _connection(words)
    except errors.QueueWorkflowsError as error:
        yield Finding("database", ERROR, str(error))
    except db.OperationalError as error:
        yield Finding("database", ERROR, f"the connection was lost: {facts.reason(error)}")


def _driver() -> Finding:
    version, kind, libpq = facts.driver()
    text = f"psycopg {version} ({kind}), libpq {libpq // 10000}.{libpq % 10000}"
    if kind == "python":
        return Finding("psycopg", WARNING, text, "install psycopg[binary], which is faster")
    return Finding("psycopg", OK, text)


def _connection(words: str) -> Findings:
    began = time.monotonic()
    try:
        conn = db.connect()
    except db.OperationalError as error:
        remedy = "is the server up, and are host, port, user and password right?"
        yield Finding("database", ERROR, f"{words} does not answer: {facts.reason(error)}", remedy)
        return
    with conn:
        took_ms = (time.monotonic() - began) * 1000
        yield Finding("database", OK, f"{words} answers within {took_ms:.0f} ms")
        for check in (*SERVER_CHECKS, _rights):
            yield from _guarded(check.__name__.lstrip("_").replace("_", " "), check, conn)
        schema = list(_guarded("schema", _schema, conn))
        yield from schema
        if any(finding.level == ERROR for finding in schema):
            yield Finding("tables", WARNING, "not checked: the schema comes first")
            return
        for check in (
            _functions, _files, _outbox, _runs, _bad_rows, _leases, _queues, _versions, _lock_keys,
            _schedules, _alerts, _workers, checks.dead_rows, checks.renewals,
        ):  # fmt: skip
            yield from _guarded(check.__name__.lstrip("_").replace("_", " "), check, conn)


def _guarded(name: str, check: Check, conn: db.Connection) -> Findings:
    """Yield the findings of a check, or one finding if the server refused it.

    Raises `db.Error` if the connection is lost.
    """
    try:
        yield from check(conn)
    except db.Error as error:
        if conn.closed or conn.broken:
            raise
        yield Finding(name, ERROR, f"cannot be read: {facts.reason(error)}", _remedy(error))


def _remedy(error: db.Error) -> str:
    """Return the remedy for a statement that the server refused."""
    if facts.is_undefined(error):
        return "run `queue-workflows migrate`, which installs what is missing"
    return "grant this role what it needs, or try again when the server is less busy"


def _each(check: str, ok: str, wrong: Iterable[tuple[str, str]], level: str = WARNING) -> Findings:
    """Yield a finding for each text and remedy; `ok` if there is none."""
    found = [Finding(check, level, text, remedy) for text, remedy in wrong]
    yield from found or [Finding(check, OK, ok)]


def _schema(conn: db.Connection) -> Findings:
    version, required = db.current_schema_version(), db.REQUIRED_VERSION
    if (of_others := ledger.of_others(conn)) is not None:
        yield Finding("schema", ERROR, of_others, ledger.OF_OTHERS_REMEDY)
    elif version < required:
        text = f"at version {version}, this code needs {required}"
        yield Finding("schema", ERROR, text, "run `queue-workflows migrate`")
    elif schema.development_version(conn) is not None:
        text = f"at version {version} of a development build, this code needs {required}"
        yield Finding("schema", ERROR, text, "run `queue-workflows migrate`")
    elif version > required:
        text = f"at version {version}, this code knows {required}"
        yield Finding("schema", WARNING, text, "upgrade queue_workflows here")
    else:
        yield Finding("schema", OK, f"at version {version}")


def _functions(conn: db.Connection) -> Findings:
    problems = functions.problems(conn)
    for problem in problems[:SHOWN_BAD]:
        if problem.is_newer:
            yield Finding("functions", WARNING, problem.text, "upgrade queue_workflows here")
        else:
            yield Finding(
                "functions", ERROR, problem.text, "`queue-workflows migrate` installs them"
            )
    if not problems:
        yield Finding("functions", OK, "functions and triggers are those of this version")


def _rights(conn: db.Connection) -> Findings:
    remedy = (
        "run what `queue-workflows connect --for work --sql` prints, as the owner of the tables"
    )
    for finding in checks.rights(conn, "work"):
        yield finding._replace(remedy=remedy if finding.remedy else "")


def _files(conn: db.Connection) -> Findings:
    knob = config.OUT_ROOTS.variables[0]
    if roots := confinement.roots():
        yield Finding("files", OK, f"runs keep theirs in {os.pathsep.join(roots)}")
    elif submitters := statements.permissions.submitters(conn):
        text = f"{', '.join(submitters)} may submit runs, and their out_dir may be any folder"
        remedy = f"set {knob} here and on every worker and orchestrator"
        yield Finding("files", WARNING, text, remedy)
    else:
        yield Finding("files", OK, "no role may do no more than submit runs")
    yield from _outputs(statements.doctor.machines(conn))
    if schema := statements.permissions.public_may_create(conn):
        text = f"every role may create functions in schema {schema}, which triggers could call"
        remedy = f"as the owner: REVOKE CREATE ON SCHEMA {schema} FROM PUBLIC"
        yield Finding("schema rights", WARNING, text, remedy)


def _outputs(machines: list[str]) -> Findings:
    """Check the folders that nodes write to, by writing there."""
    may_run = config.host_label() in machines or config.get_config().knows_nodes()
    knob, default = config.OUTPUTS_DIR.variables[0], confinement.outputs_folder()
    for folder in dict.fromkeys([default, *map(Path, confinement.roots())]):
        if reason := _unwritable(folder):
            remedy = f"let this user (uid {os.geteuid()}) write there, or set {knob} to another one"
            text = f"nodes that take `out` fail here: {folder} cannot be written: {reason}"
            if not may_run:
                text += " (no worker of nodes has run on this machine within a day)"
            yield Finding("outputs", ERROR if may_run else WARNING, text, remedy)
            return
    text = f"runs without an out_dir keep their files in {default}"
    if len(machines) < 2 or config.OUTPUTS_DIR.read():
        yield Finding("outputs", OK, text)
        return
    remedy = f"set {knob} to a folder that all of them share, on each"
    yield Finding("outputs", WARNING, f"{text}, on each of {len(machines)} machines", remedy)


def _unwritable(folder: Path) -> str | None:
    """Return why this process cannot make a folder there, or None; leave nothing behind."""
    existing = next(each for each in (folder, *folder.parents) if os.access(each, os.F_OK))
    try:
        with tempfile.TemporaryDirectory(prefix=".queue-workflows-", dir=existing):
            return None
    except OSError as error:
        return f"{error.strerror} ({existing})"


def _outbox(conn: db.Connection) -> Findings:
    found = statements.doctor.outbox(conn)
    lag_s = found["lag_s"] if found else 0.0
    if found is None or lag_s <= OUTBOX_WARN_S:
        yield Finding("outbox", OK, f"lag {output.seconds(lag_s)}")
        return
    text = f"an event of run {found['run_id']} waits for {output.seconds(lag_s)}"
    if found["error"]:
        text += f" ({output.line(found['error'])})"
    level = ERROR if lag_s > OUTBOX_ERROR_S else WARNING
    yield Finding("outbox", level, text, "is a queue-orchestrator running? see its log")


def _runs(conn: db.Connection) -> Findings:
    stalled = statements.doctor.stalled_runs(conn, quiet_s=LAPSED_WARN_S)
    if stalled["n"]:
        text = f"run {stalled['run_id']} is running, but nothing moves it forward"
        if stalled["n"] > 1:
            text += f"; {stalled['n'] - 1} more"
        yield Finding("runs", ERROR, text, "start queue-orchestrator, which ends it or goes on")
    found = statements.doctor.waiting_runs(conn)
    if found is None or found["wait_s"] <= WAIT_WARN_S:
        yield Finding("runs", OK, "none waits to be started")
        return
    text = f"run {found['run_id']} has not been started for {output.seconds(found['wait_s'])}"
    remedy = "start queue-orchestrator with --app"
    if found["others"]:
        text += ", though others were started within the last minute"
        remedy = f"an orchestrator runs: wait, or `queue-workflows cancel {found['run_id']}`"
    yield Finding("runs", WARNING, text, remedy)


def _bad_rows(conn: db.Connection) -> Findings:
    """Report failing, blocked, unreadable and out-of-range rows with the command that ends each."""
    rows = [*facts.stuck_rows(conn, SHOWN_BAD), *facts.rows_out_of_range(conn, SHOWN_BAD)]
    wrong = [(f"{row.kind} {row.id}: {row.text}", f"`{row.command}`") for row in rows]
    return _each("bad rows", "none is failing, blocked, unreadable or out of range", wrong)


def _leases(conn: db.Connection) -> Findings:
    found = statements.doctor.lapsed(conn)
    if not found["n"] or found["since_s"] <= LAPSED_WARN_S:
        yield Finding("leases", OK, "none is left lapsed")
        return
    text = f"{output.counted(found['n'], 'job')} not taken back, {output.seconds(found['since_s'])}"
    yield Finding("leases", ERROR, f"{text} after the lease lapsed", "start queue-orchestrator")


def _queues(conn: db.Connection) -> Findings:
    wrong: list[tuple[str, str]] = []
    stale_s = config.STALE_WORKER_AFTER_S.read()
    for row in statements.doctor.unserved(conn, stale_s=stale_s, counted=10_000):
        jobs = f"{row['queue']}: {output.counted(row['n'], 'due job')}"
        if row["wait_s"] <= WAIT_WARN_S:
            continue
        if row["alive"]:
            wrong.append(
                (
                    f"{jobs}, its workers take none",
                    f"queue-worker-control --queue={row['queue']} --on",
                )
            )
        else:
            start = f"start queue-claim-worker --queue={row['queue']}"
            wrong.append((f"{jobs} and no live worker", start))
    return _each("queues", "every queue with due jobs has a live worker", wrong)


def _versions(conn: db.Connection) -> Findings:
    stale_s = config.STALE_WORKER_AFTER_S.read()
    rows = statements.doctor.missing_versions(conn, stale_s=stale_s, listed=SHOWN_BAD)
    if not rows:
        yield Finding(
            "versions", OK, "every version of a node that due jobs need has a live worker"
        )
    for row in rows:
        jobs = ", ".join(display.line(job, 100) for job in row["jobs"])
        what = f"no live worker of queue {row['queue']} has {display.line(row['version'], 200)}"
        text = (
            f"{what}; jobs that need it wait, the first for {output.seconds(row['wait_s'])}: {jobs}"
        )
        remedy = "start a worker with this version, or `queue-workflows upgrade RUN`"
        yield Finding("versions", WARNING, text, remedy)


def _lock_keys(conn: db.Connection) -> Findings:
    rows = admission.count_by_queue(conn, config.STALE_WORKER_AFTER_S.read())
    remedy = (
        "start queue-claim-worker --queue={0}, `queue-workflows queues resume {0}` if it is "
        "paused, or `queue-workflows jobs cancel --queue {0}`"
    )
    wrong = [
        (unserved_queues.unserved_text(row), remedy.format(shlex.quote(row["queue"])))
        for row in rows
    ]
    return _each("lock keys", "none passed over a queue whose jobs no worker takes", wrong)


def _schedules(conn: db.Connection) -> Findings:
    wrong = [
        (
            f"{row['name']}: {schedules.problem(row)}",
            "`queue-workflows schedules list` has all of it",
        )
        for row in schedules.troubled(conn=conn)
    ]
    return _each("schedules", "none fails, is overdue, or was missed", wrong)


def _alerts(conn: db.Connection) -> Findings:
    found = statements.doctor.alerts(conn)
    if not found["n"] or found["wait_s"] <= ALERT_WARN_S:
        yield Finding("alerts", OK, f"no failure waits for over {output.seconds(ALERT_WARN_S)}")
        return
    text = (
        f"{output.counted(found['n'], 'failure')} not sent yet, {output.seconds(found['wait_s'])} "
        "after the first"
    )
    if found["seen_s"] is None or found["seen_s"] > ALERT_WARN_S:
        command = config.ON_FAILED.variables[0]
        remedy = (
            f"start queue-scheduler with the app that calls set_on_failed(), or with {command}; "
            "without both they are deleted after a day"
        )
        yield Finding("alerts", WARNING, f"{text}: no scheduler sends them", remedy)
    else:
        remedy = "see the schedulers' logs: a hook or a command may hang"
        yield Finding("alerts", WARNING, f"{text}, though a scheduler sends them", remedy)


def _workers(conn: db.Connection) -> Findings:
    gone = statements.doctor.dead_workers(conn, stale_s=config.STALE_WORKER_AFTER_S.read())
    text, remedy = (
        f"silent while holding jobs: {', '.join(gone)}",
        "restart them; their leases give the jobs back",
    )
    return _each("workers", "none is flagged dead", [(text, remedy)] if gone else [])
