"""Run a claimed node job in this process, from its inputs to the record of its outcome."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable
from typing import Any

from queue_workflows import config, db, errors
from queue_workflows.claim import job_tables, manual_claims, outcomes, record
from queue_workflows.dag import answers, confinement, typed_values
from queue_workflows.db import statements
from queue_workflows.dispatch import run_cache
from queue_workflows.model_cache import ModelCache, RequiresModels, adapted
from queue_workflows.run import node_call
from queue_workflows.runtime import log_context
from queue_workflows.tasks import handlers
from queue_workflows.types import JsonDict, Row

_log = logging.getLogger(__name__)


def _ignore(*_: object, **__: object) -> None:
    return


def execute_node(
    job: Row,
    *,
    model_cache: RequiresModels | None = None,
    cancel_event: threading.Event | None = None,
    status_callback: Callable[..., object] | None = None,
) -> str:
    """Run a node job and record how it ended, fenced by its claim; claim it if it is queued.

    Return `"completed"` (also for a parked input node), `"failed"`, or `"skipped"` if the job was
    cancelled, or if its handler did not run because the job cannot be claimed, has ended or is
    claimed by another process. `model_cache` is any object with `require_model(id)`; its other
    members are used if present. `cancel_event` ends a generator at its next yield.
    """
    claimed = manual_claims.take(job_tables.NODE_JOBS, job)
    if claimed is None:
        return "skipped"
    job, lease = claimed, job_tables.lease_of(job_tables.NODE_JOBS, claimed)
    cache = adapted(model_cache)
    with node_call.keep_loaded(cache):
        outcome = run_handler(
            job, model_cache=cache, cancel_event=cancel_event, status_callback=status_callback
        )
    with db.transaction() as conn:
        recorded = record.record(conn, lease, outcomes.without_others(outcome))
    if recorded == "completed" and outcome.kind == "completed":
        call_completed_hook(job, outcome)
    return recorded


def call_completed_hook(job: Row, outcome: outcomes.Outcome) -> None:
    """Call the app's `on_node_completed` after the commit; its errors are logged and dropped."""
    hook = config.get_config().on_node_completed
    if hook is None:
        return
    try:
        rows = _full_rows(job)
        hook(rows["job"], rows["run"], outcome.value)
    except (Exception, SystemExit):  # noqa: BLE001  the boundary around app code
        _log.exception(
            "on_node_completed for node %s failed",
            job["node_id"],
            extra=log_context.ids_of_job(job),
        )


def run_handler(
    job: Row,
    *,
    model_cache: ModelCache | None = None,
    cancel_event: threading.Event | None = None,
    status_callback: Callable[..., object] | None = None,
) -> outcomes.Outcome:
    """Run the handler of a claimed job and return its outcome, also if it raises; write nothing."""
    cancel = cancel_event or threading.Event()
    if (refused := node_call.refused(job)) is not None:
        return node_call.unless_cancelled(cancel, refused)
    if job["node_module"].startswith(answers.MODULE):
        return outcomes.Outcome("parked", 0.0)
    link = _Link(job, cancel, status_callback or _ignore)
    with contextlib.closing(handlers.Runner()) as runner:
        return node_call.NodeCall(job, link, model_cache).run(runner)


def resolve_inputs_for_job(job_id: str, *, job: Row | None = None) -> JsonDict:
    """Return the inputs of a job, by resolving its template against the present context.

    Raises `UnknownJob` (a KeyError), and `UnreadableRow` (an `InvalidPayload`) for stored inputs
    that cannot be loaded.
    """
    if job is None:
        with db.transaction() as conn:
            job = statements.nodes.get(conn, job=job_id)
        if job is None:
            raise errors.UnknownJob(f"no node job {job_id!r}")
    found = job
    return node_call.resolve_inputs(found, lambda heads: _context(found, heads))


def _context(job: Row, heads: list[str] | None) -> JsonDict:
    with db.transaction() as conn:
        try:
            return db.run(conn, run_cache.read_context(job["run_id"], heads))
        except errors.UnreadableRow as error:
            raise errors.UnreadableRow(f"run {job['run_id']}: {error}") from None


def _full_rows(job: Row) -> dict[str, Row]:
    with db.transaction() as conn:
        full = statements.nodes.get(conn, job=job["id"])
        run = statements.runs.get(conn, run_id=job["run_id"])
    return {"job": full or job, "run": run or {}}


class _Link:
    """Connects a handler in this process with the database and with its caller.

    The event ends a generator at its next yield. It ends no handler that waits at an await.
    """

    def __init__(self, job: Row, cancel: threading.Event, status: Callable[..., object]) -> None:
        self._job = job
        self.cancel, self.status = cancel, status
        self.ask_step = manual_claims.asker(job_tables.NODE_JOBS, job, cancel.is_set)

    def report_progress(self, value: Any) -> None:
        """Report progress or activity."""
        self.status(value)

    @property
    def interrupted(self) -> str | None:
        """Return `cancelled` once the event is set."""
        return "cancelled" if self.cancel.is_set() else None

    @property
    def cancel_requested(self) -> bool:
        """Return whether the job or its run was cancelled."""
        return self.cancel.is_set()

    def _drop(self, *_: Any, **__: Any) -> None: ...

    note_cursor = send_later = when_interrupted = _drop

    def ask(self, what: str, request: Any) -> Any:
        """Answer a question of the handler; see `node_call.Ask`."""
        job = self._job
        reads: dict[str, Callable[[], Any]] = {
            "context": lambda: _context(job, request),
            "out_dir": lambda: _choose_out_dir(job),
            "rows": lambda: _full_rows(job),
        }
        wait = self.cancel.wait
        return manual_claims.despite_outages(reads[what], self.cancel.is_set, wait)

    def note(self, event_type: str, elapsed_s: float | None) -> None:
        """Record an event about the model, best effort."""
        from queue_workflows import history

        job = self._job
        history.record_event(
            run_id=job["run_id"],
            node_id=job["node_id"],
            event_type=event_type,
            job_id=job["id"],
            attempt=job["attempts"],
            host_label=job["claimed_by"],
            queue=job["queue"],
            model=job["required_model"],
            elapsed_s=elapsed_s,
        )


def _choose_out_dir(job: Row) -> str:
    default = confinement.of_run(job["run_id"])
    with db.statement() as conn:
        stored = statements.runs.set_out_dir(conn, run_id=job["run_id"], out_dir=default)
    return stored or default


def takes_status_callback(body: Callable[..., Any]) -> bool:
    """Return whether a handler reports its progress."""
    return "status_callback" in typed_values.signature(body).names
