"""Print everything about one run or job: states, attempts, values, tracebacks and logs."""

from __future__ import annotations

import shlex
import shutil
import sys
from collections.abc import Callable, Iterable
from typing import Any

from queue_workflows.cli import job_texts, output, run_snapshot, run_views, sample_text, summary
from queue_workflows.dag import item_ids
from queue_workflows.runtime import display, stored_json

UNCUT = 100_000
LINES = 40
"""Lines shown of a longer log (its last) and of a longer value (its first)."""
AT_ONCE = 20
"""Nodes whose logs are in memory at the same time."""
ReadLogs = Callable[[list[dict[str, Any]]], None]
_DETAILED = ("failed", "running", "awaiting_input")
_QUIET = frozenset({"claimed", "completed", "failed", "cancelled", *job_texts.OUTCOMES})


class Page:
    """Print to stdout, cut to the terminal's width if there is one.

    `full`: every node in detail, nothing cut.
    """

    def __init__(self, *, full: bool, width: int | None = None) -> None:
        if width is None and sys.stdout.isatty():
            width = shutil.get_terminal_size().columns
        self._full = full
        self._width = UNCUT if full or width is None else max(width, 20)

    def run(self, shown: dict[str, Any], *, read_logs: ReadLogs = lambda _: None) -> None:
        """Print a run with its nodes; of a large one those that run, wait or failed.

        `read_logs` adds the logs to nodes that `shown` has without them; they are dropped once
        printed.
        """
        self._heading(shown)
        self._outline(shown)
        # The total has no nodes of items that have no job yet.
        counted = [n for n in shown["nodes"] if n["id"] or not item_ids.of_item(n["node_id"])]
        chosen = len(counted) < shown["nodes_total"]
        nodes = self._nodes_of(shown, chosen=chosen)
        for at in range(0, len(nodes), AT_ONCE):
            some = nodes[at : at + AT_ONCE]
            detailed = [
                node for node in some if chosen or self._full or node["status"] in _DETAILED
            ]
            read_logs(detailed)
            with_error = {id(node) for node in detailed}
            for node in some:
                output.echo()
                self._node(node, detailed=id(node) in with_error)
                for attempt in node["attempts"]:
                    attempt["log"] = None
        if left := len(shown["nodes"]) - len(nodes):
            output.echo()
            item = ", --item KEY" if shown["maps"] else ""
            item += ", --round N" if shown["loops"] else ""
            more = f"and {output.counted(left, 'node')} more: --node NODE{item}, --full or --json"
            self._line(more)

    def _heading(self, shown: dict[str, Any]) -> None:
        """Print the state of a run, and where it comes from."""
        done = sum(shown["counts"].get(status, 0) for status in run_snapshot.DONE)
        state = f"{shown['status']}, {done}/{shown['nodes_total']} nodes"
        error = f": {shown['error']}" if shown["error"] else ""
        self._line(
            f"run {shown['id']} ({shown['workflow_name']}): {state},"
            f" {output.seconds(shown['elapsed_s'])}{error}"
        )
        self._line(f"created {display.moment(shown['created_at'])}")
        if shown["parent_run_id"]:
            parent = shown["parent_run_id"]
            self._line(f"of node {shown['parent_node_id']} of run {parent}: `{self._show(parent)}`")
        if shown["out_dir"]:
            self._line(f"files in {shown['out_dir']}")

    def _nodes_of(self, shown: dict[str, Any], *, chosen: bool) -> list[dict[str, Any]]:
        """Return the nodes to print; print the number of each state if some are left out."""
        nodes: list[dict[str, Any]] = shown["nodes"]
        if self._full:
            return nodes
        if not chosen:
            nodes = [n for n in nodes if n["status"] in _DETAILED or not _is_folded(n, shown)]
        if len(nodes) > run_snapshot.SMALL:
            counts = shown["counts"].items()
            self._line("nodes: " + ", ".join(f"{n} {status}" for status, n in counts))
            nodes = [n for n in nodes if n["status"] in _DETAILED][: run_snapshot.SHOWN]
        return nodes

    def _outline(self, shown: dict[str, Any]) -> None:
        """Print the moves to other code, the run's output, and a line for each map and loop."""
        for each in map(stored_json.mapping, stored_json.sequence(shown["upgrades"])):
            self._upgrade(each)
        if shown["output"] is not None:
            self._line(job_texts.output_text(shown["output"]))
        for each in shown["maps"]:
            for text in job_texts.map_texts(each):
                self._line(text)
        for each in shown["loops"]:
            self._line(job_texts.loop_text(each))
        for each in shown.get("items", ()):
            self._line(job_texts.item_text(each))

    def _upgrade(self, move: dict[str, Any]) -> None:
        """Print when a run was moved to other code, by whom, and what differed."""
        at = job_texts.stored_moment(move.get("at"))
        actor = f" by {output.line(str(move['actor']))}" if move.get("actor") else ""
        self._line(f"moved to other code at {at}{actor}: {job_texts.moved(move)}")

    def job(self, shown: dict[str, Any]) -> None:
        """Print a job of either family."""
        self._line(job_texts.heading(shown))
        if shown.get("run_id"):
            self._line(f"of run {shown['run_id']}{job_texts.after(shown)}")
        model = f", model {shown['required_model']}" if shown.get("required_model") else ""
        self._line(f"queue {shown['queue']}{model}, created {display.moment(shown['created_at'])}")
        if keys := job_texts.keys_text(shown):
            self._line(keys)
        self._detail(shown, detailed=True)

    def end(self, shown: dict[str, Any]) -> None:
        """Print how a followed job ended, without what was printed before."""
        self._line(job_texts.heading(shown))
        self._trace(shown)
        self._value("output", shown["output"])

    def _node(self, node: dict[str, Any], *, detailed: bool) -> None:
        with_error = any(attempt["error"] == node["error"] for attempt in node["attempts"])
        state = job_texts.state(node | {"error": None} if with_error else node)
        self._line(f"{node['node_id']}{job_texts.after(node)}: {state}")
        self._detail(node, detailed=detailed)

    def _detail(self, job: dict[str, Any], *, detailed: bool) -> None:
        if detailed and job["id"] and job["kind"] == "node job":
            self._line(f"job {job['id']}, module {job['node_module']}", "  ")
        if job.get("child_run_id"):
            self._line(f"run {job['child_run_id']}: `{self._show(job['child_run_id'])}`", "  ")
        for attempt in job["attempts"]:
            last = attempt is job["attempts"][-1]
            self._attempt(
                attempt, run_views.again_text(job, job["attempts_failed"]) if last else ""
            )
        for act in job.get("acts", ()):
            # Changes by sweeps are shown with the attempts.
            if act["event_type"] != "reclaimed":
                self._line(job_texts.act_text(act), "  ")
        if not detailed:
            return
        self._value("inputs", job["inputs"])
        self._value("output", job["output"])
        self._trace(job)
        for attempt in job["attempts"]:
            self._log(attempt)

    def _attempt(self, attempt: dict[str, Any], again: str) -> None:
        self._line(f"attempt {attempt['claim_no']}: {job_texts.attempt_text(attempt)}", "  ")
        if again and attempt["outcome"] == "retried":
            self._line(again, "    ")
        for event in attempt["events"]:
            if event["event_type"] not in _QUIET:
                self._line(job_texts.event_text(event), "    ")
        if attempt["machine"]:
            at = display.clock(attempt["machine"]["sampled_at"])
            self._line(f"{at} its machine: {sample_text.line(attempt['machine'])}", "    ")

    def _value(self, name: str, value: Any) -> None:
        if value in (None, {}):
            return
        text = output.compact(value, 200)
        if len(text) + len(name) + 4 <= min(self._width, 100):
            self._line(f"{name}: {text}", "  ")
            return
        self._line(f"{name}:", "  ")
        lines = display.pretty(value)
        self._block(lines if self._full else lines[:LINES])
        if len(lines) > LINES and not self._full:
            self._line(f"... {len(lines) - LINES} lines more: --full", "    ")

    def _trace(self, job: dict[str, Any]) -> None:
        """Print the traceback, or each attempt's if several left one; the same one once."""
        with_error = [attempt for attempt in job["attempts"] if attempt["traceback"]]
        if len(with_error) < 2:
            self._traceback("traceback", job["traceback"])
            return
        seen: dict[str, int] = {}
        for attempt in with_error:
            number = attempt["claim_no"]
            same = seen.setdefault(attempt["traceback"], number)
            name = f"traceback of attempt {number}"
            if same == number:
                self._traceback(name, attempt["traceback"])
            else:
                self._line(f"{name}: as of attempt {same}", "  ")

    def _traceback(self, name: str, trace: str | None) -> None:
        lines = display.lines(trace.rstrip()) if trace else []
        if not self._full:
            lines = summary.app_frames(lines)[-summary.TRACE_LINES :]
        if lines:
            self._line(f"{name}{'' if self._full else ' (all of it: --full)'}:", "  ")
            self._block(lines)

    def _log(self, attempt: dict[str, Any]) -> None:
        if attempt["log"] is None:
            return
        lines = display.lines(attempt["log"]["text"].rstrip("\r\n"))
        shown = lines if self._full else lines[-LINES:]
        left = len(lines) - len(shown)
        before = f" ({left} lines before these: --full)" if left else ""
        self._line(f"log of attempt {attempt['claim_no']}{before}:", "  ")
        self._block(shown)

    def _show(self, run_id: str) -> str:
        return f"queue-workflows show {shlex.quote(run_id)}"

    def _block(self, lines: Iterable[str]) -> None:
        for text in lines:
            self._line(text.rstrip(), "    ")

    def _line(self, text: str, indent: str = "") -> None:
        limit = self._width - len(indent)
        output.echo(indent + output.line(text, max(limit, 10)))


def _is_folded(node: dict[str, Any], shown: dict[str, Any]) -> bool:
    """Return whether a line about a map or loop stands for a node."""
    name: str = node["node_id"]
    if shown["maps"] and "[" in name:
        return True
    return "#" in name and any(name.startswith(f"{loop['node_id']}/") for loop in shown["loops"])
