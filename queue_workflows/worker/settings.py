"""Check the lease, the shutdown timeout and the queue of a claim worker; apply the defaults."""

from __future__ import annotations

from collections.abc import Callable

from queue_workflows import config, errors, hw_metrics

MAX_LEASE_S = 30 * 86400.0
"""A longer lease would keep a dead worker's job for a month."""


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


def shutdown_s(timeout_s: float | None) -> float:
    """Return how many seconds running jobs get when a worker stops."""
    return config.SHUTDOWN_TIMEOUT_S.read() if timeout_s is None else timeout_s


def sampler(host: str, ready: Callable[[], object]) -> hw_metrics.Sampler | None:
    """Return the sampler of the machine, or None if samples are switched off."""
    return None if config.DISABLE_HW_METRICS.read() else hw_metrics.Sampler(host, ready=ready)


def renew_every_s(lease_s: float) -> float:
    """Return how often claims of this lease are renewed: DL_HEARTBEAT_SEC, a third at most."""
    return min(config.DL_HEARTBEAT_SEC.read(), lease_s / 3)
