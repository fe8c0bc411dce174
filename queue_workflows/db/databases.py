"""Choose, create and list the embedded server's databases, one for each project."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, TypeVar

import psycopg
from psycopg import rows, sql

from queue_workflows import config, embedded, errors
from queue_workflows.db import statements
from queue_workflows.embedded import cluster
from queue_workflows.types import Row

_CONNECT_S = 10
_STEM_MAX = 40
"""The most characters of a folder's name in a database name, which has at most 63 bytes."""
_NAME = re.compile(r"[A-Za-z0-9_]{1,63}")
_RESERVED = frozenset({"postgres", "template0", "template1"})
_INSTALLED = frozenset({"site-packages", "dist-packages"})
DEMO = "demo"
R = TypeVar("R")


class Joined(NamedTuple):
    """The embedded server that this process uses, and the database on it."""

    server: embedded.Server
    project: Project

    def describe(self) -> str:
        """Return one line that names the database in use."""
        return self.server.describe(self.project.name, self.project.folder)


class Database(NamedTuple):
    """One database of the server. The last two fields are None without a schema."""

    name: str
    folder: str | None
    size_bytes: int
    unfinished: int | None


def join(*, create: bool) -> Joined:
    """Connect to the embedded server and choose the requested database, or else the project's.

    `--db` and its variable request a database. The project is found from the loaded app, else the
    running script, else the current folder. With `create`, a missing server and database are
    created; otherwise `EmbeddedUnavailable` lists the existing databases.
    """
    server = embedded.ensure(create=create)
    try:
        return _choose(server, config.requested_database(), create=create)
    except BaseException:
        server.release()
        raise


def url() -> str:
    """Return the DSN of this process's database on the embedded server, created if missing."""
    server = embedded.ensure()
    requested = config.requested_database()
    key = (config.get_config().app, requested, here())
    if key not in server.chosen:
        server.chosen[key] = _choose(server, requested, create=True).project.name
    return server.dsn_of(server.chosen[key])


def listing(server: embedded.Server) -> list[Database]:
    """Return the databases of the server that have a project or tables."""
    found = list[Database]()
    has_schema = functools.partial(statements.sessions.has_table, table="workflow_runs")
    for row in _on(server, "postgres", statements.databases.projects):
        unfinished: int | None = None
        with contextlib.suppress(psycopg.Error):
            if _on(server, row["name"], has_schema):
                unfinished = _on(server, row["name"], statements.databases.unfinished)
        if row["folder"] is not None or unfinished is not None:
            found.append(Database(row["name"], row["folder"], row["size_bytes"], unfinished))
    return found


def _choose(server: embedded.Server, name: str, *, create: bool) -> Joined:
    existing = {
        row["name"]: row["folder"] for row in _on(server, "postgres", statements.databases.projects)
    }
    chosen = _wanted(name, existing)
    if chosen.name in existing:
        if create:
            _note_folder(server, chosen, existing[chosen.name])
    elif create:
        _make(server, chosen)
    else:
        raise errors.EmbeddedUnavailable(_missing(chosen, name, existing))
    return Joined(server, chosen)


def _wanted(name: str, existing: dict[str, Any]) -> Project:
    if name:
        return named(name)
    if app := config.get_config().app:
        return of_module(app.partition(":")[0])
    if (script := of_script()) is not None:
        return script
    near = around(here())
    return next((each for each in near if each.name in existing), near[0])


def _missing(wanted: Project, requested_name: str, existing: dict[str, Any]) -> str:
    own = cluster.DATABASE  # every cluster has it
    others = ", ".join(name for name, folder in existing.items() if folder or name != own)
    there = f"name one of {others} by --db" if others else "none has been made yet"
    if requested_name:
        return f"the embedded server has no database {requested_name!r}: {there}"
    return (
        f"the embedded server has no database of the project in {wanted.folder}, and this command "
        f"makes none: go to the folder of an app or name it by --app, {there} "
        "(`queue-workflows databases` lists them), start the app by `queue-workflows up --app "
        "MODULE[:CALLABLE]`, or set QUEUE_WORKFLOWS_DB_URL for a server of your own"
    )


