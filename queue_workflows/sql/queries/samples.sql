-- Store, read and delete hardware samples.

-- name: put none prepared
-- Store a hardware sample in the ring of its interval (in none if NULL) and, if requested, notify
-- it on the channel hw_metrics. The commit does not wait for the disk.
SELECT queue_workflows_put_sample(%(host)s::text, %(every_s)s::integer, %(sample)s::jsonb,
       %(notify)s::boolean);

-- name: between many
-- Return the samples of a host between two instants, the oldest first. `since` NULL stands
-- for `past_s` seconds ago, `until` NULL for now.
SELECT every_s, sampled_at, sample FROM hw_samples
 WHERE host_label = %(host)s
   AND sampled_at >= coalesce(%(since)s::timestamptz, now() - %(past_s)s * interval '1 second')
   AND sampled_at <= coalesce(%(until)s::timestamptz, now())
 ORDER BY sampled_at, every_s;

-- name: of_hosts many
-- Return the newest samples of hosts, a minute each, up to `limit` of each within `past_s` seconds, the oldest first.
-- Only the slots of that time are read, as queue_workflows_put_sample() counts them.
SELECT h.host_label, s.sampled_at, s.sample
  FROM unnest(%(hosts)s::text[]) AS h (host_label)
 CROSS JOIN LATERAL (
       SELECT sampled_at, sample FROM hw_samples
        WHERE host_label = h.host_label AND every_s = 60
          AND slot = ANY (ARRAY(
              SELECT mod(floor(extract(epoch FROM now()) / 60)::bigint - n, 1440)::smallint
                FROM generate_series(0, least(1439, ceil(%(past_s)s::float8 / 60)::integer)) AS n))
          AND sampled_at > now() - %(past_s)s::float8 * interval '1 second'
        ORDER BY sampled_at DESC LIMIT %(limit)s) s
 ORDER BY h.host_label, s.sampled_at
 LIMIT 10000;

-- name: last one
-- Return the last sample of a host between two instants. Returns no row if there is none.
SELECT every_s, sampled_at, sample FROM hw_samples
 WHERE host_label = %(host)s AND sampled_at BETWEEN %(since)s AND %(until)s
 ORDER BY sampled_at DESC, every_s LIMIT 1;

-- name: hosts column
-- Return the hosts that have samples.
SELECT DISTINCT host_label FROM hw_samples ORDER BY 1;

-- name: prune count
-- Delete the samples that are over a day old. The frequent ones stay as long as the others:
-- for a machine that went silent they show what it did last.
DELETE FROM hw_samples WHERE sampled_at < now() - interval '1 day';
