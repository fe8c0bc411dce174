"""Made from `sql/queries/` by `python -m tests.support.stubgen`; do not edit."""

from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any, Final, TypeAlias

import psycopg

from queue_workflows.db import scripts
from queue_workflows.types import Row

JOB_TABLES: Final[tuple[str, str]]
_Conn: TypeAlias = psycopg.Connection[Row]
_Times: TypeAlias = list[datetime] | list[datetime | None]
_Texts: TypeAlias = list[str] | list[str | None]
_Ints: TypeAlias = list[int] | list[int | None]
_Floats: TypeAlias = list[float] | list[float | None]

def comments(noun: str) -> dict[str, str]: ...
def parse(source: str, file: str) -> dict[str, Named | dict[str, Named]]: ...

class Named:
    text: bytes
    comment: str
    kind: str
    prepare: bool | None
    def __init__(self, text: bytes, comment: str, kind: str, prepare: bool | None) -> None: ...
    def __call__(self, *args: Any, **given: Any) -> Any: ...

class _ActsNamedActor(Named):
    def __call__(self, conn: _Conn, /) -> Any: ...
    def script(self) -> scripts.Script[Any]: ...

class _ActsNameActor(Named):
    def __call__(self, conn: _Conn, /, *, actor: str | None) -> None: ...
    def script(self, *, actor: str | None) -> scripts.Script[None]: ...

class _ActsAdd(Named):
    def __call__(self, conn: _Conn, /, *, via: str | None, action: str | None, reason: str | None, detail: str | None, kinds: _Texts | None, subjects: _Texts | None) -> None: ...
    def script(self, *, via: str | None, action: str | None, reason: str | None, detail: str | None, kinds: _Texts | None, subjects: _Texts | None) -> scripts.Script[None]: ...

class _ActsFind(Named):
    def __call__(self, conn: _Conn, /, *, at: datetime | None, ago: timedelta | None, actor: str | None, action: str | None, kind: str | None, subject: str | None, before: int | None, limit: int | None) -> list[Row]: ...
    def script(self, *, at: datetime | None, ago: timedelta | None, actor: str | None, action: str | None, kind: str | None, subject: str | None, before: int | None, limit: int | None) -> scripts.Script[list[Row]]: ...

class _ActsPrune(Named):
    def __call__(self, conn: _Conn, /, *, days: float | None, batch: int | None) -> int: ...
    def script(self, *, days: float | None, batch: int | None) -> scripts.Script[None]: ...

class _Acts:
    named_actor: _ActsNamedActor
    """Return the actor that this transaction or session names, '' or NULL without one."""
    name_actor: _ActsNameActor
    """Name who makes the changes in the rest of this transaction, for the history of jobs."""
    add: _ActsAdd
    """Record an act, a row for each of its subjects, by the actor that the transaction names, else by its login."""
    find: _ActsFind
    """List acts, the newest first. A filter that is NULL matches every act. `before`: only acts with a smaller `id`, for the
    next page. No plan is kept, so that a subject is found by its index.
    Columns: id, at, actor, login, via, action, kind, subject, reason, detail."""
    prune: _ActsPrune
    """Delete up to `batch` acts that are over `days` days old."""

acts: _Acts

class _AttemptsPolicy(Named):
    def __call__(self, conn: _Conn, /, *, job: str | None) -> Row | None: ...
    def script(self, *, job: str | None) -> scripts.Script[Row | None]: ...

class _AttemptsFail(Named):
    def __call__(self, conn: _Conn, /, *, after_s: float | None, most: int | None, retry: bool | None, error: str | None, seconds: float | None, job: str | None, worker: str | None, claim: int | None, detail: str | None) -> Row | None: ...
    def script(self, *, after_s: float | None, most: int | None, retry: bool | None, error: str | None, seconds: float | None, job: str | None, worker: str | None, claim: int | None, detail: str | None) -> scripts.Script[Row | None]: ...

class _AttemptsEndByWatchdog(Named):
    def __call__(self, conn: _Conn, /, *, cap: int | None, band: int | None, error: str | None, seconds: float | None, job: str | None, worker: str | None, claim: int | None, detail: str | None) -> Row | None: ...
    def script(self, *, cap: int | None, band: int | None, error: str | None, seconds: float | None, job: str | None, worker: str | None, claim: int | None, detail: str | None) -> scripts.Script[Row | None]: ...

class _AttemptsPark(Named):
    def __call__(self, conn: _Conn, /, *, job: str | None, worker: str | None, claim: int | None) -> Row | None: ...
    def script(self, *, job: str | None, worker: str | None, claim: int | None) -> scripts.Script[Row | None]: ...

class _Attempts:
    policy: Mapping[str, _AttemptsPolicy]
    """Return the retry policy of a job, its failed attempts and how many it may make.
    Columns: policy, attempts, max_attempts."""
    fail: Mapping[str, _AttemptsFail]
    """Record a failed attempt: the job is queued again while attempts are left and `retry` is true,
    else it has failed. It is cancelled instead if it must end. `after_s`: how long it waits first.
    `most`: what `max_attempts` becomes if it is less. Counters that a plain UPDATE wrote are bounded
    first. `received`: the inputs that a node has received; NULL stands for the inputs of its claim.
    Returns no row if the claim is lost."""
    end_by_watchdog: Mapping[str, _AttemptsEndByWatchdog]
    """Record that a watchdog ended an attempt. The job is queued again, with at least the priority
    `band`. If watchdogs have ended more than `cap` attempts, it has failed instead; if it must end,
    it is cancelled. Returns no row if the claim is lost."""
    park: _AttemptsPark
    """Let an input node wait for its answer, or cancel it if it must end. Returns no row if the claim
    is lost."""

attempts: _Attempts

class _AuditParameters(Named):
    def __call__(self, conn: _Conn, /, *, since_s: float | None, retention_days: float | None) -> Row: ...
    def script(self, *, since_s: float | None, retention_days: float | None) -> scripts.Script[Row]: ...

class _AuditTerminalStays(Named):
    def __call__(self, conn: _Conn, /, *, since: datetime | None, limit: int | None) -> list[Row]: ...
    def script(self, *, since: datetime | None, limit: int | None) -> scripts.Script[list[Row]]: ...

class _AuditOneFinalisation(Named):
    def __call__(self, conn: _Conn, /, *, since: datetime | None, limit: int | None) -> list[Row]: ...
    def script(self, *, since: datetime | None, limit: int | None) -> scripts.Script[list[Row]]: ...

class _AuditClaimsCounted(Named):
    def __call__(self, conn: _Conn, /, *, since: datetime | None, limit: int | None) -> list[Row]: ...
    def script(self, *, since: datetime | None, limit: int | None) -> scripts.Script[list[Row]]: ...

class _AuditOwnClaimOnly(Named):
    def __call__(self, conn: _Conn, /, *, since: datetime | None, limit: int | None) -> list[Row]: ...
    def script(self, *, since: datetime | None, limit: int | None) -> scripts.Script[list[Row]]: ...

class _AuditRunningIsClaimed(Named):
    def __call__(self, conn: _Conn, /, *, whole: bool | None, since: datetime | None, limit: int | None) -> list[Row]: ...
    def script(self, *, whole: bool | None, since: datetime | None, limit: int | None) -> scripts.Script[list[Row]]: ...

class _AuditDependenciesFirst(Named):
    def __call__(self, conn: _Conn, /, *, whole: bool | None, since: datetime | None, limit: int | None) -> list[Row]: ...
    def script(self, *, whole: bool | None, since: datetime | None, limit: int | None) -> scripts.Script[list[Row]]: ...

class _AuditOutboxAgrees(Named):
    def __call__(self, conn: _Conn, /, *, whole: bool | None, since: datetime | None, kept: datetime | None, limit: int | None) -> list[Row]: ...
    def script(self, *, whole: bool | None, since: datetime | None, kept: datetime | None, limit: int | None) -> scripts.Script[list[Row]]: ...

class _AuditRunAgrees(Named):
    def __call__(self, conn: _Conn, /, *, whole: bool | None, since: datetime | None, sweep_s: float | None, limit: int | None) -> list[Row]: ...
    def script(self, *, whole: bool | None, since: datetime | None, sweep_s: float | None, limit: int | None) -> scripts.Script[list[Row]]: ...

class _AuditCancelHolds(Named):
    def __call__(self, conn: _Conn, /, *, since: datetime | None, commit_s: float | None, limit: int | None) -> list[Row]: ...
    def script(self, *, since: datetime | None, commit_s: float | None, limit: int | None) -> scripts.Script[list[Row]]: ...

class _AuditOneJobPerKey(Named):
    def __call__(self, conn: _Conn, /, *, whole: bool | None, since: datetime | None, limit: int | None) -> list[Row]: ...
    def script(self, *, whole: bool | None, since: datetime | None, limit: int | None) -> scripts.Script[list[Row]]: ...

class _AuditOneFire(Named):
    def __call__(self, conn: _Conn, /, *, limit: int | None) -> list[Row]: ...
    def script(self, *, limit: int | None) -> scripts.Script[list[Row]]: ...

class _AuditAttemptsBounded(Named):
    def __call__(self, conn: _Conn, /, *, whole: bool | None, since: datetime | None, max_crashes: int | None, max_lapses: int | None, limit: int | None) -> list[Row]: ...
    def script(self, *, whole: bool | None, since: datetime | None, max_crashes: int | None, max_lapses: int | None, limit: int | None) -> scripts.Script[list[Row]]: ...

class _AuditOffHolds(Named):
    def __call__(self, conn: _Conn, /, *, since: datetime | None, commit_s: float | None, limit: int | None) -> list[Row]: ...
    def script(self, *, since: datetime | None, commit_s: float | None, limit: int | None) -> scripts.Script[list[Row]]: ...

class _AuditRunsAdvance(Named):
    def __call__(self, conn: _Conn, /, *, sweep_s: float | None, limit: int | None) -> list[Row]: ...
    def script(self, *, sweep_s: float | None, limit: int | None) -> scripts.Script[list[Row]]: ...

class _AuditMapsAgree(Named):
    def __call__(self, conn: _Conn, /, *, whole: bool | None, since: datetime | None, limit: int | None) -> list[Row]: ...
    def script(self, *, whole: bool | None, since: datetime | None, limit: int | None) -> scripts.Script[list[Row]]: ...

class _AuditStreamsNumbered(Named):
    def __call__(self, conn: _Conn, /, *, whole: bool | None, since: datetime | None, commit_s: float | None, limit: int | None) -> list[Row]: ...
    def script(self, *, whole: bool | None, since: datetime | None, commit_s: float | None, limit: int | None) -> scripts.Script[list[Row]]: ...

class _AuditStepsAgree(Named):
    def __call__(self, conn: _Conn, /, *, whole: bool | None, since: datetime | None, sweep_s: float | None, limit: int | None) -> list[Row]: ...
    def script(self, *, whole: bool | None, since: datetime | None, sweep_s: float | None, limit: int | None) -> scripts.Script[list[Row]]: ...

class _Audit:
    parameters: _AuditParameters
    """Return the start of the window, `-infinity` for all that is retained, and the time up to which
    outbox rows may be pruned.
    Columns: since, kept."""
    terminal_stays: _AuditTerminalStays
    """The status of a terminal job never changes within one generation.
    Columns: id, text."""
    one_finalisation: _AuditOneFinalisation
    """A job is finalised at most once per generation, by its highest claim.
    Columns: id, text."""
    claims_counted: _AuditClaimsCounted
    """Each claim of a job raises its claim_no by exactly one.
    Columns: id, text."""
    own_claim_only: _AuditOwnClaimOnly
    """No accepted write carries the claim of another worker.
    Columns: id, text."""
    running_is_claimed: _AuditRunningIsClaimed
    """A job is running if and only if its claim, lease and worker are all set.
    Columns: id, text."""
    dependencies_first: _AuditDependenciesFirst
    """A node is queued once per run, and only after all its dependencies are completed or skipped.
    Columns: id, text."""
    outbox_agrees: _AuditOutboxAgrees
    """A completed or failed node has exactly one outbox event of that kind, from the same commit.
    Columns: id, text."""
    run_agrees: _AuditRunAgrees
    """A completed run has only completed or skipped nodes, but for items that may fail, and no node
    waits under a terminal run after a sweep.
    Columns: id, text."""
    cancel_holds: _AuditCancelHolds
    """After a cancel is acknowledged, no node of the run is claimed.
    Columns: id, text."""
    one_job_per_key: _AuditOneJobPerKey
    """One idempotency key gives one job.
    Columns: id, text."""
    one_fire: _AuditOneFire
    """A schedule entry fires at most once for each instant.
    Columns: id, text."""
    attempts_bounded: _AuditAttemptsBounded
    """The attempts, crashes and lapses of a job stay within their limits.
    Columns: id, text."""
    off_holds: _AuditOffHolds
    """A worker that is switched OFF claims nothing.
    Columns: id, text."""
    runs_advance: _AuditRunsAdvance
    """A running run has a node, an outbox event or an answer that moves it forward.
    Columns: id, text."""
    maps_agree: _AuditMapsAgree
    """The counters of a map are those of its items, and a map that ended has no open item.
    Columns: id, text."""
    streams_numbered: _AuditStreamsNumbered
    """The parts of a stream are numbered without a gap from 1 within a claim of its job, and none is
    stored after that claim has ended.
    Columns: id, text."""
    steps_agree: _AuditStepsAgree
    """A step belongs to a claim that its job has had, one that is done has its end, and no wait outlasts its event.
    Columns: id, text."""

audit: _Audit

class _BadRowsStuck(Named):
    def __call__(self, conn: _Conn, /, *, limit: int | None, late_s: float | None) -> list[Row]: ...
    def script(self, *, limit: int | None, late_s: float | None) -> scripts.Script[list[Row]]: ...

class _BadRowsOutOfRange(Named):
    def __call__(self, conn: _Conn, /, *, examined: int | None, limit: int | None) -> list[Row]: ...
    def script(self, *, examined: int | None, limit: int | None) -> scripts.Script[list[Row]]: ...

class _BadRows:
    stuck: _BadRowsStuck
    """Return rows that keep failing, are blocked as `set_aside`, or are due for `late_s` seconds although a sweep takes such rows
    every few seconds, at most `limit` of each cause.
    Columns: kind, id, command, text."""
    out_of_range: _BadRowsOutOfRange
    """Return rows that have not ended and have a time, counter or payload out of range. Reads `examined` rows of each table.
    Columns: kind, id, command, text."""

bad_rows: _BadRows

class _CancellationCancel(Named):
    def __call__(self, conn: _Conn, /, *, ids: _Texts | None) -> list[Row]: ...
    def script(self, *, ids: _Texts | None) -> scripts.Script[list[Row]]: ...

class _CancellationCancelQueuedNodes(Named):
    def __call__(self, conn: _Conn, /, *, run_id: str | None) -> list[Row]: ...
    def script(self, *, run_id: str | None) -> scripts.Script[list[Row]]: ...

class _CancellationOrphans(Named):
    def __call__(self, conn: _Conn, /, *, ids: _Texts | None, aside: _Texts | None) -> list[Row]: ...
    def script(self, *, ids: _Texts | None, aside: _Texts | None) -> scripts.Script[list[Row]]: ...

class _Cancellation:
    cancel: Mapping[str, _CancellationCancel]
    """Cancel the jobs with these ids that wait, also for an answer, and ask the running ones to end, which their workers see;
    an earlier request stays. A trigger records the events of ingest jobs. Return the rows. Returns no row if it is over."""
    cancel_queued_nodes: _CancellationCancelQueuedNodes
    """Cancel the queued nodes of a run."""
    orphans: _CancellationOrphans
    """Lock and return up to 500 nodes that wait although their run is over, of `ids` (all if NULL) and not in `aside`. They
    were inserted while the run ended. OFFSET 0 forces one look-up of the run per job; without it, the plan may compare
    each job with every run.
    Columns: id."""

cancellation: _Cancellation

class _ClaimIsolationDelayed(Named):
    def __call__(self, conn: _Conn, /, *, queue: str | None, host: str | None) -> list[Any]: ...
    def script(self, *, queue: str | None, host: str | None) -> scripts.Script[list[Any]]: ...

class _ClaimIsolationClaimable(Named):
    def __call__(self, conn: _Conn, /, *, queue: str | None, obey: bool | None, host: str | None) -> list[Any]: ...
    def script(self, *, queue: str | None, obey: bool | None, host: str | None) -> scripts.Script[list[Any]]: ...

class _ClaimIsolationFail(Named):
    def __call__(self, conn: _Conn, /, *, error: str | None, job: str | None, worker: str | None, claim: int | None) -> Any: ...
    def script(self, *, error: str | None, job: str | None, worker: str | None, claim: int | None) -> scripts.Script[Any]: ...

class _ClaimIsolationBlock(Named):
    def __call__(self, conn: _Conn, /, *, job: str | None, worker: str | None, claim: int | None) -> Any: ...
    def script(self, *, job: str | None, worker: str | None, claim: int | None) -> scripts.Script[Any]: ...

class _ClaimIsolationPostpone(Named):
    def __call__(self, conn: _Conn, /, *, job: str | None) -> Any: ...
    def script(self, *, job: str | None) -> scripts.Script[Any]: ...

class _ClaimIsolation:
    delayed: Mapping[str, _ClaimIsolationDelayed]
    """Lock and return up to 100 jobs that have become due, and as many that are kept for this host and may be claimed by it."""
    claimable: Mapping[str, _ClaimIsolationClaimable]
    """Return the first 100 jobs that a worker may claim, in the order of the claim. None if the queue is paused, or OFF for its
    host."""
    fail: Mapping[str, _ClaimIsolationFail]
    """Fail a job, queued (`worker` NULL) or under this claim; a trigger records the end of a queued ingest job. Returns no
    row if it is neither."""
    block: Mapping[str, _ClaimIsolationBlock]
    """Block a job as `set_aside`, so that no claim finds it. Returns no row in the same cases as `fail`."""
    postpone: Mapping[str, _ClaimIsolationPostpone]
    """Let a queued job wait for a minute. Returns no row if it is not queued any more."""

claim_isolation: _ClaimIsolation

class _ClaimsNodeRows(Named):
    def __call__(self, conn: _Conn, /, *, worker: str | None, host: str | None, queue: str | None, lease_s: float | None, claim: bool | None, obey: bool | None, promote: bool | None, newest: bool | None, model: str | None, models: _Texts | None, lane: int | None, job: str | None, claim_no: int | None, result: str | None, seconds: float | None, rss_mb: int | None, received: str | None, generation: int | None, rows: str | None, complete: bool | None, policy: str | None, grace_s: float | None, bound_s: float | None, versions: _Texts | None, revision: int | None, look_ahead_s: float | None, only: str | None, detail: str | None) -> list[Row]: ...
    def script(self, *, worker: str | None, host: str | None, queue: str | None, lease_s: float | None, claim: bool | None, obey: bool | None, promote: bool | None, newest: bool | None, model: str | None, models: _Texts | None, lane: int | None, job: str | None, claim_no: int | None, result: str | None, seconds: float | None, rss_mb: int | None, received: str | None, generation: int | None, rows: str | None, complete: bool | None, policy: str | None, grace_s: float | None, bound_s: float | None, versions: _Texts | None, revision: int | None, look_ahead_s: float | None, only: str | None, detail: str | None) -> scripts.Script[list[Row]]: ...

class _ClaimsNodesRows(Named):
    def __call__(self, conn: _Conn, /, *, worker: str | None, host: str | None, queue: str | None, lease_s: float | None, claim: int | None, obey: bool | None, promote: bool | None, newest: bool | None, done: str | None, versions: _Texts | None, look_ahead_s: float | None) -> list[Row]: ...
    def script(self, *, worker: str | None, host: str | None, queue: str | None, lease_s: float | None, claim: int | None, obey: bool | None, promote: bool | None, newest: bool | None, done: str | None, versions: _Texts | None, look_ahead_s: float | None) -> scripts.Script[list[Row]]: ...

class _ClaimsIngestRows(Named):
    def __call__(self, conn: _Conn, /, *, worker: str | None, host: str | None, queue: str | None, lease_s: float | None, claim: int | None, obey: bool | None, promote: bool | None, done: str | None, look_ahead_s: float | None, only: str | None) -> list[Row]: ...
    def script(self, *, worker: str | None, host: str | None, queue: str | None, lease_s: float | None, claim: int | None, obey: bool | None, promote: bool | None, done: str | None, look_ahead_s: float | None, only: str | None) -> scripts.Script[list[Row]]: ...

class _ClaimsRenew(Named):
    def __call__(self, conn: _Conn, /, *, jobs: _Texts | None, claims: _Ints | None, progress: _Texts | None, worker: str | None, lease_s: float | None) -> list[Row]: ...
    def script(self, *, jobs: _Texts | None, claims: _Ints | None, progress: _Texts | None, worker: str | None, lease_s: float | None) -> scripts.Script[list[Row]]: ...

class _ClaimsIsHeld(Named):
    def __call__(self, conn: _Conn, /, *, job: str | None, worker: str | None, claim: int | None) -> Row | None: ...
    def script(self, *, job: str | None, worker: str | None, claim: int | None) -> scripts.Script[Row | None]: ...

class _ClaimsHasRecorded(Named):
    def __call__(self, conn: _Conn, /, *, job: str | None, claim: int | None, worker: str | None, events: _Texts | None) -> Row | None: ...
    def script(self, *, job: str | None, claim: int | None, worker: str | None, events: _Texts | None) -> scripts.Script[Row | None]: ...

class _ClaimsHeldBy(Named):
    def __call__(self, conn: _Conn, /, *, prefix: str | None) -> list[Row]: ...
    def script(self, *, prefix: str | None) -> scripts.Script[list[Row]]: ...

class _Claims:
    node_rows: _ClaimsNodeRows
    """Record a completed node, if `job` is given, and claim the next node job, if `claim` is true.
    Return the columns that a worker reads, and the row as JSON for the handler (`body`). If no job
    was claimed and a delayed job is due in `due_s` seconds, at most `look_ahead_s`, the row has no
    id. `only`: claim this job, wherever it stands in the queue, or none. Raises QW001 if the claim
    to record is lost.
    Columns: id, claim_no, crash_count, timeout_s, node_module, run_id, node_id, required_model, run, body, wait_s, due_s, lapse_count."""
    nodes_rows: _ClaimsNodesRows
    """Record the completed nodes of the JSON array `done`, if any, and claim up to `claim` more. Return
    what `node_rows` returns; if fewer are claimed, the last row may be one without an id. Raises
    QW001 if one of the claims to record is lost.
    Columns: id, claim_no, crash_count, timeout_s, node_module, run_id, node_id, required_model, run, body, wait_s, due_s, lapse_count."""
    ingest_rows: _ClaimsIngestRows
    """Record the completed ingest jobs of the JSON array `done`, if any, and claim up to `claim` more.
    Return what `node_rows` returns; if fewer are claimed, the last row may be one without an id: a
    limit admits the next job in `wait_s` seconds, and a delayed job is due in `due_s`, at most
    `look_ahead_s`. `only`: as for `node_rows`. Raises QW001 if one of the claims to record is lost.
    Columns: id, claim_no, crash_count, timeout_s, task_name, run_id, node_id, required_model, run, body, wait_s, due_s, lapse_count."""
    renew: Mapping[str, _ClaimsRenew]
    """Extend the leases of claims, one element of each array a claim, and store their progress
    (unchanged if NULL). A claim without a row is lost. `renewed` is false for a row that somebody
    else has locked: its lease stays as it is. `cancel`: the job was cancelled, or its run is over.
    Columns: id, claim_no, cancel, renewed."""
    is_held: Mapping[str, _ClaimsIsHeld]
    """Return one row without columns if this claim still holds its job.
    Columns: ."""
    has_recorded: Mapping[str, _ClaimsHasRecorded]
    """Return one row if the history has such an event of this claim, so its write was committed. The
    events of a node are found by run and node, which are indexed.
    Columns: recorded."""
    held_by: Mapping[str, _ClaimsHeldBy]
    """Return the claims of workers whose id starts with `prefix`, in the order in which the jobs
    were queued, with the crashes and lapses of the jobs.
    Columns: id, worker_id, claim_no, crash_count, lapse_count."""

claims: _Claims

class _ControlsPut(Named):
    def __call__(self, conn: _Conn, /, *, host: str | None, queue: str | None, desired_state: str | None, stop_policy: str | None, requested_by: str | None, reason: str | None, until: datetime | None, lasts: timedelta | None) -> Row: ...
    def script(self, *, host: str | None, queue: str | None, desired_state: str | None, stop_policy: str | None, requested_by: str | None, reason: str | None, until: datetime | None, lasts: timedelta | None) -> scripts.Script[Row]: ...

class _ControlsIsOver(Named):
    def __call__(self, conn: _Conn, /, *, instant: datetime | None) -> Any: ...
    def script(self, *, instant: datetime | None) -> scripts.Script[Any]: ...

class _ControlsKnownQueues(Named):
    def __call__(self, conn: _Conn, /) -> list[Any]: ...
    def script(self) -> scripts.Script[list[Any]]: ...

class _ControlsKnownHosts(Named):
    def __call__(self, conn: _Conn, /) -> list[Any]: ...
    def script(self) -> scripts.Script[list[Any]]: ...

class _ControlsGet(Named):
    def __call__(self, conn: _Conn, /, *, host: str | None, queue: str | None) -> Row | None: ...
    def script(self, *, host: str | None, queue: str | None) -> scripts.Script[Row | None]: ...

class _ControlsOffPolicy(Named):
    def __call__(self, conn: _Conn, /, *, host: str | None, queue: str | None) -> Any: ...
    def script(self, *, host: str | None, queue: str | None) -> scripts.Script[Any]: ...

