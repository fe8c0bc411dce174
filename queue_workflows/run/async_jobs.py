"""Run many async jobs at once in an executor, on one event loop."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextvars
import functools
import itertools
import logging
import os
import signal
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
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
from queue_workflows.runtime import service, stored_json
from queue_workflows.tasks import control, handlers
from queue_workflows.types import JsonDict, Row

_log = logging.getLogger(__name__)
_key: contextvars.ContextVar[int] = contextvars.ContextVar("executor_job", default=0)
"""The job whose handler runs in this context."""
AGAIN_S: Final = 1.0
"""Seconds after which a job is tried again for which no thread could be started."""
BLOCKED_S: Final = 1.0
"""Seconds without a turn of the loop after which its handler is named."""
CHECK_S: Final = 0.25
STOP_S: Final = 1.0
Call = Callable[[handlers.Runner], object]


class _Frames:
    """The frames of a channel, for one thread; ends the process at the end of file."""

    def __init__(self, end: wire.Channel) -> None:
        self._channel = end

    def __iter__(self) -> Iterator[wire.Frame]:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            while True:
                yield from self._channel.receive_now()
        except BaseException:  # noqa: BLE001  without this thread no job would start
            os._exit(wire.LOST)


class AsyncJobs(job_loop.Jobs):
    """Run async handlers concurrently on the main thread's event loop.

    Handlers that are not async run on one further thread, one at a time. One thread receives jobs
    and requests about them. A third one watches for a handler that blocks the loop.
    """

    def __init__(self, end: wire.Channel, begins: Callable[[int], object]) -> None:
        super().__init__(end, begins)
        self._loop = handlers.Loop(alone=True)
        self._sync = SyncThread()
        self._jobs: dict[int, job_loop.Job] = {}
        self._asked: dict[int, concurrent.futures.Future[Any]] = {}
        self._numbers = itertools.count(1)
        self._quitting = self._over = False
        self._ending = threading.Lock()
        self._output = job_output.JobOutput(_key.get, self._send_log)
        self._output.install()
        job_output.send_records(self._send_log, _key.get, by_job=True)
        self._watch = LoopWatch(self._loop.inner, _key, self._warn, lambda: bool(self._jobs))
        self._loop.keep()
        self._flushes = False
        """Whether the event loop is about to send what was too early to be sent."""
        self._state = restored_state.RestoredState()
        self._changing = threading.Lock()
        """Held while a job is added, and while the process is restored as there is none."""
        self._watch.start()
        service.Follow("executor-jobs", _Frames(end), self._receive).start()

    def serve(self) -> None:
        """Run jobs until QUIT and the end of those that run then."""
        self._loop.serve()
        self._watch.stop()
        self._sync.stop()

    # --- The thread that receives.

    def _receive(self, frame: wire.Frame) -> None:
        kind, key, body = frame
        if kind in (wire.RUN_TASK, wire.RUN_NODE):
            self._begin(key, stored_json.load_row(body), in_run=kind == wire.RUN_NODE)
        elif kind == wire.ANSWER:
            self._answer(wire.decoded(body))
        elif kind == wire.INTERRUPT:
            self._interrupt(key, body.decode())
        elif kind == wire.ANNOUNCE:
            self._sync.put(key, lambda _: self._announce(key, body))
        elif kind == wire.FORGET:
            self._values.pop(key, None)
            self._end_if_done()
        elif kind == wire.QUIT:
            self._quitting = True
            self._end_if_done()

    def _answer(self, answer: JsonDict) -> None:
        asked = self._asked.pop(answer["no"], None)
        if asked is None or not asked.set_running_or_notify_cancel():
            return  # its handler was cancelled
        try:
            asked.set_result(wire.answer_of(answer))
        except errors.QueueWorkflowsError as error:
            asked.set_exception(error)

    def _begin(self, key: int, row: Row, *, in_run: bool) -> None:
        job = job_loop.Job(row, in_run, running.Running(key, self._channel.send, self._wake))
        self._begins(key)
        with self._changing:
            self._jobs[key] = job
        if len(self._jobs) == 1:
            self._watch.wake()
        if (refused := (node_call if in_run else task_call).refused(row)) is not None:
            self._ended(job, refused)
        elif _is_async(job):
            self._loop.spawn(lambda: self._run(job))
        else:
            self._channel.send(wire.WAITS, key)
            try:
                self._sync.put(key, lambda runner: self._run_sync(job, runner))
            except RuntimeError as error:  # no thread is left for the moment
                raised = policy.Raised(after_s=AGAIN_S)
                self._ended(job, outcomes.Outcome("snoozed", 0.0, error=str(error), raised=raised))

    def _interrupt(self, key: int, reason: str) -> None:
        job = self._jobs.get(key)
        if job is None:
            return
        job.control.request(reason)
        if self._sync.take_back(key):
            # Its handler would start only after that of another job.
            self._ended(job, outcomes.Outcome("cancelled", 0.0, error=reason))

    # --- The event loop.

    async def _run(self, job: job_loop.Job) -> None:
        key = job.control.key
        _key.set(key)
        self._watch.note(key)
        ask_step = functools.partial(self._ask_step, key)
        try:
            if job.in_run:
                outcome = await node_call.run_async(
                    job.row,
                    job.control,
                    ask=self._ask_async,
                    ask_step=ask_step,
                    send=self._channel.send,
                )
            else:
                outcome = await task_call.call_async(job.row, job.control, ask_step)
        except KeyboardInterrupt as error:
            outcome = job.failed(error)
        self._ended(job, outcome)

    async def _ask_async(self, key: int, what: str, request: Any = None) -> Any:
        return await asyncio.wrap_future(self._ask_for(key, what, request))

    # --- The thread of handlers that are not async.

    def _run_sync(self, job: job_loop.Job, runner: handlers.Runner) -> None:
        key = job.control.key
        _key.set(key)
        self._channel.send(wire.STARTED, key)
        try:
            outcome = self._call(job, runner)
        except KeyboardInterrupt as error:
            outcome = job.failed(error)
        self._ended(job, outcome)

    def _ask(self, key: int, what: str, request: Any = None) -> Any:
        return self._ask_for(key, what, request).result()

    def _announce(self, key: int, body: bytes) -> None:
        super()._announce(key, body)
        self._end_if_done()

    # --- Any thread.

    def _ask_for(self, key: int, what: str, request: Any = None) -> concurrent.futures.Future[Any]:
        number = next(self._numbers)
        found = self._asked[number] = concurrent.futures.Future[Any]()
        body = wire.encoded({"no": number, "what": what, "request": request})
        self._channel.send(wire.ASK, key, body)
        return found

    def _ask_step(self, key: int, request: JsonDict) -> control.Answered:
        if key not in self._jobs:
            raise errors.NoCurrentJob("the job of this step has ended")
        return self._ask_for(key, "step", request)

    def _ended(self, job: job_loop.Job, outcome: outcomes.Outcome) -> None:
        key = job.control.key
        ending = self._last_frames(job, outcome)
        self._output.end(key)
        self._channel.send_all(ending)
        self._jobs.pop(key, None)
        if not self._jobs:
            self._loop.inner.call_soon_threadsafe(self._restore, key)
        self._end_if_done()

    def _restore(self, key: int) -> None:
        with self._changing:
            left = "" if self._jobs or self._leaves else self._state.restore()
            if not self._jobs:
                self._loop.reset()
        self._leave(key, left)

    def _end_if_done(self) -> None:
        with self._ending:
            if self._over or not self._quitting or self._jobs or self._values:
                return
            self._over = True
        self._loop.end()

    def _wake(self) -> None:
        if not self._flushes:
            self._flushes = True
            loop = self._loop.inner
            loop.call_soon_threadsafe(loop.call_later, running.EVERY_S, self._flush)

    def _flush(self) -> None:
        self._flushes = False
        for job in [*self._jobs.values()]:
            if unsent := job.control.take_unsent():
                self._channel.send_all(unsent)

    def _warn(self, key: int | None, seconds: float, place: str) -> None:
        job = None if key is None else self._jobs.get(key)
        _log.warning(
            "%s has blocked the event loop for %.1f s, at %s; the other jobs (%d) wait: await what "
            "takes long, or call it by asyncio.to_thread()",
            "a callback" if job is None else _name(job),
            seconds,
            place,
            len(self._jobs) - 1,
        )


def _name(job: job_loop.Job) -> str:
    row = job.row
    if job.in_run:
        return f"node {row['node_id']!r} ({row['node_module']}, job {row['id']})"
    return f"task {row['task_name']!r} (job {row['id']})"


def _is_async(job: job_loop.Job) -> bool:
    """Return whether the handler is async; one that cannot be found fails on the other thread."""
    try:
        if job.in_run:
            return handlers.is_async(node_call.handler_of(job.row)[1])
        return handlers.is_async(config.get_config().ingest_task_map[job.row["task_name"]])
    except BaseException:  # noqa: BLE001  the boundary around app code: it imports the node's module
        return False


class SyncThread:
    """Run calls one after the other, in the order in which they came; started by the first one."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[int, Call]] = deque()
        self._changed = threading.Condition()
        self._pool: service.Pool | None = None
        self._over = False

    def put(self, key: int, call: Call) -> None:
        """Let a call of the job `key` wait for its turn. It must raise nothing.

        Raises RuntimeError if the thread cannot be started.
        """
        with self._changed:
            if self._pool is None:
                pool = service.Pool("executor-sync", 1, lambda _: self._serve())
                pool.start()
                self._pool = pool
            self._waiting.append((key, call))
            self._changed.notify()

    def take_back(self, key: int) -> bool:
        """Remove the call of this job; return False if it has begun, or there is none."""
        with self._changed:
            taken = [each for each in self._waiting if each[0] == key]
            for each in taken:
                self._waiting.remove(each)
        return bool(taken)

    def _serve(self) -> None:
        # A thread that blocks all signals starts this one. Programs that a handler executes would
        # inherit that, and SIGTERM would not end them.
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        # Threads that a handler starts take this over; they are to end before the process does.
        threading.current_thread()._daemonic = False  # pyright: ignore
        runner = handlers.Runner()
        try:
            while (call := self._next()) is not None:
                # Context variables that a handler sets must not reach the next one.
                contextvars.copy_context().run(call, runner)
        finally:
            runner.close()

    def _next(self) -> Call | None:
        with self._changed:
            while not self._waiting and not self._over:
                self._changed.wait()
            return None if self._over else self._waiting.popleft()[1]

    def stop(self) -> None:
        """Let the thread end after the call that runs."""
        with self._changed:
            self._over = True
            self._changed.notify()
        if self._pool is not None:
            self._pool.stop(STOP_S)


