"""`doctor` finds each fault that is provoked, with its level and remedy."""

from __future__ import annotations

import datetime
from types import ModuleType
from typing import Any

import psycopg
import pytest
from psycopg import sql

from queue_workflows import db as engine
from queue_workflows.admin import doctor as facts
from queue_workflows.admin import permissions
from queue_workflows.cli import doctor, server_checks, table_checks
from queue_workflows.cli.findings import ERROR, OK, WARNING, Finding
from queue_workflows.engine import failure_alerts, unserved_jobs
from tests.support import database, factories, reused_backends, transitions
from tests.support.proxy import Proxy
from tests.support.wait import until

CANARY = "canary77"
NOWHERE = f"postgresql://someone:{CANARY}@127.0.0.1:1/none"
DATA = set(server_checks.DANGERS)
"""Off on the servers that tests start."""


def findings() -> dict[str, Finding]:
    """What the doctor finds, by check; the worst of each."""
    found: dict[str, Finding] = {}
    for finding in doctor.examine():
        if finding.check not in found or finding.level != OK:
            found[finding.check] = finding
    return found


def found(check: str) -> Finding:
    return findings()[check]


def wrong(found: dict[str, Finding]) -> dict[str, str]:
    """What is not ok, but for what the tests' own server does without."""
    return {
        name: finding.level
        for name, finding in found.items()
        if finding.level != OK and name not in DATA
    }


def with_options(dsn: str, options: str) -> str:
    return database.url({**psycopg.conninfo.conninfo_to_dict(dsn), "options": options})


