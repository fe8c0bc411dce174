"""A connection of a worker's loop: statements, notifications, and what its loss leaves unknown."""

from __future__ import annotations

import contextlib
import resource
import socket
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from psycopg import conninfo

from queue_workflows import db
from queue_workflows.db import link
from queue_workflows.runtime import clock, io_loop
from tests.support import database
from tests.support.proxy import Proxy


def executed(text: bytes, **parameters: object) -> db.Script[Any]:
    """Return the rows of a statement as they come."""
    return (yield db.Statement(text, parameters, is_raw=True))


class Asking:
    """A source of requests that notes what becomes of them."""

    def __init__(self) -> None:
        self.requests: deque[bytes | db.Script[Any]] = deque()
        self.seen: list[Any] = []
        self.before: Callable[[], object] = lambda: None
        """Called just before a statement is sent."""

    def next(self) -> link.Request | None:
        if not self.requests:
            return None
        wanted = self.requests.popleft()
        script = executed(wanted) if isinstance(wanted, bytes) else wanted
        self.before()
        return link.Request(
            script,
            self.seen.append,
            lambda error: self.seen.append(getattr(error, "sqlstate", None) or str(error)),
            lambda: self.seen.append("lost"),
        )

    def notified(self, channel: str, text: str) -> None:
        self.seen.append((channel, text))

    def connected(self) -> None:
        self.seen.append("connected")

    def disconnected(self) -> None:
        self.seen.append("disconnected")


class Own:
    """A link on a loop that the test turns."""

    def __init__(self, **more: Any) -> None:
        self.source = Asking()
        self._loop = io_loop.IoLoop()
        self.link = link.Link(self._loop, self.source, channels=["ingest_job_ready"], **more)

    def ask(self, *wanted: bytes | db.Script[Any]) -> None:
        self.source.requests.extend(wanted)
        self.link.flow.ring()

    def turn_until(self, *expected: Any, at: Callable[[], object] = lambda: None) -> None:
        """Turn until just this was seen; `at` is called in each turn."""
        ends = clock.boot_s() + 60

        def tick(now: float) -> float:
            at()
            return min(now + 0.02, self.link.tick(now))

        def over() -> bool:
            return len(self.source.seen) >= len(expected) or clock.boot_s() > ends

        self._loop.wake_at(0.0)
        self._loop.run(tick, over)
        seen, self.source.seen = self.source.seen, []
        assert seen == [*expected]

    def close(self) -> None:
        self.link.close()
        self._loop.close()


@pytest.fixture
def own(conn: db.Connection) -> Iterator[Own]:
    del conn
    made = Own()
    yield made
    made.close()


def notify(text: str) -> None:
    with db.connect() as other:
        other.execute("SELECT pg_notify('ingest_job_ready', %s)", (text,))


def end_sleepers() -> None:
    with db.connect() as other:
        other.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
            " WHERE datname = current_database() AND wait_event = 'PgSleep'"
        )


def test_a_refused_statement_leaves_the_connection_to_the_next(own: Own) -> None:
    own.ask(b"SELECT 1 / 0", b"SELECT 7, NULL, 'x'")
    own.turn_until("connected", "22012", [(b"7", None, b"x")])


def test_a_script_that_fails_by_itself_ends_neither_the_loop_nor_the_connection(own: Own) -> None:
    """It may have a transaction open, which must not go on in the next script."""

    def fails() -> db.Script[Any]:
        yield db.BEGIN
        yield db.Statement(b"SELECT pg_current_xact_id()")
        raise ValueError("not the database's")

    own.ask(fails(), b"SELECT pg_current_xact_id_if_assigned()")
    own.turn_until("connected", "not the database's", [(None,)])


def test_a_value_that_cannot_be_sent_is_refused_and_loses_no_connection(own: Own) -> None:
    own.ask(executed(b"SELECT %(given)s", given="a\0b"), b"SELECT 2")
    nul = "PostgreSQL text cannot have a NUL (0x00) byte"
    own.turn_until("connected", nul, [(b"2",)])


