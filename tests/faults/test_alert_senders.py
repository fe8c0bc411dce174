"""Schedulers send failures whatever their hook does, dies of, or loses meanwhile."""

from __future__ import annotations

import contextlib
import itertools
import signal
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from queue_workflows import db, errors, node_queue, scheduler, set_on_failed
from queue_workflows.__main__ import main
from tests.faults import test_every_statement
from tests.hostile import roles
from tests.support import alert_app, alert_senders, constants, factories, proxy
from tests.support.commands import Command, Commands
from tests.support.wait import until

APP = ("--app", "tests.support.alert_app:setup")
SCHEDULER = ("queue-scheduler", *APP)


def quick(**more: float) -> dict[str, str]:
    values = {"POLL_S": 0.1, **more}
    return constants.env({f"alerts.sender.{name}": value for name, value in values.items()})


QUICK = quick()


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    path = tmp_path / "journal"
    path.touch()
    return path


@pytest.fixture
def sent(journal: Path) -> Any:
    """Return the ids that hooks were called with."""
    return lambda: [line["id"] for line in alert_app.lines(journal)]


def start(cli: Commands, journal: Path, mode: str = "", **env: str) -> Command:
    """Start a scheduler, and wait until failures are noted for it."""
    given = {**QUICK, alert_app.ALERTS: str(journal), alert_app.MODE: mode, **env}
    with db.connect() as conn:
        conn.execute("DELETE FROM failure_alert_state")
        one = cli.start(*SCHEDULER, **given)
        until(lambda: factories.one(conn, "SELECT count(*) FROM failure_alert_state") == 1)
    return one


def dead_job(error: str = "gone") -> str:
    with db.connect() as conn:
        job = factories.ingest(conn)
    node_queue.mark_ingest_failed(job["id"], error=error)
    return job["id"]


def left() -> int:
    with db.connect() as conn:
        query = "SELECT count(*) FROM failure_alerts WHERE sent_at IS NULL"
        return factories.one(conn, query)


def lapse() -> None:
    """Let the claims of senders lapse, under the lock under which senders read them."""
    with db.transaction() as conn:
        conn.execute("SELECT FROM failure_alert_state FOR UPDATE")
        conn.execute("UPDATE failure_alerts SET taken_until = now() - interval '1 second'")


def test_a_scheduler_calls_its_hook_and_its_command(
    db: ModuleType, cli: Commands, journal: Path, sent: Any, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    one = start(cli, journal, QUEUE_WORKFLOWS_ON_FAILED=f"sh -c 'cat >> {out}; echo said'")
    job = dead_job()
    until(lambda: sent() == [job] and not left())
    (line,) = alert_app.lines(journal)
    assert line["pid"] == one.process.pid
    assert f'"id": "{job}"' in out.read_text()
    assert "said" in one.err and not one.out
    one.send(signal.SIGTERM)
    assert one.wait(5) == 0, one.err


def test_three_schedulers_send_each_failure_once(
    db: ModuleType, cli: Commands, journal: Path, sent: Any
) -> None:
    for _ in range(3):
        start(cli, journal, **quick(PER_MINUTE=600))
    ids = [dead_job() for _ in range(60)]
    until(lambda: not left())
    assert sorted(sent()) == sorted(ids)


@pytest.mark.parametrize("mode", ["exit", "kill"])
def test_a_hook_that_ends_the_process_is_called_twice_at_most(
    db: ModuleType, cli: Commands, journal: Path, sent: Any, mode: str
) -> None:
    first = start(cli, journal, mode)
    job = dead_job()
    assert first.wait() == (7 if mode == "exit" else -signal.SIGKILL)
    assert (sent(), left()) == ([job], 1)
    second = start(cli, journal, mode)
    lapse()
    assert second.wait() == (7 if mode == "exit" else -signal.SIGKILL)
    third = start(cli, journal)
    lapse()
    other = dead_job()
    until(lambda: other in sent() and not left())
    assert sent() == [job, job, other]
    assert "2 senders ended during the call" in third.err


def test_a_hook_that_hangs_stops_no_schedule_and_no_shutdown(
    db: ModuleType, cli: Commands, journal: Path, sent: Any
) -> None:
    with db.connect() as conn:
        factories.insert(
            conn, "schedules", name="s", expression="every 1s", task_name="note", queue="fetch",
            overlap="allow",
        )  # fmt: skip
        one = start(cli, journal, "hang", **quick(TIMEOUT_S=0.2))
        job = dead_job()
        until(lambda: "the hook has not returned within 0.2 s" in one.err)
        count = "SELECT count(*) FROM schedule_fires"
        before = factories.one(conn, count)
        until(lambda: factories.one(conn, count) > before + 1)
        waits = dead_job()
        one.send(signal.SIGTERM)
        assert one.wait(5) == 0, one.err
        assert (sent(), left()) == ([job], 1)
        start(cli, journal)
        until(lambda: sent() == [job, waits])


def test_a_call_that_a_stop_cuts_short_is_made_again(
    db: ModuleType, cli: Commands, journal: Path, sent: Any
) -> None:
    one = start(cli, journal, "hang", **quick(TIMEOUT_S=300))
    job = dead_job()
    until(lambda: sent() == [job])
    one.send(signal.SIGTERM)
    assert one.wait(5) == 0, one.err
    start(cli, journal)
    assert left() == 1
    lapse()
    until(lambda: sent() == [job, job] and not left())


@pytest.mark.timeout(180)
def test_a_database_that_goes_away_during_the_call_is_sent_later(
    db: ModuleType, cli: Commands, journal: Path, sent: Any, wire: proxy.Proxy
) -> None:
    one = start(cli, journal, "hang", QUEUE_WORKFLOWS_DB_URL=wire.dsn)
    job = dead_job()
    until(lambda: sent() == [job])
    wire.freeze()
    wire.cut()
    Path(f"{journal}.go").touch()
    until(lambda: "failure alerts: send waits for" in one.err, timeout_s=60)
    assert left() == 1
    wire.thaw()
    until(lambda: not left(), timeout_s=60)
    other = dead_job()
    until(lambda: sent() == [job, other])
    assert "Traceback" not in one.err
    one.send(signal.SIGTERM)
    assert one.wait(10) == 0


@pytest.mark.parametrize("after", [False, True])
def test_a_sender_that_loses_its_connection_at_any_statement_sends_each_failure(
    db: ModuleType, monkeypatch: pytest.MonkeyPatch, after: bool
) -> None:
    hits: list[str] = []
    for nth in itertools.count(1):
        sent: list[dict[str, Any]] = []
        one = alert_senders.made(monkeypatch, sent.append)
        with db.transaction() as conn:
            conn.execute("DELETE FROM failure_alert_state")
            factories.alert_sender(conn)
        job = dead_job()
        plan = test_every_statement.Sabotage(nth, after=after)
        with (
            test_every_statement.sabotaged(monkeypatch, plan),
            contextlib.suppress(db.OperationalError),
        ):
            one.run_once()
        lapse()
        one.run_once()
        one.stop()
        assert ([alert["id"] for alert in sent], left()) == ([job], 0), plan.hit
        if not plan.hit:
            break
        hits.append(plan.hit)
    # A connection lost after a statement within a transaction is one lost before the next.
    assert len(hits) >= (3 if after else 9), hits


# --- refusals -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("ON_FAILED", "sh -c 'x", "No closing quotation"),
        ("ON_FAILED", "/nowhere/send --all", "names no executable: '/nowhere/send'"),
    ],
)
@pytest.mark.parametrize("how", ["scheduler", "up"])
def test_a_wrong_setting_is_refused_with_what_is_allowed(
    db: ModuleType, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str],
    how: str, name: str, value: str, said: str,
) -> None:  # fmt: skip
    monkeypatch.setenv(f"QUEUE_WORKFLOWS_{name}", value)
    code = scheduler.main([*APP]) if how == "scheduler" else main(["up", *APP])
    assert code == 2
    line = capfd.readouterr().err.splitlines()[-1]
    assert f"QUEUE_WORKFLOWS_{name}={value!r}" in line and said in line


