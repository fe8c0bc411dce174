"""Convert a database error about a value, from a type, CHECK or trigger, to a library error."""

from __future__ import annotations

import re
from collections.abc import Generator, Mapping
from contextlib import ContextDecorator, contextmanager
from typing import Any

import psycopg

from queue_workflows import errors

_CHECK_VIOLATION = "23514"
_BAD_VALUES = frozenset({"22003", "22007", "22008", "22P02", "42846"})
"""SQLSTATEs for out of range, wrong format or impossible time, invalid text, and missing cast."""
_UNIQUE_VIOLATION = "23505"
_PAYLOAD = re.compile(r"\w+\.\w+ (?:is nested deeper|holds a number beyond|has \d+ bytes of JSON)")
_COLUMN = re.compile(r"(\w+)\.\w+ must be ")
_CONSTRAINT = re.compile(r"queue_workflows_\w+|\w+_bound")
_JOBS = frozenset({"ingest_jobs", "workflow_node_jobs"})


class NodeTaken(psycopg.errors.UniqueViolation, errors.NodeTaken):
    """The run already has a node with this id; apps of 0.3.0 catch it as a UniqueViolation."""


class _Translated(ContextDecorator):
    """A context manager without state, since a generator would cost each enqueue 1 us."""

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: object
    ) -> None:
        found = _translation(error) if isinstance(error, Exception) else None
        if found is not None:
            raise found from error


_TRANSLATED = _Translated()


def translated() -> _Translated:
    """Raise `InvalidPayload`, `InvalidJob` or `InvalidConfig` for values that the tables refuse.

    It is a context manager and a decorator. The cause is the error of psycopg, SQLAlchemy or
    Django. Other errors pass through, also a refusal by a CHECK or a trigger of the app.
    """
    return _TRANSLATED


@contextmanager
def of_columns(table: str, values: Mapping[str, Any]) -> Generator[None]:
    """Raise `InvalidConfig` if any of these values does not fit its column's type.

    The server does not name the column, so the message shows every number among the values. An
    error that was raised inside a function, for example in a trigger of the app, passes through.
    """
    try:
        yield
    except Exception as error:
        refusal = _refusal(error, *_BAD_VALUES)
        diag: Any = getattr(refusal, "diag", None)
        # The context is empty, names a parameter ($1), or names a function with its arguments.
        if refusal is None or "(" in (getattr(diag, "context", None) or ""):
            raise
        text = str(getattr(diag, "message_primary", None) or refusal).strip().partition("\n")[0]
        numbers = [f"{n}={v!r:.40}" for n, v in values.items() if isinstance(v, (int, float))]
        given = f" ({', '.join(numbers)})" if numbers else ""
        raise errors.InvalidConfig(f"{table}: {text}{given}") from error


def is_violation_of(error: Exception, index: str) -> bool:
    """Return whether an error of any driver reports a violation of this unique index."""
    refusal = _refusal(error, _UNIQUE_VIOLATION)
    return getattr(getattr(refusal, "diag", refusal), "constraint_name", None) == index


def _translation(error: Exception) -> errors.QueueWorkflowsError | None:
    refusal = _refusal(error, _CHECK_VIOLATION)
    if refusal is None:
        return None
    diag: Any = getattr(refusal, "diag", None)
    text = str(getattr(diag, "message_primary", None) or refusal).strip().partition("\n")[0]
    if _PAYLOAD.match(text):
        hint = getattr(diag, "message_hint", None)
        return errors.InvalidPayload(f"{text}. {hint}" if hint else text)
    if (named := _COLUMN.match(text)) is not None:
        kind = errors.InvalidJob if named[1] in _JOBS else errors.InvalidConfig
        return kind(text)
    name = getattr(diag or refusal, "constraint_name", None)
    return errors.InvalidConfig(text) if name and _CONSTRAINT.fullmatch(name) else None


def _refusal(error: BaseException, *states: str) -> BaseException | None:
    """Return the driver's own error with such a SQLSTATE, which a framework may have wrapped."""
    seen: BaseException | None = error
    for _ in range(4):
        if seen is None:
            break
        # psycopg and asyncpg, then psycopg2.
        state = getattr(seen, "sqlstate", None) or getattr(seen, "pgcode", None)
        if state in states and (hasattr(seen, "diag") or hasattr(seen, "constraint_name")):
            return seen
        seen = getattr(seen, "orig", None) or seen.__cause__
    return None
