"""Made from `sql/queries/` by `python -m tests.support.stubgen`; do not edit."""

from collections.abc import Mapping
from typing import Final

JOB_TABLES: Final[tuple[str, str]]

def comments(noun: str) -> dict[str, str]: ...

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
    """A completed run has only completed or skipped nodes, but for items that may fail, and no node
    waits under a terminal run after a sweep."""
    cancel_holds: bytes
    """After a cancel is acknowledged, no node of the run is claimed."""
    one_job_per_key: bytes
    """One idempotency key gives one job."""
    one_fire: bytes
    """A schedule entry fires at most once for each instant."""
    attempts_bounded: bytes
    """The attempts, crashes and lapses of a job stay within their limits."""
    off_holds: bytes
    """A worker that is switched OFF claims nothing."""
    runs_advance: bytes
    """A running run has a node, an outbox event or an answer that moves it forward."""
    maps_agree: bytes
    """The counters of a map are those of its items, and a map that ended has no open item."""
    streams_numbered: bytes
    """The parts of a stream are numbered without a gap from 1 within a claim of its job, and none is
    stored after that claim has ended."""
    steps_agree: bytes
    """A step belongs to a claim that its job has had, one that is done has its end, and no wait outlasts its event."""

audit: _Audit

class _BadRows:
    stuck_starts: bytes
    """Return runs whose start failed."""
    stuck_late_starts: bytes
    """Return runs whose delayed start is due."""
    stuck_events: bytes
    """Return runs with an outbox event that could not be dispatched."""
    stuck_answers: bytes
    """Return runs with an answer that could not be taken."""
    stuck_input_timeouts: bytes
    """Return runs with an input node whose wait is over and was not ended."""
    stuck_delayed_nodes: bytes
    """Return runs with a delayed node that is due."""
    stuck_delayed_ingest_jobs: bytes
    """Return delayed ingest jobs that are due."""
    stuck_set_aside_nodes: bytes
    """Return runs with a node that no claim finds, as it could neither run nor fail."""
    stuck_set_aside_ingest_jobs: bytes
    """Return ingest jobs that no claim finds, as they could neither run nor fail."""
    stuck_lapsed_nodes: bytes
    """Return runs with a running node whose lease lapsed."""
    stuck_lapsed_ingest_jobs: bytes
    """Return running ingest jobs whose lease lapsed."""
    out_of_range_runs: bytes
    """Return unfinished runs that have a time, counter or payload out of range. Reads `examined`
    of them."""
    out_of_range_nodes: bytes
    """As `out_of_range_runs`, for live nodes. Returns the runs that they belong to."""
    out_of_range_ingest_jobs: bytes
    """As `out_of_range_runs`, for queued and running ingest jobs."""
    out_of_range_answers: bytes
    """As `out_of_range_runs`, for answers that are not taken yet. Returns the runs of their
    nodes."""

bad_rows: _BadRows

class _Cancellation:
    lock_job: Mapping[str, bytes]
    """Lock a job until the transaction ends, so that it neither starts nor is handed back meanwhile."""
    cancel_waiting_node: bytes
    """Cancel a node that is queued or waits for an answer. No row: it is neither."""
    cancel_waiting_ingest_job: bytes
    """Cancel a queued ingest job; a trigger records the event. No row: it is not queued."""
    request_end: Mapping[str, bytes]
    """Ask a running job to end, which its worker sees; an earlier request stays. No row: it does not
    run."""
    cancel_queued_nodes: bytes
    """Cancel the queued nodes of a run."""
    cancel_orphans: bytes
    """Cancel up to 500 nodes that wait although their run is over: they were inserted while the run
    ended. OFFSET 0 keeps the look-up of the run one per job: without it, the plan may compare each
    job with every run."""
    orphans: bytes
    """Return the ids of up to 500 nodes that `cancel_orphans` would cancel, without those of `aside`."""
    cancel_these_orphans: bytes
    """Cancel those of these nodes that `cancel_orphans` would cancel."""

cancellation: _Cancellation

class _ClaimIsolation:
    claim_apart: bytes
    """Claim one job of `table`, trying the rows one by one, each in a savepoint. `aside`: of each
    row that raised its id, its run, the error, and its state now."""
    set_aside: bytes
    """End a claimed job of `table` whose outcome cannot be stored. NULL: nothing about it can be
    written."""

claim_isolation: _ClaimIsolation

class _ClaimedJobs:
    node: bytes
    """Return what a worker needs of a node job that it holds, without the context of its run. No
    row: the worker does not hold the job."""
    ingest: bytes
    """Return what a worker needs of an ingest job that it holds. No row: it does not hold the
    job."""
    node_rows: bytes
    """Return a node job as `claims.node_rows` does, without the context of its run. No row: the worker
    does not hold the job."""
    ingest_rows: bytes
    """Return an ingest job as `claims.ingest_rows` does. No row: the worker does not hold the job."""

claimed_jobs: _ClaimedJobs

class _Claims:
    node_step: bytes
    """Record a completed node, if `job` is given, and claim the next node job, if `claim` is
    true. The job is one JSON document; NULL: nothing was claimed. A document with `due_s` alone:
    nothing was claimed, and that many seconds later, at most `look_ahead_s`, a delayed job is due.
    Raises QW001 if the claim to record is lost."""
    nodes_step: bytes
    """Record the completed nodes of the JSON array `done` (NULL: none) and claim up to `claim`
    more, one JSON document for each. If fewer are claimed, the last may be one with `due_s`, as
    of `node_step`. Raises QW001 if one of the claims to record is lost."""
    ingest_step: bytes
    """Record the completed ingest jobs of the JSON array `done` (NULL: none) and claim up to
    `claim` more. If fewer are claimed, the last row may be one without an id: a limit admits the
    next job in `wait_s` seconds, and a delayed job is due in `due_s`, at most `look_ahead_s`. Raises
    QW001 if one of the claims to record is lost."""
    node_rows: bytes
    """Do as `node_step` does, for a worker that passes rows on as texts: the columns that it reads,
    the row as JSON for the handler, and `wait_s` and `due_s` in a row without an id."""
    nodes_rows: bytes
    """Do as `nodes_step` does, and return what `node_rows` returns."""
    ingest_rows: bytes
    """Do as `ingest_step` does, and return what `node_rows` returns."""
    renew: Mapping[str, bytes]
    """Extend the leases of claims, one element of each array a claim, and store their progress (NULL:
    as it was). A claim without a row is lost. `renewed` is false for a row that somebody else has
    locked: its lease stays as it is. `cancel`: the job was cancelled, or its run is over."""
    claim_node: bytes
    """Claim this node, wherever it stands in its queue; return its id. No row: it is not queued, it is
    blocked, its run is over, its queue is paused or limited, or the host is OFF."""
    claim_ingest: bytes
    """Claim this ingest job, as `claim_node` does."""
    is_held: Mapping[str, bytes]
    """Return one row without columns if this claim still holds its job."""
    has_recorded_ingest: bytes
    """Return one row if this claim has left one of the events in the history: its write was
    committed."""
    has_recorded_node: bytes
    """Return the same for a node job. Its events are found by run and node, which are indexed."""
    held_last: Mapping[str, bytes]
    """Return those of `held_by` whose next crash or lapse is their last."""
    held_by: Mapping[str, bytes]
    """Return the claims of workers whose id starts with `prefix`, in the order in which the jobs
    were queued."""

claims: _Claims

class _Controls:
    put: bytes
    """Switch the workers of a host and queue on or off; return the row. A trigger wakes the
    workers."""
    is_over: bytes
    """Return whether an instant has come, by the database's clock."""
    known_queues: bytes
    """Return the queues that a worker of any host has served, or that a control row names."""
    known_hosts: bytes
    """Return the hosts that have had a worker of any queue, or that a control row names."""
    get: bytes
    """Return the control row of a host and queue. No row: it was never switched."""
    off_policy: bytes
    """Return the stop policy of the control row that switches a host and queue off now; NULL: it
    is on."""
    has_table: bytes
    """Return whether the schema has control rows at all."""

