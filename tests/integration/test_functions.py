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
        "functions": 132,
        "triggers": 39,
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


# --- the same database as before ---------------------------------------------------------------

NEW = {
    ("functions", "queue_workflows_truncated()"),
    *(
        ("triggers", f"{table}.{table}_truncated")
        for table in ("workflow_runs", "workflow_node_jobs", "ingest_jobs")
    ),
    ("functions", "queue_workflows_insert_ended(text,jsonb)"),
    ("functions", "queue_workflows_nodes_step(text,text,text,double precision,integer,boolean,"
     "boolean,boolean,jsonb,text[],double precision)"),
    ("tables", OBJECTS), ("constraints", f"{OBJECTS}.{OBJECTS}_pkey"),
    ("indexes", f"{OBJECTS}_pkey"), ("public rights", OBJECTS),
    *(("columns", f"{OBJECTS}.{name}") for name in
      ("part", "checksum", "package_version", "objects", "installed_at")),
    *(("functions", f"queue_workflows_{name}") for name in (
        "context_of(text,text[])", "has_waiters()",
        "is_claimable(text,text)", "is_lost(text,timestamp with time zone)",
        "is_off(text,timestamp with time zone)",
        "is_past_retention(text,timestamp with time zone,double precision)",
        "is_paused(timestamp with time zone,timestamp with time zone)",
        "prunable_run(text,text,timestamp with time zone,double precision)",
        "is_terminal_job(text)", "is_terminal_run(text)",
        "must_end(ingest_jobs)", "must_end(workflow_node_jobs)",
        "record(ingest_jobs,text,text,text,double precision,text,jsonb)",
        "record(workflow_node_jobs,text,text,text,double precision,text,jsonb)")),
}  # fmt: skip
"""What the database has now and the 21 migrations before 0013 did not make."""
DELAYED = {
    ("triggers", f"workflow_runs.workflow_run_{name}")
    for name in ("delayed_notify", "ready_notify_insert")
}
"""What wakes the orchestrator for a delayed run."""
NOTES = {
    ("columns", "lock_turns.admits"), ("columns", "partition_turns.admits"),
    ("constraints", "partition_turns.partition_turns_pkey"), ("indexes", "partition_turns_pkey"),
    ("triggers", "ingest_jobs.ingest_jobs_changed"),  # admitted_at fires it
    *(("functions", f"queue_workflows_{name}") for name in (
        "admit(text,text,integer)", "ask_partition(text,text,integer)", "ask_turn(name,text)",
        "give_turns(text,text[])", "give_turns_singly(text,text[])",
        "hold_back(text,integer,integer)", "limit_gate(ingest_jobs,ingest_jobs)",
        "mend_turns(text)", "take_turns()")),
}  # fmt: skip
"""What changed so that the admission writes no command into blocked_reason (decision 0024)."""
LOCKS = {
    ("functions", "queue_workflows_take_locks(text,text[])"),
    ("functions", "queue_workflows_lock_keys(text,text[])"),
    ("functions", "queue_workflows_leave_partition(text,text,integer,interval)"),
}
"""A commit leaves out the advisory locks that another transaction keeps."""
MERGED = {
    ("functions", "queue_workflows_jobs_gone()"),
    *(("functions", f"queue_workflows_{name}()") for name in (
        "audit_cancel", "audit_gone", "forget_logs")),
    *(("triggers", name) for name in (
        "ingest_jobs.ingest_jobs_audit_gone", "ingest_jobs.ingest_jobs_cancel_asked",
        "ingest_jobs.ingest_jobs_forget", "workflow_node_jobs.workflow_node_jobs_forget")),
}  # fmt: skip
"""One trigger for what follows from deleted jobs; none of its own for a requested cancellation."""
SCHEDULES = {
    ("columns", "schedule_fires.run_id"), ("columns", "schedule_fires.skipped"),
    ("indexes", "ingest_job_events_reclaimed_idx"),
    ("indexes", "workflow_node_events_reclaimed_idx"), ("indexes", "schedule_fires_run_idx"),
}  # fmt: skip
"""What migration 0014 adds beside the table `schedules` and what hangs on it."""
ALERTS = {
    *(("functions", f"queue_workflows_{name}") for name in (
        "alert(text,text,text,text,text,text,text,text)", "run_failed()", "schedule_failed()")),
    ("triggers", "workflow_runs.workflow_runs_failed"),
    ("indexes", "lock_turns_xid_idx"),
}  # fmt: skip
"""What notes failures, and the index that 0015 widens, beside the tables of 0015."""
TRACES = {
    ("columns", "workflow_runs.headers"),
    ("constraints", "workflow_runs.workflow_runs_headers_check"),
    ("indexes", "ingest_job_events_id_idx"),
}  # fmt: skip
"""What migration 0016 adds beside the tables of exports and what hangs on them."""
METRICS = {
    *(("columns", f"{family}_events.xid") for family in ("workflow_node", "ingest_job")),
    *(("indexes", f"{family}_events_xid_idx") for family in ("workflow_node", "ingest_job")),
    ("indexes", "workflow_node_jobs_awaiting_idx"),
    *(("functions", f"queue_workflows_{name}") for name in (
        "metric_bounds()", "count_events(bigint)",
        "uncounted_events(bigint,bigint,pg_snapshot,pg_snapshot,timestamp with time zone)")),
}  # fmt: skip
"""What counts the history, beside the tables of migration 0017 and what hangs on them."""
STEPS = {
    ("functions", "queue_workflows_charge_steps(text,text,bigint)"),
    ("functions", "queue_workflows_forget_steps(text,text[])"),
    ("functions", "queue_workflows_forget_parts(text,text[])"),
    ("functions", "queue_workflows_event_sent()"),
    ("functions", "queue_workflows_ingest_wake(text,text,integer)"),
    ("functions", "queue_workflows_node_wake(text,text,integer)"),
    ("functions", "queue_workflows_wake_waiting(text,text,integer)"),
}
"""What steps and events need, beside the tables of migrations 0020 and 0021."""
CHILD_RUNS = {
    *(("columns", f"workflow_runs.parent_{name}_id") for name in ("run", "node")),
    *(("constraints", f"workflow_runs.workflow_runs_parent_{name}_id_check")
      for name in ("run", "node")),
    ("indexes", "workflow_runs_parent_idx"),
    ("columns", "workflow_node_jobs.child_run_id"),
    ("constraints", "workflow_node_jobs.workflow_node_jobs_child_run_id_check"),
    *(("functions", f"queue_workflows_{name}") for name in (
        "run_depth(text)", "make_child(text,text,jsonb,jsonb,boolean)", "child_ended()",
        "end_parent_node(text,text,text,text,jsonb,text)", "cancel_children()", "children_gone()",
    )),
    *(("triggers", f"workflow_runs.workflow_runs_{name}")
      for name in ("child_ended", "cancel_children", "children_gone")),
}  # fmt: skip
"""Runs that nodes of other runs have made."""
NODE_VERSIONS = {
    ("columns", "workflow_node_jobs.required_version"),
    ("columns", "workflow_runs.revision"), ("columns", "workflow_runs.upgrades"),
    *((kind, f"{place}queue_workflows_{name}{end}") for name in (
        "node_version", "revision", "upgrades")
      for kind, place, end in (("types", "", ""), ("constraints", "-.", "_check"))),
    ("indexes", "workflow_node_jobs_claim_idx"), ("indexes", "workflow_node_jobs_gpu_idx"),
}  # fmt: skip
"""What migration 0022 adds for versions of nodes, and the claim's functions that know them."""
KEPT = {
    *(("columns", f"{table}.resume_{name}") for table in ("ingest_jobs", "workflow_node_jobs")
      for name in ("host", "at", "until")),
    *((kind, f"{place}queue_workflows_resume_{name}{end}") for name in ("host", "time")
      for kind, place, end in (("types", "", ""), ("constraints", "-.", "_check"))),
    ("indexes", "ingest_jobs_resume_idx"), ("indexes", "workflow_node_jobs_resume_idx"),
    *(("functions", f"queue_workflows_{name}") for name in (
        "due_at(timestamp with time zone,timestamp with time zone,timestamp with time zone)",
        "kept_until(timestamp with time zone,timestamp with time zone,timestamp with time zone)",
        "ingest_kept(text,text,text,text,text[],text[],integer)",
        "node_kept(text,text,text,text,text[],text[],integer)",
        "ingest_due_in(text,text,double precision,boolean)",
        "node_due_in(text,text,double precision,boolean)",
        "hold_until_due()",
    )),
}  # fmt: skip
"""What keeps a job that has waited for its host, and finds the next job that is due."""
LAPSES = {
    ("types", "queue_workflows_lapse_count"),
    ("constraints", "-.queue_workflows_lapse_count_check"),
    *(("columns", f"{table}.lapse_count") for table in ("ingest_jobs", "workflow_node_jobs")),
    *(("triggers", f"{table}.{table}_changed") for table in ("ingest_jobs", "workflow_node_jobs")),
}
"""What migration 0024 adds, and the triggers that know it."""
CLAIMING = frozenset(f"queue_workflows_{name}" for name in (
    "claim_apart", "gpu_choose", "gpu_line", "gpu_next", "gpu_take", "gpu_weigh",
    "ingest_claim_apart", "ingest_set_aside", "ingest_step", "node_claim_apart", "node_set_aside",
    "node_step", "pick_gpu", "set_aside",
))  # fmt: skip
"""Functions with other arguments since then, or one for each family."""
_OF_MAPS = (
    "workflow_run_maps", "workflow_map_items", "queue_workflows_item_", "-.queue_workflows_item_",
    "queue_workflows_open_map(", "queue_workflows_step_map(", "queue_workflows_end_map(",
    "queue_workflows_fail_map(",
)  # fmt: skip
"""How the names begin of what migration 0018 makes and of what hangs on it."""
CHANGED = {
    "queue_workflows_insert_nodes(text,jsonb)",  # a map waits with a blocked_reason
    "queue_workflows_bound_job()",  # compares what may be bad only if it changes
    "queue_workflows_hold_ingest()",  # checks a window without a key too
    "queue_workflows_hold_node(text,text)",  # takes a weaker lock
    "queue_workflows_keep_events()",
    "notify_ingest_jobs_inserted()",  # equal notifications are folded by the server alone
    "notify_node_jobs_inserted()",
    "queue_workflows_born(timestamp with time zone)",  # STABLE, so that it is inlined
    "queue_workflows_refuse(text,jsonb,jsonb)",  # messages that name the range
    "queue_workflows_gpu_unserved()",  # messages that name machines and GPUs
    "queue_workflows_mend_lines()",  # its walk over the keys is a fragment
    "queue_workflows_partitions(text,boolean)",  # and so is its walk
}


