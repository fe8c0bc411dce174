"""Migrate the schema: apply, revert, wait for, and refuse migrations."""

from __future__ import annotations

import hashlib
import logging
import re
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import psycopg
from psycopg import sql

from queue_workflows import errors, migrations
from queue_workflows.db import development_chain, downgrade_check, functions, pool

_log = logging.getLogger(__name__)
LEDGER = "queue_schema_version"
_FILE = re.compile(r"(\d{4})_(.+?)(\.down)?\.sql")
LOCK_POLL_S = 0.1
LOCK_LOGGED_S = 5.0
GIVEN_WAY_S = 1.0
"""Seconds before the tables of triggers are locked again: a waiting lock stops writers."""
DEADLOCK_TRIES = 20
"""A migration locks table by table, and workers in another order; each try takes 1 s."""
_COMPATIBLE = re.compile(r"^--\s*compatible-with:\s*(\d+)\s*$", re.MULTILINE)


class Migration(NamedTuple):
    """One step of a chain: its number, its name and the SQL of both directions."""

    version: int
    name: str
    up: str
    down: str | None

    @property
    def checksum(self) -> str:
        """Return the SHA-256 of the forward text."""
        return hashlib.sha256(self.up.encode()).hexdigest()

    @property
    def compatible_with(self) -> int:
        """Return the oldest code that may work on it (`-- compatible-with: N`); 0: any."""
        match = _COMPATIBLE.search(self.up)
        return int(match[1]) if match else 0


def chain(migrations_dir: str | Path | None = None) -> list[Migration]:
    """Return the migrations in a folder, in order.

    Files whose names start with no digit are ignored. Raises `MigrationFailed` for a folder that is
    missing or has none, a misnamed file, two of one version, and a down file without its up file.
    """
    folder = Path(migrations_dir) if migrations_dir is not None else migrations.dir()
    if not folder.is_dir():
        raise errors.MigrationFailed(f"no migration folder {str(folder)!r}: name one that exists")
    ups, downs = _files(folder)
    if orphans := sorted(downs.keys() - {path.stem for path in ups.values()}):
        raise errors.MigrationFailed(f"{orphans[0]}.down.sql has no {orphans[0]}.sql beside it")
    if not ups:
        raise errors.MigrationFailed(f"no NNNN_name.sql in migration folder {str(folder)!r}")
    found: list[Migration] = []
    for version in sorted(ups):
        path, down = ups[version], downs.get(ups[version].stem)
        text = down.read_text("utf-8") if down else None
        found.append(Migration(version, path.stem[5:], path.read_text("utf-8"), text))
    return found


def _files(folder: Path) -> tuple[dict[int, Path], dict[str, Path]]:
    """Return up files by version, down files by the stem of their up file."""
    ups: dict[int, Path] = {}
    downs: dict[str, Path] = {}
    for path in sorted(folder.glob("[0-9]*.sql")):
        match = _FILE.fullmatch(path.name)
        if match is None:
            raise errors.MigrationFailed(f"{path.name}: a migration is named NNNN_name.sql")
        version = int(match[1])
        if match[3]:
            downs[path.name.removesuffix(".down.sql")] = path
        elif version in ups or version < 1:
            raise errors.MigrationFailed(f"{path.name}: version {version} is taken or not positive")
        else:
            ups[version] = path
    return ups, downs


REQUIRED_VERSION = max(_files(migrations.dir())[0])
"""The schema version that this code works with: the highest of its own chain."""


@contextmanager
def _exclusive(
    version_table: str, stopped: Callable[[], bool] = lambda: False
) -> Generator[pool.Connection]:
    """Yield a connection without time-outs that holds the chain's advisory lock.

    Waits for the lock, and logs every LOCK_LOGGED_S who holds it. Raises `MigrationFailed` when
    `stopped()` comes true first.
    """
    with pool.connect(limited=False) as conn:
        log_at = time.monotonic() + LOCK_LOGGED_S
        while not _try_lock(conn, version_table):
            if stopped():
                raise errors.MigrationFailed("a stop was requested before the schema's lock came")
            if time.monotonic() >= log_at:
                log_at = time.monotonic() + LOCK_LOGGED_S
                held_by = _holders(conn, version_table)
                _log.warning("another session holds the lock of the schema: %s", held_by)
            time.sleep(LOCK_POLL_S)
        try:
            yield conn
        finally:
            if not conn.closed:
                conn.execute("SELECT pg_advisory_unlock_all()")


