"""Read a clock that also counts while the machine sleeps; read and show durations."""

from __future__ import annotations

import re
import time
from datetime import datetime, timedelta
from typing import Any

from queue_workflows import errors


def _boot_clock() -> int | None:
    clock: int | None = getattr(time, "CLOCK_BOOTTIME", None)
    if clock is not None:
        try:
            time.clock_gettime(clock)
        except OSError:
            return None
    return clock


_BOOT_CLOCK = _boot_clock()


def boot_s() -> float:
    """Return the seconds since boot, including suspend, only for intervals and deadlines.

    Without such a clock (macOS), it is the monotonic clock, which may stop during suspend. A
    process always uses the same clock.
    """
    return time.monotonic() if _BOOT_CLOCK is None else time.clock_gettime(_BOOT_CLOCK)


_SPAN = re.compile(r"(\d{1,6})([smhd])", re.ASCII)
UNITS_S = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
MAX_SPAN = timedelta(days=36_525)
"""The longest time span that is accepted; longer ones may exceed PostgreSQL's range of times."""


def rate_text(count: int | None, period_s: float | None) -> str | None:
    """Return a rate as `queues.limit` takes it, such as `100/m`; None if there is no rate."""
    if count is None or period_s is None:
        return None
    for unit, seconds in UNITS_S.items():
        if period_s == seconds:
            return f"{count}/{unit}"
    return f"{count}/{period_s:.10g}s"  # an exponent is not taken


def check_until(until: Any) -> tuple[datetime | None, timedelta | None]:
    """Return `(until, None)` for a datetime, `(None, until)` for a timedelta, else two Nones.

    Raises `InvalidConfig` for a time without a zone, and for a span outside (0, MAX_SPAN].
    """
    if until is not None and not isinstance(until, (datetime, timedelta)):
        raise errors.InvalidConfig(f"until {until!r:.40} is neither a datetime nor a timedelta")
    lasts = until if isinstance(until, timedelta) else None
    at = until if isinstance(until, datetime) else None
    if (at is not None and at.tzinfo is None) or (
        lasts is not None and not timedelta(0) < lasts <= MAX_SPAN
    ):
        raise errors.InvalidConfig(
            f"until {until} should be a time with a time zone, or a time span above zero and of "
            "a hundred years at most"
        )
    return at, lasts


def check_since(since: Any, name: str = "since") -> None:
    """Raise `InvalidConfig` unless `since` is None, a time with its zone, or a span up to now."""
    if since is not None and not isinstance(since, (datetime, timedelta)):
        raise errors.InvalidConfig(
            f"{name} {since!r:.80} should be a datetime with a time zone, or a timedelta"
        )
    if isinstance(since, datetime) and since.tzinfo is None:
        raise errors.InvalidConfig(f"{name} {since} has no time zone: give it one")
    if isinstance(since, timedelta) and abs(since) > MAX_SPAN:
        raise errors.InvalidConfig(f"{name} {since} is too long: give a hundred years at most")


def iso_time(text: str) -> datetime:
    """Return the time that an ISO 8601 text names, naive if it has no zone. Raises ValueError."""
    # Python 3.10 knows no Z.
    return datetime.fromisoformat(text.removesuffix("Z") + "+00:00" * text.endswith("Z"))


def span(text: str) -> timedelta | None:
    """Return a whole number of s, m, h or d, such as 90m, as a time span; None for another text."""
    found = _SPAN.fullmatch(text)
    return None if found is None else timedelta(seconds=int(found[1]) * UNITS_S[found[2]])


def parse_since(text: str) -> datetime | timedelta:
    """Parse a time span up to now such as 90m, 24h or 7d, or an ISO time.

    Raises `InvalidConfig` for another text, and for a time without its zone.
    """
    if (ago := span(text)) is not None:
        return ago
    try:
        moment = iso_time(text)
    except ValueError:
        moment = None
    if moment is None or moment.tzinfo is None:
        raise errors.InvalidConfig(
            f"{text} should look like 90m, 24h, 7d, or 2026-01-31T09:00+01:00"
        )
    return moment


def parse_until(text: str) -> datetime | timedelta:
    """Parse a time span such as 30s, 45m, 2h or 1d, or an ISO time.

    Raises `InvalidConfig`.
    """
    seconds = UNITS_S.get(text[-1:])
    try:
        if seconds is not None:
            return timedelta(seconds=seconds * float(text[:-1]))
        return iso_time(text)
    except (ValueError, OverflowError):
        raise errors.InvalidConfig(
            f"{text!r} is neither a time span such as 45m nor an ISO time"
        ) from None
