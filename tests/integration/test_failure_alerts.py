"""Failed runs, jobs and schedules are noted with the failure and sent once, outside of it."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Generator
from datetime import datetime, timedelta, timezone
from pathlib import Path
from types import ModuleType
from typing import Any

import psycopg
import pytest

import queue_workflows
from queue_workflows import claim_worker, config, history, jobs, node_queue, run_store, runs
from queue_workflows.schedule import timetable
from queue_workflows.scheduler import Ticker
from tests.support import alert_senders, counting_cursor, factories, lost_replies, transitions, wait
from tests.support.clocks import Clock

UTC = timezone.utc
TEN = datetime(2024, 5, 1, 10, tzinfo=UTC)
Alert = dict[str, Any]
Make = Callable[..., alert_senders.Sender]


@pytest.fixture
def make(db: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Generator[Make]:
    """Make senders that look for failures when they are called; each has announced itself."""
    made: list[alert_senders.Sender] = []

    def call(
        hook: Any = None, command: tuple[str, ...] = (), **limits: float
    ) -> alert_senders.Sender:
        one = alert_senders.made(monkeypatch, hook, command, **limits)
        made.append(one)
        one.run_once()
        return one

    yield call
    for one in made:
        one.stop()


def alerts() -> list[dict[str, Any]]:
    """Return the rows that are not sent yet."""
    with queue_workflows.db.connection() as conn:
        return conn.execute(
            "SELECT * FROM failure_alerts WHERE sent_at IS NULL ORDER BY id"
        ).fetchall()


def execute(query: str, *values: Any) -> None:
    with queue_workflows.db.connection() as conn:
        conn.execute(query.encode(), values)


def dead_job(error: str = "no such file", **columns: Any) -> str:
    """Queue a job and let it fail for good; return its id."""
    with queue_workflows.db.connection() as conn:
        job = factories.ingest(conn, **columns)
    node_queue.mark_ingest_failed(job["id"], error=error)
    return job["id"]


def failed_run(**columns: Any) -> str:
    with queue_workflows.db.connection() as conn:
        run_id = factories.run(conn, **columns)
        conn.execute(
            "UPDATE workflow_runs SET status = 'failed', error = 'node n: boom',"
            " finished_at = now() WHERE id = %s",
            (run_id,),
        )
    return run_id


# --- what is sent ------------------------------------------------------------------------------


def test_a_job_that_died_a_failed_run_and_a_schedule_are_sent_once_each(make: Make) -> None:
    sent: list[Alert] = []
    one = make(sent.append)
    job = dead_job(task_name="prices", headers={"schedule": "night"})
    run = failed_run(workflow_name="report")
    with queue_workflows.db.connection() as conn:
        factories.insert(conn, "schedules", name="s", expression="@daily", task_name="t")
        conn.execute("UPDATE schedules SET error = 'no zone', next_at = '2026-01-01'")
        conn.execute("UPDATE schedules SET missed_at = '2026-01-02 03:04:05+00'")
    assert one.run_once() == 4
    assert one.run_once() == 0
    assert alerts() == []
    keys = ("kind", "id", "name", "queue", "schedule", "reason", "error", "count")
    assert [tuple(each[key] for key in keys) for each in sent] == [
        ("job", job, "prices", "fetch", "night", "failed", "no such file", 1),
        ("run", run, "report", None, None, "failed", "node n: boom", 1),
        ("schedule", "s", "t", None, "s", "cannot_fire", "no zone", 1),
        (
            "schedule", "s", "t", None, "s", "missed",
            "nothing fired for its instant 2026-01-02 03:04:05 UTC", 1,
        ),
    ]  # fmt: skip
    assert all(datetime.fromisoformat(each["at"]).tzinfo == UTC for each in sent)
    assert sent[0]["text"] == (
        f"job {job} of task prices (queue fetch, schedule night) failed: no such file"
    )
    assert sent[1]["text"] == f"run {run} of workflow report failed: node n: boom"
    assert sent[2]["text"] == "schedule s of task t cannot fire: no zone"


def test_a_job_of_a_worker_is_sent_after_its_last_attempt_only(make: Make) -> None:
    def boom(reason: str) -> None:
        raise RuntimeError("boom")

    sent: list[Alert] = []
    one = make(sent.append)
    config.register_ingest_task("boom", boom)
    job = jobs.enqueue("boom", queue="fetch", max_attempts=2)
    worker = claim_worker.ClaimWorker(queue="fetch")
    assert worker.run_once()
    assert one.run_once() == 0
    execute("UPDATE ingest_jobs SET available_at = NULL")
    assert worker.run_once()
    assert one.run_once() == 1
    assert (sent[0]["id"], "boom" in sent[0]["error"]) == (str(job), True)


def test_a_run_that_a_schedule_submitted_names_it(make: Make) -> None:
    sent: list[Alert] = []
    one = make(sent.append)
    run = run_store.insert_run(run_id="r", workflow_name="w", status="running")["id"]
    with queue_workflows.db.connection() as conn:
        conn.execute(
            "INSERT INTO schedule_fires (name, fire_at, run_id) VALUES ('s', now(), %s)", (run,)
        )
    run_store.update_run(run, status="failed", error="boom")
    assert one.run_once() == 1
    assert sent[0]["schedule"] == "s"


def test_a_retried_run_and_a_retried_job_are_sent_again(make: Make) -> None:
    sent: list[Alert] = []
    one = make(sent.append)
    run, job = failed_run(), dead_job()
    execute("UPDATE workflow_runs SET definition = '{}' WHERE id = %s", run)
    assert one.run_once() == 2
    execute("UPDATE workflow_runs SET status = 'queued' WHERE id = %s", run)
    jobs.retry(job)
    assert one.run_once() == 0
    execute("UPDATE workflow_runs SET status = 'failed' WHERE id = %s", run)
    node_queue.mark_ingest_failed(job, error="again")
    assert one.run_once() == 2
    assert [each["id"] for each in sent] == [run, job, run, job]


def test_what_is_cancelled_completed_or_not_ours_is_not_sent(make: Make) -> None:
    one = make(lambda alert: None)
    with queue_workflows.db.connection() as conn:
        cancelled, steps = factories.run(conn), factories.run(conn, mode="step")
        job = factories.ingest(conn)
        factories.ingest(conn)
        transitions.complete_ingest(conn, transitions.claim_ingest(conn))
        conn.execute("UPDATE workflow_runs SET status = 'failed' WHERE id = %s", (steps,))
    runs.cancel(cancelled)
    execute(
        "UPDATE ingest_jobs SET status = 'cancelled', finished_at = now()"
        " WHERE id = %s AND status = 'queued'",
        job["id"],
    )
    assert alerts() == []
    assert one.run_once() == 0


def test_a_failure_that_is_rolled_back_is_not_sent(make: Make) -> None:
    one = make(lambda alert: None)
    with queue_workflows.db.connection() as conn:
        job = factories.ingest(conn)
        with conn.transaction(force_rollback=True):
            conn.execute("UPDATE ingest_jobs SET status = 'failed' WHERE id = %s", (job["id"],))
            assert factories.one(conn, "SELECT count(*) FROM failure_alerts") == 1
    assert one.run_once() == 0


# --- schedules ---------------------------------------------------------------------------------


def ticker(clock: Clock[datetime], **more: Any) -> Ticker:
    """A ticker that planned the schedule `s` of every hour at the clock's time."""
    config.register_ingest_task("prices", lambda reason: None)
    config.set_ingest_schedule(
        [timetable.Schedule("s", "5 * * * *", task_name="prices", queue="fetch", **more)]
    )
    made = Ticker(now_fn=clock)
    made.run_once()
    execute("UPDATE schedules SET changed_at = %s, next_at = NULL, wake_at = NULL", clock.now)
    made.run_once()
    return made


