"""Run jobs in an executor one after the other, or in a thread that takes its place.

The worker's requests about the running job arrive on a second socket, which a thread reads. This
module does not watch the lease; the launcher and the kernel do.
"""

from __future__ import annotations

import abc
import contextlib
import contextvars
import functools
import logging
import os
import resource
import select
import signal
import socket
import threading
from collections import deque
from collections.abc import Callable, Collection
from typing import Any, Final

from queue_workflows import config, errors
from queue_workflows.claim import outcomes
from queue_workflows.model_cache import ModelCache
from queue_workflows.run import job_output, node_call, restored_state, running, task_call, wire
from queue_workflows.runtime import forking, service
from queue_workflows.tasks import control, handlers
from queue_workflows.types import JsonDict

_log = logging.getLogger(__name__)
ERROR_CHARS: Final = 1000
FLUSH_MS: Final = 250.0
"""Milliseconds after which delayed reports are sent."""
RAISED_BETWEEN: Final = "a signal handler of the app has raised between two jobs: %s: %s"


class Job(running.Running):
    """A job of an executor, with its row and its link to the worker."""

    def __init__(self, frame: wire.Frame, jobs: Jobs, wake: Callable[[], object]) -> None:
        kind, key, body = frame
        super().__init__(key, jobs.channel.send, wake)
        self.row, self.in_run = wire.load_row(body), kind == wire.RUN_NODE
        self.ask = functools.partial(jobs.ask, key)
        self.ask_step = functools.partial(jobs.ask_step, key)

    def note(self, event_type: str, elapsed_s: float | None) -> None:
        """Send an event for the history of a node."""
        self._send(wire.EVENT, self.key, wire.encoded([event_type, elapsed_s]))

    def failed(self, error: BaseException) -> outcomes.Outcome:
        """Return the outcome of a job that failed outside its handler."""
        return (node_call if self.in_run else task_call).failed(self.row, error, 0.0)


class Jobs(abc.ABC):
    """The common part of executors with one job at a time and with many."""

    def __init__(self, end: wire.Channel, begins: Callable[[int], object]) -> None:
        """`begins` is called with the key of each job that begins."""
        self.channel = end
        self._begins = begins
        self._pid = os.getpid()
        self._leaves = False
        """Whether the worker knows that this executor is to be replaced."""
        self._values: dict[int, Any] = {}
        """The values of completed nodes by key, for `on_node_completed`."""

    @abc.abstractmethod
    def serve(self) -> None:
        """Run jobs until QUIT."""

    @abc.abstractmethod
    def ask(self, key: int, what: str, request: Any) -> Any:
        """Return the worker's answer; see `node_call.Ask`. Raises as `wire.answer_of` does."""

    @abc.abstractmethod
    def ask_step(self, key: int, request: JsonDict) -> control.Answered:
        """Return a future for the answer about a step; raise `NoCurrentJob` after the job's end."""

    def _call(
        self, job: Job, runner: handlers.Runner, cache: ModelCache | None = None
    ) -> outcomes.Outcome:
        """Run a sync handler, one at a time. Raises KeyboardInterrupt only."""
        row = job.row
        if job.in_run:
            return node_call.refused(row) or node_call.run(row, job, runner, cache)
        return task_call.refused(row) or task_call.call(row, job, runner, job.ask_step)

    def _last_frames(self, job: Job, outcome: outcomes.Outcome) -> bytes:
        """Return the last frames of a job, and keep its value for the app's hook."""
        forking.flush()
        if os.getpid() != self._pid:
            os._exit(outcome.kind != "completed")  # a child that the handler forked has returned
        key = job.key
        if outcome.seconds >= outcomes.USED_S:
            outcome = outcome._replace(vm_rss_mb_peak=node_call.peak_rss_mb())
        if outcome.kind != "completed":
            frame = wire.frame(wire.ENDED, key, wire.ended_body(outcome))
        else:
            if job.in_run and config.get_config().on_node_completed is not None:
                self._values[key] = outcome.value
            frame = wire.frame(wire.COMPLETED, key, wire.completed_body(outcome))
        return job.take_unsent() + frame

    def _announce(self, key: int, body: bytes) -> None:
        """Call the app's hook for a recorded node; without a body, only drop its value."""
        if body and key in self._values:
            node_call.announce(wire.decoded(body), self._values[key])
        self._values.pop(key, None)
        forking.flush()
        self.channel.send(wire.ANNOUNCED, key)

    def _leave(self, key: int, left: str) -> None:
        """Ask the worker to replace this executor, if `left` names a state it cannot undo."""
        if not (left or self._leaves) and any(not task.done() for task in handlers.stuck):
            left = "an async task that does not end"
        if left:
            self._leaves = True
            self.channel.send(wire.LEAVES, key, left.encode("utf-8", "backslashreplace"))

    def _send_log(self, key: int, record: JsonDict) -> None:
        self.channel.send(wire.LOG, key, wire.encoded(record))


