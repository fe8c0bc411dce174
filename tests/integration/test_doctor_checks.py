"""Single checks of `doctor`, each given what the tests' server cannot show."""

from __future__ import annotations

import datetime
from types import ModuleType
from typing import Any

import psycopg
import pytest

from queue_workflows import db
from queue_workflows.admin import checks
from queue_workflows.db import statements
from tests.support import factories, reused_backends
from tests.support.findings import ERROR, OK, WARNING, wrong
from tests.support.findings import doctors as found
from tests.support.findings import of_doctor as findings
from tests.support.proxy import Proxy
from tests.support.wait import until


@pytest.mark.parametrize(
    ("server", "said"),
    [
        ({"version_num": 130012, "version": "13.12"}, "PostgreSQL 14 or later"),
        ({"standby": True}, "the primary"),
    ],
)
def test_a_server_that_will_not_do(
    db: ModuleType, monkeypatch: pytest.MonkeyPatch, server: dict[str, Any], said: str
) -> None:
    real = statements.doctor.server
    monkeypatch.setattr(statements.doctor, "server", lambda conn: real(conn) | server)
    assert found("server").level == ERROR
    assert said in found("server").remedy


@pytest.mark.parametrize(
    ("name", "check", "level"),
    [
        ("fsync", "fsync", ERROR),
        ("full_page_writes", "full_page_writes", ERROR),
        ("autovacuum", "autovacuum", WARNING),
        ("track_counts", "autovacuum", WARNING),
    ],
)
def test_settings_of_the_whole_server(
    db: ModuleType, monkeypatch: pytest.MonkeyPatch, name: str, check: str, level: str
) -> None:
    real = checks.in_force
    monkeypatch.setattr(checks, "in_force", lambda *args: real(*args) | {name: "off"})
    assert found(check).level == level
    monkeypatch.setattr(checks, "in_force", lambda *args: real(*args) | {name: "on"})
    assert found(check).level == OK


@pytest.mark.parametrize(("hours", "word"), [(1, "ahead"), (-1, "behind")])
def test_clocks_that_differ(
    db: ModuleType, monkeypatch: pytest.MonkeyPatch, hours: int, word: str
) -> None:
    real = statements.doctor.clock
    away = datetime.timedelta(hours=hours)
    monkeypatch.setattr(statements.doctor, "clock", lambda conn: real(conn) + away)
    finding = found("clock")
    assert finding.level == WARNING
    assert f" s {word}" in finding.text


