"""Suggest a known key for a wrong one, such as `retries` for `max_attempts`."""

from __future__ import annotations

from collections.abc import Iterable

from queue_workflows import errors

_RIGHT_NAMES = {
    "attempts": "retries", "max_attempts": "retries", "max_retries": "retries",
    "max_tries": "retries", "maximum_attempts": "retries", "retry": "retries", "tries": "retries",
    "delay_s": "backoff", "retry_backoff": "backoff", "retry_delay": "backoff",
    "retry_delay_s": "backoff", "default_retry_delay": "backoff",
    "execution_timeout": "timeout_s", "time_limit": "timeout_s", "timeout_seconds": "timeout_s",
    "autoretry_for": "retry_on", "retry_for": "retry_on",
    "abort_on": "discard_on", "dont_retry_on": "discard_on", "no_retry_on": "discard_on",
    "concurrency_key": "lock_key", "lock": "lock_key", "mutex": "lock_key", "prio": "priority",
}  # fmt: skip
"""Names of the same keys in Celery, Airflow, Temporal and others, and common guesses."""


def right_name(key: str, known: Iterable[str]) -> str | None:
    """Return the key of `known` that a wrong one stands for; None if none comes close."""
    names = list(known)
    if _RIGHT_NAMES.get(key) in names:
        return _RIGHT_NAMES[key]
    return errors.closest(key, names)


def hint(key: str, known: Iterable[str]) -> str:
    """Return "; did you mean ...?" for a wrong key, or an empty text."""
    meant = right_name(key, known)
    return f"; did you mean {meant!r}?" if meant else ""
