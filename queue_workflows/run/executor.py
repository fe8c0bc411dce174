"""Run an executor: a forked process that runs handlers, one job after the other.

The worker's requests about the running job come on a socket of their own, which a thread reads.
Nothing here guards the lease: the launcher and the kernel do.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import logging
import os
import resource
import signal
import socket
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple, NoReturn

from queue_workflows import config, errors
from queue_workflows.engine import outcomes
from queue_workflows.handlers import node_call, task_call
from queue_workflows.model_cache import ModelCache, RequiresModels, adapted
from queue_workflows.run import (
    channel,
    job_output,
    kernel,
    loaded_app,
    nodes,
    restored_state,
    running,
    streams,
    wire,
)
from queue_workflows.runtime import forking, json_loading, service
from queue_workflows.tasks import control, handlers
from queue_workflows.types import JsonDict, Row

if TYPE_CHECKING:
    from queue_workflows.run import async_jobs

_log = logging.getLogger(__name__)
ERROR_CHARS: Final = 1000


class App(NamedTuple):
    """What an executor needs of the worker's configuration; called in a forked process."""

    load: Callable[[], object]
    """Imports the app."""
    model_cache: Callable[[], RequiresModels | None] = lambda: None
    """Returns the cache of models, for nodes that need one."""
    stop_policies: Callable[[], Mapping[str, Callable[..., object]]] = dict
    """Returns the stop policies of the app by name."""


def ignore(_signum: int, _frame: object) -> None:
    """Ignore a signal; other than SIG_IGN it is not inherited by what a handler executes."""


def prepare() -> type[async_jobs.AsyncJobs]:
    """Import what executors need, so that each has it when it is forked."""
    from queue_workflows.run import async_jobs

    return async_jobs.AsyncJobs


def load(app: App) -> dict[str, Any]:
    """Load the app in this process; return what it registered as JSON, or its error."""
    before, own = dict(os.environ), os.getpid()
    try:
        app.load()
    except BaseException as error:  # noqa: BLE001  the boundary around app code: it may exit
        return {"error": loaded_app.describe_error(error)}
    finally:
        if os.getpid() != own:
            os._exit(0)  # a child that the app has forked and let return
    found = loaded_app.collect(before, app.stop_policies())._asdict()
    return {"error": None, "registered": found}


def main(
    fds: Sequence[int],
    inherited: Sequence[int],
    app: App,
    parent: int,
    *,
    late: bool,
    shared: bool,
) -> NoReturn:
    """Run handlers in this forked process and never return.

    `fds`: the descriptors that the worker sent. `inherited`: those to close. `late`: load the app.
    `shared`: run many async handlers at once.
    """
    code = 1
    try:
        os.setpgid(0, 0)
        kernel.die_with(parent)
        kernel.set_title(f"queue_workflows executor of launcher {parent}")
        for fd in inherited:
            os.close(fd)
        end, interrupts = _prepared(fds[:4])
        serves = _started(end, interrupts, app, fds[4:], late=late, shared=shared)
        end.send(wire.READY, 0, wire.encoded({"text": ""}))
        serves.serve()
        forking.end()
        code = 0
    except ConnectionError:
        code = wire.LOST
    except BaseException:  # noqa: BLE001  the main function of a process
        with contextlib.suppress(BaseException):
            traceback.print_exc()
    finally:
        os._exit(code)


def _started(
    end: channel.Channel,
    interrupts: socket.socket,
    app: App,
    other_output: Sequence[int],
    *,
    late: bool,
    shared: bool,
) -> JobLoop | async_jobs.AsyncJobs:
    """Return what serves the worker, with its threads, or tell the worker why it cannot."""
    try:
        if late and (error := load(app)["error"]) is not None:
            raise errors.AppFailed(error["text"])
        if shared:
            return prepare()(end)
        cache = adapted(app.model_cache())
        return JobLoop(end, interrupts, cache, other_output=other_output)
    except BaseException as error:
        text = f"{type(error).__name__}: {error}"
        end.send(wire.READY, 0, wire.encoded({"text": text}))
        raise


