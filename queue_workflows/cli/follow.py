"""Print a run or a job as it changes, for `show --follow`: states, events and growing logs."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Collection, Sequence
from datetime import datetime, timedelta
from typing import Any

from queue_workflows import db, errors, history
from queue_workflows.admin import attempt_history
from queue_workflows.claim import job_tables
from queue_workflows.cli import job_texts, output, parts, report, run_snapshot, run_views
from queue_workflows.db import statements
from queue_workflows.runtime import display, entry_point, signals
from queue_workflows.types import TERMINAL_JOB_STATUSES, Row

_log = logging.getLogger(__name__)
TICK_S = 0.5
LAST_S = 0.1
LAST_READS = 40
LAST_MAX_S = 2.0
"""Seconds after a job's end by which its worker has stored the log. On a slow machine it takes as
long as so many reads do here, and at most the last."""
_MARGIN = timedelta(seconds=10)
"""A transaction may commit this long after the time that it wrote."""


class Tail:
    """Return the new lines of a growing log."""

    def __init__(self) -> None:
        self._given = 0

    def lines(self, log: Row, *, last: bool) -> list[str]:
        """Return the new complete lines; `last`: the incomplete last one too."""
        head, tail = log["head"].encode(), log["tail"].encode()
        after_cut = len(head) + log["cut_bytes"]
        fresh = head[self._given :]
        lost = after_cut - max(self._given, len(head))
        if lost > 0:
            fresh += attempt_history.gap(lost).encode()
        fresh += tail[max(0, self._given - after_cut) :]
        whole = len(fresh) if last else max(fresh.rfind(b"\n"), fresh.rfind(b"\r")) + 1
        # The incomplete line follows the marker of omitted text, which ends with a line end.
        self._given = after_cut + len(tail) - (len(fresh) - whole)
        text = fresh[:whole].decode(errors="replace")
        return display.lines(text.rstrip("\r\n")) if text else []


class Tails:
    """The logs of several attempts."""

    def __init__(self, print_line: Callable[[str], object]) -> None:
        self._print = print_line
        self._tails: dict[tuple[str, int], Tail] = {}

    def show_jobs(self, jobs: Sequence[Row], *, last: bool) -> None:
        """Read and print what is new in the logs of node jobs (`job_id`, `node_id`)."""
        names = {job["job_id"]: job["node_id"] for job in jobs}
        with db.transaction() as conn:
            logs = statements.logs.of_jobs(conn, jobs=list(names), table=job_tables.NODE_JOBS.name)
        order = {job_id: at for at, job_id in enumerate(names)}
        for log in sorted(logs, key=lambda log: (order[log["job_id"]], log["claim_no"])):
            self.show(names[log["job_id"]], log, last=last)

    def show(self, name: str, log: Row, *, last: bool = False) -> None:
        """Print what is new in an attempt's log, each line after the name."""
        tail = self._tails.setdefault((log["job_id"], log["claim_no"]), Tail())
        for text in tail.lines(log, last=last):
            shown = output.line(text, 1000)
            self._print(f"{output.line(name)} | {shown}".rstrip())


class RunLogs:
    """Print what the handlers of a run print, as their workers store it every two seconds.

    `nodes`: only of these; None: of all.
    """

    def __init__(
        self, run_id: str, print_line: Callable[[str], object], nodes: Sequence[str] | None = None
    ) -> None:
        self._run_id = run_id
        self._nodes = None if nodes is None else [*nodes]
        self._tails = Tails(print_line)
        self._since: datetime | None = None

    def show(self, *, last: bool = False, without: Collection[str] = ()) -> None:
        """Print what is new; `last`: of all logs, with incomplete lines too.

        Nodes of the queues `without` are left out. Prints nothing while the database is away.
        """
        since = None if last else self._since
        with contextlib.suppress(db.OperationalError):
            with db.transaction() as conn:
                jobs = statements.logs.nodes_that_logged(
                    conn, run_id=self._run_id, since=since, nodes=self._nodes
                )
            if jobs:
                self._since = _before(jobs[-1]["updated_at"])
            shown = [job for job in jobs if job["queue"] not in without]
            for at in range(0, len(shown), report.AT_ONCE):
                self._tails.show_jobs(shown[at : at + report.AT_ONCE], last=last)


class RunOutput:
    """Print what the handlers of a run print and stream; parameters as of `RunLogs`."""

    def __init__(
        self, run_id: str, print_line: Callable[[str], object], nodes: Sequence[str] | None = None
    ) -> None:
        self._logs = RunLogs(run_id, print_line, nodes)
        self._streams = parts.RunParts(run_id, print_line, nodes)

    def show(self, *, last: bool = False, without: Collection[str] = ()) -> None:
        """Print what is new; `last` as for logs; no logs of the queues `without`."""
        self._logs.show(last=last, without=without)
        self._streams.show(last=last)


