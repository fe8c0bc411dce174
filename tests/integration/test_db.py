"""Connections: committed or rolled back, time-outs for the engine alone, secrets kept."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from types import ModuleType
from typing import Any

import psycopg
import psycopg_pool
import pytest
from psycopg import conninfo
from psycopg.rows import tuple_row

from queue_workflows import config, errors, jobs, run_store
from tests.support import factories, tabled, wait
from tests.support.proxy import Proxy

CANARY = "canary-7f3a-secret"
TIMEOUTS = ("statement_timeout", "lock_timeout", "idle_in_transaction_session_timeout")


def timeouts(conn: Any) -> list[str]:
    return [conn.execute(f"SHOW {name}").fetchone()[name] for name in TIMEOUTS]


def run_ids(db: ModuleType) -> list[str]:
    with db.connect() as conn:
        return factories.column(conn, "SELECT id FROM workflow_runs ORDER BY id")


# --- the hosts' connections --------------------------------------------------------------------


def test_connection_commits_on_a_clean_exit_and_rolls_back_on_an_exception(db: ModuleType) -> None:
    with db.connection() as conn:
        row = conn.execute(
            "INSERT INTO workflow_runs (id, workflow_name) VALUES ('a', 'w') RETURNING *"
        )
        assert row.fetchone()["workflow_name"] == "w"
    with pytest.raises(psycopg.errors.UndefinedTable), db.connection() as conn:
        conn.execute(
            "INSERT INTO workflow_runs (id, workflow_name) VALUES ('b', 'w'); TABLE nonsense"
        )
    assert run_ids(db) == ["a"]


def test_cursor_is_under_the_same_rules(db: ModuleType) -> None:
    with db.cursor() as cur:
        cur.execute("INSERT INTO workflow_runs (id, workflow_name) VALUES ('a', 'w') RETURNING id")
        assert cur.fetchone() == {"id": "a"}
    with pytest.raises(psycopg.errors.UndefinedTable), db.cursor() as cur:
        cur.execute(
            "INSERT INTO workflow_runs (id, workflow_name) VALUES ('b', 'w'); TABLE nonsense"
        )
    assert run_ids(db) == ["a"]


def test_only_the_engines_own_connections_carry_time_outs(db: ModuleType) -> None:
    with db.connection() as conn:
        assert timeouts(conn) == ["0", "0", "0"]
    with db.transaction() as conn:
        assert timeouts(conn) == ["5s", "3s", "10s"]
    with db.connect() as conn:
        assert timeouts(conn) == ["5s", "3s", "10s"]
    with db.connect(timeout_s=0.5) as conn:
        assert timeouts(conn) == ["500ms", "3s", "10s"]
    with db.connect(limited=False) as conn:
        assert timeouts(conn) == ["0", "0", "0"]


def test_an_engine_transaction_that_is_rolled_back_keeps_its_time_outs(db: ModuleType) -> None:
    with pytest.raises(RuntimeError), db.transaction() as conn:
        raise RuntimeError
    with db.transaction() as conn:
        assert timeouts(conn) == ["5s", "3s", "10s"]


def test_the_pool_is_as_large_as_its_knob(db: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUEUE_WORKFLOWS_DB_POOL_MAX", "3")
    assert db.get_pool().max_size == 3
    assert db.get_pool() is db.get_pool()
    db.close_pool()
    monkeypatch.setenv("QUEUE_WORKFLOWS_DB_POOL_MAX", "0")
    assert db.get_pool().max_size == 1


def test_a_connection_that_died_in_the_pool_is_replaced_unseen(db: ModuleType) -> None:
    with db.connection() as conn:
        pid = conn.info.backend_pid
    with db.connect() as conn:
        conn.execute("SELECT pg_terminate_backend(%s, 5000)", (pid,))
    with db.connection() as conn:
        assert conn.info.backend_pid != pid


def test_an_engine_connection_that_died_in_the_pool_is_replaced_unseen(db: ModuleType) -> None:
    with db.statement() as conn:
        pid = conn.info.backend_pid
    with db.connect() as conn:
        conn.execute("SELECT pg_terminate_backend(%s, 5000)", (pid,))
    with db.transaction() as conn:
        assert conn.info.backend_pid != pid


def test_a_connection_used_a_moment_ago_is_lent_without_a_round_trip(
    db: ModuleType, dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lent: list[Any] = []

    def lend() -> None:
        with db.statement() as conn:
            lent.append(conn)

    with Proxy(dsn) as wire:
        monkeypatch.setenv("QUEUE_WORKFLOWS_DB_URL", wire.dsn)
        lend()
        wire.freeze()
        lend()
        now = time.monotonic
        monkeypatch.setattr(time, "monotonic", lambda: now() + 60)
        late = threading.Thread(target=lend)
        late.start()
        wait.until(lambda: wire.holds_back(b""))
        wire.thaw()
        late.join(30)
        wire.freeze()
        lend()
        db.close_pool()
    assert [conn is lent[0] for conn in lent] == [True] * 4


def test_a_statement_commits_itself_and_a_transaction_does_at_its_end(db: ModuleType) -> None:
    with db.statement() as conn:
        conn.execute("INSERT INTO workflow_runs (id, workflow_name) VALUES ('a', 'w')")
        assert run_ids(db) == ["a"]
    with db.transaction() as conn:
        conn.execute("INSERT INTO workflow_runs (id, workflow_name) VALUES ('b', 'w')")
        assert run_ids(db) == ["a"]
    assert run_ids(db) == ["a", "b"]


def test_the_pool_follows_the_dsn(
    db: ModuleType, dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = db.get_pool()
    monkeypatch.setenv("QUEUE_WORKFLOWS_DB_URL", f"{dsn}&application_name=another")
    with db.connection() as conn:
        assert factories.one(conn, "SELECT current_setting('application_name')") == "another"
    assert first.closed


# --- joining a caller's transaction ------------------------------------------------------------


def test_a_transaction_of_the_caller_is_ended_by_the_caller(db: ModuleType, dsn: str) -> None:
    config.register_ingest_task("t", lambda reason: {})
    with psycopg.connect(dsn) as theirs:
        assert theirs.row_factory is tuple_row
        run_store.insert_run(run_id="r", workflow_name="w", conn=theirs)  # pyright: ignore
        job = jobs.enqueue(task_name="t", queue="fetch", conn=theirs)  # pyright: ignore
        assert theirs.row_factory is tuple_row
        assert theirs.execute("SELECT id FROM ingest_jobs").fetchone() == (job,)
        assert run_ids(db) == []
        theirs.rollback()
        assert run_ids(db) == []
        run_store.insert_run(run_id="s", workflow_name="w", conn=theirs)  # pyright: ignore
        theirs.commit()
    assert run_ids(db) == ["s"]


def test_a_connection_of_the_caller_keeps_its_row_factory_after_an_error(
    db: ModuleType, dsn: str
) -> None:
    with psycopg.connect(dsn) as theirs:
        with pytest.raises(psycopg.errors.DivisionByZero), db.transaction(theirs) as conn:
            conn.execute("SELECT 1/0")
        assert theirs.row_factory is tuple_row


# --- fork --------------------------------------------------------------------------------------


def test_a_fork_drops_the_pool_and_leaves_the_parents_connections_alone(db: ModuleType) -> None:
    with db.connection() as conn:
        parent_pid = conn.info.backend_pid
    pool = db.get_pool()
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        try:
            with db.connection() as conn:
                text = f"{conn.info.backend_pid} {db.get_pool() is pool}"
            db.close_pool()
            os.write(write_end, text.encode())
        finally:
            os._exit(0)
    os.close(write_end)
    with os.fdopen(read_end) as said:
        pid, same = said.read().split()
    assert os.waitpid(child, 0)[1] == 0
    assert same == "False"
    assert int(pid) != parent_pid
    with db.connection() as conn:
        assert conn.info.backend_pid == parent_pid


def test_a_fork_while_a_thread_opens_the_pool_does_not_hang_the_child(
    db: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    opens, may_open = threading.Event(), threading.Event()
    really_open = psycopg_pool.ConnectionPool.open

    def open_late(*arguments: Any, **more: Any) -> None:
        opens.set()
        may_open.wait(30)
        really_open(*arguments, **more)

    monkeypatch.setattr(psycopg_pool.ConnectionPool, "open", open_late)
    opening = threading.Thread(target=db.get_pool)
    opening.start()
    assert opens.wait(30)
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        may_open.set()
        try:
            with db.connection() as conn:
                conn.execute("SELECT 1")
            db.close_pool()
        except BaseException:
            os._exit(1)
        os._exit(0)
    may_open.set()
    opening.join(30)
    assert os.waitpid(child, 0)[1] == 0


# --- texts of errors ------------------------------------------------------------------------

UNREACHABLE = [
    f"postgresql://user:{CANARY}@127.0.0.1:1/name",
    f"host=/nowhere/at/all user=u password={CANARY} dbname=name",
    f"postgresql://user:{CANARY}@[::1/name",
    f"postgresql://user:{CANARY}@host/name?no_such_option=1",
    f"password={CANARY} port=",
    f"nonsense {CANARY}",
    f"postgresql://u:{CANARY}@h/d?no_option={CANARY}",
    f"host=h password=a {CANARY.replace('-', '')}=b no_option={CANARY}",
    f"postgresql://u:a?{CANARY.replace('-', '')}=b@h/d",
]


@pytest.mark.parametrize("url", UNREACHABLE)
def test_no_error_and_no_log_line_holds_the_password(
    url: str,
    clean_process: None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    from queue_workflows import db

    monkeypatch.setenv("QUEUE_WORKFLOWS_DB_URL", url)
    said: list[str] = []
    calls = (
        db.connect,
        db.describe,
        lambda: db.wait_until_reachable(timeout_s=0, pause=lambda _: None),
        lambda: db.wait_for_schema(1, timeout_s=0),
        db.bootstrap,
        lambda: next(iter(db.listen("c", poll_s=0.01))) and None,
    )
    with caplog.at_level(logging.DEBUG, "queue_workflows"):
        for call in calls:
            try:
                said.append(str(call()))
            except (errors.QueueWorkflowsError, psycopg.Error) as error:
                said += [str(error), repr(error), repr(error.__cause__)]
    output = capfd.readouterr()
    everything = "\n".join([*said, caplog.text, output.out, output.err])
    assert CANARY not in everything
    assert CANARY.replace("-", "") not in everything


def test_a_dsn_that_cannot_be_read_names_its_variable(
    clean_process: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from queue_workflows import db

    config.configure(db_url_env="HOST_DB")
    monkeypatch.setenv("HOST_DB", f"nonsense {CANARY}")
    with pytest.raises(
        errors.InvalidConfig, match=r"the DSN in HOST_DB cannot be read.*postgresql"
    ):
        db.connect()


@pytest.mark.parametrize("name", ["QUEUE_WORKFLOWS_DB_URL", "AI_LEADS_DB_URL"])
def test_the_variable_that_was_set_is_named_and_no_other(
    clean_process: None, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    from queue_workflows import db

    monkeypatch.setenv(name, f"nonsense {CANARY}")
    with pytest.raises(errors.InvalidConfig, match=f"the DSN in {name} cannot be read"):
        db.connect()


def test_an_unknown_option_is_named_and_no_part_of_a_password(clean_process: None) -> None:
    cases: list[Any] = [
        (f"postgresql://u:{CANARY}@h/d?pool_size=5", True),
        ("postgresql://h:5432/d?pool_size=5", True),
        ("postgresql://h/d?sslmode=prefer&pool_size=5", True),
        ("host=h pool_size=5", True),
        (f"host=h pool_size=5 password={CANARY}", True),
        # Where it may be a part of a password it is not named.
        (f"host=h password={CANARY} pool_size=5", False),
        (f"postgresql://h/d?password={CANARY}&pool_size=5", False),
        ("postgresql://u:top?pool_size=5/d", False),
        ("host=h pool_size=5@x", False),
    ]
    for url, named in cases:
        with tabled.case(url, named):
            from queue_workflows import db

            with pytest.raises(errors.InvalidConfig) as caught:
                db.describe(url)
            assert (": 'pool_size' is not an option of PostgreSQL" in str(caught.value)) is named
            assert ("pool_size" in str(caught.value)) is named
            assert CANARY not in str(caught.value)


@pytest.mark.parametrize("port", ["99999", "0", "abc", "5432,x"])
def test_a_port_that_is_none_is_refused_at_once(
    port: str, clean_process: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from queue_workflows import db

    monkeypatch.setenv("QUEUE_WORKFLOWS_DB_URL", f"host=localhost port={port} password={CANARY}")
    with pytest.raises(errors.InvalidConfig, match="is not a port") as caught:
        db.wait_until_reachable()
    assert CANARY not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("postgresql://u:p@db.example:5433/shop", "database shop at db.example:5433"),
        ("dbname=shop host=/run/pg", "database shop at /run/pg"),
        ("postgresql://u@/", "database u at the default socket"),
        ("postgresql://", "database default at the default socket"),
    ],
)
def test_a_database_is_described_without_secrets(url: str, words: str) -> None:
    from queue_workflows import db

    assert db.describe(url) == words


# --- waiting for the server --------------------------------------------------------------------


def test_waiting_logs_once_that_the_server_is_unreachable_and_once_that_it_is_back(
    db: ModuleType, dsn: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with Proxy(dsn) as proxy:
        away = proxy.dsn
    pauses: list[float] = []

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 6:
            monkeypatch.setattr("queue_workflows.db.pool.connect", lambda **_: db.connect(url=dsn))

    monkeypatch.setenv("QUEUE_WORKFLOWS_DB_URL", away)
    with caplog.at_level(logging.WARNING):
        assert db.wait_until_reachable(pause=pause) is True
    assert [record.message.split(":")[0].split(" does")[0] for record in caplog.records] == [
        db.describe(away).split(":")[0],
        f"{db.describe(away)} answers".split(":")[0],
    ]
    assert len(caplog.records) == 2
    assert 0.1 < pauses[0] < 0.3
    assert pauses[-1] > 3 * pauses[0]
    assert max(pauses) <= 5 * 1.3


def test_waiting_ends_when_it_is_stopped_or_over(
    clean_process: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from queue_workflows import db

    monkeypatch.setenv("QUEUE_WORKFLOWS_DB_URL", "postgresql://u@127.0.0.1:1/name")
    stopped = threading.Event()
    assert db.wait_until_reachable(stopped=stopped.is_set, pause=lambda _: stopped.set()) is False
    with pytest.raises(
        errors.DatabaseUnavailable, match=r"database name at 127\.0\.0\.1:1 does not"
    ):
        db.wait_until_reachable(timeout_s=0, pause=lambda _: None)


def test_a_long_wait_is_logged_every_30_seconds(
    clean_process: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from queue_workflows import db

    monkeypatch.setenv("QUEUE_WORKFLOWS_DB_URL", "postgresql://u@127.0.0.1:1/name")
    now = [0.0]
    monkeypatch.setattr("queue_workflows.db.readiness.time.monotonic", lambda: now[0])

    def pause(seconds: float) -> None:
        now[0] += seconds

    with caplog.at_level(logging.WARNING):
        assert db.wait_until_reachable(stopped=lambda: now[0] > 118, pause=pause) is False
    # Each comes with the first try after its 30 s, which is up to 6.5 s later.
    assert len(caplog.records) == 3 + 1, caplog.text


@pytest.mark.parametrize("change", [{"dbname": "no_such_test"}, {"user": "nobody_of_this_name"}])
def test_a_refused_login_is_no_outage_for_who_waits_only_so_long(
    dsn: str, clean_process: None, monkeypatch: pytest.MonkeyPatch, change: dict[str, str]
) -> None:
    from queue_workflows import db

    url = conninfo.make_conninfo(dsn, **change)
    monkeypatch.setenv("QUEUE_WORKFLOWS_DB_URL", url)
    with pytest.raises(
        errors.DatabaseUnavailable,
        match=r"refuses the connection.*(does not exist|authentication failed)",
    ):
        db.wait_until_reachable(timeout_s=60, pause=lambda _: pytest.fail("it waited"))
    stopped = threading.Event()
    assert db.wait_until_reachable(stopped=stopped.is_set, pause=lambda _: stopped.set()) is False


@pytest.mark.parametrize(
    ("reason", "refused"),
    [
        ('FATAL:  password authentication failed for user "u"', True),
        ('FATAL:  Peer authentication failed for user "u"', True),
        ("fe_sendauth: no password supplied", True),
        ('FATAL:  no pg_hba.conf entry for host "::1", user "u", database "d"', True),
        ('FATAL:  permission denied for database "d"\nDETAIL:  User does not have CONNECT', True),
        ('FATAL:  role "u" is not permitted to log in', True),
        ("FATAL:  the database system is starting up", False),
        ("FATAL:  sorry, too many clients already", False),
        ("Connection refused\n\tIs the server running on that host", False),
        ("failed to resolve host 'h': [Errno -2] Name or service not known", False),
        ("server closed the connection unexpectedly", False),
    ],
)
def test_only_a_definite_answer_ends_the_wait_early(
    clean_process: None, monkeypatch: pytest.MonkeyPatch, reason: str, refused: bool
) -> None:
    from queue_workflows import db

    def connect(**_: Any) -> None:
        raise psycopg.OperationalError(f"connection failed: {reason}")

    class Waited(Exception):
        pass

    def pause(_: float) -> None:
        raise Waited

    monkeypatch.setenv("QUEUE_WORKFLOWS_DB_URL", "postgresql://u@h/d")
    monkeypatch.setattr("queue_workflows.db.pool.connect", connect)
    with pytest.raises(errors.DatabaseUnavailable if refused else Waited):
        db.wait_until_reachable(timeout_s=60, pause=pause)


def test_a_server_that_is_there_is_reachable_at_once(db: ModuleType) -> None:
    assert db.wait_until_reachable(pause=lambda _: pytest.fail("it waited")) is True
