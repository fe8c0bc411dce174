"""Define `queue-workflows doctor`, `connect` and `audit`: find what is wrong, and the remedies."""

from __future__ import annotations

import contextlib
import functools
import os
import platform
import time
from collections.abc import Callable, Generator

from queue_workflows import __version__, config, db, errors
from queue_workflows.admin import audit as invariants
from queue_workflows.admin import checks, permissions
from queue_workflows.admin.checks import ERROR, OK, WARNING, Finding, Findings
from queue_workflows.cli import command, connectivity, define, output
from queue_workflows.db import statements
from queue_workflows.runtime import app_loading, clock, entry_point, masking
from queue_workflows.types import JsonDict

_PURPOSE = f"--for PURPOSE {'|'.join(permissions.PURPOSES)}  What the role is for."


@define.command("doctor", _PURPOSE, reads=False)
def doctor(purpose: str = "work", *, app: str | None, as_json: bool) -> define.Shown:
    """Check this machine, the server and unfinished work. Exit code 1 for an error."""
    entry_point.setup_logging("error")
    app_loading.load_app(app)
    found = _masked(_examine_all(purpose), lambda found: as_json or _print(found))
    counts = {level: sum(f.level == level for f in found) for level in (ERROR, WARNING)}
    listed = [finding._asdict() for finding in found]
    report = {"findings": listed, "errors": counts[ERROR], "warnings": counts[WARNING]}
    text = ", ".join(output.counted(n, word) for word, n in counts.items())
    return define.Shown(report, lambda: output.echo(text), int(counts[ERROR] > 0))


def _examine_all(purpose: str) -> Findings:
    """Yield every finding in order; end early if nothing further can be checked."""
    python = platform.python_version()
    yield Finding("package", OK, f"queue_workflows {__version__}, Python {python}")
    version, kind, libpq = checks.driver()
    text = f"psycopg {version} ({kind}), libpq {libpq // 10000}.{libpq % 10000}"
    if kind == "python":
        yield Finding("psycopg", WARNING, text, "install psycopg[binary], which is faster")
    else:
        yield Finding("psycopg", OK, text)
    try:
        with command.database(create=False) as words:
            yield from _examine_database(words, purpose)
    except errors.QueueWorkflowsError as error:
        yield Finding("database", ERROR, str(error))
    except db.OperationalError as error:
        yield Finding("database", ERROR, f"the connection was lost: {checks.reason(error)}")


def _examine_database(words: str, purpose: str) -> Findings:
    began = time.monotonic()
    try:
        conn = db.connect()
    except db.OperationalError as error:
        remedy = "is the server up, and are host, port, user and password right?"
        yield Finding("database", ERROR, f"{words} does not answer: {checks.reason(error)}", remedy)
        return
    with conn:
        took_ms = (time.monotonic() - began) * 1000
        yield Finding("database", OK, f"{words} answers within {took_ms:.0f} ms")
        for check in checks.CHECKS:
            found = [*check.answer(conn, purpose)]
            yield from found
            if check.ask is checks.schema and any(each.level == ERROR for each in found):
                yield Finding("tables", WARNING, "not checked: the schema comes first")
                return


def _masked(found: Findings, each: Callable[[Finding], object]) -> list[Finding]:
    """Return the findings without secrets, each after it was given to `each`."""
    safe: list[Finding] = []
    for finding in found:
        safe.append(Finding(*(masking.mask(part) for part in finding)))
        each(safe[-1])
    return safe


def _print(finding: Finding) -> None:
    """Print a finding, its remedy on the same line."""
    remedy = f"; {finding.remedy}" if finding.remedy else ""
    text = output.line(f"{finding.text}{remedy}", 1000)
    output.echo(f"{finding.level:7}  {finding.check:18}  {text}")


TIMEOUT_S = 5.0
SHOWN = 500
"""Characters of a remedy that are printed. A longer line is cut, and then it cannot be run."""
STEPS = (
    "name", "port", "tls", "login", "database", "server", "schema", "rights", "clock", "listen",
    "round trip",
)  # fmt: skip
"""The steps in the order of their checks."""


@define.command(
    "connect",
    "DSN  Default: the configured one, which `ps` does not show.",
    _PURPOSE,
    """--timeout SECONDS 0.1..  How long each step may take.
    --sql  Print only the GRANTs and REVOKEs, as an SQL script.""",
    reads=False,
)
def connect(
    dsn: str | None = None, purpose: str = "work", timeout: float = TIMEOUT_S, as_sql: bool = False,
    *, app: str | None, as_json: bool,
) -> int | define.Shown:  # fmt: skip
    """Check the connection to the database, step by step."""
    if as_sql and as_json:
        raise errors.InvalidConfig("--sql and --json cannot be used together")
    entry_point.setup_logging("error")
    app_loading.load_app(app)
    with _named(dsn) as words:
        if as_sql:
            return _script(purpose)
        url = db.db_url()
        steps = examine(url, purpose, timeout, connectivity.destination(url))
        return _report(words, steps, purpose, as_json=as_json)


@contextlib.contextmanager
def _named(dsn: str | None) -> Generator[str]:
    """Yield the name of the database; use the given DSN from now on."""
    if dsn is not None:
        # Parse it before using it, so that an error names the argument and not a variable.
        db.describe(dsn)
        os.environ[config.db_url_variables()[0]] = dsn
    with command.database(create=False) as words:
        yield words


def _script(purpose: str) -> int:
    """Print what gives this role the rights for a purpose, one statement a line."""
    with db.connect() as conn:
        seen = statements.doctor.schema_seen(conn)
        if seen["found"]:
            given = checks.rights_sql(conn, purpose, seen["role"])
        elif seen["elsewhere"]:
            # The catalog shows this role nothing of the tables before it has this right.
            usage = permissions.MissingRight("USAGE", "SCHEMA", seen["elsewhere"][0])
            given = permissions.grants([usage], seen["role"])
        else:
            raise errors.InvalidConfig(f"the database has no schema yet: {checks.MIGRATE}")
    for statement in given:
        output.echo(f"{statement};")
    return 0


