"""Let the app hear of completed nodes, in the executors that have run them."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable

from queue_workflows import db, errors
from queue_workflows.engine import job_tables
from queue_workflows.executor import protocol
from queue_workflows.worker import current_job, executors, slot_jobs

_log = logging.getLogger(__name__)


class Announcer:
    """The completed nodes that are announced to the app once they are recorded.

    `free` gives an executor further jobs, which waits for the app's hook if it has one job at a
    time.
    """

    def __init__(
        self,
        connection: Callable[[], db.Connection],
        free: Callable[[executors.Handle], object],
    ) -> None:
        self._connection = connection
        self._free = free
        self._expected: dict[job_tables.Lease, tuple[executors.Handle, int]] = {}

    def expect(self, work: current_job.Work, handle: executors.Handle, key: int) -> None:
        """Note that a node has completed, which is not recorded yet."""
        handle.announcing = not handle.concurrent
        self._expected[work.lease] = handle, key

    def recorded(self, work: current_job.Work, completed: bool) -> None:
        """Announce a node that is recorded; drop its value if it was not recorded as completed."""
        handle, key = self._expected.pop(work.lease, (None, 0))
        if handle is None or handle.lost is not None:
            return
        if completed and self._announce(handle, key, work):
            return
        if handle.concurrent:
            with contextlib.suppress(errors.QueueWorkflowsError):
                handle.forked.jobs.send(protocol.Forget(key))
        handle.announcing = False
        self._free(handle)

    def _announce(self, handle: executors.Handle, key: int, work: current_job.Work) -> bool:
        try:
            rows = slot_jobs.rows(self._connection(), work.job)
            handle.forked.jobs.send(protocol.Announce(key, *rows))
        except (db.Error, errors.QueueWorkflowsError) as error:
            _log.warning("node %s is not announced: %s", work.job["node_id"], error, extra=work.ids)
            return False
        return True
