"""Break connections of this process at statements that the server executes or never sees.

Tests name a statement by its text, by its effect or by its thread, so that no function of the
engine is replaced.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import psycopg
import pytest

from queue_workflows import db

T = TypeVar("T")


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

    def breaking(execute: Callable[[], Any], cursor: psycopg.Cursor[Any], text: str) -> Any:
        if word not in text:
            return execute()
        meanwhile()
        seen.append(text)
        is_meant = nth is None or len(seen) == nth + 1
        found = execute() if executed or not is_meant else None
        if is_meant:
            raise _broken(cursor)
        return found

    with _patched(breaking):
        yield seen
    assert len(seen) > (nth or 0), f"{len(seen)} statements have {word!r}, so none was broken"


@contextmanager
def of_thread(name: str, texts: Sequence[str]) -> Generator[None]:
    """Break the connection at the next statements of a thread, once for each of these errors.

    Fails if the block ends before there were so many.
    """
    left = [*texts]

    def breaking(execute: Callable[[], Any], cursor: psycopg.Cursor[Any], _: str) -> Any:
        if left and threading.current_thread().name == name:
            raise _broken(cursor, left.pop(0))
        return execute()

    with _patched(breaking):
        yield
    assert not left, f"no statement of {name} was broken by {left}"


@contextmanager
def away() -> Generator[None]:
    """Break each connection at its next statement, but those of the thread that enters.

    Fails if the block ends before there was one.
    """
    own, broken = threading.current_thread(), threading.Event()

    def breaking(execute: Callable[[], Any], cursor: psycopg.Cursor[Any], _: str) -> Any:
        if threading.current_thread() is not own:
            broken.set()
            raise _broken(cursor, "the database is away")
        return execute()

    with _patched(breaking):
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

    def look(cursor: psycopg.Cursor[Any], now: bool) -> None:
        current = threading.current_thread()
        meant = current is not caller if thread is None else current.name == thread
        if now and meant and not done.is_set():
            done.set()
            raise _broken(cursor)

    with _looking(is_true, look):
        yield done
    assert done.is_set(), "no statement made it true"


@contextmanager
def states(read: Callable[[db.Connection], T]) -> Generator[list[T]]:
    """Yield what another connection reads after each statement, without repetitions in a row."""
    found: list[T] = []

    def look(_: psycopg.Cursor[Any], now: T) -> None:
        if found[-1:] != [now]:
            found.append(now)

    with _looking(read, look):
        yield found


@contextmanager
def _looking(
    read: Callable[[db.Connection], T], look: Callable[[psycopg.Cursor[Any], T], None]
) -> Generator[None]:
    with db.connect() as own:

        def breaking(execute: Callable[[], Any], cursor: psycopg.Cursor[Any], _: str) -> Any:
            found = execute()
            if cursor.connection is not own:
                look(cursor, read(own))
            return found

        with _patched(breaking):
            yield


@contextmanager
def _patched(
    breaking: Callable[[Callable[[], Any], psycopg.Cursor[Any], str], Any],
) -> Generator[None]:
    real = psycopg.Cursor.execute

    def execute(cursor: psycopg.Cursor[Any], query: Any, *args: Any, **more: Any) -> Any:
        text = query.decode() if isinstance(query, bytes) else str(query)
        return breaking(lambda: real(cursor, query, *args, **more), cursor, text)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(psycopg.Cursor, "execute", execute)
        yield


def _broken(
    cursor: psycopg.Cursor[Any], text: str = "the reply was lost"
) -> psycopg.OperationalError:
    cursor.connection.close()
    return psycopg.OperationalError(text)