class _Controls:
    put: _ControlsPut
    """Switch the workers of a host and queue on or off; return the row. A trigger wakes the
    workers.
    Columns: host_label, queue, desired_state, stop_policy, requested_by, updated_at, reason, until_at."""
    is_over: _ControlsIsOver
    """Return whether an instant has come, by the database's clock."""
    known_queues: _ControlsKnownQueues
    """Return the queues that workers have served or switches name."""
    known_hosts: _ControlsKnownHosts
    """Return the hosts that have had a worker of any queue, or that a control row names."""
    get: _ControlsGet
    """Return the control row of a host and queue. Returns no row if it was never switched.
    Columns: host_label, queue, desired_state, stop_policy, requested_by, updated_at, reason, until_at."""
    off_policy: _ControlsOffPolicy
    """Return the stop policy of the control row that switches a host and queue off now, or NULL if it
    is on."""

controls: _Controls

class _DatabasesProjects(Named):
    def __call__(self, conn: _Conn, /) -> list[Row]: ...
    def script(self) -> scripts.Script[list[Row]]: ...

class _DatabasesUnfinished(Named):
    def __call__(self, conn: _Conn, /) -> Any: ...
    def script(self) -> scripts.Script[Any]: ...

class _DatabasesMatching(Named):
    def __call__(self, conn: _Conn, /, *, pattern: str | None) -> list[Row]: ...
    def script(self, *, pattern: str | None) -> scripts.Script[list[Row]]: ...

class _DatabasesTryLock(Named):
    def __call__(self, conn: _Conn, /, *, name: str | None) -> Any: ...
    def script(self, *, name: str | None) -> scripts.Script[Any]: ...

class _DatabasesUnlock(Named):
    def __call__(self, conn: _Conn, /, *, name: str | None) -> None: ...
    def script(self, *, name: str | None) -> scripts.Script[None]: ...

class _DatabasesTables(Named):
    def __call__(self, conn: _Conn, /) -> list[Row]: ...
    def script(self) -> scripts.Script[list[Row]]: ...

class _Databases:
    projects: _DatabasesProjects
    """Return every database that people use, with the folder that its comment names and its size.
    Columns: name, folder, size_bytes."""
    unfinished: _DatabasesUnfinished
    """Return how many runs are in no terminal state."""
    matching: _DatabasesMatching
    """Return the databases whose names match a regular expression.
    Columns: name."""
    try_lock: _DatabasesTryLock
    """Take the advisory lock of a database's name for this session; return whether it was free."""
    unlock: _DatabasesUnlock
    """Release the advisory lock of a database's name."""
    tables: _DatabasesTables
    """Return the tables of the current schema.
    Columns: name."""

databases: _Databases

class _DoctorServer(Named):
    def __call__(self, conn: _Conn, /) -> Row: ...
    def script(self) -> scripts.Script[Row]: ...

class _DoctorClock(Named):
    def __call__(self, conn: _Conn, /) -> Any: ...
    def script(self) -> scripts.Script[Any]: ...

class _DoctorBackendPid(Named):
    def __call__(self, conn: _Conn, /) -> Any: ...
    def script(self) -> scripts.Script[Any]: ...

class _DoctorSettings(Named):
    def __call__(self, conn: _Conn, /, *, names: _Texts | None) -> list[Row]: ...
    def script(self, *, names: _Texts | None) -> scripts.Script[list[Row]]: ...

class _DoctorNotify(Named):
    def __call__(self, conn: _Conn, /, *, channel: str | None) -> None: ...
    def script(self, *, channel: str | None) -> scripts.Script[None]: ...

class _DoctorNotificationQueueUsage(Named):
    def __call__(self, conn: _Conn, /) -> Any: ...
    def script(self) -> scripts.Script[Any]: ...

class _DoctorTransactions(Named):
    def __call__(self, conn: _Conn, /) -> list[Row]: ...
    def script(self) -> scripts.Script[list[Row]]: ...

class _DoctorConnections(Named):
    def __call__(self, conn: _Conn, /) -> Row: ...
    def script(self) -> scripts.Script[Row]: ...

class _DoctorSchemaSeen(Named):
    def __call__(self, conn: _Conn, /) -> Row: ...
    def script(self) -> scripts.Script[Row]: ...

class _DoctorSchemaVersion(Named):
    def __call__(self, conn: _Conn, /) -> Row: ...
    def script(self) -> scripts.Script[Row]: ...

class _DoctorMachines(Named):
    def __call__(self, conn: _Conn, /) -> list[Any]: ...
    def script(self) -> scripts.Script[list[Any]]: ...

class _DoctorLapsed(Named):
    def __call__(self, conn: _Conn, /) -> Row: ...
    def script(self) -> scripts.Script[Row]: ...

class _DoctorSilentWorkers(Named):
    def __call__(self, conn: _Conn, /, *, stale_s: float | None) -> list[Row]: ...
    def script(self, *, stale_s: float | None) -> scripts.Script[list[Row]]: ...

class _DoctorMissingVersions(Named):
    def __call__(self, conn: _Conn, /, *, stale_s: float | None, listed: int | None) -> list[Row]: ...
    def script(self, *, stale_s: float | None, listed: int | None) -> scripts.Script[list[Row]]: ...

class _DoctorAlerts(Named):
    def __call__(self, conn: _Conn, /) -> Row: ...
    def script(self) -> scripts.Script[Row]: ...

class _DoctorTableStatistics(Named):
    def __call__(self, conn: _Conn, /, *, tables: _Texts | None) -> list[Row]: ...
    def script(self, *, tables: _Texts | None) -> scripts.Script[list[Row]]: ...

class _DoctorIndexesOnRenewed(Named):
    def __call__(self, conn: _Conn, /, *, tables: _Texts | None, columns: _Texts | None) -> list[Any]: ...
    def script(self, *, tables: _Texts | None, columns: _Texts | None) -> scripts.Script[list[Any]]: ...

class _DoctorInputIndex(Named):
    def __call__(self, conn: _Conn, /) -> Row: ...
    def script(self) -> scripts.Script[Row]: ...

class _Doctor:
    server: _DoctorServer
    """Return the facts about the server: its version, whether it is a standby or read-only, and the role.
    Columns: version_num, version, standby, read_only, role."""
    clock: _DoctorClock
    """Return the server's clock, which runs on within a transaction."""
    backend_pid: _DoctorBackendPid
    """Return the process that executes this statement. Behind a pooler it is not the announced one."""
    settings: _DoctorSettings
    """Return the settings of these names as they are in force for this role and database.
    Columns: name, setting."""
    notify: _DoctorNotify
    """Notify a channel."""
    notification_queue_usage: _DoctorNotificationQueueUsage
    """Return how full the server's queue of notifications is, 0 to 1."""
    transactions: _DoctorTransactions
    """Return the oldest five transactions of this database except this one. `idle_s` is NULL unless the backend
    is idle inside its transaction. With pg_read_all_stats, the transactions of other roles are included.
    Columns: what, age_s, idle_s."""
    connections: _DoctorConnections
    """Return how many connections are used, of all databases, and how many an ordinary role may open.
    Columns: used, allowed."""
    schema_seen: _DoctorSchemaSeen
    """Return whether this role finds and may read the ledger of migrations, and which schemas have
    one that the search path or a missing USAGE hides.
    Columns: found, readable, elsewhere, role, schema, may_create."""
    schema_version: _DoctorSchemaVersion
    """Return the version of the schema, and the oldest version of the code that may work on it. An
    older ledger has no column `compatible_with`.
    Columns: version, needs."""
    machines: _DoctorMachines
    """Return the hosts that had a worker of nodes within the last day."""
    lapsed: _DoctorLapsed
    """Return how many running jobs have a lapsed lease, and for how many seconds the oldest has.
    Columns: n, since_s."""
    silent_workers: _DoctorSilentWorkers
    """Return the hosts and queues, up to 1,000, of which a heartbeat is flagged as dead while they are on, or a worker that is
    dead, or was not seen for `stale_s` seconds, still has a running job.
    Columns: host_label, queue."""
    missing_versions: _DoctorMissingVersions
    """Return the versions of nodes that due jobs need and no live worker of their queue has, up to
    `listed`, with up to three of these jobs and the age of the oldest.
    Columns: queue, version, wait_s, jobs."""
    alerts: _DoctorAlerts
    """Return how many failures wait to be sent, for how many seconds the oldest has, and how many seconds ago a sender
    was there, or NULL if there never was one.
    Columns: n, wait_s, seen_s."""
    table_statistics: _DoctorTableStatistics
    """Return what autovacuum and updates do to these tables.
    Columns: name, dead, live, updates, hot, inserts, vacuum_off."""
    indexes_on_renewed: _DoctorIndexesOnRenewed
    """Return the indexes over one of these columns, each given with its table."""
    input_index: _DoctorInputIndex
    """Return about how many runs there are, whether an index finds them by their inputs, and the statement that makes it.
    Columns: runs, is_there, statement."""

doctor: _Doctor

class _DowngradeCheckColumns(Named):
    def __call__(self, conn: _Conn, /) -> list[Row]: ...
    def script(self) -> scripts.Script[list[Row]]: ...

class _DowngradeCheckUntouched(Named):
    def __call__(self, conn: _Conn, /) -> list[Row]: ...
    def script(self) -> scripts.Script[list[Row]]: ...

class _DowngradeCheck:
    columns: _DowngradeCheckColumns
    """Return every column of the schema's tables, with the expression of its default.
    Columns: table_name, column_name, column_default."""
    untouched: _DowngradeCheckUntouched
    """Return the relations of the schema that this transaction has not locked for writing.
    Columns: name."""

downgrade_check: _DowngradeCheck

class _EventExportsCreate(Named):
    def __call__(self, conn: _Conn, /, *, name: str | None) -> None: ...
    def script(self, *, name: str | None) -> scripts.Script[None]: ...

class _EventExportsTake(Named):
    def __call__(self, conn: _Conn, /, *, who: str | None, lease_s: float | None, name: str | None) -> Row | None: ...
    def script(self, *, who: str | None, lease_s: float | None, name: str | None) -> scripts.Script[Row | None]: ...

class _EventExportsRelease(Named):
    def __call__(self, conn: _Conn, /, *, name: str | None, who: str | None) -> None: ...
    def script(self, *, name: str | None, who: str | None) -> scripts.Script[None]: ...

class _EventExportsAdvance(Named):
    def __call__(self, conn: _Conn, /, *, node_event: int | None, ingest_event: int | None, name: str | None, who: str | None) -> Row | None: ...
    def script(self, *, node_event: int | None, ingest_event: int | None, name: str | None, who: str | None) -> scripts.Script[Row | None]: ...

class _EventExportsPrune(Named):
    def __call__(self, conn: _Conn, /, *, days: float | None, batch: int | None) -> int: ...
    def script(self, *, days: float | None, batch: int | None) -> scripts.Script[None]: ...

class _EventExportsLastIds(Named):
    def __call__(self, conn: _Conn, /) -> Row: ...
    def script(self) -> scripts.Script[Row]: ...

class _EventExportsTransactions(Named):
    def __call__(self, conn: _Conn, /) -> list[Any]: ...
    def script(self) -> scripts.Script[list[Any]]: ...

class _EventExportsEvents(Named):
    def __call__(self, conn: _Conn, /, *, lows: _Ints | None, highs: _Ints | None, batch: int | None) -> list[Row]: ...
    def script(self, *, lows: _Ints | None, highs: _Ints | None, batch: int | None) -> scripts.Script[list[Row]]: ...

class _EventExportsAttempts(Named):
    def __call__(self, conn: _Conn, /, *, jobs: _Texts | None, claims: _Ints | None, without: _Texts | None) -> list[Row]: ...
    def script(self, *, jobs: _Texts | None, claims: _Ints | None, without: _Texts | None) -> scripts.Script[list[Row]]: ...

class _EventExportsAddRuns(Named):
    def __call__(self, conn: _Conn, /, *, name: str | None, runs: _Texts | None) -> None: ...
    def script(self, *, name: str | None, runs: _Texts | None) -> scripts.Script[None]: ...

class _EventExportsEndedRuns(Named):
    def __call__(self, conn: _Conn, /, *, name: str | None, batch: int | None) -> list[Row]: ...
    def script(self, *, name: str | None, batch: int | None) -> scripts.Script[list[Row]]: ...

class _EventExportsRemoveRuns(Named):
    def __call__(self, conn: _Conn, /, *, name: str | None, runs: _Texts | None) -> None: ...
    def script(self, *, name: str | None, runs: _Texts | None) -> scripts.Script[None]: ...

class _EventExports:
    create: _EventExportsCreate
    """Register an export, which begins with the events after the present ones."""
    take: _EventExportsTake
    """Take or keep the export for `lease_s` seconds and return how far it is. Returns no row if another
    process has it.
    Columns: node_event, ingest_event."""
    release: _EventExportsRelease
    """Let another process take the export at once."""
    advance: _EventExportsAdvance
    """Note that all events up to these are exported. Returns no row if another process has the export.
    Columns: name."""
    prune: _EventExportsPrune
    """Delete up to `batch` exports that no process has had for over `days` days, so that their next events are deleted."""
    last_ids: _EventExportsLastIds
    """Return the last event ids that any transaction has taken, committed or not.
    Columns: node_event, ingest_event."""
    transactions: _EventExportsTransactions
    """Return the transactions that run now, except this one, including prepared ones. Each holds the
    lock of its own id until it ends."""
    events: Mapping[str, _EventExportsEvents]
    """Return up to `batch` events whose ids are in one of the ranges.
    Columns: actor, id, job_id, attempt, event_type, claim_no, worker_id, host_label, queue, elapsed_s, error, created_at."""
    attempts: Mapping[str, _EventExportsAttempts]
    """Return the events of these claims, the oldest first, with the name of the task or workflow and the trace of the job or
    run. `waited_from`: when the claim before ended, else when the job was queued.
    Columns: name, traceparent, id, job_id, attempt, event_type, claim_no, worker_id, host_label, queue, elapsed_s, error, created_at, detail, waited_from."""
    add_runs: _EventExportsAddRuns
    """Note runs with exported events, whose own end is to be exported."""
    ended_runs: _EventExportsEndedRuns
    """Return up to `batch` of these runs that are over, with all their nodes, since a later event would export the run again.
    The workflow of a deleted run is NULL.
    Columns: run_id, name, status, error, generation, priority, created_at, queued_at, started_at, finished_at, traceparent."""
    remove_runs: _EventExportsRemoveRuns
    """Forget runs whose end is exported."""

event_exports: _EventExports

class _EventsSend(Named):
    def __call__(self, conn: _Conn, /, *, name: str | None, key: str | None, value: str | None) -> Row | None: ...
    def script(self, *, name: str | None, key: str | None, value: str | None) -> scripts.Script[Row | None]: ...

class _EventsNewest(Named):
    def __call__(self, conn: _Conn, /, *, name: str | None, limit: int | None) -> list[Row]: ...
    def script(self, *, name: str | None, limit: int | None) -> scripts.Script[list[Row]]: ...

class _EventsPrune(Named):
    def __call__(self, conn: _Conn, /, *, days: float | None, batch: int | None) -> int: ...
    def script(self, *, days: float | None, batch: int | None) -> scripts.Script[None]: ...

class _EventsWakeWaiting(Named):
    def __call__(self, conn: _Conn, /, *, name: str | None, key: str | None, most: int | None) -> Any: ...
    def script(self, *, name: str | None, key: str | None, most: int | None) -> scripts.Script[Any]: ...

class _EventsWait(Named):
    def __call__(self, conn: _Conn, /, *, kind: str | None, name: str | None, key: str | None, job: str | None, worker: str | None, claim: int | None, default: str | None, after_s: float | None) -> Row: ...
    def script(self, *, kind: str | None, name: str | None, key: str | None, job: str | None, worker: str | None, claim: int | None, default: str | None, after_s: float | None) -> scripts.Script[Row]: ...

class _EventsSuspend(Named):
    def __call__(self, conn: _Conn, /, *, job: str | None, claim: int | None, longest_s: float | None, keep_s: float | None, worker: str | None, detail: str | None) -> Row | None: ...
    def script(self, *, job: str | None, claim: int | None, longest_s: float | None, keep_s: float | None, worker: str | None, detail: str | None) -> scripts.Script[Row | None]: ...

class _Events:
    send: _EventsSend
    """Insert an event. Returns no row if there is one of this name and key already, which stays.
    Columns: created_at."""
    newest: _EventsNewest
    """Return the newest events, of every name if `name` is NULL.
    Columns: name, key, value, created_at."""
    prune: _EventsPrune
    """Delete up to `batch` events that are older than `days` days."""
    wake_waiting: _EventsWakeWaiting
    """Wake up to `most` jobs of each family whose event is there although they wait for it; return how
    many. Only events of this name and key count, or all if `name` is NULL."""
    wait: Mapping[str, _EventsWait]
    """Begin or continue a wait of a claimed job: for an event of this name and key, or, for the kind
    `sleep`, for the time alone. One row: `state` is `done`, with the value of the event or `default`
    as `output`; `waiting`; `busy` if another transaction is about to end the wait; NULL if the claim
    is lost. The time of the first call counts. A wait that is over is only read.
    Columns: state, output."""
    suspend: Mapping[str, _EventsSuspend]
    """Give up the claim of a job whose handler waits, without counting an attempt. The job is delayed until
    its first wait is due, at most `longest_s`, or for a second if a wait has ended meanwhile. Then only
    workers of its host may claim it for `keep_s`, unless it has to wait for a lock key or a partition.
    If the job must end, it is cancelled instead. Returns no row if the claim is lost."""

events: _Events

class _FailureAlertsAnnounce(Named):
    def __call__(self, conn: _Conn, /, *, keep_s: float | None) -> None: ...
    def script(self, *, keep_s: float | None) -> scripts.Script[None]: ...

class _FailureAlertsPending(Named):
    def __call__(self, conn: _Conn, /) -> Any: ...
    def script(self) -> scripts.Script[Any]: ...

class _FailureAlertsLock(Named):
    def __call__(self, conn: _Conn, /) -> Row | None: ...
    def script(self) -> scripts.Script[Row | None]: ...

class _FailureAlertsFree(Named):
    def __call__(self, conn: _Conn, /, *, per_minute: int | None) -> Any: ...
    def script(self, *, per_minute: int | None) -> scripts.Script[Any]: ...

class _FailureAlertsExpire(Named):
    def __call__(self, conn: _Conn, /, *, tries: int | None, max_age_s: float | None) -> list[Row]: ...
    def script(self, *, tries: int | None, max_age_s: float | None) -> scripts.Script[list[Row]]: ...

class _FailureAlertsWaiting(Named):
    def __call__(self, conn: _Conn, /, *, app: str | None, patience_s: float | None) -> Any: ...
    def script(self, *, app: str | None, patience_s: float | None) -> scripts.Script[Any]: ...

class _FailureAlertsTake(Named):
    def __call__(self, conn: _Conn, /, *, app: str | None, patience_s: float | None, token: str | None, lease_s: float | None) -> Row | None: ...
    def script(self, *, app: str | None, patience_s: float | None, token: str | None, lease_s: float | None) -> scripts.Script[Row | None]: ...

class _FailureAlertsTakeAll(Named):
    def __call__(self, conn: _Conn, /, *, token: str | None, lease_s: float | None, app: str | None, patience_s: float | None) -> list[Row]: ...
    def script(self, *, token: str | None, lease_s: float | None, app: str | None, patience_s: float | None) -> scripts.Script[list[Row]]: ...

class _FailureAlertsQuiet(Named):
    def __call__(self, conn: _Conn, /) -> None: ...
    def script(self) -> scripts.Script[None]: ...

class _FailureAlertsSent(Named):
    def __call__(self, conn: _Conn, /, *, token: str | None) -> None: ...
    def script(self, *, token: str | None) -> scripts.Script[None]: ...

class _FailureAlertsPrune(Named):
    def __call__(self, conn: _Conn, /) -> int: ...
    def script(self) -> scripts.Script[None]: ...

class _FailureAlerts:
    announce: _FailureAlertsAnnounce
    """Note that a sender is there: failures are noted for `keep_s` more seconds."""
    pending: _FailureAlertsPending
    """Return whether there is any row. It locks nothing."""
    lock: _FailureAlertsLock
    """Lock the state of all senders. Returns no row if another sender has it, or none was announced.
    Columns: ."""
    free: _FailureAlertsFree
    """Return how many calls the state still allows within a minute: `per_minute` minus the calls of the last minute, or 0
    for a minute after the limit was reached. A time in the future, after the clock was set back, does not count. It is
    a separate statement after the lock, and reads the clock, so that it sees the writes of the last holder of the lock."""
    expire: _FailureAlertsExpire
    """Delete what was sent over a minute ago. Of the rows that no sender has at present, delete the ones over
    `max_age_s` old and the ones that were taken `tries` times. Return `is_sent` of each.
    Columns: kind, subject, is_sent, claims."""
    waiting: _FailureAlertsWaiting
    """Count the rows that a sender of `app` may take, up to two. If another app has a function for a row, it is left to
    that app's senders for `patience_s`."""
    take: _FailureAlertsTake
    """Take the oldest row for `lease_s` seconds. MATERIALIZED: a subquery that the plan runs once for each row would find
    the next oldest each time, and take them all.
    Columns: kind, subject, name, queue, schedule, reason, error, failed_at."""
    take_all: _FailureAlertsTakeAll
    """Take all rows for `lease_s` seconds; return for each kind how many there are, up to five of their names, and the
    time of the last.
    Columns: kind, n, names, failed_at."""
    quiet: _FailureAlertsQuiet
    """Note that the limit is reached: nothing is sent for a minute."""
    sent: _FailureAlertsSent
    """Mark what a sender took as sent: one row stays for a minute, to count against the limit. It
    changes no row that another sender has now."""
    prune: _FailureAlertsPrune
    """Delete failures that will not be sent: no sender was there within its time, or they are over a week old."""

failure_alerts: _FailureAlerts

class _FailuresNewest(Named):
    def __call__(self, conn: _Conn, /, *, since: datetime | None, since_ago: timedelta | None, until: datetime | None, until_ago: timedelta | None, queue: str | None, workflow: str | None, machine: str | None, text: str | None, most: int | None, cut: int | None) -> list[Row]: ...
    def script(self, *, since: datetime | None, since_ago: timedelta | None, until: datetime | None, until_ago: timedelta | None, queue: str | None, workflow: str | None, machine: str | None, text: str | None, most: int | None, cut: int | None) -> scripts.Script[list[Row]]: ...

class _FailuresOfSchedules(Named):
    def __call__(self, conn: _Conn, /, *, machine: str | None, queue: str | None, workflow: str | None, text: str | None) -> list[Row]: ...
    def script(self, *, machine: str | None, queue: str | None, workflow: str | None, text: str | None) -> scripts.Script[list[Row]]: ...

class _FailuresTraceback(Named):
    def __call__(self, conn: _Conn, /, *, run: str | None, node: str | None, job: str | None) -> Any: ...
    def script(self, *, run: str | None, node: str | None, job: str | None) -> scripts.Script[Any]: ...

class _FailuresSeen(Named):
    def __call__(self, conn: _Conn, /, *, signatures: _Texts | None) -> list[Row]: ...
    def script(self, *, signatures: _Texts | None) -> scripts.Script[list[Row]]: ...

class _FailuresMarkSeen(Named):
    def __call__(self, conn: _Conn, /, *, signature: str | None, until: datetime | None, by: str | None) -> None: ...
    def script(self, *, signature: str | None, until: datetime | None, by: str | None) -> scripts.Script[None]: ...

class _FailuresUnmarkSeen(Named):
    def __call__(self, conn: _Conn, /, *, signature: str | None) -> int: ...
    def script(self, *, signature: str | None) -> scripts.Script[None]: ...

class _Failures:
    newest: _FailuresNewest
    """Return the newest failed jobs that fit the filters, the newest first, of `most` that are examined, and the last of these;
    `place` counts the examined ones. A time is given as such, or as a span up to now. Always a row, with a NULL `place`
    if no job has failed.
    Columns: now, place, fits, kind, id, at, error, name, queue, host_label, run_id, node_id."""
    of_schedules: _FailuresOfSchedules
    """Return the schedules that cannot fire or have missed their last instant, as failures. One that cannot fire is dated by
    its next instant if that has passed, else by its last change. The first 1,000 schedules are read, in the order of their
    next instants.
    Columns: kind, id, at, error, name, queue, host_label, run_id, node_id."""
    traceback: _FailuresTraceback
    """Return the traceback of a job's last failure. Returns no row if none is recorded. `run` and `node`: NULL of an ingest job."""
    seen: _FailuresSeen
    """Return the marks of these signatures.
    Columns: signature, until, seen_at, seen_by."""
    mark_seen: _FailuresMarkSeen
    """Mark a signature as seen until a time, by this actor, or by the transaction's actor if NULL. Delete marks over a year old."""
    unmark_seen: _FailuresUnmarkSeen
    """Delete the mark of a signature."""

failures: _Failures

class _HandbackHandBack(Named):
    def __call__(self, conn: _Conn, /, *, error: str | None, after_s: float | None, keep_for: str | None, front: bool | None, band: int | None, jobs: _Texts | None, claims: _Ints | None, workers: _Texts | None, detail: str | None) -> list[Row]: ...
    def script(self, *, error: str | None, after_s: float | None, keep_for: str | None, front: bool | None, band: int | None, jobs: _Texts | None, claims: _Ints | None, workers: _Texts | None, detail: str | None) -> scripts.Script[list[Row]]: ...