@pytest.fixture
def own(migrated_database: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the DSN of a database of this test's own, with the schema."""
    monkeypatch.setenv("QUEUE_WORKFLOWS_DB_URL", migrated_database)
    return migrated_database


# --- health ------------------------------------------------------------------------------------


def test_a_healthy_installation_has_nothing_to_say(own: str) -> None:
    result = findings()
    assert wrong(result) == {}
    assert list(result) == [
        "package", "psycopg", "database", "server", "fsync", "full_page_writes",
        "synchronous_commit", "autovacuum", "clock", "listen", "transactions", "connections",
        "rights", "schema", "functions", "files", "outputs", "outbox", "runs", "bad rows",
        "leases", "queues", "versions", "lock keys", "schedules", "alerts", "workers", "dead rows",
        "renewals",
    ]  # fmt: skip
    assert not [finding for finding in result.values() if finding.level == OK and finding.remedy]
    assert all(finding.remedy for finding in result.values() if finding.level != OK)


def test_nothing_is_written_and_no_connection_is_left(own: str) -> None:
    before = findings()
    assert wrong(before) == {}
    with engine.connect() as conn:
        for table in permissions.TABLES:
            count = sql.SQL("SELECT count(*) FROM {}").format(sql.Identifier(table))
            assert conn.execute(count).fetchone() == {"count": 0}


# --- the database is not there, or not as it should be -----------------------------------------


def test_a_database_that_is_down(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUEUE_WORKFLOWS_DB_URL", NOWHERE)
    result = findings()
    assert list(result) == ["package", "psycopg", "database"]
    assert wrong(result) == {"database": ERROR}
    assert "database none at 127.0.0.1:1 does not answer" in result["database"].text
    assert CANARY not in str(result)


def test_a_database_that_is_frozen(
    db: ModuleType, dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Proxy(dsn) as proxy:
        proxy.freeze()
        monkeypatch.setenv("QUEUE_WORKFLOWS_DB_URL", proxy.dsn)
        monkeypatch.setenv("QUEUE_WORKFLOWS_DB_CONNECT_TIMEOUT_S", "1")
        result = findings()
    assert wrong(result) == {"database": ERROR}
    assert "does not answer" in result["database"].text


def test_a_dsn_that_cannot_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUEUE_WORKFLOWS_DB_URL", f"postgresql://u:{CANARY}@[broken")
    assert wrong(findings()) == {"database": ERROR}
    assert CANARY not in str(findings())


def test_no_dsn_and_no_embedded_server(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setenv("QUEUE_WORKFLOWS_EMBEDDED_DIR", str(tmp_path / "none"))
    assert wrong(findings()) == {"database": ERROR}
    assert "there is no embedded server" in found("database").text


def test_a_database_without_the_schema(
    fresh_database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUEUE_WORKFLOWS_DB_URL", fresh_database)
    result = findings()
    assert wrong(result) == {"schema": ERROR, "tables": WARNING}
    assert "at version 0" in result["schema"].text
    assert "queue-workflows migrate" in result["schema"].remedy


def test_a_schema_that_is_newer_than_the_code(own: str) -> None:
    with engine.connect() as conn:
        conn.execute("INSERT INTO queue_schema_version (version) VALUES (9999)")
    assert wrong(findings()) == {"schema": WARNING}


def test_functions_and_columns_that_are_missing(own: str) -> None:
    with engine.connect() as conn:
        conn.execute("DROP FUNCTION queue_workflows_is_paused CASCADE")
        conn.execute("ALTER TABLE workers DROP COLUMN state CASCADE")
    result = {name: each for name, each in findings().items() if name in wrong({name: each})}
    assert {"functions", "queues"} <= set(result)
    assert "is_paused" in result["functions"].text
    assert "does not exist" in result["queues"].text
    for finding in result.values():
        assert "queue-workflows migrate" in finding.remedy, finding
        assert "grant" not in finding.remedy


def test_rights_that_are_missing(own: str, monkeypatch: pytest.MonkeyPatch) -> None:
    role = f"{psycopg.conninfo.conninfo_to_dict(own)['dbname']}_role"
    name = sql.Identifier(role)
    with engine.connect() as conn:
        conn.execute(sql.SQL("CREATE ROLE {}").format(name))
        try:
            monkeypatch.setenv("QUEUE_WORKFLOWS_DB_URL", with_options(own, f"-c role={role}"))
            blind = findings()
            conn.execute(sql.SQL("GRANT ALL ON ALL TABLES IN SCHEMA public TO {}").format(name))
            conn.execute(sql.SQL("GRANT ALL ON ALL SEQUENCES IN SCHEMA public TO {}").format(name))
            conn.execute(sql.SQL("GRANT ALL ON ALL FUNCTIONS IN SCHEMA public TO {}").format(name))
            whole = findings()
            conn.execute(sql.SQL("REVOKE UPDATE ON workers FROM {}").format(name))
            conn.execute(sql.SQL("REVOKE SELECT ON workflow_runs FROM {}").format(name))
            conn.execute(
                sql.SQL("REVOKE USAGE ON workflow_node_events_id_seq FROM {}").format(name)
            )
            partly = findings()
        finally:
            conn.execute(sql.SQL("DROP OWNED BY {}").format(name))
            conn.execute(sql.SQL("DROP ROLE {}").format(name))
    assert wrong(blind) == {"rights": ERROR, "schema": ERROR, "tables": WARNING}
    assert "SELECT on workflow_runs" in blind["rights"].text
    assert "permission denied for table queue_schema_version" in blind["schema"].text
    assert wrong(whole) == {}
    assert wrong(partly) == {
        "rights": ERROR, "runs": ERROR, "bad rows": ERROR, "schedules": ERROR,
    }  # fmt: skip
    for lacking in ("UPDATE on workers", "SELECT on workflow_runs", "USAGE on workflow_node_ev"):
        assert lacking in partly["rights"].text


def test_a_role_that_may_only_submit_while_runs_may_keep_files_anywhere(
    own: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    role = f"{psycopg.conninfo.conninfo_to_dict(own)['dbname']}_submitter"
    name = sql.Identifier(role)
    seen: list[Finding] = []
    with engine.connect() as conn:
        seen.append(found("files"))
        conn.execute(sql.SQL("CREATE ROLE {}").format(name))
        try:
            for change in (
                "GRANT INSERT (id, workflow_name) ON workflow_runs TO {}",
                "GRANT UPDATE ON workflow_node_jobs TO {}",
                "REVOKE UPDATE ON workflow_node_jobs FROM {}",
            ):
                conn.execute(sql.SQL(change).format(name))
                seen.append(found("files"))
            monkeypatch.setenv("QUEUE_WORKFLOWS_OUT_ROOTS", "/srv/runs")
            seen.append(found("files"))
        finally:
            conn.execute(sql.SQL("DROP OWNED BY {}").format(name))
            conn.execute(sql.SQL("DROP ROLE {}").format(name))
    assert [finding.level for finding in seen] == [OK, WARNING, OK, WARNING, OK]
    assert role in seen[1].text
    assert "QUEUE_WORKFLOWS_OUT_ROOTS" in seen[1].remedy
    assert "/srv/runs" in seen[4].text


def test_a_read_only_role(own: str, monkeypatch: pytest.MonkeyPatch) -> None:
    options = "-c default_transaction_read_only=on"
    monkeypatch.setenv("QUEUE_WORKFLOWS_DB_URL", with_options(own, options))
    assert wrong(findings()) == {"server": ERROR}


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
    real = facts.server
    monkeypatch.setattr(facts, "server", lambda conn: real(conn) | server)
    assert found("server").level == ERROR
    assert said in found("server").remedy


def test_commits_that_are_not_durable(own: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUEUE_WORKFLOWS_DB_URL", with_options(own, "-c synchronous_commit=off"))
    finding = found("synchronous_commit")
    assert (finding.level, finding.remedy) == (ERROR, "set synchronous_commit = on")
    monkeypatch.setenv("QUEUE_WORKFLOWS_DB_URL", with_options(own, "-c synchronous_commit=local"))
    assert found("synchronous_commit").level == OK


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
    real = facts.settings
    monkeypatch.setattr(facts, "settings", lambda *args: real(*args) | {name: "off"})
    assert found(check).level == level
    monkeypatch.setattr(facts, "settings", lambda *args: real(*args) | {name: "on"})
    assert found(check).level == OK


@pytest.mark.parametrize(("hours", "word"), [(1, "ahead"), (-1, "behind")])
def test_clocks_that_differ(
    db: ModuleType, monkeypatch: pytest.MonkeyPatch, hours: int, word: str
) -> None:
    real = facts.clock
    away = datetime.timedelta(hours=hours)
    monkeypatch.setattr(facts, "clock", lambda conn: real(conn) + away)
    finding = found("clock")
    assert finding.level == WARNING
    assert f" s {word}" in finding.text


def test_notifications_that_do_not_arrive(db: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    real = facts.notify
    monkeypatch.setattr(server_checks, "LISTEN_WAIT_S", 0.2)
    monkeypatch.setattr(facts, "notify", lambda conn, _: real(conn, "another_channel"))
    finding = found("listen")
    assert finding.level == WARNING
    assert "session mode" in finding.remedy


def test_a_queue_of_notifications_that_fills(
    db: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = facts.notify
    monkeypatch.setattr(facts, "notify", lambda *args: real(*args) + 0.6)
    assert found("listen").level == WARNING
    assert "60% full" in found("listen").text


def test_a_transaction_that_was_forgotten(
    db: ModuleType, dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with psycopg.connect(dsn, application_name="forgotten") as other:
        other.execute("SELECT 1")
        assert found("transactions").level == OK
        assert "(forgotten)" in found("transactions").text
        monkeypatch.setattr(server_checks, "IDLE_WARN_S", 0.0)
        assert found("transactions").level == WARNING
        assert "(forgotten) has been idle in one for" in found("transactions").text
        monkeypatch.setattr(server_checks, "IDLE_WARN_S", 60.0)
        monkeypatch.setattr(server_checks, "TRANSACTION_WARN_S", 0.0)
        assert found("transactions").level == WARNING
        assert "the oldest is open for" in found("transactions").text
    assert found("transactions").text == "none is open"


def test_connections_that_run_out(db: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    with engine.connect() as conn:
        before = facts.connections(conn)
        with reused_backends.shared.off(), engine.connect():
            assert until(lambda: facts.connections(conn)["used"] > before["used"])
        assert before["allowed"] < int(factories.one(conn, "SHOW max_connections"))
    for share, level in ((0.5, OK), (0.85, WARNING), (0.99, ERROR)):
        used = {"used": int(share * 1000), "allowed": 1000}
        monkeypatch.setattr(facts, "connections", lambda _, used=used: used)
        assert found("connections").level == level


def test_a_connection_that_is_lost_on_the_way(
    db: ModuleType, dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(conn: Any) -> None:
        with psycopg.connect(dsn, autocommit=True) as other:
            other.execute("SELECT pg_terminate_backend(%s, 5000)", (conn.info.backend_pid,))
        conn.execute("SELECT 1")

    monkeypatch.setattr(facts, "outbox", killed)
    result = findings()
    assert wrong(result) == {"database": ERROR}
    assert "the connection was lost" in result["database"].text
    assert "runs" not in result


def test_a_server_that_is_gone_by_the_time_of_listening(
    db: ModuleType, dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Proxy(dsn) as proxy:
        monkeypatch.setenv("QUEUE_WORKFLOWS_DB_URL", proxy.dsn)
        monkeypatch.setattr(server_checks, "LISTEN_WAIT_S", 0.2)
        real = facts.clock

        def cut(conn: Any) -> Any:
            now = real(conn)
            proxy.cut()
            return now

        monkeypatch.setattr(facts, "clock", cut)
        assert wrong(findings()) == {"database": ERROR}


# --- work that is not done ---------------------------------------------------------------------


def test_events_that_nobody_dispatches(db: ModuleType) -> None:
    with engine.connect() as conn:
        run = factories.run(conn)
        for age_s, level in ((5, OK), (20, WARNING), (90, ERROR)):
            conn.execute("DELETE FROM workflow_dispatch_events")
            conn.execute(
                "INSERT INTO workflow_dispatch_events (run_id, node_id, kind, error, created_at)"
                " VALUES (%s, 'n', 'completed', 'no provider', now() - %s * interval '1 s')",
                (run, age_s),
            )
            assert found("outbox").level == level
        assert f"run {run}" in found("outbox").text
        assert "no provider" in found("outbox").text
        conn.execute("UPDATE workflow_dispatch_events SET available_at = now() + interval '1 h'")
        assert found("outbox").level == OK
        conn.execute("UPDATE workflow_dispatch_events SET available_at = now()")
        assert found("outbox").level == OK, "it rested until now"


def test_a_run_that_nobody_starts(db: ModuleType) -> None:
    with engine.connect() as conn:
        factories.run(conn, id="r", status="queued")
        assert found("runs").level == OK
        conn.execute("UPDATE workflow_runs SET queued_at = now() - interval '1 min'")
        assert found("runs").level == WARNING
        assert "run r " in found("runs").text


def test_leases_that_nobody_takes_back(db: ModuleType) -> None:
    with engine.connect() as conn:
        factories.ingest(conn)
        transitions.claim_ingest(conn)
        for age_s, level in ((-60, OK), (30, OK), (90, ERROR)):
            conn.execute(
                "UPDATE ingest_jobs SET lease_expires_at = now() - %s * interval '1 s'", (age_s,)
            )
            assert found("leases").level == level


@pytest.fixture
def waiting(db: ModuleType) -> None:
    """A gpu node and two jobs on `mail` that have waited for a minute, one not due on `later`."""
    with engine.connect() as conn:
        age = datetime.timedelta(minutes=1)
        now = factories.one(conn, "SELECT now()")
        factories.node(conn, queue="gpu", created_at=now - age)
        for _ in range(2):
            factories.ingest(conn, queue="mail", created_at=now - age)
        factories.ingest(conn, queue="later", available_at=now + age, created_at=now - age)


def test_versions_that_no_live_worker_has(db: ModuleType) -> None:
    serve("cpu", state="idle")
    with engine.connect() as conn:
        ids = [factories.node(conn, required_version=text)["id"] for text in ("a@1", "b@2", "b@2")]
        factories.node(conn)
        conn.execute('UPDATE workers SET detail = detail || \'{"claim": {"versions": ["a@1"]}}\'')
    (row,) = [finding for finding in doctor.examine() if finding.check == "versions"]
    assert row.level == WARNING
    assert row.text.startswith("no live worker of queue cpu has b@2; jobs that need it wait, ")
    assert row.text.endswith(f": {ids[1]}, {ids[2]}")
    assert "upgrade" in row.remedy
    with engine.connect() as conn:
        conn.execute('UPDATE workers SET detail = \'{"claim": {"versions": ["b@2", "a@1"]}}\'')
    (row,) = [finding for finding in doctor.examine() if finding.check == "versions"]
    assert row.level == OK


def test_lock_keys_that_passed_over_a_queue_without_a_worker(db: ModuleType) -> None:
    serve("mail", state="idle")
    with engine.connect() as conn:
        for queue in ("bin", "mail"):
            factories.ingest(conn, queue=queue, lock_key="k")
        unserved_jobs.block_unserved(conn, unserved_jobs.served(conn, 30))
    (row,) = [finding for finding in doctor.examine() if finding.check == "lock keys"]
    assert row.level == WARNING
    assert row.text == (
        "queue bin is served by no worker, so the lock keys of 1 job passed to others"
    )
    assert "start queue-claim-worker --queue=bin, " in row.remedy


def unserved() -> dict[str, str]:
    rows = [finding for finding in doctor.examine() if finding.check == "queues"]
    return {row.text.partition(":")[0]: f"{row.text}; {row.remedy}" for row in rows if row.remedy}


def serve(queue: str, **columns: Any) -> None:
    values = {"host_label": "box", "queue": queue, "pid": 1}
    with engine.connect() as conn:
        conn.execute("DELETE FROM workers")
        factories.insert(conn, "workers", worker_id="w", **values, **columns)


@pytest.mark.usefixtures("waiting")
def test_queues_without_a_live_worker() -> None:
    assert list(unserved()) == ["gpu", "mail"]
    assert "2 due jobs and no live worker; start queue-claim-worker" in unserved()["mail"]
    for state in ("idle", "busy", "throttled"):
        serve("mail", state=state)
        assert list(unserved()) == ["gpu"]
    for state in ("stopped", "dead"):
        serve("mail", state=state)
        assert "no live worker" in unserved()["mail"]
    for state in ("parked", "paused", "draining"):
        serve("mail", state=state)
        assert "its workers take none; queue-worker-control --queue=mail --on" in unserved()["mail"]
    past = datetime.datetime(2020, 1, 1, tzinfo=datetime.timezone.utc)
    serve("mail", state="idle", last_seen=past)
    assert "no live worker" in unserved()["mail"]


@pytest.mark.usefixtures("waiting")
def test_a_worker_of_an_older_engine_serves_by_its_heartbeat() -> None:
    with engine.connect() as conn:
        conn.execute("INSERT INTO worker_heartbeats (host_label, queue) VALUES ('old', 'mail')")
    assert list(unserved()) == ["gpu"]


def test_jobs_that_came_just_now_are_given_time(db: ModuleType) -> None:
    with engine.connect() as conn:
        factories.ingest(conn, queue="mail")
    assert unserved() == {}


def test_workers_that_went_silent(db: ModuleType) -> None:
    with engine.connect() as conn:
        conn.execute(
            "INSERT INTO worker_heartbeats (host_label, queue, last_flagged_dead_at)"
            " VALUES ('one', 'gpu', now()), ('fine', 'cpu', NULL)"
        )
        factories.ingest(conn)
        job = transitions.claim_ingest(conn)
        conn.execute(
            "INSERT INTO workers (worker_id, host_label, queue, pid, last_seen) VALUES"
            " (%s, 'two', 'fetch', 1, now() - interval '1 min'),"
            " ('idle', 'three', 'fetch', 1, now() - interval '1 min')",
            (job["worker_id"],),
        )
    finding = found("workers")
    assert finding.level == WARNING
    assert finding.text == "silent while holding jobs: one gpu, two fetch"


# --- alerts -------------------------------------------------------------------------------------


def test_failures_that_nobody_tells(db: ModuleType) -> None:
    assert found("alerts").level == OK
    with engine.connect() as conn:
        failure_alerts.announce(conn, keep_s=3600.0)
        job = factories.ingest(conn)
        conn.execute("UPDATE ingest_jobs SET status = 'failed' WHERE id = %s", (job["id"],))
        assert found("alerts").level == OK
        conn.execute("UPDATE failure_alerts SET failed_at = now() - interval '4 minutes'")
        finding = found("alerts")
        assert finding.level == WARNING and "though a scheduler sends them" in finding.text
        assert "a command may hang" in finding.remedy
        conn.execute("UPDATE failure_alert_state SET seen_at = now() - interval '4 minutes'")
        finding = found("alerts")
        assert finding.level == WARNING and "1 failure not sent yet, 4" in finding.text
        assert "no scheduler sends them" in finding.text
        assert "set_on_failed()" in finding.remedy and "ON_FAILED" in finding.remedy
        conn.execute("UPDATE failure_alerts SET sent_at = now()")
        assert found("alerts").level == OK


# --- tables that get slow ----------------------------------------------------------------------


def test_dead_rows(own: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with engine.connect() as conn:
        conn.execute("ALTER TABLE workers SET (autovacuum_enabled = false)")
        conn.execute(
            "INSERT INTO workers (worker_id, host_label, queue, pid) VALUES ('w', 'b', 'q', 1)"
        )
        for _ in range(30):
            conn.execute("UPDATE workers SET last_seen = now(), queue = queue || 'x'")
    assert found("dead rows").text == "autovacuum is off for workers"
    with engine.connect() as conn:
        conn.execute("ALTER TABLE workers RESET (autovacuum_enabled)")
    monkeypatch.setattr(table_checks, "DEAD_ROWS_WARN", 5)
    finding = until(lambda: f if (f := found("dead rows")).level == WARNING else None)
    assert "workers (" in finding.text
    assert "VACUUM" in finding.remedy


@pytest.mark.parametrize(
    ("table", "index"),
    [
        ("workflow_node_jobs", "(lease_expires_at)"),
        ("ingest_jobs", "(id) WHERE heartbeat_at IS NOT NULL"),
        ("workers", "(host_label, (last_seen - started_at))"),
    ],
)
def test_indexes_that_make_renewals_slow(own: str, table: str, index: str) -> None:
    assert found("renewals").level == OK
    with engine.connect() as conn:
        conn.execute(f"CREATE INDEX their_own ON {table} {index}".encode())
    assert found("renewals").level == WARNING
    assert "their_own" in found("renewals").text


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
    monkeypatch.setattr(facts, "table_statistics", lambda _: [row])
    assert found("renewals").level == level


def test_hot_updates_are_counted(own: str) -> None:
    with engine.connect() as conn:
        factories.ingest(conn)
        job = transitions.claim_ingest(conn)
        for _ in range(20):
            conn.execute("UPDATE ingest_jobs SET heartbeat_at = now() WHERE id = %s", (job["id"],))
    text = until(lambda: t if "ingest_jobs" in (t := found("renewals").text) else None)
    assert int(text.partition("ingest_jobs ")[2].partition("%")[0]) > 50


def test_psycopg_without_its_c_part_is_slow(
    db: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(facts, "driver", lambda: ("3.2.0", "python", 150004))
    assert found("psycopg") == (
        "psycopg", WARNING, "psycopg 3.2.0 (python), libpq 15.4",
        "install psycopg[binary], which is faster",
    )  # fmt: skip


def test_a_check_that_is_refused_is_one_finding(
    db: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(conn: Any, *_: Any) -> None:
        conn.execute("SELECT * FROM nowhere")

    for name in ("settings", "transactions", "connections", "lapsed", "table_statistics"):
        monkeypatch.setattr(facts, name, refused)
    result = findings()
    assert wrong(result) == dict.fromkeys(
        ("settings", "transactions", "connections", "leases", "dead rows", "renewals"), ERROR
    )
    assert 'relation "nowhere" does not exist' in result["leases"].text


def test_a_schema_in_which_everybody_may_create_functions_is_named(own: str) -> None:
    with engine.connect() as conn:
        conn.execute("GRANT CREATE ON SCHEMA public TO PUBLIC")
        assert found("schema rights").level == WARNING
        assert "REVOKE CREATE ON SCHEMA public FROM PUBLIC" in found("schema rights").remedy
        conn.execute("REVOKE CREATE ON SCHEMA public FROM PUBLIC")
    assert "schema rights" not in findings()