def _report(words: str, steps: Findings, purpose: str, *, as_json: bool) -> define.Shown:
    def show(step: Finding) -> None:
        if len(step.remedy) > SHOWN:
            script = f"`queue-workflows connect --for {purpose} --sql`"
            step = step._replace(remedy=f"run what {script} prints, as the owner of the tables")
        _print(step)

    if not as_json:
        output.echo(words)
    found = _masked(steps, lambda step: as_json or show(step))
    failed = next((step.check for step in found if step.level == ERROR), None)
    seen = {step.check for step in found}
    left = [step for step in STEPS if step not in seen] if failed else []
    listed = [step._asdict() for step in found]
    return define.Shown(
        {"database": words, "failed": failed, "steps": listed, "not_reached": left},
        lambda: left and output.echo(f"not checked: {', '.join(left)}"),
        int(failed is not None),
    )


def examine(
    url: str, purpose: str, timeout_s: float, where: connectivity.Destination | None = None
) -> Findings:
    """Yield the steps in order, up to the first with level `error`."""
    for step in _steps(url, purpose, timeout_s, where or connectivity.destination(url)):
        yield step
        if step.level == ERROR:
            return


def _steps(url: str, purpose: str, timeout_s: float, where: connectivity.Destination) -> Findings:
    yield from connectivity.network(where, timeout_s)
    conn: db.Connection | None = None
    try:
        conn = db.connect(url=url, connect_s=max(2.0, timeout_s), timeout_s=max(1.0, timeout_s))
        with conn:
            ssl = ", with TLS" if conn.pgconn.ssl_in_use else ""
            yield Finding("login", OK, f"as {conn.info.user}{ssl}")
            yield Finding("database", OK, conn.info.dbname)
            yield checks.server(conn)
            yield checks.schema(conn, purpose)
            if purpose == "submit":
                knob = config.OUT_ROOTS.variables[0]
                where_set = "on workers and orchestrators: runs keep files there"
                yield Finding("files", OK, f"set {knob}=/folder[:/folder] {where_set}")
            yield checks.rights_of(conn, purpose)
            for check in (checks.clock, checks.listen, connectivity.round_trip):
                yield check(conn)
    except errors.InvalidConfig as error:
        yield Finding("database", ERROR, str(error))
    except db.Error as error:
        if conn is None:
            yield from connectivity.refused(where, " ".join(str(error).split()))
        else:
            remedy = "try again; see the server's log"
            yield Finding("server", ERROR, f"it broke off: {checks.reason(error)}", remedy)


OFFENDERS = 5
"""Offenders shown of each invariant, enough to start from."""
_MARKS = {"ok": "ok", "broken": "BROKEN", "unfinished": "UNFINISHED", "elsewhere": "-"}


@define.command("audit", "--since TIME  How far to look back: 90m, 24h, 7d, or `all`.", reads=False)
def audit(since: str = "24h", *, app: str | None) -> define.Shown:
    """Check the invariants; exit code 1 if one is broken.

    It only reads, and is safe on a live system.
    """
    span = clock.span(since)
    if span is None and since != "all":
        raise errors.InvalidConfig(f"--since {since} should look like 90m, 24h, 7d, or be `all`")
    with command.reading(app) as database, db.connect() as conn:
        since_s = None if span is None else span.total_seconds()
        values = invariants.parameters(conn, since_s=since_s, limit=OFFENDERS + 1)
        found = [_invariant(conn, each, values) for each in invariants.INVARIANTS]
        bad = checks.found_bad(conn, OFFENDERS)
    rows = [row._asdict() for row in bad]
    report = {"database": database, "since": since, "invariants": found, "bad_rows": rows}
    is_bad = any(each["state"] in ("broken", "unfinished") for each in found)
    return define.Shown(report, functools.partial(_show_audit, found, bad), int(is_bad))


def _invariant(conn: db.Connection, invariant: invariants.Invariant, values: JsonDict) -> JsonDict:
    """Check an invariant; return its entry of `--json`: its state, a note and its offenders."""
    began = time.monotonic()
    note, found, state = invariant.note, list[invariants.Offender](), "elsewhere"
    if invariant.statement is not None:
        outcome = invariants.check(conn, invariant, values)
        if isinstance(outcome, str):
            state, note = "unfinished", f"{outcome}: try a shorter --since"
        else:
            state, found = ("broken" if outcome else "ok"), outcome
    return {
        "invariant": invariant.number, "name": invariant.name, "sentence": invariant.sentence,
        "state": state, "note": note, "offenders": [each._asdict() for each in found[:OFFENDERS]],
        "more": len(found) > OFFENDERS, "seconds": round(time.monotonic() - began, 3),
    }  # fmt: skip


def _show_audit(found: list[JsonDict], bad: list[checks.BadRow]) -> None:
    """Print a line for each invariant, the offenders below it, and rows that break none."""
    for each in found:
        note = f" ({each['note']})" if each["note"] else ""
        mark = _MARKS[each["state"]]
        output.echo(f"invariant {each['invariant']:2}  {mark:10}  {each['sentence']}{note}")
        for offender in each["offenders"]:
            output.echo(f"          {output.line(offender['id'])}: {output.line(offender['text'])}")
        if each["more"]:
            output.echo("          ... and others")
    for row in bad:
        text = output.line(f"{row.kind} {row.id}: {row.text}; {row.command}", 1000)
        output.echo(f"bad row {text}")