class _HandbackStrays(Named):
    def __call__(self, conn: _Conn, /, *, worker: str | None) -> list[Row]: ...
    def script(self, *, worker: str | None) -> scripts.Script[list[Row]]: ...

class _HandbackUnknown(Named):
    def __call__(self, conn: _Conn, /, *, job: str | None, stale_s: float | None) -> Row | None: ...
    def script(self, *, job: str | None, stale_s: float | None) -> scripts.Script[Row | None]: ...

class _HandbackWaitingUnknown(Named):
    def __call__(self, conn: _Conn, /, *, within_s: float | None) -> list[Row]: ...
    def script(self, *, within_s: float | None) -> scripts.Script[list[Row]]: ...

class _Handback:
    hand_back: Mapping[str, _HandbackHandBack]
    """Give up claims, also of several workers, without counting an attempt. Each job is queued again, or
    cancelled if it must end. One element of each array is a claim. `after_s`: how long the jobs wait
    first. `front`: they get at least the priority `band`. `error`: the text that a queued job shows
    until its next claim, or NULL. `keep_for`: the host whose workers may claim it meanwhile, or NULL.
    A claim without a row is lost."""
    strays: Mapping[str, _HandbackStrays]
    """Return the claims of a worker, except rows that another transaction has locked.
    Columns: id, worker_id, claim_no."""
    unknown: _HandbackUnknown
    """Return which workers did not know a node since it was last handed back for another reason or ended: how often (`times`),
    `age_s` of the first time, the `workers`, and the `others`: up to 20 live workers that take such jobs, have not met it, and
    report it or no list of their nodes. `known`: one of these reports it. `keep_for`: the host of one of these, of one that
    reports it if there is one, without a host where a live worker has met it. The history of a node is indexed by run and node.
    Returns no row if the job does not exist.
    Columns: times, age_s, workers, known, others, keep_for."""
    waiting_unknown: _HandbackWaitingUnknown
    """Return the nodes that workers have handed back because they do not know them. A row has the queue,
    the node module, the number of jobs, and one of their runs. Reads the first 10,000 jobs that are due
    within `within_s` seconds, and the first job of each queue in the order of claims. Examines only jobs
    with an error, since such a hand-back stores one, which the next claim removes.
    Columns: queue, node_module, n, run_id."""

handback: _Handback

class _HistoryRowsRun(Named):
    def __call__(self, conn: _Conn, /, *, run_id: str | None) -> Row | None: ...
    def script(self, *, run_id: str | None) -> scripts.Script[Row | None]: ...

class _HistoryRowsNodes(Named):
    def __call__(self, conn: _Conn, /, *, run_id: str | None, nodes: _Texts | None) -> list[Row]: ...
    def script(self, *, run_id: str | None, nodes: _Texts | None) -> scripts.Script[list[Row]]: ...

class _HistoryRowsNode(Named):
    def __call__(self, conn: _Conn, /, *, job: str | None) -> Row | None: ...
    def script(self, *, job: str | None) -> scripts.Script[Row | None]: ...

class _HistoryRowsIngestJob(Named):
    def __call__(self, conn: _Conn, /, *, job: str | None) -> Row | None: ...
    def script(self, *, job: str | None) -> scripts.Script[Row | None]: ...

class _HistoryRowsNodeEvents(Named):
    def __call__(self, conn: _Conn, /, *, run_id: str | None, nodes: _Texts | None) -> list[Row]: ...
    def script(self, *, run_id: str | None, nodes: _Texts | None) -> scripts.Script[list[Row]]: ...

class _HistoryRowsIngestEvents(Named):
    def __call__(self, conn: _Conn, /, *, job: str | None) -> list[Row]: ...
    def script(self, *, job: str | None) -> scripts.Script[list[Row]]: ...

class _HistoryRowsNodeTotals(Named):
    def __call__(self, conn: _Conn, /, *, run_id: str | None) -> Row: ...
    def script(self, *, run_id: str | None) -> scripts.Script[Row]: ...

class _HistoryRowsActiveNodes(Named):
    def __call__(self, conn: _Conn, /, *, run_id: str | None, limit: int | None) -> list[Any]: ...
    def script(self, *, run_id: str | None, limit: int | None) -> scripts.Script[list[Any]]: ...

class _HistoryRowsNodeStates(Named):
    def __call__(self, conn: _Conn, /, *, nodes: _Texts | None, run_id: str | None) -> list[Row]: ...
    def script(self, *, nodes: _Texts | None, run_id: str | None) -> scripts.Script[list[Row]]: ...

class _HistoryRowsFurtherNodeIds(Named):
    def __call__(self, conn: _Conn, /, *, after: str | None, run_id: str | None, but: _Texts | None, limit: int | None) -> list[Any]: ...
    def script(self, *, after: str | None, run_id: str | None, but: _Texts | None, limit: int | None) -> scripts.Script[list[Any]]: ...

class _HistoryRowsIdsInRange(Named):
    def __call__(self, conn: _Conn, /, *, low: str | None, high: str | None, prefix: str | None, limit: int | None) -> list[Row]: ...
    def script(self, *, low: str | None, high: str | None, prefix: str | None, limit: int | None) -> scripts.Script[list[Row]]: ...

class _HistoryRowsFeed(Named):
    def __call__(self, conn: _Conn, /, *, since: datetime | None, late_s: float | None, at: datetime | None, kind: str | None, id: int | None, limit: int | None, runs: _Texts | None, most: int | None) -> list[Row]: ...
    def script(self, *, since: datetime | None, late_s: float | None, at: datetime | None, kind: str | None, id: int | None, limit: int | None, runs: _Texts | None, most: int | None) -> scripts.Script[list[Row]]: ...

class _HistoryRows:
    run: _HistoryRowsRun
    """Return a run without its definition and context, the time of this read, and the seconds since it was queued. Returns
    no row if the run does not exist."""
    nodes: _HistoryRowsNodes
    """Return the jobs of a run's nodes in the order in which they were queued; only `nodes`, unless it is NULL."""
    node: _HistoryRowsNode
    """Return one node job, with the columns of `nodes`."""
    ingest_job: _HistoryRowsIngestJob
    """Return one ingest job."""
    node_events: _HistoryRowsNodeEvents
    """Return the events of a run's nodes, the oldest first; only of `nodes`, unless it is NULL.
    Columns: node_id, id, job_id, attempt, event_type, claim_no, worker_id, host_label, elapsed_s, error, detail, created_at."""
    ingest_events: _HistoryRowsIngestEvents
    """Return the events of an ingest job, the oldest first, each with its actor.
    Columns: id, job_id, attempt, event_type, claim_no, worker_id, host_label, elapsed_s, error, detail, created_at, actor."""
    node_totals: _HistoryRowsNodeTotals
    """Return how many nodes of a run have each status, as the object `counts`, and how many belong to items of maps. No plan
    is kept, as above.
    Columns: counts, of_items."""
    active_nodes: _HistoryRowsActiveNodes
    """Return the ids of a run's nodes that run, wait for an answer or failed, the first to be queued
    first."""
    node_states: _HistoryRowsNodeStates
    """Return the state and the error of the nodes of a run with these ids that have a row, by a look-up per node.
    Columns: node_id, status, error."""
    further_node_ids: _HistoryRowsFurtherNodeIds
    """Return the ids of a run's queued nodes after `after`, in their order, without the ids `but`. It
    searches for one node at a time: with statistics from before the run, a search for several nodes
    would read all later ones."""
    ids_in_range: _HistoryRowsIdsInRange
    """Return runs and jobs whose id is in a range and starts so, at most `limit` of each kind.
    Columns: kind, id."""
    feed: _HistoryRowsFeed
    """Return the time of the database with each event of a job, and with the state of each run that may have changed. The
    events of both kinds of jobs from `since` on (if NULL, of the last `late_s` seconds) come in the order of their
    transactions' start, after the event with this place (`at`, `kind`, `id`; if NULL, from the first). The runs are of
    these events, in `runs`, or queued since then; a row of a run has the `kind` run and no `id`. At most `most` runs come,
    the newest of all, the oldest of these first. Without events and runs there is one row, which has the time alone."""

history_rows: _HistoryRows

class _IngestJobsInsert(Named):
    def __call__(self, conn: _Conn, /, *, task_name: str | None, queue: str | None, reason: str | None, priority: int | None, args: str | None) -> Any: ...
    def script(self, *, task_name: str | None, queue: str | None, reason: str | None, priority: int | None, args: str | None) -> scripts.Script[Any]: ...

class _IngestJobsInsertMany(Named):
    def __call__(self, conn: _Conn, /, *, prefix: str | None, task_name: str | None, queue: str | None, reason: str | None, priority: int | None, args: str | None) -> None: ...
    def script(self, *, prefix: str | None, task_name: str | None, queue: str | None, reason: str | None, priority: int | None, args: str | None) -> scripts.Script[None]: ...

class _IngestJobsInsertBatch(Named):
    def __call__(self, conn: _Conn, /, *, prefix: str | None, jobs: str | None) -> list[Row]: ...
    def script(self, *, prefix: str | None, jobs: str | None) -> scripts.Script[list[Row]]: ...

class _IngestJobsInsertOnce(Named):
    def __call__(self, conn: _Conn, /, *, jobs: str | None, prefix: str | None, actor: str | None) -> Row | None: ...
    def script(self, *, jobs: str | None, prefix: str | None, actor: str | None) -> scripts.Script[Row | None]: ...

class _IngestJobsState(Named):
    def __call__(self, conn: _Conn, /, *, job: str | None) -> Row | None: ...
    def script(self, *, job: str | None) -> scripts.Script[Row | None]: ...

class _IngestJobsGet(Named):
    def __call__(self, conn: _Conn, /, *, job: str | None) -> Row | None: ...
    def script(self, *, job: str | None) -> scripts.Script[Row | None]: ...

class _IngestJobsCountByStatus(Named):
    def __call__(self, conn: _Conn, /) -> list[Row]: ...
    def script(self) -> scripts.Script[list[Row]]: ...

class _IngestJobsFind(Named):
    def __call__(self, conn: _Conn, /, *, queue: str | None, task_name: str | None, statuses: _Texts | None, lost: bool | None, at: datetime | None, ago: timedelta | None, key: str | None, before: int | None, text: str | None, limit: int | None) -> list[Row]: ...
    def script(self, *, queue: str | None, task_name: str | None, statuses: _Texts | None, lost: bool | None, at: datetime | None, ago: timedelta | None, key: str | None, before: int | None, text: str | None, limit: int | None) -> scripts.Script[list[Row]]: ...

class _IngestJobsLock(Named):
    def __call__(self, conn: _Conn, /, *, ids: _Texts | None) -> list[Row]: ...
    def script(self, *, ids: _Texts | None) -> scripts.Script[list[Row]]: ...

class _IngestJobsDelete(Named):
    def __call__(self, conn: _Conn, /, *, ids: _Texts | None) -> None: ...
    def script(self, *, ids: _Texts | None) -> scripts.Script[None]: ...

class _IngestJobsFindNodeJobs(Named):
    def __call__(self, conn: _Conn, /, *, ids: _Texts | None) -> list[Row]: ...
    def script(self, *, ids: _Texts | None) -> scripts.Script[list[Row]]: ...

class _IngestJobs:
    insert: _IngestJobsInsert
    """Queue one ingest job that has no options, for an app; return its id."""
    insert_many: _IngestJobsInsertMany
    """Queue a job of one task for each member of the JSON array `args`. The id of a job is the
    prefix and its place in the array, from 1, in twelve hexadecimal digits."""
    insert_batch: _IngestJobsInsertBatch
    """Queue the jobs of a JSON array, each an object with a member per column; ids as in
    insert_many. Returns a row for each job whose idempotency key another job has: its place,
    that job's id, and whether that job has the same task, queue and args. If one has not,
    nothing is written.
    Columns: place, id, same."""
    insert_once: _IngestJobsInsertOnce
    """Queue the one job of the JSON array `jobs`, as insert_batch does, and append its event `queued`, by
    `actor`. Returns no row if the job is queued, under the first id of `prefix`. If another job has its
    idempotency key, even past its window, returns that job, and whether it has the same task, queue and args.
    Columns: id, status, lost, same."""
    state: _IngestJobsState
    """Return how far a job is, and whether its claim is lost."""
    get: _IngestJobsGet
    """Return one ingest job with every column. Returns no row if the job does not exist."""
    count_by_status: _IngestJobsCountByStatus
    """Count all ingest jobs, by queue and status.
    Columns: queue, status, n."""
    find: _IngestJobsFind
    """List jobs for an operator, the newest first. A filter that is NULL matches every job. `before`: only jobs with a smaller
    `seq`, for the next page. `text`: part of the id, the task, a key or the error. `lost`: only running jobs whose claim is
    lost, or only the other running jobs. Reads the table once, since no index serves every filter."""
    lock: _IngestJobsLock
    """Lock these jobs, in one order, so that no two callers wait for each other. Jobs that do not
    exist are left out.
    Columns: id, status, generation, cancel_requested_at."""
    delete: _IngestJobsDelete
    """Delete the jobs with these ids that do not run."""
    find_node_jobs: _IngestJobsFindNodeJobs
    """Return which of these ids are node jobs, each with its run.
    Columns: id, run_id, status."""

ingest_jobs: _IngestJobs

class _InputAnswersSubmit(Named):
    def __call__(self, conn: _Conn, /, *, run_id: str | None, node_id: str | None, value: str | None) -> Row | None: ...
    def script(self, *, run_id: str | None, node_id: str | None, value: str | None) -> scripts.Script[Row | None]: ...

class _InputAnswersHoldNode(Named):
    def __call__(self, conn: _Conn, /, *, run_id: str | None, node_id: str | None) -> None: ...
    def script(self, *, run_id: str | None, node_id: str | None) -> scripts.Script[None]: ...

class _InputAnswersNextDue(Named):
    def __call__(self, conn: _Conn, /, *, set_aside: _Texts | None, after_s: float | None) -> Any: ...
    def script(self, *, set_aside: _Texts | None, after_s: float | None) -> scripts.Script[Any]: ...

class _InputAnswersClaim(Named):
    def __call__(self, conn: _Conn, /, *, id: str | None, after_s: float | None) -> Row | None: ...
    def script(self, *, id: str | None, after_s: float | None) -> scripts.Script[Row | None]: ...

class _InputAnswersFinish(Named):
    def __call__(self, conn: _Conn, /, *, id: str | None) -> None: ...
    def script(self, *, id: str | None) -> scripts.Script[None]: ...

class _InputAnswersRefuse(Named):
    def __call__(self, conn: _Conn, /, *, error: str | None, id: str | None) -> None: ...
    def script(self, *, error: str | None, id: str | None) -> scripts.Script[None]: ...

class _InputAnswersPostpone(Named):
    def __call__(self, conn: _Conn, /, *, error: str | None, after_s: float | None, id: str | None) -> None: ...
    def script(self, *, error: str | None, after_s: float | None, id: str | None) -> scripts.Script[None]: ...

class _InputAnswersCountFailure(Named):
    def __call__(self, conn: _Conn, /, *, error: str | None, after_s: float | None, id: str | None) -> Any: ...
    def script(self, *, error: str | None, after_s: float | None, id: str | None) -> scripts.Script[Any]: ...

class _InputAnswersCompleteNode(Named):
    def __call__(self, conn: _Conn, /, *, result: str | None, job: str | None, by: str | None) -> Row | None: ...
    def script(self, *, result: str | None, job: str | None, by: str | None) -> scripts.Script[Row | None]: ...

class _InputAnswers:
    submit: _InputAnswersSubmit
    """Store an answer to a node and return its row. Returns no row if another answer to the node is in flight.
    Columns: id, run_id, node_id, value, status, error, claimed_at, created_at, processed_at, attempts, available_at."""
    hold_node: _InputAnswersHoldNode
    """Keep other transactions from ending the wait of an input node by its time-out until this one
    ends. The function locks the row, so that a role that submits answers needs no right to nodes."""
    next_due: _InputAnswersNextDue
    """Return the id of the oldest answer that is due and not locked, without those of `set_aside`. An
    answer that is `processing` for longer than `after_s` seconds is due again. So is an answer whose
    `claimed_at` is in the future, which no claim wrote and which would never become due. Each half
    walks its index, since sorting all waiting answers for each of them takes hours for 20,000."""
    claim: _InputAnswersClaim
    """Claim an answer that is still due, as in `next_due`, count the attempt and return the row, which
    is locked. Returns no row if another transaction has it, or it is not due any more.
    Columns: id, run_id, node_id, value, status, error, claimed_at, created_at, processed_at, attempts, available_at."""
    finish: _InputAnswersFinish
    """Record that the node of an answer was completed with it."""
    refuse: _InputAnswersRefuse
    """Record why an answer cannot be taken."""
    postpone: _InputAnswersPostpone
    """Make a claimed answer due again later, without counting its claim as an attempt."""
    count_failure: _InputAnswersCountFailure
    """Count a failed attempt, make the answer due again later, and return how many attempts failed.
    Returns no row if the answer is over."""
    complete_node: _InputAnswersCompleteNode
    """Complete a node that waits for an answer, with the answer or the default. Returns no row if it
    does not wait. `by` is the origin of the value in the event: `input` for an answer, `timeout` for
    the default."""

input_answers: _InputAnswers

class _InputTimeoutsNextOverdue(Named):
    def __call__(self, conn: _Conn, /, *, set_aside: _Texts | None) -> Any: ...
    def script(self, *, set_aside: _Texts | None) -> scripts.Script[Any]: ...

class _InputTimeoutsLockWait(Named):
    def __call__(self, conn: _Conn, /, *, job: str | None) -> Row | None: ...
    def script(self, *, job: str | None) -> scripts.Script[Row | None]: ...

class _InputTimeoutsLockJobIfFree(Named):
    def __call__(self, conn: _Conn, /, *, job: str | None) -> Row | None: ...
    def script(self, *, job: str | None) -> scripts.Script[Row | None]: ...

class _InputTimeoutsOverdue(Named):
    def __call__(self, conn: _Conn, /, *, free: bool | None, job: str | None) -> Row | None: ...
    def script(self, *, free: bool | None, job: str | None) -> scripts.Script[Row | None]: ...

class _InputTimeoutsEndWait(Named):
    def __call__(self, conn: _Conn, /, *, job: str | None) -> None: ...
    def script(self, *, job: str | None) -> scripts.Script[None]: ...

class _InputTimeoutsExtendWait(Named):
    def __call__(self, conn: _Conn, /, *, more_s: float | None, job: str | None) -> None: ...
    def script(self, *, more_s: float | None, job: str | None) -> scripts.Script[None]: ...

class _InputTimeoutsFailNode(Named):
    def __call__(self, conn: _Conn, /, *, error: str | None, job: str | None) -> Row | None: ...
    def script(self, *, error: str | None, job: str | None) -> scripts.Script[Row | None]: ...

class _InputTimeouts:
    next_overdue: _InputTimeoutsNextOverdue
    """Return the job of the oldest wait that is over and not locked, without those of
    `set_aside`."""
    lock_wait: _InputTimeoutsLockWait
    """Lock the wait of a job. Returns no row if it is not over, or another transaction holds it.
    Columns: ."""
    lock_job_if_free: _InputTimeoutsLockJobIfFree
    """Lock the row of a job. Returns no row if another transaction has it locked, or the job does not exist.
    Columns: ."""
    overdue: _InputTimeoutsOverdue
    """Return the job of a wait, with NULL in each column if the job is gone. `answered`: an answer is
    stored and not taken yet, or another transaction has the row of the job locked (`free` is false)
    and may be submitting one. `over`: the job does not wait, waits for a run, or this is a later
    wait."""
    end_wait: _InputTimeoutsEndWait
    """Forget the wait of a job."""
    extend_wait: _InputTimeoutsExtendWait
    """Let the wait of a job end `more_s` seconds from now."""
    fail_node: _InputTimeoutsFailNode
    """Fail a node that waited too long for its answer. Returns no row if it does not wait."""

input_timeouts: _InputTimeouts

class _InstalledObjectsRecorded(Named):
    def __call__(self, conn: _Conn, /) -> list[Row]: ...
    def script(self) -> scripts.Script[list[Row]]: ...

class _InstalledObjectsRecord(Named):
    def __call__(self, conn: _Conn, /, *, part: str | None, checksum: str | None, package_version: str | None, objects: str | None) -> None: ...
    def script(self, *, part: str | None, checksum: str | None, package_version: str | None, objects: str | None) -> scripts.Script[None]: ...

class _InstalledObjectsForget(Named):
    def __call__(self, conn: _Conn, /) -> None: ...
    def script(self) -> scripts.Script[None]: ...

class _InstalledObjectsSettings(Named):
    def __call__(self, conn: _Conn, /) -> None: ...
    def script(self) -> scripts.Script[None]: ...

class _InstalledObjectsLimitLockWait(Named):
    def __call__(self, conn: _Conn, /) -> None: ...
    def script(self) -> scripts.Script[None]: ...

class _InstalledObjectsFunctions(Named):
    def __call__(self, conn: _Conn, /, *, names: _Texts | None) -> list[Row]: ...
    def script(self, *, names: _Texts | None) -> scripts.Script[list[Row]]: ...

class _InstalledObjectsTriggers(Named):
    def __call__(self, conn: _Conn, /, *, names: _Texts | None) -> list[Row]: ...
    def script(self, *, names: _Texts | None) -> scripts.Script[list[Row]]: ...

class _InstalledObjects:
    recorded: _InstalledObjectsRecorded
    """Return what is installed, one row a part.
    Columns: part, checksum, package_version, objects."""
    record: _InstalledObjectsRecord
    """Record that a part is installed; replaces its earlier record."""
    forget: _InstalledObjectsForget
    """Delete the record of every part."""
    settings: _InstalledObjectsSettings
    """Prepare a transaction that creates functions: they may call each other in any order, and `SET
    search_path FROM CURRENT` stores this path with the functions that run as their owner."""
    limit_lock_wait: _InstalledObjectsLimitLockWait
    """Limit the transaction's next statements to half of the server's deadlock_timeout, 100 ms at the
    most: every writer waits behind a waiting lock, so wait briefly and rarely."""
    functions: _InstalledObjectsFunctions
    """Return the functions of these names, each with a hash of its definition. The source and the
    settings are hashed, and not pg_get_functiondef(), whose form differs between servers.
    Columns: name, hash."""
    triggers: _InstalledObjectsTriggers
    """Return the triggers of these names, each with a hash of its definition.
    Columns: name, hash."""

installed_objects: _InstalledObjects

class _JobEventsAdd(Named):
    def __call__(self, conn: _Conn, /, *, job: str | None, attempt: int | None, event_type: str | None, claim_no: int | None, worker: str | None, host: str | None, queue: str | None, elapsed_s: float | None, error: str | None, detail: str | None) -> Row | None: ...
    def script(self, *, job: str | None, attempt: int | None, event_type: str | None, claim_no: int | None, worker: str | None, host: str | None, queue: str | None, elapsed_s: float | None, error: str | None, detail: str | None) -> scripts.Script[Row | None]: ...

class _JobEventsNoteLoggedError(Named):
    def __call__(self, conn: _Conn, /, *, error: str | None, job: str | None, worker: str | None, claim_no: int | None) -> None: ...
    def script(self, *, error: str | None, job: str | None, worker: str | None, claim_no: int | None) -> scripts.Script[None]: ...

class _JobEvents:
    add: Mapping[str, _JobEventsAdd]
    """Append an event to the history of a job, of a node in which an attempt is a smallint. Returns no
    row if the run of the node is gone.
    Columns: id."""
    note_logged_error: _JobEventsNoteLoggedError
    """Append the error that the handler of an ingest job logged, unless the claim is lost."""

job_events: _JobEvents

class _JobPartsAdd(Named):
    def __call__(self, conn: _Conn, /, *, job: str | None, worker: str | None, claim: int | None, first: int | None, names: _Texts | None, parts: _Texts | None) -> Row: ...
    def script(self, *, job: str | None, worker: str | None, claim: int | None, first: int | None, names: _Texts | None, parts: _Texts | None) -> scripts.Script[Row]: ...

class _JobPartsBehind(Named):
    def __call__(self, conn: _Conn, /, *, job: str | None, claim: int | None, seq: int | None, name: str | None, limit: int | None, bytes: int | None) -> list[Row]: ...
    def script(self, *, job: str | None, claim: int | None, seq: int | None, name: str | None, limit: int | None, bytes: int | None) -> scripts.Script[list[Row]]: ...

class _JobPartsJobOfNode(Named):
    def __call__(self, conn: _Conn, /, *, run_id: str | None, node_id: str | None) -> Any: ...
    def script(self, *, run_id: str | None, node_id: str | None) -> scripts.Script[Any]: ...

class _JobPartsStreamingNodes(Named):
    def __call__(self, conn: _Conn, /, *, run_id: str | None, live: bool | None, nodes: _Texts | None) -> list[Row]: ...
    def script(self, *, run_id: str | None, live: bool | None, nodes: _Texts | None) -> scripts.Script[list[Row]]: ...

class _JobParts:
    add: Mapping[str, _JobPartsAdd]
    """Add parts, one element of each array a part, from number `first` on, and wake the readers. Return
    whether the claim holds, and whether the earlier parts are stored; if not, no part is added. The
    first part of a claim deletes those of all earlier claims but the last two that have any, so a job
    that runs again and again stores no more than three attempts.
    Columns: held, follows, notified."""
    behind: _JobPartsBehind
    """Return the next parts of a job behind a claim and number, of a name if it is given, with the job's status and
    claim and the place of its last part, as of the same snapshot. Parts beyond `bytes` are left out; `found`
    counts them too. Returns one row without a part if there is none, and no row if the job does not exist.
    Columns: status, job_claim, last_claim, last_seq, claim_no, seq, name, part, created_at, found."""
    job_of_node: _JobPartsJobOfNode
    """Return the id of the job of a node; no row: the run or its node does not exist yet."""
    streaming_nodes: _JobPartsStreamingNodes
    """Return the nodes of a run that have streamed, with the place of the last part of each. `live`: only
    nodes that have not ended, or ended in the last 10 s. Only `nodes`, unless it is NULL.
    Columns: job_id, node_id, claim_no, seq."""

