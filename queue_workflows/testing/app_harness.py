"""Run one app in one process: every role in turn, with a clock that tests advance.

Its length: the public class has a short method for each thing that a test does.
"""

from __future__ import annotations

import contextlib
import datetime
import tempfile
import threading
import uuid
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any, cast

from queue_workflows import (
    config,
    db,
    errors,
    ingest_executor,
    input_listener,
    jobs,
    model_registry,
    node_executor,
    runs,
    scheduler,
)
from queue_workflows.claim import job_tables, manual_claims
from queue_workflows.dag import hooks
from queue_workflows.db import functions, ledger, scratch_databases, statements
from queue_workflows.dispatch import advance, drain
from queue_workflows.maintenance import sweeps
from queue_workflows.model_cache import ModelCache
from queue_workflows.testing import apps, faults, result, servers
from queue_workflows.types import TERMINAL_RUN_STATUSES, JsonDict, Row

HOST = "test-host"
LEASE_S = 600.0
NO_PROVIDER = (
    "the app has no workflow provider, and declares no workflow; call set_workflow_provider() in "
    "it, or name another by harness(app=...) or the fixture workflows_app"
)
LOCKED = "its row is locked by another transaction, or its mode is not 'node'"
ROUNDS = 100_000
"""Jobs and rounds after which a run counts as endless."""


class Harness:
    """Run queued work as orchestrator, worker of every queue and scheduler, one step at a time.

    For jobs and nodes that wait, only `advance` lets time pass. `out` is the parent folder of runs
    without a folder. Created by `harness()`.
    """

    def __init__(self, dsn: str, out: Path) -> None:
        self.dsn = dsn
        self.out = out
        self._passed_s = 0.0
        self._faults: list[faults.Fault] = []
        self._cache = ModelCache(idle_ttl_s=0)
        self._listener = input_listener.InputListener()
        self._ticker = scheduler.Ticker(now_fn=self.now)

    def close(self) -> None:
        """Unload the loaded model, if any."""
        self._cache.drop_cache()

    # --- runs

    def submit(self, workflow: str, inputs: Mapping[str, Any] | None = None, **columns: Any) -> str:
        """Queue a run and return its id. `columns`: as in `runs.submit`."""
        run_id: str = columns.pop("run_id", None) or str(uuid.uuid4())
        columns.setdefault("out_dir", str(self.out / run_id))
        row = runs.submit(workflow, run_id=run_id, inputs=dict(inputs or {}), **columns)
        return row["id"]

    def run_workflow(
        self,
        workflow: str,
        inputs: Mapping[str, Any] | None = None,
        *,
        answers: Mapping[str, Any] | None = None,
        **columns: Any,
    ) -> result.Result:
        """Submit a run, work until it ends, and return its `Result`.

        `answers`: by input node; a callable gets the question and returns the answer. Returns when
        the run is over, or waits for an answer that `answers` lacks.
        """
        run_id = self.submit(workflow, inputs, **columns)
        return self.finish(run_id, answers=answers)

    def finish(self, run_id: str, *, answers: Mapping[str, Any] | None = None) -> result.Result:
        """Work until the run is over or waits for an answer not given; return its `Result`.

        The clock advances for what waits (back-off, `available_at`). Raises `AssertionError` with
        the reason for a run that cannot start.
        """
        given = dict(answers or {})
        for _ in range(ROUNDS):
            began = self._database_now()
            self.work()
            found = result.of_run(run_id)
            if found.status in TERMINAL_RUN_STATUSES:
                return found
            asked = [node_id for node_id in found.waiting if node_id in given]
            for node_id in asked:
                value = given.pop(node_id)
                self.answer(
                    run_id, node_id, value(found.waiting[node_id]) if callable(value) else value
                )
            if asked or self._skip_ahead(began):
                continue
            if found.status == "queued":
                why = found.error or LOCKED if hooks.has_provider() else NO_PROVIDER
                raise AssertionError(f"run {run_id} stays queued: {why}")
            return found
        raise AssertionError(f"run {run_id} does not end")

    def retry(self, run_id: str, *, from_node: str | None = None) -> result.Result:
        """Run a finished run again (`runs.retry`) and work until it ends."""
        runs.retry(run_id, from_node=from_node)
        return self.finish(run_id)

    def result(self, run_id: str) -> result.Result:
        """Return the run as it is now."""
        return result.of_run(run_id)

    def answer(self, run_id: str, node_id: str, value: Any) -> str:
        """Answer an input node, checked against its question; return the submission's id."""
        return runs.answer(run_id, node_id, value, check=True)

    def run_task(self, task: str, args: JsonDict | None = None, *, queue: str) -> Row:
        """Queue an ingest job, work until it is over, and return its row."""
        job_id = jobs.enqueue(task, queue=queue, args=args or {})
        for _ in range(ROUNDS):
            began = self._database_now()
            self.work()
            row = cast("Row | None", jobs.get(job_id, kind="ingest"))
            if row is None or row["status"] not in ("queued", "running"):
                return row or {}
            if not self._skip_ahead(began):
                return row
        raise AssertionError(f"ingest job {job_id} does not end")

    # --- work

    def work(self) -> int:
        """Do all due work, in every role in turn, until none is left; return how many jobs ran."""
        ran = 0
        for _ in range(ROUNDS):
            advance.start_queued()
            drain.drain_outbox()
            done = sum(map(self._run_one, sorted(config.queues())))
            ran += done
            if not (drain.drain_outbox() or self._listener.process_all() or done):
                return ran
        raise AssertionError("the work does not end")

    def _run_one(self, queue: str) -> int:
        table = job_tables.of_queue(queue)
        is_gpu = queue == "gpu"
        chosen: dict[str, Any] = {"lane": 0} if table.in_run else {}
        if is_gpu:
            known = sorted(model_registry.known_ids()) or None
            chosen |= {"model": self._cache.current_model, "models": known}
        chosen |= {"host": HOST, "lease_s": LEASE_S}
        # The commit of the first job with a lock key admits the next due job with that key.
        claim = manual_claims.claim_next
        job = claim(table, queue, **chosen) or claim(table, queue, **chosen)
        if job is None:
            return 0
        where: str = job["node_id"] if table.in_run else job["task_name"]
        fault = next((fault for fault in self._faults if fault.strikes(where)), None)
        with faults.met(table, job, fault) as goes_on:
            if goes_on and table.in_run:
                cache = self._cache if is_gpu else None
                node_executor.execute_node(job, model_cache=cache, cancel_event=threading.Event())
            elif goes_on:
                ingest_executor.execute_ingest_job(job)
        return 1

    # --- time

    def now(self) -> datetime.datetime:
        """Return the database's clock plus the seconds of `advance`."""
        return self._database_now() + datetime.timedelta(seconds=self._passed_s)

    def _database_now(self) -> datetime.datetime:
        with db.transaction() as conn:
            return statements.schedules.now(conn)

    def advance(self, seconds: float) -> None:
        """Let time pass for what waits: due times, back-offs, leases, heartbeats, schedules.

        Expired leases are swept; input nodes past their `timeout_s` take their default or fail.
        Nothing runs: `work` and `tick` do that. Times of the past (`created_at`, `finished_at`)
        stay.
        """
        if seconds < 0:
            raise errors.InvalidConfig(f"advance({seconds:g}): time does not go back")
        with db.transaction() as conn:
            statements.test_clock.move(conn, by=datetime.timedelta(seconds=seconds))
        self._passed_s += seconds
        with db.statement() as conn:
            sweeps.reclaim_all_lapsed(conn)
            sweeps.expire_inputs(conn)

    def advance_to(self, instant: datetime.datetime) -> None:
        """Call `advance` up to a time of `now()`, such as a schedule entry's `next_fire_at`."""
        self.advance((instant - self.now()).total_seconds())

    def tick(self) -> list[str]:
        """Fire the schedule up to `now()`; return the ids of the queued jobs.

        Counts from the last call, or from the harness's creation. None of the jobs runs.
        """
        return self._ticker.run_once()

    def _skip_ahead(self, began: datetime.datetime) -> bool:
        """Advance the clock to the next due time after `began`, the start of the last work.

        Work that was due before was part of it, and cannot run. Work that became due since may not
        have been part of it.
        """
        with db.transaction() as conn:
            wait_s = statements.test_clock.next_due(conn, after=began)
        if wait_s is None:
            return False
        if wait_s >= 0:
            self.advance(wait_s + 0.001)
        return True

    # --- faults

    def fail(
        self,
        where: str,
        error: BaseException | type[BaseException] | str = "injected",
        *,
        times: int | None = 1,
    ) -> faults.Fault:
        """Let the node's handler raise, the next `times` times that it runs (always if None).

        `where`: a node id or an ingest task's name; `*` matches anything: `"read/*"`.
        """
        return self._add(faults.Fault(where, "fail", times, faults.error_of(error)))

    def crash(self, where: str, *, times: int | None = 1) -> faults.Fault:
        """Let the worker die at the node: a crash is counted and the job is taken back."""
        return self._add(faults.Fault(where, "crash", times))

    def hang(self, where: str, *, until: str = "cancelled", times: int | None = 1) -> faults.Fault:
        """Let the node's handler hang until its run is `cancelled`, or its `budget` is over.

        The first cancels the run while the handler runs, the second is the watchdog's timeout.
        """
        if until not in faults.UNTIL:
            raise errors.InvalidConfig(f"until={until!r}: it is one of {', '.join(faults.UNTIL)}")
        return self._add(faults.Fault(where, until, times))

    def _add(self, fault: faults.Fault) -> faults.Fault:
        self._faults.append(fault)
        return fault


