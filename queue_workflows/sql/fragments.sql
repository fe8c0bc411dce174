-- Parts of functions and statements that stand in several of them: `{name(a, b)}` there is the text below the name
-- here, with the arguments in the place of the parameters.

-- fragment: by_index()
-- Keep each query of a function to the order of an index, whatever the statistics say (decision 0019).
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_sort = off SET enable_incremental_sort = off
SET enable_hashjoin = off SET enable_mergejoin = off SET plan_cache_mode = force_generic_plan SET jit = off

-- fragment: live(j)
-- The run of a node is not over. OFFSET 0 keeps this a look-up for each node.
EXISTS (SELECT FROM workflow_runs r WHERE r.id = j.run_id AND NOT queue_workflows_is_terminal_run(r.status) OFFSET 0)

-- fragment: claimable(j)
-- A worker of the queue may claim the job, a node without a version.
j.queue = p_queue AND queue_workflows_is_claimable(j.status, j.blocked_reason)
AND j.required_version IS NULL AND {live(j)}  -- nodes only

-- fragment: first(j)
-- Order jobs as they are claimed, and keep the first.
ORDER BY
j.required_version,  -- nodes only
j.priority, j.seq LIMIT 1

-- fragment: versioned(j)
-- A worker of the queue that has the code of the node may claim it.
j.queue = p_queue AND queue_workflows_is_claimable(j.status, j.blocked_reason) AND {live(j)}

-- fragment: for_gpu(j)
-- A gpu worker that has the code of the node may claim it, as far as the model does not matter.
j.queue = 'gpu' AND queue_workflows_is_claimable(j.status, j.blocked_reason)
AND (j.required_version IS NULL OR j.required_version = ANY (p_versions)) AND {live(j)}

-- fragment: gpu_job(condition, place)
-- Lock the first such job in the order of an index.
SELECT j.id INTO v_id FROM workflow_node_jobs j
 WHERE {for_gpu(j)} AND condition
 ORDER BY place LIMIT 1 FOR UPDATE OF j SKIP LOCKED;

-- fragment: may_kill(j)
-- The job may have killed its worker, so that it is claimed alone.
greatest(j.crash_count, j.lapse_count) > 0

-- fragment: first_may_kill()
-- Whether the job that is next in the queue is such a job.
(SELECT {may_kill(q)} FROM ingest_jobs q
WHERE {claimable(q)}
{first(q)})

-- fragment: kept(k)
-- The job is kept for the host that claims.
{kept_for(k, p_host, p_queue)}

-- fragment: kept_for(k, host, of_queue)
-- The job is kept for the host that ran it: from `resume_at` on that host may claim it.
k.resume_host = host AND k.queue = of_queue
AND k.status = 'queued' AND k.blocked_reason = 'not_due' AND k.resume_until = k.available_at AND k.lock_key IS NULL

-- fragment: any_kept()
-- Whether this host may claim a job that is kept for it.
(SELECT true FROM ingest_jobs k WHERE {kept(k)} AND k.resume_at <= now()
  ORDER BY k.resume_host, k.queue, k.resume_at LIMIT 1)

-- fragment: promote_due()
-- Make up to 100 delayed jobs of the queue claimable whose time has come.
WITH due AS MATERIALIZED (
    SELECT j.id FROM ingest_jobs j
     WHERE j.status = 'queued' AND j.blocked_reason IS NOT NULL AND j.available_at <= now()
       AND j.blocked_reason = 'not_due' AND j.queue = p_queue
     ORDER BY j.available_at LIMIT 100 FOR UPDATE SKIP LOCKED)
UPDATE ingest_jobs j SET blocked_reason = NULL, available_at = NULL WHERE j.id = ANY (ARRAY(SELECT d.id FROM due d));

-- fragment: is_off(machine, of_queue)
-- The workers of this host and queue are switched off.
EXISTS (SELECT FROM worker_controls c WHERE c.host_label = machine AND c.queue IN (of_queue, 'all')
           AND queue_workflows_is_off(c.desired_state, c.until_at))

-- fragment: is_live(w, stale_s)
-- The worker has not ended, and was seen within so many seconds.
w.state NOT IN ('stopped', 'dead') AND w.last_seen > now() - stale_s * interval '1 second'

