"""Generate traces of gpu jobs: bursts over six models, for the simulation and real claims."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import NamedTuple

SPEEDS = (1.0, 1.0, 0.55)
"""Of the three machines; a load or a run takes its seconds divided by this."""
LOADS_S = (12.0, 180.0)
RUNS_S = (4.0, 240.0)
MODELS = 6
URGENT = 50
ORDINARY = 100


class Arrival(NamedTuple):
    """A job: when it comes, what it needs, how urgent it is, and its seconds at speed 1."""

    at_s: float
    model: str
    priority: int
    run_s: float


class Trace(NamedTuple):
    """Arrivals by time, with each model's load and mean run at speed 1."""

    arrivals: list[Arrival]
    load_s: dict[str, float]
    run_s: dict[str, float]


class Kind(NamedTuple):
    """How bursts look: jobs of a burst, in all or one of the models, over how many seconds."""

    about: str
    burst: Callable[[random.Random], float]
    models: int
    spread_s: float


KINDS = {
    "mixed": Kind(
        "bursts of 3 to 40 over all models", lambda rng: 3 * (40 / 3) ** rng.random(), 6, 30
    ),
    "single": Kind(
        "bursts of 3 to 40 of one model", lambda rng: 3 * (40 / 3) ** rng.random(), 1, 30
    ),
    "small": Kind("bursts of 1 to 8 over all models", lambda rng: 8 ** rng.random(), 6, 30),
    "streams": Kind("20 of one model over half an hour", lambda _: 20.0, 1, 3600),
}


def _spread(bounds: tuple[float, float], index: int) -> float:
    low, high = bounds
    return low * (high / low) ** (index / (MODELS - 1))


def trace(kind: str, offered: float, *, seed: int, hours: float = 6.0) -> Trace:
    """Return bursts whose runs take `offered` of what the machines can do in that time.

    Of the six models the larger load longer and run longer. A quarter of the jobs is urgent.
    """
    rng = random.Random(f"{kind}-{offered}-{seed}")
    shape = KINDS[kind]
    names = [f"model{index}" for index in range(MODELS)]
    load_s = {name: _spread(LOADS_S, index) for index, name in enumerate(names)}
    run_s = {name: _spread(RUNS_S, index) for index, name in enumerate(names)}
    left_s = offered * sum(SPEEDS) * hours * 3600
    mean = shape.burst(rng)
    found: list[Arrival] = []
    while left_s > 0:
        start = rng.uniform(0, hours * 3600)
        chosen = rng.sample(names, shape.models)
        for _ in range(1 + int(rng.expovariate(1 / mean))):
            model = rng.choice(chosen)
            seconds = run_s[model] * rng.lognormvariate(0, 0.3)
            seconds = min(RUNS_S[1], max(RUNS_S[0], seconds))
            priority = URGENT if rng.random() < 0.25 else ORDINARY
            at_s = start + rng.uniform(0, shape.spread_s)
            found.append(Arrival(at_s, model, priority, seconds))
            left_s -= seconds
    return Trace(sorted(found), load_s, run_s)


class Figures(NamedTuple):
    """What a policy made of a trace; times in seconds, a wait ends when the handler begins."""

    loads: int
    mean: float
    p95: float
    longest: float
    makespan: float
    urgent_p95: float


def figures(waits: Sequence[tuple[int, float]], loads: int, makespan: float) -> Figures:
    """Return the figures of each job's priority and wait."""
    every = sorted(wait for _, wait in waits)
    urgent = sorted(wait for priority, wait in waits if priority == URGENT) or [0.0]
    mean = sum(every) / len(every)
    return Figures(loads, mean, _p95(every), every[-1], makespan, _p95(urgent))


def _p95(ordered: Sequence[float]) -> float:
    return ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))]