controls: _Controls

class _Databases:
    projects: bytes
    """Return every database that people use, with the folder that its comment names and its size."""
    has_schema: bytes
    """Return whether this database has our tables."""
    unfinished: bytes
    """Return how many runs are in no terminal state."""
    matching: bytes
    """Return the databases whose names match a regular expression."""
    try_lock: bytes
    """Take the advisory lock of a database's name for this session; return whether it was free."""
    unlock: bytes
    """Release the advisory lock of a database's name."""
    tables: bytes
    """Return the tables of the current schema."""

databases: _Databases

class _DevelopmentChain:
    is_possible: bytes
    """Return whether a development build may have made this database: it has our ledger, and lacks the
    table in which a release records its functions and triggers."""
    applied: bytes
    """Return the migrations above 12, lowest first. An older ledger has no column `checksum`."""
    forget: bytes
    """Delete the record of the migrations above 12."""
    record: bytes
    """Record the migration of the release that these tables amount to."""

development_chain: _DevelopmentChain

class _Doctor:
    server: bytes
    """Return what answers: its version, whether it is a standby or read-only, and the role."""
    clock: bytes
    """Return the server's clock, which runs on within a transaction."""
    backend_pid: bytes
    """Return the process that executes this statement. Behind a pooler it is not the announced one."""
    settings: bytes
    """Return the settings of these names as they are in force for this role and database."""
    notify: bytes
    """Notify a channel."""
    notification_queue_usage: bytes
    """Return how full the server's queue of notifications is, 0 to 1."""
    transactions: bytes
    """Return the oldest five transactions of this database except this one. `idle_s` is NULL unless
    the backend is idle inside its transaction. pg_read_all_stats shows those of other roles too."""
    connections: bytes
    """Return how many connections are used, of all databases, and how many an ordinary role may open."""
    schema_seen: bytes
    """Return whether this role finds and may read the ledger of migrations, and which schemas have
    one that the search path or a missing USAGE hides."""
    schema_version: bytes
    """Return the version of the schema, and the oldest version of the code that may work on it. An
    older ledger has no column `compatible_with`."""
    machines: bytes
    """Return the hosts that had a worker of nodes within the last day."""
    outbox: bytes
    """Return the oldest open event that is due, and for how long it has been. No row: none is due."""
    waiting_runs: bytes
    """Return the run that has waited longest for its start, and whether others were started within
    the last minute. No row: none waits."""
    stalled_runs: bytes
    """Return how many runs are running although nothing has moved them forward for `quiet_s`, and one
    of them."""
    lapsed: bytes
    """Return how many running jobs have a lapsed lease, and for how many seconds the oldest has."""
    unserved: bytes
    """Return the queues that have due jobs and no live worker which takes them. `n` counts at most
    `counted` jobs, `wait_s` is the age of the first in line, `alive` how many workers are there
    and take none. A worker of 0.3.0 has a heartbeat only. Each step reads one index entry."""
    missing_versions: bytes
    """Return the versions of nodes that due jobs need and no live worker of their queue has, up to
    `listed`, with up to three of these jobs and the age of the first. It steps from version to
    version, 1,000 of each queue, however many jobs need one."""
    dead_workers: bytes
    """Return `host queue` of the heartbeats that are flagged dead, and of the workers that have been
    silent for `stale_s` seconds and have a running job."""
    alerts: bytes
    """Return how many failures wait to be sent, for how many seconds the oldest has, and how many seconds ago a sender
    was there; NULL: none ever was."""
    table_statistics: bytes
    """Return what autovacuum and updates do to these tables."""
    indexes_on_renewed: bytes
    """Return the indexes over one of these columns, each given with its table."""

doctor: _Doctor

class _DowngradeCheck:
    columns: bytes
    """Return every column of the schema's tables, with the expression of its default."""
    untouched: bytes
    """Return the relations of the schema that this transaction has not locked for writing."""

downgrade_check: _DowngradeCheck

class _EventExports:
    create: bytes
    """Note who exports, from the events on that are there now."""
    take: bytes
    """Take or keep the export for `lease_s` seconds and return how far it is. No row: another
    process has it."""
    release: bytes
    """Let another process take the export at once."""
    advance: bytes
    """Note that all events up to these are exported. No row: another process has the export."""
    last_ids: bytes
    """Return the last event ids that were drawn, by whichever transaction."""
    transactions: bytes
    """Return the transactions that run now, but for this one; prepared ones are among them. Each
    holds the lock of its own id until it ends."""
    node_events: bytes
    """Return up to `batch` events of nodes whose ids are in one of the ranges."""
    ingest_events: bytes
    """Return the same of ingest jobs, with who made the change."""
    node_attempts: bytes
    """Return the events of these claims of nodes, the oldest first, with the workflow and the trace
    of the run. `waited_from`: when the claim before ended, else when the job was queued."""
    ingest_attempts: bytes
    """Return the same of ingest jobs; `name` is the task."""
    add_runs: bytes
    """Note runs with exported events, whose own end is to be exported."""
    ended_runs: bytes
    """Return up to `batch` of these runs that are over. A run that is not there any more has no
    workflow."""
    remove_runs: bytes
    """Forget runs whose end is exported."""

event_exports: _EventExports

class _Events:
    send: bytes
    """Insert an event. No row: there is one of this name and key already, which stays."""
    newest: bytes
    """Return the newest events. `name` NULL: of every name."""
    prune: bytes
    """Delete up to `batch` events that are older than `days` days."""
    wake_waiting: bytes
    """Wake up to `most` jobs of each family whose event is there although they wait for it; return how
    many. `name` NULL: whatever the event, else of this name and key."""
    wait: Mapping[str, bytes]
    """Begin or continue a wait of a claimed job: for an event of this name and key, or, for the kind
    `sleep`, for the time alone. One row: `state` is `done`, with the value of the event or `default`
    as `output`; `waiting`; `busy` if another transaction is about to end the wait; NULL if the claim
    is lost. The time of the first call counts. A wait that is over is only read."""
    suspend: Mapping[str, bytes]
    """Give up the claim of a job whose handler waits, counting nothing: the job is queued again until
    the first of its waits is due, at most `longest_s`, and for a second if one has ended meanwhile.
    For `keep_s` longer only workers of its host claim it, unless it has to wait for a lock key or a
    limit of its partition then. It is cancelled instead if it must end. No row: the claim is lost."""

events: _Events

class _FailureAlerts:
    announce: bytes
    """Note that a sender is there: failures are noted for `keep_s` more seconds."""
    pending: bytes
    """Return whether there is any row. It locks nothing."""
    lock: bytes
    """Lock the state of all senders. No row: another sender has it, or none was announced."""
    free: bytes
    """Return how many calls the state still allows within a minute: `per_minute` less those of the last minute, and none
    for a minute after the limit was reached. A time in the future, of a clock that has gone back, does not count. It is
    a statement after the lock, and reads the clock, to see what the last holder of the lock has done."""
    expire: bytes
    """Delete what was sent over a minute ago. Of the rows that nobody has at present, delete those that are over
    `max_age_s` old, and those that were taken `tries` times. Return `is_sent` of each."""
    waiting: bytes
    """Count the rows that a sender of `app` may take, up to two. Those that another app has a function for are left to its
    senders for `patience_s`."""
    take: bytes
    """Take the oldest row for `lease_s` seconds. MATERIALIZED: a subquery that the plan runs once for each row would find
    the next oldest each time, and take them all."""
    take_all: bytes
    """Take all rows for `lease_s` seconds; return for each kind how many there are, up to five of their names, and the
    time of the last."""
    quiet: bytes
    """Note that the limit is reached: nothing is sent for a minute."""
    sent: bytes
    """Mark what a sender took as sent: one row stays for a minute, to count against the limit."""
    prune: bytes
    """Delete failures that nobody sends any more: no sender was there within its time, or they are over a week old."""

