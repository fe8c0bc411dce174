"""Define `queue-workflows connect`: check the connection to the database step by step."""

from __future__ import annotations

import contextlib
import os
import statistics
import time
from collections.abc import Callable, Generator
from typing import Annotated

from queue_workflows import config, db, errors
from queue_workflows.admin import doctor as facts
from queue_workflows.admin import permissions
from queue_workflows.cli import checks, command, define, options, output
from queue_workflows.cli.checks import ERROR, OK, WARNING, Finding, Findings
from queue_workflows.db import connectivity, ledger, schema, statements
from queue_workflows.runtime import app_loading, entry_point

TIMEOUT_S = 5.0
SHOWN = 500
"""Characters of a remedy that are printed: a line of text is cut, and then it cannot be run."""
TRIPS = 7
SLOW_TRIP_MS = 50.0
"""A worker needs two round trips or more per job: 50 ms means less than ten jobs a second."""
STEPS = (
    "name", "port", "tls", "login", "database", "server", "schema", "rights", "clock", "listen",
    "round trip",
)  # fmt: skip
"""The steps in the order of their checks."""


@define.command("connect", reads=False)
def connect(
    dsn: Annotated[
        str | None,
        options.argument(
            "DSN", "Default: the one in force, which no `ps` shows.", show_default=False
        ),
    ] = None,
    purpose: Annotated[
        str,
        options.option(
            "PURPOSE", f"What the role is for: {', '.join(permissions.PURPOSES)}.", "--for"
        ),
    ] = "work",
    timeout: Annotated[
        float, options.option("SECONDS", "How long each step may take.", min=0.1)
    ] = TIMEOUT_S,
    as_sql: Annotated[
        bool, options.flag("--sql", "Print only the GRANTs and REVOKEs, as an SQL script.")
    ] = False,
    *,
    app: str | None,
    as_json: bool,
) -> int | define.Shown:
    """Check the connection to the database, step by step."""
    if purpose not in permissions.PURPOSES:
        known = ", ".join(permissions.PURPOSES)
        raise errors.InvalidConfig(f"--for {purpose!r:.80} is none of {known}")
    if as_sql and as_json:
        raise errors.InvalidConfig("--sql and --json cannot be used together")
    entry_point.setup_logging("error")
    app_loading.load_app(app)
    with _named(dsn) as words:
        if as_sql:
            return _script(purpose)
        where = connectivity.destination(url := db.db_url())
        steps = examine(url, purpose, timeout, where)
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
        if not seen["found"] and seen["elsewhere"]:
            # The catalog shows this role nothing of the tables before it has this right.
            usage = permissions.MissingRight("USAGE", "SCHEMA", seen["elsewhere"][0])
            given = permissions.grants([usage], seen["role"])
        elif not seen["found"]:
            raise errors.InvalidConfig(
                "the database has no schema yet: run `queue-workflows migrate`"
            )
        else:
            given = checks.rights_sql(conn, purpose, seen["role"])
    for statement in given:
        output.echo(f"{statement};")
    return 0


def _report(words: str, steps: Findings, purpose: str, *, as_json: bool) -> define.Shown:
    def show(step: Finding) -> None:
        if len(step.remedy) > SHOWN:
            script = f"`queue-workflows connect --for {purpose} --sql`"
            step = step._replace(remedy=f"run what {script} prints, as the owner of the tables")
        checks.show(step)

    if not as_json:
        output.echo(words)
    found = checks.masked(steps, lambda step: as_json or show(step))
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
    where = where or connectivity.destination(url)
    for step in checks.network(where, timeout_s):
        yield step
        if step.level == ERROR:
            return
    conn: db.Connection | None = None
    try:
        conn = db.connect(url=url, connect_s=max(2.0, timeout_s), timeout_s=max(1.0, timeout_s))
        with conn:
            yield from _session(conn, purpose)
    except errors.InvalidConfig as error:
        yield Finding("database", ERROR, str(error))
    except db.Error as error:
        if conn is None:
            yield from checks.refused(where, " ".join(str(error).split()))
        else:
            remedy = "try again; see the server's log"
            yield Finding("server", ERROR, f"it broke off: {facts.reason(error)}", remedy)


