"""Inject faults into a node: errors, crashes and hangs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import Any

from queue_workflows import config, db, errors, ingest_executor, jobs, runs
from queue_workflows.claim import job_tables, outcomes, record, recovery
from queue_workflows.tasks import control, handlers
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
    if fault is None:
        yield True
    elif fault.kind == "crash":
        _crash(table, job)
        yield False
    elif fault.kind == "budget":
        _end_by_watchdog(table, job, guards.budget_for(job))
        yield False
    elif not table.in_run and fault.kind == "cancelled":
        _stop_task(table, job)
        yield False
    else:
        with _replaced(table, job, fault):
            yield True


def _crash(table: job_tables.JobTable, job: Row) -> None:
    """Let the worker die with the job: its parent sees that, and a crash is counted."""
    with db.transaction() as conn:
        db.run(conn, recovery.charge(job_tables.lease_of(table, job), evidence="killed by a test"))


def _end_by_watchdog(table: job_tables.JobTable, job: Row, budget_s: float) -> None:
    """Let the watchdog end the worker, as if the job's budget was over."""
    text = f"budget: ran longer than {budget_s:g} s"
    with db.transaction() as conn:
        lease = job_tables.lease_of(table, job)
        db.run(conn, record.end_by_watchdog(lease, error=text, seconds=budget_s))


class _Cancelled(control.NoControl):
    """A control of a cancelled job: its handler ends at its first yield or await."""

    interrupted = "cancelled"
    cancel_requested = True

    def when_interrupted(self, call: Callable[[], object] | None) -> None:
        if call is not None:
            call()


def _stop_task(table: job_tables.JobTable, job: Row) -> None:
    """End a task that yields or awaits there; any other ends with its worker."""
    jobs.cancel(job["id"])
    task, outcome = config.get_config().ingest_task_map.get(job["task_name"]), _STOPPED
    if task is not None and handlers.can_be_ended(task):
        outcome = ingest_executor.run_task(job, _Cancelled())
    with db.transaction() as conn:
        record.record(conn, job_tables.lease_of(table, job), outcome)


_STOPPED = outcomes.Outcome("cancelled", 0.0)


@contextmanager
def _replaced(table: job_tables.JobTable, job: Row, fault: Fault) -> Generator[None]:
    """Replace the job's handler by the fault while it runs."""
    known: dict[str, Any]
    handler, cfg = _handler(job, fault), config.get_config()
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


def _handler(job: Row, fault: Fault) -> Callable[..., Any]:
    def raises() -> None:
        raise fault.error

    def hangs(cancel_event: threading.Event) -> None:
        # No other process can do it, so the job's own thread makes the cancel that it waits for.
        runs.cancel(job["run_id"])
        cancel_event.set()

    return raises if fault.kind == "fail" else hangs


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