class LoopWatch:
    """Ask the event loop for a turn again and again while jobs run, on a thread of its own.

    `warn` is called on that thread with the job whose task runs, or None if it is unknown, the
    seconds, and the place in the code; once for each time that the loop is blocked.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        job: contextvars.ContextVar[int],
        warn: Callable[[int | None, float, str], object],
        is_busy: Callable[[], bool],
    ) -> None:
        self._loop = loop
        self._job = job
        self._warn = warn
        self._is_busy = is_busy
        self._asked_at: float | None = None
        self._warned = False
        self._thread = threading.get_ident()
        self._jobs = weakref.WeakKeyDictionary[Any, int]()
        """The jobs of tasks: no version of Python below 3.12 shows the context of a task."""
        self._watch = service.Loop(
            "executor-watch", [service.Task("watch", self._pause, self._check)]
        )
        self._make: Any = loop.get_task_factory()
        loop.set_task_factory(self._create)

    def start(self) -> None:
        """Watch from now on; the calling thread runs the loop."""
        self._thread = threading.get_ident()
        self._watch.start()

    def stop(self) -> None:
        """Watch no longer."""
        self._watch.stop()

    def wake(self) -> None:
        """Note that a job runs."""
        self._watch.wake("watch")

    def note(self, key: int) -> None:
        """Note that the running task is one of this job."""
        self._jobs[asyncio.current_task()] = key

    def _create(
        self, loop: asyncio.AbstractEventLoop, handler: Any, **more: Any
    ) -> asyncio.Task[Any]:
        task = self._make(loop, handler, **more)
        context: contextvars.Context | None = more.get("context")
        key = self._job.get() if context is None else context.get(self._job, 0)
        if key:
            self._jobs[task] = key
        return task

    def _pause(self) -> float:
        return CHECK_S if self._is_busy() else 3600.0

    def _check(self) -> None:
        asked_at = self._asked_at
        if asked_at is None:
            if self._is_busy():
                self._asked_at, self._warned = time.monotonic(), False
                self._loop.call_soon_threadsafe(self._answer)
            return
        blocked_s = time.monotonic() - asked_at
        if blocked_s >= BLOCKED_S and not self._warned:
            self._warned = True
            task = asyncio.current_task(self._loop)
            key = None if task is None else self._jobs.get(task)
            self._warn(key, blocked_s, self._place())

    def _place(self) -> str:
        frame = sys._current_frames().get(self._thread)  # pyright: ignore[reportPrivateUsage]
        if frame is None:
            return "an unknown place"
        return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"

    def _answer(self) -> None:
        self._asked_at = None
