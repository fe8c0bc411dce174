"""Close what a forked child cannot share, before this process forks."""

from __future__ import annotations

from collections.abc import Callable

_closers: list[Callable[[], object]] = []


def close_before_fork(close: Callable[[], object]) -> None:
    """Call this function on each `prepare`: what it closes is opened again when it is used."""
    _closers.append(close)


def prepare() -> None:
    """Close what threads serve or what sockets hold, such as pools of connections."""
    for close in _closers:
        close()
