"""`doctor` finds each fault that is provoked, with its level and remedy."""

from __future__ import annotations

import datetime
from pathlib import Path
from types import ModuleType
from typing import Any

import psycopg
import pytest
from psycopg import sql

from queue_workflows import config, db, queues
from tests.hostile import roles
from tests.support import console, constants, database, factories, sweeps, transitions
from tests.support.findings import ERROR, OK, WARNING, Finding, report, wrong
from tests.support.findings import doctors as found
from tests.support.findings import of_doctor as findings
from tests.support.proxy import Proxy
from tests.support.wait import until

CANARY = "canary77"
NOWHERE = f"postgresql://someone:{CANARY}@127.0.0.1:1/none"


def with_options(dsn: str, options: str) -> str:
    return database.url({**psycopg.conninfo.conninfo_to_dict(dsn), "options": options})


# --- health ------------------------------------------------------------------------------------


def test_a_healthy_installation_has_nothing_to_say(own: str) -> None:
    result = findings()
    assert wrong(result) == {}
    assert list(result) == [
        "package", "psycopg", "database", "server", "fsync", "full_page_writes",
        "synchronous_commit", "autovacuum", "clock", "listen", "transactions", "connections",
        "rights", "schema", "functions", "files", "outputs", "outbox", "runs", "bad rows",
        "leases", "queues", "versions", "lock keys", "schedules", "alerts", "workers", "dead rows",
        "renewals", "run inputs",
    ]  # fmt: skip
    assert not [finding for finding in result.values() if finding.level == OK and finding.remedy]
    assert all(finding.remedy for finding in result.values() if finding.level != OK)


@pytest.mark.parametrize("purpose", ["work", "submit", "read"])
def test_each_role_may_ask_all_questions(own: str, purpose: str) -> None:
    with (
        roles.role(own, purpose) as name,
        database.environment(QUEUE_WORKFLOWS_DB_URL=roles.as_role(own, name)),
    ):
        found = report("doctor", "--for", purpose)
        others = report("doctor", "--for", "migrate")
    assert not [finding for finding in found if "cannot be read" in finding.text]
    files = {"files": WARNING} if purpose == "submit" else {}
    assert wrong({finding.check: finding for finding in found}) == files
    (rights,) = (finding for finding in others if finding.check == "rights")
    assert rights.level == ERROR
    assert "`queue-workflows connect --for migrate --sql`" in rights.remedy


def counts(conn: db.Connection) -> dict[str, int]:
    """How many rows each table has."""
    tables = factories.column(conn, "SELECT tablename FROM pg_tables WHERE schemaname = 'public'")
    return {name: factories.one(conn, f"SELECT count(*) FROM {name}") for name in tables}


def test_nothing_is_written_and_no_connection_is_left(own: str) -> None:
    with db.connect() as conn:
        was = counts(conn)
        assert wrong(findings()) == {}
        assert counts(conn) == was


# --- the database is not there, or not as it should be -----------------------------------------


