"""Keep the processes of an app running, and return the jobs of a dead worker at once.

It is the parent process of `up`, `run`, `demo`, `serve`, `--supervise` and `--cards`.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import logging
import math
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence

from queue_workflows import config, db
from queue_workflows.claim import job_tables, record, recovery, row_isolation
from queue_workflows.dag import payload
from queue_workflows.db import statements
from queue_workflows.run import memory_cgroups
from queue_workflows.runtime import (
    app_loading,
    exit_codes,
    identity,
    log_context,
    service,
    signals,
    stored_json,
    supervisor,
)
from queue_workflows.types import JsonDict, Row
from queue_workflows.worker import shapes

ORCHESTRATOR = "queue_workflows.orchestrator"
WORKER = "queue_workflows.claim_worker"
_log = logging.getLogger(__name__)
RETRY_S = 1.0
AGAIN_S = 1.0
"""Seconds until a second recovery of the same worker.

The server may still execute its last statement, which may claim another job.
"""
RECOVERY_S = 3.0
_ORDERLY = (0, exit_codes.CONTROL)
"""Exit codes of a worker that exited on request."""


def recover_claims(
    conn: db.Connection,
    ended: supervisor.Exit,
    *,
    host_label: str,
    oom_kills: int | None = None,
    again: bool = False,
) -> list[Row]:
    """Take back the claims of a process of this machine that has ended; return the rows.

    Covers both job families and the `workers` rows, in one transaction. After a crash each job
    counts a crash and gets a `death` event with the exit status, the last progress, heartbeat and
    GPU sample; a job that waited to run alone goes back uncounted. After any other end the jobs go
    back uncounted, but jobs that ran in the process itself are left to their leases, since the
    cause is unknown. With `again`, an earlier call has counted the crash, so jobs found now were
    claimed after the death and go back uncounted.
    """
    prefix = identity.process_prefix(host_label, ended.pid)
    how = evidence(ended)
    death: JsonDict = {
        "exit_code": ended.code,
        "signal": ended.signal,
        "max_rss_mb": ended.max_rss_mb,
        "seconds": round(ended.seconds, 3),
        "oom_kills": oom_kills,
    }
    rows: list[Row] = []
    with conn.transaction():
        gpu = stored_json.mapping(statements.workers.last_detail(conn, prefix=prefix)).get("gpu")
        tables = job_tables.NODE_JOBS, job_tables.INGEST_JOBS
        held = [statements.claims.held_by[table.name](conn, prefix=prefix) for table in tables]
        for table, claimed in zip(tables, held, strict=True):
            holders = {row["id"]: row["worker_id"] for row in claimed}
            leases = [job_tables.lease_of(table, row) for row in claimed]
            apart = all(map(identity.has_executors, holders.values()))
            if again or not _is_crash(ended, apart, oom_kills):
                if again or apart or ended.overdue:
                    reason = "shutdown" if ended.overdue else f"its worker {how}"
                    rows += db.run(conn, record.hand_back_all(leases, reason=reason))
                continue
            if sum(map(len, held)) > 1:
                # The process held several jobs, so one that has to run alone had not begun.
                last = [
                    job_tables.lease_of(table, row)
                    for row in claimed
                    if recovery.is_last(row["crash_count"], row["lapse_count"])
                ]
                rows += db.run(conn, record.hand_back_all(last, reason=f"its worker {how}"))
            for row in recovery.reclaim_dead(conn, leases, evidence=how):
                # A requeued job no longer has a worker, but its event has to name one.
                job, holder = row | {"claimed_by": host_label}, holders.get(row["id"])
                db.run(conn, recovery.note_death(table, job, holder, death | {"gpu": gpu}, how))
                rows.append(row)
        detail, orderly = payload.encode(death, "detail"), ended.code in _ORDERLY
        statements.workers.record_death(conn, prefix=prefix, detail=detail, orderly=orderly)
    return rows


def _is_crash(ended: supervisor.Exit, apart: bool, oom_kills: int | None) -> bool:
    """Return whether the end of a process counts as a crash of its jobs.

    If its handlers ran in executors (`apart`), no handler could choose its exit code, and an OOM
    kill was not caused by its own memory.
    """
    if ended.overdue:
        return False
    if ended.signal is not None:
        return not (apart and ended.signal == signal.SIGKILL and oom_kills)
    return not apart and ended.code not in (None, exit_codes.LOST, *_ORDERLY)


def evidence(ended: supervisor.Exit) -> str:
    """Return how a process ended, and its peak memory, as text for the error of its job."""
    how = "ended for an unknown reason"
    if ended.overdue is not None:
        how = f"killed by its parent: it {ended.overdue}"
    elif ended.signal is not None:
        name = str(ended.signal)
        with contextlib.suppress(ValueError):
            name = signal.Signals(ended.signal).name
        how = f"killed by {name}"
    elif ended.code is not None:
        how = f"ended with exit code {ended.code}"
    return f"{how}, peak memory {ended.max_rss_mb} MB" if ended.max_rss_mb else how


@dataclasses.dataclass(eq=False)
class _Death:
    """An ended process whose claims are to be recovered at `due`, for the last time if `last`.

    `oom_kills` is the number of OOM kills around its death, or None. `counted` is True once its
    claims were taken back.
    """

    ended: supervisor.Exit
    due: float
    last: bool
    oom_kills: int | None = None
    counted: bool = False


class CrashRecovery:
    """Recover the claims of ended workers on a thread of its own, with retries.

    Enter it before the supervisor starts, and exit it after the supervisor has stopped. The exit
    tries once more; claims that are left then are recovered when their leases expire.
    """

    def __init__(self, host_label: str | None = None) -> None:
        self._label = config.host_label() if host_label is None else host_label
        self._oom_kills = memory_cgroups.OomKills()
        self._dead: deque[_Death] = deque()
        self._loop = service.Loop(
            "crash-recovery", [service.Task("recover", self._pause, self._recover_due)]
        )

    def report(self, ended: supervisor.Exit) -> None:
        """Recover the claims of this process soon; see `recover_claims`."""
        peaceful = ended.code == 0 and ended.overdue is None
        self._dead.append(_Death(ended, time.monotonic(), last=peaceful))
        self._loop.wake("recover")

    def __enter__(self) -> CrashRecovery:
        self._loop.start()
        return self

    def __exit__(self, *_: object) -> None:
        if not self._loop.stop():
            return
        try:
            self._recover_due(math.inf)
        except db.Error as error:
            why = str(error).strip()
            _log.warning("the claims of dead workers are left to their leases: %s", why)

    def _pause(self) -> float:
        # Copied at once, since the supervisor's thread may report another death meanwhile.
        wait_s = min((death.due for death in [*self._dead]), default=math.inf) - time.monotonic()
        return wait_s if wait_s > 0 else RETRY_S

    def _recover_due(self, now: float | None = None) -> None:
        """Recover the claims that are due. The loop logs an error, and calls this again."""
        now = time.monotonic() if now is None else now
        due = [death for death in [*self._dead] if death.due <= now]
        if not due:
            return
        with contextlib.closing(db.connect(timeout_s=RECOVERY_S)) as conn:
            for death in due:
                self._recover(conn, death)
                if death.last:
                    self._dead.remove(death)
                death.due, death.last = now + AGAIN_S, True

    def _recover(self, conn: db.Connection, death: _Death) -> None:
        """Recover one process; leave its claims to their leases if its rows cannot be written."""
        ended = death.ended
        if identity.process_exists(ended.pid):
            why = f"pid {ended.pid} is in use again, so its claims end with their leases"
            _log.warning("%s: %s", ended.name, why)
            return
        new = self._oom_kills.new()
        death.oom_kills = new if death.oom_kills is None else death.oom_kills
        try:
            rows = recover_claims(
                conn, ended, host_label=self._label, oom_kills=death.oom_kills, again=death.counted
            )
        except db.Error as error:
            if not row_isolation.is_about_rows(error):
                raise
            _log.warning("%s: its claims end with their leases: %s", ended.name, str(error).strip())
            return
        death.counted = True
        for row in rows:
            what = f"node {row['node_id']}" if "node_id" in row else f"ingest job {row['id']}"
            line = f"{ended.name}: {evidence(ended)}; {what} is {row['status']}"
            _log.warning("%s", line, extra=log_context.ids_of_job(row))


def process(name: str, *words: str) -> supervisor.ChildSpec:
    """Return the spec of a process that runs a module of ours with arguments.

    It uses the embedded server if this process does.
    """
    env = {"QUEUE_WORKFLOWS_EMBEDDED": "1"} if config.database_url() is None else None
    return supervisor.ChildSpec(name, [sys.executable, "-m", *words], env)


class Parent:
    """Processes that are restarted with back-off; if one dies, its claims are recovered.

    `shutdown_timeout_s` is how many seconds a stop gives to jobs, by default SHUTDOWN_TIMEOUT_S.
    With `fail_fast`, it ends if any process refuses to start; else only if all do.
    """

    def __init__(
        self,
        children: Sequence[supervisor.ChildSpec],
        *,
        shutdown_timeout_s: float | None = None,
        fail_fast: bool = False,
        spawn: supervisor.SpawnFn = supervisor.Child,
    ) -> None:
        self._recovery = CrashRecovery()
        self._children = supervisor.Supervisor(
            children, on_exit=self._recovery.report, fail_fast=fail_fast, spawn=spawn
        )
        given_s = shutdown_timeout_s
        self._deadline_s = None if given_s is None else given_s + supervisor.STOP_MARGIN_S

    def start(self) -> None:
        """Start the processes now. `run` first starts a thread, after which it cannot fork."""
        self._children.start()

    def run(
        self, stop: signals.StopRequest, *, outdated: Callable[[], bool] = lambda: False
    ) -> int:
        """Keep the processes running until a stop; return 0, or 2 if they refuse to start.

        They die with the thread that calls this. A second stop request ends them sooner. It also
        returns when `outdated` returns True.
        """
        with self._recovery:
            return self._children.run(stop, deadline_s=self._deadline_s, outdated=outdated)


def supervise(options: argparse.Namespace, arguments: Sequence[str]) -> int:
    """Keep the worker that the options describe, or one for each GPU, running until a stop.

    Returns 0, or 2 if all of them refuse to start.
    """
    own = [word for word in arguments if word != "--supervise"]
    shaped = options.slots is not None or options.cards is not None or options.async_jobs
    if options.queue is not None and not (shaped or options.inline):
        options.slots = 1  # an executor is replaced, and the worker continues
        own += ["--slots", "1"]
    shapes.limits(options)
    # The app may set the names of the variables for the database and the host label.
    app_loading.load_app(options.app)
    db.db_url()
    children = {f"{options.queue} worker" if options.queue else "worker pool": own}
    if options.cards is not None:
        cards = shapes.cards_of(options.cards)
        children = {f"gpu {card} worker": [*own, "--cards", str(card)] for card in cards}
    specs = [process(name, WORKER, *words) for name, words in children.items()]
    with signals.StopRequest() as stop:
        return Parent(specs, shutdown_timeout_s=options.shutdown_timeout).run(stop)
