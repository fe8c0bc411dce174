"""A lock key lets one job run at a time, oldest first; the database guarantees it."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any

import psycopg
import pytest
from psycopg import sql

from queue_workflows import db, node_pool, queues
from tests.support import app_triggers, database, factories, invariants, sweeps, transitions
from tests.support.wait import patience, until

Row = dict[str, Any]
FAMILIES = {"node": (factories.node, "cpu"), "ingest": (factories.ingest, "fetch")}


@pytest.fixture(autouse=True)
def lawful(db: ModuleType) -> Iterator[None]:
    yield
    with db.connect() as conn:
        assert invariants.broken(conn, slack_s=5) == []
        assert factories.one(conn, "SELECT count(*) FROM lock_turns") == 0


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return request.param


def add(conn: Any, family: str, **columns: Any) -> Row:
    return FAMILIES[family][0](conn, **{"lock_key": "k"} | columns)


def take(conn: Any, family: str) -> Row | None:
    return next(iter(transitions.claim(conn, transitions.who(FAMILIES[family][1]))), None)


def states(conn: Any, family: str) -> list[tuple[str, str | None]]:
    table = sql.Identifier("workflow_node_jobs" if family == "node" else "ingest_jobs")
    query = sql.SQL("SELECT status, blocked_reason FROM {} ORDER BY seq").format(table)
    return [(row["status"], row["blocked_reason"]) for row in conn.execute(query).fetchall()]


IN, OUT = ("queued", None), ("queued", "locked")


def test_one_of_a_key_is_let_in_and_the_others_wait(db: ModuleType, family: str) -> None:
    with db.connect() as conn:
        first, _, _ = [add(conn, family) for _ in range(3)]
        assert states(conn, family) == [IN, OUT, OUT]
        job = take(conn, family)
        assert job is not None
        assert job["id"] == first["id"]
        assert take(conn, family) is None
        assert factories.reread(conn, job)["attempts"] == 0
        transitions.complete(conn, job)
        assert states(conn, family) == [("completed", None), IN, OUT]


def test_other_keys_and_jobs_without_one_go_on(db: ModuleType, family: str) -> None:
    with db.connect() as conn:
        for key in ("k", "k", "other", None):
            add(conn, family, lock_key=key)
        assert states(conn, family) == [IN, OUT, IN, IN]


def test_a_key_that_is_taken_holds_up_no_other_key_of_its_commit(
    db: ModuleType, family: str
) -> None:
    with db.connect() as conn:
        add(conn, family)
        assert take(conn, family) is not None
        with conn.transaction():
            add(conn, family)
            add(conn, family, lock_key="other")
        assert states(conn, family) == [("running", None), OUT, IN]


def test_a_key_is_its_familys_own(db: ModuleType) -> None:
    with db.connect() as conn:
        add(conn, "node")
        add(conn, "ingest")
        assert states(conn, "node") + states(conn, "ingest") == [IN, IN]


def test_the_better_priority_comes_first_until_one_is_claimed(db: ModuleType, family: str) -> None:
    with db.connect() as conn:
        add(conn, family)
        add(conn, family, priority=10)
        assert states(conn, family) == [OUT, IN]
        assert take(conn, family) is not None
        add(conn, family, priority=1)
        assert states(conn, family) == [OUT, ("running", None), OUT]


def test_rows_of_one_statement_are_let_in_by_age(db: ModuleType) -> None:
    with db.connect() as conn:
        conn.execute(
            "INSERT INTO ingest_jobs (task_name, queue, lock_key)"
            " SELECT 't', 'fetch', 'k' || i % 3 FROM generate_series(0, 299) i"
        )
        first = states(conn, "ingest")
        assert (first[:3], set(first[3:])) == ([IN] * 3, {OUT})


def table_of(job: Row) -> sql.Identifier:
    return sql.Identifier(transitions.TABLES[transitions.kind_of(job)])


def delete(conn: Any, job: Row) -> object:
    return conn.execute(sql.SQL("DELETE FROM {} WHERE id = %s").format(table_of(job)), (job["id"],))


def reclaim(conn: Any, job: Row) -> object:
    factories.change(conn, job, "lapse_count = 9")
    transitions.expire(conn, job)
    return transitions.reclaim_lapsed(conn, transitions.kind_of(job))


LEAVING = {
    "finish": transitions.complete,
    "fail": transitions.fail,
    "snooze": lambda conn, job: transitions.hand_back(conn, job, after_s=60),
    "reclaim": reclaim,
    "cancelled by SQL": factories.changing(
        "status = 'cancelled', worker_id = NULL, finished_at = now()"
    ),
    "delayed by SQL": factories.changing(
        "status = 'queued', available_at = now() + interval '1 hour'"
    ),
    "key taken off": factories.changing("lock_key = NULL"),
    "delete": delete,
}


@pytest.mark.parametrize("leave", LEAVING.values(), ids=LEAVING)
def test_a_job_that_ends_admits_the_next_and_wakes_a_worker(
    db: ModuleType, family: str, leave: Callable[[Any, Row], object]
) -> None:
    with db.connect() as conn, db.connect() as ear:
        add(conn, family)
        second = add(conn, family, **({"node_id": "m"} if family == "node" else {}))
        job = take(conn, family)
        assert job is not None
        ear.execute(b"LISTEN node_job_ready; LISTEN ingest_job_ready")
        leave(conn, job)
        assert factories.reread(conn, second)["blocked_reason"] is None
        assert list(ear.notifies(timeout=30, stop_after=1))
        following = take(conn, family)
        assert following is not None
        assert following["id"] == second["id"]
        assert second["attempts"] == following["attempts"] == 0
        transitions.complete(conn, following)


def test_a_job_that_goes_back_keeps_its_place(db: ModuleType, family: str) -> None:
    with db.connect() as conn:
        add(conn, family)
        job = take(conn, family)
        assert job is not None
        add(conn, family)
        transitions.hand_back(conn, job)
        assert states(conn, family) == [IN, OUT]


def test_a_cancelled_run_cancels_its_waiters(db: ModuleType) -> None:
    with db.connect() as conn:
        run_id = factories.run(conn)
        for number in range(4):
            factories.node(conn, run_id, f"n{number}", lock_key="k")
        outside = factories.node(conn, lock_key="k")
        conn.execute(
            "UPDATE workflow_runs SET status = 'cancelled', finished_at = now() WHERE id = %s",
            (run_id,),
        )
        assert states(conn, "node") == [("cancelled", None)] * 4 + [IN]
        assert transitions.claim_node(conn)["id"] == outside["id"]


def test_a_rolled_back_end_admits_no_job(db: ModuleType, family: str) -> None:
    with db.connect() as conn:
        for _ in range(2):
            add(conn, family)
        job = take(conn, family)
        assert job is not None
        with conn.transaction(force_rollback=True):
            transitions.complete(conn, job)
        assert states(conn, family) == [("running", None), OUT]


def test_a_due_job_waits_for_its_key_too(db: ModuleType, family: str) -> None:
    with db.connect() as conn:
        late = add(conn, family)
        factories.change(conn, late, "available_at = now() + interval '1 hour'")
        add(conn, family)
        factories.change(conn, late, "available_at = NULL, blocked_reason = NULL")
        assert states(conn, family) == [IN, OUT]


def test_a_waiter_that_is_put_off_lets_the_next_one_in(db: ModuleType, family: str) -> None:
    with db.connect() as conn:
        _, late, _ = [add(conn, family) for _ in range(3)]
        factories.change(conn, late, "available_at = now() + interval '1 hour'")
        job = take(conn, family)
        assert job is not None
        transitions.complete(conn, job)
        assert states(conn, family)[1:] == [("queued", "not_due"), IN]


def test_only_the_admission_gives_the_key(db: ModuleType, family: str) -> None:
    """A plain UPDATE may write what the admission writes, also beside a change that is checked."""
    with db.connect() as conn:
        first, second, third = [add(conn, family) for _ in range(3)]
        factories.change(conn, second, "blocked_reason = NULL")
        assert states(conn, family) == [IN, OUT, OUT]
        with conn.transaction():
            factories.change(conn, first, "available_at = now() + interval '1 hour'")
            factories.change(conn, third, "blocked_reason = NULL")
            assert states(conn, family) == [("queued", "not_due"), OUT, OUT]
        assert states(conn, family) == [("queued", "not_due"), IN, OUT]
        factories.change(conn, second, "blocked_reason = 'locked'")
        assert states(conn, family) == [("queued", "not_due"), IN, OUT]
        factories.change(conn, third, "blocked_reason = 'let_in'")
        assert states(conn, family) == [("queued", "not_due"), IN, ("queued", "let_in")]


def test_the_database_refuses_a_second_one_running(db: ModuleType, family: str) -> None:
    with db.connect() as conn:
        add(conn, family)
        second = add(conn, family)
        assert take(conn, family) is not None
        with pytest.raises(psycopg.errors.UniqueViolation):
            factories.change(
                conn,
                second,
                "status = 'running', claim_no = claim_no + 1, worker_id = 'w',"
                " lease_expires_at = now(), blocked_reason = NULL",
            )


def test_an_admission_missed_while_the_first_waiter_was_locked_is_repaired(db: ModuleType) -> None:
    with db.connect() as conn, db.connect() as other:
        add(conn, "ingest")
        second = add(conn, "ingest")
        job = transitions.claim_ingest(conn)
        with other.transaction():
            other.execute("SELECT FROM ingest_jobs WHERE id = %s FOR UPDATE", (second["id"],))
            transitions.complete(conn, job)
        assert states(conn, "ingest") == [("completed", None), OUT]
        assert sweeps.admit_missed_waiters(conn) == 1
        assert states(conn, "ingest") == [("completed", None), IN]
        assert sweeps.admit_missed_waiters(conn) == 0


def test_the_sweep_takes_the_families_locks_as_commits_do(db: ModuleType) -> None:
    lock = "SELECT queue_workflows_take_locks('ingest_jobs', ARRAY['k'])"
    with db.connect() as conn, db.connect() as other:
        for family, table in (("node", "workflow_node_jobs"), ("ingest", "ingest_jobs")):
            add(conn, family)
            second = add(conn, family)
            job = take(conn, family)
            assert job is not None
            held = sql.SQL("SELECT FROM {} WHERE id = %s FOR UPDATE").format(sql.Identifier(table))
            with other.transaction():
                other.execute(held, (second["id"],))
                transitions.complete(conn, job)
        with other.transaction():
            other.execute(lock.encode())
            sweeps.admit_missed_waiters(conn)
            assert states(conn, "node") == [("completed", None), IN]
            assert states(conn, "ingest") == [("completed", None), OUT]
        assert sweeps.admit_missed_waiters(conn) == 1
        assert states(conn, "ingest") == [("completed", None), IN]


@pytest.mark.parametrize("column", ["lock_key", "partition_key"])
def test_a_transaction_that_checks_its_constraints_at_once_delays_no_other_commit(
    db: ModuleType, column: str
) -> None:
    """It keeps all 256 advisory locks, which a commit takes for milliseconds."""
    for queue in ("fetch", "load"):
        queues.limit(queue, partition_max_running=1)
    with db.connect() as conn, db.connect(timeout_s=60) as submitter:
        first, second = (factories.ingest(conn, **{column: "a"})["id"] for _ in range(2))
        with submitter.transaction():
            submitter.execute("SET CONSTRAINTS ALL IMMEDIATE")
            submitter.execute(
                f"INSERT INTO ingest_jobs (task_name, queue, {column})"
                " SELECT 't', 'load', i::text FROM generate_series(1, 1600) i".encode()
            )
            began = time.monotonic()
            job = transitions.claim_ingest(conn)
            transitions.complete(conn, job)
            factories.ingest(conn, **{column: "b"})
            assert time.monotonic() - began < patience(4.5)
            assert (job["id"], factories.reread(conn, job)["status"]) == (first, "completed")

        def swept() -> Row | None:
            sweeps.admit_missed_waiters(conn)
            sweeps.admit_from_partitions(conn)
            return take(conn, "ingest")

        following = until(swept)  # a partition that was left is due a second later
        assert following is not None and following["id"] == second


LOCKED = (
    "INSERT INTO ingest_jobs (task_name, queue, lock_key, blocked_reason)"
    " SELECT 't', 'load', i::text, 'locked' FROM generate_series(1, 500) i"
)


def test_many_keys_are_mended_with_a_few_rows_each_after_an_analyze_that_saw_no_job(
    own_database: database.Database,
) -> None:
    """Autovacuum counts no rows of a transaction that is open, and many pages."""
    name = own_database.fresh_name()
    dsn = own_database.create_migrated(name)
    with (
        database.environment(QUEUE_WORKFLOWS_DB_URL=dsn),
        db.connect(limited=False) as conn,
        db.connect(limited=False) as submitter,
    ):
        factories.ingest(conn)  # of a table without rows nothing is known at all
        with submitter.transaction():
            submitter.execute("SET LOCAL session_replication_role = replica")
            submitter.execute(LOCKED)
            conn.execute("ANALYZE ingest_jobs")
        with conn.transaction():
            before = factories.one(conn, READ)
            mended = factories.one(conn, "SELECT queue_workflows_mend_turns('ingest_jobs')")
            read = factories.one(conn, READ) - before
    own_database.drop(name)
    assert mended == 500
    assert read < 5 * 500


READ = (
    "SELECT coalesce(idx_tup_fetch, 0) + seq_tup_read FROM pg_stat_xact_user_tables"
    " WHERE relname = 'ingest_jobs'"
)


@contextmanager
def locks_kept(family: str) -> Generator[None]:
    """All advisory locks of `ingest_jobs` or `partitions` are held by an open transaction."""
    with db.connect() as other, other.transaction():
        other.execute(
            "SELECT queue_workflows_take_locks(%s, array_agg(i::text))"
            " FROM generate_series(1, 4000) i",
            (family,),
        )
        yield


def test_a_commit_waits_for_the_lock_of_its_key(db: ModuleType) -> None:
    """Many commits of one key queue for its lock, honestly, for longer than one of them takes."""
    with db.connect() as conn:
        first, second = (factories.ingest(conn, lock_key="k")["id"] for _ in range(2))
        job = transitions.claim_ingest(conn)
        with locks_kept("ingest_jobs"):
            done = threading.Thread(target=transitions.complete, args=(conn, job))
            done.start()
            threading.Event().wait(0.5)  # the time that the lock is kept
        done.join()
        assert transitions.claim_ingest(conn)["id"] == second != first


def test_a_key_that_was_left_comes_soon_after_its_lock_is_free(
    db: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUEUE_WORKFLOWS_LEASE_RECLAIM_INTERVAL_S", "3600")
    monkeypatch.setenv("QUEUE_WORKFLOWS_CLAIM_POLL_S", "3600")
    pool = node_pool.NodePool()
    with db.connect() as conn:
        second = [factories.ingest(conn, lock_key="k")["id"] for _ in range(2)][1]
        job = transitions.claim_ingest(conn)
        pool.start()
        try:
            listening = "SELECT 1 FROM pg_stat_activity WHERE query LIKE 'LISTEN%%'"
            until(lambda: factories.column(conn, listening))
            with locks_kept("ingest_jobs"):
                transitions.complete(conn, job)
            until(lambda: states(conn, "ingest")[1] == IN)
        finally:
            pool.stop()
        assert transitions.claim_ingest(conn)["id"] == second


def test_a_partition_that_was_left_counts_its_starts(db: ModuleType) -> None:
    queues.limit("fetch", partition_rate="1/1h")
    with db.connect() as conn:
        for _ in range(3):
            factories.ingest(conn, partition_key="a")
        with locks_kept("partitions"):
            job = transitions.claim_ingest(conn)
            transitions.complete(conn, job)
        conn.execute("UPDATE partition_dues SET due_at = now()")
        sweeps.admit_from_partitions(conn)
        assert transitions.claim(conn, transitions.who("fetch"), count=3) == []
        starts = "SELECT n FROM partition_starts"
        assert factories.column(conn, starts) == [1]


def test_an_app_that_keeps_its_insert_open_delays_nobody(db: ModuleType) -> None:
    with db.connect() as conn, db.connect() as host:
        add(conn, "ingest")
        job = transitions.claim_ingest(conn)
        with host.transaction():
            add(host, "ingest")
            conn.execute("SET lock_timeout = '2s'")
            transitions.complete(conn, job)
        assert states(conn, "ingest") == [("completed", None), IN]


INSERTS, CLAIMERS = 50, 4


def test_fifty_inserts_and_claims_at_once_run_one_by_one_in_order(db: ModuleType) -> None:
    errors: list[BaseException] = []
    running: list[int] = []
    ran: list[int] = []
    guard = threading.Lock()

    def insert(number: int) -> None:
        with db.connect() as conn:
            for _ in range(5):
                add(conn, "ingest", lock_key=f"k{number % 2}", priority=random.choice((10, 100)))

    def work() -> None:
        idle = 0
        with db.connect() as conn:
            while idle < 200 and len(ran) < INSERTS:
                job = take(conn, "ingest")
                if job is None:
                    idle += 1
                    threading.Event().wait(0.01)
                    continue
                idle = 0
                with guard:
                    running.append(job["lock_key"])
                    assert len(running) == len(set(running)), "two of a key at once"
                waiting = factories.column(
                    conn,
                    "SELECT seq FROM ingest_jobs WHERE lock_key = %s AND status = 'queued'"
                    " AND blocked_reason IS NULL",
                    job["lock_key"],
                )
                assert waiting == []
                with guard:
                    running.remove(job["lock_key"])
                    ran.append(job["seq"])
                transitions.complete(conn, job)

    def guarded(body: Callable[..., None], *values: Any) -> None:
        try:
            body(*values)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(insert, n)) for n in range(INSERTS // 5)]
    threads += [threading.Thread(target=guarded, args=(work,)) for _ in range(CLAIMERS)]
    with ExitStack() as stack:
        for thread in threads:
            thread.start()
            stack.callback(thread.join)
    assert errors == []
    assert len(ran) == INSERTS


def test_a_lock_queue_is_served_by_priority_and_age(db: ModuleType, family: str) -> None:
    drawn = random.Random(7)
    with db.connect() as conn:
        add(conn, family, priority=0)
        blocker = take(conn, family)
        assert blocker is not None
        rows = [add(conn, family, priority=drawn.choice((5, 10, 100))) for _ in range(12)]
        transitions.complete(conn, blocker)
        served: list[str] = []
        while (job := take(conn, family)) is not None:
            served.append(job["id"])
            transitions.complete(conn, job)
    line = sorted(rows, key=lambda row: (row["priority"], row["seq"]))
    assert served == [row["id"] for row in line]


@contextmanager
def as_sender(conn: Any, rights: str = "INSERT, SELECT") -> Generator[None]:
    """The statements of `conn` are those of a role that has these rights on ingest_jobs."""
    # Roles belong to the server, which other test processes may share; the database is our own.
    role = f"{conn.info.dbname}_sender"
    conn.execute(f"CREATE ROLE {role}")
    try:
        conn.execute(
            f"GRANT {rights} ON ingest_jobs TO {role};"
            f" GRANT USAGE ON ingest_jobs_seq_seq TO {role};"
            f" SET SESSION AUTHORIZATION {role}"
        )
        yield
    finally:
        conn.execute(f"RESET SESSION AUTHORIZATION; DROP OWNED BY {role}")
        conn.execute(f"DROP ROLE {role}")


def test_a_role_that_may_only_insert_may_give_a_key(db: ModuleType) -> None:
    with db.connect() as conn:
        with as_sender(conn):
            for _ in range(2):
                add(conn, "ingest")
        assert states(conn, "ingest") == [IN, OUT]


def test_a_role_that_may_delete_jobs_needs_no_right_to_what_hangs_on_them(db: ModuleType) -> None:
    with db.connect() as conn:
        job = add(conn, "ingest")
        conn.execute(
            "INSERT INTO job_attempt_logs (job_table, job_id, claim_no)"
            " VALUES ('ingest_jobs', %s, 1)",
            (job["id"],),
        )
        with as_sender(conn, "SELECT, DELETE"):
            conn.execute("DELETE FROM ingest_jobs")
        assert not states(conn, "ingest")
        assert factories.one(conn, "SELECT count(*) FROM job_attempt_logs") == 0


EVIL = """
CREATE TABLE pg_temp.said (as_role name);
GRANT ALL ON pg_temp.said TO PUBLIC;
CREATE FUNCTION pg_temp.evil() RETURNS trigger LANGUAGE plpgsql AS
    $$ BEGIN INSERT INTO said VALUES (current_user); RETURN NEW; END $$;
