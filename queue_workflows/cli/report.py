"""Print everything about one run or job: states, attempts, values, tracebacks and logs."""

from __future__ import annotations

import re
import shlex
import shutil
import sys
from collections.abc import Callable, Iterable
from datetime import datetime
from typing import Any

from queue_workflows.admin import waiting_reasons
from queue_workflows.cli import output, run_snapshot, run_views, sample_text, summary
from queue_workflows.runtime import display, entry_point, stored_json

UNCUT = 100_000
LINES = 40
"""Lines shown of a longer log (its last) and of a longer value (its first)."""
DEPENDENCIES = 3
MOVED = 10
"""Nodes that are named of a move to other code."""
AT_ONCE = 20
"""Nodes whose logs are in memory at the same time."""
ReadLogs = Callable[[list[dict[str, Any]]], None]
_DETAILED = ("failed", "running", "awaiting_input")
_WORDS = {
    "parked": "waits for an answer",
    "retried": "failed, to be tried again",
    "requeued": "queued again",
    "reclaimed": "taken back from a dead worker",
    "unknown": "end unknown",
}
_QUIET = frozenset({"claimed", "completed", "failed", "cancelled", *_WORDS})


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
        counts = shown["counts"]
        done = sum(counts.get(status, 0) for status in run_snapshot.DONE)
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
        nodes = shown["nodes"]
        chosen = len(nodes) < shown["nodes_total"]
        self._outline(shown)
        if not chosen and not self._full:
            nodes = [n for n in nodes if n["status"] in _DETAILED or not _is_folded(n, shown)]
        if len(nodes) > run_snapshot.SMALL and not self._full:
            self._line("nodes: " + ", ".join(f"{n} {status}" for status, n in counts.items()))
            live = [node for node in nodes if node["status"] in _DETAILED]
            nodes = live[: run_snapshot.SHOWN]
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

    def _outline(self, shown: dict[str, Any]) -> None:
        """Print the moves to other code, and a line for each map and loop."""
        for each in map(stored_json.mapping, stored_json.sequence(shown["upgrades"])):
            self._upgrade(each)
        for each in shown["maps"]:
            self._map(each)
        for each in shown["loops"]:
            self._line(loop_text(each))

    def _upgrade(self, move: dict[str, Any]) -> None:
        """Print when a run was moved to other code, by whom, and what differed."""
        actor = f" by {output.line(str(move['actor']))}" if move.get("actor") else ""
        self._line(
            f"moved to other code at {_stored_moment(move.get('at'))}{actor}: {_moved(move)}"
        )

    def _map(self, found: dict[str, Any]) -> None:
        """Print how many items of a map are done, and the first that failed."""
        words = f"{found['done']}/{found['total']} done"
        words += f", {found['failed']} failed" if found["failed"] else ""
        words += f", {found['open']} open" if found["open"] else ""
        self._line(f"items of {output.line(found['node_id'])}: {words}")
        for item in found["items_failed"]:
            error = output.line(item["error"] or "no error was given")
            self._line(f"  {output.line(item['key'])}: {error}")
        if found["failed"] > len(found["items_failed"]):
            self._line(f"  and {found['failed'] - len(found['items_failed'])} more")

    def job(self, shown: dict[str, Any]) -> None:
        """Print a job of either family."""
        self._line(
            f"{shown['kind']} {shown['id']} ({output.line(name_of(shown))}): {_state(shown)}"
        )
        if shown.get("run_id"):
            self._line(f"of run {shown['run_id']}{_after(shown)}")
        model = f", model {shown['required_model']}" if shown.get("required_model") else ""
        self._line(f"queue {shown['queue']}{model}, created {display.moment(shown['created_at'])}")
        if keys := keys_text(shown):
            self._line(keys)
        self._detail(shown, detailed=True)

    def end(self, shown: dict[str, Any]) -> None:
        """Print how a followed job ended, without what was printed before."""
        self._line(
            f"{shown['kind']} {shown['id']} ({output.line(name_of(shown))}): {_state(shown)}"
        )
        self._trace(shown)
        self._value("output", shown["output"])

    def _node(self, node: dict[str, Any], *, detailed: bool) -> None:
        with_error = any(attempt["error"] == node["error"] for attempt in node["attempts"])
        state = _state(node | {"error": None} if with_error else node)
        self._line(f"{node['node_id']}{_after(node)}: {state}")
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
                self._line(act_text(act), "  ")
        if not detailed:
            return
        self._value("inputs", job["inputs"])
        self._value("output", job["output"])
        self._trace(job)
        for attempt in job["attempts"]:
            self._log(attempt)

    def _attempt(self, attempt: dict[str, Any], again: str) -> None:
        self._line(f"attempt {attempt['claim_no']}: {attempt_text(attempt)}", "  ")
        if again and attempt["outcome"] == "retried":
            self._line(again, "    ")
        for event in attempt["events"]:
            if event["event_type"] not in _QUIET:
                self._line(event_text(event), "    ")
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
        output.echo(indent + entry_point.mask(output.line(text, max(limit, 10))))


def name_of(job: dict[str, Any]) -> str:
    """Return its node id or its task's name."""
    return job["node_id"] if "node_id" in job else job["task_name"]


def keys_text(job: dict[str, Any]) -> str:
    """Return `lock key feed, headers {"by": "ann"}`: the options of an ingest job, or ""."""
    given = [("idempotency key", "idempotency_key"), ("lock key", "lock_key")]
    given += [("partition", "partition_key"), ("headers", "headers"), ("time-out", "timeout_s")]
    parts: list[str] = []
    for name, key in given:
        value = job.get(key)
        if value not in (None, {}):
            parts.append(f"{name} {value if isinstance(value, str) else output.compact(value)}")
    return ", ".join(parts) + (" s" if parts and job.get("timeout_s") is not None else "")


