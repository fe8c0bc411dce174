"""Made from `sql/queries/` by `python -m tests.support.stubgen`; do not edit."""

from collections.abc import Mapping
from typing import Final

JOB_TABLES: Final[tuple[str, str]]

class _Logs:
    write: Mapping[str, bytes]
    """Store the logs of several attempts, one element of each array an attempt. Jobs that are gone, or
    that were claimed again, are left out. A head that is NULL is not written again."""
    prune: bytes
    """Delete up to `batch` logs of attempts that are older than `days` days."""

logs: _Logs

class _Schedules:
    now: bytes
    """Return the database's clock: the start of the current transaction."""
    fire: bytes
    """Claim one instant of a schedule entry and queue its job. No row: the instant was claimed before.
    One statement, so that neither exists without the other."""
    last_fires: bytes
    """Return the latest instant up to `until` that was fired under each of the names."""
    prune: bytes
    """Delete up to `batch` instants that were claimed more than `days` days ago."""

schedules: _Schedules
