"""Running a body of any kind: a value, a generator, a coroutine, an async generator."""

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
    """Runs bodies in the thread that calls, async ones on one event loop that is made for them.

    The loop is kept until `close`, and stands still while no async body runs.
    """

    def __init__(self) -> None:
        self._loop: async_handlers.Loop | None = None

    def run(self, value: Any, control_: control.Control) -> Any:
        """What a body leaves, of which calling the task gave `value`.

        Each yield is told to `control_`, which may interrupt it there, or at an await: then raises
        `Interrupted` once it has ended.
        """
        if type(value) is dict:
            return value  # pyright: ignore[reportUnknownVariableType]
        if isinstance(value, Generator):
            return _follow(cast("Generator[Any, None, Any]", value), control_)
        if not isinstance(value, (Awaitable, AsyncGenerator)):
            return value
        from queue_workflows.tasks import async_handlers

        if self._loop is None:
            self._loop = async_handlers.Loop()
        body = cast("Awaitable[Any] | AsyncGenerator[Any, None]", value)
        return self._loop.run(lambda: async_handlers.drive(body, control_))

    def close(self) -> None:
        """Cancel what async bodies have left on the loop, and close it."""
        if self._loop is not None:
            self._loop.close()
            self._loop = None


def _follow(body: Generator[Any, None, Any], control_: control.Control) -> Any:
    try:
        said = next(body)
        while True:
            control_.said(said)
            if isinstance(said, errors.JobSignal):
                _close(body, control_)
                raise said
            if (reason := control_.interrupted) is not None:
                _end(body, control_)
                raise control.Interrupted(reason)
            said = next(body)
    except StopIteration as end:
        return end.value


def _close(body: Generator[Any, None, Any], control_: control.Control) -> None:
    """End it as an error at its yield would: what stands in `finally` may yield, and raise."""
    try:
        said = body.throw(GeneratorExit())
        for _ in range(control.LAST_YIELDS):
            control_.said(said)
            said = next(body)
    except (StopIteration, GeneratorExit):
        return
    body.close()


def _end(body: Generator[Any, None, Any], control_: control.Control) -> None:
    """Raise GeneratorExit at its yields until it ends; the worker bounds how long that takes."""
    while True:
        try:
            said = body.throw(GeneratorExit())
        except (StopIteration, GeneratorExit):
            return
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # noqa: BLE001  the boundary around host code
            control.not_clean(error)
            return
        control_.said(said)


def is_async(task: Callable[..., Any]) -> bool:
    """Whether calling the task gives a coroutine or an async generator; by its definition."""
    found = _function(task)
    return inspect.iscoroutinefunction(found) or inspect.isasyncgenfunction(found)


def can_be_ended(task: Callable[..., Any]) -> bool:
    """Whether the task yields or awaits, so that a worker can end it there; by its definition."""
    return is_async(task) or inspect.isgeneratorfunction(_function(task))


def _function(task: Callable[..., Any]) -> Callable[..., Any]:
    while isinstance(task, functools.partial):
        task = task.func
    if inspect.isroutine(task) or inspect.isclass(task):
        return task
    return type(task).__call__
