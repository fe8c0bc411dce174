"""Turn the attempts of nodes into a table whose bars are waits, loads and runs; count their cost."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, Final, NamedTuple

from queue_workflows.admin import attempt_history
from queue_workflows.runtime import display, stored_json
from queue_workflows.types import JsonDict, Row

MOST: Final = 500
"""Lines at most: of larger runs, steps, and the nodes that failed or run."""
_LEAST_PCT: Final = 0.25
"""Width of the shortest bar that can be seen."""
_LOST: Final = frozenset({"failed", "retried", "reclaimed", "unknown"})
_AFTER: Final = {"retried": "its back-off", "parked": "an answer"}
"""What a node waits for after an attempt with this outcome; else for a worker."""
CLAUSES: Final = {
    "not_due": "its time", "locked": "a lock key", "limited": "a limit", "items": "its items",
    "unserved": "a worker of its queue",
}  # fmt: skip
"""What a queued node waits for by its `blocked_reason`; without one it waits for a worker."""


class Span(NamedTuple):
    """A part of a node's time: `wait`, `load` or `run`. `why`: what it waits for, or the outcome."""

    kind: str
    begin: datetime
    end: datetime
    why: str
    lost: bool = False

    @property
    def seconds(self) -> float:
        return max(0.0, (self.end - self.begin).total_seconds())


class Bar(NamedTuple):
    """A span as a rectangle, in percent of the width; `lost`: it is hatched."""

    kind: str
    x: float
    width: float
    why: str
    lost: bool


class Line(NamedTuple):
    """A row of the table; times in seconds, `start_s` since the begin of the table."""

    name: str
    state: str
    nodes: int
    """How many nodes a step has; 0 for a single node."""
    attempts: int
    start_s: float | None
    wait_s: float
    load_s: float
    run_s: float
    where: str
    why: str
    """What it waits for now, or ""."""
    bars: Sequence[Bar]


class Table(NamedTuple):
    """The lines in the order of their start, and the marks of the axis (percent, text)."""

    lines: list[Line]
    marks: list[tuple[float, str]]


class Cost(NamedTuple):
    """What attempts cost that did not end well, and loads that were made again."""

    attempts: int = 0
    seconds: float = 0.0
    gpu_s: float = 0.0
    loads: int = 0
    load_s: float = 0.0

    @property
    def text(self) -> str:
        """Return `3 attempts, 41 min 00 s of GPU lost`, or ""."""
        parts: list[str] = []
        if self.attempts:
            of_gpu = self.gpu_s >= self.seconds / 2 and self.gpu_s > 0
            lost = f"{display.duration(self.gpu_s)} of GPU" if of_gpu else display.duration(self.seconds)
            parts.append(f"{display.counted(self.attempts, 'attempt')}, {lost} lost")
        if self.loads:
            again = display.counted(self.loads, "model load")
            parts.append(f"{again} repeated, {display.duration(self.load_s)}")
        return "; ".join(parts)


# --- one node ----------------------------------------------------------------------------------


def spans(node: JsonDict, now: datetime) -> list[Span]:
    """Return the waits, loads and runs of a node with its `attempts`, the oldest first."""
    found: list[Span] = []
    why, at = "a worker", None
    attempts: Sequence[JsonDict] = node["attempts"]
    for number, attempt in enumerate(attempts):
        begin: datetime = attempt["claimed_at"] or node["created_at"]
        if (queued_at := attempt["queued_at"]) is not None and queued_at < begin:
            found.append(Span("wait", queued_at, begin, why))
        following = attempts[number + 1]["claimed_at"] if number + 1 < len(attempts) else None
        runs = attempt["outcome"] == "running"
        end = max(begin, attempt["ended_at"] or (now if runs else following or begin))
        took_s, loading_s = (end - begin).total_seconds(), load_s(attempt)
        loaded = end if loading_s >= took_s else begin + timedelta(seconds=loading_s)
        outcome, lost = attempt["outcome"], is_lost(attempt)
        if loaded > begin:
            found.append(Span("load", begin, loaded, outcome, lost))
        found.append(Span("run", loaded, end, outcome, lost))
        why, at = _AFTER.get(outcome, "a worker"), end
    status = node["status"]
    until = now if status in ("queued", "awaiting_input") else node["finished_at"]
    at = at or node["created_at"]
    waited = until is not None and until > at and status != "skipped"
    if waited and (status in ("queued", "awaiting_input") or why == "an answer" or not attempts):
        found.append(Span("wait", at, until, _waits_for(node, why)))
    return found


def _waits_for(node: JsonDict, why: str) -> str:
    if node["child_run_id"]:
        return "its run"
    if node["status"] == "awaiting_input":
        return "an answer"
    return CLAUSES.get(node["blocked_reason"] or "", why)


