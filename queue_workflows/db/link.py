"""Keep one non-blocking connection of a loop, for statements and notifications.

It uses libpq directly. psycopg's generators drop notifications that arrive during a statement, and
one thread cannot wait for its connections together with other descriptors.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import random
import re
import socket
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, Final, NamedTuple, Protocol, TypeAlias, cast

import psycopg
from psycopg import adapt, pq
from psycopg import errors as pg_errors
from psycopg.pq import abc

from queue_workflows import errors
from queue_workflows.db import database_url, pool, scripts, statements
from queue_workflows.runtime import clock, io_loop

_log = logging.getLogger(__name__)
ANSWER_S: Final = 15.0
"""Seconds without a reply after which a connection is closed; a statement may take less."""
BACKOFF_FIRST_S: Final = 0.1
BACKOFF_MAX_S: Final = 5.0
_GOOD: Final = (pq.ExecStatus.TUPLES_OK, pq.ExecStatus.COMMAND_OK, pq.ExecStatus.EMPTY_QUERY)
_PARAMETER: Final = re.compile(r"%(?:\((\w+)\)s|%)")
_BEGIN: Final = b"BEGIN ISOLATION LEVEL READ COMMITTED NOT DEFERRABLE; "
_INT8, _FLOAT8, _BOOL, _TEXTS, _INTS, _UNKNOWN = 20, 701, 16, 1009, 1016, 0
"""Type oids of pg_type.dat for int8, float8, bool, text[], int8[], and a type to be inferred."""
Waits: TypeAlias = Generator[io_loop.Wait, bool, Any]


class Request(NamedTuple):
    """A script that a link runs for its source, and the callbacks for its outcome."""

    script: scripts.Script[Any]
    done: Callable[[Any], object]
    """Called with the result of the script."""
    refused: Callable[[Any], object]
    """Called with the error of a refused statement, or any other error of the script; the statement
    has written nothing."""
    lost: Callable[[], object]
    """Called if the connection was lost, so that it is unknown whether the script was committed."""


class Source(Protocol):
    """The owner of a link, which gives it requests and receives its notifications."""

    def next(self) -> Request | None:
        """Return the next request, or None; ring the bell of the link's flow to be asked again."""
        ...

    def notified(self, channel: str, text: str) -> object:
        """Receive a notification and its payload."""
        ...

    def connected(self) -> object:
        """Note a new connection; notifications that were sent before may be lost."""
        ...

    def disconnected(self) -> object:
        """Note that the connection was lost or could not be opened."""
        ...