failure_alerts: _FailureAlerts

class _Handback:
    hand_back: Mapping[str, bytes]
    """Give up claims, of several workers too, counting nothing: each job is queued again, or
    cancelled if it must end. One element of each array is a claim. `after_s`: how long the jobs
    wait first. `front`: they get at least the priority `band`. `error`: what a queued job shows
    until its next claim, or NULL. `keep_for`: the host whose workers may claim it meanwhile, or NULL.
    A claim without a row is lost."""
    strays: Mapping[str, bytes]
    """Return the claims of a worker but those whose rows somebody else has locked."""
    unknown: bytes
    """Return which workers did not know a node since it was last handed back for another reason or
    ended: how often (`times`), `age_s` of the first time, the `workers`, and the `others`: up to 20
    live workers that take such jobs, have not met it, and report it or no list of their nodes.
    `known`: one of these reports it. `keep_for`: the host of one of these, of one that reports it if
    there is one, without a host where a live worker has met it. The history of a node is indexed by run and node. No row: there
    is no such job."""
    waiting_unknown: bytes
    """Return the nodes that workers have handed back because they do not know them, by queue and node
    module: how many jobs, and one of their runs. Reads the first 10,000 jobs that are due within
    `within_s` seconds, by the index of due times, and the first of each queue, by the claim's index.
    A job whose last event says so has an error, which its next claim takes away."""

handback: _Handback

class _HistoryRows:
    run: bytes
    """Return a run with its definition, the time of this read, and the seconds since it was queued."""
    nodes: bytes
    """Return the jobs of a run's nodes in the order in which they were queued. `nodes` NULL: of all."""
    node: bytes
    """Return one node job, with the columns of `nodes`."""
    ingest_job: bytes
    """Return one ingest job."""
    node_events: bytes
    """Return the events of a run's nodes, the oldest first. `nodes` NULL: of all its nodes."""
    ingest_events: bytes
    """Return the events of an ingest job, the oldest first, each with its actor."""
    count_item_nodes: bytes
    """Count the nodes of a run that belong to items of maps."""
    further_node_ids: bytes
    """Return the ids of a run's queued nodes beside the given ones, behind `after`, in their order."""
    node_counts: bytes
    """Return how many nodes of a run have each status."""
    ids_in_range: bytes
    """Return runs and jobs whose id is in a range and starts so, at most `limit` of each kind."""
    changes: bytes
    """Return the events of jobs of both kinds from `since` on, in the order of their transactions'
    start, after the event with this place (`at`, `kind`, `id`); NULL: from the first."""
    run_states: bytes
    """Return the state of these runs, and of those that were queued within `recent_s` seconds."""
    clock: bytes
    """Return the time of the database."""

history_rows: _HistoryRows

class _IngestJobs:
    insert: bytes
    """Queue one ingest job that has no options, for an app; return its id."""
    insert_many: bytes
    """Queue a job of one task for each member of the JSON array `args`. The id of a job is the
    prefix and its place in the array, from 1, in twelve hexadecimal digits."""
    insert_batch: bytes
    """Queue the jobs of a JSON array, each an object with a member per column; ids as in
    insert_many. Returns a row for each job whose idempotency key another job has: its place,
    that job's id, and whether that job has the same task, queue and args. If one has not,
    nothing is written."""
    insert_once: bytes
    """Queue the one job of the JSON array `jobs`, as insert_batch does, and append its event `queued`,
    by `actor`. If a job has its idempotency key, whatever its window: return that job, and whether
    it has the same task, queue and args. No row: the job is queued, under the first id of `prefix`."""
    state: bytes
    """Return how far a job is, and whether its claim is lost."""
    get: bytes
    """Return one ingest job with every column. No row: there is no such job."""
    count_by_status: bytes
    """Count all ingest jobs, by queue and status."""
    find: bytes
    """List jobs for an operator, the newest first. A filter that is NULL matches every job. `before`:
    only jobs with a smaller `seq`, for the next page. `text`: part of the id, the task, a key or the
    error. `lost`: of the running jobs only those whose claim is lost, or only the others. Reads the table once: no index serves every filter."""
    name_actor: bytes
    """Name who makes the changes in the rest of this transaction, for the history of jobs."""
    lock: bytes
    """Lock these jobs, in one order, so that no two callers wait for each other. Jobs that do not
    exist are left out."""
    cancel_queued: bytes
    """Cancel those of these jobs that are queued."""
    request_cancel: bytes
    """Request the cancellation of those of these jobs that run; the first request stands."""
    delete: bytes
    """Delete those of these jobs that do not run."""
    find_node_jobs: bytes
    """Return which of these ids are node jobs, each with its run."""

ingest_jobs: _IngestJobs

class _InputAnswers:
    submit: bytes
    """Store an answer to a node and return its row. No row: another answer to the node is in flight."""
    hold_node: bytes
    """Keep other transactions from ending the wait of an input node by its time-out until this one
    ends. The function locks the row, so that a role that submits answers needs no right to nodes."""
    next_due: bytes
    """Return the id of the oldest answer that is due and not locked, without those of
    `set_aside`. An answer that is `processing` for longer than `after` seconds is due again, as is
    one whose `claimed_at` is in the future: no claim wrote that, and it would never become due.
    Each half walks its index: a sort of all waiting answers for each of them takes hours for 20,000."""
    claim: bytes
    """Claim an answer that is still due, as in `next_due`, count the attempt and return the row,
    which is locked. No row: another transaction has it, or it is not due any more."""
    finish: bytes
    """Record that the node of an answer was completed with it."""
    refuse: bytes
    """Record why an answer cannot be taken."""
    postpone: bytes
    """Make a claimed answer due again later, without counting its claim as an attempt."""
    count_failure: bytes
    """Count a failed attempt, make the answer due again later, and return how many attempts failed.
    No row: the answer is over."""
    complete_node: bytes
    """Complete a node that waits for an answer, with the answer or the default. No row: it does not
    wait."""

input_answers: _InputAnswers

class _InputTimeouts:
    next_overdue: bytes
    """Return the job of the oldest wait that is over and not locked, without those of
    `set_aside`."""
    lock_wait: bytes
    """Lock the wait of a job. No row: it is not over, or another transaction holds it."""
    lock_job_if_free: bytes
    """Lock the row of a job. No row: another transaction has it locked, or there is no such job."""
    overdue: bytes
    """Return the job of a wait. `answered`: an answer is in flight, or, if the row of the job is not
    `free`, being submitted. `over`: the job does not wait, or waits again. The columns of a job that
    is gone are NULL."""
    end_wait: bytes
    """Forget the wait of a job."""
    extend_wait: bytes
    """Let the wait of a job end `more_s` seconds from now."""
    fail_node: bytes
    """Fail a node that waited too long for its answer. No row: it does not wait."""

input_timeouts: _InputTimeouts

class _InstalledObjects:
    record_exists: bytes
    """Return whether there is a record: the schema of 0.3.0 has none."""
    recorded: bytes
    """Return what is installed, one row a part."""
    record: bytes
    """Record that a part is installed, in the place of what was recorded of it."""
    forget: bytes
    """Delete the record of every part."""
    settings: bytes
    """Set what a transaction needs before it creates functions: they may call each other in any order,
    and `SET search_path FROM CURRENT` stores this path with those that run as their owner."""
    limit_lock_wait: bytes
    """Limit the transaction's next statements to half of the server's deadlock_timeout, 100 ms at the
    most: every writer waits behind a waiting lock, so wait briefly and rarely."""
    lift_limit: bytes
    """Let the transaction's next statements take as long as they need."""
    functions: bytes
    """Return the functions of these names, each with a hash of its definition. The source and the
    settings are hashed, and not pg_get_functiondef(), whose form differs between servers."""
    triggers: bytes
    """Return the triggers of these names, each with a hash of its definition."""

installed_objects: _InstalledObjects

