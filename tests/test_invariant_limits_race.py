"""Limits hold under many concurrent workers with crashes; many waiters cost the claim nothing."""

from __future__ import annotations

import random
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Generator
from contextlib import ExitStack
from datetime import timedelta
from itertools import pairwise
from types import ModuleType
from typing import Any

import pytest

from queue_workflows import errors, queues
from tests.support import constants, database, factories, invariants, sweeps, transitions

Row = dict[str, Any]
JOBS, CLAIMERS, DEADLINE_S = 90, 4, 60.0
AT_ONCE = {"a": 2, "b": 1}
QUEUE_AT_ONCE = 4
RATES = {"c": (4, 0.4), "d": (1, 0.1)}
QUEUE_RATE = (20, 0.5)


class Race:
    """Inserters, claimers that crash and fail now and then, a sweep, an operator, an observer."""

    def __init__(self, db: ModuleType, seed: int) -> None:
        self._db, self._seed = db, seed
        self._until = time.monotonic() + DEADLINE_S
        self.broken: list[object] = []
        self.over = threading.Event()

    def run(self) -> None:
        bodies = [self._insert, self._sweep, self._observe, self._pause, *[self._work] * CLAIMERS]
        with ExitStack() as stack:
            for number, body in enumerate(bodies):
                thread = threading.Thread(target=self._guarded, args=(body, number))
                thread.start()
                stack.callback(thread.join)

    def _guarded(self, body: Callable[[Any, random.Random], None], number: int) -> None:
        try:
            with self._db.connect() as conn:
                body(conn, random.Random(self._seed * 100 + number))
        except BaseException as error:
            self.broken.append(error)
            self.over.set()

    def _goes_on(self, pause_s: float) -> bool:
        return not self.over.wait(pause_s) and time.monotonic() < self._until

    def _insert(self, conn: Any, drawn: random.Random) -> None:
        for _ in range(JOBS // 3):
            with conn.transaction():
                for _ in range(3):
                    factories.ingest(
                        conn,
                        partition_key=drawn.choice("abcd"),
                        priority=drawn.choice((10, 100)),
                        lock_key=drawn.choice((None, None, "k")),
                        max_attempts=50,  # none may fail for good by chance
                    )
            self.over.wait(drawn.random() * 0.02)

    def _sweep(self, conn: Any, drawn: random.Random) -> None:
        del drawn
        while self._goes_on(0.1):
            sweeps.admit_from_partitions(conn)
            transitions.reclaim_lapsed(conn, "ingest")

    def _pause(self, conn: Any, drawn: random.Random) -> None:
        while self._goes_on(0.2):
            key = drawn.choice((None, "a", "c"))
            until = timedelta(milliseconds=50)
            queues.pause("fetch", partition=key, until=until, conn=conn)
            if drawn.random() < 0.5:
                queues.resume("fetch", partition=key, conn=conn)

    def _observe(self, conn: Any, drawn: random.Random) -> None:
        del drawn
        while self._goes_on(0.005):
            seen = conn.execute(
                "SELECT partition_key AS key, count(*) AS n FROM ingest_jobs"
                " WHERE status = 'running' GROUP BY 1"
            ).fetchall()
            many = {row["key"]: row["n"] for row in seen}
            if sum(many.values()) > QUEUE_AT_ONCE:
                self.broken.append(("queue", many))
            self.broken += [(k, many) for k, most in AT_ONCE.items() if many.get(k, 0) > most]
            left = "SELECT count(*) FROM ingest_jobs WHERE status = 'completed'"
            if factories.one(conn, left) == JOBS:
                self.over.set()

    def _work(self, conn: Any, drawn: random.Random) -> None:
        who = transitions.who("fetch", worker_id=f"w{drawn.random()}", lease_s=0.3)
        while self._goes_on(0.003):
            jobs = transitions.claim(conn, who, drawn.choice((1, 1, 3)), promote=True)
            for job in jobs:
                fate = drawn.random()
                try:
                    if fate < 0.1:
                        continue  # as if its worker had died: the lease lapses
                    if fate < 0.2:
                        transitions.fail(conn, job, after_s=0.02)
                        continue
                    transitions.complete_ingest(conn, job)
                except errors.ClaimLost:
                    continue


def windows(conn: Any) -> dict[str | None, list[float]]:
    """When jobs of each partition started, and of the queue (None), in seconds."""
    starts: dict[str | None, list[float]] = defaultdict(list)
    for row in conn.execute(
        "SELECT j.partition_key AS key, extract(epoch FROM e.created_at)::float8 AS at"
        " FROM ingest_job_events e JOIN ingest_jobs j ON j.id = e.job_id"
        " WHERE e.event_type = 'claimed' ORDER BY e.created_at"
    ).fetchall():
        starts[row["key"]].append(row["at"])
        starts[None].append(row["at"])
    return starts


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_no_limit_is_broken_at_any_moment_and_nothing_waits_for_ever(
    db: ModuleType, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    constants.put(monkeypatch, "claim.recovery.MAX_CRASHES", 50)
    # On a slow machine the short leases of this test lapse by themselves.
    constants.put(monkeypatch, "claim.recovery.MAX_LAPSES", 1000)
    monkeypatch.setenv("QUEUE_WORKFLOWS_CRASH_BACKOFF_S", "0.01")
    with db.connect() as conn:
        most, period_s = QUEUE_RATE
        queues.limit("fetch", max_running=QUEUE_AT_ONCE, rate=f"{most}/{period_s}s")
        for key, most in AT_ONCE.items():
            queues.limit("fetch", partition=key, max_running=most)
        for key, (most, period_s) in RATES.items():
            queues.limit("fetch", partition=key, rate=f"{most}/{period_s}s")
        race = Race(db, seed)
        race.run()
        assert race.broken == []
        assert factories.column(conn, "SELECT DISTINCT status FROM ingest_jobs") == ["completed"]
        assert factories.one(conn, "SELECT count(*) FROM ingest_jobs") == JOBS
        starts = windows(conn)
        for key, (most, period_s) in {**RATES, None: QUEUE_RATE}.items():
            pairs = zip(starts[key], starts[key][most:], strict=False)
            apart = [later - first for first, later in pairs]
            assert min(apart) >= period_s - 1e-6, (key, min(apart))
        assert all(first <= later for first, later in pairwise(starts[None]))
        assert invariants.broken(conn, slack_s=5) == []


LINE = 40_000
ROWS_A_STEP = 60
FILL = f"""
SET session_replication_role = replica;
INSERT INTO ingest_jobs (task_name, queue, partition_key, blocked_reason)
    SELECT 't', q, 'a', CASE q WHEN 'paused' THEN NULL ELSE 'limited' END
      FROM generate_series(1, {LINE // 4}) i,
           unnest(ARRAY['paused', 'partition', 'rate', 'full']) q;
SET session_replication_role = origin;
INSERT INTO ingest_jobs (task_name, queue, partition_key)
    SELECT 't', q, 'b' FROM unnest(ARRAY['partition', 'rate', 'full']) q, generate_series(1, 3);
"""
SETTINGS = """
INSERT INTO queue_settings (queue, paused_at) VALUES ('paused', now());
INSERT INTO queue_partitions (queue, partition_key, paused_at) VALUES ('partition', 'a', now());
INSERT INTO queue_partitions (queue, partition_key, rate_limit, rate_period_s)
    VALUES ('rate', 'a', 2, 3600);
INSERT INTO queue_partitions (queue, partition_key, max_running) VALUES ('full', 'a', 1);
"""


@pytest.fixture(scope="module", params=["empty", "full"])
def crowded(own_database: database.Database, request: pytest.FixtureRequest) -> Generator[str]:
    """The DSN of a database with long lines, and statistics of before or after they came."""
    from queue_workflows import db

    name = own_database.fresh_name()
    dsn = own_database.create_migrated(name)
    with database.environment(QUEUE_WORKFLOWS_DB_URL=dsn), db.connect(limited=False) as conn:
        conn.execute("ALTER TABLE ingest_jobs SET (autovacuum_enabled = off)")
        statements = {"empty": (SETTINGS, "ANALYZE", FILL), "full": (SETTINGS, FILL, "ANALYZE")}
        for statement in statements[request.param]:
            conn.execute(statement.encode())
    yield dsn
    own_database.drop(name)


def read(conn: Any) -> int:
    return factories.one(
        conn,
        "SELECT coalesce(sum(coalesce(idx_tup_fetch, 0) + seq_tup_read), 0)::bigint"
        " FROM pg_stat_xact_user_tables WHERE schemaname = 'public'"
        " AND relname IN ('ingest_jobs', 'partition_starts', 'queue_starts')",
    )


@pytest.mark.parametrize("queue", ["paused", "partition", "rate", "full"])
def test_a_claim_beside_many_waiters_reads_a_few_rows(crowded: str, queue: str) -> None:
    from queue_workflows import db

    with db.connect(url=crowded) as conn, conn.transaction(force_rollback=True):
        waits: list[float] = []
        who, on_wait = transitions.who(queue), transitions.on_limit_wait(waits)
        jobs = transitions.claim(conn, who, promote=True, on_wait=on_wait)
        conn.execute("SET CONSTRAINTS ALL IMMEDIATE")
        if not jobs and waits == [0]:
            jobs = transitions.claim(conn, who, promote=True)
        assert (queue == "paused") == (not jobs)
        for job in jobs:
            transitions.complete_ingest(conn, job)
        assert read(conn) <= ROWS_A_STEP