job_parts: _JobParts

class _JobStepsBegin(Named):
    def __call__(self, conn: _Conn, /, *, job: str | None, kind: str | None, name: str | None, key: str | None, worker: str | None, claim: int | None, arguments_hash: str | None, arguments: str | None) -> Row: ...
    def script(self, *, job: str | None, kind: str | None, name: str | None, key: str | None, worker: str | None, claim: int | None, arguments_hash: str | None, arguments: str | None) -> scripts.Script[Row]: ...

class _JobStepsEnd(Named):
    def __call__(self, conn: _Conn, /, *, job: str | None, worker: str | None, claim: int | None, state: str | None, output: str | None, error: str | None, position: int | None, kind: str | None, name: str | None, key: str | None) -> Row | None: ...
    def script(self, *, job: str | None, worker: str | None, claim: int | None, state: str | None, output: str | None, error: str | None, position: int | None, kind: str | None, name: str | None, key: str | None) -> scripts.Script[Row | None]: ...

class _JobStepsStoreCursors(Named):
    def __call__(self, conn: _Conn, /, *, jobs: _Texts | None, claims: _Ints | None, workers: _Texts | None, names: _Texts | None, keys: _Texts | None, positions: _Ints | None) -> None: ...
    def script(self, *, jobs: _Texts | None, claims: _Ints | None, workers: _Texts | None, names: _Texts | None, keys: _Texts | None, positions: _Ints | None) -> scripts.Script[None]: ...

class _JobStepsOfJob(Named):
    def __call__(self, conn: _Conn, /, *, table: str | None, job: str | None) -> list[Row]: ...
    def script(self, *, table: str | None, job: str | None) -> scripts.Script[list[Row]]: ...

class _JobStepsForgetFrom(Named):
    def __call__(self, conn: _Conn, /, *, table: str | None, job: str | None, name: str | None) -> Row: ...
    def script(self, *, table: str | None, job: str | None, name: str | None) -> scripts.Script[Row]: ...

class _JobSteps:
    begin: Mapping[str, _JobStepsBegin]
    """Begin a step of a claimed job, or find that it is done. Returns one row: the step as it was before
    (`state` is NULL if it is new), `attempts` if it begins now, and whether the claim holds. A step
    that is done is only read, which locks nothing. A cursor whose arguments differ does not begin.
    Columns: state, output, arguments_hash, arguments, position, attempts, held."""
    end: Mapping[str, _JobStepsEnd]
    """Record how a step ended that this claim has begun, and return its output as it is stored. Returns
    no row if the claim is lost, or another one has begun the step again.
    Columns: output."""
    store_cursors: Mapping[str, _JobStepsStoreCursors]
    """Store how far cursors are, one element of each array a cursor. Cursors of a lost claim are left out."""
    of_job: _JobStepsOfJob
    """Return the steps of a job in the order in which they began first.
    Columns: kind, name, key, state, output, error, arguments, position, claim_no, attempts, crashes, due_at, started_at, ended_at."""
    forget_from: _JobStepsForgetFrom
    """Delete the first step of this name of a job and all steps that began after it first; return how
    many.
    Columns: n."""

job_steps: _JobSteps

class _LogsWrite(Named):
    def __call__(self, conn: _Conn, /, *, jobs: _Texts | None, claims: _Ints | None, heads: _Texts | None, tails: _Texts | None, cuts: _Ints | None) -> int: ...
    def script(self, *, jobs: _Texts | None, claims: _Ints | None, heads: _Texts | None, tails: _Texts | None, cuts: _Ints | None) -> scripts.Script[None]: ...

class _LogsPrune(Named):
    def __call__(self, conn: _Conn, /, *, days: float | None, batch: int | None) -> int: ...
    def script(self, *, days: float | None, batch: int | None) -> scripts.Script[None]: ...

class _LogsOfJobs(Named):
    def __call__(self, conn: _Conn, /, *, jobs: _Texts | None, table: str | None) -> list[Row]: ...
    def script(self, *, jobs: _Texts | None, table: str | None) -> scripts.Script[list[Row]]: ...

class _LogsNodesThatLogged(Named):
    def __call__(self, conn: _Conn, /, *, run_id: str | None, since: datetime | None, nodes: _Texts | None) -> list[Row]: ...
    def script(self, *, run_id: str | None, since: datetime | None, nodes: _Texts | None) -> scripts.Script[list[Row]]: ...

class _Logs:
    write: Mapping[str, _LogsWrite]
    """Store the logs of several attempts, one element of each array an attempt. Jobs that are gone, or
    that were claimed again, are left out. A head that is NULL is not written again."""
    prune: _LogsPrune
    """Delete up to `batch` logs of attempts that are older than `days` days."""
    of_jobs: _LogsOfJobs
    """Return the logs of these jobs' attempts, of one job family.
    Columns: job_id, claim_no, head, tail, cut_bytes, updated_at."""
    nodes_that_logged: _LogsNodesThatLogged
    """Return which nodes of a run wrote to a log since a time, the last to write last. If `since` is
    NULL, the time does not matter; if `nodes` is NULL, all nodes count. `of_jobs` reads the logs,
    which may be large.
    Columns: node_id, queue, job_id, updated_at."""

logs: _Logs

class _ManualChangesComplete(Named):
    def __call__(self, conn: _Conn, /, *, job: str | None, seconds: float | None, result: str | None) -> Row | None: ...
    def script(self, *, job: str | None, seconds: float | None, result: str | None) -> scripts.Script[Row | None]: ...

class _ManualChangesFail(Named):
    def __call__(self, conn: _Conn, /, *, job: str | None, error: str | None, seconds: float | None) -> Row | None: ...
    def script(self, *, job: str | None, error: str | None, seconds: float | None) -> scripts.Script[Row | None]: ...

class _ManualChangesParkNode(Named):
    def __call__(self, conn: _Conn, /, *, job: str | None) -> Row | None: ...
    def script(self, *, job: str | None) -> scripts.Script[Row | None]: ...

class _ManualChanges:
    complete: Mapping[str, _ManualChangesComplete]
    """Complete a job that is not over, whichever worker has it. A trigger records the event of an ingest job that did not run: it
    is locked first, so that it is not handed back meanwhile. `rss`: the peak memory of a node. Returns no row if it is over,
    or the job does not exist."""
    fail: Mapping[str, _ManualChangesFail]
    """Fail a job as `complete` completes it."""
    park_node: _ManualChangesParkNode
    """Let a node that is not over wait for an answer, whichever worker has it. Returns no row if it is
    over, waits already, or the job does not exist."""

manual_changes: _ManualChanges

class _MapsOpenMap(Named):
    def __call__(self, conn: _Conn, /, *, run_id: str | None, map: str | None, items: str | None, at_once: int | None, refill: int | None, may_fail: int | None, nodes: int | None, root: str | None) -> Any: ...
    def script(self, *, run_id: str | None, map: str | None, items: str | None, at_once: int | None, refill: int | None, may_fail: int | None, nodes: int | None, root: str | None) -> scripts.Script[Any]: ...

class _MapsStep(Named):
    def __call__(self, conn: _Conn, /, *, run_id: str | None, map: str | None, done: _Texts | None, failed: str | None) -> Any: ...
    def script(self, *, run_id: str | None, map: str | None, done: _Texts | None, failed: str | None) -> scripts.Script[Any]: ...

class _MapsClose(Named):
    def __call__(self, conn: _Conn, /, *, count: int | None, key: str | None, run_id: str | None, map: str | None) -> None: ...
    def script(self, *, count: int | None, key: str | None, run_id: str | None, map: str | None) -> scripts.Script[None]: ...

class _MapsComplete(Named):
    def __call__(self, conn: _Conn, /, *, run_id: str | None, map: str | None, result: str | None, path: _Texts | None, limit: int | None) -> Any: ...
    def script(self, *, run_id: str | None, map: str | None, result: str | None, path: _Texts | None, limit: int | None) -> scripts.Script[Any]: ...

class _MapsFail(Named):
    def __call__(self, conn: _Conn, /, *, error: str | None, run_id: str | None, map: str | None) -> None: ...
    def script(self, *, error: str | None, run_id: str | None, map: str | None) -> scripts.Script[None]: ...

class _MapsNodes(Named):
    def __call__(self, conn: _Conn, /, *, run_id: str | None, maps: _Texts | None) -> Any: ...
    def script(self, *, run_id: str | None, maps: _Texts | None) -> scripts.Script[Any]: ...

class _MapsGeneration(Named):
    def __call__(self, conn: _Conn, /, *, run_id: str | None, map: str | None) -> Any: ...
    def script(self, *, run_id: str | None, map: str | None) -> scripts.Script[Any]: ...

class _MapsOpened(Named):
    def __call__(self, conn: _Conn, /, *, run_id: str | None, map: str | None) -> list[Row]: ...
    def script(self, *, run_id: str | None, map: str | None) -> scripts.Script[list[Row]]: ...

class _MapsItems(Named):
    def __call__(self, conn: _Conn, /, *, keys: _Texts | None, run_id: str | None, map: str | None) -> list[Row]: ...
    def script(self, *, keys: _Texts | None, run_id: str | None, map: str | None) -> scripts.Script[list[Row]]: ...

class _MapsKeysLike(Named):
    def __call__(self, conn: _Conn, /, *, run_id: str | None, map: str | None, key: str | None) -> list[Row]: ...
    def script(self, *, run_id: str | None, map: str | None, key: str | None) -> scripts.Script[list[Row]]: ...

class _MapsNoteErrors(Named):
    def __call__(self, conn: _Conn, /, *, errors: str | None, run_id: str | None, map: str | None) -> None: ...
    def script(self, *, errors: str | None, run_id: str | None, map: str | None) -> scripts.Script[None]: ...

class _MapsFailedItems(Named):
    def __call__(self, conn: _Conn, /, *, run_id: str | None, map: str | None, limit: int | None) -> list[Row]: ...
    def script(self, *, run_id: str | None, map: str | None, limit: int | None) -> scripts.Script[list[Row]]: ...

class _MapsReopenItem(Named):
    def __call__(self, conn: _Conn, /, *, run_id: str | None, map: str | None, key: str | None) -> None: ...
    def script(self, *, run_id: str | None, map: str | None, key: str | None) -> scripts.Script[None]: ...

class _MapsDropNodes(Named):
    def __call__(self, conn: _Conn, /, *, run_id: str | None, inside: str | None) -> None: ...
    def script(self, *, run_id: str | None, inside: str | None) -> scripts.Script[None]: ...

class _MapsDrop(Named):
    def __call__(self, conn: _Conn, /, *, run_id: str | None, map: str | None, inside: str | None) -> None: ...
    def script(self, *, run_id: str | None, map: str | None, inside: str | None) -> scripts.Script[None]: ...

class _MapsRunningInside(Named):
    def __call__(self, conn: _Conn, /, *, run_id: str | None, inside: str | None) -> Any: ...
    def script(self, *, run_id: str | None, inside: str | None) -> scripts.Script[Any]: ...

class _Maps:
    open_map: _MapsOpenMap
    """Seal the items of a map. Return `sealed`, `again` (an earlier generation of the run sealed them;
    they are counted again) or `open` (this generation opened the map before). `items`: a JSON array
    of objects with `key` and `item`. `nodes`: how many nodes the items have. `root`: the map of the
    definition around it."""
    step: _MapsStep
    """Count items that have ended and open the next ones; return the counters and the opened items."""
    close: _MapsClose
    """Let the last opened items wait to be opened again, from this key on."""
    complete: _MapsComplete
    """Complete the node of a map; return the size of its output in bytes. Nothing is written past `limit`.
    `result`, `path`: see `graph.Map`."""
    fail: _MapsFail
    """Fail the node of a map, if it is open."""
    nodes: _MapsNodes
    """Return how many nodes the items of these maps have, including the nodes of the maps inside the items."""
    generation: _MapsGeneration
    """Return the generation in which a map was opened last. Returns no row if it was not opened."""
    opened: _MapsOpened
    """Return the items of a map that were opened and have not ended.
    Columns: key, item, error."""
    items: _MapsItems
    """Return the items of a map with these keys. LIMIT 1 forces one look-up per key; a join may read the whole map.
    Columns: key, item, error."""
    keys_like: _MapsKeysLike
    """Return keys of a map, or of all maps of a run, that are about as long as `key`, for a hint.
    Columns: key."""
    note_errors: _MapsNoteErrors
    """Store why items fail that wait for their open nodes. It updates by ctid, as queue_workflows_step_map.
    `errors` has them by key. An item that has an error keeps it; one that has ended is left alone."""
    failed_items: _MapsFailedItems
    """Return the first items of a map that failed, with their errors.
    Columns: key, error."""
    reopen_item: _MapsReopenItem
    """Let an item wait again.
    The map counts its items again in the next generation."""
    drop_nodes: _MapsDropNodes
    """Delete the nodes of the items of a map."""
    drop: _MapsDrop
    """Delete a map with its items, and the maps inside its items. The map of the definition around it counts their nodes no
    more."""
    running_inside: _MapsRunningInside
    """Return a node of an item of a map that runs."""

maps: _Maps

class _MetricsCountEvents(Named):
    def __call__(self, conn: _Conn, /, *, most: int | None) -> Any: ...
    def script(self, *, most: int | None) -> scripts.Script[Any]: ...

class _MetricsProgress(Named):
    def __call__(self, conn: _Conn, /) -> Row: ...
    def script(self) -> scripts.Script[Row]: ...

class _MetricsBounds(Named):
    def __call__(self, conn: _Conn, /) -> Any: ...
    def script(self) -> scripts.Script[Any]: ...

class _MetricsTotals(Named):
    def __call__(self, conn: _Conn, /, *, limit: int | None) -> list[Row]: ...
    def script(self, *, limit: int | None) -> scripts.Script[list[Row]]: ...

class _MetricsByPages(Named):
    def __call__(self, conn: _Conn, /) -> None: ...
    def script(self) -> scripts.Script[None]: ...

class _MetricsWaiting(Named):
    def __call__(self, conn: _Conn, /) -> list[Row]: ...
    def script(self) -> scripts.Script[list[Row]]: ...

class _MetricsOldestNodes(Named):
    def __call__(self, conn: _Conn, /) -> list[Row]: ...
    def script(self) -> scripts.Script[list[Row]]: ...

class _MetricsOldestIngest(Named):
    def __call__(self, conn: _Conn, /) -> list[Row]: ...
    def script(self) -> scripts.Script[list[Row]]: ...

class _MetricsRunning(Named):
    def __call__(self, conn: _Conn, /) -> list[Row]: ...
    def script(self) -> scripts.Script[list[Row]]: ...

class _MetricsAwaiting(Named):
    def __call__(self, conn: _Conn, /) -> list[Row]: ...
    def script(self) -> scripts.Script[list[Row]]: ...

class _MetricsRuns(Named):
    def __call__(self, conn: _Conn, /) -> list[Row]: ...
    def script(self) -> scripts.Script[list[Row]]: ...

class _MetricsWorkers(Named):
    def __call__(self, conn: _Conn, /, *, stale_s: float | None) -> list[Row]: ...
    def script(self, *, stale_s: float | None) -> scripts.Script[list[Row]]: ...

class _MetricsSchedules(Named):
    def __call__(self, conn: _Conn, /, *, limit: int | None) -> list[Row]: ...
    def script(self, *, limit: int | None) -> scripts.Script[list[Row]]: ...

class _MetricsMachines(Named):
    def __call__(self, conn: _Conn, /, *, limit: int | None) -> list[Row]: ...
    def script(self, *, limit: int | None) -> scripts.Script[list[Row]]: ...

class _Metrics:
    count_events: _MetricsCountEvents
    """Count the events of the next `most` transactions that are not counted yet; return whether more
    are left, or NULL while another transaction counts."""
    progress: _MetricsProgress
    """Return how long ago events were last counted, NULL if never, how many transactions the server
    has made since, and whether this role and server may write the totals.
    Columns: counted_s, behind, may_count."""
    bounds: _MetricsBounds
    """Return the upper bounds of the buckets of histograms."""
    totals: _MetricsTotals
    """Return the totals that are counted so far.
    Columns: metric, name, label, bucket, n, seconds."""
    by_pages: Mapping[str, _MetricsByPages]
    """Let the planner read the pages of a table once each for the rest of this transaction, if it has
    no statistics. It would fetch each queued row by the index alone, which takes twice as long
    before the first VACUUM."""
    waiting: Mapping[str, _MetricsWaiting]
    """Count the queued jobs of each queue by the reason that holds them back; `ready` jobs have none.
    Each part walks an index that has only such jobs.
    Columns: queue, why, n."""
    oldest_nodes: _MetricsOldestNodes
    """For each queue, return the age of its oldest node job that is not blocked. The statement steps from version to version
    and from priority to priority of each queue, however many jobs wait. Jobs without a version come last in the index.
    Columns: queue, age_s."""
    oldest_ingest: _MetricsOldestIngest
    """Return for each queue the age of the oldest ingest job that is not blocked. It reads one job for
    each priority of a queue, however many jobs wait.
    Columns: queue, age_s."""
    running: Mapping[str, _MetricsRunning]
    """Count the running jobs of each queue, and those whose lease has lapsed.
    Columns: queue, n, lapsed."""
    awaiting: _MetricsAwaiting
    """Count the nodes that wait for an answer, by queue.
    Columns: queue, n."""
    runs: _MetricsRuns
    """Count the runs that the engine has not ended, by status.
    Columns: status, n."""
    workers: _MetricsWorkers
    """Count the workers of each queue by state, with their slots: for each as many as its host reported
    last for its queue. One that was not seen for `stale_s` seconds is dead. Stopped ones are left
    out, and dead ones after a day.
    Columns: queue, state, n, slots."""
    schedules: _MetricsSchedules
    """Return the schedules that fire, the latest first: for how long each is overdue, whether an error
    keeps it from firing, and when it last fired.
    Columns: name, late_s, has_error, last_fire."""
    machines: _MetricsMachines
    """Return the last hardware sample of each host, unless it is over a minute old. A ring holds one
    sample in each slot, so only the slots of the last minute are read.
    Columns: host_label, sample."""

metrics: _Metrics

class _MigrationsTryLock(Named):
    def __call__(self, conn: _Conn, /, *, is_local: bool | None, ledger: str | None) -> Any: ...
    def script(self, *, is_local: bool | None, ledger: str | None) -> scripts.Script[Any]: ...

class _MigrationsLockHolders(Named):
    def __call__(self, conn: _Conn, /, *, ledger: str | None) -> list[Row]: ...
    def script(self, *, ledger: str | None) -> scripts.Script[list[Row]]: ...

class _MigrationsUnlock(Named):
    def __call__(self, conn: _Conn, /) -> None: ...
    def script(self) -> scripts.Script[None]: ...

class _MigrationsLedgerIsWhole(Named):
    def __call__(self, conn: _Conn, /, *, ledger: str | None) -> Any: ...
    def script(self, *, ledger: str | None) -> scripts.Script[Any]: ...

class _MigrationsOfOthers(Named):
    def __call__(self, conn: _Conn, /) -> list[Row]: ...
    def script(self) -> scripts.Script[list[Row]]: ...

class _Migrations:
    try_lock: _MigrationsTryLock
    """Take the advisory lock of a chain if it is free, for this session or for this transaction
    (`is_local`); return whether it is ours."""
    lock_holders: _MigrationsLockHolders
    """Return the sessions of this database that hold the advisory lock of a chain.
    Columns: pid, usename."""
    unlock: _MigrationsUnlock
    """Release every advisory lock of this session."""
    ledger_is_whole: _MigrationsLedgerIsWhole
    """Return whether a ledger exists and has every column that this code reads."""
    of_others: _MigrationsOfOthers
    """Return the versions above 12 in the ledger of our own chain, lowest first, if other code has
    applied the first of them. Ours records a checksum; the ledger of 0.3.0 has no such column.
    Columns: version."""

migrations: _Migrations

class _ModelsPublishSizes(Named):
    def __call__(self, conn: _Conn, /, *, host: str | None, models: _Texts | None, sizes: _Floats | None) -> None: ...
    def script(self, *, host: str | None, models: _Texts | None, sizes: _Floats | None) -> scripts.Script[None]: ...

class _ModelsLearnLoad(Named):
    def __call__(self, conn: _Conn, /, *, host: str | None, model: str | None, seconds: float | None) -> None: ...
    def script(self, *, host: str | None, model: str | None, seconds: float | None) -> scripts.Script[None]: ...

class _ModelsPrune(Named):
    def __call__(self, conn: _Conn, /) -> int: ...
    def script(self) -> scripts.Script[None]: ...

class _ModelsUnserved(Named):
    def __call__(self, conn: _Conn, /) -> list[Row]: ...
    def script(self) -> scripts.Script[list[Row]]: ...

class _ModelsFlag(Named):
    def __call__(self, conn: _Conn, /, *, model: str | None, reason: str | None, detail: str | None) -> int: ...
    def script(self, *, model: str | None, reason: str | None, detail: str | None) -> scripts.Script[None]: ...

class _ModelsUnflag(Named):
    def __call__(self, conn: _Conn, /, *, model: str | None) -> int: ...
    def script(self, *, model: str | None) -> scripts.Script[None]: ...

class _ModelsLogForModel(Named):
    def __call__(self, conn: _Conn, /, *, event: str | None, detail: str | None, reason: str | None, model: str | None) -> None: ...
    def script(self, *, event: str | None, detail: str | None, reason: str | None, model: str | None) -> scripts.Script[None]: ...

class _ModelsLogWithoutModel(Named):
    def __call__(self, conn: _Conn, /, *, event: str | None, detail: str | None, reason: str | None) -> None: ...
    def script(self, *, event: str | None, detail: str | None, reason: str | None) -> scripts.Script[None]: ...

class _ModelsFlagged(Named):
    def __call__(self, conn: _Conn, /) -> list[Row]: ...
    def script(self) -> scripts.Script[list[Row]]: ...

class _ModelsRequest(Named):
    def __call__(self, conn: _Conn, /, *, host: str | None, worker: str | None, action: str | None, model: str | None, requested_by: str | None) -> Row: ...
    def script(self, *, host: str | None, worker: str | None, action: str | None, model: str | None, requested_by: str | None) -> scripts.Script[Row]: ...

class _ModelsNewestRequest(Named):
    def __call__(self, conn: _Conn, /, *, worker: str | None, host: str | None, after: int | None) -> Row | None: ...
    def script(self, *, worker: str | None, host: str | None, after: int | None) -> scripts.Script[Row | None]: ...

class _ModelsOnWorkers(Named):
    def __call__(self, conn: _Conn, /, *, stale_s: float | None, host: str | None) -> list[Row]: ...
    def script(self, *, stale_s: float | None, host: str | None) -> scripts.Script[list[Row]]: ...

class _Models:
    publish_sizes: _ModelsPublishSizes
    """Write how much GPU memory each model needs, as a host registers it. Rows that would not
    change are not written."""
    learn_load: _ModelsLearnLoad
    """Let the moving average of how long a host loads a model follow one more load."""
    prune: _ModelsPrune
    """Delete measured times that are older than 30 days, of hosts without a worker."""
    unserved: _ModelsUnserved
    """Return the models ('': no model) that have waiting gpu jobs and no live worker to take
    them, or that are flagged so. `reason` is NULL if a worker can take them; `flagged` is the
    reason of the flag, or NULL.
    Columns: model, reason, detail, flagged."""
    flag: _ModelsFlag
    """Flag a model as one that no live worker can take. No row is written if the flag is there
    already."""
    unflag: _ModelsUnflag
    """Delete the flag of a model."""
    log_for_model: _ModelsLogForModel
    """Write an event into the history of the first 100 waiting jobs of a model. BETWEEN keeps the
    walk in the order of the claim's index."""
    log_without_model: _ModelsLogWithoutModel
    """Write an event into the history of the first 100 waiting gpu jobs that require no model."""
    flagged: _ModelsFlagged
    """Return the flagged models that still no live worker takes, with the present reason and the number
    of waiting jobs of each, up to 10,000. The model NULL stands for jobs without a model.
    Columns: model, reason, detail, since, jobs."""
    request: _ModelsRequest
    """Write an operator's request to load or unload a model, for all workers of a host (worker
    '') or for one; return the row. A trigger wakes the workers.
    Columns: host_label, worker_id, action, model, requested_by, request_no, requested_at."""
    newest_request: _ModelsNewestRequest
    """Return the newest request for a worker past number `after`, and the stop policy by which its
    queue is OFF now, NULL if it is on. A request that is older than the worker was meant for another
    process. Returns no row if there is none.
    Columns: host_label, worker_id, action, model, requested_by, request_no, requested_at, off_policy."""
    on_workers: _ModelsOnWorkers
    """Return the gpu workers seen within a day, of one host, or of all if NULL: the model and the
    request as each reported them, the models that its host knows, and its host's GPUs in the latest
    sample within a minute (else NULL). One that was not seen for `stale_s` seconds is dead.
    Columns: worker_id, host_label, pid, state, job_ids, card, model, request, last_seen, age_s, known_models, gpus."""

models: _Models

