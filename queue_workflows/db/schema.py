"""Migrate the schema: apply, revert and list migrations, and refuse a schema of newer code."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import psycopg

from queue_workflows import errors
from queue_workflows.db import (
    development_chain,
    functions,
    ledger,
    migration_files,
    migration_lock,
    pool,
)

_log = logging.getLogger(__name__)
GIVEN_WAY_S = 1.0
"""Seconds before the tables of triggers are locked again: a waiting lock stops writers."""
DEADLOCK_TRIES = 20
"""A migration locks table by table, and workers in another order; each try takes 1 s."""


def refuse_newer() -> None:
    """Raise `SchemaTooNew` if the ledger of our own chain needs newer code than this."""
    with pool.connect() as conn:
        if ledger.is_whole(conn, ledger.NAME):
            ledger.refuse_newer(migration_files.REQUIRED_VERSION, ledger.read(conn, ledger.NAME))


def bootstrap(
    *,
    migrations_dir: str | Path | None = None,
    version_table: str = ledger.NAME,
    stopped: Callable[[], bool] = lambda: False,
) -> list[int]:
    """Apply the migrations that the ledger lacks; return their versions, lowest first.

    With our own chain it also installs the functions and triggers of this code, and all of it is
    one transaction; in an app's chain each migration is one. An advisory lock lets one process
    migrate at a time. A call that finds nothing to do takes no lock and only reads; one that waits
    for the lock calls `stopped` ten times a second. Raises `MigrationFailed`, also when `stopped()`
    came true first, and `SchemaTooNew`.
    """
    steps = migration_files.chain(migrations_dir)
    ours = _is_ours(steps, version_table)
    # Without the lock: any role that can log in may hold it, and so block every start.
    with pool.connect(limited=False) as conn:
        if version_table == ledger.NAME:
            ledger.refuse_others(conn)
        is_current = ledger.is_whole(conn, version_table) and not (ours and functions.stale(conn))
        if is_current and not _missing(conn, version_table, steps):
            return []
    with migration_lock.exclusive(version_table, stopped) as conn:
        if ours:
            return _bring(conn, steps, stopped)
        missing = _missing(conn, version_table, steps)
        for step in missing:
            _despite_deadlocks(lambda step=step: _apply(conn, version_table, step))
        return [step.version for step in missing]


def _is_ours(steps: list[migration_files.Migration], version_table: str) -> bool:
    """Return whether a chain contains our whole own chain, which the functions need."""
    return version_table == ledger.NAME and migration_files.chain()[-1] in steps


def _bring(
    conn: pool.Connection, steps: list[migration_files.Migration], stopped: Callable[[], bool]
) -> list[int]:
    """Apply our own chain and install the functions in one transaction.

    A crash between the two would leave tables without the triggers that guard them.
    """
    done: list[int] = []

    def once() -> None:
        done.clear()
        with conn.transaction():
            development_chain.convert(conn, steps[12].checksum)
            for step in _missing(conn, ledger.NAME, steps):
                _apply(conn, ledger.NAME, step)
                done.append(step.version)
            for part in functions.stale(conn):
                _install(conn, part)

    _giving_way(once, stopped)
    return done


def _giving_way(transaction: Callable[[], None], stopped: Callable[[], bool]) -> None:
    """Try again while workers hold locks that the triggers need; raise once `stopped()`."""
    log_at = time.monotonic() + migration_lock.LOGGED_S
    while True:
        try:
            _despite_deadlocks(transaction)
        except functions.TablesInUse:
            if stopped():
                raise
        else:
            return
        if time.monotonic() >= log_at:
            log_at = time.monotonic() + migration_lock.LOGGED_S
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

    with migration_lock.exclusive(ledger.NAME) as conn:
        _giving_way(once, lambda: False)
    return done


def _missing(
    conn: pool.Connection, name: str, steps: list[migration_files.Migration]
) -> list[migration_files.Migration]:
    """Return the migrations that the ledger lacks; log those that changed after they were applied.

    Raises `SchemaTooNew`, and `MigrationFailed` where a development build applied one of ours.
    """
    applied = ledger.read(conn, name)
    ledger.refuse_newer(steps[-1].version, applied)
    if _is_ours(steps, name):
        _refuse_edited(steps, applied)
    for step in steps:
        recorded = applied[step.version]["checksum"] if step.version in applied else None
        if recorded is not None and recorded != step.checksum:
            _log.warning("migration %04d_%s changed after it was applied", step.version, step.name)
    return [step for step in steps if step.version not in applied]


def _refuse_edited(
    steps: list[migration_files.Migration], applied: Mapping[int, Mapping[str, Any]]
) -> None:
    """Raise `MigrationFailed` where a development build applied one of ours with another text."""
    for step in steps:
        if step.version in development_chain.UNRELEASED and step.version in applied:
            recorded = applied[step.version]["checksum"]
            if recorded is not None and recorded != step.checksum:
                raise development_chain.edited(f"{step.version:04d}_{step.name}", step.version)


def _apply(conn: pool.Connection, version_table: str, step: migration_files.Migration) -> None:
    """Apply one migration and record it, in one transaction or in the caller's."""
    try:
        with conn.transaction():
            # Trusted text from the chain's folder: a migration is SQL by definition.
            conn.execute(step.up.encode())
            ledger.record(conn, version_table, step)
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
    *, migrations_dir: str | Path | None = None, version_table: str = ledger.NAME
) -> list[migration_files.Migration]:
    """Return the migrations that `bootstrap` would apply, lowest first; changes nothing."""
    steps = migration_files.chain(migrations_dir)
    with pool.connect() as conn:
        if version_table == ledger.NAME:
            ledger.refuse_others(conn)
        if not ledger.exists(conn, version_table):
            return steps
        applied = ledger.versions(conn, version_table)
        ours = _is_ours(steps, version_table) and ledger.is_whole(conn, version_table)
        if ours and development_chain.version(conn) is None:
            _refuse_edited(steps, ledger.read(conn, version_table))
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
    from queue_workflows.db import downgrade_check

    steps = migration_files.chain(migrations_dir)
    ours = _is_ours(steps, version_table)
    with migration_lock.exclusive(version_table) as conn:
        if not ledger.exists(conn, version_table):
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
                elif lost := downgrade_check.of(conn, change, besides=own_tables):
                    raise errors.DataLossRefused(
                        f"downgrade to version {to_version} would drop {'; '.join(lost)}. "
                        "Pass allow_data_loss=True to do it all the same"
                    )

        _despite_deadlocks(once)
    return [step.version for step in down]


def _down_steps(
    steps: list[migration_files.Migration], versions: Iterable[int]
) -> list[migration_files.Migration]:
    """Return the migrations to revert, highest first; raise `MigrationFailed` if one cannot be."""
    known = {step.version: step for step in steps if step.down is not None}
    targets = sorted(versions, reverse=True)
    for version in targets:
        if version not in known:
            raise errors.MigrationFailed(f"no down migration for version {version}")
    return [known[version] for version in targets]


def _revert(
    conn: pool.Connection, version_table: str, steps: list[migration_files.Migration]
) -> None:
    for step in steps:
        try:
            conn.execute((step.down or "").encode())
            ledger.forget(conn, version_table, step.version)
        except psycopg.Error as error:
            raise errors.MigrationFailed(
                f"down migration {step.version:04d}_{step.name}: {str(error).strip()}"
            ) from error
