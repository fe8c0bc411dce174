"""The host app of the soak's processes: `--app tests.soak.app:setup`."""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import queue_workflows
from queue_workflows import ingest_executor, model_registry, node_executor
from queue_workflows.scheduler import ScheduleEntry
from tests.soak import journal, mutants, workflows
from tests.support import every

QUEUE = "notes"
MUTANT_ENV = "SOAK_MUTANT"
LONG_ENV = "SOAK_LONG_S"
BEAT_S = 0.25
EVERY_S = 3
MINUTELY = 2
"""Entries that fire at each minute."""
_held: dict[str, Any] = {}


class Every(every.Every):
    """Fires each `EVERY_S` seconds."""

    SECONDS = EVERY_S


def entries() -> list[ScheduleEntry]:
    """One entry each few seconds, and some for each minute of the hour."""
    minutely = [
        ScheduleEntry(f"minute-{number}-{minute:02}", minute, "tick", QUEUE)
        for number in range(MINUTELY)
        for minute in range(60)
    ]
    return [Every("every", 0, "tick", QUEUE), *minutely]


def _work(seconds: float, what: str, cancel: threading.Event | None = None) -> dict[str, Any]:
    """A body that lasts so long by the clock, whether it is stopped meanwhile or not."""
    job = _held
    journal.write("start", job, what)
    ends = time.monotonic() + seconds
    while (left := ends - time.monotonic()) > 0 and not (cancel and cancel.is_set()):
        time.sleep(min(left, BEAT_S))
        if left > BEAT_S:
            journal.write("beat", job, what)
    journal.write("end", job, what)
    return {"by": job["claim_no"]}


def quick() -> dict[str, Any]:
    return _work(random.uniform(0, 0.03), "quick")


def medium(cancel_event: threading.Event) -> dict[str, Any]:
    return _work(random.uniform(0.2, 1.0), "medium", cancel_event)


def long(cancel_event: threading.Event) -> dict[str, Any]:
    """Outlives its lease, so that it depends on renewals."""
    return _work(float(os.environ[LONG_ENV]), "long", cancel_event)


def link(before: int) -> dict[str, Any]:
    return _work(random.uniform(0, 0.2), "link") | {"value": before + 1}


def hear(said: str | None = None) -> dict[str, Any]:
    return _work(0.0, "hear") | {"heard": said}


def predict(model_handle: Mapping[str, str], cancel_event: threading.Event) -> dict[str, Any]:
    return _work(random.uniform(0.1, 0.6), "predict", cancel_event) | dict(model_handle)


def raises() -> None:
    _work(0.05, "raises")
    raise ValueError("this body always raises")


def exits() -> None:
    _work(0.05, "exits")
    sys.exit(3)


def killed() -> None:
    journal.write("start", _held, "killed")
    os.kill(os.getpid(), random.choice([signal.SIGKILL, signal.SIGSEGV]))


def note(reason: str, args: dict[str, Any]) -> dict[str, Any]:
    """The ingest task."""
    return _work(random.uniform(0, 0.3), "note") | {"number": args.get("number")}


def spoiled(reason: str, args: dict[str, Any]) -> None:
    """The ingest task that is poison."""
    {"raises": raises, "exits": exits, "killed": killed}[args["kind"]]()


def _noting(run: Callable[..., Any]) -> Callable[..., Any]:
    """Remember the claimed job around its body, so that the journal can name the claim."""

    def wrapper(job: dict[str, Any], *args: Any, **more: Any) -> Any:
        global _held
        _held = job
        return run(job, *args, **more)

    return wrapper


def _models() -> None:
    for name in workflows.MODELS:
        model_registry.register(model_registry.ModelSpec(name, lambda name=name: {"model": name}))


def setup() -> None:
    """Everything; with `SOAK_MUTANT` one defence of the engine is off in this process."""
    register()
    node_executor.run_body = _noting(node_executor.run_body)
    ingest_executor.run_task = _noting(ingest_executor.run_task)
    if name := os.environ.get(MUTANT_ENV):
        mutants.switch_off(name)


def register() -> None:
    """What the driver needs to know too."""
    queue_workflows.configure(ingest_queues={QUEUE})
    for body in (quick, medium, long, link, hear, predict, raises, exits, killed):
        queue_workflows.register_node(body.__name__, body)
    queue_workflows.set_workflow_provider(workflows.load_workflow, workflows.load_pipeline)
    queue_workflows.set_builtin_model_registrar(_models)
    for name, task in (("note", note), ("tick", note), ("spoiled", spoiled)):
        queue_workflows.register_ingest_task(name, task)
    queue_workflows.set_ingest_schedule(entries())