class _JobEvents:
    add_ingest: bytes
    """Append an event to the history of an ingest job."""
    add_node: bytes
    """Append an event to the history of a node. Its attempt is a smallint, that of a job an
    integer. No row: there is no such run."""
    note_logged_error: bytes
    """Append the error that the handler of an ingest job logged. Nothing: the claim is lost."""
    prune_nodes: bytes
    """Delete up to `batch` events of nodes that are older than `days` days."""

job_events: _JobEvents

class _JobParts:
    add: Mapping[str, bytes]
    """Add parts, one element of each array a part, from number `first` on, and wake the readers. Return
    whether the claim holds, and whether the parts before are stored: if not, nothing is added. The
    first part of a claim deletes those of all earlier claims but the last two that have any, so a job
    that runs again and again stores no more than three attempts."""
    behind: bytes
    """Return the next parts of a job behind a claim and number, of a name if it is given, with the job's
    status and claim and the place of its last part, as of the same snapshot. Parts beyond `bytes` are
    left out; `found` counts them too. One row without a part if there is none; no row: no such job."""
    job_of_node: bytes
    """Return the id of the job of a node; no row: the run or its node does not exist yet."""
    streaming_nodes: bytes
    """Return the nodes of a run that have streamed, with the place of the last part of each. `live`: only
    those that have not ended, or have in the last 10 s. `nodes` NULL: of all its nodes."""

job_parts: _JobParts

class _JobSteps:
    begin: Mapping[str, bytes]
    """Begin a step of a claimed job, or find that it is done. One row: the step as it was before
    (`state` NULL: there was none), `attempts` if it begins now, and whether the claim holds. A step
    that is done is only read, which locks nothing. A cursor whose arguments differ does not begin."""
    end: Mapping[str, bytes]
    """Record how a step ended that this claim has begun, and return its output as it is stored. No row:
    the claim is lost, or another one has begun the step again."""
    store_cursors: Mapping[str, bytes]
    """Store how far cursors are, one element of each array a cursor. Those of a lost claim are left out."""
    of_job: bytes
    """Return the steps of a job in the order in which they began first."""
    forget_from: bytes
    """Delete the first step of this name of a job and all steps that began after it first; return how
    many."""

job_steps: _JobSteps

class _Logs:
    write: Mapping[str, bytes]
    """Store the logs of several attempts, one element of each array an attempt. Jobs that are gone, or
    that were claimed again, are left out. A head that is NULL is not written again."""
    prune: bytes
    """Delete up to `batch` logs of attempts that are older than `days` days."""
    of_jobs: bytes
    """Return the logs of these jobs' attempts, of one job family."""
    nodes_that_logged: bytes
    """Return which nodes of a run wrote to a log since a time, the last to write last. `since` NULL:
    at any time. `nodes` NULL: of all its nodes."""

logs: _Logs

class _ManualChanges:
    lock_ingest_job: bytes
    """Lock an ingest job until the transaction ends, so that its state is known to the next statement."""
    complete_node: bytes
    """Complete a node that is not over, whichever worker has it. No row: it is over, or there is no such job."""
    complete_ingest_job: bytes
    """Complete an ingest job that is not over, whichever worker has it. A trigger records the event of a job
    that did not run. No row: it is over, or there is no such job."""
    fail_node: bytes
    """Fail a node that is not over, whichever worker has it. No row: it is over, or there is no such job."""
    fail_ingest_job: bytes
    """Fail an ingest job that is not over, whichever worker has it. A trigger records the event of a job that
    did not run. No row: it is over, or there is no such job."""
    park_node: bytes
    """Let a node that is not over wait for an answer, whichever worker has it. No row: it is over, waits
    already, or there is no such job."""
    requeue_node: bytes
    """Queue a running node again at the front, and count it as ended by the watchdog. It is cancelled
    instead if it must end. No row: it does not run."""
    requeue_all_nodes: bytes
    """Queue every running node again at the front, counting nothing. A node that must end is cancelled
    instead."""
    requeue_of_host: Mapping[str, bytes]
    """Queue the running jobs of a host in one queue again at the front, counting nothing. A job that
    must end is cancelled instead."""

manual_changes: _ManualChanges

class _Maps:
    open_map: bytes
    """Seal a map's items, or count them again in a new generation; return which."""
    step: bytes
    """Count items that have ended and open the next ones; return the counters and the opened items."""
    close: bytes
    """Let the last opened items wait to be opened again, from this key on."""
    complete: bytes
    """Complete the node of a map; return the size of its output in bytes. Nothing is written past `limit`."""
    fail: bytes
    """Fail the node of a map."""
    nodes: bytes
    """Return how many nodes the items of these maps have, with those of the maps inside the items."""
    generation: bytes
    """Return the generation in which a map was opened last. No row: it was not opened."""
    opened: bytes
    """Return the items of a map that were opened and have not ended."""
    items: bytes
    """Return the items of a map with these keys. LIMIT 1 keeps it a look-up per key: a join may read the whole map."""
    keys_like: bytes
    """Return keys of about the length of this one, of a map, or of all maps of a run: what was perhaps meant."""
    note_errors: bytes
    """Store why items fail that wait for their open nodes. By their places, as in queue_workflows_step_map."""
    first_failure: bytes
    """Return the first item of a map that failed, and its error."""
    states: bytes
    """Return the state of those of these nodes that have a row, by a look-up per node."""
    reopen_item: bytes
    """Let an item wait again."""
    drop_nodes: bytes
    """Delete the nodes of the items of a map."""
    drop: bytes
    """Delete a map with its items, and the maps inside its items."""
    running_inside: bytes
    """Return a node of an item of a map that runs."""

maps: _Maps

class _Metrics:
    count_events: bytes
    """Count the events of the next `most` transactions that are not counted yet; return whether more
    are left, or NULL while another transaction counts."""
    progress: bytes
    """Return how long ago events were last counted, NULL if never, how many transactions the server
    has made since, and whether this role and server may write the totals."""
    bounds: bytes
    """Return the upper bounds of the buckets of histograms."""
    totals: bytes
    """Return what is counted so far."""
    in_order: bytes
    """Keep the planner to the order of indexes for this transaction, until `by_index`: without statistics it sorts all
    waiting jobs to find the first one."""
    by_index: bytes
    """Keep the planner to indexes for this transaction: without statistics it takes a scan of all
    finished jobs for cheaper (decision 0019)."""
    by_pages: Mapping[str, bytes]
    """Let the planner read the pages of a table once each for the rest of this transaction, if it has
    no statistics. It would fetch each queued row by the index alone, which takes twice as long
    before the first VACUUM."""
    waiting: Mapping[str, bytes]
    """Count the queued jobs of each queue by what holds them back; `ready`: nothing does. Each part
    walks an index that has only such jobs."""
    oldest_nodes: bytes
    """Return the age of the oldest node job of each queue that nothing holds back. It walks from version to version and
    from priority to priority of each queue, however many jobs wait. Jobs without a version come last in the index."""
    oldest_ingest: bytes
    """Return the age of the oldest ingest job of each queue that nothing holds back. It walks from priority to
    priority of each queue, however many jobs wait."""
    running: Mapping[str, bytes]
    """Count the running jobs of each queue, and those whose lease has lapsed."""
    awaiting: bytes
    """Count the nodes that wait for an answer, by queue."""
    runs: bytes
    """Count the runs that the engine has not ended, by status."""
    paused: bytes
    """Return the queues that have settings, and whether each is paused now."""
    workers: bytes
    """Count the workers of each queue by state, with their slots: for each as many as its host reported
    last for its queue. One that was not seen for `stale_s` seconds is dead. Stopped ones are left
    out, and dead ones after a day."""
    schedules: bytes
    """Return the schedules that fire, the latest first: for how long each is overdue, whether an error
    keeps it from firing, and when it last fired."""
    machines: bytes
    """Return the last hardware sample of each host, unless it is over a minute old. A ring holds one
    sample in each slot, so only the slots of the last minute are read."""

metrics: _Metrics