class Link:
    """One connection of the engine on a loop, opened when needed and again after a loss.

    The bell of its `flow` makes it ask the source. It listens on `channels` unless POLL_ONLY is
    set. `locks` are names of advisory locks that its session holds in shared mode. `url` defaults
    to `db_url()`. `waits` is called with the reason whenever it has to reconnect. By default each
    kind of reason is logged once, and the end of the outage too. It waits up to `answer_s` for a
    connection or a reply.
    """

    def __init__(
        self,
        loop: io_loop.IoLoop,
        source: Source,
        *,
        flow: io_loop.Flow | None = None,
        channels: Sequence[str] = (),
        locks: Sequence[str] = (),
        url: str | None = None,
        waits: Callable[[str], object] | None = None,
        answer_s: float = ANSWER_S,
    ) -> None:
        self._loop = loop
        self._source = source
        self._channels = channels
        self._locks = locks
        self._url = url
        self._waits = waits
        self._answer_s = answer_s
        self._pg: abc.PGconn | None = None
        self._prepared: dict[tuple[bytes, tuple[int, ...]], bytes] = {}
        self._numbers = itertools.count()
        self._parsed: dict[bytes, tuple[bytes, list[str]]] = {}
        self._backoff_s, self._first_host = BACKOFF_FIRST_S, 0
        self._retry_at = 0.0
        self._depth = 0
        """How many transactions and savepoints the running script has open."""
        self._begin = b""
        """With POLL_ONLY, the text that begins each transaction and sets its settings."""
        self._logged = self._cut_for = ""
        self.waits_since = math.inf
        """Since when (`clock.boot_s`) it waits for a reply; inf if it does not."""
        self.closing = False
        self.flow = flow or io_loop.Flow(loop)
        self.flow.begin(self._run())

    @property
    def is_open(self) -> bool:
        """Return whether there is a connection."""
        return self._pg is not None

    def tick(self, now: float) -> float:
        """Close a connection that does not answer; return when to check again."""
        if now >= self.waits_since + self._answer_s:
            self.cut(f"no answer within {self._answer_s:g} s")
            return now + self._answer_s
        if now >= self._retry_at > 0.0:
            self._retry_at = 0.0
            self.flow.ring()
        return min(self.waits_since + self._answer_s, self._retry_at or math.inf)

    def cut(self, why: str = "") -> None:
        """End the connection, so that its flow reads an end of file and handles the lost reply.

        After a cancel request it would be unknown whether the statement was executed.
        """
        self._cut_for = why
        if self._pg is not None and (fd := self._fd()) != -1:
            own = socket.socket(fileno=fd)  # not a copy, since no descriptor may be left for one
            with contextlib.suppress(OSError):  # it has ended just now
                own.shutdown(socket.SHUT_RDWR)
            own.detach()

    def _fd(self) -> int:
        try:
            return -1 if self._pg is None else self._pg.socket
        except psycopg.OperationalError:
            return -1

    def close(self) -> None:
        """Close the connection for good."""
        self.closing = True
        self.flow.over = True
        self._close()

    # --- The flow.

    def _run(self) -> Waits:
        while not self.closing:
            if self._pg is None:
                yield from self._open()
                continue
            request = self._source.next()
            if request is None:
                try:
                    if (yield None):
                        self._pg.consume_input()
                        self._take_notifications(self._pg)
                except psycopg.OperationalError as error:
                    self._drop(error)
                continue
            yield from self._serve(request)
        self._close()

    def _serve(self, request: Request) -> Waits:
        try:
            result = yield from self._script(request.script)
        except Exception as error:  # noqa: BLE001  it must not end the loop
            if self._is_lost(error):
                self._drop(error)
                request.lost()
                return
            if not isinstance(error, psycopg.Error):
                _log.exception("a script of statements raised; its transaction is rolled back")
            request.refused(error)
        else:
            request.done(result)

    def _is_lost(self, error: Exception) -> bool:
        """Return whether the connection is lost; False for a value that cannot even be sent."""
        pg = self._pg
        if pg is None or pg.status != pq.ConnStatus.OK:
            return True
        if isinstance(error, psycopg.DataError) or not isinstance(error, psycopg.Error):
            return False
        return error.sqlstate is None

    def _script(self, script: scripts.Script[Any]) -> Waits:
        assert self._pg is not None
        self._depth = 0
        try:
            statement = next(script)
            while True:
                try:
                    rows = yield from self._execute(statement)
                except psycopg.Error as error:
                    if self._is_lost(error):
                        raise
                    statement = script.throw(error)
                else:
                    statement = script.send(rows)
        except StopIteration as end:
            return end.value
        except Exception as error:
            if not self._is_lost(error) and self._pg.transaction_status != 0:
                self._pg.send_query(b"ROLLBACK")
                yield from self._reply()
            raise

    def _execute(self, statement: scripts.Statement) -> Waits:
        assert self._pg is not None
        if statement in (scripts.BEGIN, scripts.COMMIT, scripts.ROLLBACK):
            self._pg.send_query(self._bounds(statement))
            yield from self._reply()
            return []
        if self._begin and not self._depth:
            return (yield from self._execute_apart(statement))
        if self._pg.parameter_status(b"client_encoding") != b"UTF8":
            # A trigger of the app has changed the encoding, so later texts would be misread.
            self._pg.send_query(b"SET client_encoding TO UTF8")
            yield from self._reply()
        text, names = self._numbered(statement.text)
        values, kinds = _dumped([statement.parameters[name] for name in names])
        if self._begin:
            self._pg.send_query_params(text, values, param_types=kinds)
            result = yield from self._reply()
        else:
            result = yield from self._prepared_reply(text, values, kinds)
        return _raw(result) if statement.is_raw else _loaded(result)

    def _prepared_reply(
        self, text: bytes, values: list[bytes | None], kinds: list[int]
    ) -> Generator[io_loop.Wait, bool, abc.PGresult]:
        """Execute a statement that this connection prepares at its first use.

        After a newer release or the app has added a column, the server refuses prepared statements
        that return all columns of the table. They are then prepared again.
        """
        pg, key = cast("abc.PGconn", self._pg), (text, tuple(kinds))
        while True:
            is_new = key not in self._prepared
            if is_new:
                name = b"s%d" % next(self._numbers)
                pg.send_prepare(name, text, kinds)
                yield from self._reply()
                self._prepared[key] = name
            pg.send_query_prepared(self._prepared[key], values)
            try:
                return (yield from self._reply())
            except pg_errors.FeatureNotSupported:
                del self._prepared[key]
                if is_new or self._depth:  # in a transaction, the error has aborted it
                    raise

    def _execute_apart(self, statement: scripts.Statement) -> Waits:
        """Execute a statement in a transaction of its own, with settings local to it."""
        try:
            yield from self._execute(scripts.BEGIN)
            rows = yield from self._execute(statement)
        except psycopg.Error as error:
            if not self._is_lost(error):
                yield from self._execute(scripts.ROLLBACK)
            raise
        yield from self._execute(scripts.COMMIT)
        return rows

    def _bounds(self, statement: scripts.Statement) -> bytes:
        """Return the command that opens or ends a transaction, or a savepoint inside one."""
        if statement is scripts.BEGIN:
            self._depth += 1
            first = self._begin or statement.text
            return first if self._depth == 1 else b"SAVEPOINT q%d" % self._depth
        depth, self._depth = self._depth, self._depth - 1
        if depth == 1:
            return statement.text
        release = b"RELEASE q%d" % depth
        return release if statement is scripts.COMMIT else b"ROLLBACK TO q%d; " % depth + release

    def _reply(self) -> Waits:
        """Wait for the end of a reply; return its last result, or raise its error."""
        pg = cast("abc.PGconn", self._pg)
        self.waits_since = clock.boot_s()
        self._loop.wake_at(self.waits_since + self._answer_s)
        try:
            fd = pg.socket
            while pg.flush():
                yield fd, io_loop.READ | io_loop.WRITE
                pg.consume_input()
            found: abc.PGresult | None = None
            while True:
                while pg.is_busy():
                    yield fd, io_loop.READ
                    pg.consume_input()
                self._take_notifications(pg)
                result = pg.get_result()
                if result is None:
                    break
                if found is None or found.status in _GOOD:
                    found = result
        finally:
            self.waits_since = math.inf
        assert found is not None
        if found.status not in _GOOD:
            raise pg_errors.error_from_result(found, encoding="utf-8")
        return found

    def _take_notifications(self, pg: abc.PGconn) -> None:
        while (note := pg.notifies()) is not None:
            self._source.notified(note.relname.decode(), note.extra.decode())

    # --- Opening and closing.

    def _open(self) -> Waits:
        if self._retry_at:
            yield None
            return
        try:
            yield from self._connect()
            yield from self._set_up()
        except psycopg.Error as error:
            self._drop(error)
            return
        if self._logged:
            _log.warning("the database is back")
        self._backoff_s, self._logged, self._first_host = BACKOFF_FIRST_S, "", 0
        self._source.connected()

    def _connect(self) -> Waits:
        info = database_url.conninfo(self._url or database_url.db_url(), first=self._first_host)
        self._first_host += 1  # for the next attempt, since a silent host may use up all of one
        self._pg = pg = pq.PGconn.connect_start(info.encode())
        self._prepared.clear()
        pg.nonblocking = 1
        self.waits_since = clock.boot_s()
        self._loop.wake_at(self.waits_since + self._answer_s)
        try:
            while (state := pg.connect_poll()) != pq.PollingStatus.OK:
                if state == pq.PollingStatus.FAILED:
                    raise psycopg.OperationalError(pg.get_error_message())
                reading = state == pq.PollingStatus.READING
                # libpq may have closed one socket and opened another of the same number.
                self.flow.let_go()
                yield pg.socket, io_loop.READ if reading else io_loop.READ | io_loop.WRITE
        finally:
            self.waits_since = math.inf

    def _set_up(self) -> Waits:
        pg = cast("abc.PGconn", self._pg)
        encoding = pg.parameter_status(b"server_encoding")
        name = (pg.db or b"").decode()
        if why := pool.refusal(encoding.decode() if encoding else None, name):
            raise errors.InvalidConfig(why)
        given = pool.settings(lock_s=pool.LOOP_LOCK_S)
        self._depth, self._begin = 0, b""
        if given["is_local"]:
            texts = {name.encode(): b"%d" % value for name, value in given.items()}
            self._begin = _BEGIN + statements.sessions.set_up.text % texts
            return
        yield from self._execute(scripts.Statement(statements.sessions.set_up.text, given))
        for channel in self._channels:
            pg.send_query(b"LISTEN " + pq.Escaping(pg).escape_identifier(channel.encode()))
            yield from self._reply()
        for lock in self._locks:
            hold = scripts.Statement(statements.sessions.hold.text, {"lock": lock})
            yield from self._execute(hold)

    def _drop(self, error: Exception | None) -> None:
        """Close the connection, and open the next one after a pause."""
        was_open = self._pg is not None
        self._close()
        if error is not None:
            why = self._cut_for or " ".join(str(error).split()) or type(error).__name__
            self._cut_for = ""
            # During an outage the message changes, for example from "closed" to "starting up".
            logged = getattr(error, "sqlstate", None) or "away"
            if self._waits is not None:
                self._waits(why)
            elif self._logged != logged:
                self._logged = logged
                _log.warning("waiting for the database: %s", why)
            pause_s = self._backoff_s * random.uniform(0.5, 1.0)  # noqa: S311  jitter
            self._retry_at = clock.boot_s() + pause_s
            self._loop.wake_at(self._retry_at)
            self._backoff_s = min(BACKOFF_MAX_S, self._backoff_s * 2)
        if was_open:
            self._source.disconnected()

    def _close(self) -> None:
        # libpq may have closed its socket by itself, and the next one may get the same number.
        self.flow.let_go()
        pg, self._pg = self._pg, None
        if pg is not None:
            pg.finish()

    def _numbered(self, text: bytes) -> tuple[bytes, list[str]]:
        """Return a statement with `$1` for the first parameter, and the names in this order."""
        if (known := self._parsed.get(text)) is None:
            names: list[str] = []

            def number(match: re.Match[str]) -> str:
                if (name := match[1]) is None:
                    return "%"
                if name not in names:
                    names.append(name)
                return f"${names.index(name) + 1}"

            known = _PARAMETER.sub(number, text.decode()).encode(), names
            self._parsed[text] = known
        return known


