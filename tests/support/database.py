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

# Returns the emptied tables. TRUNCATE costs a new file per table and index, so it is for those that
# have grown; from the others a few rows are deleted, without their triggers and foreign keys.
_EMPTY = """
CREATE FUNCTION pg_temp.empty_tables(kept text[]) RETURNS text LANGUAGE plpgsql AS $$
DECLARE
    candidate record;
    dirty text[] := '{}';
    large text[] := '{}';
    deleted bigint;
    used bigint;
BEGIN
    PERFORM set_config('session_replication_role', 'replica', true);
    FOR candidate IN
        SELECT c.oid, c.oid::regclass::text AS name,
               ARRAY(SELECT d.objid FROM pg_depend d
                      WHERE d.refobjid = c.oid AND d.refclassid = 'pg_class'::regclass
                        AND d.classid = 'pg_class'::regclass AND d.deptype IN ('a', 'i')) AS owned
          FROM pg_class c
         WHERE c.relnamespace = current_schema()::regnamespace AND c.relkind IN ('r', 'p')
           AND c.oid::regclass::text <> ALL (kept)
    LOOP
        IF pg_relation_size(candidate.oid) > 262144 THEN
            large := large || candidate.name;
            dirty := dirty || candidate.name;
            CONTINUE;
        END IF;
        deleted := 0;
        IF pg_relation_size(candidate.oid) > 0 THEN
            EXECUTE 'DELETE FROM ' || candidate.name;
            GET DIAGNOSTICS deleted = ROW_COUNT;
        END IF;
        SELECT count(setval(s.seqrelid, s.seqstart, false)) INTO used
          FROM pg_sequence s
         WHERE s.seqrelid = ANY (candidate.owned)
           AND pg_sequence_last_value(s.seqrelid) IS NOT NULL;
        IF deleted + used > 0 THEN
            dirty := dirty || candidate.name;
        END IF;
    END LOOP;
    PERFORM set_config('session_replication_role', 'origin', true);
    IF cardinality(large) > 0 THEN
        EXECUTE 'TRUNCATE ' || array_to_string(large, ', ') || ' RESTART IDENTITY CASCADE';
    END IF;
    RETURN array_to_string(dirty, ' ');
END $$
"""


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
        self._template = ""
        self._conn: psycopg.Connection[Any] | None = None
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
        for conn in (self._conn, self._admin):
            if conn is not None:
                conn.close()

    def _connect(self, name: str) -> psycopg.Connection[Any]:
        own = {"dbname": name, "application_name": APPLICATION_NAME, "connect_timeout": 10}
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
            self._conn.execute(_EMPTY)
        return self._conn

    def _ask(self, query: sql.SQL, values: tuple[Any, ...]) -> list[tuple[Any, ...]]:
        try:
            return self.conn.execute(query, values).fetchall()
        except psycopg.OperationalError:
            if self._conn is not None and not self._conn.closed:
                raise
            return self.conn.execute(query, values).fetchall()

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
        rows = self.conn.execute(
            "SELECT c.oid::regclass::text FROM pg_class c WHERE c.relkind IN ('r', 'p')"
            " AND c.relnamespace = current_schema()::regnamespace"
        ).fetchall()
        some = sql.SQL("SELECT EXISTS (SELECT 1 FROM {})")
        self._kept = [
            name
            for (name,) in rows
            if self.conn.execute(some.format(sql.SQL(name))).fetchone() == (True,)
        ]

    def empty(self) -> str:
        """Empty every table that has rows or used its sequence; their names, in one round trip."""
        rows = self._ask(sql.SQL("SELECT pg_temp.empty_tables(%s)"), (self._kept,))
        return str(rows[0][0])

    def is_used(self) -> bool:
        """Return whether a run, a job or a worker is in the database."""
        tables = ("workflow_runs", "workflow_node_jobs", "ingest_jobs", "workers")
        found = " OR ".join(f"EXISTS (SELECT FROM {table})" for table in tables)
        return bool(self._ask(sql.SQL(f"SELECT {found}"), ())[0][0])

    def backends(self) -> dict[int, Backend]:
        """Return the clients connected to the test database, by pid, without the harness itself."""
        query = sql.SQL(
            "SELECT pid, application_name, coalesce(state, ''), coalesce(query, '')"
            " FROM pg_stat_activity WHERE datname = current_database()"
            " AND backend_type = 'client backend' AND pid <> pg_backend_pid()"
            f" AND application_name <> '{reused_backends.PARKED}'"
        )
        return {row[0]: Backend(*row) for row in self._ask(query, ())}

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
