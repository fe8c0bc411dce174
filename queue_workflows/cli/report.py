"""Print a run or job as a page, or the summary of a run that was followed."""

from __future__ import annotations

import contextlib
import itertools
import re
import shlex
import shutil
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import queue_workflows
from queue_workflows import db, errors, history
from queue_workflows.admin import item_nodes, job_history
from queue_workflows.cli import output, texts
from queue_workflows.dag import graph, item_ids
from queue_workflows.db import statements
from queue_workflows.runtime import display, stored_json
from queue_workflows.types import JsonDict

if TYPE_CHECKING:
    from queue_workflows.cli import run_views

UNCUT = 100_000
LINES = 40
"""Lines shown of a longer log (its last) and of a longer value (its first)."""
AT_ONCE = 20
"""Nodes whose logs are in memory at the same time."""
CHAIN_MAX = 10_000
"""Nodes of a run up to which the longest chain is sought, for which all are read."""
FAILURES = 20
TRACES = 3
"""Failed nodes whose tracebacks a summary has. The first ones are enough."""
TRACE_LINES = 20
_DETAILED = ("failed", "running", "awaiting_input")
_QUIET = frozenset({"claimed", "completed", "failed", "cancelled", *texts.OUTCOMES})
_FRAME = re.compile(r'[ |+-]*File "(.+)", line \d+')
_PACKAGE = Path(queue_workflows.__file__).parent


class Page:
    """Print to stdout, cut to the terminal's width if there is one.

    `full`: every node in detail, nothing cut.
    """

    def __init__(self, *, full: bool) -> None:
        width = shutil.get_terminal_size().columns if sys.stdout.isatty() else UNCUT
        self._full = full
        self._width = UNCUT if full else max(width, 20)

    def run(self, shown: JsonDict, *, chosen: bool) -> None:
        """Print a run with its `nodes`, which may be an iterator, and how many others it has.

        `chosen`: a user has named them, so that each is printed in detail. Their logs are read here
        and dropped once printed.
        """
        self._heading(shown)
        whole = chosen or self._full
        left = 0 if whole else shown["nodes_total"] - len(shown["nodes"])
        if left:
            counts = shown["counts"].items()
            self._line("nodes: " + ", ".join(f"{n} {status}" for status, n in counts))
        nodes = iter(shown["nodes"])
        while some := [*itertools.islice(nodes, AT_ONCE)]:
            detailed = [n for n in some if whole or n["status"] in _DETAILED]
            history.add_logs(detailed)
            ids = {id(node) for node in detailed}
            for node in some:
                output.echo()
                with_error = any(attempt["error"] == node["error"] for attempt in node["attempts"])
                state = texts.state(node | {"error": None} if with_error else node)
                self._line(f"{node['node_id']}{texts.after(node)}: {state}")
                self._detail(node, detailed=id(node) in ids)
                for attempt in node["attempts"]:
                    attempt["log"] = None
        if left:
            output.echo()
            item = ", --item KEY" if shown["maps"] else ""
            item += ", --round N" if shown["loops"] else ""
            more = f"and {output.counted(left, 'node')} more: --node NODE{item}, --full or --json"
            self._line(more)

    def _heading(self, shown: JsonDict) -> None:
        """Print the state of a run, where it comes from, its output, its maps and its loops."""
        done = sum(shown["counts"].get(status, 0) for status in texts.DONE)
        self._line(" ".join(texts.run_parts(shown, done, shown["nodes_total"], None)))
        self._line(f"created {display.moment(shown['created_at'])}")
        if shown["parent_run_id"]:
            parent = shown["parent_run_id"]
            self._line(f"of node {shown['parent_node_id']} of run {parent}: `{_show(parent)}`")
        if shown["out_dir"]:
            self._line(f"files in {shown['out_dir']}")
        for each in map(stored_json.mapping, stored_json.sequence(shown["upgrades"])):
            self._line(texts.moved_text(each))
        if shown["output"] is not None:
            self._line(texts.output_text(shown["output"]))
        for text in (text for each in shown["maps"] for text in texts.map_texts(each)):
            self._line(text)
        for each in shown["loops"]:
            self._line(texts.loop_text(each))
        for each in shown.get("items", ()):
            self._line(texts.item_text(each))

    def job(self, shown: JsonDict) -> None:
        """Print a job of either family."""
        self._line(texts.heading(shown))
        if shown.get("run_id"):
            self._line(f"of run {shown['run_id']}{texts.after(shown)}")
        model = f", model {shown['required_model']}" if shown.get("required_model") else ""
        self._line(f"queue {shown['queue']}{model}, created {display.moment(shown['created_at'])}")
        if keys := texts.keys_text(shown):
            self._line(keys)
        self._detail(shown, detailed=True)

    def end(self, shown: JsonDict) -> None:
        """Print how a followed job ended, without what was printed before."""
        self._line(texts.heading(shown))
        self._trace(shown)
        self._value("output", shown["output"])

    def _detail(self, job: JsonDict, *, detailed: bool) -> None:
        if detailed and job["id"] and job["kind"] == "node job":
            self._line(f"job {job['id']}, module {job['node_module']}", "  ")
        if job.get("child_run_id"):
            self._line(f"run {job['child_run_id']}: `{_show(job['child_run_id'])}`", "  ")
        for attempt in job["attempts"]:
            last = attempt is job["attempts"][-1]
            again = texts.again_text(job, job["attempts_failed"]) if last else ""
            self._attempt(attempt, again)
        for act in job.get("acts", ()):
            # Changes by sweeps are shown with the attempts.
            if act["event_type"] != "reclaimed":
                self._line(texts.act_text(act), "  ")
        if not detailed:
            return
        self._value("inputs", job["inputs"])
        self._value("output", job["output"])
        self._trace(job)
        for attempt in job["attempts"]:
            if attempt["log"] is not None:
                lines = display.lines(attempt["log"]["text"].rstrip("\r\n"))
                left = 0 if self._full else max(0, len(lines) - LINES)
                before = f" ({left} lines before these: --full)" if left else ""
                self._block(f"log of attempt {attempt['claim_no']}{before}:", lines[left:])

    def _attempt(self, attempt: JsonDict, again: str) -> None:
        self._line(f"attempt {attempt['claim_no']}: {texts.attempt_text(attempt)}", "  ")
        if again and attempt["outcome"] == "retried":
            self._line(again, "    ")
        if self._full and attempt["used"]:
            self._line(texts.used_text(attempt["used"]), "    ")
        for event in attempt["events"]:
            if event["event_type"] not in _QUIET:
                self._line(texts.event_text(event), "    ")
        if attempt["machine"]:
            at = display.clock(attempt["machine"]["sampled_at"])
            self._line(f"{at} its machine: {texts.sample(attempt['machine'])}", "    ")

    def _value(self, name: str, value: Any) -> None:
        if value in (None, {}):
            return
        text = output.compact(value, 200)
        if len(text) + len(name) + 4 <= min(self._width, 100):
            self._line(f"{name}: {text}", "  ")
            return
        lines = display.pretty(value)
        shown = lines if self._full else lines[:LINES]
        self._block(f"{name}:", shown)
        if len(lines) > len(shown):
            self._line(f"... {len(lines) - LINES} lines more: --full", "    ")

    def _trace(self, job: JsonDict) -> None:
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
        if lines := _trace_lines(trace, whole=self._full):
            self._block(f"{name}{'' if self._full else ' (all of it: --full)'}:", lines)

    def _block(self, name: str, lines: Iterable[str]) -> None:
        self._line(name, "  ")
        for text in lines:
            self._line(text.rstrip(), "    ")

    def _line(self, text: str, indent: str = "") -> None:
        limit = self._width - len(indent)
        output.echo(indent + output.line(text, max(limit, 10)))


