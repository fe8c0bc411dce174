"""Start a throw-away server or use the one of a DSN; create a database per measurement."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

import psycopg
from psycopg import conninfo, sql

from benchmarks import baseline
from queue_workflows import db, embedded

SUFFIX = "_bench"
OWN = "throw-away server"
DURABLE = {"fsync": "on", "synchronous_commit": "on", "full_page_writes": "on"}
_FOLDERS = "qw-bench-"
_EMBEDDED_DIR = "QUEUE_WORKFLOWS_EMBEDDED_DIR"
_URL = "QUEUE_WORKFLOWS_DB_URL"


def url(parts: dict[str, Any], name: str) -> str:
    """Return the DSN of a database of that server as a URL, which every client reads."""
    rest = {k: v for k, v in parts.items() if k not in {"user", "password", "dbname"}}
    user = quote(str(parts["user"]), safe="") if parts.get("user") else ""
    if user and parts.get("password"):
        user += ":" + quote(str(parts["password"]), safe="")
    query = urlencode(rest, quote_via=quote)
    return f"postgresql://{user}{'@' if user else ''}/{quote(name, safe='')}?{query}"


class Server:
    """Makes databases named `<prefix>_<tag>_bench` and drops them; touches no other."""

    def __init__(self, dsn: str, prefix: str, kind: str) -> None:
        self._parts: dict[str, Any] = dict(conninfo.conninfo_to_dict(dsn))
        self._prefix = prefix[:40]
        self._dsn = url(self._parts, "postgres")
        self.kind = kind
        self.is_own = kind == OWN
        try:
            self.admin = psycopg.connect(self._dsn, autocommit=True)
        except psycopg.OperationalError as error:
            raise SystemExit(f"benchmarks: {db.describe(dsn)}: {error}") from None
        self._template = f"{self._prefix}_template{SUFFIX}"

    def prepare(self) -> None:
        """Make the database with the schema of both sides that all others are copied from."""
        self._drop(self._template)
        self.admin.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(self._template)))
        with _in_force(url(self._parts, self._template)) as dsn:
            db.bootstrap()
            with psycopg.connect(dsn, autocommit=True) as conn:
                conn.execute(baseline.SCHEMA)

    @contextmanager
    def database(self, tag: str, *, empty: bool = False) -> Generator[str]:
        """Yield the DSN of a new database with both schemas (`empty`: none), dropped at the end."""
        name = f"{self._prefix}_{tag}{SUFFIX}"
        self._drop(name)
        template = sql.Identifier("template1" if empty else self._template)
        self.admin.execute(
            sql.SQL("CREATE DATABASE {} TEMPLATE {}").format(sql.Identifier(name), template)
        )
        try:
            with _in_force(url(self._parts, name)) as dsn:
                yield dsn
        finally:
            self._drop(name)

    @staticmethod
    def name_of(dsn: str) -> str:
        """Return the database that a DSN names."""
        return str(conninfo.conninfo_to_dict(dsn)["dbname"])

    def _drop(self, name: str) -> None:
        self.admin.execute(
            sql.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(sql.Identifier(name))
        )

    def close(self) -> None:
        """Drop the template and hang up."""
        with self.admin:
            if not self.admin.closed:
                self._drop(self._template)


@contextmanager
def _in_force(dsn: str) -> Generator[str]:
    """Let the engine in this process work on that database."""
    before = os.environ.get(_URL)
    os.environ[_URL] = dsn
    db.close_pool()
    try:
        yield dsn
    finally:
        db.close_pool()
        if before is None:
            del os.environ[_URL]
        else:
            os.environ[_URL] = before


@contextmanager
def running(dsn: str | None, scratch: Path) -> Generator[Server]:
    """Yield the server to measure on, with its template; stop it if it was started here."""
    if dsn is None:
        with _throw_away(scratch) as own:
            yield from _serve(Server(own, "own", OWN))
        return
    name = str(conninfo.conninfo_to_dict(dsn).get("dbname") or "")
    if not name.endswith(SUFFIX) or name == SUFFIX:
        raise SystemExit(f"benchmarks: the database of --dsn must be named *{SUFFIX}, not {name!r}")
    yield from _serve(Server(dsn, name.removesuffix(SUFFIX), "given server"))


def _serve(server: Server) -> Generator[Server]:
    try:
        server.prepare()
        yield server
    finally:
        server.close()


@contextmanager
def scratch_folder() -> Generator[Path]:
    """Yield a folder for this run, removed at the end; first remove those of killed runs."""
    _sweep()
    base = Path(tempfile.mkdtemp(prefix=_FOLDERS))
    base.chmod(0o711)  # as root the server runs under another account, which has to pass
    lock = os.open(base / "run.lock", os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    try:
        yield base
    finally:
        os.close(lock)
        shutil.rmtree(base, ignore_errors=True)


@contextmanager
def _throw_away(scratch: Path) -> Generator[str]:
    os.environ[_EMBEDDED_DIR] = str(scratch / "pg")
    try:
        handle = embedded.ensure(settings=DURABLE)
    finally:
        del os.environ[_EMBEDDED_DIR]
    with handle:
        yield handle.dsn


def _sweep() -> None:
    for base in Path(tempfile.gettempdir()).glob(f"{_FOLDERS}*"):
        with suppress(OSError):
            fd = os.open(base / "run.lock", os.O_RDWR)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if (base / "pg").exists():
                    _stop_leftover(base)
                shutil.rmtree(base, ignore_errors=True)
            finally:
                os.close(fd)


def _stop_leftover(base: Path) -> None:
    """Stop the server of a killed run: join it briefly, so that the last to leave stops it."""
    os.environ[_EMBEDDED_DIR] = str(base / "pg")
    try:
        embedded.ensure(create=False).release()
    finally:
        del os.environ[_EMBEDDED_DIR]