def test_the_database_is_that_of_the_migrations_of_before_but_for_the_record(own: str) -> None:
    before = json.loads((SUPPORT / "schema_before.json").read_text())
    with db.connect() as conn:
        snapshot = schema_snapshot.snapshot(conn)
    now = schema_snapshot.hashes(snapshot)
    named = {
        ("functions", name)
        for name, text in snapshot["functions"].items()
        if "queue_workflows_is_terminal_" in text
        or "queue_workflows_is_claimable(" in text
        or "queue_workflows_is_off(" in text
        or "queue_workflows_is_paused(" in text
    } - (ALERTS | KEPT)
    assert sum(map(len, before.values())) > 600
    found = {(kind, name) for kind, name, _, _ in schema_snapshot.difference(before, now)}
    of_0014 = {
        (kind, name)
        for kind, name in found
        if name.split(".")[0] == "schedules"
        or name.startswith(("schedules_", "queue_workflows_next_wake("))
        or name == "queue_workflows_schedule_changed()"
    }
    assert len(of_0014) > 40 and not {name for kind, name in of_0014 if name in before[kind]}
    of_0015 = {(kind, name) for kind, name in found if name.startswith("failure_alert")}
    assert len(of_0015) > 20 and not {name for kind, name in of_0015 if name in before[kind]}
    of_0016 = {(kind, name) for kind, name in found if name.startswith("event_export")}
    assert len(of_0016) > 10 and not {name for kind, name in of_0016 if name in before[kind]}
    assert found >= TRACES
    of_0017 = {(kind, name) for kind, name in found if name.startswith("metric_")}
    assert len(of_0017) > 10 and not {name for kind, name in of_0017 if name in before[kind]}
    assert found >= METRICS
    of_0018 = {(kind, name) for kind, name in found if name.startswith(_OF_MAPS)}
    assert len(of_0018) > 20 and not {name for kind, name in of_0018 if name in before[kind]}
    of_0020 = {
        (kind, name)
        for kind, name in found
        if name.startswith(("job_steps", "events", "job_parts"))
    }
    assert len(of_0020) > 20 and not {name for kind, name in of_0020 if name in before[kind]}
    assert found >= STEPS
    found -= of_0014 | SCHEDULES | of_0015 | ALERTS | of_0016 | TRACES | of_0017 | METRICS
    assert found >= NODE_VERSIONS
    claiming = {(kind, name) for kind, name in found if name.split("(")[0] in CLAIMING}
    assert {name.split("(")[0] for _, name in claiming} == CLAIMING
    assert found >= KEPT
    found -= of_0018 | of_0020 | STEPS | NODE_VERSIONS | KEPT
    changed = {("functions", name) for name in CHANGED}
    assert (
        found - claiming
        == (NEW | NOTES | LOCKS | MERGED | CHILD_RUNS | DELAYED | LAPSES | named | changed)
        - claiming
    )
    assert not {name for kind, name in NEW if name in before[kind]}


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


