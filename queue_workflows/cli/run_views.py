"""Read a run and print it: line by line while it runs, as a page, or as a summary at its end.

`tree` draws it on a terminal, and is loaded only then.
"""

from __future__ import annotations

import contextlib
import graphlib
import itertools
import logging
import os
import re
import shlex
import shutil
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import queue_workflows
from queue_workflows import db, errors, history
from queue_workflows.admin import stored_graph
from queue_workflows.cli import output, texts
from queue_workflows.dag import item_ids
from queue_workflows.db import statements
from queue_workflows.runtime import display, masking, stored_json
from queue_workflows.types import TERMINAL_RUN_STATUSES, JsonDict, NowFn, Row

T = TypeVar("T")
_log = logging.getLogger(__name__)
AGAIN_S = 2.0
"""Least seconds between two lines about one running step."""
STEPS = 10_000
"""Steps of a run that are read."""
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


# --- while it runs -----------------------------------------------------------------------------


class Step(NamedTuple):
    """A step of the workflow with its nodes by status, out of `total`."""

    name: str
    total: int
    counts: dict[str, int]
    elapsed_s: float | None

    @property
    def done(self) -> int:
        return sum(self.counts.get(status, 0) for status in texts.DONE)

    @property
    def state(self) -> str:
        """Return the first state that applies of failed, waits for input, running, ..."""
        for status in ("failed", "awaiting_input", "running"):
            if self.counts.get(status):
                return status
        if self.done >= self.total:
            return "skipped" if self.counts.get("skipped") == self.total else "completed"
        if self.counts.get("cancelled"):
            return "cancelled"
        return "running" if self.done else "queued" if self.counts.get("queued") else "waiting"

    @property
    def text(self) -> str:
        """Return `12/300 completed, 4 running, 1.2 s`; of a step of one node its state and time."""
        elapsed = f", {output.seconds(self.elapsed_s)}" if self.elapsed_s is not None else ""
        if self.total == 1:
            return f"{texts.words(self.state)}{elapsed}"
        if self.state == "waiting":
            return f"waiting, {self.total} nodes"
        live = ("running", "awaiting_input", "failed", "cancelled")
        rest = [f", {self.counts[s]} {texts.words(s)}" for s in live if self.counts.get(s)]
        return f"{self.done}/{self.total} completed{''.join(rest)}{elapsed}"


class RunSnapshot(NamedTuple):
    """A run at one moment; `steps` in the workflow's order, empty before the run has started."""

    run: Row
    steps: list[Step]
    nodes: list[Row]

    @property
    def over(self) -> bool:
        return self.run["status"] in TERMINAL_RUN_STATUSES

    @property
    def total(self) -> int:
        return sum(step.total for step in self.steps)

    @property
    def done(self) -> int:
        return sum(step.done for step in self.steps)

    @property
    def questions(self) -> list[Row]:
        """Return the nodes that wait for a person and have a question."""
        waiting = (n for n in self.nodes if n["status"] == "awaiting_input")
        asks = (node for node in waiting if node["child_run_id"] is None)
        return [node for node in asks if isinstance(node["input_spec"], dict)]

    @property
    def heading(self) -> str:
        """Return the first line."""
        return texts.run_text(self.run, self.done, self.total)


class Source:
    """Read on a connection of its own, also after it was lost; a pool would wait for another."""

    def __init__(self) -> None:
        self._dedicated = db.DedicatedConnection()
        self.close = self._dedicated.close
        self._away = False

    def fetch(self, reads: Callable[[db.Connection], T]) -> T | None:
        """Return the result of `reads` in a transaction; None while the database is away.

        The beginning and the end of an outage are logged.
        """
        try:
            with self._dedicated.using() as conn, conn.transaction():
                found = reads(conn)
        except (db.OperationalError, db.InterfaceError) as error:
            if not self._away:
                self._away = True
                _log.warning("waiting for the database: %s", masking.mask(str(error).strip()))
            return None
        if self._away:
            self._away = False
            _log.warning("the database is back")
        return found