class _Migrations:
    try_lock: bytes
    """Take the advisory lock of a chain if it is free, for this session or for this transaction
    (`is_local`); return whether it is ours."""
    lock_holders: bytes
    """Return the sessions of this database that hold the advisory lock of a chain."""
    unlock: bytes
    """Release every advisory lock of this session."""
    ledger_exists: bytes
    """Return whether there is a table of this name on the search path."""
    ledger_is_whole: bytes
    """Return whether a ledger exists and has every column that this code reads."""
    of_others: bytes
    """Return the versions above 12 in the ledger of our own chain, lowest first, if other code has
    applied the first of them. Ours records a checksum; the ledger of 0.3.0 has no such column."""

migrations: _Migrations

class _Models:
    publish_sizes: bytes
    """Write how much GPU memory each model needs, as a host registers it. Rows that would not
    change are not written."""
    learn_load: bytes
    """Let the moving average of how long a host loads a model follow one more load."""
    prune: bytes
    """Delete measured times that are older than 30 days, of hosts without a worker."""
    unserved: bytes
    """Return the models ('': no model) that have waiting gpu jobs and no live worker to take
    them, or that are flagged so. `reason` is NULL if a worker can take them; `flagged` is the
    reason of the flag, or NULL."""
    flag: bytes
    """Flag a model as one that no live worker can take. No row is written if the flag is there
    already."""
    unflag: bytes
    """Delete the flag of a model."""
    log_for_model: bytes
    """Write an event into the history of the first 100 waiting jobs of a model. BETWEEN keeps the
    walk in the order of the claim's index."""
    log_without_model: bytes
    """Write an event into the history of the first 100 waiting gpu jobs that require no model."""
    flagged: bytes
    """Return the flagged models (NULL: jobs without one) that no live worker takes now either, with
    the reason of now, each with its number of waiting jobs, up to 10,000."""
    request: bytes
    """Write an operator's request to load or unload a model, for all workers of a host (worker
    '') or for one; return the row. A trigger wakes the workers."""
    newest_request: bytes
    """Return the newest request for a worker past number `after`, and the stop policy by which its
    queue is OFF now (NULL: it is on). A request that is older than the worker was meant for
    another process. No row: there is none."""
    on_workers: bytes
    """Return the gpu workers seen within a day, of one host or (NULL) of all: the model and the
    request as each reported them, the models that its host knows, and its host's GPUs in the
    latest sample within a minute (else NULL). One that was not seen for `stale_s` seconds is
    dead."""

models: _Models

class _Nodes:
    enqueue: bytes
    """Queue one node of a run, in the generation of the run, and return the id of its job. No row:
    there is no such run, or the run has such a node."""
    same_node: bytes
    """Return the id of a node's job, and whether it was queued with this content. No row: the run has no
    such node."""
    insert_planned: bytes
    """Insert the rows of a plan, a JSON array of objects, and return how many are new or opened again."""
    get: bytes
    """Return a node job. No row: there is no such job."""
    get_by_node: bytes
    """Return the job of a node. No row: the run has no such node yet."""
    of_run: bytes
    """Return all jobs of a run, the oldest first."""
    done_among: bytes
    """Return which of these nodes are completed or skipped. LIMIT 1 keeps it a look-up per node: without
    statistics, PostgreSQL 15 reads all rows of the run instead."""
    running_among: bytes
    """Return which of these nodes run now, by a look-up per node."""
    present_among: bytes
    """Return which of these nodes have a job that is neither failed nor cancelled, by a look-up per node."""
    all_done: bytes
    """Return every completed or skipped node of a run."""
    context: bytes
    """Return a run's context with the `context_delta` of each completed node under the node's id, and
    the JSON type of the context. An empty delta does not replace the context's own member. `heads`
    NULL: all members, else those that it names, by a look-up per node. The context is NULL if it is
    no object, and if its `size` in bytes, as a jsonb, is more than `most`."""
    set_resolved_inputs: bytes
    """Store what a node received and return its row."""
    set_input_spec: bytes
    """Store the question of an input node and return its row."""

nodes: _Nodes

class _Outbox:
    runs_with_events: bytes
    """Return the runs that have events to dispatch, the oldest event first, without those of
    `set_aside`. `undefined`: also runs that have no definition yet. It reads the oldest 5,000."""
    open_events: bytes
    """Return a run's open events that are due, the oldest first, each with the status and the error of
    its node. `only` NULL: all of them, else the one with this id. LIMIT 1 keeps the join a look-up
    per event: without it, it may read every version of the run's rows."""
    close: bytes
    """Close events. `error` not NULL: they are poison, and this is why."""
    postpone: bytes
    """Count a dispatch that failed, make the event due again later, and return how many failed."""
    unprocessed: bytes
    """Return open events, the oldest first."""
    count_unprocessed: bytes
    """Return how many events are open."""

outbox: _Outbox

class _Overview:
    run_head: bytes
    """Return a run without its definition and context. `elapsed_s` counts from its submit. No row: no
    such run."""
    steps: bytes
    """Count the nodes of a run by status, for each step: the node id up to its first slash or bracket.
    `elapsed_s` ends with the last node, or now while a node has not ended."""
    nodes: bytes
    """Return the nodes of a run: first those that run, wait for input or failed. With `live_only`
    these, and the queued ones of which an attempt failed."""
    maps: bytes
    """Return the maps of a run's definition: their items by state, and the nodes of the items."""
    failed_items: bytes
    """Return the first items of a map that failed, with their errors."""
    nodes_of_item: bytes
    """Return the nodes that the items with a key have, in all maps of a run, with their states."""
    items: bytes
    """Return the items with these keys, in all maps of a run. An open item with an error fails once none of its nodes is
    open. One that had not ended when its map did is cancelled."""
    map_state: bytes
    """Return how many items of a map have ended. No row: it has none yet."""
    node_seconds: bytes
    """Return how long the handler of each completed node of a run took."""
    node_counts: bytes
    """Count the nodes of a run by status."""
    completed_by: bytes
    """Return the workers that completed nodes of a run, and how many each."""
    crashes: bytes
    """Count how often a node of a run was taken back from a worker that died. Lapses count until the
    next recorded end of the node."""
    failures: bytes
    """Return the failed nodes of a run, the first to fail first, with the latest traceback."""
    runs_ahead: bytes
    """Count the runs that were submitted before this one, are no less urgent, and have work to do
    now. A run that only waits for a person has none."""
    find: bytes
    """Return what has this id: a run before a job, or after it if `jobs_first`. No row: nothing has it."""
    running_under: bytes
    """Return the running jobs that have this id or belong to the run that has it, with their workers."""
    waiting_inputs: bytes
    """Return the input nodes that wait in live runs, of one run if it is given, the longest wait
    first. `answered`: whether an answer was submitted and not taken yet."""
    has_answer: bytes
    """Return whether an answer to a node was submitted and not taken yet."""
    took_default: bytes
    """Return whether a completed input node took the default of its time-out, not an answer."""
    queues: Mapping[str, bytes]
    """Count the queued and the running jobs of each queue. `blocked` jobs may not start yet."""
    listed_nodes: bytes
    """Return the first nodes of a queue that have this status, in the order of the claim."""
    live_nodes: bytes
    """Count the nodes that wait or run, by queue and status."""
    runs_by_status: bytes
    """Count all runs by status."""
    open_events: bytes
    """Count the outbox events that are not dispatched. `lag_s` is the age of the oldest that is due."""
    open_answers: bytes
    """Count the answers that are not taken yet."""
    nodes_awaiting_input: bytes
    """Count the nodes of running runs that wait for an answer."""
    late_runs: bytes
    """Return at most 50 runs that could start and have waited for `patience_s`, in the order of their
    start."""
    claims_in_flight: bytes
    """Return the running jobs of both families, by worker."""
    foreign_work: bytes
    """Count the unfinished runs of other workflows, and the unfinished ingest jobs of other tasks."""
    unfinished: bytes
    """Return the workflows that have unfinished runs, with the three oldest runs of each. The workflow
    with the oldest run comes first."""