def _try_lock(conn: pool.Connection, version_table: str) -> bool:
    # A waiting pg_advisory_lock() blocks signals, and any role that may log in can hold it.
    row = conn.execute(
        "SELECT pg_try_advisory_lock(hashtextextended('queue_workflows.schema.' || %s, 0)) AS ours",
        (version_table,),
    ).fetchone()
    return row is not None and bool(row["ours"])


def _holders(conn: pool.Connection, version_table: str) -> str:
    rows = conn.execute(
        "SELECT a.pid, a.usename FROM pg_locks l JOIN pg_stat_activity a ON a.pid = l.pid"
        " WHERE l.locktype = 'advisory' AND l.granted AND l.objsubid = 1"
        " AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())"
        " AND ((l.classid::bigint << 32) | l.objid::bigint)"
        " = hashtextextended('queue_workflows.schema.' || %s, 0)",
        (version_table,),
    ).fetchall()
    return ", ".join(f"pid {row['pid']} of role {row['usename']}" for row in rows)


def _ledger(conn: pool.Connection, name: str) -> dict[int, dict[str, Any]]:
    table = sql.Identifier(name)
    # IF NOT EXISTS needs rights that a role with nothing to apply may lack.
    if not _is_whole(conn, name):
        conn.execute(
            sql.SQL(
                "CREATE TABLE IF NOT EXISTS {t} (version integer PRIMARY KEY,"
                " applied_at timestamptz NOT NULL DEFAULT now());"
                " ALTER TABLE {t} ADD COLUMN IF NOT EXISTS checksum text,"
                " ADD COLUMN IF NOT EXISTS compatible_with integer NOT NULL DEFAULT 0"
            ).format(t=table)
        )
    rows = conn.execute(
        sql.SQL("SELECT version, checksum, compatible_with FROM {t}").format(t=table)
    ).fetchall()
    return {row["version"]: row for row in rows}


def _is_whole(conn: pool.Connection, name: str) -> bool:
    row = conn.execute(
        "SELECT count(*) AS n FROM pg_attribute WHERE attrelid = to_regclass(quote_ident(%s))"
        " AND attname IN ('version', 'applied_at', 'checksum', 'compatible_with')",
        (name,),
    ).fetchone()
    return row is not None and row["n"] == 4


def _refuse_newer(known: int, applied: dict[int, dict[str, Any]]) -> None:
    for version, row in applied.items():
        if version > known and row["compatible_with"] > known:
            raise errors.SchemaTooNew(
                f"the database is at schema version {version}, which needs code that knows version "
                f"{row['compatible_with']}; this code knows {known}: upgrade queue_workflows here"
            )


def refuse_newer() -> None:
    """Raise `SchemaTooNew` if the ledger of our own chain needs newer code than this."""
    with pool.connect() as conn:
        if _is_whole(conn, LEDGER):
            _refuse_newer(REQUIRED_VERSION, _ledger(conn, LEDGER))


def bootstrap(
    *,
    migrations_dir: str | Path | None = None,
    version_table: str = LEDGER,
    stopped: Callable[[], bool] = lambda: False,
) -> list[int]:
    """Apply the migrations that the ledger lacks; return their versions, lowest first.

    With our own chain it also installs the functions and triggers of this code, and all of it is
    one transaction; in an app's chain each migration is one. An advisory lock lets one process
    migrate at a time. A call that finds nothing to do takes no lock and only reads; one that waits
    for the lock calls `stopped` ten times a second. Raises `MigrationFailed`, also when `stopped()`
    came true first, and `SchemaTooNew`.
    """
    steps = chain(migrations_dir)
    ours = _is_ours(steps, version_table)
    # Without the lock: any role that can log in may hold it, and so block every start.
    with pool.connect(limited=False) as conn:
        is_current = _is_whole(conn, version_table) and not (ours and functions.stale(conn))
        if is_current and not _missing(conn, version_table, steps):
            return []
    with _exclusive(version_table, stopped) as conn:
        if ours:
            return _bring(conn, steps, stopped)
        missing = _missing(conn, version_table, steps)
        for step in missing:
            _despite_deadlocks(lambda step=step: _apply(conn, version_table, step))
        return [step.version for step in missing]