class _NodesEnqueue(Named):
    def __call__(self, conn: _Conn, /, *, node_id: str | None, node_module: str | None, queue: str | None, required_model: str | None, inputs: str | None, priority: int | None, pipeline_name: str | None, run_id: str | None) -> Row | None: ...
    def script(self, *, node_id: str | None, node_module: str | None, queue: str | None, required_model: str | None, inputs: str | None, priority: int | None, pipeline_name: str | None, run_id: str | None) -> scripts.Script[Row | None]: ...

class _NodesSameNode(Named):
    def __call__(self, conn: _Conn, /, *, node_module: str | None, queue: str | None, required_model: str | None, inputs: str | None, pipeline_name: str | None, run_id: str | None, node_id: str | None) -> Row | None: ...
    def script(self, *, node_module: str | None, queue: str | None, required_model: str | None, inputs: str | None, pipeline_name: str | None, run_id: str | None, node_id: str | None) -> scripts.Script[Row | None]: ...

class _NodesInsertPlanned(Named):
    def __call__(self, conn: _Conn, /, *, run_id: str | None, nodes: str | None) -> Any: ...
    def script(self, *, run_id: str | None, nodes: str | None) -> scripts.Script[Any]: ...

class _NodesGet(Named):
    def __call__(self, conn: _Conn, /, *, job: str | None) -> Row | None: ...
    def script(self, *, job: str | None) -> scripts.Script[Row | None]: ...

class _NodesGetByNode(Named):
    def __call__(self, conn: _Conn, /, *, run_id: str | None, node_id: str | None) -> Row | None: ...
    def script(self, *, run_id: str | None, node_id: str | None) -> scripts.Script[Row | None]: ...

class _NodesOfRun(Named):
    def __call__(self, conn: _Conn, /, *, run_id: str | None) -> list[Row]: ...
    def script(self, *, run_id: str | None) -> scripts.Script[list[Row]]: ...

class _NodesAmong(Named):
    def __call__(self, conn: _Conn, /, *, nodes: _Texts | None, run_id: str | None, statuses: _Texts | None) -> list[Any]: ...
    def script(self, *, nodes: _Texts | None, run_id: str | None, statuses: _Texts | None) -> scripts.Script[list[Any]]: ...

class _NodesAllDone(Named):
    def __call__(self, conn: _Conn, /, *, run_id: str | None) -> list[Any]: ...
    def script(self, *, run_id: str | None) -> scripts.Script[list[Any]]: ...

class _NodesContext(Named):
    def __call__(self, conn: _Conn, /, *, most: int | None, heads: _Texts | None, run_id: str | None) -> Row | None: ...
    def script(self, *, most: int | None, heads: _Texts | None, run_id: str | None) -> scripts.Script[Row | None]: ...

class _NodesSetResolvedInputs(Named):
    def __call__(self, conn: _Conn, /, *, inputs: str | None, job: str | None) -> Row | None: ...
    def script(self, *, inputs: str | None, job: str | None) -> scripts.Script[Row | None]: ...

class _NodesSetInputSpec(Named):
    def __call__(self, conn: _Conn, /, *, spec: str | None, job: str | None) -> Row | None: ...
    def script(self, *, spec: str | None, job: str | None) -> scripts.Script[Row | None]: ...

class _Nodes:
    enqueue: _NodesEnqueue
    """Queue one node of a run, in the generation of the run, and return the id of its job. Returns no
    row if the run does not exist, or the run has such a node.
    Columns: id."""
    same_node: _NodesSameNode
    """Return the id of a node's job, and whether it was queued with this content. Returns no row if the
    run has no such node.
    Columns: id, is_same."""
    insert_planned: _NodesInsertPlanned
    """Insert the rows of a plan, a JSON array of objects, and return how many are new or opened again.
    A node that has a row keeps it, unless it failed or was cancelled in an earlier generation."""
    get: _NodesGet
    """Return a node job. Returns no row if the job does not exist."""
    get_by_node: _NodesGetByNode
    """Return the job of a node. Returns no row if the run has no such node yet."""
    of_run: _NodesOfRun
    """Return all jobs of a run, the oldest first."""
    among: _NodesAmong
    """Of these nodes, return the ones whose job has such a status. LIMIT 1 makes PostgreSQL look up each
    node by itself. Without statistics, PostgreSQL 15 would read all rows of the run instead."""
    all_done: _NodesAllDone
    """Return every completed or skipped node of a run."""
    context: _NodesContext
    """Return a run's context with the `context_delta` of each completed node under the node's id, and
    the JSON type of the context. An empty delta does not replace the context's own member. `heads`
    names the members to return, by a look-up per node; NULL stands for all. The context is NULL if
    it is not an object, and if its `size` in bytes, as a jsonb, is more than `most`.
    Columns: kind, size, context."""
    set_resolved_inputs: _NodesSetResolvedInputs
    """Store the inputs that a node received and return its row."""
    set_input_spec: _NodesSetInputSpec
    """Store the question of an input node and return its row."""

nodes: _Nodes

class _OutboxRunsWithEvents(Named):
    def __call__(self, conn: _Conn, /, *, undefined: bool | None, set_aside: _Texts | None, limit: int | None) -> list[Any]: ...
    def script(self, *, undefined: bool | None, set_aside: _Texts | None, limit: int | None) -> scripts.Script[list[Any]]: ...

class _OutboxOpenEvents(Named):
    def __call__(self, conn: _Conn, /, *, run_id: str | None, only: int | None, limit: int | None) -> list[Row]: ...
    def script(self, *, run_id: str | None, only: int | None, limit: int | None) -> scripts.Script[list[Row]]: ...

class _OutboxClose(Named):
    def __call__(self, conn: _Conn, /, *, error: str | None, events: _Ints | None) -> None: ...
    def script(self, *, error: str | None, events: _Ints | None) -> scripts.Script[None]: ...

class _OutboxCloseFailures(Named):
    def __call__(self, conn: _Conn, /, *, run_id: str | None, before: int | None) -> None: ...
    def script(self, *, run_id: str | None, before: int | None) -> scripts.Script[None]: ...

class _OutboxPostpone(Named):
    def __call__(self, conn: _Conn, /, *, error: str | None, after_s: float | None, event: int | None) -> Any: ...
    def script(self, *, error: str | None, after_s: float | None, event: int | None) -> scripts.Script[Any]: ...

class _OutboxUnprocessed(Named):
    def __call__(self, conn: _Conn, /, *, limit: int | None) -> list[Row]: ...
    def script(self, *, limit: int | None) -> scripts.Script[list[Row]]: ...

class _Outbox:
    runs_with_events: _OutboxRunsWithEvents
    """Return the runs that have events to dispatch, the run of the oldest event first. Leaves out runs
    in `set_aside` and, unless `undefined`, runs without a definition. Reads 5,000 events at most."""
    open_events: _OutboxOpenEvents
    """Return a run's open events that are due, the oldest first, each with the status and the error of
    its node. If `only` is given, only the event with this id. LIMIT 1 forces one look-up per event;
    without it, the join may read every version of the run's rows.
    Columns: id, node_id, kind, attempts, node_status, node_error."""
    close: _OutboxClose
    """Close events. If `error` is not NULL, they are poison, and it is the reason."""
    close_failures: _OutboxCloseFailures
    """Close the open events of a run's nodes that failed before this generation, in which they run again."""
    postpone: _OutboxPostpone
    """Count a dispatch that failed, make the event due again later, and return how many failed."""
    unprocessed: _OutboxUnprocessed
    """Return open events, the oldest first.
    Columns: id, run_id, node_id, kind, processed_at, error, attempts, created_at, job_id, claim_no, generation, available_at."""

outbox: _Outbox

class _OverviewNodes(Named):
    def __call__(self, conn: _Conn, /, *, run: str | None, live_only: bool | None, limit: int | None) -> list[Row]: ...
    def script(self, *, run: str | None, live_only: bool | None, limit: int | None) -> scripts.Script[list[Row]]: ...

class _OverviewMaps(Named):
    def __call__(self, conn: _Conn, /, *, run: str | None) -> list[Row]: ...
    def script(self, *, run: str | None) -> scripts.Script[list[Row]]: ...

class _OverviewNodesOfItem(Named):
    def __call__(self, conn: _Conn, /, *, run: str | None, key: str | None) -> list[Row]: ...
    def script(self, *, run: str | None, key: str | None) -> scripts.Script[list[Row]]: ...

class _OverviewItems(Named):
    def __call__(self, conn: _Conn, /, *, run: str | None, keys: _Texts | None) -> list[Row]: ...
    def script(self, *, run: str | None, keys: _Texts | None) -> scripts.Script[list[Row]]: ...

class _OverviewNodeSeconds(Named):
    def __call__(self, conn: _Conn, /, *, run: str | None) -> list[Row]: ...
    def script(self, *, run: str | None) -> scripts.Script[list[Row]]: ...

class _OverviewCompletedBy(Named):
    def __call__(self, conn: _Conn, /, *, run: str | None) -> list[Row]: ...
    def script(self, *, run: str | None) -> scripts.Script[list[Row]]: ...

class _OverviewCrashes(Named):
    def __call__(self, conn: _Conn, /, *, run: str | None) -> Any: ...
    def script(self, *, run: str | None) -> scripts.Script[Any]: ...

class _OverviewRunsAhead(Named):
    def __call__(self, conn: _Conn, /, *, run: str | None) -> Row: ...
    def script(self, *, run: str | None) -> scripts.Script[Row]: ...

class _OverviewFind(Named):
    def __call__(self, conn: _Conn, /, *, jobs_first: bool | None, id: str | None) -> Row | None: ...
    def script(self, *, jobs_first: bool | None, id: str | None) -> scripts.Script[Row | None]: ...

class _OverviewRunningUnder(Named):
    def __call__(self, conn: _Conn, /, *, id: str | None) -> list[Row]: ...
    def script(self, *, id: str | None) -> scripts.Script[list[Row]]: ...

class _OverviewHasAnswer(Named):
    def __call__(self, conn: _Conn, /, *, run: str | None, node: str | None) -> Any: ...
    def script(self, *, run: str | None, node: str | None) -> scripts.Script[Any]: ...

class _OverviewTookDefault(Named):
    def __call__(self, conn: _Conn, /, *, run: str | None, node: str | None) -> Any: ...
    def script(self, *, run: str | None, node: str | None) -> scripts.Script[Any]: ...

class _OverviewListedNodes(Named):
    def __call__(self, conn: _Conn, /, *, queue: str | None, status: str | None, limit: int | None) -> list[Row]: ...
    def script(self, *, queue: str | None, status: str | None, limit: int | None) -> scripts.Script[list[Row]]: ...

class _OverviewLiveNodes(Named):
    def __call__(self, conn: _Conn, /) -> list[Row]: ...
    def script(self) -> scripts.Script[list[Row]]: ...

class _OverviewRunsByStatus(Named):
    def __call__(self, conn: _Conn, /) -> Any: ...
    def script(self) -> scripts.Script[Any]: ...

class _OverviewOpenEvents(Named):
    def __call__(self, conn: _Conn, /) -> Row: ...
    def script(self) -> scripts.Script[Row]: ...

class _OverviewAnswers(Named):
    def __call__(self, conn: _Conn, /) -> Row: ...
    def script(self) -> scripts.Script[Row]: ...

class _OverviewLateRuns(Named):
    def __call__(self, conn: _Conn, /, *, patience_s: float | None) -> list[Row]: ...
    def script(self, *, patience_s: float | None) -> scripts.Script[list[Row]]: ...

class _OverviewForeignWork(Named):
    def __call__(self, conn: _Conn, /, *, workflows: _Texts | None, tasks: _Texts | None) -> list[Row]: ...
    def script(self, *, workflows: _Texts | None, tasks: _Texts | None) -> scripts.Script[list[Row]]: ...

class _OverviewUnfinished(Named):
    def __call__(self, conn: _Conn, /) -> list[Row]: ...
    def script(self) -> scripts.Script[list[Row]]: ...

class _Overview:
    nodes: _OverviewNodes
    """Return the nodes of a run: first those that run, wait for input or failed. With `live_only`, only
    these and queued nodes with a failed attempt."""
    maps: _OverviewMaps
    """Return the maps of a run's definition: their items by state, and the nodes of the items.
    Columns: node_id, total, done, failed, open, nodes."""
    nodes_of_item: _OverviewNodesOfItem
    """Return the nodes that the items with a key have, in all maps of a run, with their states.
    Columns: node_id, status."""
    items: _OverviewItems
    """Return the items with these keys, in all maps of a run. An open item with an error fails once none of its nodes is
    open. One that had not ended when its map did is cancelled.
    Columns: map_id, key, error, state."""
    node_seconds: _OverviewNodeSeconds
    """Return how long the handler of each completed node of a run took.
    Columns: node_id, seconds."""
    completed_by: _OverviewCompletedBy
    """Return the workers that completed nodes of a run, and how many each.
    Columns: host_label, queue, worker_id, nodes, seconds."""
    crashes: _OverviewCrashes
    """Count how often a node of a run was taken back from a worker that died. Lapses count until the
    next recorded end of the node."""
    runs_ahead: _OverviewRunsAhead
    """Count the runs that were submitted before this one, are at least as urgent, and have work to do
    now. A run that only waits for a person does not count.
    Columns: n, names, first."""
    find: _OverviewFind
    """Return the run or job with this id: the run first, or the job first if `jobs_first`. Returns no
    row if neither exists. Ids are chosen at the insert, so a run and a job may share one.
    Columns: rank, kind, status, run_id, name."""
    running_under: _OverviewRunningUnder
    """Return the running jobs that have this id or belong to the run that has it, with their workers.
    Columns: job_id, name, queue, worker_id, host_label, pid."""
    has_answer: _OverviewHasAnswer
    """Return whether an answer to a node was submitted and not taken yet."""
    took_default: _OverviewTookDefault
    """Return whether a completed input node took the default of its time-out, not an answer."""
    listed_nodes: _OverviewListedNodes
    """Return the first nodes of a queue that have this status, in the order of the claim."""
    live_nodes: _OverviewLiveNodes
    """Count the nodes that wait or run, by queue and status.
    Columns: queue, status, n."""
    runs_by_status: _OverviewRunsByStatus
    """Return how many runs have each status, as an object."""
    open_events: _OverviewOpenEvents
    """Count the outbox events that are not dispatched. Also return the oldest one that is due: for how
    long it has been due (`lag_s`), its run and its error.
    Columns: n, lag_s, run_id, error."""
    answers: _OverviewAnswers
    """Count the answers that are not taken yet, and the nodes of running runs that wait for one.
    Columns: answers, awaiting_input."""
    late_runs: _OverviewLateRuns
    """Return at most 50 runs that could start and have waited for `patience_s`, in the order of their
    start, each with its wait, and whether others were started within the last minute.
    Columns: id, wait_s, others."""
    foreign_work: _OverviewForeignWork
    """Count the unfinished runs of other workflows, and the unfinished ingest jobs of other tasks.
    Columns: kind, name, n."""
    unfinished: _OverviewUnfinished
    """Return the workflows that have unfinished runs, with the three oldest runs of each. The workflow
    with the oldest run comes first.
    Columns: name, n, ids."""

overview: _Overview

class _PagesAttention(Named):
    def __call__(self, conn: _Conn, /, *, within_s: float | None, most: int | None, patience_s: float | None, stale_s: float | None) -> Row: ...
    def script(self, *, within_s: float | None, most: int | None, patience_s: float | None, stale_s: float | None) -> scripts.Script[Row]: ...

class _PagesQuestions(Named):
    def __call__(self, conn: _Conn, /, *, most: int | None, run: str | None, node: str | None, after: datetime | None, after_seq: int | None, limit: int | None) -> list[Row]: ...
    def script(self, *, most: int | None, run: str | None, node: str | None, after: datetime | None, after_seq: int | None, limit: int | None) -> scripts.Script[list[Row]]: ...

class _PagesNewQuestions(Named):
    def __call__(self, conn: _Conn, /, *, since: datetime | None, most: int | None) -> Any: ...
    def script(self, *, since: datetime | None, most: int | None) -> scripts.Script[Any]: ...

class _PagesRunning(Named):
    def __call__(self, conn: _Conn, /, *, workers: _Texts | None, limit: int | None) -> list[Row]: ...
    def script(self, *, workers: _Texts | None, limit: int | None) -> scripts.Script[list[Row]]: ...

class _PagesLoads(Named):
    def __call__(self, conn: _Conn, /, *, most: int | None, workers: _Texts | None) -> list[Row]: ...
    def script(self, *, most: int | None, workers: _Texts | None) -> scripts.Script[list[Row]]: ...

class _PagesLastRuns(Named):
    def __call__(self, conn: _Conn, /, *, workflow: str | None, limit: int | None) -> list[Row]: ...
    def script(self, *, workflow: str | None, limit: int | None) -> scripts.Script[list[Row]]: ...

class _PagesNodesOfRuns(Named):
    def __call__(self, conn: _Conn, /, *, ids: _Texts | None, most: int | None, limit: int | None) -> list[Row]: ...
    def script(self, *, ids: _Texts | None, most: int | None, limit: int | None) -> scripts.Script[list[Row]]: ...

class _PagesRunsToChange(Named):
    def __call__(self, conn: _Conn, /, *, ids: _Texts | None, most: int | None) -> list[Row]: ...
    def script(self, *, ids: _Texts | None, most: int | None) -> scripts.Script[list[Row]]: ...

class _PagesNodeJobs(Named):
    def __call__(self, conn: _Conn, /, *, status: str | None, queue: str | None, task: str | None, key: str | None, seq: int | None, priority: int | None, limit: int | None) -> list[Row]: ...
    def script(self, *, status: str | None, queue: str | None, task: str | None, key: str | None, seq: int | None, priority: int | None, limit: int | None) -> scripts.Script[list[Row]]: ...

class _PagesTaskJobs(Named):
    def __call__(self, conn: _Conn, /, *, statuses: _Texts | None, queue: str | None, task: str | None, key: str | None, before: int | None, most: int | None, limit: int | None) -> list[Row]: ...
    def script(self, *, statuses: _Texts | None, queue: str | None, task: str | None, key: str | None, before: int | None, most: int | None, limit: int | None) -> scripts.Script[list[Row]]: ...

class _PagesNamed(Named):
    def __call__(self, conn: _Conn, /, *, text: str | None, most: int | None) -> Row | None: ...
    def script(self, *, text: str | None, most: int | None) -> scripts.Script[Row | None]: ...

class _PagesFires(Named):
    def __call__(self, conn: _Conn, /, *, name: str | None, limit: int | None) -> list[Row]: ...
    def script(self, *, name: str | None, limit: int | None) -> scripts.Script[list[Row]]: ...

class _PagesTables(Named):
    def __call__(self, conn: _Conn, /, *, limit: int | None) -> list[Row]: ...
    def script(self, *, limit: int | None) -> scripts.Script[list[Row]]: ...

class _Pages:
    attention: _PagesAttention
    """Return the facts that every page has, numbers up to `most`: nodes of running runs that wait for an answer that nobody
    has given (`asked`) and the longest wait; jobs of both families that failed within `within_s` seconds (`failed`), and
    the end and the error of the last one that failed at all; what waits for an orchestrator: the oldest event that is due
    (`event`) and the runs that have waited for `patience_s` (`late`); the switches whose OFF has ended by itself, while no
    worker of their host and queue was seen since then; the hosts and queues that are on, and of which a worker died or was
    silent for `stale_s` within a day, while none lives or ended in order since then, unless their heartbeat is flagged
    (`gone`); whether there is any run or ingest job.
    Columns: asked, asked_s, failed_at, error, failed, event, late, switches, gone, any_run."""
    questions: _PagesQuestions
    """Return the input nodes that wait in running runs, of one run and node if given, the longest wait first, after the place
    `after` and `after_seq`, or from the first if NULL. A spec and a default over `most` bytes are NULL. `asked` changes with the
    spec, and is NULL with one of more bytes as stored. `answered`: whether an answer was submitted and not taken yet. `due_at`:
    when the wait ends by itself, with `default` as the answer if it `has_default`, or NULL if it never ends by itself.
    Columns: run_id, workflow_name, out_dir, node_id, job_id, seq, due_at, has_default, default, input_spec, is_known, asked, since, waiting_s, answered."""
    new_questions: _PagesNewQuestions
    """Return how many nodes of running runs began to wait for an answer after `since`, up to `most`."""
    running: _PagesRunning
    """Return the jobs of both families, of these workers or (NULL) of all, that run longest, each with how long its node
    usually takes: the median of the last 20 runs of its workflow; NULL if they have no such node, and for ingest jobs.
    Columns: job_id, queue, host_label, worker_id, started_at, seq, run_id, workflow_name, name, elapsed_s, usual_s."""
    loads: _PagesLoads
    """Count the loads of models for jobs of these workers within a day, by worker, among the newest `most` events of nodes.
    `within_s`: how many seconds these go back, up to a day.
    Columns: worker_id, loads, within_s."""
    last_runs: _PagesLastRuns
    """Return the last runs of a workflow, the oldest first, each with how long it took, or has taken so far. Each also has
    figures of them all: the median and the 95th percentile of the completed runs, the longest of the ended runs, NULL
    without any, and how many failed.
    Columns: id, status, created_at, started_at, finished_at, elapsed_s, p50_s, p95_s, longest_s, failures."""
    nodes_of_runs: _PagesNodesOfRuns
    """Return the nodes of these runs that fail most, then the slowest, items of a map as one. It reads `most`
    nodes of each run.
    Columns: name, nodes, failed, p50_s, p95_s."""
    runs_to_change: _PagesRunsToChange
    """Return these runs in their order, each with how many of its nodes wait, wait for a child run, and run, up to `most`.
    Columns: id, workflow_name, status, waiting, children, running."""
    node_jobs: _PagesNodeJobs
    """Return nodes that are queued or running, of either status, in the order of the claim, after this `priority` and `seq`, or
    from the first if NULL. A filter that is NULL matches every node. No plan is kept. The conditions are those of indexes,
    which have no other nodes.
    Columns: id, run_id, node_id, node_module, queue, status, priority, seq, created_at, started_at, host_label."""
    task_jobs: _PagesTaskJobs
    """Return the ingest jobs that fit the filters, the newest first, after the job with the `seq` `before`, or from the first
    if NULL. `most` jobs are examined. If these are not enough, the last row is the one at the `place` `most`, which is in
    the list only if it `fits`. A filter that is NULL matches every job."""
    named: _PagesNamed
    """Return the jobs' use of this text: the `id` of the ingest job with this idempotency key. Else the `field` (`task` or
    `key`) in which a running node or any of the newest `most` ingest jobs has it. Returns no row if there is none.
    Columns: rank, id, field."""
    fires: _PagesFires
    """Return the last instants for which a schedule of this name has fired, each with its job or run and the status of
    that; NULL if there is none, or none any more.
    Columns: fire_at, job_id, run_id, skipped, status."""
    tables: _PagesTables
    """Return the largest tables of the schema: rows and dead rows as the statistics count them, and bytes with indexes.
    Columns: name, live, dead, bytes, vacuumed_at."""

pages: _Pages

class _PendingWork(Named):
    def __call__(self, conn: _Conn, /, *, within_s: float | None) -> Row: ...
    def script(self, *, within_s: float | None) -> scripts.Script[Row]: ...

class _PendingSweeps(Named):
    def __call__(self, conn: _Conn, /) -> Row: ...
    def script(self) -> scripts.Script[Row]: ...

class _PendingSilentJobs(Named):
    def __call__(self, conn: _Conn, /, *, silent_s: float | None) -> Any: ...
    def script(self, *, silent_s: float | None) -> scripts.Script[Any]: ...

class _Pending:
    work: _PendingWork
    """Return which work waits for an orchestrator: runs to start, events to dispatch, answers to take,
    and delayed jobs or runs whose time has come. `run_due_s`: in how many seconds the next delayed
    run is due, if that is within `within_s` seconds, at most a day. A run that was due before and
    could not be promoted, as its row is locked or raises, is left to the poll.
    Columns: runs, events, answers, due, run_due_s."""
    sweeps: _PendingSweeps
    """Return which sweeps have work: leases that lapsed, input nodes that waited too long, waiters in
    lock queues or jobs that no worker serves, and partitions with limits or waiters. Each part walks
    an index in its order, so that no plan reads a whole table, whatever the statistics say.
    Columns: leases, inputs, lock_queues, partitions."""
    silent_jobs: _PendingSilentJobs
    """Return whether a running job of either family was not renewed for `silent_s` seconds."""

pending: _Pending

class _PermissionsClosedTables(Named):
    def __call__(self, conn: _Conn, /, *, tables: _Texts | None, privileges: _Texts | None, revoked: _Texts | None) -> list[Row]: ...
    def script(self, *, tables: _Texts | None, privileges: _Texts | None, revoked: _Texts | None) -> scripts.Script[list[Row]]: ...

class _PermissionsClosedColumns(Named):
    def __call__(self, conn: _Conn, /, *, table: str | None, columns: _Texts | None) -> Row | None: ...
    def script(self, *, table: str | None, columns: _Texts | None) -> scripts.Script[Row | None]: ...

class _PermissionsClosedSequences(Named):
    def __call__(self, conn: _Conn, /, *, tables: _Texts | None, revoked: _Texts | None) -> list[Any]: ...
    def script(self, *, tables: _Texts | None, revoked: _Texts | None) -> scripts.Script[list[Any]]: ...

class _PermissionsClosedFunctions(Named):
    def __call__(self, conn: _Conn, /, *, internal: _Texts | None, works: bool | None, named: _Texts | None, revoked: _Texts | None) -> list[Row]: ...
    def script(self, *, internal: _Texts | None, works: bool | None, named: _Texts | None, revoked: _Texts | None) -> scripts.Script[list[Row]]: ...