def test_notifications_that_do_not_arrive(db: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    real = checks.notify
    monkeypatch.setattr(checks, "LISTEN_WAIT_S", 0.2)
    monkeypatch.setattr(checks, "notify", lambda conn, _: real(conn, "another_channel"))
    finding = found("listen")
    assert finding.level == WARNING
    assert "session mode" in finding.remedy


def test_a_queue_of_notifications_that_fills(
    db: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = checks.notify
    monkeypatch.setattr(checks, "notify", lambda *args: real(*args) + 0.6)
    assert found("listen").level == WARNING
    assert "60% full" in found("listen").text


def test_a_transaction_that_was_forgotten(
    db: ModuleType, dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with psycopg.connect(dsn, application_name="forgotten") as other:
        other.execute("SELECT 1")
        assert found("transactions").level == OK
        assert "(forgotten)" in found("transactions").text
        monkeypatch.setattr(checks, "IDLE_WARN_S", 0.0)
        assert found("transactions").level == WARNING
        assert "(forgotten) has been idle in a transaction for" in found("transactions").text
        monkeypatch.setattr(checks, "IDLE_WARN_S", 60.0)
        monkeypatch.setattr(checks, "TRANSACTION_WARN_S", 0.0)
        assert found("transactions").level == WARNING
        assert "the oldest is open for" in found("transactions").text
    assert found("transactions").text == "none is open"


def test_connections_that_run_out(db: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    with db.connect() as conn:
        before = statements.doctor.connections(conn)
        with reused_backends.shared.off(), db.connect():
            assert until(lambda: statements.doctor.connections(conn)["used"] > before["used"])
        assert before["allowed"] < int(factories.one(conn, "SHOW max_connections"))
    for share, level in ((0.5, OK), (0.85, WARNING), (0.99, ERROR)):
        used = {"used": int(share * 1000), "allowed": 1000}
        monkeypatch.setattr(statements.doctor, "connections", lambda _, used=used: used)
        assert found("connections").level == level


def test_a_connection_that_is_lost_on_the_way(
    db: ModuleType, dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(conn: Any) -> None:
        with psycopg.connect(dsn, autocommit=True) as other:
            other.execute("SELECT pg_terminate_backend(%s, 5000)", (conn.info.backend_pid,))
        conn.execute("SELECT 1")

    monkeypatch.setattr(statements.overview, "open_events", killed)
    result = findings()
    assert wrong(result) == {"database": ERROR}
    assert "the connection was lost" in result["database"].text
    assert "runs" not in result


def test_a_server_that_is_gone_by_the_time_of_listening(
    db: ModuleType, dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Proxy(dsn) as proxy:
        monkeypatch.setenv("QUEUE_WORKFLOWS_DB_URL", proxy.dsn)
        monkeypatch.setattr(checks, "LISTEN_WAIT_S", 0.2)
        real = statements.doctor.clock

        def cut(conn: Any) -> Any:
            now = real(conn)
            proxy.cut()
            return now

        monkeypatch.setattr(statements.doctor, "clock", cut)
        assert wrong(findings()) == {"database": ERROR}


def test_dead_rows(own: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with db.connect() as conn:
        conn.execute("ALTER TABLE workers SET (autovacuum_enabled = false)")
        conn.execute(
            "INSERT INTO workers (worker_id, host_label, queue, pid) VALUES ('w', 'b', 'q', 1)"
        )
        for _ in range(30):
            conn.execute("UPDATE workers SET last_seen = now(), queue = queue || 'x'")
    assert found("dead rows").text == "autovacuum is off for workers"
    with db.connect() as conn:
        conn.execute("ALTER TABLE workers RESET (autovacuum_enabled)")
    monkeypatch.setattr(checks, "DEAD_ROWS_WARN", 5)
    finding = until(lambda: f if (f := found("dead rows")).level == WARNING else None)
    assert "workers (" in finding.text
    assert "VACUUM" in finding.remedy


def test_an_index_of_inputs_is_named_if_many_runs_lack_it(
    own: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert found("run inputs").text == "so few runs are searched without an index"
    monkeypatch.setattr(checks, "MANY_RUNS", 1)
    with db.connect() as conn:
        factories.run(conn)
        conn.execute("ANALYZE workflow_runs")
        finding = found("run inputs")
        assert (finding.level, finding.remedy) == (OK, "")
        conn.execute(finding.text.partition("; for frequent ones, ")[2].encode())
    assert found("run inputs").text == "an index finds runs by their inputs"


STATISTICS = {"dead": 0, "live": 0, "vacuum_off": False}


@pytest.mark.parametrize(
    ("name", "updates", "hot", "inserts", "level"),
    [
        ("workers", 900, 0, 1, OK),
        ("workers", 2000, 1500, 1, OK),
        ("workers", 2000, 500, 1, WARNING),
        ("ingest_jobs", 2000, 0, 1000, OK),
        ("ingest_jobs", 90000, 70000, 1000, WARNING),
        ("workflow_runs", 90000, 0, 1, OK),
    ],
)
def test_renewals_that_are_not_hot(
    db: ModuleType, monkeypatch: pytest.MonkeyPatch,
    name: str, updates: int, hot: int, inserts: int, level: str,
) -> None:  # fmt: skip
    row = {**STATISTICS, "name": name, "updates": updates, "hot": hot, "inserts": inserts}
    monkeypatch.setattr(statements.doctor, "table_statistics", lambda _, **__: [row])
    assert found("renewals").level == level


def test_psycopg_without_its_c_part_is_slow(
    db: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks, "driver", lambda: ("3.2.0", "python", 150004))
    assert found("psycopg") == (
        "psycopg", WARNING, "psycopg 3.2.0 (python), libpq 15.4",
        "install psycopg[binary], which is faster",
    )  # fmt: skip


def test_a_check_that_is_refused_is_one_finding(
    db: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(conn: Any, *_: Any, **__: Any) -> None:
        conn.execute("SELECT * FROM nowhere")

    monkeypatch.setattr(checks, "in_force", refused)
    for name in ("transactions", "connections", "lapsed", "table_statistics"):
        monkeypatch.setattr(statements.doctor, name, refused)
    result = findings()
    assert wrong(result) == dict.fromkeys(
        ("settings", "transactions", "connections", "leases", "dead rows", "renewals"), ERROR
    )
    assert 'relation "nowhere" does not exist' in result["leases"].text


def test_every_finding_belongs_to_a_question(own: str) -> None:
    names = [name for check in checks.CHECKS for name in check.names.split(", ")]
    assert [name for name in findings() if name not in ("package", "psycopg", "database")] == [
        name for name in names if name not in ("settings", "schema rights")
    ]