def _dumped(values: Sequence[Any]) -> tuple[list[bytes | None], list[int]]:
    """Return parameters as text, and their types. Raises `DataError` for a text with a NUL."""
    found: list[bytes | None] = []
    kinds: list[int] = []
    for value in values:
        kind = _UNKNOWN
        if value is None or isinstance(value, bytes):
            text = value
        elif isinstance(value, str):
            text = _encoded(value)
        elif isinstance(value, bool):
            text, kind = b"t" if value else b"f", _BOOL
        elif isinstance(value, int):
            text, kind = b"%d" % value, _INT8
        elif isinstance(value, float):
            text, kind = repr(value).replace("inf", "Infinity").encode(), _FLOAT8
        else:
            items = [*cast("Sequence[Any]", value)]
            numbers = any(isinstance(each, int) for each in items)
            text, kind = _encoded(_array(items)), _INTS if numbers else _TEXTS
        if text is not None and b"\0" in text:
            raise psycopg.DataError("PostgreSQL text cannot have a NUL (0x00) byte")
        found.append(text)
        kinds.append(kind)
    return found, kinds


def _encoded(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise psycopg.DataError(f"PostgreSQL text is UTF-8: {error}") from None


def _array(items: Sequence[Any]) -> str:
    def quoted(item: Any) -> str:
        if item is None:
            return "NULL"
        text = str(item).replace("\\", "\\\\").replace('"', '\\"')
        return f'"{text}"'

    return f"{{{','.join(map(quoted, items))}}}"


_ADAPTERS: Final = adapt.AdaptersMap(psycopg.adapters)
pool.install_loaders(cast("Any", _ADAPTERS))


def _loaded(result: abc.PGresult) -> list[Mapping[str, Any]]:
    """Return the rows of a result as dicts of Python values."""
    if result.status != pq.ExecStatus.TUPLES_OK or not result.ntuples:
        return []
    loader: Any = adapt.Transformer(_ADAPTERS)
    loader.set_pgresult(result)
    names = [(result.fname(column) or b"").decode() for column in range(result.nfields)]

    def made(values: Sequence[Any]) -> dict[str, Any]:
        return dict(zip(names, values, strict=True))

    return loader.load_rows(0, result.ntuples, made)


def _raw(result: abc.PGresult) -> list[tuple[bytes | None, ...]]:
    value, columns = result.get_value, range(result.nfields)
    return [tuple(value(row, column) for column in columns) for row in range(result.ntuples)]