def test_a_missed_fire_of_a_ticker_is_sent_once(make: Make) -> None:
    sent: list[Alert] = []
    one, clock = make(sent.append), Clock(TEN)
    made = ticker(clock, catch_up="none")
    clock.now = TEN + timedelta(hours=3)
    made.run_once()
    made.run_once()
    assert one.run_once() == 1
    assert (sent[0]["reason"], sent[0]["id"]) == ("missed", "s")
    assert "2024-05-01 12:05:00 UTC" in sent[0]["error"], "the last of three"


def test_a_schedule_that_keeps_failing_is_sent_once_until_it_fires_again(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL, "queue_workflows.scheduler")
    sent: list[Alert] = []
    one, clock = make(sent.append), Clock(TEN)
    made = ticker(clock)
    execute(
        "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS"
        " $$ BEGIN RAISE 'refused at %%', clock_timestamp(); END $$"
    )
    execute(
        "CREATE TRIGGER refuse BEFORE INSERT ON ingest_jobs FOR EACH ROW EXECUTE FUNCTION refuse()"
    )
    try:
        clock.now = TEN + timedelta(minutes=6)
        made.run_once()
        assert one.run_once() == 1
        minute_later()
        for _ in range(3):
            Ticker(now_fn=clock).run_once()
            assert one.run_once() == 0
    finally:
        execute("DROP TRIGGER refuse ON ingest_jobs")
        execute("DROP FUNCTION refuse()")
    assert (sent[0]["reason"], sent[0]["id"]) == ("cannot_fire", "s")
    assert "refused at" in sent[0]["error"]
    Ticker(now_fn=clock).run_once()
    execute("UPDATE schedules SET error = 'again'")
    assert one.run_once() == 1
    assert sent[1]["error"] == "again"


