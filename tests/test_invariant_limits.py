"""Pauses and limits of queues and partitions hold at every instant, and every job ends."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from datetime import timedelta
from types import ModuleType
from typing import Any

import pytest
from psycopg import sql

from queue_workflows import queues
from tests.support import factories, invariants, sweeps, transitions

Row = dict[str, Any]
FREE, LINE = ("queued", None), ("queued", "limited")


@pytest.fixture(autouse=True)
def lawful(db: ModuleType) -> Iterator[None]:
    yield
    with db.connect() as conn:
        assert invariants.broken(conn, slack_s=5) == []
        assert factories.one(conn, "SELECT count(*) FROM partition_turns") == 0


def say(conn: Any, key: str | None = None, **limits: Any) -> None:
    """Set limits of the queue `fetch`, or of a partition in it."""
    queues.limit("fetch", partition=key, conn=conn, **limits)


def add(conn: Any, number: int = 1, **columns: Any) -> list[Row]:
    return [factories.ingest(conn, **{"partition_key": "a"} | columns) for _ in range(number)]


def take(
    conn: Any, size: int = 1, waits: list[float] | None = None, done: list[Row] | None = None
) -> list[Row]:
    """Claim as a worker does: again at the returned time, or when notified of admitted jobs."""
    who = transitions.who("fetch")
    conn.execute(b"LISTEN ingest_job_ready")
    while True:
        waits_s: list[float] = []
        list(conn.notifies(timeout=0))
        on_wait = transitions.on_limit_wait(waits_s)
        if done:
            rows = transitions.complete_and_claim(conn, done, who, size, on_wait=on_wait)
        else:
            rows = transitions.claim(conn, who, size, on_wait=on_wait)
        done = None
        if rows or (waits_s != [0] and not list(conn.notifies(timeout=0))):
            if waits is not None:
                waits += waits_s
            return rows


def end(conn: Any, *jobs: Row) -> None:
    for job in jobs:
        transitions.complete_ingest(conn, job)


def states(conn: Any, key: str | None = "a") -> list[tuple[str, str | None]]:
    rows = conn.execute(
        "SELECT status::text, blocked_reason FROM ingest_jobs"
        " WHERE partition_key IS NOT DISTINCT FROM %s ORDER BY seq",
        (key,),
    ).fetchall()
    return [(row["status"], row["blocked_reason"]) for row in rows]


def count(conn: Any, state: tuple[str, str | None], key: str | None = "a") -> int:
    return Counter(states(conn, key))[state]


def age(conn: Any, seconds: float) -> None:
    """Let that much time pass, as far as rates and lines that wait for them know."""
    for table, column in (
        ("queue_starts", "started_at"),
        ("partition_starts", "started_at"),
        ("partition_dues", "due_at"),
    ):
        conn.execute(
            sql.SQL("UPDATE {} SET {c} = {c} - %s * interval '1 second'").format(
                sql.Identifier(table), c=sql.Identifier(column)
            ),
            (seconds,),
        )


# Queues


@pytest.mark.parametrize("until", ["NULL", "now() + interval '1 hour'"])
def test_a_paused_queue_gives_no_job_until_it_is_resumed(db: ModuleType, until: str) -> None:
    with db.connect() as conn, db.connect() as ear:
        add(conn, 2, partition_key=None)
        factories.ingest(conn, queue="load")
        conn.execute(
            "INSERT INTO queue_settings (queue, paused_at, paused_until)"
            f" VALUES ('fetch', now(), {until})"
        )
        assert take(conn) == take(conn, 7) == []
        assert len(transitions.claim(conn, transitions.who("load"))) == 1
        assert states(conn, None)[:2] == [FREE, FREE]
        ear.execute(b"LISTEN ingest_job_ready")
        assert queues.resume("fetch", conn=conn)
        assert not queues.resume("fetch", conn=conn)
        (heard,) = ear.notifies(timeout=30, stop_after=1)
        assert heard.payload == "fetch"
        assert len(take(conn, 7)) == 2


def test_a_pause_ends_by_itself_and_a_worker_knows_when(db: ModuleType) -> None:
    with db.connect() as conn:
        add(conn, partition_key=None)
        queues.pause("fetch", until=timedelta(seconds=90), conn=conn)
        waits: list[float] = []
        assert take(conn, waits=waits) == []
        assert 80 < waits[0] <= 90
        conn.execute("UPDATE queue_settings SET paused_until = now() - interval '1 second'")
        assert len(take(conn)) == 1


@pytest.mark.parametrize("queue", ["cpu", "gpu"])
def test_node_queues_are_paused_too(db: ModuleType, queue: str) -> None:
    with db.connect() as conn, db.connect() as ear:
        done = factories.node(conn, queue=queue)
        job = transitions.claim_node(conn, transitions.who(queue))
        factories.node(conn, queue=queue)
        queues.pause(queue, conn=conn)
        assert transitions.complete_and_claim(conn, [job], transitions.who(queue)) == []
        assert factories.reread(conn, done)["status"] == "completed"
        ear.execute(b"LISTEN node_job_ready")
        queues.resume(queue, conn=conn)
        assert list(ear.notifies(timeout=30, stop_after=1))
        assert transitions.claim(conn, transitions.who(queue))


def test_no_more_of_a_queue_run_than_its_limit(db: ModuleType) -> None:
    with db.connect() as conn:
        add(conn, 6, partition_key=None)
        say(conn, max_running=3)
        jobs = take(conn, 2)
        assert [len(take(conn, 7)), len(take(conn))] == [1, 0]
        end(conn, jobs[0])
        assert len(take(conn, 7)) == 1
        following = take(conn, 7, done=[jobs[1]])
        assert len(following) == 1
        say(conn, max_running=None)
        assert len(take(conn, 7)) == 1


def reclaim(conn: Any, job: Row) -> object:
    factories.change(conn, job, "lapse_count = 9")
    transitions.expire(conn, job)
    return transitions.reclaim_lapsed(conn, "ingest")


LEAVING: dict[str, Callable[[Any, Row], object]] = {
    "finish": end,
    "fail": transitions.fail,
    "snooze": lambda conn, job: transitions.hand_back(conn, job, after_s=60),
    "reclaim": reclaim,
    "cancelled by SQL": factories.changing(
        "status = 'cancelled', worker_id = NULL, finished_at = now()"
    ),
}
FROM_PARTITION: dict[str, Callable[[Any, Row], object]] = LEAVING | {
    "delayed by SQL": factories.changing(
        "status = 'queued', available_at = now() + interval '1 hour'"
    ),
    "key taken off": factories.changing("partition_key = NULL"),
    "key changed": factories.changing("partition_key = 'b'"),
    "delete": lambda conn, job: conn.execute("DELETE FROM ingest_jobs WHERE id = %s", (job["id"],)),
}


@pytest.mark.parametrize("leave", LEAVING.values(), ids=LEAVING)
def test_a_job_that_leaves_a_full_queue_wakes_a_worker(
    db: ModuleType, leave: Callable[[Any, Row], object]
) -> None:
    with db.connect() as conn, db.connect() as ear:
        add(conn, 2, partition_key=None)
        say(conn, max_running=1)
        (job,) = take(conn)
        ear.execute(b"LISTEN ingest_job_ready")
        leave(conn, job)
        assert list(ear.notifies(timeout=30, stop_after=1))
        assert len(take(conn, 7)) == 1


def test_no_period_has_more_starts_of_a_queue_than_its_rate(db: ModuleType) -> None:
    with db.connect() as conn:
        add(conn, 9, partition_key=None)
        say(conn, rate="3/60s")
        waits: list[float] = []
        assert [len(take(conn)), len(take(conn, 7)), len(take(conn, 7, waits))] == [1, 2, 0]
        assert 50 < waits[-1] <= 60
        conn.execute(
            "UPDATE queue_starts SET started_at = started_at - interval '59 s' WHERE n = 1"
        )
        assert take(conn, 7, waits) == []
        assert 0 < waits[-1] <= 1
        conn.execute("UPDATE queue_starts SET started_at = started_at - interval '2 s' WHERE n = 1")
        assert len(take(conn, 7)) == 1
        age(conn, 61)
        assert len(take(conn, 7)) == 3
        assert factories.one(conn, "SELECT count(*) FROM queue_starts") == 3


def test_a_rate_counts_starts_and_not_jobs(db: ModuleType) -> None:
    with db.connect() as conn:
        add(conn, partition_key=None)
        say(conn, rate="2/60s")
        for _ in range(2):
            (job,) = take(conn)
            transitions.hand_back(conn, job)
        assert take(conn) == []


def test_claims_by_0_3_0_find_nothing_in_limited_queues(db: ModuleType) -> None:
    claim = (
        "UPDATE ingest_jobs SET status = 'running', claimed_by = 'old' WHERE id = (SELECT id"
        " FROM ingest_jobs WHERE status = 'queued' ORDER BY priority, created_at"
        " FOR UPDATE SKIP LOCKED LIMIT 1) RETURNING id"
    )
    with db.connect() as conn:
        add(conn, partition_key=None)
        for change in ("paused_at = now()", "max_running = 5", "rate_limit = 5, rate_period_s = 1"):
            conn.execute("DELETE FROM queue_settings")
            conn.execute("INSERT INTO queue_settings (queue) VALUES ('fetch')")
            conn.execute(f"UPDATE queue_settings SET {change}")
            assert conn.execute(claim).fetchall() == []
        conn.execute("DELETE FROM queue_settings")
        conn.execute("DELETE FROM ingest_jobs")
        add(conn)
        say(conn, partition_max_running=5)
        assert conn.execute(claim).fetchall() == []
        say(conn, partition_max_running=None)
        assert len(conn.execute(claim).fetchall()) == 1


# Partitions


def test_no_more_of_a_partition_are_let_in_than_its_limit(db: ModuleType) -> None:
    with db.connect() as conn:
        say(conn, partition_max_running=2)
        add(conn, 4)
        add(conn, 1, partition_key="b")
        add(conn, 1, partition_key=None)
        assert states(conn) == [FREE, FREE, LINE, LINE]
        assert states(conn, "b") + states(conn, None) == [FREE, FREE]
        jobs = take(conn, 9)
        assert len(jobs) == 4
        end(conn, jobs[0])
        assert count(conn, FREE) == 1
        assert count(conn, LINE) == 1
        assert factories.reread(conn, jobs[1])["admitted_at"] is not None


@pytest.mark.parametrize("leave", FROM_PARTITION.values(), ids=FROM_PARTITION)
def test_a_job_that_leaves_a_full_partition_admits_the_next(
    db: ModuleType, leave: Callable[[Any, Row], object]
) -> None:
    with db.connect() as conn, db.connect() as ear:
        say(conn, partition_max_running=1)
        _, second, third = add(conn, 3)
        (job,) = take(conn)
        ear.execute(b"LISTEN ingest_job_ready")
        leave(conn, job)
        assert factories.reread(conn, second)["blocked_reason"] is None
        assert factories.reread(conn, third)["blocked_reason"] == "limited"
        assert [waits_s.payload for waits_s in ear.notifies(timeout=0.2)].count("fetch") >= 1
        assert [row["id"] for row in take(conn, 9)] == [second["id"]]


def test_a_partition_has_limits_of_its_own(db: ModuleType) -> None:
    with db.connect() as conn:
        say(conn, partition_max_running=1)
        say(conn, "a", max_running=3)
        add(conn, 4)
        add(conn, 4, partition_key="b")
        assert count(conn, FREE) == 3
        assert count(conn, FREE, "b") == 1


def test_a_failed_job_waits_for_its_partition_again(db: ModuleType) -> None:
    with db.connect() as conn:
        say(conn, partition_max_running=1)
        add(conn, max_attempts=2)
        (job,) = take(conn)
        add(conn, priority=10)
        transitions.fail(conn, job, after_s=0)
        assert states(conn) == [LINE, FREE]
        assert factories.reread(conn, job)["admitted_at"] is None


def test_the_better_priority_is_let_in_instead_of_one_that_is_not_claimed(db: ModuleType) -> None:
    with db.connect() as conn:
        say(conn, partition_max_running=2)
        add(conn, 3)
        add(conn, priority=10)
        assert states(conn) == [FREE, LINE, LINE, FREE]
        assert [job["priority"] for job in take(conn, 9)] == [10, 100]


def test_a_partition_starts_no_more_in_a_period_than_its_rate(db: ModuleType) -> None:
    with db.connect() as conn:
        say(conn, partition_rate="3/60s")
        add(conn, 8)
        assert count(conn, FREE) == 3
        (job,) = take(conn)
        end(conn, job)
        assert count(conn, FREE) == 2
        waits: list[float] = []
        assert [len(take(conn, 9)), len(take(conn, 9, waits))] == [2, 0]
        assert 50 < waits[-1] <= 60
        age(conn, 61)
        assert len(take(conn, 9)) == 3
        assert count(conn, LINE) == 2


def test_a_claim_that_began_before_there_was_room_starts_nothing(db: ModuleType) -> None:
    with db.connect() as conn, db.connect() as other:
        say(conn, partition_rate="1/60s")
        add(conn, 2)
        take(conn)
        with conn.transaction():
            conn.execute("SELECT now()")
            age(other, 61)
            sweeps.admit_from_partitions(other)
            assert states(other)[1] == FREE
            assert transitions.claim(conn, transitions.who("fetch")) == []
        assert len(take(conn)) == 1


def test_the_sweep_lets_in_what_a_rate_has_room_for_again(db: ModuleType) -> None:
    with db.connect() as conn, db.connect() as ear:
        say(conn, partition_rate="1/60s")
        add(conn, 2)
        take(conn)
        sweeps.admit_from_partitions(conn)
        assert states(conn)[1] == LINE
        age(conn, 61)
        ear.execute(b"LISTEN ingest_job_ready")
        sweeps.admit_from_partitions(conn)
        assert states(conn)[1] == FREE
        assert len(list(ear.notifies(timeout=0.2))) == 1


def test_a_paused_partition_delays_no_other(db: ModuleType) -> None:
    with db.connect() as conn:
        first = add(conn, 3)
        add(conn, 1, partition_key="b")
        say(conn, "a", max_running=5)
        assert take(conn)[0]["id"] == first[0]["id"]
        queues.pause("fetch", partition="a", conn=conn)
        assert [job["partition_key"] for job in take(conn, 9)] == ["b"]
        assert count(conn, LINE) == 2
        assert factories.column(conn, "SELECT due_at = 'infinity' FROM partition_dues") == [True]
        sweeps.admit_from_partitions(conn)
        add(conn)
        assert take(conn, 9) == []
        queues.resume("fetch", partition="a", conn=conn)
        assert len(take(conn, 9)) == 3


def test_a_partitions_pause_ends_by_itself(db: ModuleType) -> None:
    with db.connect() as conn:
        queues.pause("fetch", partition="a", until=timedelta(seconds=60), conn=conn)
        add(conn)
        waits: list[float] = []
        assert take(conn, waits=waits) == []
        assert 50 < waits[-1] <= 60
        conn.execute("UPDATE queue_partitions SET paused_until = now() - interval '1 s'")
        assert len(take(conn)) == 1


def test_a_job_that_was_ready_before_the_limit_is_blocked(db: ModuleType) -> None:
    with db.connect() as conn:
        add(conn, 5)
        add(conn, 1, partition_key="b")
        (job,) = take(conn)
        say(conn, "a", max_running=2)
        assert sorted(row["partition_key"] for row in take(conn, 9)) == ["a", "b"]
        assert count(conn, LINE) == 3
        end(conn, job)
        assert count(conn, FREE) == 1


def test_an_insert_that_did_not_see_the_limit_is_limited_by_it(db: ModuleType) -> None:
    with db.connect() as conn, db.connect() as host:
        with host.transaction():
            add(host, 3)
            say(conn, "a", max_running=1)
            assert take(conn, 9) == []
        assert states(conn) == [FREE] * 3
        assert len(take(conn, 9)) == 1
        assert take(conn, 9) == []
        assert states(conn)[1:] == [LINE, LINE]


def test_a_lower_limit_takes_back_who_is_let_in_and_a_higher_one_lets_in(db: ModuleType) -> None:
    with db.connect() as conn:
        say(conn, partition_max_running=4)
        add(conn, 6)
        take(conn)
        say(conn, partition_max_running=2)
        assert len(take(conn, 9)) == 1
        assert take(conn, 9) == []
        assert count(conn, LINE) == 4
        say(conn, partition_max_running=5)
        assert len(take(conn, 9)) == 3


def test_only_the_admission_admits_a_job(db: ModuleType) -> None:
    """A plain UPDATE may write what the admission writes, also beside a change that is checked."""
    with db.connect() as conn:
        say(conn, partition_max_running=1)
        first, second = add(conn, 2)
        for text in (
            "blocked_reason = NULL, admitted_at = now()",
            "admitted_at = now()",
            "blocked_reason = NULL",
            "admitted_at = now(), blocked_reason = 'limited'",
        ):
            factories.change(conn, second, text)
            assert states(conn) == [FREE, LINE], text
            with conn.transaction():
                factories.change(conn, first, "blocked_reason = 'limited'")
                factories.change(conn, second, text)
                assert states(conn) == [LINE, LINE], text
            assert states(conn) == [FREE, LINE], text
        add(conn, admitted_at="2020-01-01", blocked_reason=None)
        assert states(conn) == [FREE, LINE, LINE]
        assert factories.reread(conn, second)["admitted_at"] is None
        end(conn, *take(conn))
        assert count(conn, FREE) == 1


def test_an_unknown_reason_admits_nobody(db: ModuleType) -> None:
    with db.connect() as conn:
        say(conn, partition_max_running=1)
        _, second = add(conn, 2)
        for text in ("admitted", "let_in"):
            factories.change(conn, second, f"blocked_reason = '{text}'")
            assert states(conn)[1] == ("queued", text)
            assert factories.reread(conn, second)["admitted_at"] is None


def test_without_limits_all_waiting_jobs_are_admitted(db: ModuleType) -> None:
    with db.connect() as conn:
        say(conn, partition_max_running=1)
        conn.execute(
            "INSERT INTO ingest_jobs (task_name, queue, partition_key)"
            " SELECT 't', 'fetch', 'a' FROM generate_series(1, 700)"
        )
        assert count(conn, LINE) == 699
        say(conn, partition_max_running=None)
        taken = 0
        while rows := take(conn, 100):
            taken += len(rows)
        assert taken == 700


def test_a_lock_key_comes_after_the_partition(db: ModuleType) -> None:
    with db.connect() as conn:
        say(conn, partition_max_running=2)
        add(conn, 3, lock_key="k")
        assert states(conn) == [FREE, ("queued", "locked"), LINE]
        add(conn, 1, partition_key="b", lock_key="k")
        assert states(conn, "b") == [("queued", "locked")]
        order: list[int] = []
        while rows := take(conn, 9):
            assert len(rows) == 1
            order.append(rows[0]["seq"])
            end(conn, *rows)
        assert len(order) == 4
        assert order[:2] == sorted(order)[:2]


def test_a_limit_set_later_and_a_lock_key_leave_nobody_behind(db: ModuleType) -> None:
    with db.connect() as conn:
        add(conn, 3, lock_key="k")
        add(conn, 3, lock_key="l", partition_key="b")
        say(conn, partition_max_running=1)
        taken = 0
        while rows := take(conn, 9):
            taken += len(rows)
            end(conn, *rows)
        assert taken == 6


def test_a_job_that_is_not_due_is_not_let_in(db: ModuleType) -> None:
    with db.connect() as conn:
        say(conn, partition_max_running=1)
        factories.ingest(conn, partition_key="a")
        (late,) = add(conn)
        factories.change(conn, late, "available_at = now() + interval '1 hour'")
        assert states(conn) == [FREE, ("queued", "not_due")]
        end(conn, *take(conn))
        assert take(conn) == []
        factories.change(conn, late, "available_at = NULL, blocked_reason = NULL")
        assert states(conn)[1] == FREE
        factories.change(conn, late, "available_at = now() + interval '1 hour'")
        assert states(conn)[1] == ("queued", "not_due")
        factories.change(conn, late, "available_at = NULL")
        assert len(take(conn)) == 1


def test_a_partition_whose_first_job_was_locked_is_repaired(db: ModuleType) -> None:
    with db.connect() as conn, db.connect() as other:
        say(conn, partition_max_running=1)
        _, second = add(conn, 2)
        (job,) = take(conn)
        with other.transaction():
            other.execute("SELECT FROM ingest_jobs WHERE id = %s FOR UPDATE", (second["id"],))
            end(conn, job)
        assert states(conn)[1] == LINE
        assert sweeps.admit_from_partitions(conn) == 1
        assert states(conn)[1] == FREE
        assert sweeps.admit_from_partitions(conn) == 0


@pytest.mark.parametrize("rate", [None, "5/d"])
def test_a_job_that_was_locked_takes_a_free_place_beside_one_that_runs(
    db: ModuleType, rate: str | None
) -> None:
    with db.connect() as conn, db.connect() as other:
        say(conn, partition_max_running=2, partition_rate=rate)
        *_, last = add(conn, 3)
        done, runs = take(conn, 2)
        with other.transaction():
            other.execute("SELECT FROM ingest_jobs WHERE id = %s FOR UPDATE", (last["id"],))
            end(conn, done)
        assert states(conn)[2] == LINE
        age(conn, 2)
        assert [job["id"] for job in take(conn, 2)] == [last["id"]]
        end(conn, runs)


def test_a_rolled_back_end_admits_no_job(db: ModuleType) -> None:
    with db.connect() as conn:
        say(conn, partition_max_running=1)
        add(conn, 2)
        (job,) = take(conn)
        with conn.transaction(force_rollback=True):
            end(conn, job)
        assert states(conn) == [("running", None), LINE]


def test_an_older_snapshot_leaves_its_job_to_the_next_claim(db: ModuleType) -> None:
    with db.connect() as conn, db.connect(autocommit=False, limited=False) as old:
        say(conn, partition_max_running=1)
        old.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        old.execute("SELECT FROM ingest_jobs")
        add(conn)
        add(old)
        old.commit()
        assert states(conn) == [FREE, LINE]
        (job,) = take(conn, 9)
        assert take(conn, 9) == []
        end(conn, job)
        assert len(take(conn, 9)) == 1


# Limits of queues that are long already


def long_queue(conn: Any, *keys: str | None, number: int = 1500) -> None:
    """That many free jobs of each key, the keys one after the other."""
    conn.execute("SET session_replication_role = replica")
    for key in keys:
        conn.execute(
            "INSERT INTO ingest_jobs (task_name, queue, partition_key)"
            " SELECT 't', 'fetch', %s FROM generate_series(1, %s)",
            (key, number),
        )
    conn.execute("SET session_replication_role = origin")


def test_a_limit_on_a_long_queue_delays_no_claim(db: ModuleType) -> None:
    with db.connect() as conn:
        long_queue(conn, "a", "b")
        add(conn, 1, partition_key=None)
        say(conn, "a", max_running=1)
        got: list[Row] = []
        for calls in range(1, 4):
            got += transitions.claim(conn, transitions.who("fetch"))
            assert count(conn, FREE) >= 1500 - 500 * calls, "a few rows a claim"
        assert [job["partition_key"] for job in got] == ["b", "a"]
        assert got[1]["seq"] == factories.one(
            conn, "SELECT min(seq) FROM ingest_jobs WHERE partition_key = 'a'"
        )


def test_a_limit_on_a_long_queue_keeps_the_order_of_its_partitions(db: ModuleType) -> None:
    with db.connect() as conn:
        long_queue(conn, "a", "b", number=700)
        conn.execute("UPDATE ingest_jobs SET priority = 7 WHERE seq % 3 = 0")
        say(conn, partition_max_running=1)
        places: dict[str, list[tuple[int, int]]] = {"a": [], "b": []}
        for _ in range(60):
            for job in take(conn, 3):
                places[job["partition_key"]].append((job["priority"], job["seq"]))
                end(conn, job)
        for found in places.values():
            assert found == sorted(found)
            assert len(found) >= 20


def test_a_pause_of_a_partition_lets_those_behind_it_pass(db: ModuleType) -> None:
    with db.connect() as conn:
        long_queue(conn, "a", number=2500)
        behind = add(conn, 2, partition_key="b")
        queues.pause("fetch", partition="a", conn=conn)
        got = [
            job["id"] for _ in range(3) for job in transitions.claim(conn, transitions.who("fetch"))
        ]
        assert got == [job["id"] for job in behind]
        assert count(conn, FREE) >= 1000


def test_more_limited_partitions_than_one_claim_checks_delay_no_job(db: ModuleType) -> None:
    with db.connect() as conn:
        long_queue(conn, *(f"p{i:03}" for i in range(250)), number=2)
        say(conn, partition_max_running=1)
        got = [job for _ in range(4) for job in transitions.claim(conn, transitions.who("fetch"))]
        assert len(got) >= 2


def test_the_sweep_blocks_jobs_that_no_claim_reaches(db: ModuleType) -> None:
    with db.connect() as conn:
        long_queue(conn, "b", "a", number=1200)
        say(conn, "a", max_running=1)
        for left in (200, 0):
            sweeps.admit_from_partitions(conn)
            free = "SELECT count(*) FROM ingest_jobs WHERE partition_key = 'a'"
            assert (
                factories.one(conn, free + " AND blocked_reason IS NULL AND admitted_at IS NULL")
                == left
            )
        assert count(conn, FREE, "b") == 1200
        assert len(take(conn)) == 1