def _prepared(fds: Sequence[int]) -> tuple[channel.Channel, socket.socket]:
    """Make this process one that handlers may run in; return its ends of the two sockets."""
    ends = [socket.socket(fileno=wire.high(fd)) for fd in fds[:2]]
    streams.redirect(*fds[2:])
    signal.signal(signal.SIGTERM, ignore)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    numpy_random: Any = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed()  # as `random` does after a fork: each executor has numbers of its own
    _watch_forks(ends)
    return channel.Channel(ends[0]), ends[1]


def _watch_forks(ends: Sequence[socket.socket]) -> None:
    """Let a child that a handler forks leave the executor, and die by the first SIGTERM."""
    masks: list[set[int]] = []

    def before() -> None:
        masks.append(signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM}))

    def after() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, masks.pop())

    def in_child() -> None:
        for end in ends:
            end.close()
        if signal.getsignal(signal.SIGTERM) is ignore:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        after()

    os.register_at_fork(before=before, after_in_parent=after, after_in_child=in_child)


class _PeakMemory:
    """Reset the peak RSS of this process (VmHWM), so that each job has its own."""

    def __init__(self) -> None:
        self._reset_kb = 0
        self._fd: int | None = None
        with contextlib.suppress(OSError):
            self._fd = wire.high(os.open("/proc/self/clear_refs", os.O_WRONLY | os.O_CLOEXEC))

    def reset(self) -> None:
        """Make the present RSS the peak, if the peak has grown by a megabyte since the last time.

        To ask for the peak takes a tenth of the time of a reset.
        """
        if self._fd is None:
            return
        if resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < self._reset_kb + 1024:
            return
        try:
            os.write(self._fd, b"5")
        except OSError:  # the handler closed it
            self._fd = None
        self._reset_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