-- fragment: takes_jobs(w)
-- The live worker takes jobs, perhaps after a wait for memory: it is not off.
w.state NOT IN ('parked', 'paused', 'draining')

-- fragment: serving(stale_s)
-- The live workers, each with its queue and whether it takes jobs. A worker of 0.3.0 has a heartbeat only.
SELECT w.queue::text, {takes_jobs(w)} AS takes_jobs
  FROM workers w WHERE {is_live(w, stale_s)}
 UNION ALL
SELECT b.queue::text, true
  FROM worker_heartbeats b
 WHERE b.last_seen > now() - stale_s * interval '1 second'
   AND NOT EXISTS (SELECT FROM workers w WHERE w.host_label = b.host_label AND w.queue = b.queue)

-- fragment: known_queues()
-- The queues that a worker of any host has served, or that a control row names; `all` in such a row is not a queue.
SELECT queue FROM workers
 UNION SELECT queue FROM worker_heartbeats
 UNION SELECT queue FROM worker_controls WHERE queue <> 'all'

-- fragment: in_use(s)
-- The limits of a queue with their use: whether it is `paused`, how many of its ingest jobs run, and in how many seconds
-- its rate allows the next start (`due_s`, NULL if it is allowed now or the queue has no rate).
s.queue, queue_workflows_is_paused(s.paused_at, s.paused_until) AS paused, s.max_running, s.rate_limit, s.rate_period_s,
(SELECT count(*) FROM ingest_jobs j WHERE j.status = 'running' AND j.queue = s.queue) AS running,
(SELECT nullif(greatest(0, s.rate_period_s - extract(epoch FROM now())::float8
                           + extract(epoch FROM b.started_at)::float8), 0)
   FROM queue_starts b
  WHERE b.queue = s.queue
    AND b.n = 1 - s.rate_limit::bigint
        + (SELECT max(l.n) FROM queue_starts l WHERE l.queue = s.queue)) AS due_s

-- fragment: to_running(j, worker, host, lease_s, lane)
-- The columns that a claim sets.
status = 'running', claim_no = j.claim_no + 1, worker_id = worker, claimed_by = host,
lease_expires_at = now() + lease_s * interval '1 second', heartbeat_at = now(), started_at = now(),
host_label = host, worker_lane = coalesce(lane, j.worker_lane),  -- nodes only
resolved_inputs = CASE WHEN j.ref_heads = '{}' THEN j.inputs ELSE j.resolved_inputs END,  -- nodes only
available_at = NULL, blocked_reason = NULL, error = NULL, progress = NULL

-- fragment: note_claim(j)
-- Record a claim in the history; FROM follows. An attempt is a smallint in the history of nodes.
INSERT INTO ingest_job_events
       (
        run_id, node_id, model,  -- nodes only
        attempt, job_id, event_type, claim_no, worker_id, host_label, queue)
SELECT
       j.run_id, j.node_id, j.required_model, greatest(0, least(j.attempts, 32767)),  -- nodes only
       j.attempts,  -- ingest only
       j.id, 'claimed', j.claim_no, p_worker, p_host, j.queue

-- fragment: to_completed(j, output, took, peak, received)
-- The columns that the record of a completed job sets.
status = 'completed', error = NULL, seconds = took, finished_at = now(), worker_id = NULL, lease_expires_at = NULL,
result = output,  -- ingest only
context_delta = output, vm_rss_mb_peak = peak, resolved_inputs = coalesce(received, j.resolved_inputs),  -- nodes only
progress = {progress_at_end(j)}

-- fragment: progress_at_end(j)
-- The progress of a job that is completed: the last report of its handler, else all.
CASE WHEN jsonb_typeof(j.progress) IN ('object', 'string') THEN j.progress ELSE '1' END

-- fragment: claimed_columns(j)
-- The columns of a node that a worker gets; the run and the context follow.
j.id, j.run_id, j.node_id, j.node_module, j.queue, j.required_model, j.status, j.pipeline_name, j.priority, j.seq,
j.claim_no, j.worker_id, j.claimed_by, j.generation, j.attempts, j.max_attempts, j.crash_count, j.watchdog_retries,
j.timeout_s, j.inputs, j.input_template, j.ref_heads

