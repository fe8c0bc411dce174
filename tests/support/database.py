"""Create the test database, on an embedded throw-away server or on the server of a DSN."""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
import tempfile
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import quote, urlencode

import psycopg
from psycopg import conninfo, sql

from queue_workflows import db, embedded
from tests.support import embedded_servers, reaper, reused_backends, wait

if TYPE_CHECKING:
    from typing_extensions import LiteralString

SUFFIX = "_test"
APPLICATION_NAME = "test-harness"
_NAME_MAX_BYTES = 63
_FOLDERS = "qw-test-"
_MEMORY = Path("/dev/shm")
_MEMORY_MIN_BYTES = 4 << 30
_EMBEDDED_DIR = "QUEUE_WORKFLOWS_EMBEDDED_DIR"

_LARGE_BYTES = 262144
"""From here on TRUNCATE, which makes a new file per table and index, costs less than DELETE."""
_TABLES = """
SELECT c.oid::regclass::text AS name, ARRAY(SELECT d.objid FROM pg_depend d
        WHERE d.refobjid = c.oid AND d.refclassid = 'pg_class'::regclass
          AND d.classid = 'pg_class'::regclass AND d.deptype IN ('a', 'i'))::text[] AS owned
  FROM pg_class c
 WHERE c.relnamespace = current_schema()::regnamespace AND c.relkind IN ('r', 'p')
"""
_COUNT = f"SELECT count(*) FROM ({_TABLES}) AS tables"


class Backend(NamedTuple):
    """One client's connection as the server shows it."""

    pid: int
    application_name: str
    state: str
    query: str


def url(parts: Mapping[str, Any]) -> str:
    """Return the DSN as a URL; host and port are in the query, which allows a socket's path."""
    rest = {key: value for key, value in parts.items() if key not in {"user", "password", "dbname"}}
    user = quote(str(parts["user"]), safe="") if parts.get("user") else ""
    if user and parts.get("password"):
        user += ":" + quote(str(parts["password"]), safe="")
    name = quote(str(parts["dbname"]), safe="")
    return f"postgresql://{user}{'@' if user else ''}/{name}?{urlencode(rest, quote_via=quote)}"


def forced(dsn: str, part: str = "") -> str:
    """Return the DSN with a database whose name ends in `_test`.

    `part`: one of several processes that share a run, each with a database of its own.
    """
    parts: dict[str, Any] = dict(conninfo.conninfo_to_dict(dsn))
    name = str(parts.get("dbname") or "queue_workflows")
    name = name.removesuffix(SUFFIX) + (f"_{part}" if part else "") + SUFFIX
    if len(name.encode()) > _NAME_MAX_BYTES:
        raise AssertionError(f"the test database's name is longer than PostgreSQL's: {name!r}")
    return url({**parts, "dbname": name})