class _PeakMemory:
    """Reset the peak RSS of this process (VmHWM), so that each job has its own."""

    def __init__(self) -> None:
        self._reset_kb, self._fd = 0, -1
        with contextlib.suppress(OSError):
            self._fd = wire.high(os.open("/proc/self/clear_refs", os.O_WRONLY | os.O_CLOEXEC))

    def reset(self) -> None:
        """Reset the peak to the present RSS, if it has grown by 1 MB since the last reset.

        Reading the peak takes a tenth of the time of a reset.
        """
        if resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < self._reset_kb + 1024:
            return
        with contextlib.suppress(OSError):  # there is no such file, or the handler closed it
            os.write(self._fd, b"5")
        self._reset_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


class JobLoop(Jobs):
    """The state of an executor that runs one job at a time.

    `alone` is whether the process only runs handlers. If not, a thread of the caller runs them,
    logging and process state are not reset, and the process continues when the worker closes.
    """

    def __init__(
        self,
        end: wire.Channel,
        interrupts: socket.socket,
        model_cache: ModelCache | None,
        *,
        alone: bool = True,
        begins: Callable[[int], object] = lambda _: None,
    ) -> None:
        super().__init__(end, begins)
        self._alone = alone
        self._interrupts = interrupts
        self._woken, self._waker = (
            socket.socket(fileno=wire.high(each.detach())) for each in socket.socketpair()
        )
        self._waker.setblocking(False)
        self._ends: dict[int, str] = {}
        """For each job's key, why it must not begin; empty once the job has begun."""
        self._ended = 0
        """The key of the last job whose handler has ended."""
        self._cache = model_cache
        self._runner = handlers.Runner(alone=alone)
        self._received: deque[wire.Frame] = deque()
        self._asking = threading.RLock()
        """Held by the thread that receives. A handler may use several threads, and leave one."""
        self._asked = 0
        self.current: Job | None = None
        self._earlier: list[threading.Thread] = []
        """Threads that earlier handlers have left running, unless `alone`."""
        self._peak = _PeakMemory()
        self._left = ""
        """Why this process must be replaced after the last job; empty if it need not."""
        self._undrained = 0
        """The key of a job whose output the worker has to read before the next job may print."""
        self._logged = 0
        """The key of the last job that has logged while its output was still unread."""
        if model_cache is not None:
            model_cache.set_publisher(lambda _: self._send_model())
        self._hearing = service.Thread("executor-requests", lambda _: self._hear_all())
        self._hearing.start()
        self._state: restored_state.RestoredState | None = None
        self.output: job_output.JobOutput | None = None
        """Captures the output of handlers, unless `alone`."""
        if not alone:
            self.output = job_output.JobOutput(self.key, self._send_log, takes_bytes=True)
        else:
            job_output.send_records(self._send_log, self.key)
            self._state = restored_state.RestoredState()

    def serve(self) -> None:
        """Run jobs until QUIT."""
        while (frame := self._between_jobs())[0] != wire.QUIT:
            kind, key, body = frame
            try:
                if kind in (wire.RUN_TASK, wire.RUN_NODE):
                    if self._leaves:
                        continue  # the worker gives it to another executor
                    contextvars.copy_context().run(self._run, frame)
                elif kind == wire.ANNOUNCE:
                    contextvars.copy_context().run(self._announce, key, body)
                    _block(wire.handled_signals())
                elif kind == wire.LOAD:
                    self._change_model(wire.decoded(body))
                    _block(wire.handled_signals())
                else:
                    continue  # an answer that came too late
                if self._state is not None:
                    left = self._left or self._state.restore() or self._unanswered()
                    if left or handlers.stuck:
                        self._leave(key, left)
            finally:
                _block(())
        if self._cache is not None:
            with contextlib.suppress(errors.ModelLoadFailed):
                self._cache.drop_cache()
        self._runner.close()

    def _between_jobs(self) -> wire.Frame:
        """Return the next frame, once the worker has read the last job's output."""
        while True:
            try:
                with self._asking:
                    if self._undrained:
                        self._await(wire.DRAINED, self._undrained)
                        self._undrained = 0
                    return self._next()
            except ConnectionError:
                raise
            except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001  a signal handler of the app
                # An alarm that an ended job has set called the app's signal handler.
                _log.warning(RAISED_BETWEEN, type(error).__name__, error)

    def _next(self) -> wire.Frame:
        while not self._received:
            self._received.extend(self.channel.receive())
        return self._received.popleft()

    def _await(self, kind: int, key: int) -> bytes:
        """Wait for this frame and return its body; earlier frames are kept for later."""
        later: list[wire.Frame] = []
        try:
            while (frame := self._next())[:2] != (kind, key):
                later.append(frame)
        finally:
            self._received.extendleft(reversed(later))
        return frame[2]

    def key(self) -> int:
        """Return the key of the job that runs, or 0; any thread may call this."""
        job = self.current
        if job is None or (self._earlier and threading.current_thread() in self._earlier):
            return 0
        return job.key

    def _send_log(self, key: int, record: JsonDict) -> None:
        """Send a log record, marked if the worker has to read this job's output before it.

        It then reads only this job's output, because the next job waits until that is read. That is
        not sure in a child that the handler forked, so its records are not marked.
        """
        state = self._state
        if key and os.getpid() == self._pid and state is not None and state.has_unread_output():
            self._logged = key
            record = record | {"is_behind_output": True}
        super()._send_log(key, record)

    # --- Jobs.

    def _run(self, frame: wire.Frame) -> None:
        """Run a job, and block the app's signals after it."""
        self._values.clear()
        self._peak.reset()
        job = Job(frame, self, self._wake)
        key = job.key
        if self._state is None:
            own = threading.current_thread()
            self._earlier = [each for each in threading.enumerate() if each is not own]
        self.current = job
        try:
            if self._ends.setdefault(key, ""):
                return  # the thread of requests has sent the outcome
            self._begins(key)
            try:
                outcome = self._call(job, self._runner, self._cache)
                # An alarm that the handler left behind must not prevent the send.
                _block(wire.handled_signals())
            except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001  the app's signal handlers
                _block(wire.handled_signals())
                outcome = job.failed(error)
            # A process that has failed once to open its GPU may never see it.
            self._left = outcome.error if outcome.raised.wish in ("no_gpu", "no_memory") else ""
            if self.output is not None:
                self.output.end(key)
            frames = self._last_frames(job, outcome)
            is_unread = self._state is not None and self._state.has_unread_output()
            if self._logged == key or is_unread:
                self._undrained = key
                frames = wire.frame(wire.PRINTED, key, b"") + frames
            self.channel.send_all(frames, blocked=True)
        finally:
            self.current = None
            self._ended = key
            self._ends.pop(key, None)

    # --- The thread of requests.

    def _wake(self) -> None:
        """Let the thread of requests send delayed reports soon."""
        with contextlib.suppress(OSError):
            self._waker.send(b"!")

    def _hear_all(self) -> None:
        """Receive the worker's requests to end a job, each with its key and a reason.

        Signals would need no thread. But a signal handler may run inside the app's
        `threading.Event.wait()`, and setting that event there would block forever on its lock.
        """
        wire.sigmask(signal.SIG_BLOCK, wire.CATCHABLE)
        poll, timeout = select.poll(), None
        for each in (self._interrupts, self._woken):
            poll.register(each, select.POLLIN)
        try:
            while True:
                ready = {fd for fd, _ in poll.poll(timeout)}
                if self._interrupts.fileno() in ready:
                    key, _, reason = self._interrupts.recv(4096).decode().partition(" ")
                    self._hear(int(key), reason)  # at the end of file the key is not a number
                if self._woken.fileno() in ready:
                    self._woken.recv(4096)
                    timeout = FLUSH_MS
                elif not ready:
                    job = self.current
                    timeout = FLUSH_MS if job is not None and job.flush() else None
        except BaseException:  # noqa: BLE001  without this thread no request is received
            if self._alone:
                os._exit(wire.LOST)

    def _hear(self, key: int, reason: str) -> None:
        if key <= self._ended:
            return
        found = self._ends.setdefault(key, reason)
        job = self.current
        if found is reason:
            # The job has not begun, and will not. Answer now, as it may be behind a long job.
            outcome = outcomes.Outcome("cancelled", 0.0, error=reason)
            self.channel.send(wire.ENDED, key, wire.ended_body(outcome))
        elif not found and job is not None and job.key == key:
            job.request(reason)

    # --- Questions.

    def ask(self, key: int, what: str, request: Any) -> Any:
        with self._asking:
            self._asked += 1
            body = wire.encoded({"no": self._asked, "what": what, "request": request})
            self.channel.send(wire.ASK, key, body)
            answer = self._await(wire.ANSWER, self._asked)
        return wire.answer_of(answer)

    def ask_step(self, key: int, request: JsonDict) -> control.Answered:
        if self._runs(key):
            with self._asking:
                if self._runs(key):
                    return control.answered(lambda: self.ask(key, "step", request))
        raise errors.NoCurrentJob("the job of this step has ended")

    def _runs(self, key: int) -> bool:
        job = self.current
        return job is not None and job.key == key

    def _unanswered(self) -> str:
        """Return a text if a thread of the last job waits for an answer, else an empty one.

        Such a thread receives the messages, so the next job would not begin before its answer.
        """
        if self._asking.acquire(blocking=False):
            self._asking.release()
            return ""
        return "a thread that waits for an answer of the worker"

    # --- Models.

    def _change_model(self, change: JsonDict) -> None:
        error, cache = None, self._cache
        if cache is None:
            error = "this worker loads no models, as its queue is not gpu"
        elif change.get("model") is not None:
            error = _change(cache, functools.partial(cache.require_model, change["model"]))
        elif change["idle_only"]:
            cache.reap_idle_once()
        else:
            error = _change(cache, cache.drop_cache)
        forking.flush()
        self._send_model()
        self.channel.send(wire.CHANGED, 0, wire.encoded(error))

    def _send_model(self) -> None:
        cache = self._cache
        if cache is not None:
            held = cache.resident
            model = {
                "current": held and held.id,
                "loading": cache.loading_model,
                "load_s": held.load_s if held else 0.0,
                "held_s": held.held_s if held else 0.0,
                "vram_gb": held.est_vram_gb if held else 0.0,
            }
            self.channel.send(wire.MODEL, self.key(), wire.encoded(model))

    def close(self) -> None:
        """End the thread of requests, in a process that continues."""
        with contextlib.suppress(OSError):
            self._interrupts.shutdown(socket.SHUT_RDWR)
        self._hearing.stop()
        for each in (self._woken, self._waker):
            each.close()
        self._runner.close()


def _change(cache: ModelCache, change: Callable[[], object]) -> str | None:
    """Load or unload a model; return why that failed, or None. Raises KeyboardInterrupt only."""
    with node_call.keep_loaded(cache):
        try:
            change()
        except errors.QueueWorkflowsError as error:
            return str(error)[:ERROR_CHARS]
        except (Exception, SystemExit) as error:  # noqa: BLE001  the boundary around app code
            return f"{type(error).__name__}: {error}"[:ERROR_CHARS]
    return None


def _block(signals: Collection[int]) -> None:
    """Block only these signals; log an error of an app's signal handler that runs meanwhile."""
    try:
        wire.sigmask(signal.SIG_SETMASK, signals)
    except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001  the mask is set before it raises
        _log.warning(RAISED_BETWEEN, type(error).__name__, error)
