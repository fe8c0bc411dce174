"""The orchestrator's duties: start runs, dispatch, take answers, and every sweep."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager

from queue_workflows import config, db, dispatcher, input_listener, node_queue
from queue_workflows.runtime import service
from queue_workflows.store import nodes, outbox, workers

_log = logging.getLogger(__name__)
CHANNEL = "orchestrator_work"


class NodePool:
    """Runs the orchestrator's threads; any number of pools may work on one database.

    `register_builtins` is called once at start. `cpu_workers` and `gpu_workers` are accepted and
    ignored: workers are processes of their own.
    """

    def __init__(
        self,
        register_builtins: Callable[[], None] | None = None,
        *,
        cpu_workers: int | None = None,
        gpu_workers: int | None = None,
    ) -> None:
        del cpu_workers, gpu_workers
        self._register = register_builtins
        self._conn: db.Connection | None = None
        self._waiting_said = False
        self._stopped = threading.Event()
        self._inputs = input_listener.InputListener(begin=self._begin)
        self._listener = db.listen(CHANNEL, poll_s=config.DISPATCH_POLL_S.read)
        self._dispatch = service.Follow("dispatch", self._listener, self._act)
        self._sweeps = service.Loop("sweeps", maintenance())

    def start(self) -> None:
        """Start dispatching and sweeping."""
        if self._register is not None:
            self._register()
        self._dispatch.start()
        self._sweeps.start()

    def stop(self) -> None:
        """Stop both, finish the decision under way, and close the connection."""
        self._stopped.set()
        self._dispatch.stop()
        self._sweeps.stop()
        self._drop()

    def _begin(self) -> AbstractContextManager[db.Connection]:
        if self._conn is None or self._conn.closed:
            self._conn = db.connect()
        return dispatcher.on_connection(self._conn)()

    def _drop(self) -> None:
        conn, self._conn = self._conn, None
        if conn is not None:
            conn.close()

    def _act(self, wake: db.Wake) -> None:
        kinds = {text for _, text in wake.notified}
        try:
            if wake.reason == "notify":
                self.work(runs="run" in kinds, events="event" in kinds, inputs="input" in kinds)
            else:
                self.look()
        except db.Error:
            self._drop()
            raise

    def look(self) -> None:
        """See what there is to do, in one statement, and do it."""
        if self._conn is None or self._conn.closed:
            self._conn = db.connect()
        seen = outbox.look(self._conn)
        if seen.due:
            outbox.promote_due(self._conn)
        self.work(runs=seen.runs or seen.due, events=seen.events, inputs=seen.submissions)

    def work(self, *, runs: bool, events: bool, inputs: bool) -> None:
        """Start runs, take answers, dispatch events, until nothing of it is left."""
        while runs and not self._stopped.is_set():
            started, waiting = dispatcher.start_queued(begin=self._begin)
            self._say_waiting(waiting)
            runs = started > 0
        if inputs:
            self._inputs.process_all(self._stopped)
        while events and not self._stopped.is_set():
            events = dispatcher.drain_outbox(begin=self._begin) >= dispatcher.RUNS_A_ROUND

    def _say_waiting(self, run_ids: list[str]) -> None:
        if run_ids and not self._waiting_said:
            self._waiting_said = True
            _log.warning(
                "queued runs wait (%s and others): this orchestrator has no workflow provider; start "
                "it with --app, or call set_workflow_provider()",
                run_ids[0],
            )


def maintenance() -> list[service.Task]:
    """Every sweep with its interval; a new one is one line."""
    return [
        service.Task("reclaim", config.LEASE_RECLAIM_INTERVAL_S.read, reclaim),
        service.Task(
            "dead-workers",
            config.DEAD_WORKER_SWEEP_INTERVAL_S.read,
            node_queue.flag_stale_workers_holding_running_jobs,
        ),
        service.Task("orphans", config.LEASE_RECLAIM_INTERVAL_S.read, sweep_orphans),
        service.Task("prune-events", config.NODE_EVENT_PRUNE_INTERVAL_S.read, prune_events),
        service.Task("prune-workers", 3600.0, prune_workers),
    ]


def reclaim() -> None:
    """Take back the jobs of both families whose lease has lapsed."""
    for row in node_queue.reclaim_expired_leases():
        _log.warning(
            "node %s of run %s: lease lapsed, now %s", row["node_id"], row["run_id"], row["status"]
        )
    for row in node_queue.reclaim_expired_ingest_leases():
        _log.warning("ingest job %s: lease lapsed, now %s", row["id"], row["status"])


def sweep_orphans() -> None:
    """Cancel jobs that came in beside the end of their run."""
    with db.transaction() as conn:
        nodes.sweep_orphans(conn)


def prune_events() -> None:
    """Delete node events past NODE_EVENT_RETENTION_DAYS."""
    node_queue.prune_node_events(config.NODE_EVENT_RETENTION_DAYS.read())


def prune_workers() -> None:
    """Delete worker rows not seen for a day."""
    with db.transaction() as conn:
        workers.prune(conn)