class Database:
    """A database that this test run owns, its name ends in `_test`; recreated when entered."""

    def __init__(self, dsn: str) -> None:
        self.parts: dict[str, Any] = dict(conninfo.conninfo_to_dict(dsn))
        self.name = str(self.parts["dbname"])
        if not self.name.endswith(SUFFIX):
            raise AssertionError(f"tests touch no database but *{SUFFIX}: {self.name!r}")
        self.dsn = url(self.parts)
        self._kept: list[str] = []
        self._question = sql.SQL(f"SELECT '{{}}'::text[], '{{}}'::text[], -1, ({_COUNT})")
        """Asks what `empty` has to do: it names each table."""
        self._template = ""
        self._conn: psycopg.Connection[Any] | None = None
        self._cleaner: psycopg.Connection[Any] | None = None
        self._admin: psycopg.Connection[Any] | None = None

    def __enter__(self) -> Database:
        got = self.admin.execute(
            "SELECT pg_try_advisory_lock(hashtextextended(%s, 0))", (self.name,)
        ).fetchone()
        if got != (True,):
            raise AssertionError(f"another test run is using the database {self.name!r}")
        self.drop(self.name)
        self.create(self.name)
        if self.conn.execute("SELECT current_database()").fetchone() != (self.name,):
            raise AssertionError(f"{self.dsn} leads to a database of another name")
        return self

    def __exit__(self, *_: object) -> None:
        if self._template:
            self.drop(self._template)
        for conn in (self._conn, self._cleaner, self._admin):
            if conn is not None:
                conn.close()

    def _connect(self, name: str, called: str = APPLICATION_NAME) -> psycopg.Connection[Any]:
        own = {"dbname": name, "application_name": called, "connect_timeout": 10}
        return psycopg.connect(conninfo.make_conninfo(**{**self.parts, **own}), autocommit=True)

    @property
    def admin(self) -> psycopg.Connection[Any]:
        """Return a connection to the server's maintenance database."""
        if self._admin is None or self._admin.closed:
            self._admin = self._connect("postgres")
        return self._admin

    @property
    def conn(self) -> psycopg.Connection[Any]:
        """Return the harness's connection to the test database; reopen it if a test killed it."""
        if self._conn is None or self._conn.closed:
            self._conn = self._connect(self.name)
            self._conn.execute("SET lock_timeout = '5s'")
        return self._conn

    @property
    def cleaner(self) -> psycopg.Connection[Any]:
        """Return the connection that empties tables, without their triggers and foreign keys."""
        if self._cleaner is None or self._cleaner.closed:
            self._cleaner = self._connect(self.name, reused_backends.PARKED)
            self._cleaner.execute("SET lock_timeout = '5s'")
            # Once: each change of it lets a session plan all its statements anew.
            self._cleaner.execute("SET session_replication_role = replica")
        return self._cleaner

    def _ask(self, query: sql.SQL, *, cleans: bool = False) -> list[tuple[Any, ...]]:
        try:
            return (self.cleaner if cleans else self.conn).execute(query).fetchall()
        except psycopg.OperationalError:
            used = self._cleaner if cleans else self._conn
            if used is not None and not used.closed:
                raise
            return (self.cleaner if cleans else self.conn).execute(query).fetchall()

    def create(self, name: str, *, template: str = "template1") -> str:
        """Create a database as a copy of another one; return its DSN."""
        statement = sql.SQL("CREATE DATABASE {} TEMPLATE {}" + self._strategy())
        self.admin.execute(statement.format(sql.Identifier(name), sql.Identifier(template)))
        return url({**self.parts, "dbname": name})

    def _strategy(self) -> LiteralString:
        """Copying files takes a third of the time, unless the checkpoint that it needs waits."""
        (fsync,) = self.admin.execute("SHOW fsync").fetchone() or ("",)
        supported = self.admin.info.server_version >= 150_000
        return " STRATEGY FILE_COPY" if supported and fsync == "off" else ""

    def migrate(self) -> None:
        """Bring the schema, and keep a copy of it for `create_migrated`."""
        with environment(QUEUE_WORKFLOWS_DB_URL=self.dsn):
            db.bootstrap()
            db.close_pool()
        self._keep_filled_tables()
        if self._conn is not None:
            # PostgreSQL copies no database that somebody is connected to.
            self._conn.close()
        # No `fresh_name`: what the tests' own `testing.database` takes for left behind, it drops.
        name = f"{self.name[: -len(SUFFIX)][-40:]}_template{SUFFIX}"
        self.drop(name)
        self.create(name, template=self.name)
        self._template = name

    def create_migrated(self, name: str) -> str:
        """Create a database that has the schema and no rows; return its DSN."""
        return self.create(name, template=self._template)

    def drop(self, name: str) -> None:
        """Drop a database of ours with whoever is connected; none of that name is fine."""
        if not name.endswith(SUFFIX):
            raise AssertionError(f"tests drop no database but *{SUFFIX}: {name!r}")
        statement = sql.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)")
        self.admin.execute(statement.format(sql.Identifier(name)))

    def fresh_name(self) -> str:
        """Return a name that no database has."""
        return f"{self.name[: -len(SUFFIX)][:40]}_{secrets.token_hex(4)}{SUFFIX}"

    def _keep_filled_tables(self) -> None:
        """Remember the tables that hold rows now, such as a ledger: `empty()` leaves them."""
        some = sql.SQL("SELECT EXISTS (SELECT 1 FROM {})")
        self._kept = [
            name
            for name, _ in self.conn.execute(_TABLES).fetchall()
            if self.conn.execute(some.format(sql.SQL(name))).fetchone() == (True,)
        ]

    def empty(self) -> None:
        """Empty the tables that have rows or are large, and restart the sequences that are used."""
        used, sequences, known, count = self._todo()
        if known != count:
            self._learn()
            used, sequences, _, _ = self._todo()
        large = [name.removeprefix("large ") for name in used if name.startswith("large ")]
        steps = [f"DELETE FROM {name}" for name in used if not name.startswith("large ")]
        steps += [f"TRUNCATE {', '.join(large)} RESTART IDENTITY CASCADE"] if large else []
        if steps or sequences:
            self.cleaner.execute("; ".join([*steps, *sequences]).encode(), prepare=False)

    def _todo(self) -> tuple[Any, ...]:
        try:
            return self._ask(self._question, cleans=True)[0]
        except psycopg.errors.UndefinedTable:
            self._learn()
            return self._ask(self._question, cleans=True)[0]

    def _learn(self) -> None:
        """Look for the tables that there are: to find them anew takes longer than to see all."""
        tables = self.cleaner.execute(_TABLES).fetchall()
        used = [
            f"CASE WHEN pg_relation_size('{quoted}') > {_LARGE_BYTES} THEN 'large {quoted}'"
            f" WHEN EXISTS (SELECT FROM {name}) THEN '{quoted}' END"
            for name, _ in tables
            if name not in self._kept
            for quoted in [name.replace("'", "''")]
        ]
        owned = [each for name, own in tables if name not in self._kept for each in own]
        self._question = sql.SQL(
            f"SELECT array_remove(ARRAY[{', '.join(used)}]::text[], NULL), ARRAY("
            "SELECT format('SELECT setval(%L::regclass, %s, false)', seqrelid, seqstart)"
            f" FROM pg_sequence WHERE seqrelid = ANY ('{{{', '.join(owned)}}}'::oid[])"
            f" AND pg_sequence_last_value(seqrelid) IS NOT NULL), {len(tables)}, ({_COUNT})"
        )

    def is_used(self) -> bool:
        """Return whether a run, a job or a worker is in the database."""
        tables = ("workflow_runs", "workflow_node_jobs", "ingest_jobs", "workers")
        found = " OR ".join(f"EXISTS (SELECT FROM {table})" for table in tables)
        return bool(self._ask(sql.SQL(f"SELECT {found}"))[0][0])

    def backends(self) -> dict[int, Backend]:
        """Return the clients connected to the test database, by pid, without the harness itself."""
        query = sql.SQL(
            "SELECT pid, application_name, coalesce(state, ''), coalesce(query, '')"
            " FROM pg_stat_activity WHERE datname = current_database()"
            " AND backend_type = 'client backend' AND pid <> pg_backend_pid()"
            f" AND application_name <> '{reused_backends.PARKED}'"
        )
        return {row[0]: Backend(*row) for row in self._ask(query)}

    def left_over(self, before: Mapping[int, Backend], *, grace_s: float = 2.0) -> list[Backend]:
        """Return and end the connections that came after `before` and stay beyond the grace."""
        left: list[Backend] = []

        def gone() -> bool:
            left[:] = [backend for pid, backend in self.backends().items() if pid not in before]
            return not left

        try:
            wait.until(gone, timeout_s=grace_s, every_s=0.002)
        except AssertionError:
            for backend in left:
                self.conn.execute("SELECT pg_terminate_backend(%s, 1000)", (backend.pid,))
        return left


