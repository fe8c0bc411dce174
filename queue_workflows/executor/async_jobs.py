"""Run the main loop of an executor with many async jobs at once, on one event loop."""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import contextvars
import functools
import itertools
import logging
import os
import socket
import threading
from typing import Any

from queue_workflows import config, errors
from queue_workflows.engine import outcomes
from queue_workflows.executor import (
    channel,
    control,
    job_output,
    log_sender,
    loop_watch,
    node_hook,
    nodes,
    protocol,
    running,
    streams,
    sync_thread,
)
from queue_workflows.handlers import node_call, task_call
from queue_workflows.runtime import forking, service
from queue_workflows.tasks import async_handlers, attempt_steps, handlers
from queue_workflows.types import JsonDict

_log = logging.getLogger(__name__)
_key: contextvars.ContextVar[int | None] = contextvars.ContextVar("executor_job", default=None)
"""The job whose handler runs in this context."""


class AsyncJobs:
    """Run the async handlers of `Run` messages concurrently, on the main thread's event loop.

    Handlers that are not async run on one further thread, one at a time. One thread receives jobs,
    another receives requests about them. A third one watches for a handler that blocks the loop.
    """

    def __init__(self, jobs: socket.socket, requests: socket.socket) -> None:
        self._jobs = channel.Channel(jobs, blocking=True)
        self._loop = async_handlers.Loop()
        self._sync = sync_thread.SyncThread()
        self._running: dict[int, running.Running] = {}
        self._messages: dict[int, protocol.Run] = {}
        """The jobs of `_running` as they came."""
        self._last = 0
        """The key of the last job that came."""
        self._values: dict[int, Any] = {}
        """The values of completed nodes until `Announce` or `Forget`."""
        self._asked: dict[tuple[int, str], concurrent.futures.Future[protocol.Answer]] = {}
        self._steps_asked = itertools.count(1)
        self._quitting = self._over = False
        self._ending = threading.Lock()
        self._ends: dict[int, str] = {}
        """Why jobs are to end that had not come when the request came."""
        self._requests = control.Requests(requests)
        self._requests.idle = self._flush
        self._output = job_output.JobOutput(_key.get, self._jobs.send)
        self._output.install()
        log_sender.install(self._jobs.send, _key.get, by_job=True)
        self._watch = loop_watch.LoopWatch(
            self._loop.inner, _key, self._warn, lambda: bool(self._running)
        )

    def send(self, message: protocol.Message) -> None:
        """Send a message to the worker."""
        self._jobs.send(message)

    def serve(self) -> None:
        """Run jobs until `Quit` and the end of those that run then."""
        service.Follow("executor-control", self._requests, self._hear).start()
        service.Follow("executor-jobs", control.Received(self._jobs), self._receive).start()
        self._watch.start()
        self._loop.serve()
        self._watch.stop()
        self._sync.stop()
        forking.prepare()
        atexit._run_exitfuncs()  # pyright: ignore[reportPrivateUsage]
        streams.flush()

    # The thread that receives jobs.

    def _receive(self, message: protocol.Message) -> None:
        if isinstance(message, protocol.Quit):
            self._quitting = True
            self._end_if_done()
        elif isinstance(message, protocol.Run):
            self._begin(message)
        elif isinstance(message, protocol.Answer):
            if (asked := self._asked.pop(message[:2], None)) is not None:
                asked.set_result(message)
        elif isinstance(message, protocol.Announce):
            self._sync.put(message.key, lambda _: self._announce(message))
        elif isinstance(message, protocol.Forget):
            self._values.pop(message.key, None)
            self._end_if_done()
        else:
            os._exit(channel.LOST)  # the worker does not know what it talks to

    def _begin(self, message: protocol.Run) -> None:
        key = message.key
        job = running.Running(key, self._jobs.send, self._requests.wake)
        self._messages[key], self._running[key] = message, job
        self._last = key
        if (reason := self._ends.pop(key, None)) is not None:
            job.request(reason)
        if len(self._running) == 1:
            self._watch.wake()
        if _is_async(message):
            self._loop.spawn(lambda: self._run(message, job))
        elif job.interrupted is not None:
            self._ended(message, job, outcomes.Outcome("cancelled", 0.0, error=job.interrupted))
        else:
            self._jobs.send(protocol.Waits(key))
            self._sync.put(key, lambda runner: self._run_sync(message, job, runner))

    # The event loop.

    async def _run(self, message: protocol.Run, job: running.Running) -> None:
        _key.set(message.key)
        self._watch.note(message.key)
        ask_step = functools.partial(self._ask_step, message.key)
        try:
            if message.family == "node":
                outcome = await nodes.run_async(
                    message, job, ask=self._ask_async, ask_step=ask_step, send=self.send
                )
            else:
                outcome = await task_call.call_async(message.job, job, ask_step)
        except KeyboardInterrupt as error:
            outcome = _failed(message, error)
        self._ended(message, job, outcome)

    async def _ask_async(self, key: int, what: str) -> Any:
        return _value_of(await asyncio.wrap_future(self._ask_for(key, what)))

    # The thread of handlers that are not async.

    def _run_sync(
        self, message: protocol.Run, job: running.Running, runner: handlers.Runner
    ) -> None:
        _key.set(message.key)
        self._jobs.send(protocol.Started(message.key))
        ask_step = functools.partial(self._ask_step, message.key)
        try:
            if message.family == "node":
                outcome = nodes.run(
                    message,
                    job,
                    model_cache=None,
                    runner=runner,
                    ask=self._ask,
                    ask_step=ask_step,
                    send=self.send,
                )
            else:
                outcome = task_call.call(message.job, job, runner, ask_step)
        except KeyboardInterrupt as error:
            outcome = _failed(message, error)
        self._ended(message, job, outcome)

    def _ask(self, key: int, what: str) -> Any:
        return _value_of(self._ask_for(key, what).result())

    def _announce(self, message: protocol.Announce) -> None:
        if message.key in self._values:
            node_hook.call(message, self._values[message.key])
        self._values.pop(message.key, None)
        self._jobs.send(protocol.Announced(message.key))
        self._end_if_done()

    # Any thread.

    def _ask_for(
        self, key: int, what: str, request: JsonDict | None = None
    ) -> concurrent.futures.Future[protocol.Answer]:
        found = self._asked[key, what] = concurrent.futures.Future[protocol.Answer]()
        self._jobs.send(protocol.Ask(key, what, request))
        return found

    def _ask_step(self, key: int, request: JsonDict) -> attempt_steps.Answered:
        """Return the worker's answer to come; raise `NoCurrentJob` for a job that has ended."""
        if key not in self._running:
            raise errors.NoCurrentJob("the job of this step has ended")
        value = concurrent.futures.Future[JsonDict]()
        asked = self._ask_for(key, f"step {next(self._steps_asked)}", request)
        asked.add_done_callback(lambda done: _pass_on(done.result(), value))
        return value

    def _ended(
        self, message: protocol.Run, job: running.Running, outcome: outcomes.Outcome
    ) -> None:
        streams.flush()
        self._output.end(message.key)
        hooked = message.family == "node" and config.get_config().on_node_completed is not None
        if hooked and outcome.kind == "completed":
            self._values[message.key] = outcome.value
        self._jobs.send(*job.take_unsent(), protocol.message_of(message.key, outcome))
        self._forget(message.key)

    def _forget(self, key: int) -> None:
        self._running.pop(key, None)
        self._messages.pop(key, None)
        self._end_if_done()

    def _end_if_done(self) -> None:
        with self._ending:
            if self._over or not self._quitting or self._running or self._values:
                return
            self._over = True
        self._loop.end()

    def _hear(self, message: protocol.Message) -> None:
        if isinstance(message, protocol.Recall):
            taken = self._sync.take_back(lambda key: key <= message.last and key in self._running)
            if taken:
                self._jobs.send(protocol.Recalled(taken))
            for key in taken:
                self._forget(key)
        elif isinstance(message, protocol.Cancel):
            self._interrupt(message)

    def _interrupt(self, message: protocol.Cancel) -> None:
        job = self._running.get(message.key)
        if job is None and message.key > self._last:
            self._ends[message.key] = message.reason
            job = self._running.get(message.key)  # it may have come meanwhile
        if job is None:
            return
        job.request(message.reason)
        run = self._messages.get(message.key)
        if run is not None and self._sync.take_back(lambda key: key == message.key):
            # Its handler would start only after that of another job.
            self._ended(run, job, outcomes.Outcome("cancelled", 0.0, error=message.reason))

    def _flush(self) -> bool:
        unsent = [each for job in [*self._running.values()] for each in job.take_unsent()]
        if unsent:
            self._jobs.send(*unsent)
        return bool(unsent)

    def _warn(self, key: int | None, seconds: float, place: str) -> None:
        message = None if key is None else self._messages.get(key)
        _log.warning(
            "%s has blocked the event loop for %.1f s, at %s; the other jobs (%d) wait: await what "
            "takes long, or call it by asyncio.to_thread()",
            "a callback" if message is None else _name(message),
            seconds,
            place,
            len(self._running) - 1,
        )