def _make(server: embedded.Server, wanted: Project) -> None:
    """Create the database, unless another process has just created it."""
    name = sql.Identifier(wanted.name)
    # A connection to the template would prevent CREATE DATABASE; template0 allows none.
    statement = sql.SQL("CREATE DATABASE {} TEMPLATE template0").format(name)
    try:
        _on(server, "postgres", lambda conn: conn.execute(statement))
    except (psycopg.errors.DuplicateDatabase, psycopg.errors.UniqueViolation):
        return
    _note_folder(server, wanted, None)


def _note_folder(server: embedded.Server, wanted: Project, noted: str | None) -> None:
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
    _on(server, "postgres", lambda conn: conn.execute(statement))


def _on(server: embedded.Server, name: str, query: Callable[[psycopg.Connection[Row]], R]) -> R:
    """Return the result of a call with a connection to one of the databases."""
    with psycopg.Connection[rows.DictRow].connect(
        server.dsn_of(name),
        autocommit=True,
        connect_timeout=_CONNECT_S,
        client_encoding="UTF8",
        row_factory=rows.dict_row,
    ) as conn:
        return query(conn)


class Project(NamedTuple):
    """The name of a database, and the folder of the project that it belongs to."""

    name: str
    folder: Path | None
    """None if the database was chosen with `--db`; several apps may share such a database."""


def named(name: str) -> Project:
    """Return the project for a name from `--db`.

    Raises `InvalidConfig` for a reserved name, and for one with other characters or a wrong length.
    """
    if not _NAME.fullmatch(name) or name in _RESERVED:
        raise errors.InvalidConfig(
            f"--db {name!r} is not a valid database name: use 1 to 63 letters, digits or '_', and "
            f"none of the reserved names {', '.join(sorted(_RESERVED))}; "
            "`queue-workflows databases` lists the databases that exist"
        )
    return Project(name, None)


def of_folder(folder: Path) -> Project:
    """Return the project of a folder, even if it is empty.

    Folders with the same name get database names that end with different digits.
    """
    real = folder.resolve()
    stem = re.sub(r"[^a-z0-9]+", "_", real.name.lower()).strip("_")[:_STEM_MAX] or "app"
    digest = hashlib.sha256(os.fsencode(real)).hexdigest()[:8]
    return Project(f"{stem}_{digest}", real)


def here() -> Path:
    """Return the current folder, or `/` if the current folder no longer exists."""
    try:
        return Path.cwd()
    except OSError:
        return Path("/")


def around(folder: Path) -> list[Project]:
    """Return the projects that a folder may belong to, nearest first.

    These are the folder itself, its `src` subfolder, and then the same for each parent folder.
    """
    real = folder.resolve()
    folders = [each / below for each in (real, *real.parents) for below in ("", "src")]
    return [of_folder(each) for each in folders]


def of_module(module: str) -> Project:
    """Return the project of an app, given its imported module.

    The project's folder is the one that contains the top-level module or package. For an installed
    app it is the package itself, because all installed apps share `site-packages`. Modules of this
    package give `DEMO`. A module that has no file gives the current folder.
    """
    top = module.partition(".")[0]
    loaded = sys.modules.get(top)
    place = _place(loaded) if loaded is not None else None
    if top == __name__.partition(".")[0]:
        return Project(DEMO, place)
    if place is None:
        return of_folder(here())
    if _INSTALLED & set(place.parts):
        return of_folder(place)
    return of_folder(_above_packages(place.parent))


def of_script() -> Project | None:
    """Return the project of the script that this process runs; None for an installed command."""
    main = sys.modules.get("__main__")
    file = getattr(main, "__file__", None)
    if not isinstance(file, str) or not file.endswith(".py"):
        return None
    path = Path(file).resolve()
    ours = Path(__file__).resolve().parents[1]
    elsewhere = (Path(sys.prefix).resolve(), Path(sys.base_prefix).resolve(), ours)
    if _INSTALLED & set(path.parts) or any(path.is_relative_to(each) for each in elsewhere):
        return None
    return of_folder(_above_packages(path.parent))


def _place(module: ModuleType) -> Path | None:
    """Return the package's folder, or the module's file path without its suffix, or None."""
    for folder in getattr(module, "__path__", ()):
        return Path(folder).resolve()
    file = getattr(module, "__file__", None)
    return Path(file).resolve().with_suffix("") if isinstance(file, str) else None


def _above_packages(folder: Path) -> Path:
    """Return the nearest folder without `__init__.py`, this one or a parent.

    A module may be started from inside its package.
    """
    while (folder / "__init__.py").exists() and folder != folder.parent:
        folder = folder.parent
    return folder
