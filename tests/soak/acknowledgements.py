"""Record what the engine has acknowledged, for the comparison at the end."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import NamedTuple


class Pause(NamedTuple):
    """While a queue, or a partition of it, was paused: the database's epoch seconds.

    From when the pause was acknowledged to when it was to end; `sure` false: from when it was asked
    for, and nobody heard whether it began.
    """

    queue: str
    partition: str | None
    since: float
    until: float
    sure: bool = True


@dataclass
class Acknowledgements:
    """What was requested, and what the engine replied."""

    runs: dict[str, str] = field(default_factory=dict[str, str])
    """Run → workflow."""
    jobs: dict[str, str] = field(default_factory=dict[str, str])
    """Ingest job → task."""
    cancelled: dict[str, float] = field(default_factory=dict[str, float])
    """Run → the database's epoch seconds just after the cancel was acknowledged."""
    perhaps_cancelled: set[str] = field(default_factory=set[str])
    answers: dict[tuple[str, str], list[str]] = field(
        default_factory=dict[tuple[str, str], list[str]]
    )
    """(run, node) → the answers that were accepted; a second one must be refused."""
    perhaps_answered: set[tuple[str, str]] = field(default_factory=set[tuple[str, str]])
    never_answered: set[tuple[str, str]] = field(default_factory=set[tuple[str, str]])
    refused: int = 0
    moved: list[str] = field(default_factory=list[str])
    late_writes: int = 0
    keys: dict[str, list[tuple[str, bool]]] = field(
        default_factory=lambda: defaultdict[str, list[tuple[str, bool]]](list)
    )
    """Idempotency key → of each answer the job, and whether it was reported as new."""
    unheard: set[str] = field(default_factory=set[str])
    """Keys of which an answer was lost."""
    clashes: int = 0
    """How often a key was refused for another payload."""
    taken: list[str] = field(default_factory=list[str])
    """Keys that were accepted for another payload."""
    undone: set[str] = field(default_factory=set[str])
    """Jobs whose transaction was rolled back."""
    retried: dict[str, int] = field(default_factory=lambda: defaultdict[str, int](int))
    """Run → how often it was run again, or may have been."""
    pauses: list[Pause] = field(default_factory=list[Pause])
    events: dict[str, list[str]] = field(default_factory=lambda: defaultdict[str, list[str]](list))
    """Ingest job, or run of a node → the events for it that were accepted; a second one must be
    refused."""
    perhaps_sent: set[str] = field(default_factory=set[str])
    """Jobs and runs for which an answer about an event was lost."""