class _PermissionsOfPublic(Named):
    def __call__(self, conn: _Conn, /, *, notifying: _Texts | None, tables: _Texts | None) -> list[Row]: ...
    def script(self, *, notifying: _Texts | None, tables: _Texts | None) -> scripts.Script[list[Row]]: ...

class _PermissionsOthersFunctions(Named):
    def __call__(self, conn: _Conn, /, *, notifying: _Texts | None) -> list[Row]: ...
    def script(self, *, notifying: _Texts | None) -> scripts.Script[list[Row]]: ...

class _PermissionsNotOwned(Named):
    def __call__(self, conn: _Conn, /, *, tables: _Texts | None, notifying: _Texts | None) -> list[Row]: ...
    def script(self, *, tables: _Texts | None, notifying: _Texts | None) -> scripts.Script[list[Row]]: ...

class _PermissionsExcessive(Named):
    def __call__(self, conn: _Conn, /, *, tables: _Texts | None, allowed: _Texts | None, internal: _Texts | None, callable: _Texts | None, filled: _Texts | None) -> list[Row]: ...
    def script(self, *, tables: _Texts | None, allowed: _Texts | None, internal: _Texts | None, callable: _Texts | None, filled: _Texts | None) -> scripts.Script[list[Row]]: ...

class _PermissionsSubmitters(Named):
    def __call__(self, conn: _Conn, /) -> list[Any]: ...
    def script(self) -> scripts.Script[list[Any]]: ...

class _PermissionsPublicMayCreate(Named):
    def __call__(self, conn: _Conn, /) -> Any: ...
    def script(self) -> scripts.Script[Any]: ...

class _Permissions:
    closed_tables: _PermissionsClosedTables
    """Return which of these privileges this role lacks, or perhaps has only through a right of PUBLIC
    in `revoked` (`SELECT workflow_runs`). `privileges` and `tables` are parallel arrays.
    Columns: right, kind, name."""
    closed_columns: _PermissionsClosedColumns
    """Return the table, and whether this role may insert every one of these columns. `is_open` is
    NULL, and `name` too, if there is no such table.
    Columns: name, is_open."""
    closed_sequences: _PermissionsClosedSequences
    """Return the sequences of these tables that this role may not use, or perhaps only through a right
    of PUBLIC in `revoked`."""
    closed_functions: _PermissionsClosedFunctions
    """Return the functions that this role needs and may not call, or perhaps only through a right of
    PUBLIC in `revoked`. These are the functions that only read, all others for a role that `works`,
    and the `named` ones. Left out are the `internal` ones, which only functions of the tables' owner
    call, and trigger functions, to which the caller needs no right.
    Columns: right, kind, name."""
    of_public: _PermissionsOfPublic
    """Return the rights that PUBLIC has to functions, tables and sequences of the engine. Migrations
    give it one right, to read what is installed.
    Columns: right, kind, name, grantee."""
    others_functions: _PermissionsOthersFunctions
    """Return the functions of the engine that another role than the owner of the tables owns, and both
    owners.
    Columns: name, owner, owner_of_tables."""
    not_owned: _PermissionsNotOwned
    """Return the obstacles to a migration by this role: tables and functions that it does not own, and
    a schema in which it may not create.
    Columns: right, kind, name."""
    excessive: _PermissionsExcessive
    """Return the rights other than SELECT that this role has and does not need, and the grantee of each:
    this role, PUBLIC, or a role that this one is a member of. `allowed` are the columns that it
    inserts, as `table.column`; `filled` are their tables. The owner of an object and a superuser get
    no row, since their rights cannot be revoked.
    Columns: right, kind, name, grantee."""
    submitters: _PermissionsSubmitters
    """Return at most 10 roles that may insert runs and neither own the tables nor work on jobs,
    without superusers and the roles that PostgreSQL brings."""
    public_may_create: _PermissionsPublicMayCreate
    """Return the schema of the engine if every role may create functions in it."""

permissions: _Permissions

class _PromotionDueJobs(Named):
    def __call__(self, conn: _Conn, /, *, ids: _Texts | None, aside: _Texts | None) -> list[Row]: ...
    def script(self, *, ids: _Texts | None, aside: _Texts | None) -> scripts.Script[list[Row]]: ...

class _PromotionPromoteJobs(Named):
    def __call__(self, conn: _Conn, /, *, ids: _Texts | None) -> list[Row]: ...
    def script(self, *, ids: _Texts | None) -> scripts.Script[list[Row]]: ...

class _PromotionDueRuns(Named):
    def __call__(self, conn: _Conn, /, *, ids: _Texts | None, aside: _Texts | None) -> list[Row]: ...
    def script(self, *, ids: _Texts | None, aside: _Texts | None) -> scripts.Script[list[Row]]: ...

class _PromotionPromoteRuns(Named):
    def __call__(self, conn: _Conn, /, *, ids: _Texts | None) -> list[Row]: ...
    def script(self, *, ids: _Texts | None) -> scripts.Script[list[Row]]: ...

class _PromotionAdmitMissedWaiters(Named):
    def __call__(self, conn: _Conn, /) -> Any: ...
    def script(self) -> scripts.Script[Any]: ...

class _Promotion:
    due_jobs: Mapping[str, _PromotionDueJobs]
    """Lock and return up to 1,000 delayed jobs whose time has come, of `ids` (all if NULL) and not in `aside`, the earliest
    first.
    Columns: id."""
    promote_jobs: Mapping[str, _PromotionPromoteJobs]
    """Make jobs claimable, which the caller has locked; return their ids.
    Columns: id."""
    due_runs: _PromotionDueRuns
    """Do as `due_jobs`, for delayed runs.
    Columns: id."""
    promote_runs: _PromotionPromoteRuns
    """Let orchestrators start runs, which the caller has locked; return their ids.
    Columns: id."""
    admit_missed_waiters: _PromotionAdmitMissedWaiters
    """Admit the first waiter of each lock key that no admitted job has, of both job families, and
    return how many. The families stand in the order in which a commit takes their locks. A commit
    that gives up a key admits the next waiter; this statement finds the jobs that were missed."""

promotion: _Promotion

class _QueuesPauseQueue(Named):
    def __call__(self, conn: _Conn, /, *, queue: str | None, at: datetime | None, lasts: timedelta | None, by: str | None) -> Row: ...
    def script(self, *, queue: str | None, at: datetime | None, lasts: timedelta | None, by: str | None) -> scripts.Script[Row]: ...

class _QueuesPausePartition(Named):
    def __call__(self, conn: _Conn, /, *, queue: str | None, partition: str | None, at: datetime | None, lasts: timedelta | None, by: str | None) -> Row: ...
    def script(self, *, queue: str | None, partition: str | None, at: datetime | None, lasts: timedelta | None, by: str | None) -> scripts.Script[Row]: ...

class _QueuesResumeQueue(Named):
    def __call__(self, conn: _Conn, /, *, queue: str | None) -> list[Row]: ...
    def script(self, *, queue: str | None) -> scripts.Script[list[Row]]: ...

class _QueuesResumePartition(Named):
    def __call__(self, conn: _Conn, /, *, queue: str | None, partition: str | None) -> list[Row]: ...
    def script(self, *, queue: str | None, partition: str | None) -> scripts.Script[list[Row]]: ...

class _QueuesLimitQueue(Named):
    def __call__(self, conn: _Conn, /, *, queue: str | None, limits: str | None) -> Row: ...
    def script(self, *, queue: str | None, limits: str | None) -> scripts.Script[Row]: ...

class _QueuesLimitPartition(Named):
    def __call__(self, conn: _Conn, /, *, queue: str | None, partition: str | None, limits: str | None) -> Row: ...
    def script(self, *, queue: str | None, partition: str | None, limits: str | None) -> scripts.Script[Row]: ...

class _QueuesDeleteUnsetPartition(Named):
    def __call__(self, conn: _Conn, /, *, queue: str | None, partition: str | None) -> None: ...
    def script(self, *, queue: str | None, partition: str | None) -> scripts.Script[None]: ...

class _QueuesPruneStarts(Named):
    def __call__(self, conn: _Conn, /, *, days: float | None, batch: int | None) -> int: ...
    def script(self, *, days: float | None, batch: int | None) -> scripts.Script[None]: ...

class _QueuesAdmitFromPartitions(Named):
    def __call__(self, conn: _Conn, /) -> Any: ...
    def script(self) -> scripts.Script[Any]: ...

class _QueuesSettings(Named):
    def __call__(self, conn: _Conn, /, *, queue: str | None) -> list[Row]: ...
    def script(self, *, queue: str | None) -> scripts.Script[list[Row]]: ...

class _QueuesIsUsed(Named):
    def __call__(self, conn: _Conn, /, *, queue: str | None) -> Any: ...
    def script(self, *, queue: str | None) -> scripts.Script[Any]: ...

class _QueuesList(Named):
    def __call__(self, conn: _Conn, /, *, window: float | None, queue: str | None, most: int | None, served: bool | None, stale_s: float | None) -> list[Row]: ...
    def script(self, *, window: float | None, queue: str | None, most: int | None, served: bool | None, stale_s: float | None) -> scripts.Script[list[Row]]: ...

class _QueuesWaiting(Named):
    def __call__(self, conn: _Conn, /, *, queue: str | None) -> list[Row]: ...
    def script(self, *, queue: str | None) -> scripts.Script[list[Row]]: ...

class _Queues:
    pause_queue: _QueuesPauseQueue
    """Pause a queue until `at`, for `lasts` from now, or (both NULL) until it is resumed; return
    its row. A pause that is in force keeps its beginning.
    Columns: queue, retention_days, updated_at, paused_at, paused_until, paused_by, max_running, rate_limit, rate_period_s, partition_max_running, partition_rate_limit, partition_rate_period_s."""
    pause_partition: _QueuesPausePartition
    """Pause one partition of a queue, as pause_queue does; return its row.
    Columns: queue, partition_key, paused_at, paused_until, paused_by, max_running, rate_limit, rate_period_s, updated_at."""
    resume_queue: _QueuesResumeQueue
    """End the pause of a queue, also one that has run out. Returns no row if it had none.
    Columns: queue."""
    resume_partition: _QueuesResumePartition
    """End the pause of a partition, also one that has run out. Returns no row if it had none.
    Columns: queue."""
    limit_queue: _QueuesLimitQueue
    """Set limits of a queue; return its row. `limits` is a JSON object of columns: null takes a
    limit off, and a column that is absent stays as it is.
    Columns: queue, retention_days, updated_at, paused_at, paused_until, paused_by, max_running, rate_limit, rate_period_s, partition_max_running, partition_rate_limit, partition_rate_period_s."""
    limit_partition: _QueuesLimitPartition
    """Set limits of one partition of a queue, as limit_queue does; return its row.
    Columns: queue, partition_key, paused_at, paused_until, paused_by, max_running, rate_limit, rate_period_s, updated_at."""
    delete_unset_partition: _QueuesDeleteUnsetPartition
    """Delete the row of a partition that is not paused and has no limit of its own."""
    prune_starts: _QueuesPruneStarts
    """Delete up to `batch` starts of partitions that are over `days` days old and that no rate counts any more."""
    admit_from_partitions: _QueuesAdmitFromPartitions
    """Admit jobs of the partitions whose time has come, and of partitions in which no job is admitted.
    Returns how many partitions of the second kind there were."""
    settings: _QueuesSettings
    """Return the settings of one queue, or (NULL) of every queue that has some, with `paused`:
    whether it is paused now.
    Columns: queue, retention_days, updated_at, paused_at, paused_until, paused_by, max_running, rate_limit, rate_period_s, partition_max_running, partition_rate_limit, partition_rate_period_s, paused."""
    is_used: _QueuesIsUsed
    """Return whether a queue has settings, or an ingest job that could be claimed."""
    list: _QueuesList
    """Return the queues that have settings, live jobs, or events of the last `window` seconds, and with `served` also those
    that a worker has served or a switch names; only one of them if `queue` is given. Each has its settings, with `paused`;
    its live jobs by what keeps them (`blocked`: all that something keeps); the age of the oldest that is due and no map
    that waits for its items (`oldest_s`), and of the oldest that is not blocked (`ready_s`); how many jobs came in
    (`came`) and ended (`went`) within the window; its live workers (`alive`), and those that take jobs (`taking`). Behind
    a queue come its partitions with settings of their own, of all queues the first `most`. Reads every live job, and no
    other but those with events of the window: the three conditions are those of indexes."""
    waiting: _QueuesWaiting
    """Return one queue with settings, or each if NULL, with the use of its limits.
    Columns: queue, paused, max_running, rate_limit, rate_period_s, running, due_s, paused_until, paused_by."""

queues: _Queues

class _RecoveryLapsed(Named):
    def __call__(self, conn: _Conn, /, *, had_s: float | None, before: bool | None, ids: _Texts | None, aside: _Texts | None) -> list[Row]: ...
    def script(self, *, had_s: float | None, before: bool | None, ids: _Texts | None, aside: _Texts | None) -> scripts.Script[list[Row]]: ...

class _RecoveryGone(Named):
    def __call__(self, conn: _Conn, /, *, silent_s: float | None, lock: str | None, ids: _Texts | None, aside: _Texts | None) -> list[Row]: ...
    def script(self, *, silent_s: float | None, lock: str | None, ids: _Texts | None, aside: _Texts | None) -> scripts.Script[list[Row]]: ...

class _RecoveryCountCrash(Named):
    def __call__(self, conn: _Conn, /, *, error: str | None, backoff_s: float | None, cap: int | None, band: int | None, jobs: _Texts | None, claims: _Ints | None, workers: _Texts | None, worker: str | None) -> list[Row]: ...
    def script(self, *, error: str | None, backoff_s: float | None, cap: int | None, band: int | None, jobs: _Texts | None, claims: _Ints | None, workers: _Texts | None, worker: str | None) -> scripts.Script[list[Row]]: ...

class _RecoveryCountLapse(Named):
    def __call__(self, conn: _Conn, /, *, error: str | None, backoff_s: float | None, cap: int | None, band: int | None, ids: _Texts | None, worker: str | None) -> list[Row]: ...
    def script(self, *, error: str | None, backoff_s: float | None, cap: int | None, band: int | None, ids: _Texts | None, worker: str | None) -> scripts.Script[list[Row]]: ...

class _RecoveryRequeue(Named):
    def __call__(self, conn: _Conn, /, *, band: int | None, counted: bool | None, ids: _Texts | None, host: str | None, queue: str | None, detail: str | None) -> list[Row]: ...
    def script(self, *, band: int | None, counted: bool | None, ids: _Texts | None, host: str | None, queue: str | None, detail: str | None) -> scripts.Script[list[Row]]: ...

class _Recovery:
    lapsed: Mapping[str, _RecoveryLapsed]
    """Lock and return up to 100 jobs whose lease has lapsed, of `ids` (all if NULL) and not in `aside`. `had_s`: for how many
    seconds the caller has had the database. `before`: only jobs whose last renewal is older, else only the others. If
    `had_s` is NULL and `before` is false, return all.
    Columns: id."""
    gone: Mapping[str, _RecoveryGone]
    """Like `lapsed`, for jobs whose worker is gone: neither the job nor the worker was renewed for
    `silent_s`, and no session holds the advisory lock of the worker. The jobs of a worker that never
    had a lock are left to their leases. Workers write `detail`, so it is compared as jsonb: a cast
    to boolean would raise for any other value.
    Columns: id."""
    count_crash: Mapping[str, _RecoveryCountCrash]
    """End claims and count a crash of each job. One element of each array is a claim. A job is queued
    again, the first time with at least the priority `band`, later after `backoff_s` times its
    crashes; at `cap` crashes it has failed as poison. If it must end, it is cancelled instead, and
    nothing is counted. `worker`: the worker that reports the crash, or NULL. A claim without a row
    is lost."""
    count_lapse: Mapping[str, _RecoveryCountLapse]
    """Take running jobs, which the caller has locked, from their workers. Count a lapse of each, in a
    row, as `count_crash` counts crashes. The cause of a lapse is unknown."""
    requeue: Mapping[str, _RecoveryRequeue]
    """Take running jobs from their workers: the jobs in `ids`, a host's jobs in one queue, or all if these are NULL. A job is
    queued again with at least the priority `band`, or cancelled if it must end. If `counted`, it counts as ended by the
    watchdog, else not at all."""

recovery: _Recovery

class _RetentionPages(Named):
    def __call__(self, conn: _Conn, /, *, table: str | None) -> Any: ...
    def script(self, *, table: str | None) -> scripts.Script[Any]: ...

class _RetentionOldJobs(Named):
    def __call__(self, conn: _Conn, /, *, days: float | None, first: str | None, end: str | None, ids: _Texts | None, aside: _Texts | None) -> list[Row]: ...
    def script(self, *, days: float | None, first: str | None, end: str | None, ids: _Texts | None, aside: _Texts | None) -> scripts.Script[list[Row]]: ...

class _RetentionDeleteJobs(Named):
    def __call__(self, conn: _Conn, /, *, ids: _Texts | None) -> list[Row]: ...
    def script(self, *, ids: _Texts | None) -> scripts.Script[list[Row]]: ...

class _RetentionCountJobs(Named):
    def __call__(self, conn: _Conn, /, *, days: float | None) -> Any: ...
    def script(self, *, days: float | None) -> scripts.Script[Any]: ...

class _RetentionOldRuns(Named):
    def __call__(self, conn: _Conn, /, *, days: float | None, first: str | None, end: str | None, ids: _Texts | None, aside: _Texts | None, limit: int | None) -> list[Row]: ...
    def script(self, *, days: float | None, first: str | None, end: str | None, ids: _Texts | None, aside: _Texts | None, limit: int | None) -> scripts.Script[list[Row]]: ...

class _RetentionDeleteRuns(Named):
    def __call__(self, conn: _Conn, /, *, ids: _Texts | None) -> list[Row]: ...
    def script(self, *, ids: _Texts | None) -> scripts.Script[list[Row]]: ...

class _RetentionCountRuns(Named):
    def __call__(self, conn: _Conn, /, *, days: float | None) -> Any: ...
    def script(self, *, days: float | None) -> scripts.Script[Any]: ...

class _RetentionDeleteOutbox(Named):
    def __call__(self, conn: _Conn, /, *, days: float | None, batch: int | None) -> int: ...
    def script(self, *, days: float | None, batch: int | None) -> scripts.Script[None]: ...

class _RetentionDeleteEvents(Named):
    def __call__(self, conn: _Conn, /, *, days: float | None, batch: int | None) -> int: ...
    def script(self, *, days: float | None, batch: int | None) -> scripts.Script[None]: ...

class _RetentionDeleteHeartbeats(Named):
    def __call__(self, conn: _Conn, /, *, days: float | None) -> int: ...
    def script(self, *, days: float | None) -> scripts.Script[None]: ...

class _Retention:
    pages: _RetentionPages
    """Return how many pages a table has now."""
    old_jobs: _RetentionOldJobs
    """Lock and return the ingest jobs past their retention that lie in the pages from `first` to before `end`, of `ids` (all
    if NULL) and not in `aside`. The `retention_days` of a queue precede `days`; 0 keeps rows forever. The table is read in
    its physical order, since an index by time of ending would make every job slower. Locked rows stay.
    Columns: id."""
    delete_jobs: _RetentionDeleteJobs
    """Delete ingest jobs, which the caller has locked; return their ids.
    Columns: id."""
    count_jobs: _RetentionCountJobs
    """Count the ingest jobs that are past their retention."""
    old_runs: _RetentionOldRuns
    """Do as `old_jobs`, for up to `limit` runs. A run stays while it has an open outbox row or a node that has not ended.
    Columns: id."""
    delete_runs: _RetentionDeleteRuns
    """Delete runs, which the caller has locked; return their ids. Their nodes, answers and outbox rows go with them.
    Columns: id."""
    count_runs: _RetentionCountRuns
    """Count the runs that are past their retention and that `old_runs` would not leave out."""
    delete_outbox: _RetentionDeleteOutbox
    """Delete up to `batch` outbox rows that were processed over `days` days ago."""
    delete_events: Mapping[str, _RetentionDeleteEvents]
    """Delete up to `batch` events of jobs that are over `days` days old."""
    delete_heartbeats: _RetentionDeleteHeartbeats
    """Delete the heartbeats that are over `days` days old."""

retention: _Retention

class _RetryJobsReopenIngest(Named):
    def __call__(self, conn: _Conn, /, *, jobs: _Texts | None) -> list[Row]: ...
    def script(self, *, jobs: _Texts | None) -> scripts.Script[list[Row]]: ...

class _RetryJobsKeyOwner(Named):
    def __call__(self, conn: _Conn, /, *, job: str | None) -> Row | None: ...
    def script(self, *, job: str | None) -> scripts.Script[Row | None]: ...

class _RetryJobs:
    reopen_ingest: _RetryJobsReopenIngest
    """Queue failed and cancelled ingest jobs again in a new generation, with all counters at zero. A
    trigger adds the event. Returns no row for a job in another state or in the last possible
    generation."""
    key_owner: _RetryJobsKeyOwner
    """Return the job that owns the idempotency key of a job now, and the key.
    Columns: id, key."""

retry_jobs: _RetryJobs

class _RunPageHead(Named):
    def __call__(self, conn: _Conn, /, *, most: int | None, run_id: str | None) -> Row | None: ...
    def script(self, *, most: int | None, run_id: str | None) -> scripts.Script[Row | None]: ...

class _RunPageSteps(Named):
    def __call__(self, conn: _Conn, /, *, run_id: str | None, limit: int | None) -> list[Row]: ...
    def script(self, *, run_id: str | None, limit: int | None) -> scripts.Script[list[Row]]: ...

class _RunPageNodes(Named):
    def __call__(self, conn: _Conn, /, *, run_id: str | None, active: bool | None, limit: int | None) -> list[Row]: ...
    def script(self, *, run_id: str | None, active: bool | None, limit: int | None) -> scripts.Script[list[Row]]: ...

class _RunPageEvents(Named):
    def __call__(self, conn: _Conn, /, *, claim: int | None, run_id: str | None, nodes: _Texts | None, limit: int | None) -> list[Row]: ...
    def script(self, *, claim: int | None, run_id: str | None, nodes: _Texts | None, limit: int | None) -> scripts.Script[list[Row]]: ...

class _RunPageNode(Named):
    def __call__(self, conn: _Conn, /, *, most: int | None, run_id: str | None, node: str | None) -> Row | None: ...
    def script(self, *, most: int | None, run_id: str | None, node: str | None) -> scripts.Script[Row | None]: ...

class _RunPageLog(Named):
    def __call__(self, conn: _Conn, /, *, claim: int | None, run_id: str | None, node: str | None) -> Row | None: ...
    def script(self, *, claim: int | None, run_id: str | None, node: str | None) -> scripts.Script[Row | None]: ...

class _RunPageJobSteps(Named):
    def __call__(self, conn: _Conn, /, *, job: str | None, limit: int | None) -> list[Row]: ...
    def script(self, *, job: str | None, limit: int | None) -> scripts.Script[list[Row]]: ...

class _RunPageMap(Named):
    def __call__(self, conn: _Conn, /, *, run_id: str | None, map: str | None) -> Row | None: ...
    def script(self, *, run_id: str | None, map: str | None) -> scripts.Script[Row | None]: ...

class _RunPageBuckets(Named):
    def __call__(self, conn: _Conn, /, *, buckets: int | None, total: int | None, opened: int | None, run_id: str | None, map: str | None) -> list[Row]: ...
    def script(self, *, buckets: int | None, total: int | None, opened: int | None, run_id: str | None, map: str | None) -> scripts.Script[list[Row]]: ...

class _RunPageGroups(Named):
    def __call__(self, conn: _Conn, /, *, run_id: str | None, map: str | None, most: int | None, limit: int | None) -> list[Row]: ...
    def script(self, *, run_id: str | None, map: str | None, most: int | None, limit: int | None) -> scripts.Script[list[Row]]: ...

class _RunPageItems(Named):
    def __call__(self, conn: _Conn, /, *, opened: int | None, run_id: str | None, map: str | None, start: int | None, state: str | None, text: str | None, signature: str | None, limit: int | None) -> list[Row]: ...
    def script(self, *, opened: int | None, run_id: str | None, map: str | None, start: int | None, state: str | None, text: str | None, signature: str | None, limit: int | None) -> scripts.Script[list[Row]]: ...

class _RunPageItem(Named):
    def __call__(self, conn: _Conn, /, *, most: int | None, opened: int | None, run_id: str | None, map: str | None, key: str | None) -> Row | None: ...
    def script(self, *, most: int | None, opened: int | None, run_id: str | None, map: str | None, key: str | None) -> scripts.Script[Row | None]: ...

class _RunPageValue(Named):
    def __call__(self, conn: _Conn, /, *, node: str | None, name: str | None, run_id: str | None) -> Any: ...
    def script(self, *, node: str | None, name: str | None, run_id: str | None) -> scripts.Script[Any]: ...