overview: _Overview

class _Pending:
    work: bytes
    """Return which work waits for an orchestrator: runs to start, events to dispatch, answers to take,
    and delayed jobs or runs whose time has come. `run_due_s`: in how many seconds the next delayed
    run is due, if that is within `within_s` seconds, at most a day. A run that was due before and
    could not be promoted, as its row is locked or raises, is left to the poll."""
    sweeps: bytes
    """Return which sweeps have work: leases that lapsed, input nodes that waited too long, waiters in
    lock queues or jobs that no worker serves, and partitions with limits or waiters. Each part
    walks an index in its order: no plan reads a whole table, whatever the statistics say."""
    silent_jobs: bytes
    """Return whether a running job of either family was not renewed for `silent_s` seconds."""

pending: _Pending

class _Permissions:
    closed_tables: bytes
    """Return those of these privileges, each given with its table, that this role lacks."""
    closed_columns: bytes
    """Return the table, and whether this role may insert every one of these columns. `is_open` is
    NULL, and `name` too, if there is no such table."""
    closed_sequences: bytes
    """Return the sequences of these tables that this role may not use."""
    closed_functions: bytes
    """Return the functions that this role needs and may not call: those that only read, all others
    for a role that `works`, and those that are `named`. None of the `internal` ones: only functions
    of the tables' owner call them. No trigger's function: its caller needs no right to it."""
    not_owned: bytes
    """Return what keeps this role from migrating: tables that it does not own, and a schema in which
    it may not create."""
    excessive: bytes
    """Return the rights past reading that this role has and does not need, and who was granted each:
    this role, PUBLIC, or a role that this one is a member of. `allowed` are the columns that it
    inserts, as `table.column`, `filled` their tables. Nothing is returned for the owner of an
    object and for a superuser: nothing can be taken from them."""
    submitters: bytes
    """Return at most 10 roles that may insert runs and neither own the tables nor work on jobs,
    without superusers and the roles that PostgreSQL brings."""
    public_may_create: bytes
    """Return the schema of the engine if every role may create functions in it."""

permissions: _Permissions

class _Promotion:
    promote_jobs: Mapping[str, bytes]
    """Promote up to 1,000 delayed jobs whose time has come, the earliest first: they can be claimed
    from now on. Return their ids."""
    due_jobs: Mapping[str, bytes]
    """Return the ids that `promote_jobs` would promote, without those of `aside`."""
    promote_these_jobs: Mapping[str, bytes]
    """Promote those of these jobs whose time has come. Return their ids."""
    promote_runs: bytes
    """Promote up to 1,000 delayed runs whose time has come, the earliest first: an orchestrator may
    start them from now on. Return their ids."""
    due_runs: bytes
    """Return the ids that `promote_runs` would promote, without those of `aside`."""
    promote_these_runs: bytes
    """Promote those of these runs whose time has come. Return their ids."""
    admit_missed_waiters: bytes
    """Admit the first waiter of each lock key that no admitted job has, of both job families, and
    return how many. The families stand in the order in which a commit takes their locks."""

promotion: _Promotion

class _Queues:
    pause_queue: bytes
    """Pause a queue until `at`, for `lasts` from now, or (both NULL) until it is resumed; return
    its row. A pause that is in force keeps its beginning."""
    pause_partition: bytes
    """Pause one partition of a queue, as pause_queue does; return its row."""
    resume_queue: bytes
    """End the pause of a queue, also one that has run out. No row: it had none."""
    resume_partition: bytes
    """End the pause of a partition, also one that has run out. No row: it had none."""
    limit_queue: bytes
    """Set limits of a queue; return its row. `limits` is a JSON object of columns: null takes a
    limit off, and a column that is absent stays as it is."""
    limit_partition: bytes
    """Set limits of one partition of a queue, as limit_queue does; return its row."""
    delete_unset_partition: bytes
    """Delete the row of a partition that is not paused and has no limit of its own."""
    admit_from_partitions: bytes
    """Admit jobs of the partitions whose time has come, and of those from which no job is
    admitted. Returns how many partitions of the second kind there were."""
    settings: bytes
    """Return the settings of one queue, or (NULL) of every queue that has some, with `paused`:
    whether it is paused now."""
    partition_settings: bytes
    """Return the settings of all partitions that have some of their own, with `paused`."""
    partition_limits: bytes
    """Return the limits in force for one partition (its own, else the queue's for partitions),
    whether it is paused, when its next job may be admitted (NULL: no time is set), and how
    many of its jobs run. Always one row."""
    is_used: bytes
    """Return whether a queue has settings, or an ingest job that could be claimed."""
    count_jobs: Mapping[str, bytes]
    """Count the jobs of each queue that are queued or running, by what keeps them; `oldest_s` is
    the age of the oldest that is due, `fresh` counts those queued within the last `window`
    seconds. Reads every such job."""
    count_events: Mapping[str, bytes]
    """Count the jobs of each queue that came in (`came`) or ended (`went`) within the last
    `window` seconds, by their events. A job that came in and is queued still has no event:
    count_jobs has it."""
    use: bytes
    """Return how many jobs of an ingest queue run, and in how many seconds its rate allows the
    next start. `due_s` is NULL if it allows one now, or if there is no rate. Always one row."""
    waiting: bytes
    """Return each queue with settings: `paused`, and whether jobs could be claimed but for the
    queue's own limits (`ready`) or are blocked by the limits of their partitions (`limited`)."""
    paused: bytes
    """Return the queues and partitions (NULL: the whole queue) that are paused now."""

