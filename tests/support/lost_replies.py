"""Break connections of this process at statements that the server executes or never sees.

Tests name a statement by its text, by its effect or by its thread, whether a connection of psycopg
or the link of a worker's loop executes it.
"""

from __future__ import annotations

import select
import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import psycopg
import pytest

from queue_workflows import db
from queue_workflows.db import link
from queue_workflows.runtime import io_loop

T = TypeVar("T")
Breaking = Callable[[Callable[[], Any], Any, str], Any]
"""Executes a statement or breaks it; takes what executes it, its connection, and its text."""


@contextmanager
def at_statement(
    word: str,
    nth: int | None = 0,
    *,
    executed: bool = False,
    meanwhile: Callable[[], object] = lambda: None,
) -> Generator[list[str]]:
    """Break the connection at the statement number `nth` (None: each) whose text has this word.

    `meanwhile` is called at each of these statements. Yield the texts of those there were. Fails if
    the block ends before the statement that is meant.
    """
    seen: list[str] = []

    def breaking(execute: Callable[[], Any], conn: Any, text: str) -> Any:
        if word not in text:
            return execute()
        meanwhile()
        seen.append(text)
        is_meant = nth is None or len(seen) == nth + 1
        found = execute() if executed or not is_meant else None
        if is_meant:
            raise broken_error(conn)
        return found

    with around_statements(breaking):
        yield seen
    assert len(seen) > (nth or 0), f"{len(seen)} statements have {word!r}, so none was broken"


@contextmanager
def of_thread(name: str, texts: Sequence[str]) -> Generator[None]:
    """Break the connection at the next statements of a thread, once for each of these errors.

    Of the links of a worker's loop, only the first one that executes a statement is broken. Fails
    if the block ends before there were so many.
    """
    left, links = [*texts], list[link.Link]()

    def breaking(execute: Callable[[], Any], conn: Any, _: str) -> Any:
        if isinstance(conn, link.Link) and conn not in links[:1]:
            links.append(conn)
        if left and threading.current_thread().name == name and conn not in links[1:]:
            raise broken_error(conn, left.pop(0))
        return execute()

    with around_statements(breaking):
        yield
    assert not left, f"no statement of {name} was broken by {left}"


@contextmanager
def away() -> Generator[None]:
    """Break each connection at its next statement, but those of the thread that enters.

    Fails if the block ends before there was one.
    """
    own, broken = threading.current_thread(), threading.Event()

    def breaking(execute: Callable[[], Any], conn: Any, _: str) -> Any:
        if threading.current_thread() is not own:
            broken.set()
            raise broken_error(conn, "the database is away")
        return execute()

    with around_statements(breaking):
        yield
    assert broken.is_set(), "no statement of another thread was broken"


@contextmanager
def after(
    is_true: Callable[[db.Connection], bool], thread: str | None = None
) -> Generator[threading.Event]:
    """Break the connection at the statement of another thread that made this true, once.

    `thread`: the name of the thread, where statements of several may be under way. Yield what is
    set by then. Fails if the block ends before.
    """
    done, caller = threading.Event(), threading.current_thread()

    def look(conn: Any, now: bool) -> None:
        current = threading.current_thread()
        meant = current is not caller if thread is None else current.name == thread
        if now and meant and not done.is_set():
            done.set()
            raise broken_error(conn)

    with _looking(is_true, look):
        yield done
    assert done.is_set(), "no statement made it true"


@contextmanager
def states(read: Callable[[db.Connection], T]) -> Generator[list[T]]:
    """Yield what another connection reads after each statement, without repetitions in a row."""
    found: list[T] = []

    def look(_: Any, now: T) -> None:
        if found[-1:] != [now]:
            found.append(now)

    with _looking(read, look):
        yield found


@contextmanager
def _looking(read: Callable[[db.Connection], T], look: Callable[[Any, T], None]) -> Generator[None]:
    with db.connect() as own:

        def breaking(execute: Callable[[], Any], conn: Any, _: str) -> Any:
            found = execute()
            if conn is not own:
                look(conn, read(own))
            return found

        with around_statements(breaking):
            yield


@contextmanager
def around_statements(breaking: Breaking) -> Generator[None]:
    """Let each statement of this process be executed by `breaking`, or broken."""
    real, waits = psycopg.Cursor.execute, getattr(link.Link, LINKS)

    def execute(cursor: psycopg.Cursor[Any], query: Any, *args: Any, **more: Any) -> Any:
        text = query.decode() if isinstance(query, bytes) else str(query)
        return breaking(lambda: real(cursor, query, *args, **more), cursor.connection, text)

    def execute_on_link(own: link.Link, statement: db.Statement) -> io_loop.Waiting:
        text = statement.text.decode()
        return breaking(lambda: _blocking(waits(own, statement)), own, text)
        yield None  # it waits for nothing, but its caller iterates it

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(psycopg.Cursor, "execute", execute)
        patch.setattr(link.Link, LINKS, execute_on_link)
        yield


def _blocking(waiting: io_loop.Waiting) -> Any:
    """Run to its end what waits for a descriptor."""
    try:
        wait = next(waiting)
        while True:
            assert wait is not None
            poll = select.poll()
            poll.register(wait[0], select.POLLIN | (select.POLLOUT if wait[1] != 1 else 0))
            poll.poll()
            wait = waiting.send(True)
    except StopIteration as end:
        return end.value


LINKS = "_execute"
"""What executes a statement on a link."""


def broken_error(conn: Any, text: str = "the reply was lost") -> psycopg.OperationalError:
    """Close a connection of psycopg; return the error of one that was lost."""
    if not isinstance(conn, link.Link):
        conn.close()  # a link closes by itself
    return psycopg.OperationalError(text)
