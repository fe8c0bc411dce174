"""Run many async jobs at once in an executor, on one event loop."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import contextvars
import functools
import itertools
import logging
import os
import queue
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, Final

from queue_workflows import config, errors
from queue_workflows.claim import outcomes
from queue_workflows.dag import policy
from queue_workflows.run import (
    job_loop,
    job_output,
    node_call,
    restored_state,
    running,
    task_call,
    wire,
)
from queue_workflows.runtime import service
from queue_workflows.tasks import control, handlers
from queue_workflows.types import JsonDict

_log = logging.getLogger(__name__)
_key: contextvars.ContextVar[int] = contextvars.ContextVar("executor_job", default=0)
"""The key of the job whose handler runs in this context."""
AGAIN_S: Final = 1.0
"""Seconds until a job is tried again if no thread could be started for it."""
BLOCKED_S: Final = 1.0
"""Seconds for which a handler may block the loop before a warning names it."""
CHECK_S: Final = 0.25
STOP_S: Final = 1.0
_NAME: Final = "executor-sync"
Call = Callable[[handlers.Runner], object]


class AsyncJobs(job_loop.Jobs):
    """Run async handlers concurrently on the main thread's event loop.

    Sync handlers run on a second thread, one at a time. A third thread receives jobs and requests
    about them. A fourth watches for handlers that block the loop.
    """

    def __init__(self, end: wire.Channel, begins: Callable[[int], object]) -> None:
        super().__init__(end, begins)
        self._loop = handlers.Runner(alone=True)
        self._sync: service.Thread | None = None
        """The thread of sync handlers, which the first of them starts."""
        self._calls = queue.SimpleQueue[int]()
        self._waiting: dict[int, Call] = {}
        """The calls that the thread of sync handlers has not begun, by the key of their job."""
        self._jobs: dict[int, job_loop.Job] = {}
        self._asked: dict[int, concurrent.futures.Future[Any]] = {}
        self._numbers = itertools.count(1)
        self._quitting = False
        self._output = job_output.JobOutput(_key.get, self._send_log)
        job_output.take_streams(self._output)
        job_output.send_records(self._send_log, _key.get, by_job=True)
        self._watch = LoopWatch(self._loop.inner, self._jobs)
        self._loop.keep()
        self._flushes = False
        """Whether the event loop is about to send the delayed reports."""
        self._state = restored_state.RestoredState()
        self._changing = threading.Lock()
        """Held while a job is added, and while the process is restored because it has no job."""
        self._watch.start()
        service.Thread("executor-jobs", lambda _: self._receive_all()).start()

    def serve(self) -> None:
        """Run jobs until QUIT, then wait until the running jobs have ended."""
        self._loop.serve()
        self._watch.stop()
        if self._sync is not None:
            self._calls.put(0)
            self._sync.stop(STOP_S)

    # --- The thread that receives.

    def _receive_all(self) -> None:
        wire.sigmask(signal.SIG_BLOCK, wire.CATCHABLE)
        try:
            while True:
                for frame in self.channel.receive_now():
                    self._receive(frame)
        except BaseException:  # noqa: BLE001  without this thread no job would start
            os._exit(wire.LOST)

    def _receive(self, frame: wire.Frame) -> None:
        kind, key, body = frame
        if kind in (wire.RUN_TASK, wire.RUN_NODE):
            self._begin(job_loop.Job(frame, self, self._wake))
        elif kind == wire.ANSWER:
            asked = self._asked.pop(key, None)
            if asked is not None and asked.set_running_or_notify_cancel():  # else it was cancelled
                try:
                    asked.set_result(wire.answer_of(body))
                except errors.QueueWorkflowsError as error:
                    asked.set_exception(error)
        elif kind == wire.INTERRUPT:
            self._interrupt(key, body.decode())
        elif kind == wire.ANNOUNCE:
            self._call_later(key, lambda _: self._announce(key, body))
        elif kind == wire.QUIT:
            self._quitting = True
            self._post(self._settle)

    def _begin(self, job: job_loop.Job) -> None:
        key = job.key
        self._begins(key)
        with self._changing:
            self._jobs[key] = job
        if len(self._jobs) == 1:
            self._watch.wake("watch")
        if (refused := (node_call if job.in_run else task_call).refused(job.row)) is not None:
            self._ended(job, refused)
        elif _is_async(job):
            self._loop.spawn(lambda: self._run(job))
        else:
            self.channel.send(wire.WAITS, key)
            try:
                self._call_later(key, lambda runner: self._run_sync(job, runner))
            except RuntimeError as error:  # no thread is left for the moment
                raised = policy.Raised(after_s=AGAIN_S)
                self._ended(job, outcomes.Outcome("snoozed", 0.0, error=str(error), raised=raised))

    def _interrupt(self, key: int, reason: str) -> None:
        if (job := self._jobs.get(key)) is None:
            return
        job.request(reason)
        if self._waiting.pop(key, None) is not None:
            # The job waits for another job's handler, and would see the request only after it.
            self._ended(job, outcomes.Outcome("cancelled", 0.0, error=reason))

    def _call_later(self, key: int, call: Call) -> None:
        """Queue a call for the thread of sync handlers; raise RuntimeError if it cannot start."""
        if self._sync is None:
            thread = service.Thread(_NAME, lambda _: self._serve_calls())
            thread.start()
            self._sync = thread
        self._waiting[key] = call
        self._calls.put(key)

    # --- The event loop.

    async def _run(self, job: job_loop.Job) -> None:
        key = job.key
        _key.set(key)
        self._watch.note(key)
        try:
            if job.in_run:
                ask = functools.partial(self._ask_async, key)
                outcome = await node_call.run_async(job.row, job, ask)
            else:
                outcome = await task_call.call_async(job.row, job, job.ask_step)
        except KeyboardInterrupt as error:
            outcome = job.failed(error)
        self._ended(job, outcome)

    async def _ask_async(self, key: int, what: str, request: Any) -> Any:
        return await asyncio.wrap_future(self._ask_for(key, what, request))

    # --- The thread of sync handlers.

    def _serve_calls(self) -> None:
        # The thread that starts this one blocks all signals. Programs that a handler executes would
        # inherit that, so that SIGTERM would not end them.
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        # Threads that a handler starts inherit this, so that the process waits for their end.
        threading.current_thread()._daemonic = False  # pyright: ignore
        with contextlib.closing(handlers.Runner()) as runner:
            while key := self._calls.get():
                if (call := self._waiting.pop(key, None)) is not None:
                    # Context variables that a handler sets must not reach the next one.
                    contextvars.copy_context().run(call, runner)

    def _run_sync(self, job: job_loop.Job, runner: handlers.Runner) -> None:
        key = job.key
        _key.set(key)
        self.channel.send(wire.STARTED, key)
        try:
            outcome = self._call(job, runner)
        except KeyboardInterrupt as error:
            outcome = job.failed(error)
        self._ended(job, outcome)

    def ask(self, key: int, what: str, request: Any) -> Any:
        """Return the worker's answer; only for the thread of sync handlers."""
        return self._ask_for(key, what, request).result()

    def _announce(self, key: int, body: bytes) -> None:
        super()._announce(key, body)
        self._post(self._settle, key)

    # --- Any thread.

    def _ask_for(self, key: int, what: str, request: Any) -> concurrent.futures.Future[Any]:
        number = next(self._numbers)
        found = self._asked[number] = concurrent.futures.Future[Any]()
        body = wire.encoded({"no": number, "what": what, "request": request})
        self.channel.send(wire.ASK, key, body)
        return found

    def ask_step(self, key: int, request: JsonDict) -> control.Answered:
        """Return a future for the answer about a step of this job."""
        if key not in self._jobs:
            raise errors.NoCurrentJob("the job of this step has ended")
        return self._ask_for(key, "step", request)

    def _ended(self, job: job_loop.Job, outcome: outcomes.Outcome) -> None:
        key = job.key
        ending = self._last_frames(job, outcome)
        self._output.end(key)
        self.channel.send_all(ending)
        self._jobs.pop(key, None)
        if not self._jobs:
            self._post(self._settle, key)

    def _settle(self, key: int = 0) -> None:
        """Restore the process if no job is left, and end it if requested; on the event loop."""
        with self._changing:
            if self._jobs:
                return
            left = "" if self._leaves else self._state.restore()
            self._loop.reset()
        self._leave(key, left)
        if self._quitting and not self._values:
            self._loop.end()

    def _post(self, call: Callable[..., object], *of: Any) -> None:
        self._loop.inner.call_soon_threadsafe(call, *of)

    def _wake(self) -> None:
        if not self._flushes:
            self._flushes = True
            self._post(self._loop.inner.call_later, running.EVERY_S, self._flush)

    def _flush(self) -> None:
        self._flushes = False
        for job in [*self._jobs.values()]:
            job.flush()


