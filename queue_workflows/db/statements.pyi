"""Made from `sql/queries/` by `python -m tests.support.stubgen`; do not edit."""

from collections.abc import Mapping
from typing import Final

JOB_TABLES: Final[tuple[str, str]]

class _Attempts:
    policy: Mapping[str, bytes]
    """Return the retry policy of a job, its failed attempts and how many it may make."""
    fail: Mapping[str, bytes]
    """Record a failed attempt: the job is queued again while attempts are left and `retry` is
    true, else it has failed. It is cancelled instead if it must end. `after_s`: how long it
    waits first; NULL: the attempts times `backoff_s`, at most `longest_s`. `most`: what
    `max_attempts` becomes if it is less. Counters that a plain UPDATE wrote are bounded first.
    No row: the claim is lost."""
    store_received: bytes
    """Store the inputs that a node has received, so that its history shows them although it
    failed."""
    end_by_watchdog: Mapping[str, bytes]
    """Record that a watchdog ended an attempt: the job is queued again, with at least the
    priority `band`, until that has happened more than `cap` times; then it has failed. It is
    cancelled instead if it must end. No row: the claim is lost."""
    park: bytes
    """Let an input node wait for its answer, or cancel it if it must end. No row: the claim is
    lost."""

attempts: _Attempts

class _ClaimedJobs:
    node: bytes
    """Return what a worker needs of a node job that it holds, without the context of its run. No
    row: the worker does not hold the job."""
    ingest: bytes
    """Return what a worker needs of an ingest job that it holds. No row: it does not hold the
    job."""

claimed_jobs: _ClaimedJobs

class _Claims:
    node_step: bytes
    """Record a completed node, if `job` is given, and claim the next node job, if `claim` is
    true. The job is one JSON document; NULL: nothing was claimed. Raises QW001 if the claim to
    record is lost."""
    ingest_step: bytes
    """Record the completed ingest jobs of the JSON array `done` (NULL: none) and claim up to
    `claim` more. A row without an id: nothing was claimed, and `wait_s` says in how many
    seconds a limit lets the next job in. Raises QW001 if one of the claims to record is lost."""
    renew_ingest: bytes
    """Extend the leases of claims, one element of each array a claim, and store their progress
    (NULL: as it was). A claim without a row is lost. `cancel`: the cancellation of the job was
    requested."""
    renew_nodes: bytes
    """Extend the leases of node jobs as `renew_ingest` does. `cancel`: also if the run is over."""
    is_held: Mapping[str, bytes]
    """Return one row without columns if this claim still holds its job."""
    has_recorded_ingest: bytes
    """Return one row if this claim has left one of the events in the history: its write was
    committed."""
    has_recorded_node: bytes
    """Return the same for a node job. Its events are found by run and node, which are indexed."""
    held_by: Mapping[str, bytes]
    """Return the claims of workers whose id starts with `prefix`, without the jobs of these
    `seq`, in the order in which the jobs were queued. The shared status has `seq` as float8,
    exact up to 2^53."""
    cancelled_since_ingest: bytes
    """Return of each job that workers with this prefix hold for how many seconds its cancellation
    has been requested; NULL: it has not. `seqs`: of these jobs alone (NULL: of all)."""
    cancelled_since_nodes: bytes
    """Return the same for node jobs, for which the end of the run counts as well."""

claims: _Claims

class _Handback:
    hand_back: Mapping[str, bytes]
    """Give up claims of one worker, counting nothing: each job is queued again, or cancelled if
    it must end. One element of each array is a claim. `after_s`: how long the jobs wait first.
    `front`: they get at least the priority `band`. A claim without a row is lost."""
    strays: Mapping[str, bytes]
    """Return the claims of a worker without those of the jobs `keep`."""

handback: _Handback

class _JobEvents:
    add_ingest: bytes
    """Append an event to the history of an ingest job."""
    add_node: bytes
    """Append an event to the history of a node. Its attempt is a smallint, that of a job an
    integer."""
    prune_nodes: bytes
    """Delete up to `batch` events of nodes that are older than `days` days."""

job_events: _JobEvents

class _Logs:
    write: Mapping[str, bytes]
    """Store the logs of several attempts, one element of each array an attempt. Jobs that are gone, or
    that were claimed again, are left out. A head that is NULL is not written again."""
    prune: bytes
    """Delete up to `batch` logs of attempts that are older than `days` days."""

logs: _Logs

class _Quarantine:
    claim_apart: bytes
    """Claim one job of `table`, trying the rows one by one, each in a savepoint. `aside`: of each
    row that raised its id, its run, the error, and what became of it."""
    set_aside: bytes
    """End a claimed job of `table` whose outcome cannot be stored. NULL: nothing about it can be
    written."""

quarantine: _Quarantine

class _Recovery:
    lapsed: Mapping[str, bytes]
    """Lock and return up to 100 jobs whose lease has lapsed, without those that are `aside`.
    `had_s`: only what was renewed in these last seconds, in which the caller has had the
    database; NULL: whatever."""
    lapsed_among: Mapping[str, bytes]
    """Lock and return those of `ids` that `lapsed` finds."""
    unwatched: Mapping[str, bytes]
    """Lock and return up to 100 jobs whose lease has lapsed and whose last renewal is older than
    `had_s`: what `lapsed` leaves out."""
    unwatched_among: Mapping[str, bytes]
    """Lock and return those of `ids` that `unwatched` finds."""
    gone: Mapping[str, bytes]
    """Lock and return up to 100 jobs whose worker is gone, without those that are `aside`:
    neither the job nor the worker was renewed for `silent_s`, and no session holds the
    advisory lock of the worker. A worker that never had a lock is left to its lease. Workers
    write `detail`, so that it is compared as jsonb: a cast to boolean would raise for any
    other word."""
    gone_among: Mapping[str, bytes]
    """Lock and return those of `ids` that `gone` finds."""
    of_process: Mapping[str, bytes]
    """Lock and return the jobs that workers hold whose id starts with `prefix`."""
    of_claim: Mapping[str, bytes]
    """Lock and return the job of a claim. No row: the claim is lost."""
    count_crash: Mapping[str, bytes]
    """Take running jobs, which the caller has locked, from their workers and count a crash of
    each. A job is queued again, the first time with at least the priority `band`, later after
    `backoff_s` times its crashes; at `cap` crashes it has failed as poison. It is cancelled
    instead if it must end."""
    excuse: Mapping[str, bytes]
    """Take running jobs, which the caller has locked, from their workers without counting
    anything. A job is queued again with at least the priority `band`, or cancelled if it must
    end."""
    refund_ingest: bytes
    """Take back the crash that was counted for a claim, unless that was done before: a `death`
    event says so, which the caller adds. Return the job; no row: there is nothing to take
    back."""
    refund_node: bytes
    """Do the same for a node job. Its events are found by run and node, which are indexed."""

recovery: _Recovery

class _Retry:
    reopen_ingest: bytes
    """Queue failed and cancelled ingest jobs again in a new generation, with all counters at
    zero. A trigger adds the event. Without a row: jobs in other states, and those in the last
    generation."""
    key_owner: bytes
    """Return the job that owns the idempotency key of a job now, and the key."""

retry: _Retry

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
