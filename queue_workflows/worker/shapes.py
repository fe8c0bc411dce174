"""Describe how many jobs a worker runs at once and when it ends, and refuse what cannot work."""

from __future__ import annotations

from typing import NamedTuple

from queue_workflows import config, errors

MAX_LEASE_S = 30 * 86400.0
"""A longer lease would keep a dead worker's job for a month."""


class Limits(NamedTuple):
    """When executors are replaced, and when the worker ends by itself; None: never."""

    max_jobs: int | None = None
    max_rss_mb: float | None = None
    idle_exit_s: float | None = None
    burst: bool = False


NO_LIMITS = Limits()


class Shape(NamedTuple):
    """How many jobs of a queue a worker runs at once, and how its executors share them."""

    slots: int
    batch: int = 1
    """How many jobs may wait for each slot, if they are short; 1: `window.EACH`."""
    concurrent: bool = False
    """Whether one executor runs all of them, on one event loop."""
    gpu: bool = False
    """Whether its one executor has the models of a GPU.

    Another one is forked only once that has ended."""
    card: int | None = None
    """The one GPU that it uses; None: all that its process sees."""
    mixed: bool = False
    """Whether its async jobs share one executor, and each of the others has one of its own."""


def check_limits(limits: Limits) -> None:
    """Raise `InvalidConfig` for limits that cannot work."""
    values = (limits.max_jobs, limits.max_rss_mb, limits.idle_exit_s)
    if any(value is not None and not value > 0 for value in values):
        raise errors.InvalidConfig(
            "the values of --max-jobs, --max-rss-mb and --idle-exit must be positive"
        )


def check(queue: str, shape: Shape) -> None:
    """Raise `InvalidConfig` for slots that cannot work."""
    lone = shape.gpu and (shape.slots, shape.batch, shape.concurrent) == (1, 1, False)
    if queue == "gpu" and not lone:
        raise errors.InvalidConfig(
            "--batch, --async and several slots are for cpu and ingest queues: a gpu worker has "
            "one job at a time; --cards 0,1 starts a worker for each of these GPUs"
        )
    if not (shape.slots > 0 and shape.batch > 0):
        raise errors.InvalidConfig("the number of slots, and batch, must be positive")
    if shape.concurrent and shape.batch > 1:
        raise errors.InvalidConfig(
            "--async and --batch exclude each other: --async runs jobs at once, --batch one by one"
        )


def check_times(lease_s: float, shutdown_timeout_s: float | None) -> None:
    """Raise `InvalidConfig` for a lease or a shutdown timeout that cannot work."""
    if not 0 < lease_s <= MAX_LEASE_S:
        raise errors.InvalidConfig(
            f"lease of {lease_s} s: it must be positive and at most {MAX_LEASE_S:g}"
        )
    if shutdown_timeout_s is not None and not 0 <= shutdown_timeout_s <= MAX_LEASE_S:
        raise errors.InvalidConfig(
            f"shutdown timeout of {shutdown_timeout_s} s: it must not be negative"
        )


def check_nodes(queue: str, knows_nodes: bool) -> None:
    """Raise for a queue that does not exist, and for one of nodes if the app has none."""
    config.check_queue(queue)
    if queue in config.DAG_QUEUES and not knows_nodes:
        raise errors.InvalidConfig(
            f"a {queue} worker that knows no node would fail every job: name the app with "
            "--app or QUEUE_WORKFLOWS_APP; it sets a node package or resolver, or registers nodes"
        )
