"""Define the tasks of the soak's ingest jobs, and the queues and limits of these jobs."""

from __future__ import annotations

import os
import random
from collections.abc import AsyncGenerator, Callable, Generator
from typing import Any

import queue_workflows
from queue_workflows import errors, queues
from tests.soak import handler_wrapper, step_tasks, stream_tasks

NOTES, FEEDS, CALLS = "notes", "feeds", "calls"
"""Served by workers of one job at a time, by pools, and by pools under the limits below."""
QUEUES = (NOTES, FEEDS, CALLS)
LONG_ENV = "SOAK_LONG_S"
AGAIN_S = 0.5
"""What a job waits after an attempt that failed."""
MOST = 2
"""Jobs of each partition of CALLS at once."""
METERED = "metered"
METER, PERIOD_S = 3, 2.0
"""Jobs of the partition METERED that start in any such period."""


def note(reason: str, args: dict[str, Any]) -> dict[str, Any]:
    lasts_s = args.get("lasts_s", random.uniform(0, 0.3))
    return handler_wrapper.last(lasts_s, "note") | {"number": args.get("number")}


def parse(args: dict[str, Any]) -> Generator[float, None, dict[str, Any]]:
    return (yield from handler_wrapper.stepwise(random.uniform(0, 0.8), "parse"))


async def fetch(args: dict[str, Any]) -> dict[str, Any]:
    return await handler_wrapper.last_async(random.uniform(0, 0.8), "fetch")


async def crawl(args: dict[str, Any]) -> AsyncGenerator[float, None]:
    async for share in handler_wrapper.stepwise_async(random.uniform(0, 0.8), "crawl"):
        yield share
    queue_workflows.current_job().set_result(handler_wrapper.say("end", "crawl"))


async def nap(args: dict[str, Any]) -> dict[str, Any]:
    """Run longer than the lease, so that the job depends on renewals."""
    return await handler_wrapper.last_async(float(os.environ[LONG_ENV]), "nap")


def flaky(args: dict[str, Any]) -> dict[str, Any]:
    """Fail as often as the args demand, or snooze now and then."""
    done = handler_wrapper.last(random.uniform(0, 0.1), "flaky")
    _fail(args, "flaky")
    return done


async def shaky(args: dict[str, Any]) -> dict[str, Any]:
    """Do as `flaky` does, on an event loop."""
    done = await handler_wrapper.last_async(random.uniform(0, 0.1), "shaky")
    _fail(args, "shaky")
    return done


def _fail(args: dict[str, Any], what: str) -> None:
    if args["how"] == "snooze":
        if random.random() < 0.5:
            handler_wrapper.say("snooze", what)
            raise errors.Snooze(AGAIN_S)
    elif queue_workflows.current_job().attempt <= args["fails"]:
        raise errors.Retry(AGAIN_S) if args["how"] == "retry" else ValueError("one that fails")


def hopeless(args: dict[str, Any]) -> None:
    handler_wrapper.last(0.02, "hopeless")
    raise ValueError("every attempt fails")


def echo(args: dict[str, Any]) -> dict[str, Any]:
    return handler_wrapper.last(0.0, "echo") | {"text": args["text"]}


def complains(args: dict[str, Any]) -> None:
    handler_wrapper.last(0.0, "complains")
    raise ValueError(args["text"])


TASKS: dict[str, Callable[..., Any]] = {
    body.__name__: body
    for body in (
        note,
        parse,
        fetch,
        crawl,
        nap,
        flaky,
        shaky,
        hopeless,
        echo,
        complains,
    )
} | (step_tasks.TASKS | stream_tasks.TASKS)
FAIL = ("spoiled", "hopeless", "complains")
"""Tasks whose jobs have to fail."""


def limit() -> None:
    """Set the limits; before the first job, as a rate knows no start from before it was set."""
    queues.limit(CALLS, partition_max_running=MOST)
    queues.limit(CALLS, partition=METERED, rate=f"{METER}/{PERIOD_S:g}s")
