"""Measure how late a schedule fires, at a resolution of a second, on an idle scheduler."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks import processes, results
from benchmarks.bench import Bench, until
from queue_workflows import db

ABOUT = """One `queue-scheduler` and one schedule, `every 1s`. The time is from the instant to the
row of the fire, both by the server's clock: how long after its time the scheduler has woken up,
locked the schedule and claimed the instant. Nothing else runs on the database."""
_PREPARE = """
CREATE TABLE fire_times (ms double precision NOT NULL);
CREATE FUNCTION note_fire() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO fire_times VALUES (extract(epoch FROM clock_timestamp() - NEW.fire_at) * 1000);
    RETURN NULL;
END $$;
CREATE TRIGGER note_fire AFTER INSERT ON schedule_fires FOR EACH ROW EXECUTE FUNCTION note_fire();
INSERT INTO schedules (name, expression, task_name, queue, overlap)
VALUES ('bench', 'every 1s', 'noop', 'load', 'allow');
"""
WARM = 2


def run(bench: Bench) -> Iterator[results.Row]:
    """Yield the lateness at p50 and p99."""
    wanted = bench.pick(60, 8) + WARM
    with bench.server.database("fires") as dsn, db.connect() as conn:
        conn.execute(_PREPARE)
        with bench.running(dsn, ("scheduler", processes.scheduler())) as watched:
            until(lambda: len(_times(conn)) >= wanted, "the schedule fired", watched)
        found = _times(conn)[WARM:]
    note = f"{len(found)} fires"
    yield results.Row("lateness of a fire, p50", results.percentile(found, 50), "ms", note=note)
    yield results.Row(
        "lateness of a fire, p99", results.percentile(found, 99), "ms",
        target=results.own_at_most(50), note=note,
    )  # fmt: skip


def _times(conn: db.Connection) -> list[float]:
    return [row["ms"] for row in conn.execute("SELECT ms FROM fire_times").fetchall()]