def _name(message: protocol.Run) -> str:
    job = message.job
    if message.family == "node":
        return f"node {job['node_id']!r} ({job['node_module']}, job {job['id']})"
    return f"task {job['task_name']!r} (job {job['id']})"


def _is_async(message: protocol.Run) -> bool:
    """Return whether the handler is async; one that cannot be found fails on the other thread."""
    try:
        if message.family == "node":
            return handlers.is_async(node_call.handler_of(message.job)[1])
        return handlers.is_async(config.get_config().ingest_task_map[message.job["task_name"]])
    except BaseException:  # noqa: BLE001  the boundary around app code: it imports the node's module
        return False


def _pass_on(answer: protocol.Answer, value: concurrent.futures.Future[JsonDict]) -> None:
    if not value.set_running_or_notify_cancel():
        return  # its handler was cancelled
    if answer.error is not None:
        value.set_exception(errors.DatabaseUnavailable(answer.error))
    else:
        value.set_result(answer.value)


def _value_of(answer: protocol.Answer) -> Any:
    if answer.error is not None:
        raise errors.DatabaseUnavailable(answer.error)
    return answer.value


def _failed(message: protocol.Run, error: BaseException) -> outcomes.Outcome:
    call = node_call if message.family == "node" else task_call
    return call.failed(message.job, error, 0.0)
