"""Inject faults into a node: errors, crashes and hangs."""

from __future__ import annotations

import threading
from collections.abc import Generator
from contextlib import contextmanager, nullcontext
from fnmatch import fnmatchcase
from typing import Any

from queue_workflows import config, db, errors, ingest_executor, jobs, runs
from queue_workflows.claim import job_tables, outcomes, record, recovery
from queue_workflows.run import running
from queue_workflows.tasks import handlers
from queue_workflows.types import Row
from queue_workflows.worker import guards

UNTIL = ("cancelled", "budget")


class Fault:
    """A fault for the nodes that a pattern matches, and how many times it still applies."""

    def __init__(self, pattern: str, kind: str, times: int | None, error: Any = None) -> None:
        self.pattern = pattern
        self.kind = kind
        self.times = times
        self.error = error
        self.met = 0
        """How often it applied."""

    def strikes(self, node_id: str) -> bool:
        """Return whether it applies to this node now, and count it."""
        if self.times is not None and self.met >= self.times:
            return False
        if not fnmatchcase(node_id, self.pattern):
            return False
        self.met += 1
        return True


@contextmanager
def met(table: job_tables.JobTable, job: Row, fault: Fault | None) -> Generator[bool]:
    """Apply a claimed job's fault; yield whether it is still to be executed inside the block."""
    kind = None if fault is None else fault.kind
    lease = job_tables.lease_of(table, job)
    if kind == "crash":
        # The worker dies with the job: its parent sees that, and a crash is counted.
        with db.transaction() as conn:
            db.run(conn, recovery.charge(lease, evidence="killed by a test"))
    elif kind == "budget":
        budget_s = guards.budget_for(job)
        text = f"budget: ran longer than {budget_s:g} s"
        with db.transaction() as conn:
            db.run(
                conn, record.end_by_guard(lease, record.BUDGET_TRIP, error=text, seconds=budget_s)
            )
    elif not table.in_run and kind == "cancelled":
        _stop_task(lease, job)
    else:
        with _replaced(table, job, fault) if fault else nullcontext():
            yield True
        return
    yield False


def _stop_task(lease: job_tables.Lease, job: Row) -> None:
    """Cancel a task. If it yields or awaits, end it there; else it ends with its worker."""
    jobs.cancel(job["id"])
    task = config.get_config().ingest_task_map.get(job["task_name"])
    outcome = outcomes.Outcome("cancelled", 0.0)
    if task is not None and handlers.is_async(task, or_generator=True):
        cancelled = running.Running()
        cancelled.request("cancelled")
        outcome = ingest_executor.run_task(job, cancelled)
    with db.transaction() as conn:
        record.record(conn, lease, outcome)


@contextmanager
def _replaced(table: job_tables.JobTable, job: Row, fault: Fault) -> Generator[None]:
    """Replace the job's handler by the fault while it runs."""

    def raises() -> None:
        raise fault.error

    def hangs(cancel_event: threading.Event) -> None:
        # No other process can do it, so the job's own thread makes the cancel that it waits for.
        runs.cancel(job["run_id"])
        cancel_event.set()

    handler, cfg = raises if fault.kind == "fail" else hangs, config.get_config()
    known: dict[str, Any]
    if table.in_run:
        known, name, own = cfg.node_map, job["node_module"], config.RegisteredNode(handler)
    else:
        known, name, own = cfg.ingest_task_map, job["task_name"], handler
    before = known.get(name)
    known[name] = own
    try:
        yield
    finally:
        known.pop(name)
        if before is not None:
            known[name] = before


def error_of(given: BaseException | type[BaseException] | str) -> BaseException:
    """Return the exception to raise. Raises `InvalidConfig` for any other value."""
    if isinstance(given, str):
        return RuntimeError(given)
    if isinstance(given, BaseException):
        return given
    try:
        return given()
    except TypeError as error:
        raise errors.InvalidConfig(f"{given.__name__} needs arguments: pass an instance") from error
