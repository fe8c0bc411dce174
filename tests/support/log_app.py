"""Define an app whose handlers log: `--app tests.support.log_app:setup`."""

from __future__ import annotations

import logging
import os
import sys
from typing import Any

import queue_workflows

log = logging.getLogger("log_app")
QUEUE = "work"


def logs(*, text: str) -> dict[str, Any]:
    """Logs a text, an `extra` field and two secrets."""
    log.warning(
        "step %s", text, extra={"rows": 3, "api_key": "c4nary1", "who": "https://u:c4nary2@h/"}
    )
    log.warning("password=c4nary3")
    return {}


async def logs_async(*, text: str) -> dict[str, Any]:
    return logs(text=text)


def prints(*, text: str) -> dict[str, Any]:
    """Prints lines to both streams, also by its descriptors, in pieces, and one without its end."""
    print("out", end=" ")
    print(text, "token=c4nary5")
    print(f"err {text}\n\nlast line of two", file=sys.stderr)
    sys.stdout.buffer.write(f"bytes \u00e9 {text}\n".encode())
    sys.stdout.flush()
    print(f"open {text}", end="")
    return {}


async def prints_async(*, text: str) -> dict[str, Any]:
    return prints(text=text)


def writes(*, text: str) -> dict[str, Any]:
    """Writes past Python's streams, as C code and child processes do."""
    os.write(1, f"raw {text}\n".encode())
    os.write(2, b"raw \xff\n")
    return {}


def fails(*, text: str) -> None:
    raise ValueError(f"token=c4nary4 {text}")


def node(text: str) -> dict[str, Any]:
    """Logs as a node of a run."""
    log.warning("step %s", text)
    return {}


def setup() -> None:
    queue_workflows.configure(ingest_queues={QUEUE})
    for task in (logs, logs_async, prints, prints_async, writes, fails):
        queue_workflows.register_ingest_task(task.__name__, task)
    queue_workflows.register_node("node", node)
    queue_workflows.set_workflow_provider(
        lambda _: {
            "name": "one",
            "steps": [
                {"id": "step", "kind": "pipeline", "pipeline": "p", "inputs": {"text": "hello"}}
            ],
        },
        lambda _: {
            "name": "p",
            "nodes": [{"id": "node", "inputs": [{"name": "text", "from": "pipeline.text"}]}],
        },
    )
