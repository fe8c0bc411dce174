-- Find failures for lists.

-- Return the failed jobs of both families that ended between p_since and p_until and fit the filters, the newest first. It
-- examines p_most jobs, in the order of their indexes. The last examined job is returned even if it does not fit; its
-- place says how far the search went. p_workflow: the workflow of a node, or the task of an ingest job. The first p_cut
-- characters of an error are returned; p_text is searched in the whole error.
CREATE OR REPLACE FUNCTION queue_workflows_newest_failures(
    p_since timestamptz, p_until timestamptz, p_queue text, p_workflow text, p_machine text, p_text text,
    p_most integer, p_cut integer)
RETURNS TABLE (place bigint, fits boolean, kind text, id text, at timestamptz, error text, name text, queue text,
               host_label text, run_id text, node_id text) LANGUAGE sql STABLE ROWS 2000
{by_index()} AS $$
    SELECT n.place, n.fits, n.kind, n.id, n.at, left(n.error, p_cut), n.name, n.queue, n.host, n.run_id, n.node_id
      FROM (SELECT f.place, f.kind, f.id, f.at, f.error, f.queue, f.host, f.run_id, f.node_id, f.examined, w.name,
                   ((p_queue IS NULL OR f.queue = p_queue) AND (p_workflow IS NULL OR w.name = p_workflow)
                    AND (p_machine IS NULL OR f.host = p_machine)
                    AND (p_text IS NULL OR strpos(lower(f.error), lower(p_text)) > 0)) IS TRUE AS fits
              FROM (SELECT b.*, row_number() OVER (ORDER BY b.at DESC, b.listed) AS place, count(*) OVER () AS examined
                      FROM (SELECT *
                              FROM (
                              -- both:
                              (SELECT
                                      'ingest job' AS kind, j.task_name AS name, NULL::text AS run_id, NULL::text AS node_id,  -- ingest only
                                      'node job' AS kind, NULL::text AS name, j.run_id, j.node_id,  -- nodes only
                                      j.id, j.finished_at::timestamptz AS at, {listed_id(j)} AS listed, j.error,
                                      j.queue::text, j.claimed_by AS host
                                 FROM ingest_jobs j
                                WHERE j.status = 'failed' AND j.finished_at >= coalesce(p_since, '-infinity')
                                  AND j.finished_at <= coalesce(p_until, 'infinity')
                                ORDER BY j.finished_at DESC, {listed_id(j)} LIMIT p_most)
                              -- end
                              ) a
                             ORDER BY a.at DESC, a.listed LIMIT p_most) b) f
             CROSS JOIN LATERAL (
                   SELECT coalesce(f.name, (SELECT r.workflow_name FROM workflow_runs r WHERE r.id = f.run_id)) AS name) w
           ) n
     WHERE n.fits OR n.place = n.examined
     ORDER BY n.place
$$;
