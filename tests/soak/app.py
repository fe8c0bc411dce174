"""Define the app of the soak's processes: `--app tests.soak.app:setup`."""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import queue_workflows
from queue_workflows import ingest_executor, model_registry, node_executor
from queue_workflows.run import node_call as executor_nodes
from queue_workflows.run import task_call
from queue_workflows.schedule import timetable
from queue_workflows.scheduler import ScheduleEntry
from tests.soak import (
    growing_workflows,
    handler_wrapper,
    mutant,
    mutants,
    step_tasks,
    tasks,
    workflows,
)
from tests.support import frequent_schedule

MUTANT_ENV = "SOAK_MUTANT"
EVERY_S = 3
MINUTELY = 2
"""Entries that fire at each minute."""
HELD, HELD_EVERY_S = 4, 5
"""Schedules with idempotency keys, which strangers take, and their period."""


class Every(frequent_schedule.Every):
    """Fires each `EVERY_S` seconds."""

    SECONDS = EVERY_S


def held_names() -> list[str]:
    """Return the schedules whose idempotency keys strangers take."""
    return [f"held-{number}" for number in range(HELD)]


def entries() -> list[ScheduleEntry | timetable.Schedule]:
    """Return entries that fire each few seconds, and some for each minute of the hour."""
    minutely = [
        ScheduleEntry(f"minute-{number}-{minute:02}", minute, "tick", tasks.NOTES)
        for number in range(MINUTELY)
        for minute in range(60)
    ]
    held = [
        timetable.Schedule(
            name, every=f"{HELD_EVERY_S}s", task_name="tick", queue=tasks.NOTES,
            idempotency_key=name + " {fire_at}", catch_up="all", overlap="allow",
        )
        for name in held_names()
    ]  # fmt: skip
    return [Every("every", 0, "tick", tasks.NOTES), *minutely, *held]


def quick() -> dict[str, Any]:
    return handler_wrapper.last(random.uniform(0, 0.03), "quick")


def instant() -> dict[str, Any]:
    return handler_wrapper.last(0.0, "instant")


def write(out: Path) -> dict[str, Any]:
    """Create a file in the folder that the engine gives this node."""
    done = handler_wrapper.last(0.0, "write")
    (out / "written").touch()
    return done


def medium(cancel_event: threading.Event) -> dict[str, Any]:
    return handler_wrapper.last(random.uniform(0.2, 1.0), "medium", cancel_event)


def long(cancel_event: threading.Event) -> dict[str, Any]:
    """Run longer than the lease, so that the job depends on renewals."""
    return handler_wrapper.last(float(os.environ[tasks.LONG_ENV]), "long", cancel_event)


def link(before: int) -> dict[str, Any]:
    return handler_wrapper.last(random.uniform(0, 0.2), "link") | {"value": before + 1}


def hear(said: str | None = None) -> dict[str, Any]:
    return handler_wrapper.last(0.0, "hear") | {"heard": said}


def predict(model_handle: Mapping[str, str], cancel_event: threading.Event) -> dict[str, Any]:
    return handler_wrapper.last(random.uniform(0.1, 0.6), "predict", cancel_event) | dict(
        model_handle
    )


def raises() -> None:
    handler_wrapper.last(0.05, "raises")
    raise ValueError("this body always raises")


def exits() -> None:
    handler_wrapper.last(0.05, "exits")
    sys.exit(3)


def killed() -> None:
    handler_wrapper.say("start", "killed")
    os.kill(os.getpid(), random.choice([signal.SIGKILL, signal.SIGSEGV]))


def kills_worker() -> None:
    handler_wrapper.kill("kills_worker")


def kills_launcher() -> None:
    handler_wrapper.kill("kills_launcher", launcher=True)


def spoiled(reason: str, args: dict[str, Any]) -> None:
    """Fail always: the ingest task that is poison."""
    POISON[args["kind"]]()


POISON = {body.__name__: body for body in (raises, exits, killed, kills_worker, kills_launcher)}


def _models() -> None:
    for name in workflows.MODELS:
        model_registry.register(model_registry.ModelSpec(name, lambda name=name: {"model": name}))


def setup() -> None:
    """Register everything; with `SOAK_MUTANT` switch off one defence of the engine here."""
    register()
    node_executor.run_handler = handler_wrapper.noting(node_executor.run_handler)
    ingest_executor.run_task = handler_wrapper.noting(ingest_executor.run_task)
    executor_nodes.run = handler_wrapper.noting(executor_nodes.run)
    executor_nodes.run_async = handler_wrapper.noting(executor_nodes.run_async)
    task_call.call = handler_wrapper.noting(task_call.call)
    task_call.call_async = handler_wrapper.noting(task_call.call_async)
    # A worker with executors has done so before the process that loads the app was forked.
    if (name := os.environ.get(MUTANT_ENV)) and not mutant.replaced:
        mutants.switch_off(name)


def register() -> None:
    """Register what the driver needs too."""
    queue_workflows.configure(ingest_queues={*tasks.QUEUES})
    own = (quick, instant, write, medium, long, link, hear, predict, *POISON.values())
    for body in (*own, step_tasks.listens, *growing_workflows.HANDLERS):
        queue_workflows.register_node(body.__name__, body)
    queue_workflows.set_workflow_provider(workflows.load_workflow, workflows.load_pipeline)
    queue_workflows.set_builtin_model_registrar(_models)
    for name, task in (tasks.TASKS | {"tick": tasks.note, "spoiled": spoiled}).items():
        queue_workflows.register_ingest_task(name, task)
    queue_workflows.set_ingest_schedule(entries())
