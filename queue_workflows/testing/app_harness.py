"""One host in one process: every role by turns, the clock moved by hand."""

from __future__ import annotations

import contextlib
import datetime
import tempfile
import threading
import uuid
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any

from queue_workflows import (
    config,
    db,
    dispatcher,
    errors,
    ingest_executor,
    input_listener,
    model_registry,
    node_executor,
    node_queue,
    run_store,
    scheduler,
)
from queue_workflows.db import functions, schema, scratch
from queue_workflows.dispatch import hooks
from queue_workflows.engine import job_tables, schedules
from queue_workflows.maintenance import input_timeouts, recovery
from queue_workflows.model_cache import ModelCache
from queue_workflows.testing import apps, clock, faults, result, servers
from queue_workflows.types import JsonDict, Row

HOST = "test-host"
ROUNDS = 100_000
"""Jobs and turns after which a run counts as one that goes on for ever."""


class Harness:
    """Runs what is queued: orchestrator, workers of every queue and scheduler, one step at a time.

    Time does not pass by itself for what waits: `advance` moves it. `out` is the folder under which
    runs that name none get theirs. Made by `harness()`.
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
        """Unload the model that is loaded, if any."""
        self._cache.drop_cache()

    # --- runs

    def submit(self, workflow: str, inputs: Mapping[str, Any] | None = None, **columns: Any) -> str:
        """Queue a run and do nothing else; its id. `columns`: as of `run_store.insert_run`."""
        run_id: str = columns.pop("run_id", None) or str(uuid.uuid4())
        columns.setdefault("out_dir", str(self.out / run_id))
        row = run_store.insert_run(
            run_id=run_id, workflow_name=workflow, context=dict(inputs or {}), **columns
        )
        return row["id"]

    def run_workflow(
        self,
        workflow: str,
        inputs: Mapping[str, Any] | None = None,
        *,
        answers: Mapping[str, Any] | None = None,
        **columns: Any,
    ) -> result.Result:
        """Submit a run and see it through; what became of it.

        `answers`: by input node; one that can be called gets what is asked and returns the answer.
        It ends when the run is over, or waits for an answer that is not here.
        """
        run_id = self.submit(workflow, inputs, **columns)
        return self.finish(run_id, answers=answers)

    def finish(self, run_id: str, *, answers: Mapping[str, Any] | None = None) -> result.Result:
        """Work until the run is over or waits for an answer that is not here; its `Result`.

        What waits for its time (back-off, `available_at`) has it: the clock is moved to it. Raises
        `AssertionError` with the reason for a run that cannot start.
        """
        given = dict(answers or {})
        for _ in range(ROUNDS):
            began = self._database_now()
            self.work()
            found = result.of_run(run_id)
            if found.status in job_tables.TERMINAL:
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
                raise AssertionError(f"run {run_id} stays queued: {self._why_queued(found)}")
            return found
        raise AssertionError(f"run {run_id} goes on for ever")

    def retry(self, run_id: str, *, from_node: str | None = None) -> result.Result:
        """Run a finished run again (`dispatcher.retry_run`) and see it through."""
        dispatcher.retry_run(run_id, from_node=from_node)
        return self.finish(run_id)

    def result(self, run_id: str) -> result.Result:
        """The run as it is now."""
        return result.of_run(run_id)

    def answer(self, run_id: str, node_id: str, value: Any) -> str:
        """Answer an input node, checked against what it asks; the submission's id."""
        return dispatcher.submit_input(run_id, node_id, value, check=True)

    def run_task(self, task: str, args: JsonDict | None = None, *, queue: str) -> Row:
        """Queue an ingest job, work until it is over, and return its row."""
        job_id = node_queue.enqueue_ingest_job(task_name=task, queue=queue, args=args or {})
        for _ in range(ROUNDS):
            began = self._database_now()
            self.work()
            row = node_queue.get_ingest_job(job_id)
            if row is None or row["status"] not in ("queued", "running"):
                return row or {}
            if not self._skip_ahead(began):
                return row
        raise AssertionError(f"ingest job {job_id} goes on for ever")

    # --- work

    def work(self) -> int:
        """Do what is due, in every role by turns, until nothing is left; how many jobs ran."""
        ran = 0
        for _ in range(ROUNDS):
            dispatcher.start_queued()
            dispatcher.drain_outbox()
            done = sum(map(self._run_one, sorted(config.queues())))
            ran += done
            if not (dispatcher.drain_outbox() or self._listener.process_all() or done):
                return ran
        raise AssertionError("the work goes on for ever")

    def _run_one(self, queue: str) -> int:
        # What comes due and waits for its turn with a lock key is let in by the first one's commit.
        job = self._claim(queue) or self._claim(queue)
        if job is None:
            return 0
        table = job_tables.NODE_JOBS if queue in config.DAG_QUEUES else job_tables.INGEST_JOBS
        where: str = job["node_id"] if table.in_run else job["task_name"]
        fault = next((fault for fault in self._faults if fault.strikes(where)), None)
        with faults.met(table, job, fault) as goes_on:
            if goes_on:
                self._execute(table, job)
        return 1

    def _claim(self, queue: str) -> Row | None:
        if queue == "cpu":
            return node_queue.claim_next_cpu_job(host=HOST)
        if queue == "gpu":
            known = model_registry.known_ids() or None
            model = self._cache.current_model
            return node_queue.claim_next_gpu_job(current_model=model, known_models=known, host=HOST)
        return node_queue.claim_next_ingest_job(queue, host=HOST)

    def _execute(self, table: job_tables.JobTable, job: Row) -> None:
        if not table.in_run:
            ingest_executor.execute_ingest_job(job)
            return
        cache = self._cache if job["queue"] == "gpu" else None
        node_executor.execute_node(job, model_cache=cache, cancel_event=threading.Event())

    # --- time

    def now(self) -> datetime.datetime:
        """The database's clock, and what `advance` has added to it."""
        return self._database_now() + datetime.timedelta(seconds=self._passed_s)

    def _database_now(self) -> datetime.datetime:
        with db.transaction() as conn:
            return schedules.database_now(conn)

    def advance(self, seconds: float) -> None:
        """Let time pass for what waits: due times, back-offs, leases, heartbeats, schedules.

        Leases that lapse by it are swept, input nodes past their `timeout_s` take their default or
        fail. Nothing runs: `work` and `tick` do. Instants that are history (`created_at`,
        `finished_at`) stay.
        """
        if seconds < 0:
            raise errors.InvalidConfig(f"advance({seconds:g}): time does not go back")
        with db.transaction() as conn:
            clock.pass_time(conn, seconds)
        self._passed_s += seconds
        recovery.reclaim()
        input_timeouts.expire_inputs()

    def advance_to(self, instant: datetime.datetime) -> None:
        """`advance` up to an instant of `now()`, such as a schedule entry's `next_fire_at`."""
        self.advance((instant - self.now()).total_seconds())

    def tick(self) -> list[str]:
        """Fire what the schedule has due by `now()`; the ids of the jobs queued, none of them run.

        Since the last call, or since the harness was made: what a scheduler does that looks now.
        """
        return self._ticker.run_once()

    def _skip_ahead(self, began: datetime.datetime) -> bool:
        """Move the clock to what comes due next after `began`, when the last work began.

        What was due before was part of that work, and cannot run. What came due since, by itself,
        was perhaps not.
        """
        with db.transaction() as conn:
            wait_s = clock.next_due_s(conn, after=began)
        if wait_s is None:
            return False
        if wait_s >= 0:
            self.advance(wait_s + 0.001)
        return True

    def _why_queued(self, run: result.Result) -> str:
        if not hooks.has_provider():
            return (
                "the app has no workflow provider, and declares no workflow; call "
                "set_workflow_provider() in it, or name another by harness(app=...) or the "
                "fixture workflows_app"
            )
        return run.error or "its row is locked by another transaction, or its mode is not 'node'"

    # --- trouble

    def fail(
        self,
        where: str,
        error: BaseException | type[BaseException] | str = "injected",
        *,
        times: int | None = 1,
    ) -> faults.Fault:
        """Let the node's body raise, the next `times` times that it is run (None: always).

        `where`: a node id or an ingest task's name; `*` stands for anything: `"read/*"`.
        """
        return self._add(faults.Fault(where, "fail", times, faults.error_of(error)))

    def crash(self, where: str, *, times: int | None = 1) -> faults.Fault:
        """Let the worker die at the node: its lease lapses and the job is taken back."""
        return self._add(faults.Fault(where, "crash", times))

    def hang(self, where: str, *, until: str = "cancelled", times: int | None = 1) -> faults.Fault:
        """Let the node's body hang until its run is `cancelled`, or its `budget` is over.

        The first cancels the run while the body runs, the second is the watchdog's trip.
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
    """A `Harness` on a scratch database, the app wired in; afterwards all is as it was.

    `app`: `"package.module[:callable]"` or a function; None keeps what this process has set. `dsn`:
    the `*_test` database beside which the scratch one is made; `own`: it is a scratch one already
    (`testing.database()`), emptied here. `out`: where runs put their files; a folder that is
    removed, by default. Raises `InvalidConfig` for a database of any other name.
    """
    with contextlib.ExitStack() as stack:
        if not own or dsn is None:
            dsn = stack.enter_context(servers.database(dsn))
        else:
            scratch.checked(dsn)
        folder = out or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="flows-")))
        stack.enter_context(apps.restored())
        stack.enter_context(servers.environment(QUEUE_WORKFLOWS_DB_URL=dsn))
        apps.load(app)
        # The app may have named a variable of its own.
        stack.enter_context(servers.environment(**{config.db_url_variables()[0]: dsn}))
        db.close_pool()
        stack.callback(db.close_pool)
        if own:
            _empty()
        config.get_config().builtin_model_registrar()
        made = Harness(dsn, folder)
        made.tick()
        try:
            yield made
        finally:
            made.close()


def _empty() -> None:
    with db.connection() as conn:
        scratch.empty(conn, keep={schema.LEDGER, functions.TABLE})
