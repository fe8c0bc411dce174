"""Run a task function of any kind: plain, generator, coroutine or async generator.

Async ones run on a reused event loop, and end at the await or yield they are at.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import contextvars
import functools
import inspect
import logging
import os
import weakref
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Generator, Iterable
from typing import Any, Final, TypeVar, cast

from queue_workflows import errors
from queue_workflows.runtime import service
from queue_workflows.tasks import control

T = TypeVar("T")
_log = logging.getLogger(__name__)
TIDY_S = 2.0
"""Seconds for leftover tasks of handlers to end when their handler ends, or the loop closes.

Threads are not waited for.
"""
_started: contextvars.ContextVar[set[asyncio.Task[Any]] | None] = contextvars.ContextVar(
    "async_tasks", default=None
)
"""The running tasks that the handler of this context has started."""
stuck: Final[weakref.WeakSet[asyncio.Task[Any]]] = weakref.WeakSet()
"""Tasks of handlers that have ended which ran on although they were cancelled."""


class Runner:
    """Run handlers on the calling thread, async ones on an event loop of its own.

    The loop is made on first use and kept until `close`. `alone`: a child that a handler forks ends
    where it would serve this loop, too.
    """

    def __init__(self, *, alone: bool = False) -> None:
        self._alone = alone
        self._loop: asyncio.AbstractEventLoop | None = None
        self._over = False
        self._served: set[asyncio.Task[None]] = set()
        """The running handlers: an event loop itself keeps only weak references."""

    @property
    def inner(self) -> asyncio.AbstractEventLoop:
        """Return the event loop of asyncio."""
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            if self._alone:
                _end_children(self._loop)
            self._loop.set_task_factory(_make_task)
            self.keep()
        return self._loop

    def run(self, value: Any, control_: control.Control) -> Any:
        """Return the result of a handler; `value` is what calling the task returned.

        Each yielded value is reported to `control_`, which may interrupt the handler there or at an
        await. Raises `Interrupted` once an interrupted handler has ended.
        """
        if type(value) is dict:
            return value  # pyright: ignore[reportUnknownVariableType]
        if isinstance(value, Generator):
            return _follow(cast("Generator[Any, None, Any]", value), control_)
        if not isinstance(value, (Awaitable, AsyncGenerator)):
            return value
        handler = cast("Awaitable[Any] | AsyncGenerator[Any, None]", value)
        return _run_without_loop(lambda: self._run(run_async(handler, control_)))

    def _run(self, handler: Coroutine[Any, Any, T]) -> T:
        task = self.inner.create_task(handler)
        try:
            return self.inner.run_until_complete(task)
        except BaseException:
            if not task.done():
                # A task that the handler had started called sys.exit, which ends the loop's run.
                task.cancel()
                self.inner.run_until_complete(asyncio.wait([task]))
            if not task.cancelled():
                task.exception()  # it is handled, and asyncio must not log it again
            raise
        finally:
            self.reset()

    def close(self) -> None:
        """Cancel leftover tasks of async handlers on the loop, and close it."""
        if self._loop is not None:
            _run_without_loop(self._close)
            self._loop = None

    def _close(self) -> None:
        async def tidy() -> None:
            await _cancel(asyncio.all_tasks() - {asyncio.current_task()})
            await asyncio.get_running_loop().shutdown_asyncgens()

        try:
            self.inner.run_until_complete(tidy())
        finally:
            self.inner.close()

    def keep(self) -> None:
        """Let `reset` undo what changes about the event loop from now on."""
        self._kept = self._settings()

    def _settings(self) -> tuple[Any, ...]:
        own = self.inner
        how = own.get_debug(), own.slow_callback_duration
        return *how, own.get_exception_handler(), own.get_task_factory()

    def reset(self) -> None:
        """Undo what a handler has changed about the event loop."""
        if self._settings() != self._kept:
            debug, self.inner.slow_callback_duration, on_error, factory = self._kept
            self.inner.set_debug(debug)
            self.inner.set_exception_handler(on_error)
            self.inner.set_task_factory(factory)

    # --- A loop that serves many async handlers.

    def serve(self) -> None:
        """Run the handlers that `spawn` adds until `end` is called, then close the loop.

        If a handler stops the loop, or raises SystemExit in a task, the loop is run again, so that
        the other handlers continue.
        """
        try:
            while not self._over:
                try:
                    self.inner.run_forever()
                except (SystemExit, KeyboardInterrupt) as error:
                    _log.warning(
                        "a task that a handler had started raised %s", type(error).__name__
                    )
        finally:
            self._close()

    def spawn(self, handler: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Start this coroutine on the loop that another thread serves, or is about to."""

        def begin() -> None:
            task = self.inner.create_task(handler())
            self._served.add(task)
            task.add_done_callback(self._served.discard)

        self.inner.call_soon_threadsafe(begin)

    def end(self) -> None:
        """Let `serve` end; callable from any thread, once."""
        self._over = True
        self.inner.call_soon_threadsafe(self.inner.stop)