class _RunPage:
    head: _RunPageHead
    """Return a run with its output, its schedule and its first child runs, and the number of nodes of its graph. Values over
    `most` bytes are NULL. Returns no row if the run does not exist."""
    steps: _RunPageSteps
    """Count the nodes of a run by status, for each step in the order of their start: the node id up to its first slash or
    bracket. The first row counts all of them and has no step; a run without nodes has no row. `of_items`: how many belong
    to items of maps. `finished_at` is NULL while a node has not ended, and `elapsed_s` grows.
    Columns: step, counts, of_items, started_at, finished_at, elapsed_s."""
    nodes: _RunPageNodes
    """Return the first nodes of a run without their values, in the order of their start. `active`: only nodes that run, wait
    for an answer or failed."""
    events: _RunPageEvents
    """Return the last events that begin and end the attempts of these nodes, or of all if NULL, the newest first. With a
    `claim` they have their errors and details, and the traceback of this claim.
    Columns: node_id, event_type, claim_no, worker_id, host_label, elapsed_s, created_at, error, detail."""
    node: _RunPageNode
    """Return one node with its values up to `most` bytes, their sizes as stored, and the last parts that it has streamed.
    Returns no row if it is not queued yet."""
    log: _RunPageLog
    """Return the log of an attempt of a node. Returns no row if nothing is stored.
    Columns: head, tail, cut_bytes, updated_at."""
    job_steps: _RunPageJobSteps
    """Return the first steps of a node's job, in the order in which they began first, without their values.
    Columns: name, key, state, error, attempts, ended_at."""
    map: _RunPageMap
    """Return the counters of a map. Returns no row if it was not opened yet.
    Columns: node_id, total, done, failed, open, next_position, may_fail, at_once."""
    buckets: _RunPageBuckets
    """Return the worst state of the items in each of so many `buckets` of a map, by position: 0 done, 1 waiting, 2 open,
    3 failed. It reads the items once.
    Columns: bucket, state."""
    groups: _RunPageGroups
    """Count the first `most` failed items of a map by the beginning of their error with its numbers replaced, the largest
    group first. `kinds`: how many groups there are.
    Columns: signature, n, kinds."""
    items: _RunPageItems
    """Return items of a map from a position on, in the order of the source. A filter that is NULL matches every item.
    `state`: done, failed, open or waiting. `text`: a part of the key.
    Columns: position, key, error, state."""
    item: _RunPageItem
    """Return an item of a map with its value up to `most` bytes. Returns no row if there is none with this key.
    Columns: position, key, error, bytes, item, state."""
    value: _RunPageValue
    """Return one whole value, `inputs` or `output`, of a node, or of the run if `node` is NULL."""

run_page: _RunPage

class _RunsSubmit(Named):
    def __call__(self, conn: _Conn, /, *, run_id: str | None, workflow_name: str | None, parcel_id: str | None, out_dir: str | None, priority: int | None, context: str | None, headers: str | None) -> Row: ...
    def script(self, *, run_id: str | None, workflow_name: str | None, parcel_id: str | None, out_dir: str | None, priority: int | None, context: str | None, headers: str | None) -> scripts.Script[Row]: ...

class _RunsInsert(Named):
    def __call__(self, conn: _Conn, /, *, run_id: str | None, workflow_name: str | None, parcel_id: str | None, out_dir: str | None, priority: int | None, context: str | None, status: str | None, mode: str | None, headers: str | None) -> Row: ...
    def script(self, *, run_id: str | None, workflow_name: str | None, parcel_id: str | None, out_dir: str | None, priority: int | None, context: str | None, status: str | None, mode: str | None, headers: str | None) -> scripts.Script[Row]: ...

class _RunsGet(Named):
    def __call__(self, conn: _Conn, /, *, run_id: str | None) -> Row | None: ...
    def script(self, *, run_id: str | None) -> scripts.Script[Row | None]: ...

class _RunsOutput(Named):
    def __call__(self, conn: _Conn, /, *, run_id: str | None) -> Any: ...
    def script(self, *, run_id: str | None) -> scripts.Script[Any]: ...

class _RunsDelete(Named):
    def __call__(self, conn: _Conn, /, *, run_id: str | None) -> int: ...
    def script(self, *, run_id: str | None) -> scripts.Script[None]: ...

class _RunsUpdate(Named):
    def __call__(self, conn: _Conn, /, *, given: _Texts | None, parcel_id: str | None, workflow_name: str | None, status: str | None, priority: int | None, current_step_id: str | None, progress_pct: float | None, steps_done: str | None, context: str | None, input_spec: str | None, error: str | None, out_dir: str | None, mode: str | None, resume_count: int | None, queued_at: datetime | None, started_at: datetime | None, finished_at: datetime | None, available_at: datetime | None, run_id: str | None) -> Row | None: ...
    def script(self, *, given: _Texts | None, parcel_id: str | None, workflow_name: str | None, status: str | None, priority: int | None, current_step_id: str | None, progress_pct: float | None, steps_done: str | None, context: str | None, input_spec: str | None, error: str | None, out_dir: str | None, mode: str | None, resume_count: int | None, queued_at: datetime | None, started_at: datetime | None, finished_at: datetime | None, available_at: datetime | None, run_id: str | None) -> scripts.Script[Row | None]: ...

class _RunsStartable(Named):
    def __call__(self, conn: _Conn, /, *, undefined: bool | None, set_aside: _Texts | None, limit: int | None) -> list[Row]: ...
    def script(self, *, undefined: bool | None, set_aside: _Texts | None, limit: int | None) -> scripts.Script[list[Row]]: ...

class _RunsStartableIfFree(Named):
    def __call__(self, conn: _Conn, /, *, undefined: bool | None, set_aside: _Texts | None, limit: int | None) -> list[Row]: ...
    def script(self, *, undefined: bool | None, set_aside: _Texts | None, limit: int | None) -> scripts.Script[list[Row]]: ...

class _RunsUndefined(Named):
    def __call__(self, conn: _Conn, /, *, limit: int | None) -> list[Any]: ...
    def script(self, *, limit: int | None) -> scripts.Script[list[Any]]: ...

class _RunsHead(Named):
    def __call__(self, conn: _Conn, /, *, run_id: str | None) -> Row | None: ...
    def script(self, *, run_id: str | None) -> scripts.Script[Row | None]: ...

class _RunsLock(Named):
    def __call__(self, conn: _Conn, /, *, run_id: str | None) -> Row | None: ...
    def script(self, *, run_id: str | None) -> scripts.Script[Row | None]: ...

class _RunsLockIfFree(Named):
    def __call__(self, conn: _Conn, /, *, run_id: str | None) -> Row | None: ...
    def script(self, *, run_id: str | None) -> scripts.Script[Row | None]: ...

class _RunsDefinition(Named):
    def __call__(self, conn: _Conn, /, *, run_id: str | None) -> Any: ...
    def script(self, *, run_id: str | None) -> scripts.Script[Any]: ...

class _RunsDefinitionTexts(Named):
    def __call__(self, conn: _Conn, /, *, ids: _Texts | None, most: int | None) -> list[Row]: ...
    def script(self, *, ids: _Texts | None, most: int | None) -> scripts.Script[list[Row]]: ...

class _RunsContextType(Named):
    def __call__(self, conn: _Conn, /, *, run_id: str | None) -> Any: ...
    def script(self, *, run_id: str | None) -> scripts.Script[Any]: ...

class _RunsContext(Named):
    def __call__(self, conn: _Conn, /, *, run_id: str | None) -> Any: ...
    def script(self, *, run_id: str | None) -> scripts.Script[Any]: ...

class _RunsFreezeDefinition(Named):
    def __call__(self, conn: _Conn, /, *, definition: str | None, digest: str | None, run_id: str | None, workflow: str | None) -> int: ...
    def script(self, *, definition: str | None, digest: str | None, run_id: str | None, workflow: str | None) -> scripts.Script[None]: ...

class _RunsStart(Named):
    def __call__(self, conn: _Conn, /, *, run_id: str | None) -> int: ...
    def script(self, *, run_id: str | None) -> scripts.Script[None]: ...

class _RunsStartAgain(Named):
    def __call__(self, conn: _Conn, /, *, run_id: str | None) -> None: ...
    def script(self, *, run_id: str | None) -> scripts.Script[None]: ...

class _RunsStartFresh(Named):
    def __call__(self, conn: _Conn, /, *, generation: int | None, born: int | None, definition: str | None, digest: str | None, nodes: str | None, out_dir: str | None, run_id: str | None, version: str | None) -> Any: ...
    def script(self, *, generation: int | None, born: int | None, definition: str | None, digest: str | None, nodes: str | None, out_dir: str | None, run_id: str | None, version: str | None) -> scripts.Script[Any]: ...

class _RunsSetOutDir(Named):
    def __call__(self, conn: _Conn, /, *, out_dir: str | None, run_id: str | None) -> Any: ...
    def script(self, *, out_dir: str | None, run_id: str | None) -> scripts.Script[Any]: ...

class _RunsComplete(Named):
    def __call__(self, conn: _Conn, /, *, run_id: str | None) -> int: ...
    def script(self, *, run_id: str | None) -> scripts.Script[None]: ...

class _RunsFail(Named):
    def __call__(self, conn: _Conn, /, *, error: str | None, run_id: str | None) -> int: ...
    def script(self, *, error: str | None, run_id: str | None) -> scripts.Script[None]: ...

class _RunsCancel(Named):
    def __call__(self, conn: _Conn, /, *, error: str | None, run_id: str | None) -> Row | None: ...
    def script(self, *, error: str | None, run_id: str | None) -> scripts.Script[Row | None]: ...

class _RunsRunning(Named):
    def __call__(self, conn: _Conn, /, *, after: str | None, limit: int | None) -> list[Any]: ...
    def script(self, *, after: str | None, limit: int | None) -> scripts.Script[list[Any]]: ...

class _RunsStalled(Named):
    def __call__(self, conn: _Conn, /, *, quiet_s: float | None, ids: _Texts | None) -> list[Any]: ...
    def script(self, *, quiet_s: float | None, ids: _Texts | None) -> scripts.Script[list[Any]]: ...

class _RunsStopper(Named):
    def __call__(self, conn: _Conn, /, *, run_id: str | None) -> Row | None: ...
    def script(self, *, run_id: str | None) -> scripts.Script[Row | None]: ...

class _RunsDelayStart(Named):
    def __call__(self, conn: _Conn, /, *, error: str | None, after_s: float | None, run_id: str | None) -> Any: ...
    def script(self, *, error: str | None, after_s: float | None, run_id: str | None) -> scripts.Script[Any]: ...

class _RunsReopen(Named):
    def __call__(self, conn: _Conn, /, *, run_id: str | None) -> Row | None: ...
    def script(self, *, run_id: str | None) -> scripts.Script[Row | None]: ...

class _RunsReopenTwoGenerationsOn(Named):
    def __call__(self, conn: _Conn, /, *, run_id: str | None) -> Row | None: ...
    def script(self, *, run_id: str | None) -> scripts.Script[Row | None]: ...

class _RunsCancelNodesAgain(Named):
    def __call__(self, conn: _Conn, /, *, generation: int | None, run_id: str | None, nodes: _Texts | None) -> None: ...
    def script(self, *, generation: int | None, run_id: str | None, nodes: _Texts | None) -> scripts.Script[None]: ...

class _RunsWithdrawCancelRequests(Named):
    def __call__(self, conn: _Conn, /, *, run_id: str | None) -> None: ...
    def script(self, *, run_id: str | None) -> scripts.Script[None]: ...

class _RunsRequeueRunning(Named):
    def __call__(self, conn: _Conn, /) -> list[Any]: ...
    def script(self) -> scripts.Script[list[Any]]: ...

class _RunsNewest(Named):
    def __call__(self, conn: _Conn, /, *, status: str | None, workflow: str | None, since: datetime | None, since_ago: timedelta | None, until: datetime | None, until_ago: timedelta | None, text: str | None, low: str | None, high: str | None, inputs: str | None, before: datetime | None, before_id: str | None, limit: int | None, most: int | None, by_workflow: bool | None, schedule: str | None, machine: str | None) -> list[Row]: ...
    def script(self, *, status: str | None, workflow: str | None, since: datetime | None, since_ago: timedelta | None, until: datetime | None, until_ago: timedelta | None, text: str | None, low: str | None, high: str | None, inputs: str | None, before: datetime | None, before_id: str | None, limit: int | None, most: int | None, by_workflow: bool | None, schedule: str | None, machine: str | None) -> scripts.Script[list[Row]]: ...

class _Runs:
    submit: _RunsSubmit
    """Insert a queued run and return its row. It names only columns that a role for `submit` may
    insert, see docs/security.md."""
    insert: _RunsInsert
    """Insert a run with a status and a mode of the caller's choice and return its row."""
    get: _RunsGet
    """Return a run. Returns no row if the run does not exist."""
    output: _RunsOutput
    """Return the output of a run. Returns no row if it has none, or has not completed."""
    delete: _RunsDelete
    """Delete a run; its jobs, files, events and answers go with it by their foreign keys."""
    update: _RunsUpdate
    """Set the columns that `given` names and return the row. Returns no row if the run does not exist,
    or the status of a run that is over would change. `failed` or `cancelled` to `queued` reopens a
    run. A column that is not given keeps its stored value as it is, also a large one."""
    startable: _RunsStartable
    """Return the queued runs that may start now, in the order in which they should, as `head` returns
    them, without the runs `set_aside`. `undefined`: also the runs that have no definition yet.
    Columns: id, workflow_name, status, priority, mode, out_dir, generation, revision, start_attempts, has_definition, born, version."""
    startable_if_free: _RunsStartableIfFree
    """Return runs as `startable` does, except locked runs.
    Columns: id, workflow_name, status, priority, mode, out_dir, generation, revision, start_attempts, has_definition, born, version."""
    undefined: _RunsUndefined
    """Return the ids of queued runs that may start now and have no definition yet."""
    head: _RunsHead
    """Return a run without its definition and context. Returns no row if the run does not exist. `born`
    never raises, as the cast of an infinite time would. Each change of the row gives it another
    `version`. A run that was deleted and submitted again has another `born`.
    Columns: id, workflow_name, status, priority, mode, out_dir, generation, revision, start_attempts, has_definition, born, version."""
    lock: _RunsLock
    """Lock the row of a run against other dispatchers and return it as `head` does. Inserts of rows
    that reference the run pass this lock. Returns no row if the run does not exist.
    Columns: id, workflow_name, status, priority, mode, out_dir, generation, revision, start_attempts, has_definition, born."""
    lock_if_free: _RunsLockIfFree
    """Lock a run as `lock` does. Returns no row if the run does not exist, or another transaction has it locked.
    Columns: id, workflow_name, status, priority, mode, out_dir, generation, revision, start_attempts, has_definition, born."""
    definition: _RunsDefinition
    """Return the definition of a run, frozen at its first start; NULL before that."""
    definition_texts: _RunsDefinitionTexts
    """Return the definitions that these runs have, as text, if they are at most `most` bytes as stored (of any size if
    NULL). The same definition is always the same text. LIMIT forces a look-up per run, since a plan that was made for a
    small table would read the whole table later.
    Columns: id, text."""
    context_type: _RunsContextType
    """Return the JSON type of a run's context, as `object`."""
    context: _RunsContext
    """Return a run's own context, without the outputs of its nodes."""
    freeze_definition: _RunsFreezeDefinition
    """Store the definition of a run that has none, and still has this workflow."""
    start: _RunsStart
    """Change a queued run to running."""
    start_again: _RunsStartAgain
    """Queue a run that is not over again, at its place, so that its start opens the remaining items of maps."""
    start_fresh: _RunsStartFresh
    """Start a run that never started: freeze its definition, change it to running, insert its first nodes. Return how
    many nodes it inserted, or NULL if the run has changed since the caller read it, or is locked. Returns no row
    if the run does not exist, its context is no object, or it has changed since the caller read its `version`."""
    set_out_dir: _RunsSetOutDir
    """Store the folder of a run that has none, and return the run's folder."""
    complete: _RunsComplete
    """Change a run that has started and is not over to completed."""
    fail: _RunsFail
    """Change a run that is not over to failed; a trigger cancels its waiting nodes."""
    cancel: _RunsCancel
    """Change a run that is not over to cancelled and return its row; a trigger cancels its waiting
    nodes and requests that the running ones end."""
    running: _RunsRunning
    """Return the ids of running runs after the id `after`, in their order. OFFSET 0 keeps it from
    walking the runs that have ended."""
    stalled: _RunsStalled
    """Of these runs, return the ones that cannot move forward; see `queue_workflows_stalled_runs`.
    `quiet_s`: seconds without an ended node before a run counts."""
    stopper: _RunsStopper
    """Return the node that keeps a run from going on, with its status, `deleted` if it has no row any
    more. A node that ends the run comes first. A failed item is left out, because its map decides
    whether the run fails. Also left out are nodes of an earlier generation, which run again, and
    nodes that were deleted before an upgrade, since it queues them again if its definition has them.
    Columns: node_id, status, error."""
    delay_start: _RunsDelayStart
    """Count a start that failed and make the run due `after_s` seconds from now. Return how many
    starts failed. A count that no engine wrote never overflows."""
    reopen: _RunsReopen
    """Queue a failed or cancelled run again and return its row; a trigger raises its generation."""
    reopen_two_generations_on: _RunsReopenTwoGenerationsOn
    """Queue a run that is over again, two generations on, and return its row. The nodes that
    `cancel_nodes_again` changes get the generation in between."""
    cancel_nodes_again: _RunsCancelNodesAgain
    """Change nodes of a reopened run to cancelled in an earlier generation, so that its start opens
    them. No other write could take them out of a terminal state."""
    withdraw_cancel_requests: _RunsWithdrawCancelRequests
    """Let the nodes of a reopened run that still run go on, as the guard of a reopened run does."""
    requeue_running: _RunsRequeueRunning
    """Queue every running run again, at the front, and count a resume of each; return their ids."""
    newest: _RunsNewest
    """Return a page of the newest runs, each with `nodes`, the number of its nodes by status, and `nodes_total`, the number
    of the nodes of its definition and of the items of its maps. A filter that is NULL matches every run; `low` and `high`
    are the range of UUIDs that begin with `text`. `before`, `before_id`: only runs after this one in the order of the
    list. `most`: how many runs are examined at most. If these are not enough, the last row is the one at the `place`
    `most`, which is in the list only if it `fits`. `by_workflow`: they are of the workflow and not of the status, if both
    are given. A plan that was kept would be the one of a smaller table."""

runs: _Runs

class _SamplesPut(Named):
    def __call__(self, conn: _Conn, /, *, host: str | None, every_s: int | None, sample: str | None, notify: bool | None) -> None: ...
    def script(self, *, host: str | None, every_s: int | None, sample: str | None, notify: bool | None) -> scripts.Script[None]: ...

class _SamplesBetween(Named):
    def __call__(self, conn: _Conn, /, *, host: str | None, since: datetime | None, past_s: float | None, until: datetime | None) -> list[Row]: ...
    def script(self, *, host: str | None, since: datetime | None, past_s: float | None, until: datetime | None) -> scripts.Script[list[Row]]: ...

class _SamplesOfHosts(Named):
    def __call__(self, conn: _Conn, /, *, hosts: _Texts | None, past_s: float | None, limit: int | None) -> list[Row]: ...
    def script(self, *, hosts: _Texts | None, past_s: float | None, limit: int | None) -> scripts.Script[list[Row]]: ...

class _SamplesLast(Named):
    def __call__(self, conn: _Conn, /, *, host: str | None, since: datetime | None, until: datetime | None) -> Row | None: ...
    def script(self, *, host: str | None, since: datetime | None, until: datetime | None) -> scripts.Script[Row | None]: ...

class _SamplesHosts(Named):
    def __call__(self, conn: _Conn, /) -> list[Any]: ...
    def script(self) -> scripts.Script[list[Any]]: ...

class _SamplesPrune(Named):
    def __call__(self, conn: _Conn, /) -> int: ...
    def script(self) -> scripts.Script[None]: ...

class _Samples:
    put: _SamplesPut
    """Store a hardware sample in the ring of its interval (in none if NULL) and, if requested, notify
    it on the channel hw_metrics. The commit does not wait for the disk."""
    between: _SamplesBetween
    """Return the samples of a host between two instants, the oldest first. `since` NULL stands
    for `past_s` seconds ago, `until` NULL for now.
    Columns: every_s, sampled_at, sample."""
    of_hosts: _SamplesOfHosts
    """Return the newest samples of hosts, a minute each, up to `limit` of each within `past_s` seconds, the oldest first.
    Only the slots of that time are read, as queue_workflows_put_sample() counts them.
    Columns: host_label, sampled_at, sample."""
    last: _SamplesLast
    """Return the last sample of a host between two instants. Returns no row if there is none.
    Columns: every_s, sampled_at, sample."""
    hosts: _SamplesHosts
    """Return the hosts that have samples."""
    prune: _SamplesPrune
    """Delete the samples that are over a day old. The frequent ones stay as long as the others:
    for a machine that went silent they show what it did last."""

samples: _Samples

class _ScheduleDefinitionsPut(Named):
    def __call__(self, conn: _Conn, /, *, name: str | None, expression: str | None, tz: str | None, task_name: str | None, args: str | None, workflow_name: str | None, inputs: str | None, queue: str | None, priority: int | None, idempotency_key: str | None, headers: str | None, catch_up: str | None, catch_up_max: int | None, catch_up_within_s: float | None, overlap: str | None, jitter_s: float | None, start_at: datetime | None, end_at: datetime | None, source: str | None, app: str | None, on_failure: bool | None, definition_hash: str | None, columns: _Texts | None) -> Row | None: ...
    def script(self, *, name: str | None, expression: str | None, tz: str | None, task_name: str | None, args: str | None, workflow_name: str | None, inputs: str | None, queue: str | None, priority: int | None, idempotency_key: str | None, headers: str | None, catch_up: str | None, catch_up_max: int | None, catch_up_within_s: float | None, overlap: str | None, jitter_s: float | None, start_at: datetime | None, end_at: datetime | None, source: str | None, app: str | None, on_failure: bool | None, definition_hash: str | None, columns: _Texts | None) -> scripts.Script[Row | None]: ...

class _ScheduleDefinitionsBegin(Named):
    def __call__(self, conn: _Conn, /, *, now: datetime | None, name: str | None) -> None: ...
    def script(self, *, now: datetime | None, name: str | None) -> scripts.Script[None]: ...

class _ScheduleDefinitionsAdopt(Named):
    def __call__(self, conn: _Conn, /, *, name: str | None, now: datetime | None) -> None: ...
    def script(self, *, name: str | None, now: datetime | None) -> scripts.Script[None]: ...

class _ScheduleDefinitionsStored(Named):
    def __call__(self, conn: _Conn, /, *, app: str | None) -> list[Row]: ...
    def script(self, *, app: str | None) -> scripts.Script[list[Row]]: ...

class _ScheduleDefinitionsOwner(Named):
    def __call__(self, conn: _Conn, /, *, name: str | None) -> Row | None: ...
    def script(self, *, name: str | None) -> scripts.Script[Row | None]: ...

class _ScheduleDefinitionsClash(Named):
    def __call__(self, conn: _Conn, /, *, app: str | None, name: str | None) -> None: ...
    def script(self, *, app: str | None, name: str | None) -> scripts.Script[None]: ...

class _ScheduleDefinitionsEndClashes(Named):
    def __call__(self, conn: _Conn, /, *, app: str | None, names: _Texts | None) -> None: ...
    def script(self, *, app: str | None, names: _Texts | None) -> scripts.Script[None]: ...

class _ScheduleDefinitionsMarkGone(Named):
    def __call__(self, conn: _Conn, /, *, app: str | None, names: _Texts | None) -> list[Any]: ...
    def script(self, *, app: str | None, names: _Texts | None) -> scripts.Script[list[Any]]: ...

class _ScheduleDefinitionsSetPaused(Named):
    def __call__(self, conn: _Conn, /, *, paused: bool | None, name: str | None) -> int: ...
    def script(self, *, paused: bool | None, name: str | None) -> scripts.Script[None]: ...

class _ScheduleDefinitionsLock(Named):
    def __call__(self, conn: _Conn, /, *, name: str | None) -> Row | None: ...
    def script(self, *, name: str | None) -> scripts.Script[Row | None]: ...

class _ScheduleDefinitionsRemove(Named):
    def __call__(self, conn: _Conn, /, *, name: str | None) -> int: ...
    def script(self, *, name: str | None) -> scripts.Script[None]: ...

class _ScheduleDefinitionsFind(Named):
    def __call__(self, conn: _Conn, /, *, patience_s: float | None, name: str | None, troubled: bool | None, limit: int | None) -> list[Row]: ...
    def script(self, *, patience_s: float | None, name: str | None, troubled: bool | None, limit: int | None) -> scripts.Script[list[Row]]: ...

class _ScheduleDefinitions:
    put: _ScheduleDefinitionsPut
    """Insert a schedule, or replace the definition of the one of this name, source and app, or bring back one that has left
    the code of this or another app, changed or not. Returns no row if it is the same already, or of another source or app.
    Columns: name, inserted."""
    begin: _ScheduleDefinitionsBegin
    """Let a schedule that the code has changed begin now, by the clock of the scheduler."""
    adopt: _ScheduleDefinitionsAdopt
    """Let a new row of an old-style entry continue from the last fire under its name up to `now`."""
    stored: _ScheduleDefinitionsStored
    """Return the definitions of an app's schedules that are in its code.
    Columns: name, definition_hash."""
    owner: _ScheduleDefinitionsOwner
    """Return whose the schedule of a name is.
    Columns: source, app."""
    clash: _ScheduleDefinitionsClash
    """Record on a schedule that the code of another app names it too."""
    end_clashes: _ScheduleDefinitionsEndClashes
    """Forget the names that an app does not share any more."""
    mark_gone: _ScheduleDefinitionsMarkGone
    """Mark the schedules of an app that its code does not name any more. They do not fire, and keep their history."""
    set_paused: _ScheduleDefinitionsSetPaused
    """Pause or resume a schedule. Instants of the pause never fire."""
    lock: _ScheduleDefinitionsLock
    """Lock one schedule and return it."""
    remove: _ScheduleDefinitionsRemove
    """Delete a schedule."""
    find: _ScheduleDefinitionsFind
    """Return up to `limit` schedules, those with a problem alone if `troubled`: `last_status` of the last job or run,
    `failures`, `late_s` if the next instant is overdue by more than `patience_s` (no scheduler fires it), and `missed`
    if an instant was missed since the last fire. `failures`: how many of the last fires, boot kicks among them, failed in
    a row (100 at most); fires that queued nothing, and jobs and runs that are gone or not over, do not count, nor do fires
    past their retention, except the last. `read_at`: the time of this read."""