def test_what_is_no_function_is_refused() -> None:
    with pytest.raises(errors.InvalidConfig, match="a function or None, not 'page'"):
        set_on_failed("page")  # type: ignore[arg-type]


def test_up_starts_a_scheduler_for_the_hook(
    db: ModuleType, cli: Commands, journal: Path, sent: Any
) -> None:
    env = {**QUICK, alert_app.ALERTS: str(journal)}
    up = cli.start("queue-workflows", "up", *APP, **env)
    with db.connect() as conn:
        until(lambda: factories.one(conn, "SELECT count(*) FROM failure_alert_state") == 1)
        job = factories.ingest(conn, task_name="note")
    until(lambda: sent() == [job["id"]])
    assert "scheduler" in up.err.partition("starting ")[2].partition("\n")[0]
    up.send(signal.SIGINT)
    assert up.wait() == 0, up.err


# --- roles --------------------------------------------------------------------------------------


def test_a_role_that_submits_or_reads_writes_no_alert_and_its_failures_are_noted(
    db: ModuleType, dsn: str
) -> None:
    with db.connect() as owner:
        owner.execute("INSERT INTO failure_alert_state (wanted_until) VALUES (now() + '1 hour')")
    for purpose in ("submit", "read"):
        with roles.role(dsn, purpose) as name, db.connect(url=roles.as_role(dsn, name)) as conn:
            for statement in (
                "INSERT INTO failure_alerts (kind, subject, occurrence, reason)"
                " VALUES ('job', 'x', '1', 'failed')",
                "UPDATE failure_alerts SET error = 'x'",
                "DELETE FROM failure_alerts",
                "UPDATE failure_alert_state SET quiet_until = now()",
                "INSERT INTO failure_alert_state (wanted_until) VALUES (now())",
                "SELECT queue_workflows_alert('job', 'x', '1', 'n', 'failed', 'e')",
            ):
                with pytest.raises(db.Error, match="permission denied"):
                    conn.execute(statement.encode())
    with db.connect() as owner:
        owner.execute("CREATE ROLE alerts_plain")
        owner.execute(
            "GRANT SELECT, UPDATE ON workflow_runs, workflow_node_jobs, ingest_jobs"
            " TO alerts_plain;"
            " GRANT INSERT ON workflow_node_events TO alerts_plain;"
            " GRANT USAGE ON SEQUENCE workflow_node_events_id_seq TO alerts_plain"
        )
        run_id, job = factories.run(owner), factories.ingest(owner)
        try:
            with db.connect(url=roles.as_role(dsn, "alerts_plain")) as conn:
                conn.execute("UPDATE workflow_runs SET status = 'failed' WHERE id = %s", (run_id,))
                conn.execute("UPDATE ingest_jobs SET status = 'failed' WHERE id = %s", (job["id"],))
        finally:
            owner.execute("DROP OWNED BY alerts_plain")
            owner.execute("DROP ROLE alerts_plain")
        found = factories.column(owner, "SELECT subject FROM failure_alerts ORDER BY id")
    assert found == [run_id, job["id"]]
