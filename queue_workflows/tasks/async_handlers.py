"""Async bodies: told to end at the await or yield where they wait, on a loop that is kept."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextvars
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from queue_workflows import errors
from queue_workflows.runtime import service
from queue_workflows.tasks import control

T = TypeVar("T")
_log = logging.getLogger(__name__)
TIDY_S = 2.0
"""What bodies have left on a loop may take to end when it is closed; threads are not waited for."""


class Loop:
    """One event loop, run in the thread that calls, kept from body to body until it is closed."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._over = False
        self._served: set[asyncio.Task[None]] = set()
        """An event loop itself keeps none of them alive."""

    def serve(self) -> None:
        """Run what `spawn` is given until `end`, then close the loop.

        A body of many may stop the loop, or have a task that exits, which ends the loop's run, too:
        the others go on.
        """
        try:
            while not self._over:
                try:
                    self._loop.run_forever()
                except (SystemExit, KeyboardInterrupt) as error:
                    _log.warning("a task that a body had started raised %s", type(error).__name__)
        finally:
            self._close()

    def spawn(self, body: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Begin this on the loop that another thread serves, or is about to."""
        self._loop.call_soon_threadsafe(self._begin, body)

    def _begin(self, body: Callable[[], Coroutine[Any, Any, None]]) -> None:
        task = self._loop.create_task(body())
        self._served.add(task)
        task.add_done_callback(self._served.discard)

    def end(self) -> None:
        """Let `serve` come to its end, from any thread; once."""
        self._over = True
        self._loop.call_soon_threadsafe(self._loop.stop)

    def run(self, body: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """What the coroutine that this makes returns or raises."""
        return _where_none_runs(lambda: self._run(body()))

    def _run(self, body: Coroutine[Any, Any, T]) -> T:
        task = self._loop.create_task(body)
        try:
            return self._loop.run_until_complete(task)
        except BaseException:
            if not task.done():
                # A task that the body had started has called sys.exit, which ends the loop's run.
                task.cancel()
                self._loop.run_until_complete(asyncio.wait([task]))
            if not task.cancelled():
                task.exception()  # it is known, and asyncio need not say it once more
            raise

    def close(self) -> None:
        """Cancel what bodies have left running, and close the loop."""
        _where_none_runs(self._close)

    def _close(self) -> None:
        try:
            self._loop.run_until_complete(_tidied())
        finally:
            self._loop.close()


def _where_none_runs(call: Callable[[], T]) -> T:
    """Call it here, or where a loop runs already (an async test of a host), in a thread apart."""
    if not _runs_here():
        return call()
    context, ended = contextvars.copy_context(), concurrent.futures.Future[T]()

    def body(_: object) -> None:
        try:
            ended.set_result(context.run(call))
        except BaseException as error:  # noqa: BLE001  raised where it is waited for
            ended.set_exception(error)

    with service.Pool("task-loop", 1, body):
        return ended.result()


def _runs_here() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


async def _tidied() -> None:
    left = asyncio.all_tasks() - {asyncio.current_task()}
    for task in left:
        task.cancel()
    if left:
        await asyncio.wait(left, timeout=TIDY_S)
    await asyncio.get_running_loop().shutdown_asyncgens()


async def drive(body: Awaitable[Any] | AsyncGenerator[Any, None], control_: control.Control) -> Any:
    """What an async body leaves: None for a generator, which cannot return.

    Each yield is told to `control_`. Interrupted, a body gets CancelledError at the await where it
    is, or GeneratorExit at its yield, once; from then on GeneratorExit at each further yield.
    Raises `Interrupted` behind it.
    """
    ending, left = _Ending(control_), None
    control_.when_interrupted(ending.ask)
    try:
        if isinstance(body, AsyncGenerator):
            await _follow(body, control_, ending)
        else:
            left = await body
    except BaseException as error:
        if not ending.told or isinstance(error, KeyboardInterrupt):
            raise
        if not isinstance(error, (asyncio.CancelledError, GeneratorExit)):
            control.not_clean(error)
    finally:
        ending.over = True
        control_.when_interrupted(None)
    if ending.told:
        raise control.Interrupted(control_.interrupted or "")
    return left


class _Ending:
    """Whether a body was told to end; all of it in the thread of its loop, but for `ask`."""

    def __init__(self, control_: control.Control) -> None:
        self._control = control_
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.current_task()
        self.told = False
        self.over = False
        self.at_yield = False

    def ask(self) -> None:
        """Tell it, from any thread."""
        self._loop.call_soon_threadsafe(self._tell)

    def _tell(self) -> None:
        # What waits at a yield is told there: a cancel would hit who drives it.
        if not (self.told or self.over or self.at_yield) and self._task is not None:
            self.told = True
            self._task.cancel()

    async def turn(self) -> bool:
        """At a yield: let the loop's other tasks run; whether the body is to end."""
        self.at_yield = True
        await asyncio.sleep(0)
        self.at_yield = False
        if self._control.interrupted is not None:
            self.told = True
        return self.told


async def _close(body: AsyncGenerator[Any, None], control_: control.Control) -> None:
    """As `bodies._close`."""
    try:
        said = await body.athrow(GeneratorExit())
        for _ in range(control.LAST_YIELDS):
            control_.said(said)
            said = await body.__anext__()
    except (StopAsyncIteration, GeneratorExit):
        return
    await body.aclose()


async def _follow(
    body: AsyncGenerator[Any, None], control_: control.Control, ending: _Ending
) -> None:
    try:
        said = await body.__anext__()
        while True:
            control_.said(said)
            if isinstance(said, errors.JobSignal):
                await _close(body, control_)
                raise said
            if await ending.turn():
                said = await body.athrow(GeneratorExit())
            else:
                said = await body.__anext__()
    except StopAsyncIteration:
        return