schedule_definitions: _ScheduleDefinitions

class _ScheduleRowsDue(Named):
    def __call__(self, conn: _Conn, /, *, app: str | None, names: _Texts | None, aside: _Texts | None, limit: int | None, now: datetime | None, tasks: _Texts | None, patience_s: float | None) -> list[Row]: ...
    def script(self, *, app: str | None, names: _Texts | None, aside: _Texts | None, limit: int | None, now: datetime | None, tasks: _Texts | None, patience_s: float | None) -> scripts.Script[list[Row]]: ...

class _ScheduleRowsWake(Named):
    def __call__(self, conn: _Conn, /, *, app: str | None, names: _Texts | None, aside: _Texts | None, tasks: _Texts | None, patience_s: float | None) -> Row: ...
    def script(self, *, app: str | None, names: _Texts | None, aside: _Texts | None, tasks: _Texts | None, patience_s: float | None) -> scripts.Script[Row]: ...

class _ScheduleRowsPlan(Named):
    def __call__(self, conn: _Conn, /, *, next_at: datetime | None, wake_at: datetime | None, missed_at: datetime | None, name: str | None) -> None: ...
    def script(self, *, next_at: datetime | None, wake_at: datetime | None, missed_at: datetime | None, name: str | None) -> scripts.Script[None]: ...

class _ScheduleRowsNotify(Named):
    def __call__(self, conn: _Conn, /) -> None: ...
    def script(self) -> scripts.Script[None]: ...

class _ScheduleRowsPlanAgain(Named):
    def __call__(self, conn: _Conn, /, *, now: datetime | None, poll_s: float | None, all: bool | None) -> None: ...
    def script(self, *, now: datetime | None, poll_s: float | None, all: bool | None) -> scripts.Script[None]: ...

class _ScheduleRowsFired(Named):
    def __call__(self, conn: _Conn, /, *, fire_at: datetime | None, job_id: str | None, run_id: str | None, name: str | None) -> None: ...
    def script(self, *, fire_at: datetime | None, job_id: str | None, run_id: str | None, name: str | None) -> scripts.Script[None]: ...

class _ScheduleRowsFail(Named):
    def __call__(self, conn: _Conn, /, *, error: str | None, name: str | None) -> None: ...
    def script(self, *, error: str | None, name: str | None) -> scripts.Script[None]: ...

class _ScheduleRowsClaim(Named):
    def __call__(self, conn: _Conn, /, *, name: str | None, fire_at: datetime | None) -> Row | None: ...
    def script(self, *, name: str | None, fire_at: datetime | None) -> scripts.Script[Row | None]: ...

class _ScheduleRowsLastClaimed(Named):
    def __call__(self, conn: _Conn, /, *, name: str | None, now: datetime | None) -> Any: ...
    def script(self, *, name: str | None, now: datetime | None) -> scripts.Script[Any]: ...

class _ScheduleRowsFiredSince(Named):
    def __call__(self, conn: _Conn, /, *, names: _Texts | None, since: datetime | None, now: datetime | None) -> Row | None: ...
    def script(self, *, names: _Texts | None, since: datetime | None, now: datetime | None) -> scripts.Script[Row | None]: ...

class _ScheduleRowsRecord(Named):
    def __call__(self, conn: _Conn, /, *, job_id: str | None, run_id: str | None, skipped: str | None, name: str | None, fire_at: datetime | None) -> None: ...
    def script(self, *, job_id: str | None, run_id: str | None, skipped: str | None, name: str | None, fire_at: datetime | None) -> scripts.Script[None]: ...

class _ScheduleRowsLastStatus(Named):
    def __call__(self, conn: _Conn, /, *, job_id: str | None, run_id: str | None) -> Any: ...
    def script(self, *, job_id: str | None, run_id: str | None) -> scripts.Script[Any]: ...

class _ScheduleRows:
    due: _ScheduleRowsDue
    """Lock up to `limit` schedules that are not planned yet, and up to `limit` that are due; skip
    locked rows. Reads schedules of the table and of this app: only `names`, if given, and not
    `aside`. A schedule whose task this process does not know is left to others for `patience_s`.
    Each half is one range of the index."""
    wake: _ScheduleRowsWake
    """Return whether there are schedules, and when the next that `due` returns is due, or NULL if none is planned.
    Columns: any, wake_at."""
    plan: _ScheduleRowsPlan
    """Store the next instant of a schedule, and the missed one."""
    notify: _ScheduleRowsNotify
    """Wake the schedulers."""
    plan_again: _ScheduleRowsPlanAgain
    """Drop instants that a clock which was ahead has planned or found missed. With `all`, of every schedule that is
    planned after `now`; else only of schedules that fired, skipped, changed or missed an instant after it. In both
    cases, only if they wait longer than a jitter, or than `poll_s` for the end of a job."""
    fired: _ScheduleRowsFired
    """Store the new state of a schedule after a fire."""
    fail: _ScheduleRowsFail
    """Store why a schedule cannot fire."""
    claim: _ScheduleRowsClaim
    """Claim one instant of a schedule. Returns no row if it was claimed before.
    Columns: name."""
    last_claimed: _ScheduleRowsLastClaimed
    """Return the latest instant up to `now` that was claimed, fired or skipped, or NULL."""
    fired_since: _ScheduleRowsFiredSince
    """Return a row if one of the names was claimed for an instant after `since` up to `now`.
    Columns: ."""
    record: _ScheduleRowsRecord
    """Record the outcome of a claimed instant."""
    last_status: _ScheduleRowsLastStatus
    """Return the status of the job or run of the last fire, or NULL if it was deleted."""

schedule_rows: _ScheduleRows

class _SchedulesNow(Named):
    def __call__(self, conn: _Conn, /) -> Any: ...
    def script(self) -> scripts.Script[Any]: ...

class _SchedulesLastFires(Named):
    def __call__(self, conn: _Conn, /, *, names: _Texts | None, until: datetime | None) -> list[Row]: ...
    def script(self, *, names: _Texts | None, until: datetime | None) -> scripts.Script[list[Row]]: ...

class _SchedulesPrune(Named):
    def __call__(self, conn: _Conn, /, *, days: int | None, batch: int | None) -> int: ...
    def script(self, *, days: int | None, batch: int | None) -> scripts.Script[None]: ...

class _Schedules:
    now: _SchedulesNow
    """Return the database's clock: the start of the current transaction."""
    last_fires: _SchedulesLastFires
    """Return the latest instant up to `until` that was fired under each of the names.
    Columns: name, fire_at."""
    prune: _SchedulesPrune
    """Delete up to `batch` instants that were claimed more than `days` days ago."""

schedules: _Schedules

class _SessionsSetUp(Named):
    def __call__(self, conn: _Conn, /, *, statement_ms: str | None, is_local: bool | None, lock_ms: str | None, idle_ms: str | None) -> None: ...
    def script(self, *, statement_ms: str | None, is_local: bool | None, lock_ms: str | None, idle_ms: str | None) -> scripts.Script[None]: ...

class _SessionsSetAll(Named):
    def __call__(self, conn: _Conn, /, *, is_local: bool | None, settings: str | None) -> None: ...
    def script(self, *, is_local: bool | None, settings: str | None) -> scripts.Script[None]: ...

class _SessionsHasTable(Named):
    def __call__(self, conn: _Conn, /, *, table: str | None) -> Any: ...
    def script(self, *, table: str | None) -> scripts.Script[Any]: ...

class _SessionsHold(Named):
    def __call__(self, conn: _Conn, /, *, lock: str | None) -> None: ...
    def script(self, *, lock: str | None) -> scripts.Script[None]: ...

class _SessionsRole(Named):
    def __call__(self, conn: _Conn, /) -> Row | None: ...
    def script(self) -> scripts.Script[Row | None]: ...

class _Sessions:
    set_up: _SessionsSetUp
    """Set the parameters that an engine session depends on, whatever the environment, the role and the
    database say: the timeouts (milliseconds, 0 for none), the isolation, and how values become text
    and back. Compiling (jit) takes longer than our statements do. Without triggers
    (session_replication_role) no rule holds; only a superuser may set it. A server before version 17
    has no transaction_timeout. The encoding is in the DSN. Settings that an operator decides stay:
    search_path, synchronous_commit, default_transaction_read_only and the planner's costs.
    `is_local`: for this transaction alone, since a pooler gives the session to others after it."""
    set_all: _SessionsSetAll
    """Set these settings, a JSON object, for this transaction (`is_local`) or for the session."""
    has_table: _SessionsHasTable
    """Return whether there is a table of this name on the search path."""
    hold: _SessionsHold
    """Hold the advisory lock of a name, shared, for as long as the session lives."""
    role: _SessionsRole
    """Return the role and the schema of this session, quoted as SQL needs them.
    Columns: role, schema."""

sessions: _Sessions

class _TestClockMove(Named):
    def __call__(self, conn: _Conn, /, *, by: timedelta | None) -> None: ...
    def script(self, *, by: timedelta | None) -> scripts.Script[None]: ...

class _TestClockNextDue(Named):
    def __call__(self, conn: _Conn, /, *, after: datetime | None) -> Any: ...
    def script(self, *, after: datetime | None) -> scripts.Script[Any]: ...

class _TestClock:
    move: _TestClockMove
    """Let `by` pass: for the start times and the leases of jobs, the start times of runs, outbox rows and answers that are tried
    again later, the timeouts of input nodes, and since workers and hosts were seen."""
    next_due: _TestClockNextDue
    """Return the seconds until the first instant later than `after` at which something comes due, or
    NULL if there is none."""

test_clock: _TestClock

class _UnservedJobsServed(Named):
    def __call__(self, conn: _Conn, /, *, stale_s: float | None) -> Any: ...
    def script(self, *, stale_s: float | None) -> scripts.Script[Any]: ...

class _UnservedJobsBlockUnserved(Named):
    def __call__(self, conn: _Conn, /, *, table: str | None, queues: _Texts | None, batch: int | None) -> Any: ...
    def script(self, *, table: str | None, queues: _Texts | None, batch: int | None) -> scripts.Script[Any]: ...

class _UnservedJobsUnblockServed(Named):
    def __call__(self, conn: _Conn, /, *, table: str | None, queues: _Texts | None, batch: int | None) -> Any: ...
    def script(self, *, table: str | None, queues: _Texts | None, batch: int | None) -> scripts.Script[Any]: ...

class _UnservedJobs:
    served: _UnservedJobsServed
    """Return the queues that are not paused and have a live worker that takes jobs, as one array.
    A worker that was not seen for `stale_s` seconds is not live."""
    block_unserved: _UnservedJobsBlockUnserved
    """Block up to `batch` jobs of a table that hold a lock key for which jobs in these served queues
    wait, and that are in other queues themselves; return how many."""
    unblock_served: _UnservedJobsUnblockServed
    """Let up to `batch` blocked jobs of a table that are in these served queues wait for their
    lock keys again; return how many."""

unserved_jobs: _UnservedJobs

class _UpgradesHoldQueued(Named):
    def __call__(self, conn: _Conn, /, *, run_id: str | None) -> list[Any]: ...
    def script(self, *, run_id: str | None) -> scripts.Script[list[Any]]: ...

class _UpgradesNodes(Named):
    def __call__(self, conn: _Conn, /, *, run_id: str | None) -> list[Row]: ...
    def script(self, *, run_id: str | None) -> scripts.Script[list[Row]]: ...

class _UpgradesSetVersions(Named):
    def __call__(self, conn: _Conn, /, *, nodes: _Texts | None, versions: _Texts | None, run_id: str | None) -> None: ...
    def script(self, *, nodes: _Texts | None, versions: _Texts | None, run_id: str | None) -> scripts.Script[None]: ...

class _UpgradesDropNodes(Named):
    def __call__(self, conn: _Conn, /, *, run_id: str | None, nodes: _Texts | None) -> None: ...
    def script(self, *, run_id: str | None, nodes: _Texts | None) -> scripts.Script[None]: ...

class _UpgradesMove(Named):
    def __call__(self, conn: _Conn, /, *, definition: str | None, digest: str | None, change: str | None, run_id: str | None) -> Row | None: ...
    def script(self, *, definition: str | None, digest: str | None, change: str | None, run_id: str | None) -> scripts.Script[Row | None]: ...

class _Upgrades:
    hold_queued: _UpgradesHoldQueued
    """Lock the queued nodes of a run and return their ids, without those that another transaction has
    locked: a worker claims or changes them."""
    nodes: _UpgradesNodes
    """Return the nodes of a run, in the order of the queue.
    Columns: node_id, status, generation, is_map."""
    set_versions: _UpgradesSetVersions
    """Set the version of queued nodes of a run."""
    drop_nodes: _UpgradesDropNodes
    """Delete nodes of a run that are queued, failed or cancelled."""
    move: _UpgradesMove
    """Store another definition of a run that is not over, queue the run, so that its start queues what
    is ready, and record who did it, with `change`. The last 20 moves are kept. Returns no row if the
    run has ended."""

upgrades: _Upgrades

class _WaitingFactsJobs(Named):
    def __call__(self, conn: _Conn, /, *, stale_s: float | None, ids: _Texts | None) -> list[Row]: ...
    def script(self, *, stale_s: float | None, ids: _Texts | None) -> scripts.Script[list[Row]]: ...

class _WaitingFactsBuckets(Named):
    def __call__(self, conn: _Conn, /, *, most: int | None, limit: int | None) -> list[Row]: ...
    def script(self, *, most: int | None, limit: int | None) -> scripts.Script[list[Row]]: ...

class _WaitingFactsRun(Named):
    def __call__(self, conn: _Conn, /, *, run: str | None) -> Row | None: ...
    def script(self, *, run: str | None) -> scripts.Script[Row | None]: ...

class _WaitingFactsRunNodes(Named):
    def __call__(self, conn: _Conn, /, *, run: str | None, limit: int | None) -> list[Row]: ...
    def script(self, *, run: str | None, limit: int | None) -> scripts.Script[list[Row]]: ...

class _WaitingFactsWorkers(Named):
    def __call__(self, conn: _Conn, /, *, queues: _Texts | None, stale_s: float | None, models: _Texts | None) -> list[Row]: ...
    def script(self, *, queues: _Texts | None, stale_s: float | None, models: _Texts | None) -> scripts.Script[list[Row]]: ...

class _WaitingFactsMet(Named):
    def __call__(self, conn: _Conn, /, *, ids: _Texts | None) -> list[Row]: ...
    def script(self, *, ids: _Texts | None) -> scripts.Script[list[Row]]: ...

class _WaitingFactsJobsAhead(Named):
    def __call__(self, conn: _Conn, /, *, priority: int | None, queue: str | None, newest: bool | None, seq: int | None, most: int | None) -> Row: ...
    def script(self, *, priority: int | None, queue: str | None, newest: bool | None, seq: int | None, most: int | None) -> scripts.Script[Row]: ...

class _WaitingFactsGpuChoices(Named):
    def __call__(self, conn: _Conn, /, *, models: _Texts | None, workers: str | None) -> list[Row]: ...
    def script(self, *, models: _Texts | None, workers: str | None) -> scripts.Script[list[Row]]: ...

class _WaitingFacts:
    jobs: Mapping[str, _WaitingFactsJobs]
    """Return jobs with the facts that explain their waiting: when each is due, and whether it is due for its host alone
    (`kept`); the event that its handler awaits since its last claim; the owner of its lock key, which runs or is admitted
    next; the limits in force for its partition (its own, else the queue's for partitions), when its next job may be
    admitted (NULL if no time is set) and how many run; whether a worker serves its queue again, if it is blocked because
    none did. For a node, also the status of its run, and how many items of its map have ended."""
    buckets: _WaitingFactsBuckets
    """Return the queued jobs of both families in buckets, the largest first: by queue, by what keeps them (`reason`: the
    blocked_reason, `run_over`, or NULL) and by the object of it (`about`), and by what their workers need. `first_id` is the
    first job of a bucket, `since` when its oldest was queued, `total` how many jobs all buckets have, also those past
    `limit`. `most` jobs of a queue, and as many blocked ones, are read; `is_more`: there are more of them.
    Columns: jobs, queue, reason, about, model, version, module, n, first_id, since, is_more, total."""
    run: _WaitingFactsRun
    """Return the facts that explain why a run waits. Returns no row if the run does not exist.
    Columns: id, workflow_name, status, available_at, definition."""
    run_nodes: _WaitingFactsRunNodes
    """Return the first queued or asking nodes of a run, in the order of the queue, each with the number (`total`) of them all.
    Columns: id, node_id, status, prompt, child_run_id, child_status, total."""
    workers: _WaitingFactsWorkers
    """Return the live workers of these queues, up to 1,000 of each. `current_model` is the model that is warm when the worker
    claims next, `off` the policy of the switch that is OFF for it, `node` and `ingest` its running jobs. `misfits`: for
    each of these models the GPU memory that it needs, and why a gpu worker does not claim its jobs: `model` (the worker
    does not know it), `vram` (too little GPU memory) or null. Alike workers of a host share one answer.
    Columns: worker_id, host_label, queue, pid, state, known_models, current_model, vram_total_mb, claim, throttle, gpu_fault, off, node, ingest, misfits."""
    met: _WaitingFactsMet
    """Return which workers did not know these nodes.
    Columns: id, workers."""
    jobs_ahead: Mapping[str, _WaitingFactsJobsAhead]
    """Count the due jobs before this one in the order of the claim, up to `most`: all of them, and the ones of a better priority.
    Nodes count only if their run is live. `models`: only nodes without a model or with one of these; NULL allows any.
    Columns: better, every."""
    gpu_choices: _WaitingFactsGpuChoices
    """Return for each of these gpu workers, a JSON array, the choice of its next claim: the model (`can` has each of which it
    can take jobs), why, the priority (`band`) and the job (`seq`). `held`: by each of `models` that its policy leaves to
    workers that hold it, their hosts (`holders`), the seconds until one is free (`reach_s`) and of a load here (`load_s`).
    Columns: worker_id, can, model, why, band, seq, held."""

waiting_facts: _WaitingFacts

class _WorkersBeat(Named):
    def __call__(self, conn: _Conn, /, *, host_label: str | None, queue: str | None, concurrency: int | None, current_model: str | None, known_models: _Texts | None, update_current_model: bool | None) -> None: ...
    def script(self, *, host_label: str | None, queue: str | None, concurrency: int | None, current_model: str | None, known_models: _Texts | None, update_current_model: bool | None) -> scripts.Script[None]: ...

class _WorkersReport(Named):
    def __call__(self, conn: _Conn, /, *, obey: bool | None, host_label: str | None, queue: str | None, worker_id: str | None, pid: int | None, state: str | None, job_ids: _Texts | None, detail: str | None, current_model: str | None, known_models: _Texts | None, vram_total_mb: int | None, concurrency: int | None) -> None: ...
    def script(self, *, obey: bool | None, host_label: str | None, queue: str | None, worker_id: str | None, pid: int | None, state: str | None, job_ids: _Texts | None, detail: str | None, current_model: str | None, known_models: _Texts | None, vram_total_mb: int | None, concurrency: int | None) -> scripts.Script[None]: ...

class _WorkersFillMemory(Named):
    def __call__(self, conn: _Conn, /, *, stale_s: float | None, but: _Texts | None, memory: _Texts | None) -> Row | None: ...
    def script(self, *, stale_s: float | None, but: _Texts | None, memory: _Texts | None) -> scripts.Script[Row | None]: ...

class _WorkersStop(Named):
    def __call__(self, conn: _Conn, /, *, worker: str | None) -> None: ...
    def script(self, *, worker: str | None) -> scripts.Script[None]: ...

class _WorkersLastDetail(Named):
    def __call__(self, conn: _Conn, /, *, prefix: str | None) -> Any: ...
    def script(self, *, prefix: str | None) -> scripts.Script[Any]: ...

class _WorkersRecordDeath(Named):
    def __call__(self, conn: _Conn, /, *, orderly: bool | None, detail: str | None, prefix: str | None) -> None: ...
    def script(self, *, orderly: bool | None, detail: str | None, prefix: str | None) -> scripts.Script[None]: ...

class _WorkersClearModel(Named):
    def __call__(self, conn: _Conn, /, *, mark_stale: bool | None, host: str | None, queue: str | None) -> Row | None: ...
    def script(self, *, mark_stale: bool | None, host: str | None, queue: str | None) -> scripts.Script[Row | None]: ...

class _WorkersClearHeartbeat(Named):
    def __call__(self, conn: _Conn, /, *, gone: str | None, live_s: float | None, host: str | None, queue: str | None) -> None: ...
    def script(self, *, gone: str | None, live_s: float | None, host: str | None, queue: str | None) -> scripts.Script[None]: ...

class _WorkersFlagStale(Named):
    def __call__(self, conn: _Conn, /, *, stale_s: float | None) -> list[Row]: ...
    def script(self, *, stale_s: float | None) -> scripts.Script[list[Row]]: ...

class _WorkersList(Named):
    def __call__(self, conn: _Conn, /, *, stale_s: float | None, absent: bool | None) -> list[Row]: ...
    def script(self, *, stale_s: float | None, absent: bool | None) -> scripts.Script[list[Row]]: ...

class _WorkersSwitchedOff(Named):
    def __call__(self, conn: _Conn, /) -> list[Row]: ...
    def script(self) -> scripts.Script[list[Row]]: ...

class _WorkersFlagged(Named):
    def __call__(self, conn: _Conn, /, *, host: str | None) -> list[Row]: ...
    def script(self, *, host: str | None) -> scripts.Script[list[Row]]: ...

class _WorkersCountHeartbeats(Named):
    def __call__(self, conn: _Conn, /, *, live_s: float | None) -> list[Row]: ...
    def script(self, *, live_s: float | None) -> scripts.Script[list[Row]]: ...

class _WorkersPrune(Named):
    def __call__(self, conn: _Conn, /) -> int: ...
    def script(self) -> scripts.Script[None]: ...

class _Workers:
    beat: _WorkersBeat
    """Record that a host serves a queue, for an app that runs workers of its own; clear its dead
    flag. `known_models` NULL leaves them as they are."""
    report: _WorkersReport
    """Write the row of a worker process and the heartbeat of its host and queue. A worker that
    obeys controls and is switched off is draining while it has a job, and else paused or
    parked: then its host's heartbeat is left to age."""
    fill_memory: _WorkersFillMemory
    """Return a live worker, not in `but`, that has reported running jobs and that it fills one of these
    memories. Returns no row if there is none. `memory` has ids as in the `memory` of the detail that
    workers report.
    Columns: worker_id."""
    stop: _WorkersStop
    """Record that a worker ended in good order."""
    last_detail: _WorkersLastDetail
    """Return the last report of the worker of a process. The ids of the workers of a process start with
    its prefix. Returns no row if it never reported."""
    record_death: _WorkersRecordDeath
    """Mark the workers of a process that has ended, unless they are marked, and add how it ended.
    `prefix` begins their ids. They have stopped if `orderly`, else they are dead."""
    clear_model: _WorkersClearModel
    """Clear the loaded model in the heartbeat of a host and queue; return the row. `mark_stale` also
    sets the heartbeat back by an hour. Returns no row if that heartbeat does not exist.
    Columns: host_label, queue, concurrency, current_model, known_models, last_seen, last_flagged_dead_at, vram_total_mb, detail."""
    clear_heartbeat: _WorkersClearHeartbeat
    """Clear the model in a heartbeat for a worker that leaves, and set the heartbeat back by an
    hour unless another worker of the host and queue was seen within `live_s` seconds: an old
    heartbeat would make that one count as dead.
    `gone` begins the id of the worker."""
    flag_stale: _WorkersFlagStale
    """Flag the heartbeats that are older than `stale_s` seconds, are not flagged, and have running jobs
    under their host and queue; return them with the number of these jobs.
    Columns: host_label, queue, concurrency, current_model, known_models, last_seen, last_flagged_dead_at, vram_total_mb, detail, running_jobs."""
    list: _WorkersList
    """List the worker processes that have not ended and were seen within a day, for an operator. One that was not seen for
    `stale_s` seconds is dead. Each has its running jobs (`job_ids`, and as `jobs` their kind, name, run and seconds), the
    model of its host's heartbeat (a worker of one GPU: its own), and the control row that switches it off now: of its queue's
    and the host's row, the one whose policy queue_workflows_off_policy() returns. `limits`: the use of the limits of its
    queue, if that has settings; whether jobs could be claimed but for these (`ready`) or are blocked by those of their
    partitions (`limited`). Behind them with `absent`: the control rows that are off without a live worker."""
    switched_off: _WorkersSwitchedOff
    """Return the control rows that switch workers off now, whether or not there are such workers.
    The queue 'all' stands for every queue of its host.
    Columns: host_label, queue, stop_policy, requested_by, reason, until_at, switched_at, until_s."""
    flagged: _WorkersFlagged
    """Return the queues of a host, or (NULL) of all hosts, whose heartbeats are flagged as dead and
    that are not switched off.
    Columns: host_label, queue, flagged_at, age_s."""
    count_heartbeats: _WorkersCountHeartbeats
    """Count the heartbeats of each queue that are younger than `live_s` seconds.
    Columns: queue, n."""
    prune: _WorkersPrune
    """Delete the rows of workers that ended, or were last seen, over a day ago."""

workers: _Workers