def _show(run_id: str) -> str:
    return f"queue-workflows show {shlex.quote(run_id)}"


# --- the summary of a run that was followed ----------------------------------------------------


def collect(seen: run_views.RunSnapshot) -> JsonDict:
    """Return the run with `workers` (host_label, queue, pid, nodes, seconds) and `longest_chain`.

    The chain is empty for a run of more than CHAIN_MAX nodes. `failed`: the first nodes that
    failed, each with its error and traceback, which may be None.
    `maps` and `output`: as `history.get_run` returns them.
    """
    run_id, counts = seen.run["id"], dict[str, int]()
    for step in seen.steps:
        for status, n in step.counts.items():
            counts[status] = counts.get(status, 0) + n
    with db.transaction() as conn:
        places = statements.overview.completed_by(conn, run=run_id)
        is_small = seen.total <= CHAIN_MAX
        times = statements.overview.node_seconds(conn, run=run_id) if is_small else []
        frozen = statements.runs.definition(conn, run_id=run_id)
        crashes = statements.overview.crashes(conn, run=run_id)
        failed = statements.overview.failures(conn, run=run_id, limit=FAILURES)
        maps = job_history.maps(conn, run_id)
        returned = statements.runs.output(conn, run_id=run_id)
    seconds = {row["node_id"]: row["seconds"] for row in times}
    chain = _chain(frozen, seconds) if seconds else []
    longest = {"nodes": chain, "seconds": sum(seconds.get(name, 0.0) for name in chain)}
    run, workers = seen.run, [_place(row) for row in places]
    return {
        "id": run_id, "workflow_name": run["workflow_name"], "status": run["status"],
        "error": run["error"], "output": returned, "out_dir": run["out_dir"],
        "elapsed_s": run["elapsed_s"], "nodes_total": seen.total, "nodes": counts,
        "workers": workers, "longest_chain": longest, "maps": maps, "taken_back": crashes,
        "failed": failed,
    }  # fmt: skip


