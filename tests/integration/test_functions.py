"""The set of SQL functions and triggers: complete, installed by checksum, verified."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg import sql

from queue_workflows import db, errors, migrations
from queue_workflows.__main__ import main
from tests.support import (
    database,
    factories,
    findings,
    installed_functions,
    migration_folders,
    schema_snapshot,
    wait,
)
from tests.support.clocks import Clock

SUPPORT = Path(schema_snapshot.__file__).parent
SQL = migrations.dir().parent / "sql"
OF_0_3_0 = {"notify_node_job_ready", "notify_ingest_job_ready", "notify_worker_control"}
LAST = db.REQUIRED_VERSION
LEDGER, OBJECTS = "queue_schema_version", "queue_schema_objects"
LEASE = """
SELECT concat_ws(' ', id, seq, claim_no, coalesce(worker_id, '-'),
       coalesce(to_jsonb(j) ->> 'required_model', '-'),
       CASE WHEN lease_expires_at IS NULL THEN 'none'
            WHEN lease_expires_at > now() + interval '8 days' THEN 'long'
            WHEN lease_expires_at > now() + interval '1 day' THEN '7d' ELSE 'lapsed' END, status)
  FROM {} j ORDER BY seq
"""


@pytest.fixture
def change(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Replace the set by one with other texts: `change(functions="...")` appends to a part."""

    def call(**more: str) -> None:
        texts = {part: installed_functions.text(part) + text for part, text in more.items()}
        installed_functions.replace(monkeypatch, **texts)

    return call


def record(conn: db.Connection) -> dict[str, Any]:
    rows = conn.execute("SELECT * FROM queue_schema_objects").fetchall()
    return {row["part"]: row for row in rows}


def assert_is_installed() -> None:
    """The installed set is that of this process."""
    with db.connect() as conn:
        found = {part: row["checksum"] for part, row in record(conn).items()}
    assert found == {part: installed_functions.checksum(part) for part in found}
    assert {*found} == {*installed_functions.PARTS}


def is_ready() -> bool:
    """Whether a worker would start now, and not wait."""
    waits: list[float] = []
    return db.wait_until_ready(stopped=lambda: bool(waits), pause=waits.append)


texts = installed_functions.problems


# --- every text once ---------------------------------------------------------------------------


def test_every_function_and_trigger_of_the_database_has_one_text(own: str) -> None:
    of_parts = {part: installed_functions.names(part) for part in installed_functions.PARTS}
    named = [name for names in of_parts.values() for name in names]
    overloaded = ["queue_workflows_must_end", "queue_workflows_record"]
    assert sorted(named) == sorted([*{*named}, *overloaded]), "one text each, but for overloads"
    with db.connect() as conn:
        there = set(
            factories.column(
                conn,
                "SELECT proname FROM pg_proc WHERE pronamespace = 'public'::regnamespace"
                " UNION SELECT tgname FROM pg_trigger WHERE NOT tgisinternal",
            )
        )
    assert there - OF_0_3_0 - {"worker_control_notify"} == set(named)
    assert {part: len(names) for part, names in of_parts.items()} == {
        "functions": 130,
        "triggers": 40,
    }


def test_migrations_after_0_3_0_define_no_function_and_no_trigger() -> None:
    made = re.compile(r"CREATE\s+(OR REPLACE\s+)?(CONSTRAINT\s+)?(FUNCTION|TRIGGER)", re.IGNORECASE)
    ups = migration_folders.ours()
    for path in ups[12:]:
        assert not made.search(path.read_text()), path.name
    assert made.search(ups[5].read_text())


def test_every_function_has_a_comment_and_none_names_a_migration() -> None:
    files = sorted(SQL.rglob("*.sql"))
    assert len(files) > 20
    for path in files:
        text = path.read_text()
        unnamed = re.sub(r"[Dd]ecision 00\d\d|decisions/00\d\d", "", text)
        assert not re.search(r"--.*\b00[123]\d\b", unnamed), path.name
        for match in re.finditer(r"^CREATE OR REPLACE FUNCTION", text, re.MULTILINE):
            before = text[: match.start()].splitlines()[-1]
            assert before.startswith("-- "), f"{path.name}: {text[match.start() :][:80]}"


def test_every_function_definition_is_valid(own: str) -> None:
    with db.connect() as conn, conn.transaction(force_rollback=True):
        conn.execute(
            "SET LOCAL check_function_bodies = on; SET LOCAL search_path = public, pg_temp"
        )
        for part in installed_functions.PARTS:
            conn.execute(installed_functions.text(part).encode())


