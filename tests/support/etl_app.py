"""An app of the ETL job service: pipelines as its guide describes them, with `register`."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import queue_workflows
from queue_workflows import register_ingest_task as register

log = logging.getLogger("etl")


@register("load.chunks")
async def load_chunks(args: dict[str, Any]) -> AsyncGenerator[Any, None]:
    """Yield `n` times; with a `folder`, only after the file `go` is there."""
    folder = Path(args["folder"]) if "folder" in args else None
    if folder is not None:
        (folder / f"started-{queue_workflows.current_job().id}").touch()
    for number in range(args.get("n", 3)):
        while folder is not None and not (folder / "go").exists():
            await asyncio.sleep(0.02)
            yield
        yield number / args.get("n", 3)


@register("load.flaky", backoff=0.1)
async def load_flaky(args: dict[str, Any]) -> AsyncGenerator[Any, None]:
    """Raise at each attempt before number `good`."""
    yield
    attempt = queue_workflows.current_job().attempt
    if attempt < args["good"]:
        raise ConnectionError(f"attempt {attempt}: the source is away")


@register("load.bad_row")
async def load_bad_row(args: dict[str, Any]) -> AsyncGenerator[Any, None]:
    """Log a permanent failure, and end."""
    yield
    log.error("row %s cannot be loaded, password=hunter2hunter2", args.get("row"))


@register("load.payload")
def load_payload(payload: dict[str, Any]) -> dict[str, Any]:
    """Return the args."""
    return payload


@register("load.day")
def load_day(day: str) -> dict[str, Any]:
    """Get the reason, which its author did not mean."""
    return {"day": day}


@register("again")
def load_again(day: str, *, table: str) -> None:
    """Check its args; first by name."""


@register("load.at", queue="load.a")
def load_at(day: str, args: dict[str, Any]) -> None:
    """Take args whose keys may have the name of the parameter that gets the reason."""


@queue_workflows.node
def repeat(times: int) -> None:
    """Do nothing with a number."""


@queue_workflows.workflow
def greet(times: int) -> None:
    """Define a workflow whose inputs are checked."""
    repeat(times=times)


def setup() -> None:
    """Configure the queues; `--app tests.support.etl_app:setup` calls this."""
    queue_workflows.configure(ingest_queues={"load.a", "load.b"})
    work = {"id": "work", "kind": "pipeline", "pipeline": "work"}
    ok = {"id": "ok", "kind": "input", "widget": "turnout", "target": "ok", "depends_on": ["work"]}
    steps = [
        work | {"inputs": {"number": {"$from": "number"}}},
        ok | {"options": [{"label": "Yes", "value": "yes"}]},
    ]
    inputs = [{"name": "number", "from": "pipeline.number"}]
    nodes = [{"id": "double", "node": "double", "inputs": inputs}]

    def workflow(name: str) -> dict[str, Any]:
        if name != "doubled":
            raise LookupError(name)
        return {"name": name, "steps": steps, "output": {"number": {"$from": "work/double.twice"}}}

    queue_workflows.register_node("double", lambda number: {"twice": 2 * number})
    queue_workflows.set_workflow_provider(workflow, lambda name: {"name": name, "nodes": nodes})
