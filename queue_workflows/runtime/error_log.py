"""Log the errors of repeated work: each once a while, and an outage in one line."""

from __future__ import annotations

import logging
import math
import re
import traceback
from collections.abc import Callable
from typing import TypeAlias, TypeVar

from queue_workflows.types import NowFn

T = TypeVar("T")
QUIET_S = 60.0
MAX_TEXTS = 100
_DIGITS = re.compile(r"\d+")

logger = logging.getLogger(__name__)
NameOutage: TypeAlias = "Callable[[BaseException], str | None]"
"""Returns a text if an error means that something is away, else None."""

_name_outages: list[NameOutage] = []


def name_outages_by(name: NameOutage) -> None:
    """Log an error that this function names in one line per outage; the rest at debug level."""
    _name_outages.append(name)


class ErrorLog:
    """Log an error with its traceback; the same text again within `QUIET_S` is only counted.

    Digits are ignored in that comparison: ids and ports would make every line a new text.
    """

    def __init__(self, owner: str, now_fn: NowFn) -> None:
        self._owner = owner
        self._now = now_fn
        self._seen: dict[tuple[str, str], tuple[float, int]] = {}
        self._away: dict[str, float] = {}
        """The tasks that failed by an outage, and when."""

    def guard(self, what: str, call: Callable[[], T]) -> T | None:
        """Return the call's value; log any error and return None."""
        try:
            value = call()
        except BaseException as error:  # noqa: BLE001  SystemExit in a task must not end its loop
            self.report(what, error)
            return None
        self.went_well(what)
        return value

    def went_well(self, what: str) -> None:
        """Note that a task ran without an error."""
        self._away.pop(what, None)

    def report(self, what: str, error: BaseException) -> None:
        """Log the error of a task."""
        text = "".join(traceback.format_exception_only(type(error), error)).strip()
        if away := next(filter(None, (name(error) for name in _name_outages)), None):
            self._report_outage(what, away, error)
            return
        key = (what, _DIGITS.sub("#", text))
        now = self._now()
        logged_at, repeats = self._seen.get(key, (-math.inf, 0))
        if now - logged_at < QUIET_S:
            self._seen[key] = (logged_at, repeats + 1)
            return
        if len(self._seen) >= MAX_TEXTS:
            self._seen.clear()
        self._seen[key] = (now, 0)
        again = f" ({repeats} more since the last line)" if repeats else ""
        logger.error("%s: %s failed%s: %s", self._owner, what, again, text, exc_info=error)

    def _report_outage(self, what: str, away: str, error: BaseException) -> None:
        now = self._now()
        if now - max(self._away.values(), default=-math.inf) >= QUIET_S:
            text = " ".join(str(error).split()) or type(error).__name__
            logger.warning("%s: %s waits for %s: %s", self._owner, what, away, text)
        self._away[what] = now
        logger.debug("%s: %s failed", self._owner, what, exc_info=error)
