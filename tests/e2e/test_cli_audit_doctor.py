"""`queue-workflows audit` and `doctor` as processes: exit codes, `--json`, and no secret shown."""

from __future__ import annotations

import json
from types import ModuleType

import pytest

from queue_workflows import run_store
from tests.support import factories
from tests.support.commands import Commands, refused

QW = "queue-workflows"
CANARY = "canary77"
NOWHERE = f"postgresql://someone:{CANARY}@127.0.0.1:1/none"
DANGERS = {"fsync", "full_page_writes"}
"""Off on the servers that tests start."""


def test_audit_prints_ok_and_exits_with_1_if_an_invariant_is_broken(
    cli: Commands, db: ModuleType
) -> None:
    run_store.insert_run(workflow_name="w")
    done = cli.run(QW, "audit")
    assert (done.process.returncode, done.err) == (0, "")
    assert [line.split()[1] for line in done.out.splitlines()] == [str(n) for n in range(1, 19)]
    assert "BROKEN" not in done.out

    with db.connect() as conn:
        job = factories.ingest(conn)
        conn.execute("UPDATE ingest_jobs SET attempts = 7")
    done = cli.run(QW, "audit", "--json", "--since", "all")
    assert (done.process.returncode, done.err) == (1, "")
    found = json.loads(done.out)
    assert list(found) == ["database", "since", "invariants", "bad_rows"]
    assert set(found["invariants"][0]) == {
        "invariant", "name", "sentence", "state", "note", "offenders", "more", "seconds",
    }  # fmt: skip
    states = {each["invariant"]: each["state"] for each in found["invariants"]}
    assert [number for number, state in states.items() if state == "broken"] == [12]
    assert states[14] == "elsewhere"
    (offender,) = found["invariants"][11]["offenders"]
    assert offender["id"] == job["id"]
    assert "7 attempts (of 1)" in offender["text"]
    assert cli.run(QW, "audit").process.returncode == 1


@pytest.mark.parametrize(
    ("argv", "dsn", "said"),
    [
        (("--since", "soon"), "", "--since soon should look like 90m, 24h, 7d"),
        ((), NOWHERE, "database none at 127.0.0.1:1 does not answer"),
    ],
)
def test_audit_refuses_in_one_line(
    cli: Commands, argv: tuple[str, ...], dsn: str, said: str
) -> None:
    line = refused(cli.run(QW, "audit", *argv, **({"QUEUE_WORKFLOWS_DB_URL": dsn} if dsn else {})))
    assert said in line
    assert CANARY not in line


def test_doctor_finds_an_installation_well(cli: Commands) -> None:
    done = cli.run(QW, "doctor", "--json")
    found = json.loads(done.out)
    assert done.err == ""
    assert list(found) == ["findings", "errors", "warnings"]
    assert all(set(f) == {"check", "level", "text", "remedy"} for f in found["findings"])
    errors = {f["check"] for f in found["findings"] if f["level"] == "error"}
    assert errors <= DANGERS
    assert (found["errors"], found["warnings"]) == (len(errors), 0), done.out
    assert done.process.returncode == (1 if errors else 0)

    text = cli.run(QW, "doctor")
    assert text.process.returncode == done.process.returncode
    lines = text.out.splitlines()
    assert len(lines) == len(found["findings"]) + 1
    assert lines[-1].endswith("0 warnings")
    assert all(line.split()[0] in ("ok", "error") for line in lines[:-1])


def test_a_warning_does_not_fail(cli: Commands, db: ModuleType) -> None:
    with db.connect() as conn:
        conn.execute(
            "INSERT INTO worker_heartbeats (host_label, queue, last_flagged_dead_at)"
            " VALUES ('box', 'cpu', now())"
        )
    done = cli.run(QW, "doctor", "--json")
    found = json.loads(done.out)
    levels = {each["check"]: each["level"] for each in found["findings"]}
    assert levels["workers"] == "warning", done.out
    assert found["warnings"] == [*levels.values()].count("warning")
    assert done.process.returncode == (1 if found["errors"] else 0)


def test_doctor_of_a_database_that_is_down(cli: Commands) -> None:
    done = cli.run(QW, "doctor", QUEUE_WORKFLOWS_DB_URL=NOWHERE)
    assert (done.process.returncode, done.err) == (1, "")
    *_, last, total = done.out.splitlines()
    assert last.startswith("error    database")
    assert "does not answer" in last
    assert "is the server up" in last
    assert total == "1 error, 0 warnings"
    assert CANARY not in done.out


def test_doctor_of_a_database_without_the_schema(cli: Commands, fresh_database: str) -> None:
    done = cli.run(QW, "doctor", "--json", QUEUE_WORKFLOWS_DB_URL=fresh_database)
    assert (done.process.returncode, done.err) == (1, "")
    levels = {f["check"]: f["level"] for f in json.loads(done.out)["findings"]}
    assert (levels["schema"], levels["tables"]) == ("error", "warning")
    line = refused(cli.run(QW, "audit", QUEUE_WORKFLOWS_DB_URL=fresh_database))
    assert "`queue-workflows migrate`" in line


def test_doctor_refuses_an_app_that_is_not_there(cli: Commands) -> None:
    line = refused(cli.run(QW, "doctor", "--app", "no_such_module"))
    assert "no module 'no_such_module' here" in line