# --- databases of development builds -----------------------------------------------------------


LAST_16 = "79bba3898f603a3b0b3b0dbe1bddfb86fd634237c54ad29bf228d8e73df01f68"
"""The checksum of 0016 in the last development build, which alone differs from the ledger's."""


def make_development(conn: db.Connection, up_to: int = 33, *, last: bool = False) -> None:
    """Make the database what a development build made: its tables are the same, its ledger not."""
    for path in reversed(migration_folders.ours(down=True)[13:]):
        conn.execute(path.read_text().encode())
    conn.execute(f"DROP TABLE {OBJECTS}; DELETE FROM {LEDGER} WHERE version > 12")
    development = json.loads((SUPPORT / "development_ledger.json").read_text())
    if last:
        development["16"] = LAST_16
    for version, checksum in development.items():
        if int(version) <= up_to:
            conn.execute(
                f"INSERT INTO {LEDGER} (version, checksum) VALUES (%s, %s)".encode(),
                (int(version), checksum),
            )


@pytest.mark.parametrize("last", [False, True])
def test_a_complete_database_of_a_development_build_is_converted(
    own: str, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture, last: bool
) -> None:
    with db.connect() as conn:
        whole = schema_snapshot.snapshot(conn)
        recorded = conn.execute(f"SELECT version, checksum FROM {LEDGER}").fetchall()
        job = factories.ingest(conn)  # now, as the triggers of today need the columns of today
        make_development(conn, last=last)
        assert not is_ready()
        caplog.clear()
        finding = findings.doctors("schema")
        assert finding.level == findings.ERROR and "queue-workflows migrate" in finding.remedy
        steps = {step.check: step for step in findings.of_connect(own)}
        assert steps["schema"].level == findings.ERROR
        assert "queue-workflows migrate" in steps["schema"].remedy
        steps = {step.check: step for step in findings.of_connect(own, "--for", "migrate")}
        assert (steps["schema"].level, steps["rights"].level) == (findings.OK, findings.OK)
        assert main(["migrate", "--dry-run"]) == 0
        announced = f"version 33 -> {LAST}: would install the functions and triggers"
        assert announced in capfd.readouterr().out
        assert db.bootstrap() == [*range(14, LAST + 1)]
        assert schema_snapshot.snapshot(conn) == whole
        assert conn.execute(f"SELECT version, checksum FROM {LEDGER}").fetchall() == recorded
        assert factories.reread(conn, job)["status"] == "queued"
        assert db.bootstrap() == []
    assert not caplog.records