-- fragment: run_of(j)
-- The columns of the run of a node that a worker gets.
(SELECT json_build_object('id', r.id, 'out_dir', r.out_dir, 'workflow_name', r.workflow_name, 'generation', r.generation,
                          'revision', r.revision, 'born', queue_workflows_born(r.created_at),
                          'traceparent', r.headers ->> 'traceparent')
   FROM workflow_runs r WHERE r.id = j.run_id)

-- fragment: is_aside(j)
-- The job is still as its caller moved it aside, queued or under its claim.
j.id = %(job)s AND CASE WHEN %(worker)s::text IS NULL THEN j.status = 'queued'
                        ELSE j.status = 'running' AND j.worker_id = %(worker)s AND j.claim_no = %(claim)s::bigint END

-- fragment: run_completed()
-- The columns that the end of a completed run sets.
status = 'completed', finished_at = now(), progress_pct = 100, error = NULL, updated_at = now()

-- fragment: has_key(j, of_key)
-- The job has the lock key, as it runs or is claimable. Only the index of lock keys has this predicate. A condition about
-- claimable jobs alone would imply that of the claim's index, too, which the planner may then read as a whole.
j.lock_key IS NOT NULL AND j.lock_key = of_key
AND (j.status = 'running' OR (j.status = 'queued' AND j.blocked_reason IS NULL))

-- fragment: give_turns(jobs)
-- The statements of queue_workflows_give_turns() for one table.
WITH behind AS MATERIALIZED (
    SELECT b.id FROM unnest(p_keys) AS k (key) CROSS JOIN LATERAL (
        SELECT j.id FROM jobs j
         WHERE {has_key(j, k.key)} AND (j.status = 'queued') IS TRUE
           -- Compare with the first waiter only: a search for any earlier one may read all waiters.
           AND EXISTS (SELECT FROM (
               SELECT w.priority, w.seq FROM jobs w
                WHERE w.lock_key IS NOT NULL AND w.lock_key = k.key AND w.status = 'queued'
                  AND w.blocked_reason = 'locked'
                ORDER BY w.priority, w.seq LIMIT 1) f WHERE (f.priority, f.seq) < (j.priority, j.seq))
           FOR UPDATE OF j SKIP LOCKED) b)
UPDATE jobs j SET blocked_reason = 'locked' WHERE j.id = ANY (ARRAY(SELECT b.id FROM behind b));
WITH heads AS MATERIALIZED (
    SELECT h.id FROM unnest(p_keys) AS k (key) CROSS JOIN LATERAL (
        SELECT w.id FROM jobs w
         WHERE w.lock_key IS NOT NULL AND w.lock_key = k.key AND w.status = 'queued'
           AND w.blocked_reason = 'locked'
         ORDER BY w.priority, w.seq LIMIT 1 FOR UPDATE SKIP LOCKED) h
     WHERE NOT EXISTS (SELECT FROM jobs j WHERE {has_key(j, k.key)} OFFSET 0))
UPDATE jobs j SET blocked_reason = NULL WHERE j.id = ANY (ARRAY(SELECT h.id FROM heads h));
GET DIAGNOSTICS v_count = ROW_COUNT;

-- fragment: same_job(x, e)
-- Both events are of one job; AND follows.
x.run_id = e.run_id AND x.node_id = e.node_id AND  -- nodes only
x.job_id = e.job_id AND

-- fragment: recently_sent()
-- The outbox rows of the window. No index has their age, but ids rise with it: walk back to the first row that is too
-- old. The hour more is for a long transaction, whose `created_at` is its start.
SELECT * FROM workflow_dispatch_events
 WHERE id > coalesce((SELECT id FROM workflow_dispatch_events
                       WHERE created_at < %(since)s::timestamptz - interval '1 hour' ORDER BY id DESC LIMIT 1), 0)

-- fragment: touched(id, job_id)
-- The jobs, or their runs, that have an event in the window, and the ones that wait or run. With OR instead of UNION,
-- the planner would not use the partial indexes.
SELECT id FROM ingest_jobs WHERE %(whole)s::boolean
UNION SELECT job_id FROM ingest_job_events
 WHERE NOT %(whole)s::boolean AND job_id IS NOT NULL AND created_at >= %(since)s::timestamptz