@contextlib.contextmanager
def harness(
    *, app: apps.App = None, dsn: str | None = None, own: bool = False, out: Path | None = None
) -> Generator[Harness]:
    """Yield a `Harness` of an app on a scratch database; restore everything afterwards.

    `app`: `"package.module[:callable]"` or a function; None keeps what this process has set. `dsn`:
    the `*_test` database beside which the scratch one is created; `own`: it is a scratch one
    already (`testing.database()`), emptied here. `out`: where runs put their files; default: a
    folder that is removed. Raises `InvalidConfig` for a database of any other name.
    """
    with contextlib.ExitStack() as stack:
        if not own or dsn is None:
            dsn = stack.enter_context(servers.database(dsn))
        else:
            scratch_databases.checked(dsn)
        folder = out or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="flows-")))
        stack.enter_context(apps.restored())
        stack.enter_context(servers.environment(QUEUE_WORKFLOWS_DB_URL=dsn))
        apps.load(app)
        # The app may have named a variable of its own.
        stack.enter_context(servers.environment(**{config.db_url_variables()[0]: dsn}))
        db.close_pool()
        stack.callback(db.close_pool)
        if own:
            with db.connection() as conn:
                scratch_databases.empty(conn, keep={ledger.NAME, functions.TABLE})
        config.get_config().builtin_model_registrar()
        made = Harness(dsn, folder)
        made.tick()
        stack.callback(made.close)
        yield made