# --- without a sender --------------------------------------------------------------------------


def test_without_a_sender_nothing_is_noted(db: ModuleType) -> None:
    dead_job()
    failed_run()
    assert alerts() == []


def test_failures_are_noted_for_a_while_after_the_last_sender(make: Make) -> None:
    make(lambda alert: None, max_age_s=60.0).stop()
    dead_job()
    assert len(alerts()) == 1
    execute("UPDATE failure_alert_state SET wanted_until = now() - interval '1 second'")
    dead_job()
    assert len(alerts()) == 1
    assert history.prune()["failure_alerts"] == 0
    execute("UPDATE failure_alerts SET failed_at = now() - interval '25 hours'")
    assert history.prune()["failure_alerts"] == 1


def test_at_most_ten_thousand_failures_wait(make: Make) -> None:
    make(lambda alert: None).stop()
    execute(
        "INSERT INTO failure_alerts (kind, subject, occurrence, reason)"
        " SELECT 'job', n::text, '1', 'failed' FROM generate_series(1, 10001) n"
    )
    job = dead_job()
    assert job not in [row["subject"] for row in alerts()]
    execute("DELETE FROM failure_alerts WHERE id < 100")
    job = dead_job()
    assert job in [row["subject"] for row in alerts()]


def test_a_row_with_a_forged_number_keeps_no_job_and_no_run_from_failing(make: Make) -> None:
    """A role that may insert into the table can override the number of a row."""
    make(lambda alert: None).stop()
    dead_job()
    for forged in (-(2**63), 2**63 - 1):
        execute(
            "INSERT INTO failure_alerts (id, kind, subject, occurrence, reason)"
            f" OVERRIDING SYSTEM VALUE VALUES ({forged}, 'job', '{forged}', '0', 'failed')"
        )
        job, run_id = node_queue.get_ingest_job(dead_job()), run_store.get_run(failed_run())
        assert job is not None and run_id is not None
        assert (job["status"], run_id["status"]) == ("failed", "failed")


def test_a_job_finishes_with_as_many_statements_as_before(make: Make, dsn: str) -> None:
    def finish(conn: psycopg.Connection[Any]) -> tuple[int, int]:
        counter = counting_cursor.Counter(conn)
        for _ in range(2):
            factories.ingest(conn)
            transitions.complete_ingest(conn, transitions.claim_ingest(conn))
        return counter.statements, counter.rows

    with queue_workflows.db.connect() as conn:
        before = finish(conn)
    make(lambda alert: None)
    with queue_workflows.db.connect() as conn:
        assert finish(conn) == before
        assert factories.one(conn, "SELECT count(*) FROM failure_alerts") == 0


# --- the hook ----------------------------------------------------------------------------------

OPEN = """
SELECT count(*) AS n FROM pg_stat_activity
 WHERE datname = current_database() AND pid <> pg_backend_pid()
   AND application_name LIKE 'queue_workflows%%' AND xact_start IS NOT NULL
"""


def test_the_hook_is_called_outside_of_every_transaction(make: Make) -> None:
    seen: list[tuple[int, int]] = []

    def hook(alert: Alert) -> None:
        with queue_workflows.db.connect() as conn:
            taken = "SELECT count(*) FROM failure_alerts WHERE taken_by IS NOT NULL"
            seen.append((factories.one(conn, OPEN), factories.one(conn, taken)))

    one = make(hook)
    dead_job()
    assert one.run_once() == 1
    assert seen == [(0, 1)], "open transactions, and the committed claim"


@pytest.mark.parametrize("error", [ValueError("no"), SystemExit(3), KeyboardInterrupt()])
def test_a_hook_that_raises_changes_nothing(
    make: Make, caplog: pytest.LogCaptureFixture, error: BaseException
) -> None:
    sent: list[str] = []

    def hook(alert: Alert) -> None:
        sent.append(alert["id"])
        alert.clear()
        raise error

    one = make(hook)
    first, second = dead_job(), dead_job()
    assert one.run_once() == 2
    assert one.run_once() == 0
    assert sent == [first, second]
    assert f"the failure hook raised {type(error).__name__} for: job {first}" in caplog.text


