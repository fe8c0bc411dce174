"""Run the main loop of an executor: one job after the other on the main thread."""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib
import logging
import signal
import socket
import threading
from collections import deque
from collections.abc import Callable, Collection
from typing import Any, Final

from queue_workflows import config, errors
from queue_workflows.engine import outcomes
from queue_workflows.executor import (
    channel,
    control,
    job_output,
    log_sender,
    node_hook,
    nodes,
    peak_memory,
    protocol,
    running,
    streams,
)
from queue_workflows.handlers import model_changes, node_call, task_call
from queue_workflows.model_cache import ModelCache
from queue_workflows.runtime import forking, service
from queue_workflows.tasks import attempt_steps, handlers
from queue_workflows.types import JsonDict

_log = logging.getLogger(__name__)
_sigmask: Final[Callable[[int, Collection[int]], object]] = importlib.import_module(
    "_signal"
).pthread_sigmask
"""The function behind `signal.pthread_sigmask`, which makes an enum member of each signal in the
old mask: that took longer than all else for a job that does nothing."""
_ALL: Final = frozenset(map(int, signal.valid_signals()))


class JobLoop:
    """The state of an executor. The main thread runs jobs; the control thread receives requests."""

    def __init__(
        self,
        jobs: socket.socket,
        requests: socket.socket,
        model_cache: ModelCache | None,
        *,
        by_job: bool = False,
    ) -> None:
        """`by_job`: several jobs wait here, and what each prints is sent as messages."""
        self._jobs = channel.Channel(jobs, blocking=True)
        self._cache = model_cache
        self._runner = handlers.Runner()
        self._received: deque[protocol.Message] = deque()
        self._receiving = threading.Lock()
        self._asking = threading.RLock()
        """Held by the thread that waits for an answer; a handler may use several threads."""
        self._asked = 0
        self._ends: dict[int, str] = {}
        """Why jobs are to end whose handlers may not have started when the request came."""
        self._recalled = 0
        """Jobs up to this key were recalled."""
        self._ended = 0
        """The key of the last job whose handler has ended."""
        self.current: running.Running | None = None
        self._value: tuple[int, Any] | None = None
        """The value of the last completed job, for `on_node_completed`."""
        self._requests = control.Requests(requests)
        self._peak = peak_memory.PeakMemory()
        if model_cache is not None:
            model_cache.set_publisher(lambda _: self._send_model())
        self._output = job_output.JobOutput(self._key, self._jobs.send)
        if by_job:
            self._output.install()
        log_sender.install(self._jobs.send, self._key, by_job=by_job)
        thread = service.Follow("executor-control", self._requests, self._hear)
        self._requests.idle = self._flush
        thread.start()

    def send(self, message: protocol.Message) -> None:
        """Send a message to the worker."""
        self._jobs.send(message)

    def serve(self) -> None:
        """Run jobs until `Quit`."""
        while True:
            try:
                message = self._next()
            except (Exception, KeyboardInterrupt) as error:
                if not self._jobs.waiting or isinstance(error, protocol.ChannelLost):
                    raise
                # A signal handler of the app, which an alarm of an ended job called.
                _log.warning("between two jobs: %s: %s", type(error).__name__, error)
                continue
            if isinstance(message, protocol.Quit):
                self._quit()
                return
            self._act(message)

    def _next(self) -> protocol.Message:
        while True:
            with self._receiving:
                if self._received:
                    return self._received.popleft()
                self._received.extend(self._jobs.receive())

    def _act(self, message: protocol.Message) -> None:
        if isinstance(message, protocol.Run):
            self._run(message)
        elif isinstance(message, protocol.Announce):
            self._announce(message)
        elif isinstance(message, (protocol.Load, protocol.Unload)):
            self._change_model(message)
        elif not isinstance(message, protocol.Answer):  # an alarm may have ended the wait for it
            raise protocol.ProtocolError(f"an executor takes no {type(message).__name__} message")

    def _run(self, message: protocol.Run) -> None:
        if message.key <= self._recalled:
            self._jobs.send(protocol.Recalled([message.key]))
            return
        self._value = None
        self._peak.reset()
        job = running.Running(message.key, self._jobs.send, self._requests.wake)
        self.current = job
        try:
            # The request may have come on the control thread just before the job.
            if (reason := self._ends.get(message.key)) is not None:
                outcome = outcomes.Outcome("cancelled", 0.0, error=reason)
            else:
                outcome = self._outcome(message, job)
            # An alarm that the handler left behind must not prevent the send.
            _set_signal_mask(_ALL)
            try:
                self._send_outcome(message, job, outcome)
            finally:
                _set_signal_mask(())
        finally:
            self.current = None
            self._ended = message.key
            self._ends.pop(message.key, None)

    def _send_outcome(
        self, message: protocol.Run, job: running.Running, outcome: outcomes.Outcome
    ) -> None:
        streams.flush()
        self._output.end(message.key)
        if outcome.kind == "completed":
            if config.get_config().on_node_completed is not None:
                self._value = (message.key, outcome.value)
            outcome = outcome._replace(vm_rss_mb_peak=node_call.peak_rss_mb())
        self._jobs.send(*job.take_unsent(), protocol.message_of(message.key, outcome))

    def _outcome(self, message: protocol.Run, job: running.Running) -> outcomes.Outcome:
        ask_step = functools.partial(self._ask_step, message.key)
        try:
            if message.family == "node":
                return nodes.run(
                    message,
                    job,
                    model_cache=self._cache,
                    runner=self._runner,
                    ask=self._ask,
                    ask_step=ask_step,
                    send=self._jobs.send,
                )
            return task_call.call(message.job, job, self._runner, ask_step)
        except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001  the app's signal handlers
            if message.family == "node":
                return node_call.failed(message.job, error, 0.0)
            return task_call.failed(message.job, error, 0.0)

    def _ask(self, key: int, what: str, request: JsonDict | None = None) -> Any:
        """Return the worker's answer. Raises `DatabaseUnavailable` if the worker has none."""
        with self._asking:
            self._jobs.send(protocol.Ask(key, what, request))
            later: list[protocol.Message] = []
            try:
                while True:
                    message = self._next()
                    if isinstance(message, protocol.Answer) and message[:2] == (key, what):
                        break
                    later.append(message)
            finally:
                self._received.extendleft(reversed(later))
        if message.error is not None:
            raise errors.DatabaseUnavailable(message.error)
        return message.value

    def _ask_step(self, key: int, request: JsonDict) -> attempt_steps.Answered:
        """Return the worker's answer about a step of this job; raise it for one that has ended."""
        with self._asking:
            if (job := self.current) is None or job.key != key:
                raise errors.NoCurrentJob("the job of this step has ended")
            self._asked += 1
            what = f"step {self._asked}"
            return attempt_steps.answered(lambda: self._ask(key, what, request))

    def _announce(self, message: protocol.Announce) -> None:
        if self._value is not None and self._value[0] == message.key:
            node_hook.call(message, self._value[1])
        self._value = None
        streams.flush()
        self._jobs.send(protocol.Announced(message.key))

    def _change_model(self, message: protocol.Load | protocol.Unload) -> None:
        error, cache = None, self._cache
        if cache is None:
            error = "this executor has no models"
        elif isinstance(message, protocol.Load):
            error = model_changes.load(cache, message.model)
        elif message.idle_only:
            cache.reap_idle_once()
        else:
            error = model_changes.unload(cache)
        streams.flush()
        self._send_model()
        self._jobs.send(protocol.ModelDone(error))

    def _send_model(self) -> None:
        cache = self._cache
        held = None if cache is None else cache.resident
        loading = None if cache is None else cache.loading_model
        if held is None:
            self._jobs.send(protocol.Model(None, loading, 0.0, 0.0, 0.0))
            return
        self._jobs.send(
            protocol.Model(held.id, loading, held.load_s, held.held_s, held.est_vram_gb)
        )

    def _key(self) -> int | None:
        job = self.current
        return None if job is None else job.key

    def _quit(self) -> None:
        if self._cache is not None:
            with contextlib.suppress(errors.ModelLoadFailed):
                self._cache.drop_cache()
        self._runner.close()
        forking.prepare()
        atexit._run_exitfuncs()  # pyright: ignore[reportPrivateUsage]
        streams.flush()

    # The control thread.

    def _hear(self, message: protocol.Message) -> None:
        if isinstance(message, protocol.Cancel):
            self._end(message)
        elif isinstance(message, protocol.Recall):
            self._recall(message.last)

    def _end(self, message: protocol.Cancel) -> None:
        if message.key <= self._ended:
            return
        self._ends.setdefault(message.key, message.reason)
        job = self.current
        if job is not None and job.key == message.key:
            job.request(message.reason)

    def _recall(self, last: int) -> None:
        self._recalled = last
        if not self._receiving.acquire(blocking=False):
            return  # the main thread waits for a message: nothing waits to be recalled
        try:
            while self._jobs.is_readable():
                self._received.extend(self._jobs.receive())
            taken = [each for each in self._received if isinstance(each, protocol.Run)]
            for each in taken:
                self._received.remove(each)
        finally:
            self._receiving.release()
        self._jobs.send(protocol.Recalled([each.key for each in taken]))

    def _flush(self) -> bool:
        """Send a report that was too early to be sent; return whether there was one."""
        job = self.current
        unsent = [] if job is None else job.take_unsent()
        if unsent:
            self._jobs.send(*unsent)
        return bool(unsent)


def _set_signal_mask(signals: Collection[int]) -> None:
    """Block these signals alone; log what a signal handler of the app raises at this moment."""
    try:
        _sigmask(signal.SIG_SETMASK, signals)
    except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001  the mask is set before it raises
        _log.warning("between two jobs: %s: %s", type(error).__name__, error)
