"""`queue-workflows` prints what it did, and refuses wrong input in one line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest

import queue_workflows
from queue_workflows import config, db, node_queue, run_store, runs
from queue_workflows.__main__ import main
from tests.support import tabled
from tests.support.commands import TOYHOST, Commands, refused, script

QW = "queue-workflows"
NOWHERE = "postgresql://someone:canary77@127.0.0.1:1/none"


class Invoked(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def line(self) -> str:
        """The one line with which the command refused its input, beside those that inform."""
        lines = [x for x in self.err.splitlines() if not x.startswith("queue-workflows: ")]
        assert (self.code, len(lines)) == (2, 1), self
        return lines[0]


@pytest.fixture
def invoke(capfd: pytest.CaptureFixture[str]) -> Callable[..., Invoked]:
    """Runs a command in this process, which takes a tenth of the time of a new one."""

    def call(*argv: str) -> Invoked:
        config.reset_for_tests()
        code = main(argv)
        db.close_pool()
        return Invoked(code, *capfd.readouterr())

    return call


def python(code: str, *argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *(["-c", code] if code else []), *argv],
        capture_output=True, text=True, timeout=30, check=False,
    )  # fmt: skip


def test_the_module_is_the_script() -> None:
    done = python("", "-m", "queue_workflows", "--version")
    assert (done.returncode, done.stdout) == (0, f"queue-workflows {queue_workflows.__version__}\n")
    by_script = subprocess.check_output([script(QW), "--version"], text=True, timeout=30)
    assert by_script == done.stdout


def test_without_the_extra_one_line_names_it() -> None:
    code = "import sys; sys.modules['typer'] = None\n"
    code += "from queue_workflows.__main__ import main; sys.exit(main(['status']))"
    done = python(code)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "pip install 'SOURCE[cli]'" in done.stderr


def test_status_shows_what_there_is(cli: Commands, invoke: Callable[..., Invoked]) -> None:
    run = run_store.insert_run(workflow_name="w")
    node_queue.enqueue_node_job(run_id=run["id"], node_id="n", node_module="m", queue="gpu")
    found = json.loads(cli.run(QW, "status", "--json").out)
    assert found["embedded"] is False
    assert found["schema_version"] == found["required_version"] > 12
    assert found["runs"] == {"queued": 1}
    gpu = next(queue for queue in found["queues"] if queue["queue"] == "gpu")
    assert (gpu["queued"], gpu["running"], gpu["workers"]) == (1, 0, 0)
    assert set(found["orchestrator"]) == {
        "open_events", "lag_s", "answers", "awaiting_input", "not_started",
    }  # fmt: skip
    text = invoke("status").out
    assert "runs: 1 queued" in text


def test_status_names_a_run_that_waits_for_a_provider(
    db: ModuleType, invoke: Callable[..., Invoked]
) -> None:
    run = run_store.insert_run(workflow_name="w")
    with db.connect() as conn:
        conn.execute("UPDATE workflow_runs SET queued_at = now() - interval '3 seconds'")
    done = invoke("status")
    assert f"waiting for a workflow provider: 1 run ({run['id']})" in done.out


def test_runs_are_listed_newest_first_with_iso_times(
    db: ModuleType, invoke: Callable[..., Invoked]
) -> None:
    for name in ("old", "new"):
        run_store.insert_run(workflow_name=name)
    run_store.insert_run(workflow_name="over", status="completed")
    rows = json.loads(invoke("runs", "--status", "queued", "--json").out)
    assert [row["workflow_name"] for row in rows] == ["new", "old"]
    assert datetime.fromisoformat(rows[0]["created_at"]).tzinfo is not None
    text = invoke("runs", "--limit", "1").out
    assert "over" in text
    assert len(text.splitlines()) == 2


def test_workers_are_listed_with_what_they_hold_now(
    db: ModuleType, invoke: Callable[..., Invoked]
) -> None:
    run = run_store.insert_run(workflow_name="w", status="running")
    node_queue.enqueue_node_job(run_id=run["id"], node_id="n", node_module="m", queue="cpu")
    job = node_queue.claim_next_cpu_job(host="box")
    assert job
    with db.connect() as conn:
        conn.execute(
            "INSERT INTO workers (worker_id, host_label, queue, pid) VALUES (%s, 'box', 'cpu', 7)",
            (job["worker_id"],),
        )
    row = json.loads(invoke("workers", "--json").out)[0]
    assert (row["host_label"], row["queue"], row["pid"]) == ("box", "cpu", 7)
    assert (row["state"], row["job_ids"]) == ("busy", [job["id"]])
    assert invoke("workers").out.splitlines()[1].split()[:4] == ["box", "cpu", "7", "busy"]


def test_a_reader_that_goes_away_is_no_error(cli: Commands) -> None:
    for _ in range(3):
        run_store.insert_run(workflow_name="w")
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as gone:
        done = subprocess.run(
            [script(QW), "runs"], env={**os.environ, **cli.env}, stdout=gone,
            stderr=subprocess.PIPE, text=True, timeout=30, check=False,
        )  # fmt: skip
    assert (done.returncode, done.stderr) == (1, "")


# --- input that is refused ---------------------------------------------------------------------


def test_one_line_names_what_is_wrong(db: ModuleType, invoke: Callable[..., Invoked]) -> None:
    cases: list[Any] = [
        (("up",), "nothing to start: no node, ingest task or workflow provider is registered"),
        (("up", "--app", "tests.support.toy_app:nothing"), "nothing to start"),
        (("up", "--app", "tests.support.toy_app:ingest_only", "--cpu", "1"), "knows nodes"),
        (("up", "--app", "no_such_module"), "no module 'no_such_module' here"),
        (("up", "--app", "tests.support.toy_app:absent"), "has no 'absent'"),
        (("up", "--app", "tests.support.toy_app:MODEL"), "'MODEL' cannot be called"),
        (("run", "nope", "--app", TOYHOST), "knows no workflow 'nope'"),
        (("run", "cyclic", "--app", TOYHOST), "cycle"),
        (("run", "chain", "--app", "tests.support.toy_app:ingest_only"), "no workflow provider"),
        (("run", "chain", "--app", TOYHOST, "--input", "novalue"), "should be key=value or @file"),
        (
            ("run", "chain", "--app", TOYHOST, "--input", "@/none"),
            "--input @/none cannot be read: No such file",
        ),
        (
            ("run", "chain", "--app", TOYHOST, "--out", "/dev/null/x"),
            "--out /dev/null/x cannot be used: Not a",
        ),
        (("run", "chain", "--input", "n=" + "[" * 70 + "]" * 70, "--no-wait"), "nested deeper"),
        (("run", "chain"), "no worker serves cpu; name the app by --app"),
        (("migrate", "--dir", "/no/such"), "no migration folder '/no/such'"),
        (("migrate", "--to", "9999"), "--to 9999: there is no migration 9999"),
        (("demo", "/no/such", "--yes"), "there is no folder /no/such"),
        (("demo", "a/" * 3000, "--yes"), "there is no folder a/a/a/"),
        (("demo",), "use a terminal, or --yes"),
    ]
    for argv, said in cases:
        with tabled.case(argv, said):
            refusal = invoke(*argv)
            assert said in refusal.line
            assert refusal.line.startswith(f"queue-workflows {argv[0]}: ")
            assert runs.list() == []


def test_the_demo_mixes_with_no_other_apps_work(
    db: ModuleType, invoke: Callable[..., Invoked], tmp_path: Path
) -> None:
    run = run_store.insert_run(workflow_name="theirs")
    refusal = invoke("demo", "--yes", "--out", str(tmp_path / "out"))
    assert "unfinished work of another app (run of 'theirs')" in refusal.line
    run_store.update_run(run["id"], status="cancelled")
    with db.connect() as conn:
        conn.execute(
            "INSERT INTO workers (worker_id, host_label, queue, pid) VALUES ('w', 'box', 'cpu', 7)"
        )
    refusal = invoke("demo", "--yes", "--out", str(tmp_path / "out"))
    assert "this database has workers already (cpu)" in refusal.line
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("command", ["status", "runs", "workers", "migrate"])
def test_a_database_that_does_not_answer(
    invoke: Callable[..., Invoked], monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.setenv("QUEUE_WORKFLOWS_DB_URL", NOWHERE)
    assert "database none at 127.0.0.1:1 does not answer" in invoke(command).line


@pytest.mark.parametrize("command", ["status", "runs", "workers", "migrate"])
def test_reading_makes_no_embedded_server(
    invoke: Callable[..., Invoked], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, command: str
) -> None:
    folder = tmp_path / "pg"
    monkeypatch.setenv("QUEUE_WORKFLOWS_EMBEDDED_DIR", str(folder))
    line = invoke(command).line
    assert "there is no embedded server" in line
    assert "queue-workflows up" in line
    assert not folder.exists()


def test_a_refusal_of_the_script_is_one_line_and_code_2(cli: Commands) -> None:
    done = cli.run(QW, "status", QUEUE_WORKFLOWS_DB_URL="postgresql://u:canary77@[broken")
    assert "the DSN in QUEUE_WORKFLOWS_DB_URL" in refused(done)
    assert "canary77" not in done.err


def test_debug_shows_the_traceback_without_the_password(cli: Commands) -> None:
    done = cli.run(QW, "status", "--debug", QUEUE_WORKFLOWS_DB_URL=NOWHERE)
    assert done.process.returncode == 2
    assert "Traceback (most recent call last)" in done.err
    assert "canary77" not in done.err


@pytest.mark.parametrize("redirect", [">&-", "2>&-", ">/dev/full", "| true"])
def test_a_lost_output_is_no_traceback(dsn: str, db: ModuleType, redirect: str) -> None:
    done = subprocess.run(
        ["/bin/bash", "-o", "pipefail", "-c", f'"$0" status {redirect}', script(QW)],
        env={**os.environ, "QUEUE_WORKFLOWS_DB_URL": dsn},
        capture_output=True, text=True, timeout=30, check=False,
    )  # fmt: skip
    assert "Traceback" not in done.stderr
    assert "Exception" not in done.stderr
    if redirect.endswith("&-"):
        assert done.returncode == 0
    elif redirect == ">/dev/full":
        assert done.returncode == 1
        said = "queue-workflows status: what it prints cannot be written: No space left on device"
        assert said in done.stderr


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_followed_run_whose_output_is_closed_continues_and_reports_it(
    dsn: str, db: ModuleType, tmp_path: Path, unbuffered: str
) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    folder = json.dumps(str(tmp_path))
    argv = ["run", "asking", "--app", TOYHOST, "--watch", "--input", f"folder={folder}"]
    done = subprocess.run(
        [script(QW), *argv],
        env={**os.environ, "QUEUE_WORKFLOWS_DB_URL": dsn, "PYTHONUNBUFFERED": unbuffered},
        stdin=subprocess.DEVNULL,
        stdout=writer,
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
        check=False,
    )
    os.close(writer)
    assert done.returncode == 130
    (row,) = runs.list()
    assert f"left run {row['id']} as it is" in done.stderr
    assert "Traceback" not in done.stderr


def test_an_unknown_option_is_a_usage_error(invoke: Callable[..., Invoked]) -> None:
    done = invoke("runs", "--limit", "0")
    assert done.code == 2
    assert "Traceback" not in done.err
    assert "--limit" in done.err


# --- migrate -----------------------------------------------------------------------------------


@pytest.fixture
def empty(fresh_database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The commands' database is one without a schema."""
    monkeypatch.setenv("QUEUE_WORKFLOWS_DB_URL", fresh_database)


