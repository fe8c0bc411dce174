"""Read a run in one transaction: its steps, and the nodes worth showing."""

from __future__ import annotations

import contextlib
import logging
import re
from typing import Any, NamedTuple

from queue_workflows import db, errors
from queue_workflows.db import statements
from queue_workflows.runtime import masking, stored_json
from queue_workflows.types import TERMINAL_RUN_STATUSES, Row

_log = logging.getLogger(__name__)
SMALL = 60
"""Up to this many nodes all are shown; of a larger run those that run, wait or failed."""
SHOWN = 40
DONE = ("completed", "skipped")


class Step(NamedTuple):
    """A step of the workflow: its nodes by status, out of `total`."""

    name: str
    total: int
    counts: dict[str, int]
    elapsed_s: float | None

    @property
    def done(self) -> int:
        return sum(self.counts.get(status, 0) for status in DONE)

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


class Reader:
    """Read snapshots of one run on a connection of its own, also after it was lost."""

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self._conn: db.Connection | None = None
        self._totals: dict[str, int] = {}
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
        with conn.transaction():
            head = statements.overview.run_head(conn, run=self._run_id)
            if head is None:
                raise errors.UnknownJob(f"run {self._run_id!r} is gone")
            if not self._totals:
                self._totals = _totals(statements.runs.definition(conn, run_id=self._run_id))
            items = {
                row["node_id"]: row["nodes"]
                for row in statements.overview.maps(conn, run=self._run_id)
            }
            totals = {name: n + items.get(name, 0) for name, n in self._totals.items()}
            by_step = {
                row["step"]: row for row in statements.overview.steps(conn, run=self._run_id)
            }
            large = sum(totals.values()) > SMALL
            limit = SHOWN if large else SMALL
            nodes = statements.overview.nodes(conn, run=self._run_id, live_only=large, limit=limit)
        names = [*totals, *(name for name in by_step if name not in totals)]
        steps = [_step(name, totals.get(name, 0), by_step.get(name)) for name in names]
        return RunSnapshot(head, steps, nodes)


def own_name(node_id: str) -> tuple[str, str]:
    """Return the step of a node, and its name in the step: `cut` and `[clip-7]/encode`."""
    step = re.split(r"[/\[]", node_id, maxsplit=1)[0]
    return step, node_id[len(step) :].removeprefix("/")


def _totals(definition: dict[str, Any] | None) -> dict[str, int]:
    totals: dict[str, int] = {}
    for node_id in stored_json.graph_nodes(definition):
        step = node_id.partition("/")[0]
        totals[step] = totals.get(step, 0) + 1
    return totals


def _step(name: str, total: int, row: Row | None) -> Step:
    if row is None:
        return Step(name, total, {}, None)
    counts = {key: n for key, n in row.items() if n and key not in ("step", "elapsed_s")}
    return Step(name, max(total, sum(counts.values())), counts, row["elapsed_s"])
