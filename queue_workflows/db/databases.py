"""Choose, create and list the databases of the embedded server, one per project."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import psycopg
from psycopg import rows, sql

from queue_workflows import config, embedded, errors
from queue_workflows.db import statements
from queue_workflows.embedded import project
from queue_workflows.types import Row

EARLIER = "queue_workflows"
"""The single database of versions without databases per project."""
_CONNECT_S = 10


class Joined(NamedTuple):
    """The embedded server, joined by this process, and the database to use on it."""

    server: embedded.Server
    project: project.Project
    made: bool
    """Whether this call created the database."""

    @property
    def dsn(self) -> str:
        """Return a URL over the unix socket."""
        return self.server.dsn_of(self.project.name)

    def describe(self) -> str:
        """Return one line that names the database in use."""
        return self.server.describe(self.project.name, self.project.folder)


class Database(NamedTuple):
    """One database of the server. Each of the last two is None without a schema."""

    name: str
    folder: str | None
    size_bytes: int
    unfinished: int | None


def join(*, create: bool) -> Joined:
    """Join the embedded server and choose the database: the requested one, else the project's.

    `--db` and the setting EMBEDDED_DB request one. The project is that of the loaded app, else of
    the running script, else of the current folder. `create` creates a missing server and database;
    without it `EmbeddedUnavailable` lists the existing ones.
    """
    server = embedded.ensure(create=create)
    try:
        return _choose(server, requested(), create=create)
    except BaseException:
        server.release()
        raise


def requested() -> str:
    """Return the name of the database that was requested, or an empty text."""
    return config.get_config().embedded_db or config.EMBEDDED_DB.read()


def url() -> str:
    """Return the DSN of this process's database on the embedded server, created if missing."""
    server = embedded.ensure()
    key = (config.get_config().app, requested(), project.here())
    if key not in server.chosen:
        server.chosen[key] = _choose(server, requested(), create=True).project.name
    return server.dsn_of(server.chosen[key])


def listing(server: embedded.Server) -> list[Database]:
    """Return the databases of the server, except those without a project and without tables."""
    found = list[Database]()
    for row in _rows(server, "postgres", statements.databases.projects):
        unfinished: int | None = None
        with contextlib.suppress(psycopg.Error):
            if _rows(server, row["name"], statements.databases.has_schema)[0]["found"]:
                unfinished = _rows(server, row["name"], statements.databases.unfinished)[0]["n"]
        if row["folder"] is not None or unfinished is not None:
            found.append(Database(row["name"], row["folder"], row["size_bytes"], unfinished))
    return found


def has_earlier(server: embedded.Server) -> bool:
    """Return whether the database of earlier versions exists and has tables."""
    with contextlib.suppress(psycopg.Error):
        return bool(_rows(server, EARLIER, statements.databases.has_schema)[0]["found"])
    return False


def _choose(server: embedded.Server, name: str, *, create: bool) -> Joined:
    existing = {
        row["name"]: row["folder"]
        for row in _rows(server, "postgres", statements.databases.projects)
    }
    chosen = _wanted(name, existing)
    if chosen.name in existing:
        if create:
            _note_folder(server, chosen, existing[chosen.name])
        return Joined(server, chosen, made=False)
    if not create:
        raise errors.EmbeddedUnavailable(_missing(chosen, name, existing))
    return Joined(server, chosen, made=_make(server, chosen))


def _wanted(name: str, existing: dict[str, Any]) -> project.Project:
    if name:
        return project.named(name)
    if app := config.get_config().app:
        return project.of_module(app.partition(":")[0])
    if (script := project.of_script()) is not None:
        return script
    around = project.around(project.here())
    return next((each for each in around if each.name in existing), around[0])


def _missing(wanted: project.Project, requested_name: str, existing: dict[str, Any]) -> str:
    others = ", ".join(name for name, folder in existing.items() if folder or name != EARLIER)
    there = f"name one of {others} by --db" if others else "none has been made yet"
    if requested_name:
        return f"the embedded server has no database {requested_name!r}: {there}"
    return (
        f"the embedded server has no database of the project in {wanted.folder}, and this command "
        f"makes none: go to the folder of an app or name it by --app, {there} "
        "(`queue-workflows databases` lists them), start the app by `queue-workflows up --app "
        "MODULE[:CALLABLE]`, or set QUEUE_WORKFLOWS_DB_URL for a server of your own"
    )


def _make(server: embedded.Server, wanted: project.Project) -> bool:
    """Create the database; return False if another process has just created it."""
    name = sql.Identifier(wanted.name)
    with _connected(server, "postgres") as conn:
        try:
            # A connection to the template would prevent CREATE DATABASE; template0 allows none.
            conn.execute(sql.SQL("CREATE DATABASE {} TEMPLATE template0").format(name))
        except (psycopg.errors.DuplicateDatabase, psycopg.errors.UniqueViolation):
            return False
    _note_folder(server, wanted, None)
    return True


def _note_folder(server: embedded.Server, wanted: project.Project, noted: str | None) -> None:
    """Store the project's folder with the database, for people and for lookups from below it."""
    if wanted.folder is None:
        return
    # A folder's name may have bytes that are not UTF-8, which PostgreSQL does not store.
    folder = os.fsencode(wanted.folder).decode(errors="backslashreplace")
    if noted == folder:
        return
    statement = sql.SQL("COMMENT ON DATABASE {} IS {}").format(
        sql.Identifier(wanted.name), sql.Literal(folder)
    )
    with _connected(server, "postgres") as conn:
        conn.execute(statement)


def _connected(server: embedded.Server, name: str) -> psycopg.Connection[rows.DictRow]:
    return psycopg.Connection[rows.DictRow].connect(
        server.dsn_of(name),
        autocommit=True,
        connect_timeout=_CONNECT_S,
        client_encoding="UTF8",
        row_factory=rows.dict_row,
    )


def _rows(
    server: embedded.Server, name: str, query: Callable[[psycopg.Connection[Row]], list[Row]]
) -> list[Row]:
    with _connected(server, name) as conn:
        return query(conn)
