"""Send and list events, which handlers wait for by `steps.wait_for_event`.

Events are stored, so an event that was sent before the wait counts. Only the first event of a name
and key is stored; it is deleted after NODE_EVENT_RETENTION_DAYS.
"""

from __future__ import annotations

import logging
from typing import Any

from queue_workflows import db, errors
from queue_workflows.dag import payload
from queue_workflows.db import check_violations, statements
from queue_workflows.tasks import attempt_requests
from queue_workflows.types import Rows

_log = logging.getLogger(__name__)
VALUE_BYTES = 1 << 20
"""The most bytes of a value as JSON; the table has the same bound."""
WAKE_BATCH = 1000
"""The most steps that one call wakes; an orchestrator wakes the others."""
_MAY_NOT = "42501"
"""The SQLSTATE of a missing privilege, for which an orchestrator wakes the waiting steps."""


@check_violations.translated()
def send(name: str, *, key: str | int | None = None, value: Any = None, conn: Any = None) -> bool:
    """Send an event and return True; False if one with this name and key was sent before.

    The jobs that wait for it can be claimed soon after the commit. The handlers get `value`, JSON
    of at most MAX_PAYLOAD_KB and 1 MiB. With `conn` (psycopg, SQLAlchemy, Django), join its
    transaction. Raises `StepRefused` for a bad name or key, and `InvalidPayload` (ValueErrors).
    """
    name, key = attempt_requests.checked_name(name), attempt_requests.checked_key(key)
    text = payload.encode(value, f"value of event {name!r}")
    if len(text) > VALUE_BYTES:
        raise errors.InvalidPayload(
            f"event {name!r}: its value is larger than 1 MiB; store a path instead"
        )
    with db.transaction(conn) as own:
        sent = statements.events.send(own, name=name, key=key, value=text) is not None
    if sent and conn is None:
        try:
            with db.statement() as own:
                statements.events.wake_waiting(own, name=name, key=key, most=WAKE_BATCH)
        except db.Error as error:
            if error.sqlstate != _MAY_NOT:
                _log.warning("event %r is stored, its waiters are woken later: %s", name, error)
    return sent


async def send_async(
    name: str, *, key: str | int | None = None, value: Any = None, conn: Any = None
) -> bool:
    """Do as `send` does, without blocking the event loop."""
    return await db.call_async(send, conn, name, key=key, value=value)


def list(  # noqa: A001  the verb that users look for
    name: str | None = None, *, limit: int = 100, conn: db.Connection | None = None
) -> Rows:
    """Return the newest events, with `name`, `key`, `value` (as JSON text) and `created_at`.

    With `name`, return only events of this name.
    """
    if not payload.is_storable(name):
        return []
    with db.transaction(conn) as own:
        return statements.events.newest(own, name=name, limit=limit)
