"""Turn the attempts of nodes into lines of waits, loads and runs; sum up the cost of failures."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, Final, NamedTuple

from queue_workflows.admin import attempt_history
from queue_workflows.runtime import display, stored_json
from queue_workflows.service.dashboard import view
from queue_workflows.types import JsonDict, Row

MOST: Final = 500
"""Lines at most: of larger runs, steps, and the nodes that failed or run."""
_LEAST_PCT: Final = 0.25
"""Width of the shortest bar that can be seen."""
_LOST: Final = frozenset({"failed", "retried", "reclaimed", "unknown"})
_AFTER: Final = {"retried": "its back-off", "parked": "an answer"}
"""The cause of a wait after an attempt with this outcome; after others it is a worker."""
_CLAUSES: Final = {
    "not_due": "its time", "locked": "a lock key", "limited": "a limit", "items": "its items",
    "unserved": "a worker of its queue",
}  # fmt: skip
"""The cause of a queued node's wait by its `blocked_reason`; without one it is a worker."""
WAITS: Final = ("queued", "awaiting_input")
_GROUPS: Final = {
    "an answer": "asks", "a child run": "asks", "its back-off": "warning",
    "a worker of its queue": "warning", "its time": "ended", "a lock key": "ended",
    "a limit": "ended", "its items": "wait",
}  # fmt: skip
"""The colour of a wait by its cause; another cause is a worker, with the colour `wait`."""
_COLOURS: Final = ("wait", "asks", "warning", "ended", "load", "run", "lost")
"""The colours of spans in the order of the legend: classes of their bars."""


class Span(NamedTuple):
    """A part of a node's time; `kind`: wait, load or run. `why`: the cause, or the outcome.

    `lost`: of an attempt that did not end well.
    """

    kind: str
    begin: datetime
    end: datetime
    why: str
    lost: bool = False

    @property
    def seconds(self) -> float:
        return max(0.0, (self.end - self.begin).total_seconds())

    @property
    def colour(self) -> str:
        """Return the class of its bar."""
        if self.lost:
            return "lost"
        return _GROUPS.get(self.why, "wait") if self.kind == "wait" else self.kind


class Line(NamedTuple):
    """A row of the time line: a node, or a step with the number of its `nodes`."""

    name: str
    status: str
    nodes: int | None
    attempts: int
    start_s: float | None
    """When its first attempt began, from the begin of the time line; None if none has."""
    took_s: tuple[float, float, float]
    """The seconds of its waits, loads and runs."""
    why: str
    """What it waits for now, or ""."""
    where: str | None
    """The machine that had it last."""
    bars: Sequence[tuple[str, float, float]]
    """The colour of each span, and its place and width in percent."""


def share(at: datetime, begin: datetime, end: datetime) -> float:
    """Return the place of a time between two others, from 0 to 1."""
    width_s = max((end - begin).total_seconds(), 0.001)
    return min(1.0, max(0.0, (at - begin).total_seconds() / width_s))


# --- one node ----------------------------------------------------------------------------------


def spans(node: JsonDict, now: datetime) -> list[Span]:
    """Return the waits, loads and runs of a node with its `attempts`, the oldest first."""
    found: list[Span] = []
    at: datetime = node["created_at"]
    why = "a worker"
    attempts: Sequence[JsonDict] = node["attempts"]
    for number, attempt in enumerate(attempts):
        begin: datetime = attempt["claimed_at"] or node["created_at"]
        if (queued_at := attempt["queued_at"]) is not None and queued_at < begin:
            found.append(Span("wait", queued_at, begin, why))
        outcome: str = attempt["outcome"]
        following = attempts[number + 1]["claimed_at"] if number + 1 < len(attempts) else None
        at = max(
            begin, attempt["ended_at"] or (now if outcome == "running" else following or begin)
        )
        loading_s, lost = _load_s(attempt), outcome != "running" and _is_lost(attempt)
        # A load beyond the end is cut, as begin + load may be out of the range of times.
        is_cut = loading_s >= (at - begin).total_seconds()
        loaded = at if is_cut else begin + timedelta(seconds=loading_s)
        if loaded > begin:
            found.append(Span("load", begin, loaded, outcome, lost))
        found.append(Span("run", loaded, at, outcome, lost))
        why = _AFTER.get(outcome, "a worker")
    status = node["status"]
    until: datetime | None = now if status in WAITS else node["finished_at"]
    if status in WAITS:
        why = waits_for(node)
    elif status == "skipped" or (attempts and why != "an answer"):
        until = None
    elif node["child_run_id"]:
        why = "a child run"
    if until is not None and until > at:
        found.append(Span("wait", at, until, why))
    return found


def waits_for(node: JsonDict) -> str:
    """Return the cause for which a queued node, or one that waits for an answer, waits now."""
    if node["status"] == "awaiting_input":
        return "a child run" if node["child_run_id"] else "an answer"
    model = node["required_model"]
    worker = f"a {node['queue']} worker" + (f" with {display.line(model, 60)}" if model else "")
    return _CLAUSES.get(node["blocked_reason"] or "", worker)