def act_text(act: dict[str, Any]) -> str:
    """Return `09:12:01.250 cancel requested by ann`."""
    reason = stored_json.mapping(act["detail"]).get("reason")
    why = f": {output.line(reason)}" if reason else ""
    what = act["event_type"].replace("_", " ")
    return output.line(f"{display.clock(act['at'])} {what} by {act['actor']}{why}", 500)


def place_text(attempt: dict[str, Any]) -> str:
    """Return `09:12:01.250 gpu-1 pid 77, waited 0.1 s`."""
    pid = f" pid {attempt['pid']}" if attempt["pid"] else ""
    text = (
        f"{display.clock(attempt['claimed_at'])} {attempt['host_label'] or 'an unknown host'}{pid}"
    )
    if attempt["waited_s"] is not None:
        text += f", waited {output.seconds(attempt['waited_s'])}"
    return output.line(text)


def attempt_text(attempt: dict[str, Any]) -> str:
    """Return `09:12:01.250 gpu-1 pid 77, waited 0.1 s, ran 2.0 s, failed: ValueError: ...`."""
    parts = [place_text(attempt)]
    if attempt["ran_s"] is not None:
        parts.append(f"ran {output.seconds(attempt['ran_s'])}")
    trips = (e["event_type"] for e in attempt["events"] if e["event_type"].endswith("_trip"))
    parts += [kind.replace("_", " ") for kind in trips]
    outcome: str = attempt["outcome"]
    parts.append(_WORDS.get(outcome, outcome))
    error = f": {attempt['error']}" if attempt["error"] else ""
    return output.line(", ".join(parts) + error, 500)


def event_text(event: dict[str, Any]) -> str:
    """Return `09:12:01.250 model load done, 3.1 s`."""
    text = f"{display.clock(event['at'])} {event['event_type'].replace('_', ' ')}"
    if event["elapsed_s"] is not None:
        text += f", {output.seconds(event['elapsed_s'])}"
    error = event["error"] or stored_json.mapping(event["detail"]).get("reason")
    return output.line(f"{text}: {output.line(error, 500)}" if error else text, 500)


def loop_text(loop: dict[str, Any]) -> str:
    """Return how many rounds a loop has begun, and how the last one is."""
    begun = output.counted(loop["rounds"], "round")
    last = f", last {loop['last']}" if loop["last"] else ""
    return f"loop {output.line(loop['node_id'])}: {begun} of at most {loop['at_most']}{last}"


def _is_folded(node: dict[str, Any], shown: dict[str, Any]) -> bool:
    """Return whether a line about a map or loop stands for a node."""
    name: str = node["node_id"]
    if shown["maps"] and "[" in name:
        return True
    return "#" in name and any(name.startswith(f"{loop['node_id']}/") for loop in shown["loops"])


def _stored_moment(value: Any) -> str:
    """Return a time that PostgreSQL has stored in JSON; a value of another form as it is."""
    text = re.sub(r"\.\d+", "", stored_json.text(value) or "")
    try:
        return display.moment(datetime.fromisoformat(text))
    except ValueError:
        return output.compact(value, 40)


def _moved(move: dict[str, Any]) -> str:
    parts = [
        f"{sign}{name}"
        for sign, key in (("+", "added"), ("-", "removed"))
        for name in stored_json.sequence(move.get(key))
    ]
    for each in map(stored_json.mapping, stored_json.sequence(move.get("changed"))):
        parts.append(changed_text(each))
    more = f" and {len(parts) - MOVED} more" if len(parts) > MOVED else ""
    return output.line(", ".join(parts[:MOVED]), 500) + more


def changed_text(change: dict[str, Any]) -> str:
    """Return how a node differs: its id, its versions, and the other fields that differ."""
    fields = [str(name) for name in stored_json.sequence(change.get("fields"))]
    words = [name for name in fields if name != "version"]
    if "version" in fields:
        before, after = (
            change.get("version_before") or "none",
            change.get("version_after") or "none",
        )
        words.insert(0, f"version {before} to {after}")
    return f"{change.get('id')}: {', '.join(words)}"


def _state(job: dict[str, Any]) -> str:
    """Return the state, progress, the reason of a wait, and the error."""
    status: str = job["status"]
    prompt = stored_json.mapping(job.get("input_spec")).get("prompt")
    words = {"awaiting_input": "waiting for an answer"}.get(status, status)
    parts = [run_views.waits_for(job) or words]
    if again := run_views.again_text(job, job["attempts_failed"]):
        parts.append(again)
    elif status == "queued" and job.get("blocked_reason"):
        due = f" until {display.moment(job['available_at'])}" if job["available_at"] else ""
        why = job["blocked_reason"].replace("_", " ")
        unserved = why == "unserved"
        parts.append(waiting_reasons.unserved_text(job["queue"]) if unserved else f"{why}{due}")
    if status == "running" and (shown := run_views.progress_text(job["progress"])):
        parts.append(shown)
    if status == "running" and job["cancel_requested_at"]:
        parts.append("asked to stop")
    if status == "awaiting_input" and prompt:
        parts.append(output.line(prompt, 500))
    return ", ".join(parts) + (f": {job['error']}" if job["error"] else "")


def _after(node: dict[str, Any]) -> str:
    deps = node["depends_on"]
    if not deps:
        return ""
    more = len(deps) - DEPENDENCIES
    names = ", ".join(deps[:DEPENDENCIES])
    return f" (after {names}{f' and {more} others' if more > 0 else ''})"