@pytest.mark.parametrize("how", ["incomplete", "changed"])
def test_any_other_database_of_a_development_build_is_refused(own: str, how: str) -> None:
    with db.connect() as conn:
        make_development(conn, up_to=30 if how == "incomplete" else 33)
        if how == "changed":
            conn.execute(f"UPDATE {LEDGER} SET checksum = 'x' WHERE version = 20")
        number = factories.one(conn, f"SELECT max(version) FROM {LEDGER}")
        text = rf"schema version {number} of a development build; run the last .*empty database"
        with pytest.raises(errors.MigrationFailed, match=text):
            db.bootstrap()
        assert factories.one(conn, f"SELECT max(version) FROM {LEDGER}") == number
        assert factories.one(conn, f"SELECT to_regclass('{OBJECTS}') IS NULL")


def test_an_edited_migration_of_a_development_build_is_refused_with_the_remedy(
    own: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with db.connect() as conn:
        conn.execute("ALTER TABLE schedules DROP COLUMN app CASCADE, DROP COLUMN clash")
        conn.execute(f"UPDATE {LEDGER} SET checksum = 'old' WHERE version = 14".encode())
        conn.execute(
            "INSERT INTO schedules (name, expression, task_name) VALUES ('s', '@daily', 't')"
        )
    with pytest.raises(errors.MigrationFailed, match="--to 13 --allow-data-loss"):
        db.bootstrap()
    assert main(["migrate", "--dry-run"]) == 2
    said = capfd.readouterr().err
    assert "migration 0014_schedules of this database is that of a development build" in said
    assert main(["migrate", "--to", "13"]) == 2
    assert main(["migrate", "--to", "13", "--allow-data-loss"]) == 0
    assert main(["migrate"]) == 0
    assert main(["migrate", "--verify"]) == 0