def is_lost(attempt: JsonDict) -> bool:
    """Return whether an attempt did not end well: it failed, died, or a watchdog ended it."""
    kinds = {event["event_type"] for event in attempt["events"]}
    return attempt["outcome"] in _LOST or not kinds.isdisjoint(attempt_history.DEATHS)


def load_s(attempt: JsonDict) -> float:
    """Return how long an attempt loaded models."""
    loads = [event for event in attempt["events"] if event["event_type"] == "model_load_done"]
    return sum(max(0.0, stored_json.number(event["elapsed_s"]) or 0.0) for event in loads)


# --- the table ---------------------------------------------------------------------------------


def table(
    nodes: Iterable[JsonDict], steps: Iterable[Row], begin: datetime, now: datetime
) -> Table:
    """Return the lines of these nodes and steps; of a step only its first start and last end.

    A step has `step`, `counts`, `state`, `started_at` and `finished_at` (None: it goes on).
    """
    by_node = [(node, spans(node, now)) for node in nodes]
    by_step = [(step, step["started_at"], step["finished_at"] or now) for step in steps]
    ends = [span.end for _, each in by_node for span in each]
    ends += [end for _, started_at, end in by_step if started_at is not None]
    starts = [each[0].begin for _, each in by_node if each]
    starts += [started_at for _, started_at, _ in by_step if started_at is not None]
    begin = min([begin, *starts])
    width_s = max((max(ends, default=begin) - begin).total_seconds(), 0.001)

    def bar(span: Span) -> Bar:
        x = 100 * (span.begin - begin).total_seconds() / width_s
        width = max(_LEAST_PCT, 100 * span.seconds / width_s)
        x = min(x, 100 - width)
        return Bar(span.kind, round(x, 2), round(width, 2), span.why, span.lost)

    lines = [_line(node, each, begin, [bar(span) for span in each]) for node, each in by_node]
    for step, started_at, end in by_step:
        each = [] if started_at is None else [Span("run", started_at, end, step["state"])]
        lines.append(
            Line(
                step["step"], step["state"], sum(step["counts"].values()), 0,
                None if started_at is None else (started_at - begin).total_seconds(),
                0.0, 0.0, each[0].seconds if each else 0.0, "", "", [bar(span) for span in each],
            )  # fmt: skip
        )
    lines.sort(key=lambda line: (line.start_s is None, line.start_s or 0.0))
    marks = [(25.0 * n, display.duration(width_s * n / 4)) for n in range(5)]
    return Table(lines, marks)


def _line(node: JsonDict, each: Sequence[Span], begin: datetime, bars: Sequence[Bar]) -> Line:
    sums = {kind: 0.0 for kind in ("wait", "load", "run")}
    for span in each:
        sums[span.kind] += span.seconds
    first = next((span for span in each if span.kind != "wait"), each[0] if each else None)
    waits = bool(each) and node["status"] in ("queued", "awaiting_input")
    return Line(
        name=node["node_id"],
        state=node["status"],
        nodes=0,
        attempts=len(node["attempts"]),
        start_s=None if first is None else (first.begin - begin).total_seconds(),
        wait_s=sums["wait"],
        load_s=sums["load"],
        run_s=sums["run"],
        where=node["attempts"][-1]["host_label"] or "" if node["attempts"] else "",
        why=each[-1].why if waits else "",
        bars=bars,
    )


def cost(nodes: Iterable[JsonDict], now: datetime) -> Cost:
    """Return what the failed attempts of these nodes cost, and their second and later loads."""
    attempts = loads = 0
    seconds = gpu_s = repeated_s = 0.0
    for node in nodes:
        has_loaded = False
        for attempt in node["attempts"]:
            loaded_s = load_s(attempt)
            if is_lost(attempt):
                took_s = _took_s(attempt, now)
                attempts += 1
                seconds += took_s
                gpu_s += took_s if node["queue"] == "gpu" else 0.0
            elif has_loaded and loaded_s:
                loads += 1
                repeated_s += loaded_s
            has_loaded = has_loaded or loaded_s > 0
    return Cost(attempts, seconds, gpu_s, loads, repeated_s)


def _took_s(attempt: JsonDict, now: datetime) -> float:
    if attempt["claimed_at"] is None:
        return max(0.0, attempt["ran_s"] or 0.0)
    end = attempt["ended_at"] or (now if attempt["outcome"] == "running" else None)
    between = 0.0 if end is None else (end - attempt["claimed_at"]).total_seconds()
    return max(0.0, attempt["ran_s"] or 0.0, between)


def state_of(counts: Mapping[str, Any]) -> str:
    """Return the state of a group of nodes: the first that one of them has, the worst first."""
    for state in ("failed", "awaiting_input", "running", "queued", "waiting", "cancelled"):
        if counts.get(state):
            return state
    return "skipped" if counts and not counts.get("completed") else "completed"
