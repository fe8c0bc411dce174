"""Run the orchestrator's threads, which start runs, dispatch events, take answers and maintain."""

from __future__ import annotations

import functools
import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping

from queue_workflows import config, db, history, input_listener
from queue_workflows.claim import admission, row_isolation
from queue_workflows.db import statements
from queue_workflows.dispatch import advance, drain, run_cache
from queue_workflows.maintenance import periodic, sweeps
from queue_workflows.runtime import service
from queue_workflows.types import NowFn

_log = logging.getLogger(__name__)
CHANNEL = "orchestrator_work"
HEAD_START_S = 0.004
"""Seconds for which an event is left to the worker that wrote it and usually dispatches it."""
ANSWERS_A_ROUND = 50
STREAM_PAUSE_S = 0.04
STREAM_WITHIN_S = 0.1
"""Seconds for which frequent events, new delayed runs, or runs that become due are collected, since
a round costs the same for one and for many."""


class NodePool:
    """Run the orchestrator's threads; any number of pools may work on one database.

    `register_builtins` is called once at start. `cpu_workers` and `gpu_workers` are accepted and
    ignored, since workers are separate processes. `pause(seconds)` waits between tries of the
    recovery and returns whether to stop; by default it waits for `stop`. `listens` has functions by
    further channels, called for each notification and after each reconnection.
    """

    def __init__(
        self,
        register_builtins: Callable[[], None] | None = None,
        *,
        cpu_workers: int | None = None,
        gpu_workers: int | None = None,
        now_fn: NowFn = time.monotonic,
        pause: Callable[[float], bool] | None = None,
        listens: Mapping[str, Callable[[], object]] | None = None,
    ) -> None:
        del cpu_workers, gpu_workers
        self._others = dict(listens or {})
        self._pause = pause
        self._register = register_builtins
        self._now = now_fn
        self._check_at = self._drained_at = self._promoted_at = -math.inf
        self._drain_at: float | None = None
        """When to drain the outbox because of a notification, or None."""
        self._kept = db.DedicatedConnection(lock_s=db.LOOP_LOCK_S)
        self._begin = run_cache.on_connection(self._kept)
        self._rows = row_isolation.Isolation(now_fn)
        self._prune_rows = row_isolation.Isolation(now_fn)
        self._is_waiting_logged = False
        self._stopped = threading.Event()
        self._inputs = input_listener.InputListener(begin=self._begin, rows=self._rows)
        self._maintenance = periodic.PeriodicTasks(now_fn)
        self._services: list[service.Service] = []

    def start(self) -> None:
        """Recover lapsed and ownerless jobs, then start the threads.

        The recovery is tried NODE_POOL_RECOVERY_RETRIES times, NODE_POOL_RECOVERY_BACKOFF_S seconds
        apart. Then its error is raised, no thread has started, and `start` may be called again.
        Raises RuntimeError if the pool was started before. Starts nothing if `stop` was called
        meanwhile.
        """
        if self._services or self._stopped.is_set():
            raise RuntimeError("this pool was started before; create a new one")
        if self._register is not None:
            self._register()
        if not sweeps.recover_at_start(self._pause or self._stopped.wait):
            return
        listener = db.listen(CHANNEL, *self._others, poll_s=self._poll_s)
        self._services = [
            service.Follow("dispatch", listener, self._act),
            self._maintenance.loop(),
            # On a thread of its own, since recovery must not wait while a year's rows are deleted.
            service.Loop(
                "prune",
                [service.Task("prune", config.NODE_EVENT_PRUNE_INTERVAL_S.read, self._prune)],
            ),
        ]
        for each in self._services:
            each.start()

    def stop(self) -> None:
        """Stop the threads after their current transaction, and close the connections."""
        self._stopped.set()
        for each in self._services:
            each.stop()
        self._maintenance.close()
        self._kept.close()

    def _prune(self) -> None:
        gone: Counter[str] = Counter()
        for kind, count in history.prune_batches(self._prune_rows):
            gone[kind] += count
            if self._stopped.is_set():
                break
        if deleted := ", ".join(f"{count} {kind}" for kind, count in gone.items() if count):
            _log.info("past their retention and deleted: %s", deleted)

    def _poll_s(self) -> float:
        due = self._check_at if self._drain_at is None else min(self._check_at, self._drain_at)
        return max(0.0, min(config.CLAIM_POLL_S.read(), due - self._now()))

    def _act(self, wake: db.Wake) -> None:
        try:
            now = self._now()
            self._call_others(wake)
            kinds = {text for channel, text in wake.notified if channel == CHANNEL}
            # The check below does not look for sent events. A reconnect may have missed some.
            if "sent" in kinds or wake.reason == "connected":
                self._maintenance.wake("events")
            if "left" in kinds:
                self._maintenance.wake("lock-keys")
            # While notifications keep coming, only a check finds work that has become due.
            if now >= self._check_at or wake.reason in ("connected", "wake"):
                self.check()
                return
            if "delayed" in kinds:
                self._check_at = min(self._check_at, now + STREAM_PAUSE_S)
            if "event" in kinds and self._drain_at is None:
                streaming = now - self._drained_at < STREAM_WITHIN_S
                self._drain_at = now + (STREAM_PAUSE_S if streaming else HEAD_START_S)
            events = self._drain_at is not None and now >= self._drain_at
            if events:
                self._drain_at, self._drained_at = None, now
            if self.work(runs="run" in kinds, events=events, inputs="input" in kinds):
                self._check_at = now
        except db.Error:
            self._kept.close()
            raise

    def _call_others(self, wake: db.Wake) -> None:
        heard = {channel for channel, _ in wake.notified}
        for channel, call in self._others.items():
            if channel in heard or wake.reason == "connected":
                call()

    def check(self) -> None:
        """Find the present work by one statement and do it, until no work is left.

        Each round does a bounded part of every kind of work, so that ten thousand answers delay
        neither runs nor jobs that become due.
        """
        next_at, more = math.inf, True
        while more and not self._stopped.is_set():
            more = self._check_once()
            # Keep the earliest time of all rounds, since the last round, without work, plans late.
            next_at = min(next_at, self._check_at)
        self._check_at = next_at

    def _check_once(self) -> bool:
        """Do one round of work; return whether there may be more."""
        poll_s = config.CLAIM_POLL_S.read()
        self._check_at = self._now() + poll_s
        self._drain_at = None
        conn = self._kept.get()
        seen = statements.pending.work(conn, within_s=poll_s)
        if seen["due"]:
            self._promoted_at = self._now()
        if seen["run_due_s"] is not None:
            due_at = max(self._now() + seen["run_due_s"], self._promoted_at + STREAM_PAUSE_S)
            self._check_at = min(self._check_at, due_at)
        kinds = {"runs": seen["runs"] or seen["due"], "inputs": seen["answers"]}
        steps: list[Callable[[], object]] = [
            functools.partial(self.work, **kinds, events=seen["events"], is_check=True)
        ]
        if seen["due"]:
            steps.insert(0, functools.partial(admission.promote_due, conn, self._rows))
        return bool(row_isolation.all_of(steps)[-1])

    def work(self, *, runs: bool, events: bool, inputs: bool, is_check: bool = False) -> bool:
        """Start runs, take answers and dispatch events, a bounded number of each.

        Return whether the next check may find more. An error of one kind does not stop the others;
        it is raised afterwards. With `is_check`, child runs of started runs count as more work;
        else their notifications suffice.
        """
        start = functools.partial(self._start, is_check)
        kinds = {start: runs, self._answer: inputs, self._drain: events}
        return any(row_isolation.all_of([act for act, wanted in kinds.items() if wanted]))

    def _start(self, is_check: bool) -> bool:
        """Start runs; return whether there may be more to start."""
        started, waiting, more = advance.start_queued(begin=self._begin, rows=self._rows)
        if waiting and not self._is_waiting_logged:
            self._is_waiting_logged = True
            _log.warning(
                "queued runs wait (%s and others): this orchestrator has no workflow provider; "
                "start it with --app, or call set_workflow_provider()",
                waiting[0],
            )
        return more or (is_check and started > 0)

    def _answer(self) -> bool:
        """Take answers; return whether there may be more to take."""
        return self._inputs.process_all(self._stopped, ANSWERS_A_ROUND) == ANSWERS_A_ROUND

    def _drain(self) -> bool:
        """Dispatch events; return whether there may be more to dispatch."""
        dispatched = drain.drain_outbox(begin=self._begin, rows=self._rows)
        if dispatched:
            # An event that closely follows an open one of its run sends no notification.
            self._check_at = min(self._check_at, self._now() + STREAM_PAUSE_S)
        return dispatched >= drain.RUNS_A_ROUND
