"""Convert a refusal by a CHECK or a bounding trigger of the engine's tables to a library error."""

from __future__ import annotations

import re
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from queue_workflows import errors

_CHECK_VIOLATION = "23514"
_PAYLOAD = re.compile(r"\w+\.\w+ (?:is nested deeper|holds a number beyond|has \d+ bytes of JSON)")
_COLUMN = re.compile(r"(\w+)\.\w+ must be ")
_CONSTRAINT = re.compile(r"queue_workflows_\w+|\w+_bound")
_JOBS = frozenset({"ingest_jobs", "workflow_node_jobs"})


@contextmanager
def translated() -> Generator[None]:
    """Raise `InvalidPayload`, `InvalidJob` or `InvalidConfig` for values that the tables refuse.

    The driver's error is its cause, be it psycopg's, SQLAlchemy's or Django's. Other errors pass
    through, also a refusal by a CHECK or a trigger of the app.
    """
    try:
        yield
    except Exception as error:
        found = _translation(error)
        if found is None:
            raise
        raise found from error


def _translation(error: Exception) -> errors.QueueWorkflowsError | None:
    refusal = _refusal(error)
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


def _refusal(error: BaseException) -> BaseException | None:
    """Return the driver's own check violation, which a framework may have wrapped."""
    seen: BaseException | None = error
    for _ in range(4):
        if seen is None:
            break
        # psycopg and asyncpg, then psycopg2.
        state = getattr(seen, "sqlstate", None) or getattr(seen, "pgcode", None)
        if state == _CHECK_VIOLATION and (
            hasattr(seen, "diag") or hasattr(seen, "constraint_name")
        ):
            return seen
        seen = getattr(seen, "orig", None) or seen.__cause__
    return None
