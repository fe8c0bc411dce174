"""Units and bounds of time spans, and rates as text: `100/m`, `5/30s`."""

from __future__ import annotations

from datetime import timedelta

UNITS_S = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
MAX_SPAN = timedelta(days=36_525)
"""The longest time span that is accepted: PostgreSQL's times end sooner than Python's spans."""


def rate_text(count: int | None, period_s: float | None) -> str | None:
    """Return a rate as `queues.limit` takes it, such as `100/m`; None if there is no rate."""
    if count is None or period_s is None:
        return None
    for unit, seconds in UNITS_S.items():
        if period_s == seconds:
            return f"{count}/{unit}"
    return f"{count}/{period_s:g}s"
