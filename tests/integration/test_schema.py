"""The contract's tables, and migration chains that any number of processes apply and revert."""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Generator
from pathlib import Path
from types import ModuleType
from typing import Any

import psycopg
import pytest

from queue_workflows import db, errors, migrations
from tests.support import (
    database,
    factories,
    installed_functions,
    migration_folders,
    schema_snapshot,
    tabled,
    timeouts,
    transitions,
)

HEAD = db.REQUIRED_VERSION
VERSIONS = [*range(1, HEAD + 1)]

# The contract's §4, table by table: column → type and default, as the contract writes them.
CONTRACT = {
    "workflow_runs": """id text PK · parcel_id text · workflow_name text · status text ·
        priority smallint 100 · current_step_id text · progress_pct real 0 · steps_done jsonb [] ·
        context jsonb {} · input_spec jsonb · error text · out_dir text · mode text 'step' ·
        resume_count smallint 0 · created_at timestamptz · updated_at timestamptz ·
        queued_at timestamptz · started_at timestamptz · finished_at timestamptz""",
    "workflow_run_files": """id bigserial · run_id text · step_id text · rel_path text · kind text ·
        size_bytes bigint · is_primary bool · created_at timestamptz""",
    "workflow_node_jobs": """id text PK · run_id text · node_id text · node_module text ·
        pipeline_name text · queue text · required_model text · status text ·
        priority smallint 100 · worker_lane smallint · inputs jsonb {} · resolved_inputs jsonb ·
        input_spec jsonb · context_delta jsonb {} · host_label text · celery_task_id text ·
        error text · vm_rss_mb_peak int · seconds double · created_at timestamptz ·
        started_at timestamptz · finished_at timestamptz · claimed_by text ·
        lease_expires_at timestamptz · watchdog_retries int 0""",
    "workflow_input_submissions": """id text PK · run_id text · node_id text · value jsonb ·
        status text 'pending' · error text · claimed_at timestamptz · created_at timestamptz ·
        processed_at timestamptz""",
    "workflow_dispatch_events": """id bigserial · run_id text · node_id text · kind text ·
        processed_at timestamptz · error text · attempts smallint 0 · created_at timestamptz""",
    "worker_heartbeats": """host_label text PK · queue text PK · concurrency int ·
        current_model text · known_models text[] {} · last_seen timestamptz ·
        last_flagged_dead_at timestamptz""",
    "ingest_jobs": """id text PK · task_name text · queue text · reason text 'tick' · status text ·
        priority smallint 100 · result jsonb · error text · seconds double · claimed_by text ·
        lease_expires_at timestamptz · created_at timestamptz · started_at timestamptz ·
        finished_at timestamptz · args jsonb {}""",
    "workflow_node_events": """id bigserial · run_id text · node_id text · job_id text ·
        attempt smallint 0 · event_type text · host_label text · queue text · model text ·
        elapsed_s double · error text · detail jsonb {} · created_at timestamptz""",
    "worker_controls": """host_label text PK · queue text PK · desired_state text 'on' ·
        stop_policy text 'hard' · requested_by text · updated_at timestamptz""",
}
TYPES = {
    "timestamptz": "timestamp with time zone",
    "double": "double precision",
    "int": "integer",
    "bool": "boolean",
    "bigserial": "bigint",
}
CHECKS = {
    "workflow_runs_mode_check": {"step", "node"},
    "workflow_node_jobs_queue_check": {"cpu", "gpu"},
    "workflow_node_jobs_status_check": {
        "queued", "running", "completed", "failed", "cancelled", "awaiting_input", "skipped",
    },
    "workflow_node_jobs_check": {"gpu"},
    "workflow_input_submissions_status_check": {"pending", "processing", "processed", "failed"},
    "workflow_dispatch_events_kind_check": {"completed", "failed", "awaiting_input"},
    "ingest_jobs_status_check": {"queued", "running", "completed", "failed", "cancelled"},
    "workflow_node_events_type_check": {
        "claimed", "model_load_start", "model_load_done", "progress_beat", "stall_suspected",
        "stall_trip", "gpu_health_trip", "budget_trip", "requeued", "reassigned", "lease_renew",
        "completed", "failed", "cancelled", "error",
    },
    "worker_controls_desired_state_check": {"on", "off"},
}  # fmt: skip
INDEXES = {
    "workflow_runs": "claim parcel_created status",
    "workflow_run_files": "run kind",
    "workflow_node_jobs": "claim run status model pipeline host_label celery_task_id lease",
    "workflow_input_submissions": "pending",
    "workflow_dispatch_events": "unprocessed",
    "worker_heartbeats": "last_seen flagged_dead",
    "ingest_jobs": "claim lease",
    "workflow_node_events": "node created",
}
TRIGGERS = {
    "node_job_ready_notify": ("workflow_node_jobs", "notify_node_job_ready"),
    "ingest_job_ready_notify": ("ingest_jobs", "notify_ingest_job_ready"),
    "worker_control_notify": ("worker_controls", "notify_worker_control"),
}
PLAIN = {
    "workflow_runs": {"workflow_name": "w"},
    "workflow_run_files": {"run_id": "r", "rel_path": "a.txt"},
    "workflow_node_jobs": {"run_id": "r", "node_id": "n", "node_module": "m", "queue": "cpu"},
    "workflow_input_submissions": {"run_id": "r", "node_id": "n", "value": {"a": 1}},
    "workflow_dispatch_events": {"run_id": "r", "node_id": "n", "kind": "completed"},
    "worker_heartbeats": {"host_label": "h", "queue": "anything"},
    "ingest_jobs": {"task_name": "t", "queue": "anything"},
    "workflow_node_events": {"run_id": "r", "node_id": "n", "event_type": "claimed"},
    "worker_controls": {"host_label": "h", "queue": "cpu"},
}