UNION SELECT id FROM ingest_jobs WHERE status = 'running'
UNION SELECT id FROM ingest_jobs WHERE queue_workflows_is_claimable(status, blocked_reason)
UNION SELECT id FROM ingest_jobs WHERE status = 'queued' AND blocked_reason IS NOT NULL

-- fragment: claim_of(kind, job)
-- The last claim of a job of either family.
SELECT i.claim_no FROM ingest_jobs i WHERE kind = 'ingest_jobs' AND i.id = job
 UNION ALL SELECT n.claim_no FROM workflow_node_jobs n WHERE kind = 'workflow_node_jobs' AND n.id = job

-- fragment: is_late(at)
-- A sweep should have taken a row that was due then.
at <= now() - %(late_s)s::float8 * interval '1 second'

-- fragment: owner()
-- The ingest job or the run to end, the command for that, and the start of a sentence about the job.
'job', id, 'jobs delete', 'it '  -- ingest only
'run', run_id, 'cancel', 'node ' || node_id || ' '  -- nodes only
||

-- fragment: is_bad(v)
-- The value cannot be used: a time or a number is outside the range that the engine writes, or the
-- JSON is nested too deep or has a number with too many digits. JSON of 400 bytes or fewer can have
-- neither 200 levels nor 4,300 digits.
v.at NOT BETWEEN '2000-01-01Z' AND '9999-12-31Z' OR v.n NOT BETWEEN 0 AND 1000000000
OR CASE WHEN octet_length(v.value::text) > 400 THEN jsonb_path_exists(v.value, 'strict $.**{201}')
             OR jsonb_path_exists(v.value, 'strict $.** ? (@ > 1e4299 || @ < -1e4299)') END

-- fragment: why_bad(v)
-- Say what is wrong with a value for which `is_bad` is true.
v.name || CASE WHEN v.value IS NULL THEN ' is out of range: ' || coalesce(v.at::text, v.n::text)
               ELSE ' is nested too deep, or has a number of too many digits' END

-- fragment: chosen(j)
-- The row is in `ids`, if that is given, and not in `aside`.
(%(ids)s::text[] IS NULL OR j.id = ANY (%(ids)s::text[])) AND j.id <> ALL (%(aside)s::text[])

-- fragment: held(j)
-- This claim still holds the job.
j.id = %(job)s AND j.worker_id = %(worker)s AND j.claim_no = %(claim)s AND j.status = 'running'

-- fragment: host_before(j)
-- The host that has had the job, for its event: a job that is queued has none.
host => (SELECT o.claimed_by FROM ingest_jobs o WHERE o.id = j.id)

-- fragment: recorded(j, event, more)
-- The end of a statement that changes jobs in `WITH done AS (UPDATE ...`: record each change, and return the rows.
RETURNING queue_workflows_record(j, event, {host_before(j)}, more) AS job)
SELECT (job).* FROM done

-- fragment: was()
-- The job as it is, locked until the transaction ends.
was AS MATERIALIZED (SELECT o.id, o.status, o.claimed_by FROM ingest_jobs o WHERE o.id = %(job)s FOR UPDATE)

-- fragment: recorded_if_run(j, event)
-- Like `recorded`, for a change by an operator. A trigger records the change of an ingest job that did not run.
RETURNING
CASE was.status WHEN 'running' THEN  -- ingest only
queue_workflows_record(j, event, host => was.claimed_by, seconds => %(seconds)s::float8, detail => '{"by": "operator"}')
ELSE j END  -- ingest only
AS job)
SELECT (job).* FROM done

-- fragment: unless_queued(event)
-- The event of a job that is queued again, else of the state in which it ended.
CASE j.status WHEN 'queued' THEN event ELSE j.status END

