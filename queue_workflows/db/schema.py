"""Migrate the schema: apply, revert and list migrations, and refuse a schema of newer code.

An advisory lock lets one process at a time migrate. A downgrade is first tried and rolled back, to
name the rows that it would drop.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, TypeAlias, cast

import psycopg
from psycopg import sql

from queue_workflows import config, errors
from queue_workflows.db import functions, ledger, pool, statements

POLL_S = 0.1
LOGGED_S = 5.0


@contextmanager
def exclusive(
    version_table: str, stopped: Callable[[], bool] = lambda: False
) -> Generator[pool.Connection]:
    """Yield a connection without time-outs that holds the chain's advisory lock.

    Waits for the lock, and logs its holder every LOGGED_S. Raises `MigrationFailed` when
    `stopped()` returns True first. With POLL_ONLY, a transaction on the connection holds the lock,
    since a pooler may run the next transaction in another session.
    """
    is_local = config.POLL_ONLY.read()
    with pool.connect(limited=False) as conn:
        log_at = time.monotonic() + LOGGED_S
        while True:
            with conn.transaction() if is_local else nullcontext():
                # A waiting pg_advisory_lock() blocks signals, and any role that may log in can hold
                # it.
                if statements.migrations.try_lock(conn, ledger=version_table, is_local=is_local):
                    yield conn
                    if not is_local:
                        statements.migrations.unlock(conn)
                    break
            if stopped():
                raise errors.MigrationFailed(
                    "a stop was requested while another session held the lock of the schema"
                )
            if time.monotonic() >= log_at:
                log_at = time.monotonic() + LOGGED_S
                held_by = ", ".join(
                    f"pid {row['pid']} of role {row['usename']}"
                    for row in statements.migrations.lock_holders(conn, ledger=version_table)
                )
                _log.warning("another session holds the lock of the schema: %s", held_by)
            time.sleep(POLL_S)


_log = logging.getLogger(__name__)
GIVEN_WAY_S = 1.0
"""Seconds before the next try to lock the triggers' tables, as a waiting lock blocks writers."""
DEADLOCK_TRIES = 20
"""Tries of a migration, which may deadlock with workers that lock in another order; each is 1 s."""


def bootstrap(
    *,
    migrations_dir: str | Path | None = None,
    version_table: str = ledger.NAME,
    to_version: int | None = None,
    stopped: Callable[[], bool] = lambda: False,
) -> list[int]:
    """Apply the migrations that the ledger lacks, up to `to_version`; return their versions.

    For our own chain it also installs this code's functions and triggers, all in one transaction;
    in an app's chain each migration is a transaction. An advisory lock lets one process migrate at
    a time. If the schema is current, it only reads and takes no lock. While it waits for the lock,
    it calls `stopped` ten times a second. Raises `MigrationFailed`, also if `stopped()` returned
    True first, and `SchemaTooNew`.
    """
    steps = ledger.chain(migrations_dir)
    newest = steps[-1].version
    if to_version is not None:
        steps = [step for step in steps if step.version <= to_version]
    ours = _is_ours(steps, version_table)
    # Check without the lock, since any role that can log in may hold it and block every start.
    with pool.connect(limited=False) as conn:
        if version_table == ledger.NAME:
            ledger.refuse_others(conn)
        is_current = statements.migrations.ledger_is_whole(conn, ledger=version_table) and not (
            ours and functions.stale(conn)
        )
        if is_current and not _missing(conn, version_table, steps, newest):
            return []
    with exclusive(version_table, stopped) as conn:
        if ours:
            return _bring(conn, steps, newest, stopped)
        missing = _missing(conn, version_table, steps, newest)
        for step in missing:
            _retried(lambda step=step: _apply(conn, version_table, step), _never)
        return [step.version for step in missing]


def _is_ours(steps: list[ledger.Migration], version_table: str) -> bool:
    """Return whether a chain contains our whole own chain, which the functions need."""
    return version_table == ledger.NAME and ledger.chain()[-1] in steps


def _bring(
    conn: pool.Connection,
    steps: list[ledger.Migration],
    newest: int,
    stopped: Callable[[], bool],
) -> list[int]:
    """Apply our own chain and install the functions in one transaction.

    A crash between the two would leave tables without the triggers that guard them.
    """
    done: list[int] = []

    def once() -> None:
        done.clear()
        with conn.transaction():
            for step in _missing(conn, ledger.NAME, steps, newest):
                _apply(conn, ledger.NAME, step)
                done.append(step.version)
            for part in functions.stale(conn):
                _install(conn, part)

    _retried(once, stopped)
    return done