def _is_lost(attempt: JsonDict) -> bool:
    """Return whether an attempt did not end well: it failed, died, or a watchdog ended it."""
    kinds = {event["event_type"] for event in attempt["events"]}
    return attempt["outcome"] in _LOST or not kinds.isdisjoint(attempt_history.DEATHS)


def _load_s(attempt: JsonDict) -> float:
    loads = [event for event in attempt["events"] if event["event_type"] == "model_load_done"]
    return sum(max(0.0, stored_json.number(event["elapsed_s"]) or 0.0) for event in loads)


# --- several nodes -----------------------------------------------------------------------------


def table(
    nodes: Iterable[JsonDict], steps: Iterable[Row], begin: datetime, now: datetime
) -> JsonDict:
    """Return `lines` in the order of their start, five `marks` of the axis, and the `legend`.

    A node has its `spans`. A step has `step`, `counts`, `started_at`, and `finished_at`, which is
    None while it goes on.
    """
    shown = [*nodes, *(_as_node(step, now) for step in steps)]
    times = [span for node in shown for span in node["spans"]]
    begin = min([begin, *(span.begin for span in times)])
    end = max([begin, *(span.end for span in times)])
    lines = [_line(node, begin, end) for node in shown]
    lines.sort(key=lambda line: (line.start_s is None, line.start_s or 0.0))
    took_s = (end - begin).total_seconds()
    marks = [view.span(took_s * n / 4) for n in range(5)]
    return {"lines": lines, "marks": marks, "legend": _legend(times)}


def _legend(spans: Iterable[Span]) -> list[tuple[str, str]]:
    """Return the colours of spans, each with its meaning in words."""
    causes: dict[str, set[str]] = {}
    for span in spans:
        cause = span.why if span.why in _GROUPS else "a worker"
        causes.setdefault(span.colour, set()).add(cause)
    words = {"load": "load", "run": "run", "lost": "failed or died"}
    return [
        (colour, words.get(colour) or f"wait for {' or '.join(sorted(causes[colour]))}")
        for colour in _COLOURS if colour in causes
    ]  # fmt: skip


def _as_node(step: Row, now: datetime) -> JsonDict:
    """Return a step as a node that ran from its first start to its last end."""
    begin, end, state = step["started_at"], step["finished_at"] or now, state_of(step["counts"])
    return {
        "node_id": step["step"], "status": state, "attempts": (),
        "nodes": sum(step["counts"].values()),
        "spans": [] if begin is None else [Span("run", begin, end, state)],
    }  # fmt: skip


def _line(node: JsonDict, begin: datetime, end: datetime) -> Line:
    each: Sequence[Span] = node["spans"]
    took_s = {"wait": 0.0, "load": 0.0, "run": 0.0}
    bars: list[tuple[str, float, float]] = []
    whole_s = max((end - begin).total_seconds(), 0.001)
    for span in each:
        seconds = span.seconds
        took_s[span.kind] += seconds
        left = 100 * ((span.begin - begin).total_seconds() / whole_s)
        width = max(_LEAST_PCT, 100 * (seconds / whole_s))
        bars.append((span.colour, round(min(left, 100 - width), 1), round(width, 1)))
    first = next((span for span in each if span.kind != "wait"), each[0] if each else None)
    waits = each and each[-1].kind == "wait" and node["status"] in WAITS
    attempts: Sequence[JsonDict] = node["attempts"]
    return Line(
        node["node_id"], node["status"], node.get("nodes"), len(attempts),
        start_s=None if first is None else (first.begin - begin).total_seconds(),
        took_s=(took_s["wait"], took_s["load"], took_s["run"]),
        why=each[-1].why if waits else "",
        where=attempts[-1]["host_label"] if attempts else None, bars=bars,
    )  # fmt: skip


def cost(nodes: Sequence[JsonDict]) -> str:
    """Return the cost of attempts of nodes with `spans` that did not end well, and of loads again.

    `3 attempts, 41 min of GPU lost; 1 model load repeated, 25 s`, or "".
    """
    lost, again = list[tuple[Span, str]](), list[Span]()
    for node in nodes:
        each: Sequence[Span] = node["spans"]
        lost += [(span, node["queue"]) for span in each if span.lost]
        again += [span for span in each if span.kind == "load"][1:]
    again = [span for span in again if not span.lost]
    parts: list[str] = []
    if lost:
        attempts = display.counted(sum(span.kind == "run" for span, _ in lost), "attempt")
        lost_s = sum(span.seconds for span, _ in lost)
        gpu_s = sum(span.seconds for span, queue in lost if queue == "gpu")
        text, of_gpu = view.span(lost_s), f"{view.span(gpu_s)} of GPU"
        if gpu_s:
            text = of_gpu if gpu_s == lost_s else f"{text} ({of_gpu})"
        parts.append(f"{attempts}, {text} lost")
    if again:
        took = view.span(sum(span.seconds for span in again))
        parts.append(f"{display.counted(len(again), 'model load')} repeated, {took}")
    return "; ".join(parts)


def state_of(counts: Mapping[str, Any]) -> str:
    """Return the state of a group of nodes, which is the worst state of its nodes."""
    for state in ("failed", "awaiting_input", "running", "queued", "waiting", "cancelled"):
        if counts.get(state):
            return state
    return "skipped" if counts and not counts.get("completed") else "completed"
