"""Run the main loop of a worker of one queue: claim, run, record with the next claim."""

from __future__ import annotations

import logging
import os
import random
import threading
import time

from queue_workflows import config, db, errors, ingest_executor, node_executor
from queue_workflows.engine import controls, job_tables, models, outcomes, recovery
from queue_workflows.handlers import model_changes
from queue_workflows.model_cache import ModelCache
from queue_workflows.runtime import service
from queue_workflows.tasks import handlers
from queue_workflows.types import Row
from queue_workflows.worker import batch, claimer, current_job, guards, lease_keeper, shutdown, slot

_log = logging.getLogger(__name__)
BACKOFF_MAX_S = 5.0


class WorkLoop:
    """Run the jobs of one queue, one at a time, on the calling thread."""

    def __init__(
        self,
        queue: str,
        own_slot: slot.Slot,
        keeper: lease_keeper.LeaseKeeper,
        *,
        model_cache: ModelCache | None,
        batch_size: int = 1,
    ) -> None:
        self._queue = queue
        self._who = who = own_slot.who
        self._keeper = keeper
        self._cache = model_cache
        self._table = job_tables.of_queue(queue)
        self._claimer = claimer.Claimer(self._table, who)
        self._claimer.on_lost = keeper.lost
        keeper.excuses.may_hold_unknown_claims = self._claimer.may_hold_unknown_claims
        keeper.excuses.unanswered = self._claimer.unanswered
        self._claimer.held_back = lambda: keeper.memory.active
        keeper.memory.on_released = lambda: self._ready.set()
        self._tasks = handlers.Runner()
        self._batch = (
            batch.Batch(batch_size, self._claimer, keeper, own_slot, runner=self._tasks)
            if batch_size > 1
            else None
        )
        self._ready = threading.Event()
        self._requests = keeper.model_requests
        if self._requests is not None:
            self._requests.on_request = self._ready.set
            self._requests.on_report = lambda: keeper.wake("beat")
        self._promote = True
        self._stopping = False

    def run_once(self) -> bool:
        """Claim one job, run it and record its outcome; return False if there was none."""
        self._keeper.wait_until_published(lambda: self._stopping)
        job = self._claimer.claim(promote=True)
        if job is None:
            return False
        self._run(job, claim=False)
        return True

    def stop(self) -> None:
        """Claim no further job; safe in a signal handler."""
        self._stopping = True

    @property
    def stopping(self) -> bool:
        """Return whether `stop` was called."""
        return self._stopping

    def close(self) -> None:
        """Close the connection and the event loop of async tasks."""
        self._claimer.close()
        self._tasks.close()

    def run_forever(self) -> None:
        """Run jobs until `stop` is called; survive the loss of the database."""
        listener = db.listen(
            self._table.ready_channel,
            "worker_control",
            "job_cancel",
            poll_s=3600.0,
            locks=[recovery.LIFE_LOCK + self._who().worker_id],
        )
        delay, logged = 0.1, ""
        with service.Follow("worker-listen", listener, self._on_wake):
            self._keeper.wait_until_published(lambda: self._stopping)
            while not self._stopping:
                self._ready.clear()
                try:
                    self._run_model_request()
                    self._drain_queue()
                    delay, logged = 0.1, ""
                except db.Error as error:
                    # The message changes during one outage, from "closed" to "starting up".
                    if logged != (logged := error.sqlstate or "away"):
                        _log.warning("claiming waits for the database: %s", brief(error))
                    self._pause(delay * random.uniform(0.5, 1.0))  # noqa: S311  jitter
                    delay = min(BACKOFF_MAX_S, delay * 2)
                    continue
                pause_s = min(config.CLAIM_POLL_S.read(), self._claimer.wait_s)
                self._promote = not self._pause(pause_s)

    def _pause(self, seconds: float) -> bool:
        """Wait for a wake-up; return whether one came in time. `stop` ends it within a second."""
        deadline = time.monotonic() + seconds
        while not self._stopping:
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            if self._ready.wait(min(left, 1.0)):
                return True
        return True

    def _on_wake(self, wake: db.Wake) -> None:
        if wake.reason == "connected":
            self._keeper.heartbeat.locked = True
            self._keeper.wake("beat")
        if wake.reason != "notify":
            # Notifications that were sent while the connection was lost are lost too.
            self._keeper.wake("renew", "control", "models")
            self._ready.set()
            return
        for channel, text in wake.notified:
            if channel == "job_cancel":
                self._keeper.cancelled(text)
            elif channel == "worker_control":
                host = self._who().host
                if text in (f"{host}:{self._queue}", f"{host}:{controls.ALL}"):
                    self._keeper.wake("control", "models", "beat")
                    self._ready.set()
            elif text == self._queue:
                self._ready.set()

    def _drain_queue(self) -> None:
        if self._batch is not None:
            self._batch.drain(lambda: self._stopping, promote=self._promote)
            return
        job = self._claimer.claim(promote=self._promote)
        while job is not None:
            if self._stopping:
                self._return(job)
                return
            job = self._run(job, claim=True)

    def _run_model_request(self) -> None:
        """Load or unload the requested model, since no job runs now."""
        requests, cache, who = self._requests, self._cache, self._who()
        if requests is None or cache is None or not requests.waiting:
            return
        try:
            conn = self._claimer.connection()
            off = controls.off_policy(conn, who.host, who.queue) if who.obey else None
        except db.Error:
            self._claimer.close()
            raise
        request = requests.begin(off)
        if request is None:
            return
        error = None
        if request["action"] == "load":
            error = model_changes.load(cache, request["model"])
        elif requests.concerns(request):
            error = model_changes.unload(cache)
        loaded = requests.end(request, error)
        if loaded is None:
            return
        try:
            models.learn_load(self._claimer.connection(), who.host, *loaded)
        except db.Error:
            self._claimer.close()
            raise

    def _may_continue(self) -> bool:
        """Return whether the next job may follow at once."""
        return not (self._stopping or (self._requests is not None and self._requests.waiting))

    def _return(self, job: Row) -> None:
        self._claimer.finish(self._work(job), outcomes.Outcome("cancelled", 0.0), claim=False)

    def _work(self, job: Row) -> current_job.Work:
        lease_end = guards.LeaseEnd(self._claimer.sent_at, self._who().lease_s)
        return current_job.Work(self._table, job, lease_end)

    def _run(self, job: Row, *, claim: bool) -> Row | None:
        """Run a job and record its outcome; return the next one if `claim` and there is one."""
        work, pid = self._work(job), os.getpid()
        # A job claimed now would not be renewed while the app's hook runs.
        hooked = self._table.in_run and config.get_config().on_node_completed is not None
        self._keeper.begin(work)
        try:
            outcome = self._run_handler(work)
            shutdown.exit_if_forked(pid, outcome)
            self._keeper.handler_ended(work)
            outcome = work.judged(outcome)
            if not claim:  # `run_once`
                outcome = outcomes.without_others(outcome)
            following = self._claimer.finish(
                work, outcome, claim=claim and not hooked and self._may_continue()
            )
        except errors.ClaimLost as error:
            _log.warning("nothing was written: %s", error, extra=work.ids)
            return None
        finally:
            self._keeper.end(work)
        # Only a completed job has claimed the next one in the same statement.
        claim_again = hooked or outcome.kind != "completed"
        if self._table.in_run:
            if outcome.kind == "completed":
                node_executor.call_completed_hook(job, outcome)
            claim_again |= following is None and self._claimer.dispatch.drain(job["run_id"]) > 0
        if claim and claim_again and following is None and self._may_continue():
            following = self._claimer.claim()
        return following

    def _run_handler(self, work: current_job.Work) -> outcomes.Outcome:
        if not self._table.in_run:
            return ingest_executor.run_task(work.job, work, self._tasks)
        cache = self._cache
        if cache is not None:
            cache.mark_busy()
        try:
            return node_executor.run_handler(
                work.job,
                model_cache=cache,
                cancel_event=work.cancel,
                status_callback=work.status,
                control_=work,
                runner=self._tasks,
            )
        finally:
            if cache is not None:
                cache.mark_idle()


def brief(error: Exception) -> str:
    """Return the first line of the error's message."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
