"""Check the options of a new ingest job: keys, times, headers and the failure policy."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Mapping
from typing import Any, cast

from queue_workflows import errors
from queue_workflows.dag import payload, policy

MAX_KEY_BYTES = 1000
"""The longest key, as UTF-8. Keys are indexed, and an index entry takes 2,704 bytes at most."""
Option = Callable[[Any, str, str], Any]
"""Checks a given value; takes its name and the words for the job in messages."""


def check(given: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the columns of these options; None counts as not given.

    `where` begins each message. Raises `InvalidJob` (a ValueError).
    """
    columns = {
        name: checked(given[name], name, where)
        for name, checked in _OPTIONS.items()
        if given[name] is not None
    }
    if given["idempotency_window_s"] is not None and given["idempotency_key"] is None:
        raise errors.InvalidJob(f"{where}: 'idempotency_window_s' without an 'idempotency_key'")
    return columns | _failure_policy(given, where)


def _failure_policy(given: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the columns that decide on failures; the code for nodes checks them."""
    most_attempts = given["max_attempts"]
    asked = {"backoff": given["backoff"], "timeout_s": given["timeout_s"]}
    if most_attempts is None and not any(value is not None for value in asked.values()):
        return {}
    if most_attempts is not None:
        limit = policy.MAX_RETRIES + 1
        if type(most_attempts) is bool or most_attempts not in range(1, limit + 1):
            raise errors.InvalidJob(
                f"{where}: 'max_attempts' must be a whole number from 1 to {limit}, not "
                f"{most_attempts!r:.40}"
            )
        asked["retries"] = most_attempts - 1
    try:
        found = policy.read(asked, {}, where) or {}
    except errors.InvalidWorkflow as error:
        raise errors.InvalidJob(str(error)) from None
    columns = policy.columns(found, is_input=False)
    if "retries" in found:
        # `policy.columns` leaves out one attempt, the default. It would let the task's policy win.
        columns["policy"] = {**columns.get("policy", {}), "retries": found["retries"]}
    return columns


def _key(given: Any, name: str, where: str) -> str:
    if not isinstance(given, str) or not given or not payload.is_storable(given):
        raise errors.InvalidJob(f"{where}: {name!r} must be a text, not {given!r:.80}")
    if len(given.encode()) > MAX_KEY_BYTES:
        raise errors.InvalidJob(f"{where}: {name!r} is longer than {MAX_KEY_BYTES:,} bytes")
    return given


def _window_s(given: Any, name: str, where: str) -> float:
    try:
        seconds = float("nan") if isinstance(given, (bool, str)) else float(given)
    except (TypeError, ValueError, OverflowError):
        seconds = float("nan")
    if not 0 <= seconds <= policy.MAX_WAIT_S:
        raise errors.InvalidJob(
            f"{where}: {name!r} must be 0 to {policy.MAX_WAIT_S:.0f} s, not {given!r:.40}"
        )
    return seconds


def _instant(given: Any, name: str, where: str) -> str:
    if not isinstance(given, datetime.datetime) or given.utcoffset() is None:
        raise errors.InvalidJob(
            f"{where}: {name!r} must be a datetime with a time zone, not {given!r:.80}"
        )
    try:
        return given.astimezone(datetime.timezone.utc).isoformat()
    except OverflowError:
        raise errors.InvalidJob(f"{where}: {name!r} is outside of the years 1 to 9999") from None


def _headers(given: Any, name: str, where: str) -> dict[str, str]:
    if not isinstance(given, Mapping):
        raise errors.InvalidJob(f"{where}: {name!r} must be a dict of texts, not {given!r:.80}")
    members = dict(cast("Mapping[Any, Any]", given))
    for key, member in members.items():
        if not isinstance(key, str) or not isinstance(member, str):
            raise errors.InvalidJob(f"{where}: {name!r}: {key!r:.80} or its value is not a string")
    return members


_OPTIONS: dict[str, Option] = {
    "idempotency_key": _key,
    "idempotency_window_s": _window_s,
    "lock_key": _key,
    "partition_key": _key,
    "available_at": _instant,
    "headers": _headers,
}
