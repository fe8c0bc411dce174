"""Define rows of the table: what was measured, against what, and whether it meets its target."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple


class Target(NamedTuple):
    """A limit from the design's table, on the ratio or on our own figure."""

    limit: float
    at_least: bool
    on_ratio: bool = True

    def met(self, value: float) -> bool:
        """Return whether the figure is on the right side of the limit."""
        return value >= self.limit if self.at_least else value <= self.limit

    def __str__(self) -> str:
        sign = "≥" if self.at_least else "≤"
        return f"{sign} {self.limit:g}" + (" ×" if self.on_ratio else "")  # noqa: RUF001


def at_least(limit: float) -> Target:
    """Return a target that the ratio must reach."""
    return Target(limit, at_least=True)


def at_most(limit: float) -> Target:
    """Return a target that the ratio must not exceed."""
    return Target(limit, at_least=False)


def own_at_most(limit: float) -> Target:
    """Return a target that our own figure must not exceed."""
    return Target(limit, at_least=False, on_ratio=False)


class Row(NamedTuple):
    """One line: `ours` and `bare` in `unit`, a ratio per round, the limit and a remark."""

    name: str
    ours: float
    unit: str
    bare: float | None = None
    ratios: Sequence[float] = ()
    target: Target | None = None
    note: str = ""
    """What the ratio is to, when that is not the bare loop, and whatever else must be said."""

    @property
    def ratio(self) -> float | None:
        """Return the median over the rounds; None without any."""
        return statistics.median(self.ratios) if self.ratios else None

    @property
    def met(self) -> bool | None:
        """Return whether the target is met; None without a target."""
        if self.target is None:
            return None
        value = self.ratio if self.target.on_ratio else self.ours
        return None if value is None else self.target.met(value)

    def as_json(self) -> dict[str, Any]:
        """Return the row as JSON values."""
        return {
            "name": self.name,
            "ours": self.ours,
            "unit": self.unit,
            "bare": self.bare,
            "ratio": self.ratio,
            "ratio_min": min(self.ratios, default=None),
            "ratio_max": max(self.ratios, default=None),
            "rounds": len(self.ratios),
            "target": None if self.target is None else str(self.target),
            "met": self.met,
            "note": self.note,
        }


class PeerRow(NamedTuple):
    """The same work done by another queue in the same run."""

    work: str
    peer: str
    value: float
    unit: str
    ours: float

    def as_json(self) -> dict[str, Any]:
        """Return the row as JSON values."""
        return self._asdict()


def against(ours: Sequence[float], bare: Sequence[float]) -> list[float]:
    """Return a ratio per round to the mean of the bare figures before and after it (one more)."""
    return [one / ((bare[i] + bare[i + 1]) / 2) for i, one in enumerate(ours)]


def paired(ours: Sequence[float], bare: Sequence[float]) -> list[float]:
    """Return a ratio per round."""
    return [one / other for one, other in zip(ours, bare, strict=True)]


def middle(values: Sequence[float]) -> float:
    """Return the median."""
    return statistics.median(values)


def percentile(values: Sequence[float], pct: float) -> float:
    """Return the value under which `pct` % of them lie, by nearest rank."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, round(len(ordered) * pct / 100 + 0.5) - 1))]


def number(value: float) -> str:
    """Return three significant digits, thousands with commas."""
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    if abs(value) >= 100:
        return f"{value:.0f}"
    return f"{value:.3g}"
