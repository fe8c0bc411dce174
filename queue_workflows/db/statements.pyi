"""Made from `sql/queries/` by `python -m tests.support.stubgen`; do not edit."""

from collections.abc import Mapping
from typing import Final

JOB_TABLES: Final[tuple[str, str]]

def comments(noun: str) -> dict[str, str]: ...

class _Audit:
    parameters: bytes
    """Return the start of the window, `-infinity` for all that is retained, and the time up to which
    outbox rows may be pruned."""
    limit_transaction: bytes
    """Limit the current transaction, which checks one invariant, to reading, a time, and one core."""
    terminal_stays: bytes
    """The status of a terminal job never changes within one generation."""
    one_finalisation: bytes
    """A job is finalised at most once per generation, by its highest claim."""
    claims_counted: bytes
    """Each claim of a job raises its claim_no by exactly one."""
    own_claim_only: bytes
    """No accepted write carries the claim of another worker."""
    running_is_claimed: bytes
    """A job is running if and only if its claim, lease and worker are all set."""
    dependencies_first: bytes
    """A node is queued once per run, and only after all its dependencies are completed or skipped."""
    outbox_agrees: bytes
    """A completed or failed node has exactly one outbox event of that kind, from the same commit."""
    run_agrees: bytes
    """A completed run has only completed or skipped nodes, and no node waits under a terminal run
    after a sweep."""
    cancel_holds: bytes
    """After a cancel is acknowledged, no node of the run is claimed."""
    one_job_per_key: bytes
    """One idempotency key gives one job."""
    one_fire: bytes
    """A schedule entry fires at most once for each instant."""
    attempts_bounded: bytes
    """The attempts and crashes of a job stay within their limits."""
    off_holds: bytes
    """A worker that is switched OFF claims nothing."""
    runs_advance: bytes
    """A running run has a node, an outbox event or an answer that moves it forward."""

audit: _Audit

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