@pytest.fixture
def table(conn: db.Connection) -> Iterator[bytes]:
    """A table of one row and one column, which has the value 1."""
    conn.execute("CREATE TABLE has_columns AS SELECT 1 AS a")
    yield b"has_columns"
    conn.execute("DROP TABLE has_columns")


def test_a_column_that_is_added_is_returned_by_statements_that_were_used_before(
    own: Own, conn: db.Connection, table: bytes
) -> None:
    def within() -> db.Script[Any]:
        yield db.BEGIN
        rows = yield db.Statement(b"SELECT * FROM " + table, {}, is_raw=True)
        yield db.COMMIT
        return rows

    every = b"SELECT * FROM " + table
    own.ask(every, every)
    own.turn_until("connected", [(b"1",)], [(b"1",)])
    conn.execute("ALTER TABLE has_columns ADD COLUMN b integer DEFAULT 2")
    own.ask(every)
    own.turn_until([(b"1", b"2")])
    conn.execute("ALTER TABLE has_columns ADD COLUMN c integer DEFAULT 3")
    own.ask(within(), within(), every)
    own.turn_until("0A000", [(b"1", b"2", b"3")], [(b"1", b"2", b"3")])


def test_notifications_arrive_between_statements_and_during_one(own: Own) -> None:
    own.turn_until("connected")
    notify("idle")
    own.turn_until(("ingest_job_ready", "idle"))
    own.source.before = lambda: notify("busy")
    own.ask(b"SELECT 8 FROM pg_sleep(0.1)")
    own.turn_until(("ingest_job_ready", "busy"), [(b"8",)])


def test_a_connection_that_ends_during_a_statement_is_opened_again(own: Own) -> None:
    own.ask(b"SELECT pg_sleep(60)", b"SELECT 9")
    own.turn_until("connected")
    own.turn_until("disconnected", "lost", "connected", [(b"9",)], at=end_sleepers)


def test_a_connection_that_is_cut_asks_for_no_cancel(own: Own) -> None:
    own.ask(b"SELECT pg_sleep(60)", b"SELECT 9")
    own.turn_until("connected")
    cuts: list[int] = []

    def cut_once() -> None:
        if not cuts and own.link.waits_since < clock.boot_s():
            cuts.append(1)
            own.link.cut()

    own.turn_until("disconnected", "lost", "connected", [(b"9",)], at=cut_once)
    end_sleepers()  # the server has not heard of it


@contextlib.contextmanager
def no_descriptor_left() -> Iterator[None]:
    """Let this process open nothing in the block."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_connection_is_cut_by_a_process_that_can_open_nothing(own: Own) -> None:
    own.ask(b"SELECT pg_sleep(60)", b"SELECT 9")
    own.turn_until("connected")
    with no_descriptor_left():
        own.link.cut()
    own.turn_until("disconnected", "lost", "connected", [(b"9",)])
    end_sleepers()


def test_it_listens_nowhere_where_all_only_poll(own: Own, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUEUE_WORKFLOWS_POLL_ONLY", "1")
    own.ask(b"SELECT pg_listening_channels()", b"SELECT 1")
    own.turn_until("connected", [], [(b"1",)])


@pytest.mark.parametrize("takes", [True, False], ids=["takes connections", "takes none"])
def test_a_silent_host_before_another_is_passed_over(dsn: str, takes: bool) -> None:
    with contextlib.ExitStack() as stack:
        silent = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        place = silent.getsockname()
        for _ in range(0 if takes else 4):  # more wait than it takes
            other = stack.enter_context(socket.socket())
            other.setblocking(False)
            other.connect_ex(place)
        proxy = stack.enter_context(Proxy(dsn))
        parts = conninfo.conninfo_to_dict(proxy.dsn)
        parts |= {"host": f"127.0.0.1,{parts['host']}", "port": f"{place[1]},{parts['port']}"}
        own = stack.enter_context(contextlib.closing(Own(url=database.url(parts), answer_s=0.5)))
        own.source.disconnected = lambda: None
        own.turn_until("connected")