def run(
    run_id: str, view: run_views.View, stop: signals.StopRequest, nodes: Sequence[str] | None
) -> run_snapshot.RunSnapshot | None:
    """Follow a run and return it when it is over.

    Returns None if asked to stop, or if the reader of stdout is gone. `nodes`: only the logs and
    streams of these. Raises `UnknownJob` if the run is deleted meanwhile.
    """
    reader = run_snapshot.Reader(run_id)
    printed = RunOutput(run_id, view.print_message, nodes)
    try:
        while not stop.requested.is_set():
            begun = time.monotonic()
            seen = reader.read()
            read_s = time.monotonic() - begun
            if seen is not None:
                view.show(seen)
                printed.show()
                if seen.over:
                    await_logs(stop, read_s)
                    printed.show(last=True)
                    return seen
            stop.requested.wait(TICK_S)
    except BrokenPipeError as error:
        entry_point.lost_output(error)
    finally:
        reader.close()
    return None


def await_logs(stop: signals.StopRequest, read_s: float) -> None:
    """Wait until workers have stored the logs of what has ended; a read took `read_s` seconds."""
    stop.requested.wait(min(max(LAST_S, LAST_READS * read_s), LAST_MAX_S))


def _before(instant: datetime) -> datetime:
    """Return the time minus the margin, not before Python's first one."""
    try:
        return instant - _MARGIN
    except OverflowError:
        return instant


class _Progress:
    """Print what is new about one job: the events of its attempts, and their logs."""

    def __init__(self, print_line: Callable[[str], object]) -> None:
        self._print = print_line
        self._tails = Tails(print_line)
        self._printed: set[tuple[int, int]] = set()
        self._status = ""
        self._parts = parts.Parts(print_line)

    def tell(self, kind: str, job_id: str, *, last: bool = False) -> dict[str, Any]:
        """Print and return the job as it is now. Raises `UnknownJob` if it is gone."""
        table = job_tables.NODE_JOBS if kind == "node job" else job_tables.INGEST_JOBS
        with db.transaction() as conn:
            shown = history.get_job(job_id, conn=conn)
            logs = statements.logs.of_jobs(conn, jobs=[job_id], table=table.name)
        if shown is None:
            raise errors.UnknownJob(f"{kind} {job_id!r} is gone")
        if shown["status"] != self._status:
            self._status = shown["status"]
            if self._status not in TERMINAL_JOB_STATUSES:
                again = run_views.again_text(shown, shown["attempts_failed"])
                text = f"{self._status}, {again}" if again else self._status
                self._print(f"{kind} {job_id} ({output.line(job_texts.name_of(shown))}): {text}")
        by_claim = {log["claim_no"]: log for log in logs}
        for attempt in shown["attempts"]:
            self._attempt(attempt, by_claim.get(attempt["claim_no"]), last=last)
        self._parts.show(job_id)
        return shown

    def _attempt(self, attempt: dict[str, Any], log: Row | None, *, last: bool) -> None:
        number = attempt["claim_no"]
        name = f"attempt {number}"
        events = [e for e in enumerate(attempt["events"]) if (number, e[0]) not in self._printed]
        begun = [event for event in events if event[1]["event_type"] == "claimed"]
        for index, _ in begun:
            self._printed.add((number, index))
            self._print(f"{name}: {job_texts.place_text(attempt)}")
        if log is not None:
            self._tails.show(name, log, last=last)
        for index, event in events:
            if (number, index) not in self._printed:
                self._printed.add((number, index))
                self._print(f"{name}: {job_texts.event_text(event)}")


def job(
    kind: str, job_id: str, print_line: Callable[[str], object], stop: signals.StopRequest
) -> dict[str, Any] | None:
    """Follow a job and return it when it is over, as `history.get_job` does; None as in `run`.

    Raises `UnknownJob` if the job is deleted meanwhile.
    """
    progress, away = _Progress(print_line), False
    try:
        while not stop.requested.is_set():
            begun = time.monotonic()
            try:
                shown = progress.tell(kind, job_id)
                if shown["status"] in TERMINAL_JOB_STATUSES:
                    await_logs(stop, time.monotonic() - begun)
                    return progress.tell(kind, job_id, last=True)
                away = False
            except db.OperationalError as error:
                if not away:
                    _log.warning("waiting for the database: %s", str(error).strip())
                away = True
            stop.requested.wait(TICK_S)
    except BrokenPipeError as error:
        entry_point.lost_output(error)
    return None
