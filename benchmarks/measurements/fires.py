"""Measure how late a schedule fires, and what 10,000 schedules cost a scheduler."""

from __future__ import annotations

import time
from collections.abc import Iterator

from benchmarks import processes, results
from benchmarks.bench import Bench, until
from queue_workflows import db, scheduler

ABOUT = """Lateness: one `queue-scheduler` and one schedule, `every 1s`. The time is from the
instant to the row of the fire, both by the server's clock. It includes that the scheduler wakes up,
locks the schedule and claims the instant. The transactions of an idle scheduler are measured at the
same time, on another database with 10,000 schedules, none of them due. They are the commits and
rollbacks that `pg_stat_database` counts there. After that a scheduler in the process of the
benchmark has these 10,000 schedules. A tick is one call of `Ticker.run_once()`, with all work that
the database does for it."""
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
_SOME = """
INSERT INTO schedules (name, expression, task_name, queue, overlap)
SELECT 's' || n, 'every 1h', 'noop', 'load', 'allow'
  FROM generate_series(%(first)s::integer, %(last)s) n
"""
_FAR = """
UPDATE schedules SET next_at = now() + interval '1 day', wake_at = now() + interval '1 day'
 WHERE wake_at IS NULL
"""
_DUE = """
UPDATE schedules SET next_at = date_trunc('hour', now()), wake_at = now()
 WHERE name = ANY (SELECT 's' || n FROM generate_series(%(first)s::integer, %(last)s) n)
"""
_AGAIN = """
UPDATE schedules SET next_at = now() + interval '1 day', wake_at = now() + interval '1 day'
 WHERE wake_at < now() + interval '1 hour'
"""
_COUNT = "SELECT xact_commit + xact_rollback FROM pg_stat_database WHERE datname = %s"
_CONNECTED = "SELECT count(*) FROM pg_stat_activity WHERE datname = %s AND pid <> pg_backend_pid()"
MANY = 10_000
WARM = 2
DUE = 10


def run(bench: Bench) -> Iterator[results.Row]:
    """Yield the lateness at p50 and p99, and the cost of 10,000 schedules."""
    server = bench.server
    with server.database("fires_many") as many:
        with db.connect() as conn:
            for first in range(1, MANY, 1000):
                conn.execute(_SOME, {"first": first, "last": first + 999})
                conn.execute(_FAR)
        name = server.name_of(many)
        with bench.running(many, ("scheduler", processes.scheduler())) as watched:
            until(lambda: _number(bench, _CONNECTED, name) > 1, "the scheduler started", watched)
            time.sleep(bench.pick(10.0, 2.0))
            before, begun = _number(bench, _COUNT, name), time.monotonic()
            yield from _lateness(bench)
            spent = _number(bench, _COUNT, name) - before
        yield results.Row(
            "idle scheduler of 10,000 schedules, transactions",
            spent / (time.monotonic() - begun), "/s", target=results.own_at_most(1),
        )  # fmt: skip
        yield from _ticks(bench)


def _number(bench: Bench, query: str, name: str) -> int:
    return (bench.server.admin.execute(query.encode(), (name,)).fetchone() or (0,))[0]


def _lateness(bench: Bench) -> Iterator[results.Row]:
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


def _ticks(bench: Bench) -> Iterator[results.Row]:
    ticker = scheduler.Ticker()
    ticker.run_once()
    rounds = bench.pick(200, 40)
    idle = [_tick_ms(ticker, 0) for _ in range(rounds)]
    due: list[float] = []
    with db.connect() as conn:
        for number in range(rounds // 2):
            given = {"first": number * DUE + 1, "last": (number + 1) * DUE}
            conn.execute(_DUE, given)
            due.append(_tick_ms(ticker, DUE))
            conn.execute(_AGAIN)
    for what, found in (("none due", idle), (f"{DUE} due", due)):
        for pct, target in ((50, None), (99, results.own_at_most(50))):
            yield results.Row(
                f"tick with 10,000 schedules, {what}, p{pct}", results.percentile(found, pct), "ms",
                target=target, note=f"{len(found)} ticks",
            )  # fmt: skip


def _tick_ms(ticker: scheduler.Ticker, wanted: int) -> float:
    begun = time.perf_counter()
    fired = len(ticker.run_once())
    spent = (time.perf_counter() - begun) * 1000
    if fired != wanted:
        raise RuntimeError(f"{fired} fires in a tick, not {wanted}")
    return spent