def test_no_function_is_executable_by_everybody(own: str) -> None:
    with db.connect() as conn:
        assert schema_snapshot.snapshot(conn)["public rights"] == {OBJECTS: "SELECT"}


def test_rows_of_0_3_0_are_converted_as_before(empty: str, tmp_path: Path) -> None:
    db.bootstrap(migrations_dir=migration_folders.chain_up_to(12, tmp_path / "to12"))
    with db.connect() as conn:
        conn.execute((SUPPORT / "takeover_rows.sql").read_bytes())
        db.bootstrap()
        found = [
            line
            for table in ("workflow_node_jobs", "ingest_jobs")
            for line in factories.column(conn, LEASE.format(table))
        ]
    assert found == (SUPPORT / "takeover_rows.txt").read_text().splitlines()


# --- installing --------------------------------------------------------------------------------


def test_a_changed_part_is_installed_and_the_other_is_left(
    own: str, change: Callable[..., None]
) -> None:
    with db.connect() as conn:
        before = record(conn)
        change(functions="\n-- more\n")
        assert db.bootstrap() == []
        after = record(conn)
        assert after["triggers"] == before["triggers"]
        assert after["functions"]["checksum"] != before["functions"]["checksum"]
        assert after["functions"]["objects"] == before["functions"]["objects"]
    assert_is_installed()


@pytest.mark.parametrize("part", ["functions", "triggers"])
def test_only_triggers_wait_for_who_works_with_the_tables(
    own: str, change: Callable[..., None], part: str
) -> None:
    change(**{part: "\n-- more\n"})
    with db.connect(autocommit=False) as worker, db.connect() as conn:
        factories.ingest(worker)
        installing = threading.Thread(target=db.bootstrap)
        installing.start()
        waiting = (
            "SELECT count(*) FROM pg_locks WHERE NOT granted AND relation = 'ingest_jobs'::regclass"
        )
        wait.until(lambda: not installing.is_alive() or factories.one(conn, waiting) > 0)
        assert installing.is_alive() == (part == "triggers")
        worker.commit()
        installing.join()


def test_a_reader_delays_the_installer_but_no_writer(own: str, change: Callable[..., None]) -> None:
    change(triggers="\n-- more\n")
    with db.connect(autocommit=False) as reader, db.connect() as conn:
        reader.execute("SELECT FROM lock_turns")
        installing = threading.Thread(target=db.bootstrap)
        installing.start()
        waiting = (
            "SELECT count(*) FROM pg_locks WHERE NOT granted AND relation = 'lock_turns'::regclass"
        )
        wait.until(lambda: factories.one(conn, waiting) > 0)
        conn.execute("SET statement_timeout = '2s'")
        factories.ingest(conn)
        assert installing.is_alive()
        reader.commit()
        installing.join(30)
        assert not installing.is_alive()
    assert_is_installed()


def test_a_pre_release_is_below_its_release(own: str) -> None:
    ready: list[str] = []
    with db.connect() as conn:
        for version in ("0.3.9", "0.4.0rc1", "0.4", "0.4.0", "0.4.1.dev3", "0.4.1", "0.10"):
            conn.execute(
                f"UPDATE {OBJECTS} SET package_version = %s, checksum = 'theirs'".encode(),
                (version,),
            )
            ready += [version] if is_ready() else []
    assert ready == ["0.4", "0.4.0", "0.4.1.dev3", "0.4.1", "0.10"]


