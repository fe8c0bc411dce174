"""Define an app for end-to-end tests: `--app tests.support.toy_app:setup`.

Runs take a `folder`: handlers add a line to its `journal` when they start, and some wait there for
the file `go`.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import queue_workflows
from queue_workflows import model_registry, run_store
from queue_workflows.scheduler import ScheduleEntry

MODEL = "tiny"
PATIENCE_S = 60.0


def journal(folder: Path, word: str) -> int:
    """Add `word pid` in one write; how many lines with that word there are now."""
    fd = os.open(folder / "journal", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        os.write(fd, f"{word} {os.getpid()}\n".encode())
    finally:
        os.close(fd)
    return len(pids(folder, word))


def pids(folder: Path, word: str) -> list[int]:
    """Return the processes that started handlers with this word, in order."""
    path = folder / "journal"
    lines = path.read_text().splitlines() if path.exists() else []
    return [int(line.split()[1]) for line in lines if line.split()[0] == word]


def await_go(folder: Path, cancel: threading.Event) -> None:
    """Wait until somebody made the file `go`, or for `cancel`."""
    deadline = time.monotonic() + PATIENCE_S
    while not (folder / "go").exists() and not cancel.is_set():
        if time.monotonic() > deadline:
            raise TimeoutError("nobody made the file `go`")
        cancel.wait(0.02)


def quick(folder: Path, number: int = 0) -> dict[str, Any]:
    journal(folder, "quick")
    return {"number": number}


def hold(folder: Path, cancel_event: threading.Event) -> dict[str, Any]:
    """Wait for `go` at the first start; a later start, after a hand-back, does not wait."""
    starts = journal(folder, "hold")
    if starts == 1:
        await_go(folder, cancel_event)
    return {"starts": starts}


def report_progress(
    folder: Path, status_callback: Callable[..., object], cancel_event: threading.Event
) -> None:
    journal(folder, "progress")
    status_callback(0.4)
    await_go(folder, cancel_event)


def fail(folder: Path) -> None:
    journal(folder, "fail")
    raise ValueError("the toy broke \x1b[31m\n on purpose")


def predict(
    folder: Path, model_handle: dict[str, int], model_load_seconds: float
) -> dict[str, Any]:
    journal(folder, "predict")
    return {"handle": model_handle["size"], "cold": model_load_seconds > 0}


def note(reason: str, args: dict[str, Any]) -> dict[str, Any]:
    """Run the ingest task; wait for `go` if its args contain `wait`."""
    if "folder" not in args:
        return {"reason": reason}  # queued by the schedule
    folder = Path(args["folder"])
    journal(folder, "note")
    if args.get("wait"):
        await_go(folder, threading.Event())
    return {"reason": reason}


def _nodes(*listed: dict[str, Any]) -> list[dict[str, Any]]:
    inputs = [{"name": "folder", "from": "pipeline.folder"}]
    return [{"inputs": inputs, **node} for node in listed]


PIPELINES: dict[str, list[dict[str, Any]]] = {
    "chain": _nodes(
        {"id": "first", "node": "quick"},
        {"id": "second", "node": "quick", "depends_on": ["first"]},
    ),
    "model": _nodes(
        *({"id": f"p{n}", "node": "predict", "gpu": True, "model": MODEL} for n in range(2))
    ),
    "hold": _nodes({"id": "hold", "node": "hold"}),
    "progress": _nodes({"id": "slow", "node": "report_progress"}),
    "fail": _nodes(
        {"id": "bad", "node": "fail"}, {"id": "after", "node": "quick", "depends_on": ["bad"]}
    ),
    "arms": _nodes({"id": "known", "node": "quick"}),
    "cyclic": _nodes(
        {"id": "a", "node": "quick", "depends_on": ["b"]},
        {"id": "b", "node": "quick", "depends_on": ["a"]},
    ),
}


def _step(step_id: str, pipeline: str, *after: str) -> dict[str, Any]:
    return {
        "id": step_id,
        "kind": "pipeline",
        "pipeline": pipeline,
        "inputs": {"folder": {"$from": "folder"}},
        "depends_on": list(after),
    }


ASK = {
    "id": "ask",
    "kind": "input",
    "widget": "turnout",
    "prompt": "Left or right?",
    "turnout_options": [{"label": "Left", "value": "l"}, {"label": "Right", "value": "r"}],
    "target": "way",
    "depends_on": ["work"],
}
EACH = {
    "id": "each",
    "kind": "map",
    "over": ["good", "bad", "worse"],
    "may_fail": 2,
    "steps": [
        _step("arm", "arms")
        | {"kind": "branch", "on": {"$from": "item"}, "arms": {"good": "known"}},
    ],
}
"""A map with two items whose branch cannot decide."""
WORKFLOWS: dict[str, list[dict[str, Any]]] = {
    "chain": [_step("work", "chain")],
    "full": [
        _step("work", "chain"),
        _step("gpu", "model", "work"),
        ASK,
        _step("end", "chain", "ask"),
    ],
    "asking": [_step("work", "chain"), ASK],
    "hold": [_step("work", "hold"), _step("end", "chain", "work")],
    "progress": [_step("work", "progress")],
    "fail": [_step("work", "fail")],
    "cyclic": [_step("work", "cyclic")],
    "each": [EACH],
}


def load_workflow(name: str) -> dict[str, Any]:
    return {"name": name, "steps": WORKFLOWS[name]}


def load_pipeline(name: str) -> dict[str, Any]:
    return {"name": name, "nodes": PIPELINES[name]}


def _register_models() -> None:
    model_registry.register(model_registry.ModelSpec(MODEL, lambda: {"size": 7}))


def submit(folder: Path, workflow: str = "chain") -> str:
    """Submit a run whose nodes write into this folder; return its id."""
    return run_store.insert_run(workflow_name=workflow, context={"folder": str(folder)})["id"]


def setup() -> None:
    """Register everything."""
    ingest_only()
    for node in (quick, hold, report_progress, fail, predict):
        queue_workflows.register_node(node.__name__, node)
    queue_workflows.set_workflow_provider(load_workflow, load_pipeline)
    queue_workflows.set_builtin_model_registrar(_register_models)


def ingest_only() -> None:
    """Register one queue, one task, one schedule entry, and no node."""
    queue_workflows.configure(ingest_queues={"notes"})
    queue_workflows.register_ingest_task("note", note)
    queue_workflows.set_ingest_schedule(
        [ScheduleEntry("hourly", minute=59, task_name="note", queue="notes")]
    )


def nothing() -> None:
    """Register nothing."""