def _follow(handler: Generator[Any, None, Any], control_: control.Control) -> Any:
    try:
        yielded = next(handler)
        while True:
            control_.report_progress(yielded)
            if isinstance(yielded, errors.JobSignal):
                _close(handler, control_)
                raise yielded
            if (reason := control_.interrupted) is not None:
                _end(handler, control_)
                raise control.Interrupted(reason)
            yielded = next(handler)
    except StopIteration as end:
        return end.value


def _close(handler: Generator[Any, None, Any], control_: control.Control) -> None:
    """End the generator as an error at its yield would: its `finally` may yield and raise."""
    try:
        yielded = handler.throw(GeneratorExit())
        for _ in range(control.LAST_YIELDS):
            control_.report_progress(yielded)
            yielded = next(handler)
    except (StopIteration, GeneratorExit):
        return
    handler.close()


def _end(handler: Generator[Any, None, Any], control_: control.Control) -> None:
    """Raise GeneratorExit at each yield until the generator ends; the worker sets a time limit."""
    while True:
        try:
            yielded = handler.throw(GeneratorExit())
        except (StopIteration, GeneratorExit):
            return
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # noqa: BLE001  the boundary around app code
            control.not_clean(error)
            return
        control_.report_progress(yielded)


def unless_signal(value: Any) -> Any:
    """Return the result of a handler, or raise it if it is a `JobSignal`."""
    if isinstance(value, errors.JobSignal):
        raise value
    return value


def is_async(task: Callable[..., Any], *, or_generator: bool = False) -> bool:
    """Return whether calling the task returns a coroutine or an async generator.

    `or_generator`: or any other generator; a worker can end all of them at a yield or await.
    """
    while isinstance(task, functools.partial):
        task = task.func
    if not (inspect.isroutine(task) or inspect.isclass(task)):
        task = type(task).__call__
    if inspect.isgeneratorfunction(task):
        return or_generator
    return inspect.iscoroutinefunction(task) or inspect.isasyncgenfunction(task)


# --- Async handlers.


def _run_without_loop(call: Callable[[], T]) -> T:
    """Call it here, or on another thread if a loop runs here already (an app's async test)."""
    running = None
    with contextlib.suppress(RuntimeError):
        running = asyncio.get_running_loop()
    if running is None:  # not in the except clause, which an error of the call would name
        return call()
    context, ended = contextvars.copy_context(), concurrent.futures.Future[T]()

    def run(_: object) -> None:
        try:
            ended.set_result(context.run(call))
        except BaseException as error:  # noqa: BLE001  raised in the waiting thread
            ended.set_exception(error)

    with service.Thread("task-loop", run):
        return ended.result()


async def _cancel(tasks: Iterable[asyncio.Task[Any]]) -> None:
    left = {*tasks}
    for task in left:
        task.cancel()
    if left:
        _, late = await asyncio.wait(left, timeout=TIDY_S)
        stuck.update(late)