class JobLoop:
    """The state of an executor that runs one job at a time.

    `alone`: whether the process is for this alone. Else the caller's thread runs the handlers, and
    keeps its log and its state, and lives on when the requests of the worker end.
    """

    def __init__(
        self,
        end: channel.Channel,
        interrupts: socket.socket,
        model_cache: ModelCache | None,
        *,
        alone: bool = True,
        other_output: Sequence[int] = (),
    ) -> None:
        """`other_output`: what stdout and stderr are for jobs with even keys."""
        self._channel = end
        self._pid = os.getpid()
        self._alone = alone
        self._requests = channel.Requests(interrupts, self._lost, self._flush)
        self._ends: dict[int, str] = {}
        """By key, why a job is not to begin; empty if it has begun."""
        self._ended = 0
        """The key of the last job whose handler has ended."""
        self._cache = model_cache
        self._runner = handlers.Runner(alone=alone)
        self._received: deque[channel.Frame] = deque()
        self._asking = threading.RLock()
        """Held by the thread that waits for an answer; a handler may use several threads."""
        self._asked = 0
        self.current: running.Running | None = None
        self._earlier: list[threading.Thread] = []
        """Threads that earlier handlers have left, where the process is not for this alone."""
        self._value: tuple[int, Any] | None = None
        """The value of the last completed job, for `on_node_completed`."""
        self._peak = _PeakMemory()
        self._leaves = False
        """Whether it runs no further job."""
        self._left = ""
        """What the last job has found that this process cannot undo."""
        if model_cache is not None:
            model_cache.set_publisher(lambda _: self._send_model())
        self._hearing = service.Follow("executor-requests", self._requests, self._hear)
        self._hearing.start()
        self._state: restored_state.RestoredState | None = None
        if alone:
            job_output.send_records(self._send_log, self.key)
            self._state = restored_state.RestoredState(other_output)

    def serve(self) -> None:
        """Run jobs until QUIT."""
        while True:
            try:
                kind, key, body = self._next()
            except ConnectionError:
                raise
            except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001  a signal handler of the app
                # Which an alarm of an ended job called.
                _log.warning("between two jobs: %s: %s", type(error).__name__, error)
                continue
            if kind == wire.QUIT:
                self._quit()
                return
            if kind in (wire.RUN_TASK, wire.RUN_NODE):
                if self._leaves:
                    continue  # the worker knows that this job does not run
                try:
                    contextvars.copy_context().run(self._run, kind, key, body)
                    self._restore(key)
                finally:
                    _block(())
            elif kind == wire.ANNOUNCE:
                contextvars.copy_context().run(self._announce, key, body)
            elif kind == wire.LOAD:
                self._change_model(wire.decoded(body))

    def _restore(self, key: int) -> None:
        left = "" if self._state is None else self._left or self._state.restore(key + 1)
        if handlers.stuck and not (left or all(t.done() for t in handlers.stuck)):
            left = "an async task that does not end"
        if left and self._state is not None:
            self._leaves = True
            self._channel.send(wire.LEAVES, key, left.encode("utf-8", "backslashreplace"))

    def _next(self) -> channel.Frame:
        while not self._received:
            self._received.extend(self._channel.receive())
        return self._received.popleft()

    def key(self) -> int:
        """Return the key of the job that runs, or 0; any thread may ask."""
        job = self.current
        if job is None or (self._earlier and threading.current_thread() in self._earlier):
            return 0
        return job.key

    # --- Jobs.

    def _run(self, kind: int, key: int, body: bytes) -> None:
        """Run a job; the signals of the app are blocked afterwards."""
        self._value = None
        job = running.Running(key, self._channel.send, self._requests.wake)
        in_run = kind == wire.RUN_NODE
        self._peak.reset()
        row = json_loading.load_row(body)
        if self._state is None:
            own = threading.current_thread()
            self._earlier = [each for each in threading.enumerate() if each is not own]
        self.current = job
        try:
            if self._ends.setdefault(key, ""):
                return  # the thread of requests has answered
            try:
                outcome = self._outcome(row, job, in_run=in_run)
                # An alarm that the handler left behind must not prevent the send.
                _block(channel.handled_signals())
            except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001  the app's signal handlers
                _block(channel.handled_signals())
                outcome = (node_call if in_run else task_call).failed(row, error, 0.0)
            # A process that has once failed to open its GPU may never see it.
            self._left = outcome.error if outcome.raised.wish in ("no_gpu", "no_memory") else ""
            self._send_outcome(job, outcome, in_run=in_run)
        finally:
            self.current = None
            self._ended = key
            self._ends.pop(key, None)

    def _outcome(self, row: Row, job: running.Running, *, in_run: bool) -> outcomes.Outcome:
        ask_step = functools.partial(self._ask_step, job.key)
        call = node_call if in_run else task_call
        if (refused := call.refused(row)) is not None:
            return refused
        if not in_run:
            return task_call.call(row, job, self._runner, ask_step)
        return nodes.run(
            row,
            job,
            model_cache=self._cache,
            runner=self._runner,
            ask=self._ask,
            ask_step=ask_step,
            send=self._channel.send,
        )

    def _send_outcome(
        self, job: running.Running, outcome: outcomes.Outcome, *, in_run: bool
    ) -> None:
        forking.flush()
        if os.getpid() != self._pid:
            os._exit(outcome.kind != "completed")  # a child that the handler forked and let return
        if outcome.kind == "completed":
            if in_run and config.get_config().on_node_completed is not None:
                self._value = (job.key, outcome.value)
            frame = wire.frame(wire.COMPLETED, job.key, wire.completed_body(outcome))
        else:
            frame = wire.frame(wire.ENDED, job.key, wire.ended_body(outcome))
        self._channel.send_all(job.take_unsent() + frame, blocked=True)

    # --- The thread of requests.

    def _lost(self) -> None:
        if self._alone:
            os._exit(wire.LOST)
        self._hearing.stop()

    def _hear(self, request: tuple[int, str]) -> None:
        key, reason = request
        if key <= self._ended:
            return
        found = self._ends.setdefault(key, reason)
        job = self.current
        if found is reason:
            # It has not begun, and will not. It may be behind a job that runs for long.
            outcome = outcomes.Outcome("cancelled", 0.0, error=reason)
            self._channel.send(wire.ENDED, key, wire.ended_body(outcome))
        elif not found and job is not None and job.key == key:
            job.request(reason)

    def _flush(self) -> bool:
        """Send a report that was too early to be sent; return whether there was one."""
        job = self.current
        unsent = b"" if job is None else job.take_unsent()
        if unsent:
            self._channel.send_all(unsent)
        return bool(unsent)

    # --- Questions.

    def _ask(self, key: int, what: str, request: Any = None) -> Any:
        """Return the worker's answer. Raises as `answer_of` does."""
        with self._asking:
            self._asked += 1
            number = self._asked
            body = wire.encoded({"no": number, "what": what, "request": request})
            self._channel.send(wire.ASK, key, body)
            later: list[channel.Frame] = []
            try:
                while True:
                    frame = self._next()
                    if frame[0] == wire.ANSWER:
                        answer = wire.decoded(frame[2])
                        if answer["no"] == number:
                            break
                    else:
                        later.append(frame)
            finally:
                self._received.extendleft(reversed(later))
        return channel.answer_of(answer)

    def _ask_step(self, key: int, request: JsonDict) -> control.Answered:
        """Return the worker's answer about a step of this job; raise it for one that has ended."""
        with self._asking:
            if (job := self.current) is None or job.key != key:
                raise errors.NoCurrentJob("the job of this step has ended")
            return control.answered(lambda: self._ask(key, "step", request))

    # --- Hooks and models.

    def _announce(self, key: int, body: bytes) -> None:
        if self._value is not None and self._value[0] == key:
            nodes.announce(wire.decoded(body), self._value[1])
        self._value = None
        forking.flush()
        self._channel.send(wire.ANNOUNCED, key)

    def _change_model(self, change: JsonDict) -> None:
        error, cache = None, self._cache
        if cache is None:
            error = "this executor has no models"
        elif change.get("model") is not None:
            error = _change(cache, functools.partial(cache.require_model, change["model"]))
        elif change["idle_only"]:
            cache.reap_idle_once()
        else:
            error = _change(cache, cache.drop_cache)
        forking.flush()
        self._send_model()
        self._channel.send(wire.CHANGED, 0, wire.encoded(error))

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
            self._channel.send(wire.MODEL, self.key(), wire.encoded(model))

    def _send_log(self, key: int, record: JsonDict) -> None:
        self._channel.send(wire.LOG, key, wire.encoded(record))

    def _quit(self) -> None:
        if self._cache is not None:
            with contextlib.suppress(errors.ModelLoadFailed):
                self._cache.drop_cache()
        self._runner.close()

    def close(self) -> None:
        """End the thread of requests, in a process that goes on."""
        self._hearing.stop()
        self._requests.discard()
        self._runner.close()


def _change(cache: ModelCache, change: Callable[[], object]) -> str | None:
    """Load or unload a model; return why that failed, or None. Raises KeyboardInterrupt only."""
    cache.mark_busy()
    try:
        change()
    except errors.QueueWorkflowsError as error:
        return str(error)[:ERROR_CHARS]
    except (Exception, SystemExit) as error:  # noqa: BLE001  the boundary around app code
        return f"{type(error).__name__}: {error}"[:ERROR_CHARS]
    finally:
        cache.mark_idle()
    return None


def _block(signals: Collection[int]) -> None:
    """Block these signals alone; log what a signal handler of the app raises at this moment."""
    try:
        channel.sigmask(signal.SIG_SETMASK, signals)
    except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001  the mask is set before it raises
        _log.warning("between two jobs: %s: %s", type(error).__name__, error)