def test_a_database_that_is_down(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUEUE_WORKFLOWS_DB_URL", NOWHERE)
    result = findings()
    assert list(result) == ["package", "psycopg", "database"]
    assert wrong(result) == {"database": ERROR}
    assert "database none at 127.0.0.1:1 does not answer" in result["database"].text
    assert CANARY not in str(result)


@pytest.mark.usefixtures("db")
def test_a_database_that_is_frozen(dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with Proxy(dsn) as proxy:
        proxy.freeze()
        monkeypatch.setenv("QUEUE_WORKFLOWS_DB_URL", proxy.dsn)
        constants.put(monkeypatch, "db.database_url.CONNECT_TIMEOUT_S", 1)
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
    assert result["schema"].text == "there is none"
    assert "queue-workflows migrate" in result["schema"].remedy


def test_a_schema_that_is_newer_than_the_code(own: str) -> None:
    with db.connect() as conn:
        conn.execute("INSERT INTO queue_schema_version (version) VALUES (9999)")
    assert wrong(findings()) == {"schema": WARNING}


def test_functions_and_columns_that_are_missing(own: str) -> None:
    with db.connect() as conn:
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
    with db.connect() as conn:
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
    assert blind["schema"].text == "its version cannot be read"
    assert "GRANT SELECT ON queue_schema_version" in blind["schema"].remedy
    assert wrong(whole) == {}
    assert wrong(partly) == {
        "rights": ERROR, "runs": ERROR, "bad rows": ERROR, "schedules": ERROR,
    }  # fmt: skip
    for lacking in ("UPDATE on workers", "SELECT on workflow_runs", "USAGE on workflow_node_ev"):
        assert lacking in partly["rights"].text


def test_a_folder_that_nodes_cannot_write_to(
    own: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, good = tmp_path / "file", tmp_path / "runs" / "deep"
    file.touch()
    for name, folder in (("OUTPUTS_DIR", file / "outputs"), ("OUT_ROOTS", file)):
        monkeypatch.setenv("QUEUE_WORKFLOWS_OUTPUTS_DIR", str(good))
        assert findings()["outputs"].level == OK
        monkeypatch.setenv(f"QUEUE_WORKFLOWS_{name}", str(folder))
        outputs = findings()["outputs"]
        assert outputs.level == WARNING
        assert f"{folder} cannot be written: Not a directory" in outputs.text
    assert not good.parent.exists()
    config.register_node("render", dict)
    assert findings()["outputs"].level == ERROR
    config.reset_for_tests()
    with db.connect() as conn:
        for host, level in (("elsewhere", WARNING), (config.host_label(), ERROR)):
            conn.execute(
                "INSERT INTO workers (worker_id, host_label, queue, pid, state)"
                " VALUES (%s, %s, 'cpu', 1, 'idle')",
                (f"{host}:1", host),
            )
            assert findings()["outputs"].level == level
    monkeypatch.setenv("QUEUE_WORKFLOWS_OUTPUTS_DIR", "~nobody-has-this-name/runs")
    assert findings()["outputs"].level == ERROR
    assert "its home folder does not exist" in findings()["outputs"].text


def test_a_role_that_may_only_submit_while_runs_may_keep_files_anywhere(
    own: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    role = f"{psycopg.conninfo.conninfo_to_dict(own)['dbname']}_submitter"
    name = sql.Identifier(role)
    seen: list[Finding] = []
    with db.connect() as conn:
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


def test_commits_that_are_not_durable(own: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUEUE_WORKFLOWS_DB_URL", with_options(own, "-c synchronous_commit=off"))
    finding = found("synchronous_commit")
    assert (finding.level, finding.remedy) == (ERROR, "set synchronous_commit = on")
    monkeypatch.setenv("QUEUE_WORKFLOWS_DB_URL", with_options(own, "-c synchronous_commit=local"))
    assert found("synchronous_commit").level == OK


# --- work that is not done ---------------------------------------------------------------------


@pytest.mark.usefixtures("db")
def test_events_that_nobody_dispatches() -> None:
    with db.connect() as conn:
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


@pytest.mark.usefixtures("db")
def test_a_run_that_nobody_starts() -> None:
    with db.connect() as conn:
        factories.run(conn, id="r", status="queued")
        assert found("runs").level == OK
        conn.execute("UPDATE workflow_runs SET queued_at = now() - interval '1 min'")
        assert found("runs").level == WARNING
        assert "run r " in found("runs").text


@pytest.mark.usefixtures("db")
def test_leases_that_nobody_takes_back() -> None:
    with db.connect() as conn:
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
    with db.connect() as conn:
        age = datetime.timedelta(minutes=1)
        now = factories.one(conn, "SELECT now()")
        factories.node(conn, queue="gpu", created_at=now - age)
        for _ in range(2):
            factories.ingest(conn, queue="mail", created_at=now - age)
        factories.ingest(conn, queue="later", available_at=now + age, created_at=now - age)


@pytest.mark.usefixtures("db")
def test_versions_that_no_live_worker_has() -> None:
    serve("cpu", state="idle")
    with db.connect() as conn:
        ids = [factories.node(conn, required_version=text)["id"] for text in ("a@1", "b@2", "b@2")]
        factories.node(conn)
        conn.execute('UPDATE workers SET detail = detail || \'{"claim": {"versions": ["a@1"]}}\'')
    (row,) = [finding for finding in report("doctor") if finding.check == "versions"]
    assert row.level == WARNING
    assert row.text.startswith("no live worker of queue cpu has b@2; jobs that need it wait, ")
    assert row.text.endswith(f": {ids[1]}, {ids[2]}")
    assert "upgrade" in row.remedy
    with db.connect() as conn:
        conn.execute('UPDATE workers SET detail = \'{"claim": {"versions": ["b@2", "a@1"]}}\'')
    (row,) = [finding for finding in report("doctor") if finding.check == "versions"]
    assert row.level == OK


@pytest.mark.usefixtures("db")
def test_lock_keys_that_passed_over_a_queue_without_a_worker() -> None:
    serve("mail", state="idle")
    with db.connect() as conn:
        for queue in ("bin", "mail"):
            factories.ingest(conn, queue=queue, lock_key="k")
        sweeps.unserved(conn, 30)
    (row,) = [finding for finding in report("doctor") if finding.check == "lock keys"]
    assert row.level == WARNING
    assert row.text == (
        "no worker takes the jobs of queue bin, so the lock keys of 1 job passed to others"
    )
    assert "start `queue-claim-worker --queue=bin`, " in row.remedy


def unserved() -> dict[str, str]:
    rows = [finding for finding in report("doctor") if finding.check == "queues"]
    return {row.text.partition(":")[0]: f"{row.text}; {row.remedy}" for row in rows if row.remedy}


def serve(queue: str, **columns: Any) -> None:
    values = {"host_label": "box", "queue": queue, "pid": 1}
    with db.connect() as conn:
        conn.execute("DELETE FROM workers")
        factories.insert(conn, "workers", worker_id="w", **values, **columns)


@pytest.mark.usefixtures("waiting")
def test_queues_without_a_live_worker() -> None:
    assert list(unserved()) == ["gpu", "mail"]
    assert "2 due jobs and no live worker; start `queue-claim-worker" in unserved()["mail"]
    for state in ("idle", "busy", "throttled"):
        serve("mail", state=state)
        assert list(unserved()) == ["gpu"]
    for state in ("stopped", "dead"):
        serve("mail", state=state)
        assert "no live worker" in unserved()["mail"]
    for state in ("parked", "paused", "draining"):
        serve("mail", state=state)
        turn_on = "`queue-worker-control --queue=mail --on`"
        assert f"its workers take none; {turn_on}" in unserved()["mail"]
    past = datetime.datetime(2020, 1, 1, tzinfo=datetime.timezone.utc)
    serve("mail", state="idle", last_seen=past)
    assert "no live worker" in unserved()["mail"]


@pytest.mark.usefixtures("waiting")
def test_a_pause_comes_before_the_lack_of_a_worker() -> None:
    queues.pause("mail", by="bob")
    for state, lacks in (
        (None, "no live worker; `queue-workflows queues resume mail`, then start `queue-claim"),
        ("parked", "its workers take none; `queue-workflows queues resume mail`, then `queue-wor"),
    ):
        if state is not None:
            serve("mail", state=state)
        text = unserved()["mail"]
        assert text.startswith("mail: 2 due jobs, the first for 1 min ")
        assert f": queue mail is paused by bob; also {lacks}" in text
    serve("mail", state="idle")
    assert list(unserved()) == ["gpu"], "a pause alone is no fault"


@pytest.mark.usefixtures("waiting")
def test_a_worker_of_an_older_engine_serves_by_its_heartbeat() -> None:
    with db.connect() as conn:
        conn.execute("INSERT INTO worker_heartbeats (host_label, queue) VALUES ('old', 'mail')")
    assert list(unserved()) == ["gpu"]


@pytest.mark.usefixtures("db")
def test_jobs_that_came_just_now_are_given_time() -> None:
    with db.connect() as conn:
        factories.ingest(conn, queue="mail")
    assert unserved() == {}


@pytest.mark.usefixtures("db")
def test_workers_that_went_silent() -> None:
    with db.connect() as conn:
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


@pytest.mark.usefixtures("db")
def test_failures_that_nobody_tells() -> None:
    assert found("alerts").level == OK
    with db.connect() as conn:
        factories.alert_sender(conn)
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
    with db.connect() as conn:
        conn.execute(f"CREATE INDEX their_own ON {table} {index}".encode())
    assert found("renewals").level == WARNING
    assert "their_own" in found("renewals").text


def test_hot_updates_are_counted(own: str) -> None:
    with db.connect() as conn:
        factories.ingest(conn)
        job = transitions.claim_ingest(conn)
        for _ in range(20):
            conn.execute("UPDATE ingest_jobs SET heartbeat_at = now() WHERE id = %s", (job["id"],))
    text = until(lambda: t if "ingest_jobs" in (t := found("renewals").text) else None)
    assert int(text.partition("ingest_jobs ")[2].partition("%")[0]) > 50


def test_a_schema_in_which_everybody_may_create_functions_is_named(own: str) -> None:
    with db.connect() as conn:
        conn.execute("GRANT CREATE ON SCHEMA public TO PUBLIC")
        assert found("schema rights").level == WARNING
        assert "REVOKE CREATE ON SCHEMA public FROM PUBLIC" in found("schema rights").remedy
        conn.execute("REVOKE CREATE ON SCHEMA public FROM PUBLIC")
    assert "schema rights" not in findings()


def test_rights_of_public_are_named_until_the_printed_script_has_run(own: str) -> None:
    connect = ("connect", "--for", "work", "--sql")
    with db.connect() as conn:
        for grant in (
            "EXECUTE ON FUNCTION queue_workflows_audit",
            "SELECT ON workflow_runs",
            "USAGE ON SEQUENCE ingest_jobs_seq_seq",
        ):
            conn.execute(f"GRANT {grant} TO PUBLIC".encode())
        rights = found("rights")
        assert rights.level == WARNING
        assert rights.text == (
            "PUBLIC may execute 1 function (queue_workflows_audit(ingest_jobs,text)); "
            "PUBLIC has 2 rights (USAGE on ingest_jobs_seq_seq, ...)"
        )
        assert f"`queue-workflows {' '.join(connect)}`" in rights.remedy
        script = console.printed(*connect)
        assert script.splitlines() == [
            "REVOKE EXECUTE ON FUNCTION queue_workflows_audit(ingest_jobs,text) FROM PUBLIC;",
            "REVOKE USAGE ON SEQUENCE ingest_jobs_seq_seq FROM PUBLIC;",
            "REVOKE SELECT ON TABLE workflow_runs FROM PUBLIC;",
        ]
        conn.execute(script.encode())
    assert found("rights").level == OK


def test_a_function_whose_owner_is_not_that_of_the_tables_is_named(own: str) -> None:
    function = "queue_workflows_age_s(timestamp with time zone)"
    with roles.role(own, "read") as name, db.connect() as conn:
        conn.execute(f"ALTER FUNCTION {function} OWNER TO {name}".encode())
        finding = found("schema rights")
        assert finding.level == WARNING
        assert f"{name} owns 1 function ({function})" in finding.text
        assert f"ALTER FUNCTION {function} OWNER TO" in finding.remedy
        conn.execute(f"ALTER FUNCTION {function} OWNER TO CURRENT_USER".encode())
    assert "schema rights" not in findings()
