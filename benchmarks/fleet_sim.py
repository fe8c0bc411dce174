"""Run `python -m benchmarks.fleet_sim`: compare the claim policies on simulated fleets."""

from __future__ import annotations

import argparse
import heapq
import statistics
import sys
from bisect import insort
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from benchmarks import fleet_rule as rule
from benchmarks import fleet_trace as traces

BASE = "affinity-first"
LOOK_S = 15.0
"""How often an idle machine looks again at what it left to others."""


class Policy(NamedTuple):
    """A rule with its knobs."""

    name: str
    rule: str
    grace_s: float = -1.0
    bound_s: float = 2400.0


POLICIES = (
    Policy("fifo", "fifo"),
    Policy("affinity-first", "affinity-first"),
    Policy("strict", "strict"),
    Policy("balanced, no grace", "balanced"),
    Policy("balanced", "balanced", grace_s=300.0),
)


class _Machine:
    """A worker: its speed, the model that it holds, and when it thinks to be free."""

    def __init__(self, speed: float) -> None:
        self.speed = speed
        self.model: str | None = None
        self.busy = False
        self.free_at = 0.0


class _Queue:
    """The waiting jobs of one model: by priority and place, and by place."""

    def __init__(self) -> None:
        self.ranked: list[tuple[int, int, float]] = []
        self.by_age: list[tuple[int, int, float]] = []

    def add(self, priority: int, seq: int, at_s: float) -> None:
        insort(self.ranked, (priority, seq, at_s))
        insort(self.by_age, (seq, priority, at_s))

    def remove(self, job: rule.Job) -> None:
        self.ranked = [row for row in self.ranked if row[1] != job.seq]
        self.by_age = [row for row in self.by_age if row[0] != job.seq]

    def line(self, model: str, now: float) -> rule.Line:
        ahead = [rule.Job(p, s, now - at) for p, s, at in self.ranked[: rule.WINDOW]]
        seq, priority, at_s = self.by_age[0]
        return rule.Line(model, ahead, rule.Job(priority, seq, now - at_s))


class Fleet:
    """Three machines and the lines before them, from a trace's first arrival to its last end."""

    def __init__(self, given: traces.Trace, policy: Policy) -> None:
        self._trace = given
        self._policy = policy
        self._machines = [_Machine(speed) for speed in traces.SPEEDS]
        self._queues = {model: _Queue() for model in given.load_s}
        self._events: list[tuple[float, int, int]] = []
        """Time, kind (0 an arrival, 1 an end, 2 a look) and the job's or the machine's number."""
        self._waits: list[tuple[int, float]] = []
        self._loads = 0
        self._queued = 0
        self._end = 0.0

    def run(self) -> traces.Figures:
        """Return the figures of the trace."""
        self._events = [(job.at_s, 0, n) for n, job in enumerate(self._trace.arrivals)]
        heapq.heapify(self._events)
        look_at = 0.0
        while self._events:
            now, kind, number = heapq.heappop(self._events)
            if kind == 0:
                job = self._trace.arrivals[number]
                self._queues[job.model].add(job.priority, number, job.at_s)
                self._queued += 1
            elif kind == 1:
                self._machines[number].busy = False
            self._assign(now)
            idle = any(not machine.busy for machine in self._machines)
            if self._queued and idle and look_at <= now:
                look_at = now + LOOK_S
                heapq.heappush(self._events, (look_at, 2, 0))
        return traces.figures(self._waits, self._loads, self._end)

    def _assign(self, now: float) -> None:
        for number, machine in enumerate(self._machines):
            if machine.busy or not self._queued:
                continue
            choice = rule.choose(self._policy.rule, self._view(machine, now))
            if choice.model is not None and choice.job is not None:
                self._start(number, machine, choice.model, choice.job, now)

    def _start(self, number: int, machine: _Machine, model: str, job: rule.Job, now: float) -> None:
        self._queues[model].remove(job)
        self._queued -= 1
        load_s = 0.0
        if machine.model != model:
            load_s = self._trace.load_s[model] / machine.speed
            self._loads += 1
            machine.model = model
        begins = now + load_s
        ends = begins + self._trace.arrivals[job.seq].run_s / machine.speed
        machine.busy, machine.free_at = True, begins + self._trace.run_s[model] / machine.speed
        self._waits.append((job.priority, begins - self._trace.arrivals[job.seq].at_s))
        self._end = max(self._end, ends)
        heapq.heappush(self._events, (ends, 1, number))

    def _view(self, machine: _Machine, now: float) -> rule.View:
        given = self._trace
        lines = [q.line(model, now) for model, q in self._queues.items() if q.ranked]
        holders: dict[str, list[rule.Holder]] = {}
        for other in self._machines:
            if other is not machine and other.model is not None:
                free_s = max(0.0, other.free_at - now) if other.busy else 0.0
                held = rule.Holder(free_s, given.run_s[other.model] / other.speed)
                holders.setdefault(other.model, []).append(held)
        return rule.View(
            lines,
            machine.model,
            {model: seconds / machine.speed for model, seconds in given.load_s.items()},
            {model: seconds / machine.speed for model, seconds in given.run_s.items()},
            holders,
            self._policy.grace_s,
            self._policy.bound_s,
        )


def compare(
    kind: str, offered: float, policies: Sequence[Policy], *, count: int, hours: float
) -> dict[str, list[traces.Figures]]:
    """Return the figures of each policy for each trace; all get the same traces."""
    found: dict[str, list[traces.Figures]] = {policy.name: [] for policy in policies}
    for seed in range(count):
        given = traces.trace(kind, offered, seed=seed, hours=hours)
        for policy in policies:
            found[policy.name].append(Fleet(given, policy).run())
    return found


def table(found: dict[str, list[traces.Figures]]) -> Iterable[str]:
    """Return a Markdown table: the base's medians, and each policy's medians of ratios to it."""
    yield "| policy | " + " | ".join(traces.Figures._fields) + " |"
    yield "| --- |" + " ---: |" * len(traces.Figures._fields)
    base = found[BASE]
    for name, rows in found.items():
        cells: list[str] = []
        for n in range(len(traces.Figures._fields)):
            if name == BASE:
                cells.append(f"{statistics.median(row[n] for row in rows):,.0f}")
            else:
                ratios = [r[n] / max(b[n], 0.001) for r, b in zip(rows, base, strict=True)]
                cells.append(f"{statistics.median(ratios):.2f}")
        yield f"| {name} | " + " | ".join(cells) + " |"


def main(argv: list[str] | None = None) -> int:
    """Print a table per offered load."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fleet_sim", description=__doc__)
    parser.add_argument("--traces", type=int, default=40, metavar="N", help="per table; default 40")
    parser.add_argument("--hours", type=float, default=6.0, help="length of a trace; default 6")
    parser.add_argument("--kind", choices=traces.KINDS, default="mixed", help="default: mixed")
    parser.add_argument("--load", type=float, nargs="+", default=[0.35, 0.5, 0.7], metavar="SHARE")
    options = parser.parse_args(argv)
    for offered in options.load:
        found = compare(options.kind, offered, POLICIES, count=options.traces, hours=options.hours)
        about = traces.KINDS[options.kind].about
        sys.stdout.write(f"\n{options.traces} traces, {about}, {offered:.0%} offered load\n\n")
        sys.stdout.write("\n".join(table(found)) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