class Reader(Source):
    """Read snapshots of one run."""

    def __init__(self, run_id: str) -> None:
        super().__init__()
        self._run_id = run_id
        self._totals: Counter[str] = Counter()

    def read(self) -> RunSnapshot | None:
        """Return the run now; None while the database is away.

        Raises `UnknownJob` if it is gone.
        """
        return self.fetch(self._read)

    def _read(self, conn: db.Connection) -> RunSnapshot:
        run_id = self._run_id
        head = statements.history_rows.run(conn, run_id=run_id)
        if head is None:
            raise errors.UnknownJob(f"run {run_id!r} is gone")
        if not self._totals:
            frozen = stored_graph.graph_nodes(statements.runs.definition(conn, run_id=run_id))
            self._totals = Counter(node_id.partition("/")[0] for node_id in frozen)
        maps = statements.overview.maps(conn, run=run_id)
        items = {row["node_id"]: row["nodes"] for row in maps}
        totals = {name: n + items.get(name, 0) for name, n in self._totals.items()}
        # The first row counts the nodes of all steps.
        steps_of = statements.run_page.steps(conn, run_id=run_id, limit=STEPS)[1:]
        by_step = {row["step"]: row for row in steps_of}
        large = sum(totals.values()) > texts.SMALL
        limit = texts.SHOWN if large else texts.SMALL
        nodes = statements.overview.nodes(conn, run=run_id, live_only=large, limit=limit)
        steps: list[Step] = []
        for name in dict.fromkeys([*totals, *by_step]):
            row = by_step.get(name, {"counts": {}, "elapsed_s": None})
            total = max(totals.get(name, 0), sum(row["counts"].values()))
            steps.append(Step(name, total, row["counts"], row["elapsed_s"]))
        return RunSnapshot(head, steps, nodes)


class View:
    """A way to show a running run; this one shows only important lines."""

    def __init__(self, echo: Callable[[str], object]) -> None:
        self.print_message = echo
        """Prints one line without disturbing the picture."""

    def show(self, picture: RunSnapshot) -> None:
        """Show the run as it is now."""
        del picture

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
            self.print_message(picture.heading)
        now = self._now()
        for step in picture.steps:
            state, done, printed_at = self._printed.get(step.name, ("waiting", 0, 0.0))
            if step.state == state and (step.done == done or now - printed_at < AGAIN_S):
                continue
            self._printed[step.name] = (step.state, step.done, now)
            self.print_message(f"  {output.line(step.name)}: {step.text}")
        for node in picture.nodes:
            taken_back = node["crash_count"] + node["lapse_count"]
            mark = f"{node['status']} {taken_back} {node['attempts']}"
            if self._nodes.get(node["node_id"], "") == mark:
                continue
            self._nodes[node["node_id"]] = mark
            failed = texts.again_text(node, node["attempts"])
            if node["status"] == "failed" or taken_back or failed:
                self.print_message(f"    {output.line(node['node_id'])}: {texts.node_text(node)}")


# --- as a page ---------------------------------------------------------------------------------


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
            history.add_logs(node for node in some if whole or node["status"] in _DETAILED)
            for node in some:
                output.echo()
                with_error = any(attempt["error"] == node["error"] for attempt in node["attempts"])
                state = texts.state(node | {"error": None} if with_error else node)
                self._line(f"{node['node_id']}{texts.after(node)}: {state}")
                self._detail(node, detailed=whole or node["status"] in _DETAILED)
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
        self._line(texts.run_text(shown, done, shown["nodes_total"], None))
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
        """Print how a followed job ended, without the parts that were printed before."""
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
        output.echo(indent + output.line(text, self._width - len(indent)))


def _show(run_id: str) -> str:
    return f"queue-workflows show {shlex.quote(run_id)}"


# --- at its end --------------------------------------------------------------------------------