def _session(conn: db.Connection, purpose: str) -> Findings:
    ssl = ", with TLS" if conn.pgconn.ssl_in_use else ""
    yield Finding("login", OK, f"as {conn.info.user}{ssl}")
    yield Finding("database", OK, conn.info.dbname)
    for check in (
        checks.server,
        _schema(purpose),
        _rights(purpose),
        checks.clock,
        checks.listen,
        _round_trip,
    ):
        for step in check(conn):
            yield step
            if step.level == ERROR:
                return


def _schema(purpose: str) -> Callable[[db.Connection], Findings]:
    def check(conn: db.Connection) -> Findings:
        seen = statements.doctor.schema_seen(conn)
        if not seen["found"] and seen["elsewhere"]:
            name, role = seen["elsewhere"][0], seen["role"]
            remedy = f"GRANT USAGE ON SCHEMA {name} TO {role}, and have it on the search_path"
            text = f"it is in schema {name}, which {role} does not see"
            yield Finding("schema", ERROR, text, remedy)
        elif not seen["found"]:
            yield _no_schema(seen, purpose)
        elif not seen["readable"]:
            remedy = f"GRANT SELECT ON queue_schema_version TO {seen['role']}"
            yield Finding("schema", ERROR, "its version cannot be read", remedy)
        elif (of_others := ledger.of_others(conn)) is not None:
            yield Finding("schema", ERROR, of_others, ledger.OF_OTHERS_REMEDY)
        elif (version := schema.development_version(conn)) is not None:
            yield _not_migrated(f"at version {version} of a development build", purpose)
        else:
            row = statements.doctor.schema_version(conn)
            yield _version(row["version"], row["needs"], purpose)

    return check


def _no_schema(seen: dict[str, object], purpose: str) -> Finding:
    if purpose == "migrate" and seen["may_create"]:
        return Finding("schema", OK, "none yet, and this role may create it")
    remedy = "run `queue-workflows migrate`, or start queue-orchestrator"
    if not seen["may_create"]:
        remedy += f"; this role needs GRANT CREATE ON SCHEMA {seen['schema']} for that"
    return Finding("schema", ERROR, "there is none", remedy)


def _version(version: int, needs: int, purpose: str) -> Finding:
    required = db.REQUIRED_VERSION
    if needs > required:
        text = f"at version {version}, which needs code that knows version {needs}"
        return Finding(
            "schema", ERROR, f"{text}; this knows {required}", "upgrade queue_workflows here"
        )
    if version < required:
        return _not_migrated(f"at version {version}", purpose)
    if version > required:
        text = f"at version {version}, this code knows {required} and may work on it"
        return Finding("schema", WARNING, text, "upgrade queue_workflows here")
    return Finding("schema", OK, f"at version {version}")


def _not_migrated(where: str, purpose: str) -> Finding:
    text = f"{where}, this code needs {db.REQUIRED_VERSION}"
    if purpose == "migrate":
        return Finding("schema", OK, text)
    return Finding("schema", ERROR, text, "run `queue-workflows migrate`")


def _rights(purpose: str) -> Callable[[db.Connection], Findings]:
    def check(conn: db.Connection) -> Findings:
        if purpose == "submit":
            knob = config.OUT_ROOTS.variables[0]
            text = (
                f"set {knob}=/folder[:/folder] on workers and orchestrators: runs keep files there"
            )
            yield Finding("files", OK, text)
        yield from checks.rights(conn, purpose)

    return check


def _round_trip(conn: db.Connection) -> Findings:
    took: list[float] = []
    for _ in range(TRIPS):
        began = time.monotonic()
        facts.clock(conn)
        took.append((time.monotonic() - began) * 1000)
    median_ms = statistics.median(took)
    text = f"{median_ms:.2f} ms (fastest {min(took):.2f}, slowest {max(took):.2f})"
    if median_ms > SLOW_TRIP_MS:
        remedy = "run workers nearer to the server; each job takes two round trips and more"
        yield Finding("round trip", WARNING, text, remedy)
    else:
        yield Finding("round trip", OK, text)