def test_a_hook_that_hangs_keeps_only_itself_from_being_called(
    make: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sent: list[str] = []
    go_on, out = threading.Event(), tmp_path / "out"

    def hook(alert: Alert) -> None:
        sent.append(alert["id"])
        go_on.wait(60)

    alone = make(hook)
    both = make(hook, ("sh", "-c", f"cat >> {out}"), timeout_s=0.2)
    first = dead_job()
    assert alone.run_once() == 1
    assert "the hook has not returned within 0.2 s" in caplog.text
    second = dead_job()
    assert alone.run_once() == 0, "it leaves the failure to senders that can send it"
    assert [row["claims"] for row in alerts()] == [0]
    assert both.run_once() == 1
    third = dead_job()
    assert both.run_once() == 1
    assert [json.loads(line)["id"] for line in out.read_text().splitlines()] == [second, third]
    assert sent == [first, second]
    go_on.set()
    fourth = dead_job()
    assert wait.until(alone.run_once) == 1
    assert sent[-1] == fourth


def test_an_async_hook_is_named(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    async def hook(alert: Alert) -> None: ...

    one = make(hook)
    dead_job()
    assert one.run_once() == 1
    assert "async" in caplog.text


# --- the command -------------------------------------------------------------------------------


def test_the_command_gets_the_alert_as_json_on_stdin(make: Make, tmp_path: Path) -> None:
    out, sent = tmp_path / "out", list[Alert]()
    one = make(sent.append, ("sh", "-c", f"cat > {out}"))
    dead_job()
    assert one.run_once() == 1
    assert json.loads(out.read_text()) == sent[0]
    assert out.read_text().count("\n") == 1


@pytest.mark.parametrize(
    ("script", "problem"),
    [
        ("exit 3", "sh ended with exit code 3"),
        ("kill -9 $$", "sh was killed by signal 9"),
        ("sleep 60 & sleep 60", "sh did not end within 0.3 s, and was killed"),
        ("trap '' TERM; exec 0<&-; while :; do sleep 1; done", "did not end within 0.3 s"),
    ],
)
def test_a_command_that_fails_or_hangs_is_bounded(
    make: Make, caplog: pytest.LogCaptureFixture, script: str, problem: str
) -> None:
    one = make(None, ("sh", "-c", script), timeout_s=0.3)
    job = dead_job()
    assert one.run_once() == 1
    assert problem in caplog.text and f"it was for: job {job}" in caplog.text
    assert one.run_once() == 0


def test_a_command_that_is_gone_is_logged(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    one = make(None, ("/nowhere/at-all",))
    dead_job()
    assert one.run_once() == 1
    assert "/nowhere/at-all cannot be started: No such file or directory" in caplog.text


HOSTILE = "\x1b[31m\u202e\r\nX" + "\u00e9\U0001f600" * 5_000_000


def test_hostile_texts_are_bounded_and_escaped_where_they_are_shown(
    make: Make, tmp_path: Path
) -> None:
    out, sent = tmp_path / "out", list[Alert]()
    one = make(sent.append, ("sh", "-c", f"cat > {out}"))
    with queue_workflows.db.connection() as conn:
        job = factories.ingest(conn, task_name="\u00e9" * 500, queue="fetch")
        conn.execute(
            "UPDATE ingest_jobs SET status = 'failed', error = %s WHERE id = %s",
            (HOSTILE, job["id"]),
        )
    (row,) = alerts()
    assert row["error"] == HOSTILE[:2000]
    assert one.run_once() == 1
    assert sent[0]["error"] == HOSTILE[:2000]
    assert sent[0]["text"].isprintable() and len(sent[0]["text"]) < 700
    piped = out.read_bytes()
    assert piped.isascii() and len(piped) < 65536
    assert json.loads(piped) == sent[0]


def test_secrets_in_an_error_are_masked(make: Make) -> None:
    sent: list[Alert] = []
    one = make(sent.append)
    with queue_workflows.db.connection() as conn:
        job = factories.ingest(conn)
        conn.execute(
            "UPDATE ingest_jobs SET status = 'failed', error = 'password=hunter2' WHERE id = %s",
            (job["id"],),
        )
    assert one.run_once() == 1
    assert "hunter2" not in json.dumps(sent)


# --- the limit ---------------------------------------------------------------------------------


def minute_later() -> None:
    """Move what the senders know a minute into the past."""
    execute(
        "UPDATE failure_alerts SET taken_at = taken_at - interval '61 seconds',"
        " sent_at = sent_at - interval '61 seconds'"
    )
    execute("UPDATE failure_alert_state SET quiet_until = quiet_until - interval '61 seconds'")


def test_the_limit_sums_up_what_is_too_much(make: Make) -> None:
    sent: list[Alert] = []
    one = make(sent.append, per_minute=10)
    for n in range(24):
        dead_job(task_name=f"t{n % 2}")
    for _ in range(2):
        failed_run(workflow_name="w")
    assert one.run_once() == 10
    assert [each["kind"] for each in sent] == ["job"] * 9 + ["summary"]
    last = sent[-1]
    assert (last["count"], last["id"], last["reason"]) == (17, None, "limit")
    assert last["text"] == "17 more failures: 15 jobs (t0, t1), 2 runs (w)"
    dead_job()
    assert one.run_once() == 0
    minute_later()
    assert one.run_once() == 1
    assert sent[-1]["kind"] == "job"


def test_as_many_as_the_limit_are_sent_one_by_one(make: Make) -> None:
    sent: list[Alert] = []
    one = make(sent.append, per_minute=3)
    for _ in range(3):
        dead_job()
        assert one.run_once() == 1
    dead_job()
    assert one.run_once() == 0
    assert [each["kind"] for each in sent] == ["job"] * 3
    with queue_workflows.db.connection() as conn:
        assert factories.one(conn, "SELECT count(*) FROM failure_alerts") == 4


def test_a_limit_of_one_sums_up_all(make: Make) -> None:
    sent: list[Alert] = []
    one = make(sent.append, per_minute=1)
    for _ in range(3):
        dead_job()
    assert one.run_once() == 1
    assert (sent[0]["kind"], sent[0]["count"]) == ("summary", 3)


def test_each_failure_is_sent_whatever_the_statistics_say_about_the_table(make: Make) -> None:
    """With statistics of one row the plan looks for the oldest row once for each row."""
    sent: list[Alert] = []
    one = make(sent.append, per_minute=600)
    ids = [dead_job()]
    with queue_workflows.db.connect() as conn:
        conn.execute("VACUUM ANALYZE failure_alerts")
    ids += [dead_job() for _ in range(30)]
    assert one.run_once() == 31
    assert [each["id"] for each in sent] == ids


def test_several_senders_share_the_limit_and_send_each_failure_once(make: Make) -> None:
    sent: list[Alert] = []
    senders = [make(sent.append, per_minute=7) for _ in range(4)]
    ids = {dead_job() for _ in range(40)}
    barrier = threading.Barrier(4)

    def race(one: alert_senders.Sender) -> None:
        for _ in range(5):
            barrier.wait(30)
            one.run_once()

    threads = [threading.Thread(target=race, args=(one,)) for one in senders]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    single = [each["id"] for each in sent if each["kind"] == "job"]
    assert len(sent) == 7 and len(single) == len(set(single)) == 6 and set(single) < ids
    assert [each["count"] for each in sent if each["kind"] == "summary"] == [34]
    assert alerts() == []


def test_old_failures_expire(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    sent: list[Alert] = []
    one = make(sent.append, max_age_s=60.0)
    dead_job()
    execute("UPDATE failure_alerts SET failed_at = now() - interval '61 seconds'")
    fresh = dead_job()
    assert one.run_once() == 1
    assert [each["id"] for each in sent] == [fresh]
    assert "1 failure over 60 s old will not be sent" in caplog.text


# --- a sender that dies, a database that is away -------------------------------------------------


def lapse() -> None:
    """Let the claims of senders lapse."""
    execute("UPDATE failure_alerts SET taken_until = now() - interval '1 second'")


def test_what_a_dead_sender_took_is_sent_once_more(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    sent: list[Alert] = []
    one = make(sent.append)
    job = dead_job()
    assert alert_senders.take()
    assert one.run_once() == 0, "another sender has it"
    lapse()
    assert one.run_once() == 1
    assert [each["id"] for each in sent] == [job]
    dead_job()
    for _ in range(2):
        assert alert_senders.take()
        lapse()
    assert one.run_once() == 0
    assert "2 senders ended during the call; it is not sent again" in caplog.text
    assert alerts() == []


def test_a_database_that_goes_away_after_the_call_gets_the_note_later(make: Make) -> None:
    sent: list[Alert] = []
    one = make(sent.append)
    dead_job()
    with (
        lost_replies.at_statement("SET sent_at"),
        pytest.raises(queue_workflows.db.OperationalError),
    ):
        one.run_once()
    assert len(alerts()) == 1
    assert one.run_once() == 0
    assert (len(sent), alerts()) == (1, [])
