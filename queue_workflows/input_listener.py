"""Complete waiting input nodes with people's answers."""

from __future__ import annotations

import logging
import threading

from queue_workflows import config, db, errors
from queue_workflows.claim import recovery, row_isolation
from queue_workflows.dag import payload
from queue_workflows.db import statements
from queue_workflows.dispatch import drain, input_nodes, run_cache
from queue_workflows.runtime import service
from queue_workflows.types import Row

_log = logging.getLogger(__name__)
ANSWER, DRAIN = "answer", "dispatch after an answer of run"
RECLAIM_S = 60.0
"""Age in seconds at which an answer that is still `processing` is taken again."""
NOT_PARKED_RETRY_S = 1.0
REFUSED_RETRY_S = 60.0


class InputListener:
    """Complete input nodes with the rows of `workflow_input_submissions`.

    Call `start` to run it on its own, or let a `NodePool` call `process_all`.
    """

    def __init__(
        self,
        *,
        begin: run_cache.Begin = db.transaction,
        rows: row_isolation.Isolation | None = None,
    ) -> None:
        self._begin = begin
        self._rows = rows or row_isolation.Isolation()
        self._loop = service.Loop(
            "input-listener",
            [service.Task("inputs", config.CLAIM_POLL_S.read, self.process_all)],
        )

    def start(self) -> None:
        """Start the thread that polls for answers."""
        self._loop.start()

    def stop(self) -> None:
        """Stop the thread."""
        self._loop.stop()

    def process_all(self, stopped: threading.Event | None = None, most: int | None = None) -> int:
        """Handle answers until none is due, or `most`; return how many."""
        count = 0
        while count != most and not (stopped and stopped.is_set()) and self.process_once():
            count += 1
        return count

    def process_once(self) -> bool:
        """Take one answer; return False if none is due.

        The answer, the node's completion and its outbox row are one transaction. An answer that
        raises is postponed with back-off, so that it does not delay others; it fails after
        `recovery.MAX_FAILURES`. Then the run's outbox is drained as far as no app code is needed;
        the orchestrator does the rest.
        """
        after_s = RECLAIM_S
        with run_cache.reading(self._begin) as conn:
            submission_id = statements.input_answers.next_due(
                conn, after_s=after_s, set_aside=self._rows.aside(ANSWER)
            )
        if submission_id is None:
            return False
        row = self._rows.attempt(
            ANSWER,
            submission_id,
            lambda: self._take(submission_id, after_s),
            lambda error, _: self._rest(submission_id, error),
        )
        if row is not None:
            self._rows.attempt(DRAIN, row["run_id"], lambda: self._drain(row["run_id"]))
        return True

    def _take(self, submission_id: str, after_s: float) -> Row | None:
        """Take an answer; return its row if it completed the node."""
        with self._begin() as conn:
            row = statements.input_answers.claim(conn, id=submission_id, after_s=after_s)
            return row if row is not None and _take(conn, row) else None

    def _drain(self, run_id: str) -> None:
        try:
            drain.drain_run(run_id, begin=self._begin, nowait=True)
        except errors.QueueWorkflowsError as error:
            _log.warning(
                "run %s is dispatched later, from the outbox: %s",
                run_id,
                error,
                extra={"run_id": run_id},
            )

    def _rest(self, submission_id: str, error: BaseException) -> bool:
        """Count the failure in the answer's row, or fail it after too many; return True."""
        text = row_isolation.described(error)
        _log.error("answer %s could not be taken: %s", submission_id, text)
        with self._begin() as conn:
            failed = (
                statements.input_answers.count_failure(
                    conn, id=submission_id, error=text, after_s=REFUSED_RETRY_S
                )
                or 0
            )
            if failed >= recovery.MAX_FAILURES:
                message = f"poison: it could not be taken in {failed} tries: {text}"
                statements.input_answers.refuse(
                    conn, id=submission_id, error=payload.error_text(message)
                )
        return True


def _take(conn: db.Connection, row: Row) -> bool:
    """Complete the node by this answer; if that fails, store why in its row and return False."""
    job = statements.nodes.get_by_node(conn, run_id=row["run_id"], node_id=row["node_id"])
    where = f"node {row['node_id']!r} of run {row['run_id']!r}"
    if job is None:
        statements.input_answers.refuse(conn, id=row["id"], error=f"there is no {where}")
        return False
    if job["status"] in ("queued", "running"):
        statements.input_answers.postpone(
            conn, id=row["id"], after_s=NOT_PARKED_RETRY_S, error=f"{where} does not wait yet"
        )
        return False
    if job["child_run_id"] is not None:
        error = f"{where} waits for a run: it takes no answer"
        statements.input_answers.refuse(conn, id=row["id"], error=error)
        return False
    try:
        delta = input_nodes.answer_delta(job, row["value"])
    except errors.InvalidPayload as error:
        statements.input_answers.refuse(conn, id=row["id"], error=payload.error_text(error))
        return False
    if (
        statements.input_answers.complete_node(conn, job=job["id"], result=delta, by="input")
        is None
    ):
        statements.input_answers.refuse(
            conn, id=row["id"], error=f"{where} is {job['status']}: it takes no answer now"
        )
        return False
    statements.input_answers.finish(conn, id=row["id"])
    return True
