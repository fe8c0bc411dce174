"""Takes people's answers into the nodes that wait for them."""

from __future__ import annotations

import logging
import threading

from queue_workflows import config, db, dispatcher, errors
from queue_workflows.runtime import service
from queue_workflows.store import nodes, payload, submissions
from queue_workflows.types import Row

_log = logging.getLogger(__name__)
NOT_PARKED_RETRY_S = 1.0
REFUSED_RETRY_S = 60.0


class InputListener:
    """Processes `workflow_input_submissions`.

    Start it alone, or let a `NodePool` call `process_all`.
    """

    def __init__(self, *, begin: dispatcher.Begin = db.transaction) -> None:
        self._begin = begin
        self._loop = service.Loop(
            "input-listener",
            [service.Task("inputs", config.DISPATCH_POLL_S.read, self.process_all)],
        )

    def start(self) -> None:
        """Poll in a thread of its own."""
        self._loop.start()

    def stop(self) -> None:
        """End that thread."""
        self._loop.stop()

    def process_all(self, stopped: threading.Event | None = None) -> int:
        """Process answers until none is due; how many."""
        count = 0
        while not (stopped and stopped.is_set()) and self.process_once():
            count += 1
        return count

    def process_once(self) -> bool:
        """Take one answer; False when none is due.

        The answer, the node's completion and its outbox row are one transaction. One that the
        database does not take rests for a minute, so that those behind it have their turn. Then
        the run's outbox is drained as far as it needs no host code; the orchestrator does the rest.
        """
        row: Row | None = None
        advanced = False
        try:
            with self._begin() as conn:
                row = submissions.claim(conn, config.SUBMISSION_RECLAIM_S.read())
                if row is None:
                    return False
                advanced = _take(conn, row)
        except (db.OperationalError, db.InterfaceError):
            raise
        except db.Error as error:
            if row is None:
                raise
            self._postpone(row, error)
        if advanced:
            try:
                dispatcher.drain_run(row["run_id"], begin=self._begin, nowait=True)
            except errors.QueueWorkflowsError as error:
                _log.warning("run %s goes on by its outbox: %s", row["run_id"], error)
        return True

    def _postpone(self, row: Row, error: db.Error) -> None:
        text = payload.error_text(error).strip()
        _log.error("answer %s to node %r is not taken: %s", row["id"], row["node_id"], text)
        with self._begin() as conn:
            submissions.postpone(conn, row["id"], after_s=REFUSED_RETRY_S, error=text)


def _take(conn: db.Connection, row: Row) -> bool:
    """Whether the node was completed by this answer; otherwise the row says why not."""
    job = nodes.get_by_node(conn, row["run_id"], row["node_id"])
    where = f"node {row['node_id']!r} of run {row['run_id']!r}"
    if job is None:
        submissions.refuse(conn, row["id"], f"there is no {where}")
        return False
    if job["status"] in ("queued", "running"):
        submissions.postpone(
            conn, row["id"], after_s=NOT_PARKED_RETRY_S, error=f"{where} does not wait yet"
        )
        return False
    try:
        delta = dispatcher.answer_delta(job, row["value"])
    except errors.InvalidPayload as error:
        submissions.refuse(conn, row["id"], payload.error_text(error))
        return False
    if nodes.answer(conn, job["id"], delta) is None:
        submissions.refuse(conn, row["id"], f"{where} is {job['status']}: it takes no answer now")
        return False
    submissions.processed(conn, row["id"])
    return True
