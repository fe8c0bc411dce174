"""Choose the next job of a gpu worker by each claim policy, as pure functions.

`balanced` and `strict` are what sql/functions/gpu_policy.sql does in SQL (a property test holds the
two to each other); `fifo` and `affinity-first` are there to be compared with.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

WINDOW = 16
"""Jobs of a line that are weighed; a line as long is left to nobody."""
PATIENCE = 3.0
"""Loads that it may take those that hold a model to clear its line."""
NO_MODEL = ""
POLICIES = ("fifo", "affinity-first", "strict", "balanced")


class Job(NamedTuple):
    """A job that waits: lower priority numbers and lower places in line come first."""

    priority: int
    seq: int
    waited_s: float


@dataclass(frozen=True)
class Line:
    """The jobs that wait for one model ('': for none)."""

    model: str
    ahead: Sequence[Job]
    """The first WINDOW at least, by priority and place."""
    oldest: Job

    @property
    def first(self) -> Job:
        """Return the first job of the best priority."""
        return self.ahead[0]


class Holder(NamedTuple):
    """Another live worker that holds the model: when it is free, and a run's seconds there."""

    free_s: float
    run_s: float


@dataclass(frozen=True)
class View:
    """What a worker knows when it chooses; times in seconds, of loads and runs here."""

    lines: Sequence[Line]
    warm: str | None = None
    load_s: dict[str, float] = field(default_factory=dict[str, float])
    run_s: dict[str, float] = field(default_factory=dict[str, float])
    holders: dict[str, list[Holder]] = field(default_factory=dict[str, list[Holder]])
    grace_s: float = 300.0
    """Below 0: no urgency."""
    bound_s: float = 2400.0


class Choice(NamedTuple):
    """The job to take of a line, and why; model None: what waits is left to others."""

    model: str | None
    job: Job | None
    why: str


NOTHING = Choice(None, None, "nothing")
LEFT = Choice(None, None, "left")


def choose(policy: str, view: View) -> Choice:
    """Return the job that this policy takes next."""
    if not view.lines:
        return NOTHING
    return _RULES[policy](view)


def reach_s(view: View, model: str, jobs: int) -> float | None:
    """Return when holders of a model will have taken so many of its jobs; None: nobody holds it."""
    held = view.holders.get(model)
    if not held:
        return None
    rate = sum(1 / max(holder.run_s, 0.001) for holder in held)
    return sum(holder.free_s for holder in held) / len(held) + (jobs - 1) / rate


def is_held(view: View, model: str, loads: float) -> bool:
    """Return whether holders of a model are free for its next job within so many loads here."""
    reach = reach_s(view, model, 1)
    return reach is not None and reach <= loads * view.load_s[model]


def is_left(view: View, line: Line) -> bool:
    """Return whether a cold worker leaves the jobs of a model to those that hold it."""
    jobs = min(len(line.ahead), WINDOW)
    reach = reach_s(view, line.model, jobs)
    return jobs < WINDOW and reach is not None and reach <= PATIENCE * view.load_s[line.model]


def worth(view: View, line: Line) -> float:
    """Return the seconds of waiting that would end per second of load and work."""
    ahead = line.ahead[:WINDOW]
    work_s = view.load_s[line.model] + len(ahead) * view.run_s[line.model]
    return sum(job.waited_s for job in ahead) / (work_s + 0.001)


def _first(lines: Sequence[Line]) -> Line:
    return min(lines, key=lambda line: (line.first.priority, line.first.seq))


def _fifo(view: View) -> Choice:
    line = min(view.lines, key=lambda line: line.oldest.seq)
    return Choice(line.model, line.oldest, "oldest")


def _affinity_first(view: View) -> Choice:
    warm = [line for line in view.lines if line.model == view.warm]
    line = _first(warm or view.lines)
    return Choice(line.model, line.first, "warm" if warm else "first")


def _strict(view: View) -> Choice:
    best = min(line.first.priority for line in view.lines)
    band = [line for line in view.lines if line.first.priority == best]
    wanted = view.warm or NO_MODEL
    line = _first([line for line in band if line.model == wanted] or band)
    return Choice(line.model, line.first, "first")


def _balanced(view: View) -> Choice:
    chosen = _preferred(view)
    waited_s = chosen.job.waited_s if chosen.job else 0.0
    late = [line for line in view.lines if line.oldest.waited_s > waited_s + view.bound_s]
    if late:
        line = min(late, key=lambda line: line.oldest.seq)
        if (
            line.model in (NO_MODEL, view.warm)
            or line.oldest.waited_s > waited_s + 2 * view.bound_s
            or not is_held(view, line.model, PATIENCE)
        ):
            return Choice(line.model, line.oldest, "overdue")
    return chosen


def _preferred(view: View) -> Choice:
    ready = [line for line in view.lines if line.model in (NO_MODEL, view.warm)]
    warm = _first(ready) if ready else None
    worst = warm.first.priority if warm else max(line.first.priority for line in view.lines)
    if view.grace_s >= 0:
        urgent = [
            line
            for line in view.lines
            if line.first.priority < worst
            and line.first.waited_s > view.grace_s
            and not is_held(view, line.model, 1)
        ]
        if urgent:
            line = _first(urgent)
            return Choice(line.model, line.first, "urgent")
    if warm:
        return Choice(warm.model, warm.first, "warm")
    open_lines = [line for line in view.lines if not is_left(view, line)]
    if not open_lines:
        return LEFT
    line = max(open_lines, key=lambda line: (worth(view, line), -line.first.seq))
    return Choice(line.model, line.first, "worth")


_RULES = {
    "fifo": _fifo,
    "affinity-first": _affinity_first,
    "strict": _strict,
    "balanced": _balanced,
}
