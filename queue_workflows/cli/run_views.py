"""Show a run while it runs: as a live tree on a terminal, as plain lines elsewhere."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, cast

from queue_workflows.cli import output
from queue_workflows.cli.run_snapshot import RunSnapshot, Step
from queue_workflows.runtime import display
from queue_workflows.types import NowFn, Row

AGAIN_S = 2.0
"""Least seconds between two lines about one running step."""


class View:
    """A way to show a running run; this one shows important lines alone."""

    def __init__(self, echo: Callable[[str], object]) -> None:
        self._echo = echo

    def show(self, picture: RunSnapshot) -> None:
        """Show the run as it is now."""
        del picture

    def print_message(self, text: str) -> None:
        """Print one line without disturbing the picture."""
        self._echo(text)

    def aside(self) -> AbstractContextManager[object]:
        """Free the terminal while a question is asked."""
        return contextlib.nullcontext()


class Lines(View):
    """Print one line per change of a step's state, and at most every 2 s per running step.

    The summary reports how the run ended.
    """

    def __init__(self, echo: Callable[[str], object], *, now_fn: NowFn = time.monotonic) -> None:
        super().__init__(echo)
        self._now = now_fn
        self._status = ""
        self._printed: dict[str, tuple[str, int, float]] = {}
        self._nodes: dict[str, str] = {}

    def show(self, picture: RunSnapshot) -> None:
        if picture.run["status"] != self._status and not picture.over:
            self._status = picture.run["status"]
            self.print_message(heading(picture))
        for step in picture.steps:
            self._show_step(step)
        for node in picture.nodes:
            self._show_node(node)

    def _show_step(self, step: Step) -> None:
        state, done, printed_at = self._printed.get(step.name, ("waiting", 0, 0.0))
        now = self._now()
        going_on = step.state == state
        if going_on and (step.done == done or now - printed_at < AGAIN_S):
            return
        self._printed[step.name] = (step.state, step.done, now)
        self.print_message(f"  {output.line(step.name)}: {step_text(step)}")

    def _show_node(self, node: Row) -> None:
        taken_back = node["crash_count"] + node["lapse_count"]
        mark = f"{node['status']} {taken_back} {node['attempts']}"
        if self._nodes.get(node["node_id"], "") == mark:
            return
        self._nodes[node["node_id"]] = mark
        if node["status"] == "failed" or taken_back or again_text(node, node["attempts"]):
            self.print_message(f"    {output.line(node['node_id'])}: {node_text(node)}")


def heading(picture: RunSnapshot) -> str:
    """Return `run ID (workflow): running, 3/10 nodes, 1.2 s`."""
    return " ".join(heading_parts(picture))


def heading_parts(picture: RunSnapshot) -> list[str]:
    """Return the parts of the heading, between which a line may break."""
    run = picture.run
    nodes = f" {picture.done}/{picture.total} nodes," if picture.total else ""
    name, elapsed = output.line(run["workflow_name"]), output.seconds(run["elapsed_s"])
    state = f"{output.line(run['status'])},{nodes} {elapsed}"
    parts = [f"run {output.line(run['id'])}", f"({name}):"]
    return [*parts, f"{state}:", output.line(run["error"])] if run["error"] else [*parts, state]


def step_text(step: Step) -> str:
    """Return `12/300 completed, 4 running, 1.2 s`; for a step of one node its state and time."""
    elapsed = f", {output.seconds(step.elapsed_s)}" if step.elapsed_s is not None else ""
    if step.total == 1:
        return f"{_words(step.state)}{elapsed}"
    if step.state == "waiting":
        return f"waiting, {step.total} nodes"
    live = ("running", "awaiting_input", "failed", "cancelled")
    rest = "".join(f", {step.counts[s]} {_words(s)}" for s in live if step.counts.get(s))
    return f"{step.done}/{step.total} {_words('completed')}{rest}{elapsed}"


def node_text(node: Row) -> str:
    """Return a node's state, time, progress, worker and error."""
    parts = [waits_for(node) or _words(node["status"])]
    if node["elapsed_s"] is not None and node["status"] != "queued":
        parts.append(output.seconds(node["elapsed_s"]))
    if again := again_text(node, node["attempts"]):
        parts.append(again)
    if node["status"] == "running":
        if shown := progress_text(node["progress"]):
            parts.append(shown)
        parts.append(f"on {place(node['worker_id'])}")
    if node["crash_count"]:
        parts.append(f"taken back from a dead worker {output.counted(node['crash_count'], 'time')}")
    if node["lapse_count"]:
        parts.append(f"its lease lapsed {output.counted(node['lapse_count'], 'time')}")
    if node["error"]:
        parts.append(output.line(node["error"]))
    return ", ".join(parts)


def waits_for(node: Row) -> str | None:
    """Return `waiting for run ID` for a node that waits for its child run; None for others."""
    child = node.get("child_run_id") if node["status"] == "awaiting_input" else None
    return None if child is None else f"waiting for run {output.line(child)}"


def again_text(job: Row, failed: int) -> str:
    """Return when a job runs again that failed `failed` times; "" for any other."""
    if job["status"] != "queued" or failed < 1:
        return ""
    if job["blocked_reason"] not in (None, "not_due"):
        return ""
    made = f"attempt {failed} of {job['max_attempts']} failed"
    return f"{made}, {display.again(job['available_at'])}"


def place(worker_id: str | None) -> str:
    """Return `queue host pid 123` without the rest of a worker's id; `?` for none."""
    label, _, rest = (worker_id or "").partition(":")
    pid = rest.partition(":")[0]
    return (
        f"{output.line(label, 40)} pid {pid}" if pid.isdecimal() else output.line(label or "?", 40)
    )


def progress_text(progress: Any) -> str:
    """Return `40 %` for a number from 0 to 1, else the members of the dict; "" for none."""
    if isinstance(progress, (int, float)) and not isinstance(progress, bool):
        return display.number(progress * 100, ".0f", " %")
    if isinstance(progress, dict):
        members = cast("dict[str, Any]", progress).items()
        return output.line(" ".join(f"{k}={_short(v)}" for k, v in members), 60)
    return ""


def _short(value: Any) -> str:
    return value if isinstance(value, str) else output.compact(value, 60)


def _words(status: str) -> str:
    return {"awaiting_input": "waiting for an answer"}.get(status, status)
