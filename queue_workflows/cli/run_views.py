"""Read a run in one transaction, as often as it is shown, and show it as plain lines."""

from __future__ import annotations

import contextlib
import logging
import re
import time
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import NamedTuple

from queue_workflows import db, errors
from queue_workflows.admin import stored_graph
from queue_workflows.cli import output, texts
from queue_workflows.db import statements
from queue_workflows.runtime import masking
from queue_workflows.types import TERMINAL_RUN_STATUSES, NowFn, Row

_log = logging.getLogger(__name__)
AGAIN_S = 2.0
"""Least seconds between two lines about one running step."""


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
    def heading(self) -> list[str]:
        """Return the parts of the first line, as `texts.run_parts`."""
        return texts.run_parts(self.run, self.done, self.total)


class Reader:
    """Read snapshots of one run on a connection of its own, also after it was lost."""

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self._conn: db.Connection | None = None
        self._totals: Counter[str] = Counter()
        self._away = False

    def close(self) -> None:
        """Close the connection."""
        conn, self._conn = self._conn, None
        if conn is not None:
            conn.close()

    def read(self) -> RunSnapshot | None:
        """Return the run now; None while the database is away.

        Raises `UnknownJob` if it is gone.
        """
        try:
            if self._conn is None:
                self._conn = db.connect()
            picture = self._read(self._conn)
        except (db.OperationalError, db.InterfaceError) as error:
            with contextlib.suppress(db.Error):
                self.close()
            if not self._away:
                self._away = True
                _log.warning("waiting for the database: %s", masking.mask(str(error).strip()))
            return None
        if self._away:
            self._away = False
            _log.warning("the database is back")
        return picture

    def _read(self, conn: db.Connection) -> RunSnapshot:
        run_id = self._run_id
        with conn.transaction():
            head = statements.overview.run_head(conn, run=run_id)
            if head is None:
                raise errors.UnknownJob(f"run {run_id!r} is gone")
            if not self._totals:
                frozen = stored_graph.graph_nodes(statements.runs.definition(conn, run_id=run_id))
                self._totals = Counter(node_id.partition("/")[0] for node_id in frozen)
            maps = statements.overview.maps(conn, run=run_id)
            items = {row["node_id"]: row["nodes"] for row in maps}
            totals = {name: n + items.get(name, 0) for name, n in self._totals.items()}
            by_step = {row["step"]: row for row in statements.overview.steps(conn, run=run_id)}
            large = sum(totals.values()) > texts.SMALL
            limit = texts.SHOWN if large else texts.SMALL
            nodes = statements.overview.nodes(conn, run=run_id, live_only=large, limit=limit)
        steps: list[Step] = []
        for name in dict.fromkeys([*totals, *by_step]):
            row = by_step.get(name, {"step": name, "elapsed_s": None})
            counts = {key: n for key, n in row.items() if n and key not in ("step", "elapsed_s")}
            total = max(totals.get(name, 0), sum(counts.values()))
            steps.append(Step(name, total, counts, row["elapsed_s"]))
        return RunSnapshot(head, steps, nodes)


def own_name(node_id: str) -> tuple[str, str]:
    """Return the step of a node, and its name in the step: `cut` and `[clip-7]/encode`."""
    step = re.split(r"[/\[]", node_id, maxsplit=1)[0]
    return step, node_id[len(step) :].removeprefix("/")


class View:
    """A way to show a running run; this one shows important lines alone."""

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
            self.print_message(" ".join(picture.heading))
        for step in picture.steps:
            self._show_step(step)
        for node in picture.nodes:
            self._show_node(node)

    def _show_step(self, step: Step) -> None:
        state, done, printed_at = self._printed.get(step.name, ("waiting", 0, 0.0))
        now = self._now()
        if step.state == state and (step.done == done or now - printed_at < AGAIN_S):
            return
        self._printed[step.name] = (step.state, step.done, now)
        self.print_message(f"  {output.line(step.name)}: {step.text}")

    def _show_node(self, node: Row) -> None:
        taken_back = node["crash_count"] + node["lapse_count"]
        mark = f"{node['status']} {taken_back} {node['attempts']}"
        if self._nodes.get(node["node_id"], "") == mark:
            return
        self._nodes[node["node_id"]] = mark
        failed = texts.again_text(node, node["attempts"])
        if node["status"] == "failed" or taken_back or failed:
            self.print_message(f"    {output.line(node['node_id'])}: {texts.node_text(node)}")