queues: _Queues

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
    `backoff_s` times its crashes; at `cap` crashes it has failed as poison. If it must end, it is
    cancelled instead, and nothing is counted."""
    count_lapse: Mapping[str, bytes]
    """Take running jobs, which the caller has locked, from their workers and count a lapse of each:
    nobody knows what ended them. A job is queued again, the first time with at least the priority
    `band`, later after `backoff_s` times its lapses; at `cap` lapses in a row it has failed as
    poison. If it must end, it is cancelled instead."""
    hand_back: Mapping[str, bytes]
    """Take running jobs, which the caller has locked, from their workers without counting
    anything. A job is queued again with at least the priority `band`, or cancelled if it must
    end."""

recovery: _Recovery

class _Retention:
    pages: bytes
    """Return how many pages a table has now."""
    mark: bytes
    """Mark the transaction as one that deletes by age: then no event is written for each deleted
    row."""
    set_timeout: bytes
    """Set the statement timeout of the transaction."""
    delete_jobs: bytes
    """Delete the ingest jobs past their retention that lie in the pages from `first` to before
    `end`. The `retention_days` of a queue stands before `days`; 0 keeps rows forever. The table is
    walked as it lies: an index by time of ending would cost every job. Rows that are locked
    stay."""
    find_jobs: bytes
    """Return the ids of the jobs that delete_jobs would delete, without those set aside."""
    delete_jobs_by_id: bytes
    """Delete those of these ingest jobs that are past their retention."""
    count_jobs: bytes
    """Count the ingest jobs that are past their retention."""
    delete_runs: bytes
    """Delete up to `limit` runs past their retention that lie in the pages from `first` to before
    `end`; their nodes, answers and outbox rows go with them. A run stays while it has an open
    outbox row or a node that has not ended."""
    find_runs: bytes
    """Return the ids of the runs that delete_runs would delete, without those set aside."""
    delete_runs_by_id: bytes
    """Delete those of these runs that are past their retention, as delete_runs does."""
    count_runs: bytes
    """Count the runs that are past their retention and that delete_runs would not keep."""
    delete_outbox: bytes
    """Delete up to `limit` outbox rows that were processed over `days` days ago."""
    delete_ingest_events: bytes
    """Delete up to `limit` events of ingest jobs that are over `days` days old."""
    delete_heartbeats: bytes
    """Delete the heartbeats that are over `days` days old."""

retention: _Retention

class _RetryJobs:
    reopen_ingest: bytes
    """Queue failed and cancelled ingest jobs again in a new generation, with all counters at
    zero. A trigger adds the event. Without a row: jobs in other states, and those in the last
    generation."""
    key_owner: bytes
    """Return the job that owns the idempotency key of a job now, and the key."""

retry_jobs: _RetryJobs

class _Runs:
    submit: bytes
    """Insert a queued run and return its row. It names only columns that a role for `submit` may
    insert, see docs/security.md."""
    submit_with_headers: bytes
    """Insert a run with headers and return its row."""
    insert: bytes
    """Insert a run with a status and a mode of the caller's choice and return its row."""
    get: bytes
    """Return a run. No row: there is no such run."""
    output: bytes
    """Return the output of a run. No row: it has none, or has not completed."""
    delete: bytes
    """Delete a run; its jobs, files, events and answers go with it by their foreign keys."""
    update: bytes
    """Set the columns that `given` names and return the row. No row: there is no such run, or the
    status of a run that is over would change. `failed` or `cancelled` to `queued` reopens a run.
    A column that is not given keeps its stored value as it is, also a large one."""
    startable: bytes
    """Return the queued runs that may start now, in the order in which they should, as `head` returns
    them, without the runs `set_aside`. `undefined`: also the runs that have no definition yet."""
    undefined: bytes
    """Return the ids of queued runs that may start now and have no definition yet."""
    head: bytes
    """Return a run without its definition and context. No row: there is no such run. `born` never
    raises, as the cast of an infinite time would."""
    lock: bytes
    """Lock the row of a run against other dispatchers and return it as `head` does. Inserts of rows
    that reference the run pass this lock. No row: there is no such run."""
    lock_if_free: bytes
    """Lock a run as `lock` does. No row: there is no such run, or another transaction has it locked."""
    definition: bytes
    """Return the definition of a run, frozen at its first start; NULL before that."""
    definition_texts: bytes
    """Return the definitions of those of these runs that have one, as text, of at most `most` bytes as stored (NULL: of any
    size). The same definition is always the same text. LIMIT keeps this a look-up per run: a plan that was made for a
    small table would read the whole one later."""
    context_type: bytes
    """Return the JSON type of a run's context, as `object`."""
    context: bytes
    """Return a run's own context, without the outputs of its nodes."""
    freeze_definition: bytes
    """Store the definition of a run that has none."""
    start: bytes
    """Change a queued run to running."""
    start_fresh: bytes
    """Start a run that never started: freeze its definition, change it to running, insert its first
    nodes. Return how many nodes it inserted; NULL: the run has changed since the caller read it, or is locked.
    No row: there is no such run, or its context is no object."""
    set_out_dir: bytes
    """Store the folder of a run that has none, and return the run's folder."""
    complete: bytes
    """Change a run that has started and is not over to completed."""
    fail: bytes
    """Change a run that is not over to failed; a trigger cancels its waiting nodes."""
    cancel: bytes
    """Change a run that is not over to cancelled and return its row; a trigger cancels its waiting
    nodes and requests that the running ones end."""
    running: bytes
    """Return the ids of running runs after the id `after`, in their order. OFFSET 0 keeps it from
    walking the runs that have ended."""
    stalled: bytes
    """Return those of these runs that nothing moves forward; see `queue_workflows_stalled_runs`."""
    is_stalled: bytes
    """Return a row if nothing moves this run forward."""
    stopper: bytes
    """Return the node that keeps a run from going on, with its status, `deleted` if it has no row any
    more. A node that ends the run comes first. A failed item is left out, because its map decides
    whether the run fails. So is a node of an earlier generation, which runs again, and one that was
    deleted before an upgrade, whose start queued it again unless the new definition lacks it."""
    delay_start: bytes
    """Count a start that failed and make the run due `after_s` seconds from now. Return how many
    starts failed. A count that no engine wrote never overflows."""
    reopen: bytes
    """Queue a failed or cancelled run again and return its row; a trigger raises its generation."""
    reopen_two_generations_on: bytes
    """Queue a run that is over again, two generations on, and return its row. The generation between
    is that of the nodes which `cancel_nodes_again` changes."""
    cancel_nodes_again: bytes
    """Change nodes of a reopened run to cancelled in an earlier generation, so that its start opens
    them. No other write could take them out of a terminal state."""
    withdraw_cancel_requests: bytes
    """Let the nodes of a reopened run that still run go on, as the guard of a reopened run does."""
    requeue_running: bytes
    """Queue every running run again, at the front, and count a resume of each."""
    newest: bytes
    """Return the newest runs, each with `nodes`, the number of its nodes by status, and
    `nodes_total`, that of the nodes of its definition and of the items of its maps. `status` and
    `workflow` NULL: every one. `before`, `before_id`: only runs after this one in the order of the
    list, for the next page."""

runs: _Runs

class _Samples:
    put: bytes
    """Store a hardware sample in the ring of its interval (NULL: in none) and, if asked, notify
    it on the channel hw_metrics. The commit does not wait for the disk."""
    between: bytes
    """Return the samples of a host between two instants, the oldest first. `since` NULL stands
    for `past_s` seconds ago, `until` NULL for now."""
    last: bytes
    """Return the last sample of a host between two instants. No row: there is none."""
    hosts: bytes
    """Return the hosts that have samples."""
    prune: bytes
    """Delete the samples that are over a day old. The frequent ones stay as long as the others:
    for a machine that went silent they show what it did last."""

samples: _Samples

class _ScheduleDefinitions:
    put: bytes
    """Insert a schedule, or replace the definition of the one of this name, source and app, or of one that left the code
    of another app. No row: it is the same already, or of another source or app."""
    begin: bytes
    """Let a schedule that the code has changed begin now, by the clock of the scheduler."""
    adopt: bytes
    """Let a new row of an old-style entry continue from the last fire under its name up to `now`."""
    stored: bytes
    """Return the definitions of an app's schedules that are in its code."""
    owner: bytes
    """Return whose the schedule of a name is."""
    clash: bytes
    """Record on a schedule that the code of another app names it too."""
    end_clashes: bytes
    """Forget the names that an app does not share any more."""
    mark_gone: bytes
    """Mark the schedules of an app that its code does not name any more. They do not fire, and keep their history."""
    set_paused: bytes
    """Pause or resume a schedule. Instants of the pause never fire."""
    lock: bytes
    """Lock one schedule and return it."""
    remove: bytes
    """Delete a schedule."""
    find: bytes
    """Return up to `limit` schedules, those with a problem alone if `troubled`: `last_status` of the last job or run,
    `failures`, `late_s` if the next instant is overdue by more than `patience_s` (no scheduler fires it), and `missed`
    if an instant was missed since the last fire. `failures`: how many of the last fires, boot kicks among them, failed in
    a row (100 at most); fires that queued nothing, and jobs and runs that are gone or not over, do not count, nor do fires
    past their retention, except the last."""

schedule_definitions: _ScheduleDefinitions

class _ScheduleRows:
    due: bytes
    """Lock up to `limit` schedules that are not planned yet and as many that are due, and that no other scheduler has
    locked: those of the table and of this app, those of `names` alone if it is given, and none of `aside`. A schedule
    whose task this process does not know is left to others for `patience_s`. Each half is one range of the index."""
    wake: bytes
    """Return whether there are schedules, and when the next that `due` returns is due; NULL: none is planned."""
    plan: bytes
    """Store what comes next for a schedule, and which instant was missed."""
    notify: bytes
    """Wake the schedulers."""
    plan_many: bytes
    """Store what comes next for several schedules."""
    plan_again: bytes
    """Forget what was planned, or found missed, by a clock that was ahead. With `all`: whatever is planned after `now`;
    else only schedules that fired, skipped, changed or missed an instant after it. In both cases those that wait longer
    than a jitter, or than `poll_s` for the end of a job."""
    fired: bytes
    """Store what a fire made of a schedule."""
    fail: bytes
    """Store why a schedule cannot fire."""
    claim: bytes
    """Claim one instant of a schedule. No row: it was claimed before."""
    last_claimed: bytes
    """Return the latest instant up to `now` that was claimed, fired or skipped; NULL: none."""
    fired_since: bytes
    """Return a row if one of the names was claimed for an instant after `since` up to `now`."""
    kicked: bytes
    """Store what the boot kick of a schedule queued."""
    record: bytes
    """Record the outcome of a claimed instant."""
    last_status: bytes
    """Return the status of the job or run of the last fire; NULL: there is none any more."""

