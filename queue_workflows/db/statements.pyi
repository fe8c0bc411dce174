"""Made from `sql/queries/` by `python -m tests.support.stubgen`; do not edit."""

from collections.abc import Mapping
from typing import Final

JOB_TABLES: Final[tuple[str, str]]

class _Controls:
    put: bytes
    """Switch the workers of a host and queue on or off; return the row. A trigger wakes the
    workers."""
    is_over: bytes
    """Return whether an instant has come, by the database's clock."""
    known_queues: bytes
    """Return the queues that a worker of any host has served, or that a control row names."""
    get: bytes
    """Return the control row of a host and queue. No row: nobody has switched it."""
    off_policy: bytes
    """Return the stop policy of the control row that switches a host and queue off now; NULL: it
    is on."""

controls: _Controls

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
    get: bytes
    """Return one ingest job with every column. No row: there is no such job."""
    count_by_status: bytes
    """Count all ingest jobs, by queue and status."""
    find: bytes
    """List jobs for an operator, the newest first. A filter that is NULL matches every job. Reads
    the table once: no index serves every filter."""
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

class _LockQueues:
    served: bytes
    """Return the queues that are not paused and have a live worker that takes jobs, as one array.
    A worker that was not seen for `stale_s` seconds is not live."""
    block_unserved: bytes
    """Block up to `batch` jobs of a table that keep a lock key from jobs in these served queues
    and are in none of these queues themselves; return how many."""
    unblock_served: bytes
    """Let up to `batch` blocked jobs of a table that are in these served queues wait for their
    lock keys again; return how many."""
    unserved: Mapping[str, bytes]
    """Return up to 100 queues with jobs that are blocked as unserved, by name, and how many jobs
    of each there are, up to `most`. Walks an index from queue to queue."""

lock_queues: _LockQueues

class _Logs:
    write: Mapping[str, bytes]
    """Store the logs of several attempts, one element of each array an attempt. Jobs that are gone, or
    that were claimed again, are left out. A head that is NULL is not written again."""
    prune: bytes
    """Delete up to `batch` logs of attempts that are older than `days` days."""

logs: _Logs

class _Models:
    publish_sizes: bytes
    """Write how much GPU memory each model needs, as a host registers it. Rows that would not
    change are not written."""
    learn_load: bytes
    """Let the moving average of how long a host loads a model follow one more load."""
    prune: bytes
    """Delete what was learned on hosts that have no worker and taught nothing for 30 days."""
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
    """Return the flagged models (NULL: jobs without one), each with its number of waiting jobs,
    up to 10,000."""
    request: bytes
    """Write an operator's request to load or unload a model, for all workers of a host (worker
    '') or for one; return the row. A trigger wakes the workers."""
    newest_request: bytes
    """Return the newest request for a worker past number `after`. A request that is older than
    the worker was meant for another process. No row: there is none."""
    on_workers: bytes
    """Return the gpu workers seen within a day, of one host or (NULL) of all: the model and the
    request as each reported them, the models that its host knows, and its host's GPUs in the
    latest sample within a minute (else NULL). One that was not seen for `stale_s` seconds is
    dead."""

models: _Models

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
    `end`. The `retention_days` of a queue stands before `days`; 0 keeps for ever. The table is
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
    outbox row or a node that has not ended. OFFSET 0 keeps each EXISTS a look-up per row
    (decision 0019)."""
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

class _Workers:
    beat: bytes
    """Record that a host serves a queue, for an app that runs workers of its own; clear its dead
    flag. `known_models` NULL leaves them as they are."""
    report: bytes
    """Write the row of a worker process and the heartbeat of its host and queue. A worker that
    obeys controls and is switched off is draining while it has a job, and else paused or
    parked: then its host's heartbeat is left to age."""
    stop: bytes
    """Record that a worker ended in good order."""
    last_detail: bytes
    """Return what the worker of a process reported of itself last. The ids of the workers of a
    process start with its prefix. No row: it never reported."""
    record_death: bytes
    """Mark the workers of a process that has ended, unless they are marked, and add how it ended."""
    clear_model: bytes
    """Clear the loaded model in the heartbeat of a host and queue; return the row. `mark_stale`
    sets the heartbeat back by an hour besides. No row: there is no such heartbeat."""
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
    heartbeat and the control row that switches it off now: of its queue's and the host's row,
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