def _place(row: Mapping[str, Any]) -> JsonDict:
    pid = str(row["worker_id"]).partition(":")[2].partition(":")[0]
    kept = {key: row[key] for key in ("host_label", "queue", "worker_id", "nodes", "seconds")}
    return kept | {"pid": int(pid) if pid.isdecimal() else None}


def _chain(frozen: Any, seconds: Mapping[str, float]) -> list[str]:
    """Return the longest chain of a stored definition and its items; [] if it is not a graph."""
    deps = item_nodes.dependencies(frozen, seconds)
    nodes = {
        name: graph.Node(name, "", "cpu", None, tuple(before), {}, None, None, None)
        for name, before in deps.items()
    }
    with contextlib.suppress(errors.InvalidWorkflow):
        return longest_chain(graph.Graph(nodes), seconds)
    return []


def longest_chain(walk: graph.Graph, seconds: Mapping[str, float]) -> list[str]:
    """Return the node ids of the path with the longest total handler time, in order.

    Nodes of items that have not completed, as a skipped round, are left out.
    """
    reached: dict[str, tuple[float, int]] = {}
    before: dict[str, str] = {}
    open_deps = {node.id: len(node.deps) for node in walk.nodes.values()}
    ready = list(walk.sources)
    for node_id in ready:
        so_far, length = reached[before[node_id]] if node_id in before else (0.0, 0)
        reached[node_id] = (so_far + seconds.get(node_id, 0.0), length + 1)
        for follower in walk.downstream(node_id):
            if follower not in before or reached[node_id] > reached[before[follower]]:
                before[follower] = node_id
            open_deps[follower] -= 1
            if not open_deps[follower]:
                ready.append(follower)
    chain = [max(reached, key=reached.__getitem__)] if reached else []
    while chain and chain[-1] in before:
        chain.append(before[chain[-1]])
    return [name for name in reversed(chain) if name in seconds or not item_ids.of_item(name)]


def show(found: Mapping[str, Any]) -> None:
    """Print the summary."""
    name, seconds = output.line(found["workflow_name"]), output.seconds(found["elapsed_s"])
    output.echo(f"run {found['id']} ({name}): {found['status']} in {seconds}")
    if found["output"] is not None:
        output.echo(texts.output_text(found["output"]))
    nodes = ", ".join(f"{n} {status}" for status, n in sorted(found["nodes"].items()))
    output.echo(f"nodes: {nodes or 'none'}")
    for place in found["workers"]:
        where = texts.place(place["worker_id"])
        did = output.counted(place["nodes"], "node")
        output.echo(f"  {place['queue']} {where}: {did}, {output.seconds(place['seconds'])}")
    for text in (text for each in found["maps"] for text in texts.map_texts(each)):
        output.echo(text)
    if found["taken_back"]:
        output.echo(f"taken back from dead workers: {output.counted(found['taken_back'], 'time')}")
    if chain := found["longest_chain"]["nodes"]:
        ends = chain[0] if len(chain) == 1 else f"{chain[0]} ... {chain[-1]}"
        seconds = output.seconds(found["longest_chain"]["seconds"])
        nodes = output.counted(len(chain), "node")
        output.echo(f"longest chain: {nodes}, {seconds} ({output.line(ends, 120)})")
    is_folder = False
    # A name that is too long, or that this user may not access, raises.
    with contextlib.suppress(OSError, ValueError):
        is_folder = bool(found["out_dir"]) and Path(found["out_dir"]).is_dir()
    if is_folder:
        output.echo(f"files: {output.line(found['out_dir'], 1000)}")
    if found["error"]:
        output.echo(f"error: {output.line(found['error'], 2000)}")


def show_traces(found: Mapping[str, Any], *, whole: bool) -> None:
    """Print to stderr where the handlers of failed nodes raised; `whole`: all of it."""
    sys.stdout.flush()
    for node in found["failed"][:TRACES]:
        lines = _trace_lines(node["traceback"], whole=whole)
        if lines:
            more = "" if whole else " (all of it: --debug)"
            output.complain(f"traceback of {output.line(node['node_id'])}{more}:")
        for line in lines:
            sys.stderr.write(output.line(line, 400) + "\n")


def _trace_lines(trace: str | None, *, whole: bool) -> list[str]:
    lines = display.lines(trace.rstrip()) if trace else []
    return lines if whole else app_frames(lines)[-TRACE_LINES:]


def app_frames(lines: list[str]) -> list[str]:
    """Return a traceback from its first frame outside the engine; [] without such a frame."""
    for number, line in enumerate(lines):
        match = _FRAME.match(line)
        if match is not None and not _is_engine(match[1]):
            return lines[number:]
    return []


def _is_engine(path: str) -> bool:
    """Return whether a path, perhaps of another machine, is in this package but not its demo."""
    _, package, name = path.rpartition(f"/{_PACKAGE.name}/")
    return bool(package) and not name.startswith("demo/") and (_PACKAGE / name).is_file()
