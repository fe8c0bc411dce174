"""Record in a job's history how the process that ran it died."""

from __future__ import annotations

import logging

from queue_workflows import db, errors
from queue_workflows.dag import payload
from queue_workflows.engine import claim_isolation, job_events, job_tables
from queue_workflows.types import JsonDict, Row

_log = logging.getLogger(__name__)


def note(
    table: job_tables.JobTable,
    row: Row,
    worker_id: str | None,
    death: JsonDict,
    how: str,
) -> db.Script[None]:
    """Record a job's `death` event; if the database refuses it, log that and continue."""
    beat = row["heartbeat_at"]
    more = {"progress": row["progress"], "last_beat": beat and beat.isoformat()}
    try:
        detail = payload.encode(death | more, "detail")
    except errors.InvalidPayload:
        # Plain SQL may write progress that is too long for an event's detail.
        more["progress"] = payload.error_text(repr(row["progress"]))[:1000]
        detail = payload.encode(death | more | {"gpu": None}, "detail")
    yield db.BEGIN
    try:
        job = row | {"worker_id": worker_id}
        yield from job_events.note(table, job, "death", detail=detail, error=how)
    except db.Error as error:
        if not claim_isolation.is_about_rows(error):
            raise
        yield db.ROLLBACK
        _log.warning("the death of job %r is not recorded: %s", row["id"], str(error).strip())
    else:
        yield db.COMMIT