-- fragment: count_loss(counter, losses, sentence)
-- Take running jobs from their workers and count each loss; WHERE and `recorded` follow.
WITH done AS (
    UPDATE ingest_jobs j
       SET (counter, status, finished_at, error, available_at) = (
               SELECT CASE WHEN must_end THEN j.counter ELSE losses END,
                      CASE WHEN must_end THEN 'cancelled'
                           WHEN is_poison THEN 'failed' ELSE 'queued' END,
                      CASE WHEN must_end OR is_poison THEN now() END,
                      CASE WHEN is_poison AND NOT must_end
                           THEN sentence || coalesce(j.worker_id, j.claimed_by, '?')
                                || coalesce('; ' || %(error)s::text, '')
                                || coalesce('; last beat ' || to_char(
                                       j.heartbeat_at AT TIME ZONE 'UTC', 'YYYY-MM-DD HH24:MI:SS')
                                       || ' UTC', '') END,
                      CASE WHEN j.counter > 0 AND NOT is_poison AND NOT must_end
                           THEN now() + losses * %(backoff_s)s::float8 * interval '1 second' END
                 FROM queue_workflows_must_end(j) AS must_end
                CROSS JOIN (SELECT least(greatest(j.counter, 0), 999999) + 1 AS losses) AS counted
                CROSS JOIN LATERAL (SELECT losses >= %(cap)s::integer AS is_poison) AS decided),
           priority = CASE WHEN j.counter <= 0 THEN least(j.priority, %(band)s::smallint)
                           ELSE j.priority END,
           worker_id = NULL, lease_expires_at = NULL

-- fragment: is_queue_paused()
-- The queue of a claim is paused.
EXISTS (SELECT FROM queue_settings s
         WHERE s.queue = %(queue)s::text AND queue_workflows_is_paused(s.paused_at, s.paused_until))

-- fragment: claimed_rows()
-- The columns of a claimed node that a worker reads, with the whole for its handler; `claimed_record` follows.
SELECT r.id, r.claim_no, r.crash_count, r.timeout_s, r.node_module, r.run_id, r.node_id,
       r.required_model, r.run, s.job AS body, NULL AS wait_s, r.due_s,
       (SELECT j.lapse_count FROM workflow_node_jobs j WHERE j.id = r.id) AS lapse_count

-- fragment: claimed_record()
-- The members of a claimed node that a worker reads.
CROSS JOIN LATERAL json_to_record(s.job)
       AS r (id text, claim_no bigint, crash_count integer, timeout_s float8, node_module text,
             run_id text, node_id text, required_model text, run json, due_s float8)

-- fragment: bad_counters()
-- A number of a job that only the engine counts, or its time limit, is out of its range.
NEW.seq NOT BETWEEN 1 AND 1000000000000000
OR greatest(NEW.attempts, NEW.max_attempts, NEW.crash_count, NEW.watchdog_retries, NEW.generation) > 1000000
OR least(NEW.attempts, NEW.max_attempts, NEW.crash_count, NEW.watchdog_retries, NEW.generation) < 0
OR NEW.timeout_s <= 0 OR NEW.timeout_s > 31622400

-- fragment: settle_inserted()
-- Give an inserted job the claim that its status needs, without values that only a handler may set.
IF NEW.status = 'running' THEN
    -- The same values as for a plain UPDATE to `running`. An endless lease would keep the job's lock key forever.
    IF NEW.lease_expires_at > now() + interval '7 days' THEN
        RAISE EXCEPTION '%.lease_expires_at of a running job is over 7 days ahead', TG_TABLE_NAME
            USING ERRCODE = 'check_violation', HINT = 'Insert the job as queued; a worker claims it.';
    END IF;
    NEW.claim_no := greatest(NEW.claim_no, 1);
    NEW.worker_id := coalesce(NEW.worker_id, 'legacy:' || coalesce(NEW.claimed_by, 'unknown'));
    NEW.lease_expires_at := coalesce(NEW.lease_expires_at, now() + interval '600 seconds');
ELSIF coalesce(NEW.worker_id, NEW.lease_expires_at::text) IS NOT NULL THEN
    NEW.worker_id := NULL;
    NEW.lease_expires_at := NULL;
END IF;
IF NEW.resume_host IS NOT NULL OR NEW.resume_at IS NOT NULL OR NEW.resume_until IS NOT NULL THEN
    -- Only a handler that waits lets a job be kept for its host.
    NEW.resume_host := NULL;
    NEW.resume_at := NULL;
    NEW.resume_until := NULL;
END IF;

-- fragment: wait_for_lock()
-- Let an inserted job wait for its lock key.
IF NEW.lock_key IS NOT NULL AND NEW.status = 'queued' THEN
    IF NEW.blocked_reason IS NULL THEN
        NEW.blocked_reason := 'locked';
    END IF;
    PERFORM queue_workflows_ask_turn(TG_TABLE_NAME, NEW.lock_key);
END IF;

-- fragment: given(name, type)
-- A column of a run that is set if `given` names it.
name = CASE WHEN 'name' = ANY (%(given)s::text[]) THEN %(name)s::type ELSE name END

-- fragment: head()
-- A run without its definition and context.
id, workflow_name, status, priority, mode, out_dir, generation, revision, start_attempts,
       definition IS NOT NULL AS has_definition, queue_workflows_born(created_at) AS born

-- fragment: startable()
-- The queued runs that may start now; a lock may follow.
SELECT {head()}, xmin::text AS version
  FROM workflow_runs
 WHERE status = 'queued' AND mode = 'node' AND available_at IS NULL
   AND (%(undefined)s OR definition IS NOT NULL) AND id <> ALL (%(set_aside)s::text[])
 ORDER BY priority, queued_at, id LIMIT %(limit)s

-- fragment: shown_job()
-- The columns of a job of either family that the history shows.
id, queue::text, status::text, priority, generation, claim_no, attempts, max_attempts,
crash_count, lapse_count, watchdog_retries, claimed_by, worker_id, blocked_reason,
queue_workflows_due_at(available_at, resume_at, resume_until) AS available_at,
cancel_requested_at, progress, error, seconds, created_at, started_at, finished_at,
now() AS read_at, queue_workflows_is_lost(status, lease_expires_at) AS lost

-- fragment: shown_node()
-- The columns of a node that the history shows.
{shown_job()}, run_id, node_id, node_module, pipeline_name, required_model,
coalesce(resolved_inputs, inputs) AS inputs, context_delta AS output, input_spec, vm_rss_mb_peak, child_run_id

-- fragment: of_nodes(records)
-- The recorded outcomes of these nodes of a run, or of all if `nodes` is NULL. Each node is looked up by itself: with
-- statistics from before the run, a search for several would read all nodes of the run.
(SELECT * FROM records WHERE run_id = %(run_id)s AND %(nodes)s::text[] IS NULL
 UNION ALL
 SELECT found.* FROM (SELECT DISTINCT unnest(%(nodes)s::text[])) w (name) CROSS JOIN LATERAL (
        SELECT * FROM records WHERE run_id = %(run_id)s AND node_id = w.name OFFSET 0) found)

-- fragment: age_s(at)
-- The seconds since a time, NULL without one; an infinite one counts as the nearest that the server can subtract.
CASE WHEN at IS NOT NULL
     THEN extract(epoch FROM now() - greatest(least(at, timestamptz '9999-12-31Z'), timestamptz '2000-01-01Z'))::float8 END

-- fragment: asking()
-- The nodes of running runs that wait for an answer of a person; more conditions follow.
  FROM workflow_node_jobs j
  JOIN workflow_runs r ON r.id = j.run_id
 WHERE j.status = 'awaiting_input' AND j.child_run_id IS NULL AND r.status = 'running'

-- fragment: is_answered(j)
-- An answer to the node was submitted, and not taken yet.
EXISTS (SELECT FROM workflow_input_submissions s
         WHERE s.run_id = j.run_id AND s.node_id = j.node_id AND s.status IN ('pending', 'processing'))

-- fragment: met(j)
-- The events by which workers handed a node back as unknown, since it was last handed back for another reason or ended.
SELECT e.created_at, e.worker_id FROM workflow_node_events e
 WHERE e.run_id = j.run_id AND e.node_id = j.node_id AND e.job_id = j.id AND e.claim_no IS NOT NULL
   AND e.event_type <> 'claimed' AND (e.detail ->> 'unknown') IS NOT NULL
   AND e.id > coalesce((
       SELECT max(o.id) FROM workflow_node_events o
        WHERE o.run_id = j.run_id AND o.node_id = j.node_id AND o.job_id = j.id AND o.claim_no IS NOT NULL
          AND o.event_type <> 'claimed' AND (o.detail ->> 'unknown') IS NULL), 0)

-- fragment: due_event()
-- The oldest event of the outbox that is due, with the seconds since then.
SELECT {age_s(greatest(created_at, available_at))} AS lag_s, run_id, error
  FROM workflow_dispatch_events
 WHERE processed_at IS NULL AND (available_at IS NULL OR available_at <= now())
 ORDER BY id LIMIT 1

-- fragment: late_runs()
-- At most 50 runs that could start and have waited for `patience_s`, in the order of their start, each with its wait,
-- and whether others were started within the last minute.
SELECT id, {age_s(queued_at)} AS wait_s,
       EXISTS (SELECT FROM workflow_runs
                WHERE status = 'running' AND mode = 'node'
                  AND started_at BETWEEN now() - interval '60 seconds' AND now()) AS others
  FROM workflow_runs
 WHERE status = 'queued' AND mode = 'node' AND available_at IS NULL
   AND queued_at < now() - %(patience_s)s::float8 * interval '1 second'
 ORDER BY priority, queued_at, id
 LIMIT 50

-- fragment: may_take()
-- A sender of the app may take the failure.
sent_at IS NULL AND (taken_until IS NULL OR taken_until < now())
AND (app IS NULL OR app = %(app)s OR failed_at < now() - make_interval(secs => %(patience_s)s))

-- fragment: log_waiting()
-- Write an event into the history of waiting gpu jobs; more conditions follow.
INSERT INTO workflow_node_events
       (run_id, node_id, job_id, attempt, event_type, queue, model, error, detail)
SELECT j.run_id, j.node_id, j.id, greatest(0, least(j.attempts, 32767)), %(event)s, j.queue,
       j.required_model, %(detail)s,
       jsonb_strip_nulls(jsonb_build_object('reason', %(reason)s::text))
  FROM workflow_node_jobs j
 WHERE j.queue = 'gpu' AND queue_workflows_is_claimable(j.status, j.blocked_reason)

-- fragment: has_place(j)
-- The job counts against the limits of its partition.
(j.status = 'running' OR (j.status = 'queued' AND (j.blocked_reason IS NULL OR j.admitted_at IS NOT NULL)))

-- fragment: partitions_of(condition)
-- Walk from partition to partition of the ingest jobs with this condition, however many they are.
WITH RECURSIVE line (queue, key) AS (
    (SELECT j.queue::text, j.partition_key FROM ingest_jobs j
      WHERE j.partition_key IS NOT NULL AND condition AND j.queue >= coalesce(p_queue, '')
      ORDER BY j.queue, j.partition_key LIMIT 1)
    UNION ALL
    SELECT n.queue, n.partition_key FROM line CROSS JOIN LATERAL (
        SELECT j.queue::text, j.partition_key FROM ingest_jobs j
         WHERE j.partition_key IS NOT NULL AND condition AND (j.queue, j.partition_key) > (line.queue, line.key)
         ORDER BY j.queue, j.partition_key LIMIT 1) n
     WHERE p_queue IS NULL OR line.queue = p_queue)
SELECT l.queue, l.key FROM line l WHERE p_queue IS NULL OR l.queue = p_queue

-- fragment: keys_with_waiters()
-- Walk from lock key to lock key that jobs wait for, however many wait; for format() with the table's name.
WITH RECURSIVE line (key) AS (
    (SELECT lock_key FROM %1$I WHERE lock_key IS NOT NULL AND status = 'queued'
        AND blocked_reason = 'locked' ORDER BY lock_key LIMIT 1)
    UNION ALL
    SELECT (SELECT w.lock_key FROM %1$I w WHERE w.lock_key IS NOT NULL AND w.status = 'queued'
               AND w.blocked_reason = 'locked' AND w.lock_key > line.key
             ORDER BY w.lock_key LIMIT 1)
      FROM line WHERE line.key IS NOT NULL)

-- fragment: exported(e)
-- The columns of an event of either family that are exported.
e.id, e.job_id, e.attempt, e.event_type::text, e.claim_no, e.worker_id, e.host_label, e.queue::text, e.elapsed_s,
left(e.error, 2000) AS error, e.created_at

-- fragment: earlier()
-- Set the times of a job earlier by an interval.
available_at = available_at - %(by)s::interval, lease_expires_at = lease_expires_at - %(by)s::interval,
resume_at = resume_at - %(by)s::interval, resume_until = resume_until - %(by)s::interval

-- fragment: firing()
-- The schedules of the table and of this app that fire. If `names` is given, only these; never the ones in `aside`.
  FROM schedules
 WHERE NOT paused AND NOT ended AND gone_at IS NULL AND (source = 'table' OR app = %(app)s)
   AND (%(names)s::text[] IS NULL OR name = ANY (%(names)s::text[])) AND name <> ALL (%(aside)s::text[])

-- fragment: this_step(s)
-- The step of a claimed job that a statement is about.
s.job_table = 'ingest_jobs' AND s.job_id = %(job)s AND s.kind = %(kind)s AND s.name = %(name)s AND s.key = %(key)s

-- fragment: feed_from()
-- From when on the feed has events. The planner knows this time, and so how few events there are.
coalesce(%(since)s::timestamptz, now() - %(late_s)s::float8 * interval '1 second')

-- fragment: input_index()
-- The indexes that serve a search of runs by their inputs.
SELECT FROM pg_index i
  JOIN pg_class c ON c.oid = i.indexrelid
  JOIN pg_am a ON a.oid = c.relam AND a.amname = 'gin'
  JOIN pg_attribute t ON t.attrelid = i.indrelid AND t.attnum = i.indkey[0] AND t.attname = 'context'
 WHERE i.indrelid = 'workflow_runs'::regclass AND i.indisvalid AND i.indpred IS NULL

-- fragment: runs_of(ids)
-- The runs with these ids, by a look-up for each.
unnest(ids) AS i (id) CROSS JOIN LATERAL (SELECT * FROM workflow_runs r WHERE r.id = i.id LIMIT 1)

-- fragment: of_value(column, value)
-- The runs with this value in the time that is searched. Rows are compared, as `=` would leave the planner more indexes.
(column, r.created_at) >= (value, v_since) AND (column, r.created_at) <= (value, v_until)

-- fragment: listed_id(r)
-- The id in the form of the indexes of run lists, so that the planner can use them.
(r.id || '') COLLATE "C"

-- fragment: is_behind(r)
-- The run comes after the last one of the previous page.
(p_id IS NULL OR r.created_at < p_at OR {listed_id(r)} > p_id)

-- fragment: fits(r)
-- The run has the status, the workflow, the schedule, the machine (of one of 1,000 nodes), the inputs and the text that are
-- searched. OFFSET 0 and LIMIT make PostgreSQL look up the other tables once per run.
((p_status IS NULL OR r.status = p_status) AND (p_workflow IS NULL OR r.workflow_name = p_workflow)
AND (p_schedule IS NULL
     OR EXISTS (SELECT FROM schedule_fires f WHERE f.run_id = r.id AND f.name = p_schedule OFFSET 0))
AND (p_machine IS NULL
     OR EXISTS (SELECT FROM (SELECT n.claimed_by, n.host_label FROM workflow_node_jobs n
                              WHERE n.run_id = r.id LIMIT 1000) f
                 WHERE p_machine IN (f.claimed_by, f.host_label)))
AND (p_input IS NULL OR r.context @> p_input)
AND (p_text IS NULL OR starts_with(r.id, p_text) OR strpos(lower(r.error), v_text) > 0)) IS TRUE

-- fragment: examined(column, condition)
-- Return the runs that fit, and the last one that may be examined, in the order of the index that begins so.
RETURN QUERY
SELECT e.id, e.created_at, e.fits, e.place
  FROM (SELECT x.id, x.created_at, {fits(x)} AS fits, row_number() OVER () AS place
          FROM (SELECT * FROM workflow_runs r WHERE condition AND {is_behind(r)}
                 ORDER BY column DESC, r.created_at DESC, {listed_id(r)} LIMIT p_most) x) e
 WHERE e.fits OR e.place = p_most LIMIT p_limit;

-- fragment: waiting(j)
-- The columns of a queued job that say why it waits.
j.id, j.queue::text, j.blocked_reason, j.lock_key, j.partition_key, j.available_at, j.resume_host, j.resume_at,
j.required_model, j.required_version, j.node_module, j.run_id,  -- nodes only
j.resume_until, j.claim_no, j.priority, j.seq, j.created_at

-- fragment: error_signature(error)
-- The beginning of an error with its numbers replaced, by which items of a map are grouped.
regexp_replace(left(coalesce(error, ''), 160), '[0-9]+', '#', 'g')

-- fragment: small(stored)
-- A value if a page may show it: few bytes as stored, where it is perhaps compressed, and as a text.
CASE WHEN pg_column_size(stored) <= %(most)s::integer AND octet_length((stored)::text) <= %(most)s::integer
     THEN stored END