def _is_ours(steps: list[Migration], version_table: str) -> bool:
    """Return whether a chain contains our whole own chain, which the functions need."""
    return version_table == LEDGER and chain()[-1] in steps


def _bring(conn: pool.Connection, steps: list[Migration], stopped: Callable[[], bool]) -> list[int]:
    """Apply our own chain and install the functions in one transaction.

    A crash between the two would leave tables without the triggers that guard them.
    """
    done: list[int] = []

    def once() -> None:
        done.clear()
        with conn.transaction():
            development_chain.convert(conn, LEDGER, steps[12].checksum)
            for step in _missing(conn, LEDGER, steps):
                _apply(conn, LEDGER, step)
                done.append(step.version)
            for part in functions.stale(conn):
                _install(conn, part)

    _giving_way(once, stopped)
    return done


def _giving_way(transaction: Callable[[], None], stopped: Callable[[], bool]) -> None:
    """Try again while workers hold locks that the triggers need; raise once `stopped()`."""
    log_at = time.monotonic() + LOCK_LOGGED_S
    while True:
        try:
            _despite_deadlocks(transaction)
        except functions.TablesInUse:
            if stopped():
                raise
        else:
            return
        if time.monotonic() >= log_at:
            log_at = time.monotonic() + LOCK_LOGGED_S
            _log.warning("the triggers cannot be replaced yet: a transaction uses their tables")
        time.sleep(GIVEN_WAY_S)


def _install(conn: pool.Connection, part: functions.Part) -> None:
    try:
        functions.install(conn, part)
    except psycopg.Error as error:
        raise errors.MigrationFailed(f"the {part.name}: {str(error).strip()}") from error


def repair() -> list[str]:
    """Install the parts with a missing or changed object again; return their names.

    Joins no transaction. Raises `MigrationFailed`.
    """
    done: list[str] = []

    def once() -> None:
        done.clear()
        with conn.transaction():
            damaged = [each.part for each in functions.problems(conn) if each.is_damage]
            for part in dict.fromkeys(damaged):
                _install(conn, part)
                done.append(part.name)

    with _exclusive(LEDGER) as conn:
        _giving_way(once, lambda: False)
    return done


def _missing(conn: pool.Connection, name: str, steps: list[Migration]) -> list[Migration]:
    """Return the migrations that the ledger lacks; log those that changed after they were applied.

    Raises `SchemaTooNew`, and `MigrationFailed` where a development build applied one of ours.
    """
    applied = _ledger(conn, name)
    _refuse_newer(steps[-1].version, applied)
    if _is_ours(steps, name):
        _refuse_edited(steps, applied)
    for step in steps:
        recorded = applied[step.version]["checksum"] if step.version in applied else None
        if recorded is not None and recorded != step.checksum:
            _log.warning("migration %04d_%s changed after it was applied", step.version, step.name)
    return [step for step in steps if step.version not in applied]


def _refuse_edited(steps: list[Migration], applied: Mapping[int, Mapping[str, Any]]) -> None:
    """Raise `MigrationFailed` where a development build applied one of ours with another text."""
    for step in steps:
        if step.version in development_chain.UNRELEASED and step.version in applied:
            recorded = applied[step.version]["checksum"]
            if recorded is not None and recorded != step.checksum:
                raise development_chain.edited(f"{step.version:04d}_{step.name}", step.version)


def _apply(conn: pool.Connection, version_table: str, step: Migration) -> None:
    """Apply one migration and record it, in one transaction or in the caller's."""
    statement = sql.SQL("INSERT INTO {} (version, checksum, compatible_with) VALUES (%s, %s, %s)")
    try:
        with conn.transaction():
            # Trusted text from the chain's folder: a migration is SQL by definition.
            conn.execute(step.up.encode())
            conn.execute(
                statement.format(sql.Identifier(version_table)),
                (step.version, step.checksum, step.compatible_with),
            )
    except psycopg.Error as error:
        raise errors.MigrationFailed(
            f"migration {step.version:04d}_{step.name}: {str(error).strip()}"
        ) from error