def _retried(transaction: Callable[[], None], stopped: Callable[[], bool]) -> None:
    """Repeat after a deadlock, or while workers use the triggers' tables, until `stopped()`.

    Raises the error of the last try.
    """
    log_at, deadlocks = time.monotonic() + LOGGED_S, 0
    while True:
        try:
            return transaction()
        except functions.TablesInUse:
            if stopped():
                raise
            if time.monotonic() >= log_at:
                log_at = time.monotonic() + LOGGED_S
                _log.warning(
                    "the triggers cannot be replaced yet, since transactions use their tables; "
                    "`queue-workflows doctor` names the oldest one"
                )
            time.sleep(GIVEN_WAY_S)
        except (psycopg.Error, errors.MigrationFailed) as error:
            cause = error.__cause__ if isinstance(error, errors.MigrationFailed) else error
            deadlocks += 1
            if deadlocks == DEADLOCK_TRIES or not isinstance(
                cause, psycopg.errors.DeadlockDetected
            ):
                raise


def _never() -> bool:
    return False


@contextmanager
def _naming(what: str) -> Generator[None]:
    """Convert an error of the database to `MigrationFailed`, whose text begins with `what`."""
    try:
        yield
    except psycopg.Error as error:
        raise errors.MigrationFailed(f"{what}: {str(error).strip()}") from error


def _install(conn: pool.Connection, part: functions.Part) -> None:
    with _naming(f"the {part.name}"):
        functions.install(conn, part)


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

    with exclusive(ledger.NAME) as conn:
        _retried(once, _never)
    return done


def _missing(
    conn: pool.Connection, name: str, steps: list[ledger.Migration], newest: int
) -> list[ledger.Migration]:
    """Return the migrations that the ledger lacks; log which ones changed after they were applied.

    Raises `SchemaTooNew` if the database needs more than `newest`, the last version of the chain.
    """
    applied = ledger.read(conn, name)
    ledger.refuse_newer(name, newest, applied)
    for step in steps:
        recorded = applied[step.version]["checksum"] if step.version in applied else None
        if recorded is not None and recorded != step.checksum:
            _log.warning(
                "migration %04d_%s changed after it was applied, and is not applied again: put the "
                "change into a new migration",
                step.version,
                step.name,
            )
    return [step for step in steps if step.version not in applied]


def _apply(conn: pool.Connection, version_table: str, step: ledger.Migration) -> None:
    """Apply one migration and record it, in one transaction or in the caller's."""
    with _naming(f"migration {step.version:04d}_{step.name}"), conn.transaction():
        # The SQL of a migration is trusted, since it comes from the chain's folder.
        conn.execute(step.up.encode())
        ledger.record(conn, version_table, step)


def pending(
    *, migrations_dir: str | Path | None = None, version_table: str = ledger.NAME
) -> list[ledger.Migration]:
    """Return the migrations that `bootstrap` would apply, lowest first; changes nothing."""
    steps = ledger.chain(migrations_dir)
    with pool.connect() as conn:
        if version_table == ledger.NAME:
            ledger.refuse_others(conn)
        if not statements.sessions.has_table(conn, table=version_table):
            return steps
        applied = ledger.versions(conn, version_table)
    return [step for step in steps if step.version not in applied]


def current_schema_version(*, version_table: str = ledger.NAME) -> int:
    """Return the highest version in the ledger; 0 if there is no ledger."""
    with pool.connect() as conn:
        return max(ledger.versions(conn, version_table), default=0)