def _end_children(loop: Any) -> None:
    """Let a forked process end before it waits for the loop, whose selector it shares."""
    selector = getattr(loop, "_selector", None)
    if selector is None:  # a loop of the app's own
        return
    own, select = os.getpid(), selector.select

    def checked(timeout: float | None = None) -> Any:
        if os.getpid() != own:
            os._exit(0)
        return select(timeout)

    selector.select = checked


def _make_task(loop: asyncio.AbstractEventLoop, handler: Any, **more: Any) -> asyncio.Task[Any]:
    task = asyncio.Task[Any](handler, loop=loop, **more)
    context: contextvars.Context | None = more.get("context")
    started = _started.get() if context is None else context.get(_started)
    if started is not None:
        started.add(task)
        task.add_done_callback(started.discard)
    return task


async def run_async(
    handler: Awaitable[Any] | AsyncGenerator[Any, None], control_: control.Control
) -> Any:
    """Run an async handler and return its value; None for a generator, which cannot return one.

    Each yielded value is reported to `control_`. On an interrupt the handler gets CancelledError at
    its await, or GeneratorExit at its yield, once; afterwards GeneratorExit at each further yield.
    Raises `Interrupted` once it has ended. Cancels the tasks that it has started.
    """
    request, result = _EndRequest(control_), None
    started = set[asyncio.Task[Any]]()
    token = _started.set(started)
    control_.when_interrupted(request.send_soon)
    try:
        if isinstance(handler, AsyncGenerator):
            await _follow_async(handler, control_, request)
        else:
            result = await handler
    except BaseException as error:
        if not request.sent or isinstance(error, KeyboardInterrupt):
            raise
        if not isinstance(error, (asyncio.CancelledError, GeneratorExit)):
            control.not_clean(error)
    finally:
        request.over = True
        control_.when_interrupted(None)
        _started.reset(token)
        if started:
            await _cancel(started)
    if request.sent:
        raise control.Interrupted(control_.interrupted or "")
    return result


class _EndRequest:
    """A request to a handler to end; only `send_soon` may be called outside the loop's thread."""

    def __init__(self, control_: control.Control) -> None:
        self._control = control_
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.current_task()
        self.sent = False
        self.over = False
        self.at_yield = False

    def send_soon(self) -> None:
        """Request the handler's end, from any thread."""
        self._loop.call_soon_threadsafe(self._send)

    def _send(self) -> None:
        # A handler at a yield gets the request there: a cancel would hit `run_async` itself.
        if not (self.sent or self.over or self.at_yield) and self._task is not None:
            self.sent = True
            self._task.cancel()

    async def should_end(self) -> bool:
        """Let the loop's other tasks run at a yield; return whether the handler is to end."""
        self.at_yield = True
        await asyncio.sleep(0)
        self.at_yield = False
        if self._control.interrupted is not None:
            self.sent = True
        return self.sent


async def _close_async(handler: AsyncGenerator[Any, None], control_: control.Control) -> None:
    """Close an async generator as `_close` closes a generator."""
    try:
        yielded = await handler.athrow(GeneratorExit())
        for _ in range(control.LAST_YIELDS):
            control_.report_progress(yielded)
            yielded = await handler.__anext__()
    except (StopAsyncIteration, GeneratorExit):
        return
    await handler.aclose()


async def _follow_async(
    handler: AsyncGenerator[Any, None], control_: control.Control, request: _EndRequest
) -> None:
    try:
        yielded = await handler.__anext__()
        while True:
            control_.report_progress(yielded)
            if isinstance(yielded, errors.JobSignal):
                await _close_async(handler, control_)
                raise yielded
            if await request.should_end():
                yielded = await handler.athrow(GeneratorExit())
            else:
                yielded = await handler.__anext__()
    except StopAsyncIteration:
        return
