"""Let a handler record steps, sleep and wait for events; a later attempt continues from there.

The functions work inside of nodes and ingest tasks, however a worker runs them.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import (
    AsyncGenerator,
    AsyncIterable,
    Awaitable,
    Callable,
    Generator,
    Iterable,
)
from typing import Any, TypeVar

from queue_workflows.tasks import attempt_requests, control, job

T = TypeVar("T")


def step(
    name: str,
    fn: Callable[..., T],
    /,
    *args: Any,
    retries: int = 0,
    key: str | int | None = None,
    **kwargs: Any,
) -> T:
    """Call `fn(*args, **kwargs)` once and return its recorded result, in any later attempt too.

    The result is stored as JSON before this returns. `key` distinguishes steps of one name.
    `retries` is how often it is called again at once after an error. It may also run again if the
    worker dies before the result is stored. Raises `StepRefused` (a ValueError) for a name that
    this attempt has used, and for a recorded step that had other arguments.
    """
    call = attempt_requests.StepCall(job.current_job().steps, name, key, args, kwargs, retries)
    while True:
        if call.has_result(call.ask(call.begin()).result()):
            return call.result
        try:
            value = fn(*args, **kwargs)
            end = call.done(value)
        except Exception as error:
            call.taken(call.ask(call.failed(error)).result())
            if not call.again(error):
                raise
            time.sleep(call.pause_s)
            continue
        call.has_result(call.ask(end).result())
        return call.result


async def step_async(
    name: str,
    fn: Callable[..., Awaitable[T]],
    /,
    *args: Any,
    retries: int = 0,
    key: str | int | None = None,
    **kwargs: Any,
) -> T:
    """Do as `step` does, for an async function, which it awaits."""
    call = attempt_requests.StepCall(job.current_job().steps, name, key, args, kwargs, retries)
    while True:
        if call.has_result(await asyncio.wrap_future(call.ask(call.begin()))):
            return call.result
        try:
            value = await fn(*args, **kwargs)
            end = call.done(value)
        except Exception as error:
            call.taken(await asyncio.wrap_future(call.ask(call.failed(error))))
            if not call.again(error):
                raise
            await asyncio.sleep(call.pause_s)
            continue
        call.has_result(await asyncio.wrap_future(call.ask(end)))
        return call.result


def steps(
    name: str, items: Iterable[T], /, *, key: str | int | None = None
) -> Generator[T, None, None]:
    """Yield the items; a later attempt continues with the first item that is not done.

    An item is done when the next one is taken. The position is stored with the renewals of the
    lease and at the end of an attempt, not for each item, so after a crash the items of the last
    seconds are repeated. `items` must be the same in each attempt. Raises `StepRefused` (a
    ValueError) for a name that this attempt has used, and for a range or list that has changed.
    """
    cursor = attempt_requests.Cursor(job.current_job().steps, name, key, items)
    done = cursor.begun(cursor.ask(cursor.begin()).result())
    for item in () if done is None else itertools.islice(items, done, None):
        yield item
        cursor.advance()
    if done is not None:
        control.value_of(cursor.ask(cursor.end()).result())


async def steps_async(
    name: str, items: Iterable[T] | AsyncIterable[T], /, *, key: str | int | None = None
) -> AsyncGenerator[T, None]:
    """Do as `steps` does, in an async handler; `items` may be asynchronous."""
    cursor = attempt_requests.Cursor(job.current_job().steps, name, key, items)
    done = cursor.begun(await asyncio.wrap_future(cursor.ask(cursor.begin())))
    if done is None:
        return
    if isinstance(items, AsyncIterable):
        number = 0
        async for item in items:
            number += 1
            if number > done:
                yield item
                cursor.advance()
    else:
        for item in itertools.islice(items, done, None):
            yield item
            cursor.advance()
    control.value_of(await asyncio.wrap_future(cursor.ask(cursor.end())))


def sleep(
    seconds: float = 0.0, *, minutes: float = 0.0, hours: float = 0.0, key: str | int | None = None
) -> None:
    """End this attempt, uncounted, and let the job continue after this time.

    Meanwhile the job occupies no slot, process or GPU. Then the handler is called again; its
    recorded steps return their results, and this returns. The time counts from the first call. It
    ends the handler by a BaseException that is not an `Exception`, so that `finally` blocks run.
    `key` distinguishes two sleeps of one handler.
    """
    wait = attempt_requests.Wait.sleep(
        job.current_job().steps, seconds + 60 * minutes + 3600 * hours, key
    )
    wait.taken(wait.ask().result())


async def sleep_async(
    seconds: float = 0.0, *, minutes: float = 0.0, hours: float = 0.0, key: str | int | None = None
) -> None:
    """Do as `sleep` does, in an async handler."""
    wait = attempt_requests.Wait.sleep(
        job.current_job().steps, seconds + 60 * minutes + 3600 * hours, key
    )
    wait.taken(await asyncio.wrap_future(wait.ask()))


def wait_for_event(
    name: str,
    *,
    key: str | int | None = None,
    timeout_s: float | None = None,
    default: Any = None,
) -> Any:
    """Return the value of an event once it was sent, or `default` after `timeout_s`.

    If it was not sent yet, this ends the attempt as `sleep` does. The job continues after the
    commit that sends the event (`events.send`, or an INSERT). For `timeout_s`, None means no limit,
    and 0 not to wait. The time counts from the first call.
    """
    wait = attempt_requests.Wait.event(job.current_job().steps, name, key, timeout_s, default)
    return wait.taken(wait.ask().result())


async def wait_for_event_async(
    name: str,
    *,
    key: str | int | None = None,
    timeout_s: float | None = None,
    default: Any = None,
) -> Any:
    """Do as `wait_for_event` does, in an async handler."""
    wait = attempt_requests.Wait.event(job.current_job().steps, name, key, timeout_s, default)
    return wait.taken(await asyncio.wrap_future(wait.ask()))