def downgrade(
    *,
    to_version: int = 0,
    migrations_dir: str | Path | None = None,
    version_table: str = ledger.NAME,
    allow_data_loss: bool = False,
) -> list[int]:
    """Revert all above `to_version` in one transaction; return the versions, highest first.

    Unless `allow_data_loss`, raises `DataLossRefused` with the tables, rows and non-default values
    that would be dropped, and changes nothing. Takes the same lock as `bootstrap`. Raises
    `SchemaTooNew` for a database that a later version of 0.3.0's line has migrated.
    """

    steps = ledger.chain(migrations_dir)
    ours = _is_ours(steps, version_table)
    with exclusive(version_table) as conn:
        if not statements.sessions.has_table(conn, table=version_table):
            return []
        if version_table == ledger.NAME:
            ledger.refuse_others(conn)
        applied = ledger.read(conn, version_table)
        down = _down_steps(steps, (version for version in applied if version > to_version))
        own_tables = {version_table, functions.TABLE}

        def change() -> None:
            if ours and down:
                functions.forget(conn)
            _revert(conn, version_table, down)

        def once() -> None:
            with conn.transaction():
                if allow_data_loss:
                    change()
                elif lost := dropped_by(conn, change, besides=own_tables):
                    raise errors.DataLossRefused(
                        f"downgrade to version {to_version} would drop {'; '.join(lost)}. "
                        "Pass allow_data_loss=True to do it all the same"
                    )

        _retried(once, _never)
    return [step.version for step in down]


def _down_steps(steps: list[ledger.Migration], versions: Iterable[int]) -> list[ledger.Migration]:
    """Return the migrations to revert, highest first; raise `MigrationFailed` if one cannot be."""
    known = {step.version: step for step in steps if step.down is not None}
    targets = sorted(versions, reverse=True)
    for version in targets:
        if version not in known:
            raise errors.MigrationFailed(
                f"no down migration for version {version}: add its NNNN_name.down.sql, or stay at "
                "this version"
            )
    return [known[version] for version in targets]


def _revert(conn: pool.Connection, version_table: str, steps: list[ledger.Migration]) -> None:
    for step in steps:
        with _naming(f"down migration {step.version:04d}_{step.name}"):
            conn.execute((step.down or "").encode())
            ledger.forget(conn, version_table, step.version)


_Columns: TypeAlias = "dict[tuple[str, str], str | None]"
"""(table, column) → default expression."""
_ALL = sql.SQL("")


def dropped_by(
    conn: pool.Connection, change: Callable[[], None], *, besides: set[str]
) -> list[str]:
    """Make the change and return descriptions of the data that it dropped, [] if none.

    Joins the transaction of the caller, who may roll it back. The change is first tried and rolled
    back; the tables stay locked, so that no row is added meanwhile. Tables in `besides`, the
    engine's own records, do not count.
    """
    before = _columns(conn)
    with conn.transaction(force_rollback=True):
        change()
        # Tables that the transaction has not locked for writing cannot lose data.
        untouched = {row["name"] for row in statements.downgrade_check.untouched(conn)}
        touched = sorted({table for table, _ in before} - besides - untouched)
        after = _columns(conn)
    if touched:
        names = sql.SQL(", ").join(map(sql.Identifier, touched))
        conn.execute(sql.SQL("LOCK TABLE {} IN ACCESS EXCLUSIVE MODE").format(names))
    kept = {table for table, _ in after}
    gone = sorted({table for table, _ in before} - kept - besides)
    losses = [f"table {each} with {n} rows" for each in gone if (n := _count_rows(conn, each))]
    losses += _dropped_values(conn, before, after, kept)
    rows = {table: _count_rows(conn, table) for table in touched if table in kept}
    change()
    for table, count in rows.items():
        if lost := count - _count_rows(conn, table):
            losses.append(f"{lost} rows of table {table}")
    return losses


def _columns(conn: pool.Connection) -> _Columns:
    return {
        (row["table_name"], row["column_name"]): row["column_default"]
        for row in statements.downgrade_check.columns(conn)
    }


def _dropped_values(
    conn: pool.Connection, before: _Columns, after: _Columns, kept: set[str]
) -> list[str]:
    losses: list[str] = []
    for (table, column), default in sorted(before.items()):
        made = "nextval(" in (default or "") or "pg_current_xact_id(" in (default or "")
        # Values of a volatile default, such as now(), were not chosen by a person.
        if table not in kept or (table, column) in after or made:
            continue
        # The default's text comes from the catalogue.
        where = sql.SQL(" WHERE {} IS DISTINCT FROM {}").format(
            sql.Identifier(column), sql.SQL(cast("Any", default or "NULL"))
        )
        if count := _count_rows(conn, table, where):
            losses.append(f"column {table}.{column} with {count} values")
    return losses


def _count_rows(conn: pool.Connection, table: str, where: sql.Composable = _ALL) -> int:
    query = sql.SQL("SELECT count(*) AS n FROM {}").format(sql.Identifier(table)) + where
    return int((conn.execute(query).fetchone() or {"n": 0})["n"])
