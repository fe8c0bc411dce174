"""Queue what handlers in executors ask, and send them the answers of `slot_jobs`."""

from __future__ import annotations

from typing import Any

from queue_workflows import db, errors
from queue_workflows.executor import protocol
from queue_workflows.worker import claimer, current_job, executor_traffic, executors, slot_jobs


class Answers:
    """The questions of handlers; for the thread of the executors."""

    def __init__(self, claimer_: claimer.Claimer, traffic: executor_traffic.Traffic) -> None:
        self._claimer = claimer_
        self._traffic = traffic
        self._asks: list[tuple[executors.Handle, current_job.Work, protocol.Ask]] = []

    @property
    def are_due(self) -> bool:
        """Return whether handlers wait for answers."""
        return bool(self._asks)

    def add(self, handle: executors.Handle, work: current_job.Work, ask: protocol.Ask) -> None:
        """Note a question."""
        self._asks.append((handle, work, ask))

    def send(self) -> None:
        """Answer what handlers ask; the questions wait while the database is away."""
        while self._asks:
            handle, work, ask = self._asks[0]
            if handle.get(ask.key) is work and handle.lost is None:
                value, refused = None, None
                try:
                    value = self._answer(work, ask)
                except errors.QueueWorkflowsError as error:
                    refused = str(error)
                except db.Error:
                    self._claimer.lose()
                    raise
                try:
                    handle.forked.jobs.send(protocol.Answer(ask.key, ask.what, value, refused))
                except protocol.ChannelLost as error:
                    self._traffic.lose(handle, error)
                self._traffic.send_rest(handle)
            self._asks.pop(0)

    def _answer(self, work: current_job.Work, ask: protocol.Ask) -> Any:
        conn = self._claimer.connection()
        if ask.request is None:
            return slot_jobs.answer(conn, work.job, ask.what)
        work.beat()
        return slot_jobs.answer_step(conn, work.lease, ask.request)
