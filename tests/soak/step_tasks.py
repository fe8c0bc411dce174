"""Define the soak's tasks with durable steps, a cursor, a sleep and a wait for an event."""

from __future__ import annotations

import random
import secrets
import time
from typing import Any

import queue_workflows
from queue_workflows import steps
from tests.soak import handler_wrapper

EVENT = "soak"
LISTENS = "listens"
"""The node, and the workflow with it alone, that waits for an event; the key is its run."""
TURNS = 15
SLEEP_S = 1.0


def _mark(name: str) -> str:
    """Journal one execution of a step, and return what no other execution returns."""
    token = secrets.token_hex(6)
    handler_wrapper.say("step", f"{name} {token}")
    time.sleep(random.uniform(0, 0.15))
    return token


def _kept(name: str) -> str:
    """Do a step, and journal that it is recorded."""
    token = steps.step(name, _mark, name)
    handler_wrapper.say("kept", f"{name} {token}")
    return token


def stepped(args: dict[str, Any]) -> dict[str, Any]:
    """Do two steps with a loop between them, whose cursor is stored."""
    handler_wrapper.say("start", "stepped")
    first = _kept("first")
    for _ in steps.steps("turn", range(TURNS)):
        time.sleep(0.1)
    second = _kept("second")
    return handler_wrapper.say("end", "stepped") | {"first": first, "second": second}


def waits(args: dict[str, Any]) -> dict[str, Any]:
    """Sleep, then wait for an event; neither holds a worker."""
    handler_wrapper.say("start", "waits")
    steps.sleep(seconds=SLEEP_S)
    handler_wrapper.say("woke", "waits")
    got = steps.wait_for_event(EVENT, key=args["number"])
    return handler_wrapper.say("end", "waits") | {"got": got}


def listens() -> dict[str, Any]:
    """Wait for an event whose key is the run."""
    handler_wrapper.say("start", LISTENS)
    job = queue_workflows.current_job()
    got = steps.wait_for_event(EVENT, key=job.run_id)
    return handler_wrapper.say("end", LISTENS) | {"got": got}


TASKS = {"stepped": stepped, "waits": waits}