def _despite_deadlocks(transaction: Callable[[], None]) -> None:
    """Try again if the server ended this transaction to resolve a deadlock."""
    for left in reversed(range(DEADLOCK_TRIES)):
        try:
            transaction()
        except (psycopg.Error, errors.MigrationFailed) as error:
            cause = error.__cause__ if isinstance(error, errors.MigrationFailed) else error
            if not left or not isinstance(cause, psycopg.errors.DeadlockDetected):
                raise
        else:
            return


def pending(
    *, migrations_dir: str | Path | None = None, version_table: str = LEDGER
) -> list[Migration]:
    """Return the migrations that `bootstrap` would apply, lowest first; changes nothing."""
    steps = chain(migrations_dir)
    with pool.connect() as conn:
        if not _exists(conn, version_table):
            return steps
        rows = conn.execute(
            sql.SQL("SELECT version FROM {}").format(sql.Identifier(version_table))
        ).fetchall()
        applied = {row["version"] for row in rows}
        ours = _is_ours(steps, version_table) and _is_whole(conn, version_table)
        if ours and development_chain.version(conn, LEDGER) is None:
            _refuse_edited(steps, _ledger(conn, version_table))
    return [step for step in steps if step.version not in applied]


def _exists(conn: pool.Connection, table: str) -> bool:
    row = conn.execute("SELECT to_regclass(quote_ident(%s)) IS NOT NULL AS found", (table,))
    return bool((row.fetchone() or {}).get("found"))


def current_schema_version(*, version_table: str = LEDGER) -> int:
    """Return the highest version in the ledger; 0 if there is no ledger."""
    with pool.connect() as conn:
        if not _exists(conn, version_table):
            return 0
        row = conn.execute(
            sql.SQL("SELECT coalesce(max(version), 0) AS version FROM {}").format(
                sql.Identifier(version_table)
            )
        ).fetchone()
    return int((row or {"version": 0})["version"])


def downgrade(
    *,
    to_version: int = 0,
    migrations_dir: str | Path | None = None,
    version_table: str = LEDGER,
    allow_data_loss: bool = False,
) -> list[int]:
    """Revert all above `to_version` in one transaction; return the versions, highest first.

    Unless `allow_data_loss`, raises `DataLossRefused` with the tables, rows and non-default values
    that would be dropped, and changes nothing. Takes the same lock as `bootstrap`.
    """
    steps = {step.version: step for step in chain(migrations_dir)}
    ours = _is_ours(list(steps.values()), version_table)
    with _exclusive(version_table) as conn:
        if not _exists(conn, version_table):
            return []
        targets = sorted((v for v in _ledger(conn, version_table) if v > to_version), reverse=True)
        for version in targets:
            step = steps.get(version)
            if step is None or step.down is None:
                raise errors.MigrationFailed(f"no down migration for version {version}")
        down = [steps[version] for version in targets]

        def change() -> None:
            if ours and down:
                functions.forget(conn)
            _revert(conn, sql.Identifier(version_table), down)

        def once() -> None:
            with conn.transaction():
                if allow_data_loss:
                    change()
                elif lost := downgrade_check.of(
                    conn, change, besides={version_table, functions.TABLE}
                ):
                    raise errors.DataLossRefused(
                        f"downgrade to version {to_version} would drop {'; '.join(lost)}. "
                        "Pass allow_data_loss=True to do it all the same"
                    )

        _despite_deadlocks(once)
    return targets


def _revert(conn: pool.Connection, table: sql.Identifier, steps: list[Migration]) -> None:
    for step in steps:
        try:
            conn.execute((step.down or "").encode())
            conn.execute(
                sql.SQL("DELETE FROM {} WHERE version = %s").format(table), (step.version,)
            )
        except psycopg.Error as error:
            raise errors.MigrationFailed(
                f"down migration {step.version:04d}_{step.name}: {str(error).strip()}"
            ) from error