schedule_rows: _ScheduleRows

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

class _Sessions:
    set_up: bytes
    """Set what an engine session depends on, whatever the environment, the role and the database say:
    the timeouts (milliseconds, 0 for none), the isolation, and how values become text and back.
    Compiling (jit) takes longer than our statements do. Without triggers (session_replication_role)
    no rule holds; only a superuser may set it. A server before version 17 has no
    transaction_timeout. The encoding is in the DSN, and what an operator decides stays:
    search_path, synchronous_commit, default_transaction_read_only and the planner's costs.
    `is_local`: for this transaction alone, since a pooler gives the session to others after it."""
    set_all: bytes
    """Set these settings, a JSON object."""
    stay_idle: bytes
    """Let a session that listens be idle for any time, whatever the role and the database say."""
    hold: bytes
    """Hold the advisory lock of a name, shared, for as long as the session lives."""
    wait_for_locks: bytes
    """Let the statements of this transaction wait so many milliseconds for a lock."""
    role: bytes
    """Return the role and the schema of this session, quoted as SQL needs them."""

sessions: _Sessions

class _TestClock:
    move_jobs: Mapping[str, bytes]
    """Let `by` pass for the start times and the leases of jobs."""
    move_runs: bytes
    """Let `by` pass for the start times of runs."""
    move_outbox: bytes
    """Let `by` pass for the outbox rows that are tried again later."""
    move_answers: bytes
    """Let `by` pass for the answers to input nodes that are tried again later."""
    move_input_timeouts: bytes
    """Let `by` pass for the timeouts of input nodes."""
    move_workers: bytes
    """Let `by` pass since workers were seen."""
    move_heartbeats: bytes
    """Let `by` pass since hosts were seen."""
    next_due: bytes
    """Return the seconds until the first instant later than `after` at which something comes due.
    NULL: nothing waits for a later one."""
    expire_lease: Mapping[str, bytes]
    """Let the lease of a claim lapse, as if its worker had died a lease ago."""

test_clock: _TestClock

class _UnservedJobs:
    served: bytes
    """Return the queues that are not paused and have a live worker that takes jobs, as one array.
    A worker that was not seen for `stale_s` seconds is not live."""
    block_unserved: bytes
    """Block up to `batch` jobs of a table that keep a lock key from jobs in these served queues
    and are in none of these queues themselves; return how many."""
    unblock_served: bytes
    """Let up to `batch` blocked jobs of a table that are in these served queues wait for their
    lock keys again; return how many."""
    count_by_queue: Mapping[str, bytes]
    """Return up to 100 queues with jobs that are blocked as unserved, by name, and how many jobs
    of each there are, up to `most`. Walks an index from queue to queue."""

unserved_jobs: _UnservedJobs

class _Upgrades:
    hold_queued: bytes
    """Lock the queued nodes of a run and return their ids, without those that another transaction has
    locked: a worker claims them, or they change otherwise."""
    nodes: bytes
    """Return the nodes of a run, in the order of the queue."""
    set_versions: bytes
    """Set the version of queued nodes of a run."""
    drop_nodes: bytes
    """Delete queued nodes of a run."""
    move: bytes
    """Store another definition of a run that is not over, queue the run, so that its start queues what
    is ready, and record who did it, with `change`. The last 20 moves are kept. No row: the run has
    ended."""

upgrades: _Upgrades

class _WaitingFacts:
    node_job: bytes
    """Return a node's job with the status of its run, when it is due, and whether it is due for its host
    alone (`kept`). No row: no such job."""
    ingest_job: bytes
    """Return an ingest job, when it is due, and whether it is due for its host alone (`kept`). No row: no
    such job."""
    run: bytes
    """Return the facts that explain why a run waits. No row: no such run."""
    run_nodes: bytes
    """Return the jobs of a run's nodes, in the order of the queue."""
    workers: bytes
    """Return the live workers of a queue. `current_model` is the model that is warm when the worker
    claims next, `off` the policy of the switch that is OFF for it, `node` and `ingest` its running
    jobs."""
    ingest_jobs_ahead: bytes
    """Count the due jobs that stand before this one in the order of the claim, up to `most`: all of
    them, and those of a better priority."""
    node_jobs_ahead: bytes
    """Count the due jobs of live runs that stand before this one in the order of the claim, up to
    `most`: all of them, and those of a better priority. `models`: only jobs of one of these models
    or of none; NULL: jobs of any."""
    newer_gpu_job: bytes
    """Return a due gpu job of this model and priority that came later. No row: this one is the newest."""
    lock_owner: Mapping[str, bytes]
    """Return the job that runs under a lock key, or is admitted to run next. No row: there is none."""
    awaited_event: bytes
    """Return the event for which the handler of a job waits since its last claim. No row: for none."""
    misfit: bytes
    """Return why the claim of a worker leaves jobs of a model out: `model` (it does not know it),
    `vram` (too little GPU memory) or NULL, and the GPU memory that the model needs."""
    models: bytes
    """Return the models in the queue of which a worker can take jobs."""
    choice: bytes
    """Return what a gpu worker would claim next: the model, how and why, the priority and the job."""
    weighed: bytes
    """Return how a worker that has not loaded a model weighs the jobs of that model, and `holders`,
    the hosts that have loaded it."""

waiting_facts: _WaitingFacts

class _Workers:
    beat: bytes
    """Record that a host serves a queue, for an app that runs workers of its own; clear its dead
    flag. `known_models` NULL leaves them as they are."""
    report: bytes
    """Write the row of a worker process and the heartbeat of its host and queue. A worker that
    obeys controls and is switched off is draining while it has a job, and else paused or
    parked: then its host's heartbeat is left to age."""
    fill_memory: bytes
    """Return a live worker, none of `but`, that has reported running jobs and that it fills one of
    these memories. No row: there is none."""
    stop: bytes
    """Record that a worker ended in good order."""
    last_detail: bytes
    """Return what the worker of a process reported of itself last. The ids of the workers of a
    process start with its prefix. No row: it never reported."""
    record_death: bytes
    """Mark the workers of a process that has ended, unless they are marked, and add how it ended."""
    clear_model: bytes
    """Clear the loaded model in the heartbeat of a host and queue; return the row. `mark_stale`
    also sets the heartbeat back by an hour. No row: there is no such heartbeat."""
    clear_heartbeat: bytes
    """Clear the model in a heartbeat for a worker that leaves, and set the heartbeat back by an
    hour unless another worker of the host and queue was seen within `live_s` seconds: an old
    heartbeat would make that one count as dead."""
    flag_stale: bytes
    """Flag the heartbeats that are older than `stale_s` seconds, are not flagged, and have
    running jobs under their host and queue; return them with the number of those jobs."""
    list: bytes
    """List the worker processes that have not ended and were seen within a day, for an operator.
    One that was not seen for `stale_s` seconds is dead. Each has the model of its host's
    heartbeat (a worker of one GPU: its own) and the control row that switches it off now: of its queue's and the host's row,
    the one whose policy queue_workflows_off_policy() returns."""
    switched_off: bytes
    """Return the control rows that switch workers off now, whether or not there are such workers.
    The queue 'all' stands for every queue of its host."""
    flagged: bytes
    """Return the queues of a host whose heartbeats are flagged as dead and that are not switched
    off."""
    count_heartbeats: bytes
    """Count the heartbeats of each queue that are younger than `live_s` seconds."""
    prune: bytes
    """Delete the rows of workers that ended, or were last seen, over a day ago."""

workers: _Workers
