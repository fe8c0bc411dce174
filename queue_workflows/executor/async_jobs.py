"""Run the main loop of an executor with many async jobs at once, on one event loop."""

from __future__ import annotations

import contextvars
import os
import socket

from queue_workflows import config
from queue_workflows.engine import outcomes
from queue_workflows.executor import channel, control, log_sender, protocol, running, streams
from queue_workflows.handlers import task_call
from queue_workflows.runtime import service
from queue_workflows.tasks import async_handlers, handlers

_key: contextvars.ContextVar[int | None] = contextvars.ContextVar("executor_job", default=None)
"""The job whose handler runs in this context."""


class AsyncJobs:
    """Run the async tasks of `Run` messages concurrently, on the main thread's event loop.

    A task that is not async runs there too, and holds up the others. One thread receives jobs,
    another receives requests about them. What handlers print belongs to no job in particular.
    """

    def __init__(self, jobs: socket.socket, requests: socket.socket) -> None:
        self._jobs = channel.Channel(jobs, blocking=True)
        self._loop = async_handlers.Loop()
        self._running: dict[int, running.Running] = {}
        self._last = 0
        """The key of the last job that came."""
        self._quitting = False
        self._ends: dict[int, str] = {}
        """Why jobs are to end that had not come when the request came."""
        self._requests = control.Requests(requests)
        self._requests.idle = self._flush
        log_sender.install(self._send_log)

    def send(self, message: protocol.Message) -> None:
        """Send a message to the worker."""
        self._jobs.send(message)

    def serve(self) -> None:
        """Run jobs until `Quit` and the end of those that run then."""
        service.Follow("executor-control", self._requests, self._hear).start()
        service.Follow("executor-jobs", control.Received(self._jobs), self._receive).start()
        self._loop.serve()
        streams.flush()

    # The thread that receives jobs.

    def _receive(self, message: protocol.Message) -> None:
        if isinstance(message, protocol.Quit):
            self._loop.spawn(self._quit)
        elif isinstance(message, protocol.Run) and message.family == "ingest":
            job = running.Running(message.key, self._jobs.send, self._requests.wake)
            self._running[message.key] = job
            self._last = message.key
            if (reason := self._ends.pop(message.key, None)) is not None:
                job.request(reason)
            self._loop.spawn(lambda: self._run(message, job))
        else:
            os._exit(channel.LOST)  # the worker does not know what it talks to

    # The event loop.

    async def _run(self, message: protocol.Run, job: running.Running) -> None:
        _key.set(message.key)
        try:
            outcome = await self._outcome(message, job)
        except KeyboardInterrupt as error:
            outcome = task_call.failed(message.job, error, 0.0)
        streams.flush()
        self._running.pop(message.key, None)
        self._jobs.send(*job.take_unsent(), protocol.message_of(message.key, outcome))
        self._end_if_done()

    async def _outcome(self, message: protocol.Run, job: running.Running) -> outcomes.Outcome:
        task = config.get_config().ingest_task_map.get(message.job["task_name"])
        if task is None or handlers.is_async(task):
            return await task_call.call_async(message.job, job)
        return task_call.call(message.job, job, handlers.Runner())

    async def _quit(self) -> None:
        self._quitting = True
        self._end_if_done()

    def _end_if_done(self) -> None:
        if self._quitting and not self._running:
            self._loop.end()

    # The control thread, and any thread.

    def _hear(self, message: protocol.Message) -> None:
        if not isinstance(message, protocol.Cancel):
            return
        job = self._running.get(message.key)
        if job is None and message.key > self._last:
            self._ends[message.key] = message.reason
            job = self._running.get(message.key)  # it may have come meanwhile
        if job is not None:
            job.request(message.reason)

    def _flush(self) -> bool:
        unsent = [each for job in [*self._running.values()] for each in job.take_unsent()]
        if unsent:
            self._jobs.send(*unsent)
        return bool(unsent)

    def _send_log(self, level: int, name: str, text: str, *, printed: bool) -> None:
        self._jobs.send(protocol.Log(_key.get(), level, name, text, printed))