@contextmanager
def environment(**values: str) -> Generator[None]:
    """Set these environment variables for the block, then restore them."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _temporary_folder() -> Path:
    """Return the folder for servers: memory if there is plenty, as they make thousands of files."""
    if reaper.IS_CHOSEN or not os.access(_MEMORY, os.W_OK):
        return Path(tempfile.gettempdir())
    plenty = shutil.disk_usage(_MEMORY).free > _MEMORY_MIN_BYTES
    return _MEMORY if plenty else Path(tempfile.gettempdir())


@contextmanager
def throw_away_server() -> Generator[str]:
    """Yield the DSN of a test database on an embedded server that is removed at the end."""
    _sweep()
    base = Path(tempfile.mkdtemp(prefix=_FOLDERS, dir=_temporary_folder()))
    # As root the server runs under another account, which has to pass.
    base.chmod(0o711)
    lock = _hold(base)
    reaper.own(base)
    settings = {"fsync": "off", "full_page_writes": "off"}
    try:
        with environment(**{_EMBEDDED_DIR: str(base / "pg18")}):
            server = embedded.ensure(settings=settings)
        with server:
            yield forced(server.dsn)
    finally:
        shutil.rmtree(base, ignore_errors=True)
        os.close(lock)


def _hold(base: Path) -> int:
    """Lock a file of the folder while this run lives; nobody can see it unlocked before."""
    fd = os.open(base / "run.new", os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(fd, fcntl.LOCK_EX)
    (base / "run.new").rename(base / "run.lock")
    return fd


def _sweep() -> None:
    """Remove what test runs that were killed have left behind, running servers too."""
    folders = {Path(tempfile.gettempdir()), _temporary_folder()}
    for base in (found for folder in folders for found in folder.glob(f"{_FOLDERS}*")):
        try:
            fd = os.open(base / "run.lock", os.O_RDWR)
        except (FileNotFoundError, PermissionError):
            continue
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if embedded_servers.is_alive(base / "pg18"):
                with environment(**{_EMBEDDED_DIR: str(base / "pg18")}):
                    embedded.ensure(create=False).release()
            shutil.rmtree(base, ignore_errors=True)
        except BlockingIOError:
            pass
        finally:
            os.close(fd)