def summary(run_id: str) -> JsonDict:
    """Return a run that is over, with `workers` and `longest_chain`.

    Each worker has host_label, queue, pid, nodes and seconds. The chain is empty for a run of more
    than CHAIN_MAX nodes. `failed`: the first nodes that failed, each with its error and traceback,
    which may be None. `maps` and `output`: as `history.get_run` returns them. Raises `UnknownJob`.
    """
    with db.transaction() as conn:
        names = statements.history_rows.active_nodes(conn, run_id=run_id, limit=FAILURES)
        run = history.get_run(run_id, nodes=names, logs=False, conn=conn)
        if run is None:
            raise errors.UnknownJob(f"run {run_id!r} is gone")
        places = statements.overview.completed_by(conn, run=run_id)
        is_small = run["nodes_total"] <= CHAIN_MAX
        times = statements.overview.node_seconds(conn, run=run_id) if is_small else []
        frozen = statements.runs.definition(conn, run_id=run_id)
        crashes = statements.overview.crashes(conn, run=run_id)
    seconds = {row["node_id"]: row["seconds"] for row in times}
    chain = longest_chain(stored_graph.dependencies(frozen, seconds), seconds) if seconds else []
    longest = {"nodes": chain, "seconds": sum(seconds.get(name, 0.0) for name in chain)}
    counts = {status: n for status, n in run["counts"].items() if status != "waiting"}
    failed = [
        {key: node[key] for key in ("node_id", "error", "traceback")}
        for node in run["nodes"]
        if node["status"] == "failed"
    ]
    shown = ("id", "workflow_name", "status", "error", "output", "out_dir", "elapsed_s")
    return {
        **{key: run[key] for key in shown}, "nodes_total": run["nodes_total"], "nodes": counts,
        "workers": [_place(row) for row in places], "longest_chain": longest, "maps": run["maps"],
        "taken_back": crashes, "failed": failed,
    }  # fmt: skip


def _place(row: Mapping[str, Any]) -> JsonDict:
    pid = str(row["worker_id"]).partition(":")[2].partition(":")[0]
    kept = {key: row[key] for key in ("host_label", "queue", "worker_id", "nodes", "seconds")}
    return kept | {"pid": int(pid) if pid.isdecimal() else None}


def longest_chain(deps: Mapping[str, Sequence[str]], seconds: Mapping[str, float]) -> list[str]:
    """Return the node ids of the path with the longest total handler time, in order.

    Nodes of items that have not completed, as a skipped round, are left out. [] for a cycle.
    """
    reached: dict[str, tuple[float, int]] = {}
    before: dict[str, str | None] = {}
    with contextlib.suppress(graphlib.CycleError):
        for name in graphlib.TopologicalSorter(deps).static_order():
            last = max(deps.get(name, ()), key=reached.__getitem__, default=None)
            so_far, length = (0.0, 0) if last is None else reached[last]
            reached[name] = (so_far + seconds.get(name, 0.0), length + 1)
            before[name] = last
    chain: list[str] = []
    node = max(reached, key=reached.__getitem__, default=None)
    while node is not None:
        chain.append(node)
        node = before[node]
    return [name for name in reversed(chain) if name in seconds or not item_ids.of_item(name)]


def print_summary(found: Mapping[str, Any]) -> None:
    """Print the result of `summary`."""
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
    # `Path.is_dir` raises for a name that is too long, or that this user may not access.
    if found["out_dir"] and os.path.isdir(found["out_dir"]):  # noqa: PTH112
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
        if (match := _FRAME.match(line)) is None:
            continue
        # The path may be of another machine. The demo is an app.
        _, package, name = match[1].rpartition(f"/{_PACKAGE.name}/")
        # A name that is too long, as a role may store it, is not a file of the engine.
        is_ours = package and os.path.isfile(_PACKAGE / name)  # noqa: PTH113
        if not is_ours or name.startswith("demo/"):
            return lines[number:]
    return []
