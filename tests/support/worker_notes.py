"""Write the note on disk that a worker leaves when it exits for want of the database."""

from __future__ import annotations

from queue_workflows.types import Row
from queue_workflows.worker import notes
from tests.support import transitions


def leave(*worker_ids: str) -> None:
    """Leave the note of an exit of these workers, which held no claims."""
    notes.write_note(worker_ids, [])


def leave_with(worker_id: str, *jobs: Row) -> None:
    """Leave the note of an exit of a worker that had claimed these jobs."""
    notes.write_note([worker_id], [*map(transitions.lease_of, jobs)])