@pytest.mark.usefixtures("empty")
def test_migrate_plans_applies_and_reverts(invoke: Callable[..., Invoked]) -> None:
    assert "needs" in invoke("status").out
    assert "no schema version" in invoke("runs").line
    planned = json.loads(invoke("migrate", "--dry-run", "--json").out)
    newest = planned["to_version"]
    assert planned["applied"] == list(range(1, newest + 1))
    assert "CREATE TABLE" in invoke("migrate", "--sql").out
    assert json.loads(invoke("status", "--json").out)["schema_version"] == 0

    done = json.loads(invoke("migrate", "--to", "12", "--json").out)
    assert (done["from_version"], done["applied"]) == (0, list(range(1, 13)))
    applied = ", ".join(map(str, range(13, newest + 1)))
    assert f"applied {applied}; installed the functions and triggers" in invoke("migrate").out
    assert "nothing to do" in invoke("migrate").out
    assert "DROP" in invoke("migrate", "--to", "12", "--sql").out
    assert json.loads(invoke("status", "--json").out)["schema_version"] == newest


@pytest.mark.usefixtures("empty")
def test_migrate_to_an_older_version_refuses_to_lose_data(invoke: Callable[..., Invoked]) -> None:
    invoke("migrate")
    assert invoke("run", "chain", "--no-wait", "--input", "folder=x").code == 0
    line = invoke("migrate", "--to", "0").line
    assert "table workflow_runs with 1 rows" in line
    assert line.endswith("add --allow-data-loss to do it all the same")
    assert json.loads(invoke("status", "--json").out)["runs"] == {"queued": 1}
    done = invoke("migrate", "--to", "0", "--allow-data-loss", "--json")
    assert json.loads(done.out)["reverted"][-1] == 1


@pytest.mark.usefixtures("empty")
def test_migrate_runs_a_chain_of_the_apps_own(
    invoke: Callable[..., Invoked], tmp_path: Path
) -> None:
    (tmp_path / "0001_mine.sql").write_text("CREATE TABLE mine (n int);")
    (tmp_path / "0001_mine.down.sql").write_text("DROP TABLE mine;")
    chain = ("migrate", "--dir", str(tmp_path), "--table", "my_versions")
    assert "applied 1" in invoke(*chain).out
    assert "reverted 1" in invoke(*chain, "--to", "0").out