def test_functions_of_a_newer_package_stay_and_are_accepted(
    own: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with db.connect() as conn:
        conn.execute(f"UPDATE {OBJECTS} SET package_version = '99.1rc1', checksum = 'theirs'")
        assert db.bootstrap() == []
        assert {row["checksum"] for row in record(conn).values()} == {"theirs"}
    assert is_ready()
    found = [one for one in findings.report("doctor") if one.check == "functions"]
    assert {(each.level, each.remedy) for each in found} == {
        ("warning", "upgrade queue_workflows here")
    }
    assert main(["migrate", "--verify"]) == 1
    assert "2 problems; upgrade queue_workflows here" in capfd.readouterr().out


def test_functions_of_an_older_package_are_replaced_and_awaited(own: str) -> None:
    with db.connect() as conn:
        conn.execute(f"UPDATE {OBJECTS} SET package_version = '0.3.9', checksum = 'theirs'")
        assert not is_ready()
        assert "are those of queue_workflows 0.3.9, not of this 0.4.0" in texts(conn)[0]
        assert db.bootstrap() == []
        assert is_ready()
        assert texts(conn) == []


def test_a_set_that_fails_leaves_no_tables_without_it(
    empty: str, change: Callable[..., None]
) -> None:
    change(triggers="\nSELECT 1 / 0;\n")
    with pytest.raises(errors.MigrationFailed, match="the triggers: division by zero"):
        db.bootstrap()
    assert db.current_schema_version() == 0
    with db.connect() as conn:
        assert set(schema_snapshot.snapshot(conn)["tables"]) == set()


@pytest.mark.parametrize("number", [1, 2])
def test_a_database_that_goes_away_before_any_check_is_waited_for(
    own: str, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    opened: list[object] = []
    connect = psycopg.Connection.connect.__func__  # pyright: ignore[reportFunctionMemberAccess]

    def failing_once(cls: type[psycopg.Connection[Any]], *given: Any, **more: Any) -> Any:
        opened.append(cls)
        if len(opened) == number:
            raise psycopg.OperationalError("the database system is shutting down")
        return connect(cls, *given, **more)

    monkeypatch.setattr(psycopg.Connection, "connect", classmethod(failing_once))
    pauses: list[float] = []
    assert db.wait_until_ready(stopped=lambda: False, pause=pauses.append)
    assert len(pauses) == 1


def test_a_process_with_nothing_to_install_needs_only_read_rights(own: str) -> None:
    role = f"{psycopg.conninfo.conninfo_to_dict(own)['dbname']}_reader"
    name = sql.Identifier(role)
    with db.connect() as conn:
        conn.execute(sql.SQL("CREATE ROLE {} LOGIN").format(name))
        try:
            conn.execute("REVOKE CREATE ON SCHEMA public FROM PUBLIC")
            conn.execute(sql.SQL("GRANT SELECT ON queue_schema_version TO {}").format(name))
            parts = {**psycopg.conninfo.conninfo_to_dict(own), "options": f"-c role={role}"}
            with database.environment(QUEUE_WORKFLOWS_DB_URL=database.url(parts)):
                db.close_pool()
                assert db.bootstrap() == []
                assert db.wait_until_ready(stopped=lambda: False, pause=lambda _: None)
                db.close_pool()
        finally:
            conn.execute(sql.SQL("DROP OWNED BY {}").format(name))
            conn.execute(sql.SQL("DROP ROLE {}").format(name))


def test_a_worker_waits_until_its_functions_are_there(
    own: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with db.connect() as conn:
        conn.execute(f"DELETE FROM {OBJECTS} WHERE part = 'triggers'")
        now, later_s = time.monotonic, Clock(0.0)
        with monkeypatch.context() as patch:
            patch.setattr(time, "monotonic", lambda: now() + later_s())
            with pytest.raises(errors.SchemaTimeout, match="functions are missing or of an older"):
                db.wait_until_ready(
                    stopped=lambda: False, pause=lambda _: setattr(later_s, "now", 300.0)
                )
        pauses: list[float] = []

        def pause(seconds: float) -> None:
            pauses.append(seconds)
            db.bootstrap()

        assert db.wait_until_ready(stopped=lambda: False, pause=pause)
        assert pauses == [0.5]
    assert f"waiting for schema version {LAST}" in caplog.text


def test_a_downgrade_forgets_the_set_and_takes_its_objects(own: str) -> None:
    with db.connect() as conn:
        assert db.downgrade(to_version=12) == [*range(LAST, 12, -1)]
        left = schema_snapshot.snapshot(conn)
        assert {name.partition("(")[0] for name in left["functions"]} == OF_0_3_0
        assert OBJECTS not in left["tables"]


def test_a_downgrade_that_keeps_the_record_empties_it(own: str, tmp_path: Path) -> None:
    folder = migration_folders.chain_up_to(LAST, tmp_path / "more")
    name = f"_{LAST + 1:04}_more"
    migration_folders.write_chain(folder, **{name: "SELECT 1", f"{name}_down": "SELECT 1"})
    assert db.bootstrap(migrations_dir=folder) == [LAST + 1]
    with db.connect() as conn:
        assert len(record(conn)) == 2
        assert db.downgrade(to_version=LAST, migrations_dir=folder) == [LAST + 1]
        assert record(conn) == {}
        db.bootstrap()
        assert len(record(conn)) == 2


def test_without_the_tables_of_alerts_a_run_and_a_job_can_still_fail(own: str) -> None:
    with db.connect() as conn:
        run_id, job = factories.run(conn), factories.ingest(conn)
        assert db.downgrade(to_version=14) == [*range(LAST, 14, -1)]
        conn.execute("UPDATE workflow_runs SET status = 'failed' WHERE id = %s", (run_id,))
        conn.execute("UPDATE ingest_jobs SET status = 'failed' WHERE id = %s", (job["id"],))
        assert db.bootstrap() == [*range(15, LAST + 1)]
        assert texts(conn) == []


def test_an_apps_own_chain_installs_nothing(own: str, tmp_path: Path) -> None:
    folder = migration_folders.write_chain(
        tmp_path / "c", _0001_a="SELECT 1", _0001_a_down="SELECT 1"
    )
    with db.connect() as conn:
        conn.execute(f"DELETE FROM {OBJECTS}")
        db.bootstrap(migrations_dir=folder, version_table="theirs")
        assert record(conn) == {}
        db.downgrade(migrations_dir=folder, version_table="theirs")


# --- verifying ---------------------------------------------------------------------------------

DAMAGE = {
    "DROP FUNCTION queue_workflows_off_policy(text, text)": (
        "function queue_workflows_off_policy(p_host text, p_queue text) is missing"
    ),
    "ALTER FUNCTION queue_workflows_hold_ingest() RESET search_path": (
        "function queue_workflows_hold_ingest() was changed after it was installed"
    ),
    "CREATE OR REPLACE FUNCTION queue_workflows_no_empty_model() RETURNS trigger LANGUAGE plpgsql"
    " AS 'BEGIN RETURN NEW; END'": (
        "function queue_workflows_no_empty_model() was changed after it was installed"
    ),
    "ALTER TABLE workflow_runs DISABLE TRIGGER workflow_runs_guard": (
        "trigger workflow_runs.workflow_runs_guard was changed after it was installed"
    ),
    "DROP TRIGGER ingest_jobs_hold ON ingest_jobs": (
        "trigger ingest_jobs.ingest_jobs_hold is missing"
    ),
}


@pytest.mark.parametrize("statement", DAMAGE)
def test_an_object_that_somebody_changed_is_named_and_migrate_installs_it_again(
    own: str, capfd: pytest.CaptureFixture[str], statement: str
) -> None:
    assert main(["migrate", "--verify"]) == 0
    assert "0 problems" in capfd.readouterr().out
    with db.connect() as conn:
        before = schema_snapshot.snapshot(conn)
        conn.execute(statement.encode())
        assert texts(conn) == [DAMAGE[statement]]
        (finding,) = [one for one in findings.report("doctor") if one.check == "functions"]
        assert finding.level == "error" and DAMAGE[statement] in finding.text
        assert main(["migrate", "--verify"]) == 1
        out = capfd.readouterr().out
        assert DAMAGE[statement] in out and "1 problem; `queue-workflows migrate` fixes it" in out
        assert main(["migrate", "--dry-run"]) == 0
        assert "would install the " in capfd.readouterr().out
        assert texts(conn) == [DAMAGE[statement]]
        assert main(["migrate"]) == 0
        assert re.search(r"; installed|: installed", capfd.readouterr().out)
        assert texts(conn) == []
        assert schema_snapshot.snapshot(conn) == before
        disabled = "SELECT count(*) FROM pg_trigger WHERE tgenabled = 'D'"
        assert factories.one(conn, disabled) == 0
    assert main(["migrate"]) == 0
    assert "nothing to do" in capfd.readouterr().out


def test_verify_names_what_an_empty_database_lacks(
    empty: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["migrate", "--verify", "--json"]) == 1
    found = json.loads(capfd.readouterr().out)
    assert found["version"] == 0
    names = [path.stem for path in migration_folders.ours()]
    assert names[12] == "0013_release_0_4"
    assert found["problems"] == [
        *(f"migration {name} is not applied" for name in names),
        "the functions are not installed",
        "the triggers are not installed",
    ]


def test_verify_of_an_older_version_names_what_is_applied(
    own: str, capfd: pytest.CaptureFixture[str]
) -> None:
    *_, before, newest = (path.stem for path in migration_folders.ours())
    older = str(int(before[:4]))
    assert main(["migrate", "--verify", "--to", older]) == 1
    out = capfd.readouterr().out
    assert f"migration {newest} is applied\n" in out
    assert f"1 problem; `queue-workflows migrate --to {older}` fixes it" in out


def test_the_printed_sql_makes_the_schema_and_its_functions(
    empty: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["migrate", "--sql"]) == 0
    printed = capfd.readouterr().out
    with db.connect() as conn:
        conn.execute(printed.encode())
        made = schema_snapshot.snapshot(conn)
        conn.execute("DROP SCHEMA public CASCADE; CREATE SCHEMA public")
        db.bootstrap()
        whole = schema_snapshot.snapshot(conn)
    missing = {name for _, name, _, _ in schema_snapshot.difference(made, whole)}
    assert all(LEDGER in name for name in missing)
