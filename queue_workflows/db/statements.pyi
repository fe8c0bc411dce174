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
    """Return how many hosts had a worker of nodes within the last day."""
    outbox: bytes
    """Return the oldest open event that is due, and for how long it has been. No row: none is due."""
    waiting_runs: bytes
    """Return the run that has waited longest for its start, and whether others were started within
    the last minute. No row: none waits."""
    lapsed: bytes
    """Return how many running jobs have a lapsed lease, and for how many seconds the oldest has."""
    unserved: bytes
    """Return the queues that have due jobs and no live worker which takes them. `n` counts at most
    `counted` jobs, `wait_s` is the age of the first in line, `alive` how many workers are there
    and take none. A worker of 0.3.0 has a heartbeat only. Each step reads one index entry."""
    dead_workers: bytes
    """Return `host queue` of the heartbeats that are flagged dead, and of the workers that have been
    silent for `stale_s` seconds and have a running job."""
    table_statistics: bytes
    """Return what autovacuum and updates do to these tables."""
    indexes_on_renewed: bytes
    """Return the indexes over one of these columns, each given with its table."""

doctor: _Doctor

class _Explain:
    node_job: bytes
    """Return a node's job with the status of its run. No row: no such job."""
    ingest_job: bytes
    """Return an ingest job. No row: no such job."""
    run: bytes
    """Return what says why a run waits. No row: no such run."""
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

explain: _Explain

class _Logs:
    write: Mapping[str, bytes]
    """Store the logs of several attempts, one element of each array an attempt. Jobs that are gone, or
    that were claimed again, are left out. A head that is NULL is not written again."""
    prune: bytes
    """Delete up to `batch` logs of attempts that are older than `days` days."""

logs: _Logs

class _Overview:
    run_head: bytes
    """Return a run without its definition and context. `elapsed_s` counts from its submit. No row: no
    such run."""
    steps: bytes
    """Count the nodes of a run by status, for each step: the node id up to its first slash.
    `elapsed_s` ends with the last node, or now while a node has not ended."""
    nodes: bytes
    """Return the nodes of a run: first those that run, wait for input or failed. With `live_only`
    these, and the queued ones of which an attempt failed."""
    node_seconds: bytes
    """Return how long the handler of each completed node of a run took."""
    node_counts: bytes
    """Count the nodes of a run by status."""
    completed_by: bytes
    """Return the workers that completed nodes of a run, and how many each."""
    crashes: bytes
    """Count how often a node of a run was taken back from a worker that died."""
    failures: bytes
    """Return the failed nodes of a run, the first to fail first, with the latest traceback."""
    runs_ahead: bytes
    """Count the runs that were submitted before this one, are no less urgent, and have work to do
    now. A run that only waits for a person has none."""
    find: bytes
    """Return what has this id, a run before a job. No row: nothing has it."""
    running_under: bytes
    """Return the running jobs that have this id or belong to the run that has it, with their workers."""
    waiting_inputs: bytes
    """Return the input nodes that wait in live runs, of one run if it is given, the longest wait
    first. `answered`: whether an answer was submitted and not taken yet."""
    has_answer: bytes
    """Return whether an answer to a node was submitted and not taken yet."""
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
