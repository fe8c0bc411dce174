"""Define the soak's tasks that stream numbers, in a worker's own process and in executors."""

from __future__ import annotations

import asyncio
import random
import time
from typing import Any

import queue_workflows
from queue_workflows import streams
from tests.soak import handler_wrapper

COUNT = 40
"""Parts of an attempt that ends well."""
NAME = "numbers"
PAUSES_S = (0.0, 0.0, 0.01, 0.05, 0.2)
"""Some parts follow at once, and some wait for the thread that sends what is left."""


def _part(number: int) -> list[int]:
    return [queue_workflows.current_job().claim, number]


def streamed(args: dict[str, Any]) -> dict[str, Any]:
    """Stream numbers, each with the claim of its attempt."""
    handler_wrapper.say("start", "streamed")
    for number in range(COUNT):
        streams.stream(NAME, _part(number))
        time.sleep(random.choice(PAUSES_S))
    return handler_wrapper.say("end", "streamed") | {"count": COUNT}


async def streamed_async(args: dict[str, Any]) -> dict[str, Any]:
    """Do as `streamed` does, on an event loop."""
    handler_wrapper.say("start", "streamed_async")
    for number in range(COUNT):
        await streams.stream_async(NAME, _part(number))
        await asyncio.sleep(random.choice(PAUSES_S))
    return handler_wrapper.say("end", "streamed_async") | {"count": COUNT}


TASKS = {"streamed": streamed, "streamed_async": streamed_async}