CREATE TABLE pg_temp.lock_turns (xid xid8 DEFAULT pg_current_xact_id(), jobs text, lock_key text);
CREATE TABLE pg_temp.ingest_jobs (id text, lock_key text, status text, blocked_reason text,
                                  priority integer, seq integer);
CREATE TABLE pg_temp.job_attempt_logs (job_table text, job_id text, claim_no bigint);
GRANT ALL ON pg_temp.lock_turns, pg_temp.ingest_jobs, pg_temp.job_attempt_logs TO PUBLIC;
INSERT INTO pg_temp.ingest_jobs VALUES ('a', 'k', 'queued', 'locked', 1, 1);
CREATE TRIGGER t BEFORE INSERT ON pg_temp.lock_turns FOR EACH ROW EXECUTE FUNCTION pg_temp.evil();
CREATE TRIGGER t BEFORE UPDATE ON pg_temp.ingest_jobs
    FOR EACH ROW EXECUTE FUNCTION pg_temp.evil();
CREATE TRIGGER t BEFORE DELETE ON pg_temp.job_attempt_logs
    FOR EACH STATEMENT EXECUTE FUNCTION pg_temp.evil();
"""
"""Tables and triggers that a session puts in the way of functions that run as their owner."""


def test_no_session_gets_its_own_code_run_as_the_owner_of_the_schema(db: ModuleType) -> None:
    with db.connect() as conn:
        with as_sender(conn, "INSERT, SELECT, DELETE"):
            conn.execute(EVIL)
            conn.execute(
                "INSERT INTO public.ingest_jobs (task_name, queue, lock_key)"
                " VALUES ('t', 'fetch', 'k'), ('t', 'fetch', 'k')"
            )
            conn.execute("DELETE FROM public.ingest_jobs")
            conn.execute(
                "CREATE TABLE pg_temp.theirs (LIKE pg_temp.ingest_jobs);"
                " INSERT INTO pg_temp.theirs TABLE pg_temp.ingest_jobs;"
                " GRANT ALL ON pg_temp.theirs TO PUBLIC;"
                " CREATE TRIGGER t BEFORE UPDATE ON pg_temp.theirs"
                " FOR EACH ROW EXECUTE FUNCTION pg_temp.evil()"
            )
            for jobs in ("ingest_jobs", "theirs"):
                with pytest.raises(psycopg.errors.InsufficientPrivilege):
                    conn.execute(f"SELECT public.queue_workflows_ask_turn('{jobs}', 'k')".encode())
            said = factories.column(conn, "SELECT as_role FROM pg_temp.said")
            for function in ("take_turns", "jobs_gone"):
                with pytest.raises(psycopg.errors.InsufficientPrivilege):
                    conn.execute(
                        "CREATE TRIGGER mine BEFORE INSERT ON pg_temp.theirs FOR EACH STATEMENT"
                        f" EXECUTE FUNCTION public.queue_workflows_{function}()"
                    )
        assert said == []


def test_a_snapshot_older_than_the_admitted_job_waits(db: ModuleType) -> None:
    with db.connect() as conn, db.connect(autocommit=False, limited=False) as old:
        old.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        old.execute("SELECT FROM ingest_jobs")
        add(conn, "ingest")
        add(old, "ingest")
        old.commit()
        assert states(conn, "ingest") == [IN, OUT]


def test_a_claim_that_knows_no_keys_finds_nothing_where_one_is_taken(db: ModuleType) -> None:
    claim = (
        "UPDATE ingest_jobs SET status = 'running', claimed_by = 'old' WHERE id = (SELECT id"
        " FROM ingest_jobs WHERE status = 'queued' ORDER BY priority, created_at"
        " FOR UPDATE SKIP LOCKED LIMIT 1) RETURNING id"
    )
    with db.connect() as conn:
        for _ in range(2):
            add(conn, "ingest")
        assert len(conn.execute(claim).fetchall()) == 1
        assert conn.execute(claim).fetchall() == []
        assert sorted(states(conn, "ingest")) == sorted([("running", None), OUT])


STALE_S = 30.0
OTHER = {"node": "gpu", "ingest": "ghost"}
PASSED = ("queued", "unserved")


def served_by(conn: Any, queue: str, state: str = "idle", age_s: float = 0) -> None:
    """A worker of this queue that was seen so long ago, instead of any other of it."""
    conn.execute("DELETE FROM workers WHERE queue = %s", (queue,))
    conn.execute(
        "INSERT INTO workers (worker_id, host_label, queue, pid, state, last_seen)"
        " VALUES (%s, 'box', %s, 1, %s, now() - %s * interval '1 second')",
        (f"of {queue}", queue, state, age_s),
    )


def sweep(conn: Any) -> tuple[int, int]:
    """One sweep: how many stand in line again, how many gave up their turn."""
    return sweeps.unserved(conn, STALE_S)


@pytest.fixture
def passed(db: ModuleType, family: str) -> Iterator[tuple[Any, Row, Row]]:
    """A job in an unserved queue that gave up its turn, and the one that got it instead."""
    with db.connect() as conn:
        served_by(conn, FAMILIES[family][1])
        ghost = add(conn, family, queue=OTHER[family])
        normal = add(conn, family)
        assert states(conn, family) == [IN, OUT]
        assert take(conn, family) is None
        assert sweep(conn) == (0, 1)
        yield conn, ghost, normal


def test_a_job_that_nobody_serves_keeps_its_key_from_nobody(
    passed: tuple[Any, Row, Row], family: str
) -> None:
    conn, _, normal = passed
    assert states(conn, family) == [PASSED, IN]
    job = take(conn, family)
    assert job is not None
    assert job["id"] == normal["id"]
    transitions.complete(conn, job)
    assert states(conn, family) == [PASSED, ("completed", None)]
    add(conn, family)
    assert states(conn, family) == [PASSED, ("completed", None), IN]
    assert sweep(conn) == (0, 0)


def test_it_waits_for_its_key_again_one_sweep_after_a_worker_came(
    passed: tuple[Any, Row, Row], family: str
) -> None:
    conn, ghost, _ = passed
    assert sweep(conn) == (0, 0)
    served_by(conn, OTHER[family])
    assert sweep(conn) == (1, 0)
    assert states(conn, family) == [IN, OUT], "it is the older one"
    assert factories.reread(conn, ghost)["attempts"] == 0
    assert sweep(conn) == (0, 0)


def test_it_waits_for_the_one_that_runs(passed: tuple[Any, Row, Row], family: str) -> None:
    conn, _, _ = passed
    job = take(conn, family)
    assert job is not None
    served_by(conn, OTHER[family])
    assert sweep(conn) == (1, 0)
    assert states(conn, family) == [OUT, ("running", None)]
    transitions.complete(conn, job)
    assert states(conn, family) == [IN, ("completed", None)]


NOT_SERVED = {
    "nobody": lambda conn, queue: None,
    "stopped": lambda conn, queue: served_by(conn, queue, "stopped"),
    "dead": lambda conn, queue: served_by(conn, queue, "dead"),
    "parked": lambda conn, queue: served_by(conn, queue, "parked"),
    "paused": lambda conn, queue: served_by(conn, queue, "paused"),
    "draining": lambda conn, queue: served_by(conn, queue, "draining"),
    "stale": lambda conn, queue: served_by(conn, queue, age_s=STALE_S + 1),
}
SERVED = {
    "idle": lambda conn, queue: served_by(conn, queue),
    "busy": lambda conn, queue: served_by(conn, queue, "busy", STALE_S - 10),
    "throttled": lambda conn, queue: served_by(conn, queue, "throttled"),
    "0.3.0": lambda conn, queue: beats(conn, queue),
}


def beats(conn: Any, queue: str, age_s: float = 0) -> None:
    """The heartbeat of a worker of 0.3.0, which has no row in `workers`."""
    conn.execute(
        "INSERT INTO worker_heartbeats (host_label, queue, last_seen)"
        " VALUES ('old', %s, now() - %s * interval '1 second')",
        (queue, age_s),
    )


@pytest.mark.parametrize("state", [*NOT_SERVED, *SERVED])
def test_only_a_worker_that_takes_jobs_serves_a_queue(
    db: ModuleType, family: str, state: str
) -> None:
    with db.connect() as conn:
        served_by(conn, FAMILIES[family][1])
        (NOT_SERVED | SERVED)[state](conn, OTHER[family])
        add(conn, family, queue=OTHER[family])
        add(conn, family)
        sweep(conn)
        assert states(conn, family) == ([PASSED, IN] if state in NOT_SERVED else [IN, OUT])


def test_a_parked_workers_heartbeat_and_an_old_one_serve_nothing(db: ModuleType) -> None:
    with db.connect() as conn:
        served_by(conn, "fetch", "parked")
        conn.execute("INSERT INTO worker_heartbeats (host_label, queue) VALUES ('box', 'fetch')")
        beats(conn, "load", STALE_S + 1)
        assert sweeps.served(conn, STALE_S) == []


def test_a_paused_queue_lets_others_have_the_key_until_it_is_resumed(
    db: ModuleType, family: str
) -> None:
    with db.connect() as conn:
        for queue in (FAMILIES[family][1], OTHER[family]):
            served_by(conn, queue)
        add(conn, family, queue=OTHER[family])
        add(conn, family)
        pause = "INSERT INTO queue_settings (queue, paused_at) VALUES (%s, now())"
        conn.execute(pause, (OTHER[family],))
        assert sweep(conn) == (0, 1)
        assert states(conn, family) == [PASSED, IN]
        conn.execute("UPDATE queue_settings SET paused_at = NULL")
        assert sweep(conn) == (1, 0)
        assert states(conn, family) == [IN, OUT]


def test_a_key_stays_where_nobody_else_could_use_it(db: ModuleType, family: str) -> None:
    with db.connect() as conn:
        for _ in range(2):
            add(conn, family, queue=OTHER[family])
        served_by(conn, FAMILIES[family][1])
        add(conn, family, lock_key="other")
        assert sweep(conn) == (0, 0)
        assert states(conn, family) == [IN, OUT, IN]
        conn.execute("DELETE FROM workers")
        add(conn, family)
        assert sweep(conn) == (0, 0), "nothing is served at all"


def test_1500_unserved_jobs_of_a_key_delay_a_job_by_one_sweep(db: ModuleType, family: str) -> None:
    with db.connect() as conn:
        served_by(conn, FAMILIES[family][1])
        many(conn, family, 1500)
        normal = add(conn, family)
        other = add(conn, family, queue=OTHER[family], lock_key="also")
        behind = add(conn, family, lock_key="also", **{"node_id": "m"} if family == "node" else {})
        assert sweep(conn) == (0, 1501)
        for job in (normal, behind):
            assert factories.reread(conn, job)["blocked_reason"] is None
        assert factories.reread(conn, other)["blocked_reason"] == "unserved"
        served_by(conn, OTHER[family])
        assert sweep(conn) == (1501, 0)
        assert factories.reread(conn, normal)["blocked_reason"] == "locked"


def many(conn: Any, family: str, count: int) -> None:
    """So many jobs of key k and the best priority in a queue that nobody serves."""
    if family == "ingest":
        conn.execute(
            "INSERT INTO ingest_jobs (task_name, queue, lock_key, priority)"
            " SELECT 't', 'ghost', 'k', 0 FROM generate_series(1, %s)",
            (count,),
        )
    else:
        conn.execute(
            "INSERT INTO workflow_node_jobs (run_id, node_id, node_module, queue, lock_key,"
            " priority) SELECT %s, i::text, 'm', 'gpu', 'k', 0 FROM generate_series(1, %s) i",
            (factories.run(conn), count),
        )


def test_served_jobs_keep_their_order_among_unserved_ones(db: ModuleType, family: str) -> None:
    drawn = random.Random(11)
    with db.connect() as conn:
        served_by(conn, FAMILIES[family][1])
        rows = list[Row]()
        for number in range(24):
            queue = FAMILIES[family][1] if number % 2 else OTHER[family]
            rows.append(add(conn, family, queue=queue, priority=drawn.choice((5, 10, 100))))
        first = min(rows, key=lambda row: (row["priority"], row["seq"]))
        if first["queue"] != OTHER[family]:
            add(conn, family, queue=OTHER[family], priority=0)
        sweep(conn)
        taken = list[str]()
        while (job := take(conn, family)) is not None:
            taken.append(job["id"])
            transitions.complete(conn, job)
        line = sorted(rows, key=lambda row: (row["priority"], row["seq"]))
        assert taken == [row["id"] for row in line if row["queue"] == FAMILIES[family][1]]


def test_a_worker_of_0_3_0_finds_no_job_that_gave_up_its_key(
    passed: tuple[Any, Row, Row], family: str
) -> None:
    conn, ghost, _ = passed
    assert take(conn, family) is not None
    table = table_of(ghost)
    claim = "UPDATE {} SET status = 'running', claimed_by = 'old' WHERE id = %s RETURNING id"
    assert conn.execute(sql.SQL(claim).format(table), (ghost["id"],)).fetchall() == []


def test_an_unserved_job_whose_key_is_taken_off_is_admitted(
    passed: tuple[Any, Row, Row], family: str
) -> None:
    conn, ghost, _ = passed
    factories.change(conn, ghost, "lock_key = NULL")
    assert states(conn, family) == [IN, IN]


def test_a_waiter_that_is_not_due_waits_on_without_its_key(db: ModuleType, family: str) -> None:
    with db.connect() as conn:
        add(conn, family)
        waiter = add(conn, family)
        factories.change(conn, waiter, "available_at = now() + interval '1 hour', lock_key = NULL")
        assert states(conn, family) == [IN, ("queued", "not_due")]


def test_a_waiter_whose_key_is_taken_off_is_admitted_and_its_workers_are_notified(
    db: ModuleType, family: str
) -> None:
    with db.connect() as conn, db.connect() as listener:
        add(conn, family)
        waiter = add(conn, family)
        assert states(conn, family) == [IN, OUT]
        channel = "node_job_ready" if family == "node" else "ingest_job_ready"
        listener.execute(f"LISTEN {channel}")
        factories.change(conn, waiter, "lock_key = NULL")
        assert states(conn, family) == [IN, IN]
        assert [each.channel for each in listener.notifies(timeout=30, stop_after=1)] == [channel]


def test_a_job_that_is_being_claimed_keeps_its_key(db: ModuleType, family: str) -> None:
    with db.connect() as conn, db.connect() as other:
        served_by(conn, FAMILIES[family][1])
        ghost = add(conn, family, queue=OTHER[family])
        add(conn, family, queue=OTHER[family])
        add(conn, family)
        table = table_of(ghost)
        with other.transaction():
            other.execute(
                sql.SQL("SELECT FROM {} WHERE id = %s FOR UPDATE").format(table), (ghost["id"],)
            )
            assert sweep(conn) == (0, 0)
        assert sweep(conn) == (0, 2)


def test_an_unserved_job_that_cannot_be_written_delays_no_other_key(db: ModuleType) -> None:
    with db.connect() as conn:
        served_by(conn, "fetch")
        for key in ("k", "l"):
            add(conn, "ingest", id=f"ghost of {key}", queue="ghost", lock_key=key)
            add(conn, "ingest", id=f"fetch of {key}", lock_key=key)
        with app_triggers.refusing(conn, "ingest_jobs", "OLD.id = 'ghost of k'"):
            assert sweep(conn) == (0, 1)
            assert states(conn, "ingest") == [IN, OUT, PASSED, IN]
        assert sweep(conn) == (0, 1)


@pytest.mark.parametrize("column", ["lock_key", "partition_key"])
def test_a_commit_reads_its_notes_a_few_times_however_many_keys_it_has(
    db: ModuleType, column: str
) -> None:
    """It holds the advisory locks of its keys meanwhile, and other commits wait for these."""
    queues.limit("fetch", partition_max_running=1)

    def read(count: int) -> int:
        """Return how many blocks this session reads of the notes and of their indexes."""
        insert = (
            f"INSERT INTO ingest_jobs (task_name, queue, {column})"
            f" SELECT 't', 'fetch', {count} || '/' || i FROM generate_series(1, {count}) i"
        )
        blocks = (
            "WITH notes AS (SELECT oid FROM pg_class WHERE oid IN"
            " ('lock_turns'::regclass, 'partition_turns'::regclass))"
            " SELECT sum(pg_stat_get_xact_blocks_fetched(oid)) FROM ("
            "SELECT oid FROM notes UNION"
            " SELECT indexrelid FROM pg_index JOIN notes ON oid = indrelid) every"
        )
        with db.connect() as conn:
            # Dead rows and deep indexes that earlier transactions have left would be read as well.
            conn.execute("TRUNCATE lock_turns, partition_turns")
            with conn.transaction():
                before = factories.one(conn, blocks)
                conn.execute(insert.encode())
                conn.execute("SET CONSTRAINTS ALL IMMEDIATE")  # which a commit does otherwise
                return int(factories.one(conn, blocks) - before)

    few, many = read(400), read(1600)
    assert many < 4 * few * 1.25


def test_a_bulk_insert_finds_its_notes_by_their_keys(db: ModuleType) -> None:
    with db.connect(autocommit=False) as conn:
        conn.execute(
            "INSERT INTO ingest_jobs (task_name, queue, lock_key)"
            " SELECT 't', 'fetch', i::text FROM generate_series(1, 200) i"
        )
        read = "SELECT idx_tup_fetch FROM pg_stat_xact_user_tables WHERE relname = 'lock_turns'"
        assert factories.one(conn, read) < 400
        conn.rollback()
