"""Run a task function of any kind: plain, generator, coroutine or async generator."""

from __future__ import annotations

import functools
import inspect
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from typing import TYPE_CHECKING, Any, cast

from queue_workflows import errors
from queue_workflows.tasks import control

if TYPE_CHECKING:
    from queue_workflows.tasks import async_handlers


class Runner:
    """Run handlers on the calling thread, async ones on an event loop of its own.

    The loop is kept until `close`, and does not run while no async handler runs. `alone`: see
    `async_handlers.Loop`.
    """

    def __init__(self, *, alone: bool = False) -> None:
        self._alone = alone
        self._loop: async_handlers.Loop | None = None

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
        from queue_workflows.tasks import async_handlers

        if self._loop is None:
            self._loop = async_handlers.Loop(alone=self._alone)
        handler = cast("Awaitable[Any] | AsyncGenerator[Any, None]", value)
        return self._loop.run(lambda: async_handlers.run_async(handler, control_))

    def close(self) -> None:
        """Cancel leftover tasks of async handlers on the loop, and close it."""
        if self._loop is not None:
            self._loop.close()
            self._loop = None


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
    """Raise GeneratorExit at each yield until the generator ends; the worker limits the time."""
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
    """Return what a handler returned; raise it if it is a `JobSignal`."""
    if isinstance(value, errors.JobSignal):
        raise value
    return value


def is_async(task: Callable[..., Any]) -> bool:
    """Return whether calling the task returns a coroutine or an async generator."""
    found = _function(task)
    return inspect.iscoroutinefunction(found) or inspect.isasyncgenfunction(found)


def can_be_ended(task: Callable[..., Any]) -> bool:
    """Return whether the task yields or awaits, so that a worker can end it there."""
    return is_async(task) or inspect.isgeneratorfunction(_function(task))


def _function(task: Callable[..., Any]) -> Callable[..., Any]:
    while isinstance(task, functools.partial):
        task = task.func
    if inspect.isroutine(task) or inspect.isclass(task):
        return task
    return type(task).__call__