@pytest.fixture
def fresh(
    spare: str, clean_process: None, monkeypatch: pytest.MonkeyPatch
) -> Generator[ModuleType]:
    """`queue_workflows.db` on a database without our schema."""
    from queue_workflows import db

    with psycopg.connect(spare, autocommit=True) as conn:
        conn.execute("DROP SCHEMA public CASCADE; CREATE SCHEMA public")
    monkeypatch.setenv("QUEUE_WORKFLOWS_DB_URL", spare)
    yield db
    db.close_pool()


@pytest.fixture(scope="module")
def at_12(spare: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The catalogue of a database with 0001 to 0012."""
    from queue_workflows import db

    folder = migration_folders.chain_up_to(12, tmp_path_factory.mktemp("chain") / "to12")
    with database.environment(QUEUE_WORKFLOWS_DB_URL=spare), db.connect() as conn:
        conn.execute("DROP SCHEMA public CASCADE; CREATE SCHEMA public")
        db.bootstrap(migrations_dir=folder)
        return schema_snapshot.snapshot(conn)


# --- the contract's tables ---------------------------------------------------------------------


def test_0001_to_0012_give_exactly_the_contracts_columns(at_12: schema_snapshot.Snapshot) -> None:
    for table in CONTRACT:
        with tabled.case(table):
            found = {
                name.split(".")[1]: text
                for name, text in at_12["columns"].items()
                if name.startswith(f"{table}.")
            }
            expected = {entry.split()[0]: entry.split()[1:] for entry in CONTRACT[table].split("·")}
            assert found.keys() == expected.keys()
            for column, (kind, *default) in expected.items():
                assert found[column].split(" NOT NULL")[0].split(" DEFAULT")[0] == TYPES.get(
                    kind, kind
                )
                if default and default != ["PK"]:
                    assert f"DEFAULT {_literal(default[0])}" in found[column]
                if kind == "bigserial":
                    assert "DEFAULT nextval(" in found[column]
            keys = {
                column
                for column, words in expected.items()
                if words[-1:] in (["PK"], ["bigserial"])
            }
            primary = at_12["constraints"][f"{table}.{table}_pkey"]
            assert set(re.findall(r"\w+", primary.removeprefix("PRIMARY KEY"))) == keys


def _literal(text: str) -> str:
    if text in ("[]", "{}"):
        return f"'{text}'"
    return text


def test_no_other_table_is_made(at_12: schema_snapshot.Snapshot) -> None:
    tables = {name.split(".")[0] for name in at_12["columns"]}
    assert tables == CONTRACT.keys() | {"queue_schema_version"}


def test_the_checks_are_there_with_exactly_the_contracts_values(
    at_12: schema_snapshot.Snapshot,
) -> None:
    found = {
        name.split(".")[1]: set(re.findall(r"'(\w+)'", text))
        for name, text in at_12["constraints"].items()
        if text.startswith("CHECK")
    }
    assert found == CHECKS
    models = at_12["constraints"]["workflow_node_jobs.workflow_node_jobs_check"]
    assert "required_model IS NULL" in models


def test_the_named_indexes_are_there(at_12: schema_snapshot.Snapshot) -> None:
    expected = {f"{t}_{name}_idx" for t, names in INDEXES.items() for name in names.split()} | {
        "workflow_input_submissions_inflight_unique",
        "worker_heartbeats_known_models_gin",
    }
    assert {name for name in at_12["indexes"] if not name.endswith(("_pkey", "_key"))} == expected


def test_the_unique_rules_are_the_contracts(at_12: schema_snapshot.Snapshot) -> None:
    unique = {text for text in at_12["constraints"].values() if text.startswith("UNIQUE")}
    assert unique == {"UNIQUE (run_id, rel_path)", "UNIQUE (run_id, node_id)"}
    partial = at_12["indexes"]["workflow_input_submissions_inflight_unique"]
    assert "UNIQUE" in partial and "(run_id, node_id) WHERE" in partial
    assert set(re.findall(r"'(\w+)'", partial)) == {"pending", "processing"}


def test_triggers_and_functions_have_the_names_that_0013_meets(
    at_12: schema_snapshot.Snapshot,
) -> None:
    triggers = {name.split(".")[1]: text for name, text in at_12["triggers"].items()}
    assert triggers.keys() == TRIGGERS.keys()
    for name, (table, function) in TRIGGERS.items():
        assert f"ON public.{table} " in triggers[name]
        assert f"EXECUTE FUNCTION {function}()" in triggers[name]
        assert f"{function}()" in at_12["functions"]


def test_rows_of_a_run_are_deleted_with_it(at_12: schema_snapshot.Snapshot) -> None:
    references = {name: t for name, t in at_12["constraints"].items() if "REFERENCES" in t}
    to_runs = "REFERENCES workflow_runs(id) ON DELETE"
    keys = {name.split(".")[0] for name, text in references.items() if to_runs in text}
    assert keys == {table for table in CONTRACT if table.startswith("workflow_")} - {
        "workflow_runs"
    }
    assert all("ON DELETE CASCADE" in text for text in references.values())


# --- at the head -------------------------------------------------------------------------------


def test_a_plain_insert_needs_only_what_an_app_knows(db: ModuleType) -> None:
    with db.connect() as conn:
        factories.run(conn, id="r")
        for table, columns in PLAIN.items():
            row = factories.insert(conn, table, **columns)
            assert row.get("id", True)
        run = factories.insert(conn, "workflow_runs", workflow_name="w")
        assert (run["status"], run["mode"], run["priority"]) == ("queued", "node", 100)
        assert run["created_at"] == run["queued_at"] == run["updated_at"]
        job = factories.insert(conn, "ingest_jobs", task_name="t", queue="q")
        assert (job["status"], job["reason"], job["max_attempts"]) == ("queued", "tick", 1)
        assert conn.execute("SELECT count(DISTINCT id) AS n FROM ingest_jobs").fetchone() == {
            "n": 2
        }


def test_deleting_a_run_takes_everything_with_it(db: ModuleType) -> None:
    with db.connect() as conn:
        factories.run(conn, id="r")
        factories.run(conn, id="other")
        of_run = [table for table, columns in PLAIN.items() if "run_id" in columns]
        for table in of_run:
            factories.insert(conn, table, **PLAIN[table])
            factories.insert(conn, table, **PLAIN[table] | {"run_id": "other"})
        conn.execute("DELETE FROM workflow_runs WHERE id = 'r'")
        for table in of_run:
            assert factories.column(conn, f"SELECT run_id FROM {table}") == ["other"], table


@pytest.mark.parametrize(
    ("table", "column"),
    [
        ("workflow_node_jobs", "status"),
        ("workflow_node_jobs", "queue"),
        ("ingest_jobs", "status"),
        ("workflow_node_events", "event_type"),
        ("workflow_input_submissions", "status"),
        ("workflow_dispatch_events", "kind"),
        ("workflow_runs", "mode"),
        ("worker_controls", "desired_state"),
    ],
)
def test_a_value_outside_the_contract_is_refused(db: ModuleType, table: str, column: str) -> None:
    with db.connect() as conn:
        factories.run(conn, id="r")
        with pytest.raises(psycopg.errors.CheckViolation):
            factories.insert(conn, table, **PLAIN[table] | {column: "nonsense"})


def test_a_cpu_job_with_a_model_is_refused(db: ModuleType) -> None:
    with db.connect() as conn, pytest.raises(psycopg.errors.CheckViolation):
        factories.node(conn, queue="cpu", required_model="m")


def test_a_name_that_no_notification_could_carry_is_refused(db: ModuleType) -> None:
    with db.connect() as conn:
        with pytest.raises(psycopg.errors.CheckViolation):
            factories.ingest(conn, queue="q" * 201)
        with pytest.raises(psycopg.errors.CheckViolation):
            factories.insert(conn, "worker_controls", host_label="h" * 401, queue="cpu")


# --- bootstrap ---------------------------------------------------------------------------------


def test_bootstrap_with_nothing_to_apply_waits_for_nobody_who_holds_its_lock(
    fresh: ModuleType,
) -> None:
    fresh.bootstrap()
    done: list[list[int]] = []
    with fresh.connect() as other:
        other.execute(
            "SELECT pg_advisory_lock("
            "hashtextextended('queue_workflows.schema.queue_schema_version', 0))"
        )
        starting = threading.Thread(target=lambda: done.append(fresh.bootstrap()))
        starting.start()
        starting.join(30)
        waited = starting.is_alive()
        other.execute("SELECT pg_advisory_unlock_all()")
    starting.join()
    assert not waited
    assert done == [[]]


def test_bootstrap_applies_the_chain_once(fresh: ModuleType) -> None:
    assert fresh.current_schema_version() == 0
    assert [step.version for step in fresh.pending()] == VERSIONS
    assert fresh.bootstrap() == VERSIONS
    assert fresh.bootstrap() == []
    assert fresh.pending() == []
    assert fresh.current_schema_version() == HEAD == fresh.REQUIRED_VERSION


def test_the_chain_runs_over_a_database_that_lost_its_ledger(
    fresh: ModuleType, at_12: schema_snapshot.Snapshot, tmp_path: Path
) -> None:
    folder = migration_folders.chain_up_to(12, tmp_path / "to12")
    fresh.bootstrap(migrations_dir=folder)
    with fresh.connect() as conn:
        conn.execute("DROP TABLE queue_schema_version")
    assert fresh.bootstrap(migrations_dir=folder) == list(range(1, 13))
    with fresh.connect() as conn:
        assert schema_snapshot.snapshot(conn) == at_12


def test_of_20_starters_one_migrates_and_none_fails(fresh: ModuleType) -> None:
    for _ in range(2):
        results: list[Any] = []

        def start(results: list[Any] = results) -> None:
            try:
                results.append(fresh.bootstrap())
            except Exception as error:
                results.append(error)

        threads = [threading.Thread(target=start) for _ in range(20)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(results, key=str) == [VERSIONS, *([[]] * 19)]
        fresh.downgrade()


def test_a_migration_that_changed_after_it_was_applied_is_reported(
    fresh: ModuleType, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = migration_folders.write_chain(tmp_path / "c", _0001_one="CREATE TABLE one ()")
    fresh.bootstrap(migrations_dir=folder)
    with fresh.connect() as conn:
        (checksum,) = factories.column(conn, "SELECT checksum FROM queue_schema_version")
        assert re.fullmatch("[0-9a-f]{64}", checksum)
    assert fresh.bootstrap(migrations_dir=folder) == []
    assert not caplog.records
    (folder / "0001_one.sql").write_text("CREATE TABLE two ()")
    with caplog.at_level(logging.WARNING):
        assert fresh.bootstrap(migrations_dir=folder) == []
    assert "migration 0001_one changed after it was applied" in caplog.text


def test_a_migration_that_fails_names_itself_and_leaves_nothing(
    fresh: ModuleType, tmp_path: Path
) -> None:
    folder = migration_folders.write_chain(
        tmp_path / "c",
        _0001_good="CREATE TABLE good ()",
        _0002_bad="CREATE TABLE half (); SELECT 1/0",
        _0003_later="CREATE TABLE later ()",
    )
    with pytest.raises(errors.MigrationFailed, match="0002_bad: division by zero"):
        fresh.bootstrap(migrations_dir=folder)
    assert fresh.current_schema_version() == 1
    with fresh.connect() as conn:
        tables = schema_snapshot.snapshot(conn)["tables"].keys()
    assert tables == {"good", "queue_schema_version"}
    (folder / "0002_bad.sql").write_text("CREATE TABLE half ()")
    assert fresh.bootstrap(migrations_dir=folder) == [2, 3]


def test_a_newer_database_is_refused_only_when_marked_incompatible(
    fresh: ModuleType, tmp_path: Path
) -> None:
    folder = migration_folders.write_chain(tmp_path / "c", _0001_a="SELECT 1", _0002_b="SELECT 1")
    fresh.bootstrap(migrations_dir=folder)
    (folder / "0003_c.sql").write_text("-- adds only\nSELECT 1")
    fresh.bootstrap(migrations_dir=folder)
    (folder / "0003_c.sql").unlink()
    assert fresh.bootstrap(migrations_dir=folder) == []
    migration_folders.write_chain(
        folder, _0003_c="SELECT 1", _0004_d="-- why\n-- compatible-with: 4\nSELECT 1"
    )
    assert fresh.bootstrap(migrations_dir=folder) == [4]
    (folder / "0004_d.sql").unlink()
    with pytest.raises(errors.SchemaTooNew, match=r"version 4.*this code knows 3.*upgrade"):
        fresh.bootstrap(migrations_dir=folder)


def test_a_newer_database_that_this_code_may_still_use_is_not_refused(
    fresh: ModuleType, tmp_path: Path
) -> None:
    texts = {"_0001_a": "SELECT 1", "_0002_b": "SELECT 1"}
    newer = "-- why\n-- compatible-with: 2\nSELECT 1"
    folder = migration_folders.write_chain(tmp_path / "c", **texts, _0003_c=newer)
    assert fresh.bootstrap(migrations_dir=folder) == [1, 2, 3]
    (folder / "0003_c.sql").unlink()
    assert fresh.bootstrap(migrations_dir=folder) == []
    (folder / "0002_b.sql").unlink()
    with pytest.raises(errors.SchemaTooNew, match=r"version 3.*this code knows 1"):
        fresh.bootstrap(migrations_dir=folder)


def test_the_ledger_of_an_app_that_is_newer_asks_for_the_apps_package(
    fresh: ModuleType, tmp_path: Path
) -> None:
    newer = "-- compatible-with: 2\nSELECT 1"
    folder = migration_folders.write_chain(tmp_path / "c", _0001_a="SELECT 1", _0002_b=newer)
    fresh.bootstrap(migrations_dir=folder, version_table="mails")
    (folder / "0002_b.sql").unlink()
    with pytest.raises(errors.SchemaTooNew, match=r"upgrade the package .* of mails here"):
        fresh.bootstrap(migrations_dir=folder, version_table="mails")


def test_a_version_to_stop_at_may_be_below_the_chain_and_below_the_database(
    fresh: ModuleType, tmp_path: Path
) -> None:
    texts = {"_0002_a": "SELECT 1", "_0003_b": "-- compatible-with: 3\nSELECT 1"}
    folder = migration_folders.write_chain(tmp_path / "c", **texts)
    assert fresh.bootstrap(migrations_dir=folder, to_version=1) == []
    assert fresh.bootstrap(migrations_dir=folder, to_version=2) == [2]
    assert fresh.bootstrap(migrations_dir=folder) == [3]
    assert fresh.bootstrap(migrations_dir=folder, to_version=2) == []


@pytest.mark.parametrize(
    ("texts", "said"),
    [
        (None, "no migration folder"),
        ({}, "no NNNN_name.sql"),
        ({"_0001_a": "", "_0001_b": ""}, "0001_b.sql: version 1 is taken by 0001_a.sql"),
        ({"_0000_a": ""}, "0000_a.sql: migrations are numbered from 0001 on"),
        ({"_0001_a": "", "_0002_b_down": ""}, "0002_b.down.sql has no 0002_b.sql"),
        ({"_0001_a": "", "_02_b": ""}, "02_b.sql: a migration is named NNNN_name.sql"),
    ],
)
def test_a_folder_that_is_no_chain_is_named(
    fresh: ModuleType, tmp_path: Path, texts: dict[str, str] | None, said: str
) -> None:
    folder = tmp_path / "chain"
    if texts is not None:
        migration_folders.write_chain(folder, **texts)
    for act in (fresh.bootstrap, fresh.downgrade, fresh.pending):
        with pytest.raises(errors.MigrationFailed, match=said):
            act(migrations_dir=folder)
    assert fresh.current_schema_version() == 0


def test_any_name_after_the_number_is_a_migration(fresh: ModuleType, tmp_path: Path) -> None:
    folder = migration_folders.write_chain(tmp_path / "c", _0001_a="SELECT 1")
    (folder / "0002_add-index.v2.sql").write_text("SELECT 1")
    (folder / "0002_add-index.v2.down.sql").write_text("SELECT 1")
    (folder / "schema.sql").write_text("this is no migration")
    assert fresh.bootstrap(migrations_dir=folder) == [1, 2]
    assert fresh.downgrade(migrations_dir=folder, to_version=1) == [2]


def test_every_migration_of_ours_has_both_directions() -> None:
    names = {path.name for path in migrations.dir().glob("*.sql")}
    ups = {name for name in names if not name.endswith(".down.sql")}
    assert {name.replace(".sql", ".down.sql") for name in ups} == names - ups
    assert sorted(int(name[:4]) for name in ups) == VERSIONS


# --- waiting -----------------------------------------------------------------------------------


def test_waiting_for_a_schema_ends_with_a_clear_error(fresh: ModuleType) -> None:
    pauses: list[float] = []
    with pytest.raises(
        TimeoutError, match=r"no schema version 3 yet \(it is at version 0\)"
    ) as caught:
        fresh.wait_for_schema(3, timeout_s=0, poll_s=0.25, sleep_fn=pauses.append)
    assert isinstance(caught.value, errors.SchemaTimeout)
    assert pauses == []


def test_waiting_for_a_schema_sees_it_come(fresh: ModuleType) -> None:
    pauses: list[float] = []

    def migrate(seconds: float) -> None:
        pauses.append(seconds)
        fresh.bootstrap()

    assert fresh.wait_for_schema(12, poll_s=0.25, sleep_fn=migrate) == HEAD
    assert pauses == [0.25]


def test_waiting_outlasts_a_database_that_is_away(
    fresh: ModuleType, monkeypatch: pytest.MonkeyPatch, spare: str
) -> None:
    monkeypatch.setenv("QUEUE_WORKFLOWS_DB_URL", "postgresql://u@/x?host=/nowhere&port=1")

    def back(_: float) -> None:
        monkeypatch.setenv("QUEUE_WORKFLOWS_DB_URL", spare)
        fresh.bootstrap()

    assert fresh.wait_for_schema(1, sleep_fn=back) == HEAD
    monkeypatch.setenv("QUEUE_WORKFLOWS_DB_URL", "postgresql://u@/x?host=/nowhere&port=1")
    with pytest.raises(TimeoutError, match="/nowhere"):
        fresh.wait_for_schema(1, timeout_s=0)


# --- reverting ---------------------------------------------------------------------------------


def test_down_and_up_again_gives_the_same_catalogue(
    fresh: ModuleType, at_12: schema_snapshot.Snapshot
) -> None:
    fresh.bootstrap()
    with fresh.connect() as conn:
        head = schema_snapshot.snapshot(conn)
        assert fresh.downgrade(to_version=12) == VERSIONS[:11:-1]
        assert schema_snapshot.snapshot(conn) == at_12
        assert fresh.bootstrap() == VERSIONS[12:]
        assert schema_snapshot.snapshot(conn) == head
        assert fresh.downgrade() == VERSIONS[::-1]
        left = [name for names in schema_snapshot.snapshot(conn).values() for name in names]
        assert [name for name in left if "queue_schema_version" not in name] == []
        assert fresh.current_schema_version() == 0
        assert fresh.downgrade() == []
        fresh.bootstrap()
        assert schema_snapshot.snapshot(conn) == head


def test_each_single_step_down_and_up_gives_the_same_catalogue(fresh: ModuleType) -> None:
    fresh.bootstrap()
    with fresh.connect() as conn:
        for version in VERSIONS[::-1]:
            before = schema_snapshot.snapshot(conn)
            assert fresh.downgrade(to_version=version - 1, allow_data_loss=True) == [version]
            step = next(step for step in fresh.pending() if step.version == version)
            with conn.transaction(force_rollback=True):
                conn.execute(step.up.encode())
                if version == HEAD:
                    installed_functions.install(conn)
                made = schema_snapshot.snapshot(conn)
                if version < HEAD:
                    # The set of functions and triggers is that of HEAD, and later steps leave it.
                    before, made = _without_code(before), _without_code(made)
                assert made == before, version


def _without_code(found: schema_snapshot.Snapshot) -> schema_snapshot.Snapshot:
    of_functions = ("functions", "triggers", "public rights")
    return {kind: names for kind, names in found.items() if kind not in of_functions}


def test_a_downgrade_that_loses_nothing_needs_no_leave(fresh: ModuleType) -> None:
    fresh.bootstrap()
    with fresh.connect() as conn:
        factories.run(conn, id="r")
        factories.node(conn, "r")
        factories.ingest(conn)
        assert fresh.downgrade(to_version=12) == VERSIONS[:11:-1]
        assert factories.one(conn, "SELECT count(*) FROM workflow_node_jobs") == 1


@pytest.mark.parametrize("reason", ["unserved", "set_aside"])
def test_a_downgrade_below_lock_keys_admits_waiters_first(fresh: ModuleType, reason: str) -> None:
    fresh.bootstrap()
    with fresh.connect() as conn:
        for _ in range(2):
            factories.ingest(conn, lock_key="k")
        conn.execute("UPDATE ingest_jobs SET blocked_reason = %s", (reason,))
        assert fresh.downgrade(to_version=12, allow_data_loss=True)[-1] == 13
        assert factories.one(conn, "SELECT count(*) FROM ingest_jobs WHERE status = 'queued'") == 2


def test_a_downgrade_that_loses_something_lists_it_and_changes_nothing(fresh: ModuleType) -> None:
    fresh.bootstrap()
    with fresh.connect() as conn:
        factories.run(conn, id="r")
        factories.node(conn, "r")
        job = transitions.claim_node(conn)
        factories.insert(conn, "workers", worker_id="w", host_label="h", queue="cpu", pid=1)
        factories.insert(conn, "workflow_node_events", run_id="r", node_id="n", event_type="parked")
        factories.insert(conn, "worker_heartbeats", host_label="h", queue="fetch")
        before = schema_snapshot.snapshot(conn)
        with pytest.raises(errors.DataLossRefused) as caught:
            fresh.downgrade(to_version=7)
        for part in (
            "downgrade to version 7",
            "table workers with 1 rows",
            "column workflow_node_jobs.claim_no with 1 values",
            "column workflow_node_jobs.worker_id with 1 values",
            "table workflow_node_events with 2 rows",
            "1 rows of table worker_heartbeats",
            "allow_data_loss=True",
        ):
            assert part in str(caught.value)
        assert "workflow_node_jobs.crash_count" not in str(caught.value)
        with pytest.raises(errors.DataLossRefused, match="1 rows of table workflow_node_events"):
            fresh.downgrade(to_version=12)
        assert schema_snapshot.snapshot(conn) == before
        assert factories.reread(conn, job)["status"] == "running"
        assert fresh.current_schema_version() == HEAD
        assert fresh.downgrade(to_version=7, allow_data_loss=True) == VERSIONS[:6:-1]
        assert factories.one(conn, "SELECT count(*) FROM worker_heartbeats") == 0


def test_rows_written_during_the_check_of_a_downgrade_are_not_lost_unreported(
    fresh: ModuleType,
) -> None:
    fresh.bootstrap()
    with fresh.connect() as conn, fresh.connect(autocommit=False) as late:
        factories.run(late, id="r")
        node = factories.node(late, "r")
        transitions.claim_node(late)
        outcome: list[Any] = []

        def revert() -> None:
            try:
                outcome.append(fresh.downgrade(to_version=12))
            except errors.DataLossRefused as error:
                outcome.append(error)

        thread = threading.Thread(target=revert)
        thread.start()
        waiting = (
            "SELECT count(*) FROM pg_locks WHERE NOT granted AND relation IS NOT NULL"
            " AND database = (SELECT oid FROM pg_database WHERE datname = current_database())"
        )
        database.wait.until(lambda: factories.one(conn, waiting) > 0)
        late.commit()
        thread.join()
        assert isinstance(outcome[0], errors.DataLossRefused)
        assert "claim_no with 1 values" in str(outcome[0])
        assert factories.reread(conn, node)["claim_no"] == 1


def test_a_step_without_a_way_back_is_named(fresh: ModuleType, tmp_path: Path) -> None:
    folder = migration_folders.write_chain(
        tmp_path / "c", _0001_a="SELECT 1", _0001_a_down="SELECT 1", _0002_b="SELECT 1"
    )
    fresh.bootstrap(migrations_dir=folder)
    with pytest.raises(errors.MigrationFailed, match="no down migration for version 2"):
        fresh.downgrade(migrations_dir=folder)
    assert fresh.current_schema_version() == 2


def test_a_step_back_that_fails_leaves_everything(fresh: ModuleType, tmp_path: Path) -> None:
    folder = migration_folders.write_chain(
        tmp_path / "c",
        _0001_a="CREATE TABLE a ()",
        _0001_a_down="DROP TABLE missing",
        _0002_b="CREATE TABLE b ()",
        _0002_b_down="DROP TABLE b",
    )
    fresh.bootstrap(migrations_dir=folder)
    for leave in (True, False):
        with pytest.raises(errors.MigrationFailed, match="down migration 0001_a: "):
            fresh.downgrade(migrations_dir=folder, allow_data_loss=leave)
        assert fresh.current_schema_version() == 2
        assert [step.version for step in fresh.pending(migrations_dir=folder)] == []


# --- a second chain ----------------------------------------------------------------------------


def test_an_app_runs_its_own_chain_on_its_own_ledger(fresh: ModuleType, tmp_path: Path) -> None:
    folder = migration_folders.write_chain(
        tmp_path / "c",
        _0001_parcels="CREATE TABLE parcels (id text DEFAULT 'none')",
        _0001_parcels_down="DROP TABLE parcels",
    )
    chain: dict[str, Any] = {"migrations_dir": str(folder), "version_table": "host schema"}
    fresh.bootstrap()
    assert fresh.current_schema_version(version_table="host schema") == 0
    assert fresh.bootstrap(**chain) == [1]
    assert fresh.current_schema_version(version_table="host schema") == 1
    assert fresh.wait_for_schema(1, version_table="host schema") == 1
    assert fresh.current_schema_version() == HEAD
    with fresh.connect() as conn:
        conn.execute("INSERT INTO parcels DEFAULT VALUES")
        factories.run(conn, id="ours")
    with pytest.raises(errors.DataLossRefused, match="table parcels with 1 rows"):
        fresh.downgrade(**chain)
    assert fresh.downgrade(**chain, allow_data_loss=True) == [1]
    assert fresh.current_schema_version(version_table="host schema") == 0
    assert fresh.current_schema_version() == HEAD


def test_a_session_that_holds_the_schemas_lock_is_named_and_a_stop_ends_the_wait(
    empty: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    timeouts.report_migrations_at_once(monkeypatch)
    with db.connect(limited=False) as other:
        other.execute(
            "SELECT pg_advisory_lock("
            "hashtextextended('queue_workflows.schema.queue_schema_version', 0))"
        )
        pid = other.info.backend_pid
        with pytest.raises(errors.MigrationFailed, match="stop"):
            db.bootstrap(stopped=lambda: f"pid {pid}" in caplog.text)
    assert db.bootstrap()
