-- Claim jobs of nodes that have a code version, by workers that have the version.

-- Return the first waiting job of each of these versions that wait in a queue. It steps from one version that waits
-- to the next one that is asked for, so it reads neither the jobs of other versions nor asks for each in turn.
CREATE OR REPLACE FUNCTION queue_workflows_version_heads(p_queue text, p_versions text[])
RETURNS TABLE (version text, priority smallint, seq bigint) LANGUAGE plpgsql STABLE
{by_index()} AS $$
DECLARE
    v_asked    text[] := ARRAY(SELECT DISTINCT a FROM unnest(p_versions) a WHERE a IS NOT NULL ORDER BY a);
    v_at       integer := 1;
    v_version  text;
    v_priority smallint;
    v_seq      bigint;
BEGIN
    WHILE v_at <= cardinality(v_asked) LOOP
        SELECT j.required_version, j.priority, j.seq INTO v_version, v_priority, v_seq FROM workflow_node_jobs j
         WHERE {versioned(j)} AND j.required_version >= v_asked[v_at]
         ORDER BY j.required_version, j.priority, j.seq LIMIT 1;
        EXIT WHEN NOT FOUND;
        WHILE v_asked[v_at] < v_version LOOP
            v_at := v_at + 1;
        END LOOP;
        IF v_asked[v_at] = v_version THEN
            version := v_version;
            priority := v_priority;
            seq := v_seq;
            RETURN NEXT;
            v_at := v_at + 1;
        END IF;
    END LOOP;
END $$;

-- Lock the job of a cpu queue that a worker with these versions claims and return its id: the first of the jobs with
-- such a version or without one. Returns NULL if jobs without a version go first, or no job waits. p_newest: of the
-- best priority, jobs with a version go first, the newest of its version.
CREATE OR REPLACE FUNCTION queue_workflows_pick_version(p_queue text, p_versions text[], p_newest boolean)
RETURNS text LANGUAGE plpgsql
{by_index()} AS $$
DECLARE
    v_versions text[] := p_versions;
    v_version  text;
    v_band     smallint;
    v_seq      bigint;
    v_priority smallint;
    v_id       text;
BEGIN
    LOOP
        SELECT h.version, h.priority, h.seq INTO v_version, v_band, v_seq
          FROM queue_workflows_version_heads(p_queue, v_versions) h ORDER BY h.priority, h.seq LIMIT 1;
        IF NOT FOUND THEN
            RETURN NULL;
        END IF;
        IF p_newest THEN
            SELECT j.priority INTO v_priority FROM workflow_node_jobs j
             WHERE {node:claimable(j)} {node:first(j)};
            IF v_priority < v_band THEN
                RETURN NULL;
            END IF;
            SELECT j.id INTO v_id FROM workflow_node_jobs j
             WHERE {versioned(j)} AND (j.required_version, j.priority) >= (v_version, v_band)
               AND (j.required_version, j.priority) <= (v_version, v_band)
             ORDER BY j.required_version DESC, j.priority DESC, j.seq DESC LIMIT 1 FOR UPDATE OF j SKIP LOCKED;
        ELSE
            SELECT j.id INTO v_id FROM workflow_node_jobs j
             WHERE {versioned(j)} AND j.required_version IS NULL AND (j.priority, j.seq) < (v_band, v_seq)
             ORDER BY j.required_version, j.priority, j.seq LIMIT 1 FOR UPDATE OF j SKIP LOCKED;
            IF v_id IS NULL THEN
                SELECT j.id INTO v_id FROM workflow_node_jobs j
                 WHERE {versioned(j)} AND j.required_version BETWEEN v_version AND v_version
                 ORDER BY j.required_version, j.priority, j.seq LIMIT 1 FOR UPDATE OF j SKIP LOCKED;
            END IF;
        END IF;
        IF v_id IS NOT NULL THEN
            RETURN v_id;
        END IF;
        -- Other transactions have locked all jobs of this version.
        v_versions := array_remove(v_versions, v_version);
    END LOOP;
END $$;