def _is_async(job: job_loop.Job) -> bool:
    """Return whether the handler is async; one that is not found fails on the other thread."""
    try:
        if job.in_run:
            return handlers.is_async(node_call.handler_of(job.row)[1])
        return handlers.is_async(config.get_config().ingest_task_map[job.row["task_name"]])
    except BaseException:  # noqa: BLE001  the boundary around app code: it imports the node's module
        return False


class LoopWatch(service.Loop):
    """Watch, on a thread of its own, whether the event loop of the calling thread is blocked.

    While there are `jobs`, it asks the loop for a turn. If that takes too long, it logs which job's
    handler blocks the loop, and where.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, jobs: dict[int, job_loop.Job]) -> None:
        super().__init__("executor-watch", [service.Task("watch", self._pause, self._check)])
        self._loop = loop
        self._jobs = jobs
        self._asked_at: float | None = None
        self._warned = False
        self._main = threading.get_ident()
        self._keys = weakref.WeakKeyDictionary[Any, int]()
        """The job key of each task, since Python before 3.12 does not show a task's context."""
        self._make: Any = loop.get_task_factory()
        loop.set_task_factory(self._create)

    def note(self, key: int) -> None:
        """Note that the running task belongs to this job."""
        self._keys[asyncio.current_task()] = key

    def _create(
        self, loop: asyncio.AbstractEventLoop, handler: Any, **more: Any
    ) -> asyncio.Task[Any]:
        task = self._make(loop, handler, **more)
        context: contextvars.Context | None = more.get("context")
        if key := _key.get() if context is None else context.get(_key, 0):
            self._keys[task] = key
        return task

    def _pause(self) -> float:
        return CHECK_S if self._jobs else 3600.0

    def _check(self) -> None:
        asked_at = self._asked_at  # the loop may answer meanwhile
        if asked_at is None:
            if self._jobs:
                self._asked_at, self._warned = time.monotonic(), False
                self._loop.call_soon_threadsafe(self._answer)
            return
        blocked_s = time.monotonic() - asked_at
        if blocked_s >= BLOCKED_S and not self._warned:
            self._warned = True
            self._warn(blocked_s)

    def _answer(self) -> None:
        self._asked_at = None

    def _warn(self, blocked_s: float) -> None:
        task = asyncio.current_task(self._loop)
        job = None if task is None else self._jobs.get(self._keys.get(task, 0))
        frame = sys._current_frames().get(self._main)  # pyright: ignore[reportPrivateUsage]
        place = "an unknown place"
        if frame is not None:
            place = f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"
        name, row = "a callback", {} if job is None else job.row
        if "node_id" in row:
            name = f"node {row['node_id']!r} ({row['node_module']}, job {row['id']})"
        elif row:
            name = f"task {row['task_name']!r} (job {row['id']})"
        _log.warning(
            "%s has blocked the event loop for %.1f s, at %s; the other jobs (%d) wait: await what "
            "takes long, or call it by asyncio.to_thread()",
            name,
            blocked_s,
            place,
            len(self._jobs) - 1,
        )
