"""`retry`, `answer` and `inputs` as processes, beside a real orchestrator and worker."""

from __future__ import annotations

import json
import signal
from pathlib import Path

from queue_workflows import db, jobs, node_queue, run_store, runs
from tests.support import factories, flow, toy_app
from tests.support.commands import TOYHOST, Commands, refused
from tests.support.wait import until

QW = "queue-workflows"


def waiting_run() -> str:
    """A run that waits at `q`, its question stored, nobody there to take the answer."""
    host = flow.Flow()
    options = [{"label": "Left", "value": "l"}, {"label": "Down\x1b[2J", "value": -1}]
    host.define(flow.ask("q", "turnout", prompt="Which\nway?", turnout_options=options))
    run_id = host.submit()
    host.go()
    host.close()
    return run_id


def test_a_run_is_answered_failed_fixed_and_retried(cli: Commands, tmp_path: Path) -> None:
    worker = cli.start("queue-claim-worker", "--queue", "cpu", "--app", TOYHOST)
    orchestrator = cli.start("queue-orchestrator", "--app", TOYHOST)
    asked = run_store.insert_run(workflow_name="asking", context={"folder": str(tmp_path)})["id"]
    broken = run_store.insert_run(workflow_name="fail", context={"folder": str(tmp_path)})["id"]
    until(lambda: (node_of(asked, "ask") or {}).get("input_spec"), timeout_s=60)
    (listed,) = json.loads(cli.run(QW, "inputs", "--json").out)
    assert (listed["run_id"], listed["prompt"]) == (asked, "Left or right?")
    done = cli.run(QW, "answer", asked, "ask", "Right")
    assert (done.process.returncode, done.err) == (0, "")
    assert done.out == f'node ask of run {asked}: answered "r"\n'
    until(lambda: status(asked) == "completed", timeout_s=60)
    again = cli.run(QW, "answer", asked, "ask", "l")
    assert (again.process.returncode, again.out) == (1, "")
    assert again.err == (
        f"queue-workflows answer: node ask of run {asked} has been answered already with"
        ' "r"; the first answer counts\n'
    )
    until(lambda: status(broken) == "failed", timeout_s=60)
    bad = (node_of(broken, "work/bad") or {})["id"]
    for what in (broken, bad):
        done = cli.run(QW, "retry", what, "--json")
        assert (done.process.returncode, json.loads(done.out)["outcome"]) == (0, "queued")
        until(lambda: status(broken) == "failed", timeout_s=60)
    assert len(toy_app.pids(tmp_path, "fail")) == 3
    for process in (worker, orchestrator):
        process.send(signal.SIGTERM)
        assert process.wait() == 0


def node_of(run_id: str, node_id: str) -> flow.Spec | None:
    rows = node_queue.list_jobs_for_run(run_id)
    return next((row for row in rows if row["node_id"] == node_id), None)


def status(run_id: str) -> str:
    return (run_store.get_run(run_id) or {})["status"]


def test_an_answer_that_does_not_fit_is_one_line_and_code_2(cli: Commands, tmp_path: Path) -> None:
    run_id = waiting_run()
    assert 'it is one of "l" (Left), -1' in refused(cli.run(QW, "answer", run_id, "q", "up"))
    assert "No such file" in refused(cli.run(QW, "answer", run_id, "q", f"@{tmp_path}/none"))
    shown = cli.run(QW, "inputs", run_id).out
    assert shown.splitlines()[1:] == [r"  Which\nway?", '    "l"  Left', r"    -1  Down\x1b[2J"]
    (tmp_path / "given").write_text("-1\n")
    unknown = cli.run(QW, "answer", "nope", "q", "1")
    assert unknown.err == "queue-workflows answer: there is no run 'nope'\n"
    assert unknown.process.returncode == 1
    assert cli.run(QW, "answer", run_id, "q", f"@{tmp_path}/given").process.returncode == 0
    second = cli.run(QW, "answer", run_id, "q", "-1", "--json")
    assert (second.process.returncode, json.loads(second.out)["outcome"]) == (1, "already answered")
    assert "; the first answer counts" in second.err
    assert "`queue-workflows inputs` lists them" in cli.run(QW, "status").out


def test_retry_reports_its_outcome_by_text_and_exit_code(cli: Commands) -> None:
    with db.connect() as conn:
        job = factories.ingest(conn)
    early = cli.run(QW, "retry", job["id"])
    assert (early.process.returncode, early.out) == (1, "")
    assert early.err == (
        f"queue-workflows retry: ingest job {job['id']} (t): it is queued: only a failed or"
        " cancelled one is retried\n"
    )
    jobs.cancel(job["id"])
    done = cli.run(QW, "retry", job["id"])
    assert (done.process.returncode, done.out) == (0, f"ingest job {job['id']} (t): queued\n")
    assert "is a job" in refused(cli.run(QW, "retry", job["id"], "--from", "a"))
    unknown = cli.run(QW, "retry", "nope", "--json")
    assert (unknown.process.returncode, json.loads(unknown.out)["outcome"]) == (1, "unknown")


# --- prune


def test_prune_lists_what_would_be_deleted_and_deletes_it(cli: Commands) -> None:
    with db.connect() as conn:
        for days in (1, 400):
            run_id = factories.run(conn, status="completed")
            conn.execute(
                "UPDATE workflow_runs SET finished_at = now() - %s * interval '1 day'"
                " WHERE id = %s",
                (days, run_id),
            )
    assert cli.run(QW, "prune", "--dry-run").out == "would delete: runs 1\n"
    done = json.loads(cli.run(QW, "prune", "--dry-run", "--json").out)
    assert (done["dry_run"], done["deleted"]) == (True, {"runs": 1, "jobs": 0})
    assert cli.run(QW, "prune", QUEUE_WORKFLOWS_RUN_RETENTION_DAYS="0").out == "deleted: nothing\n"
    assert cli.run(QW, "prune").out == "deleted: runs 1\n"
    assert len(runs.list()) == 1
    assert cli.run(QW, "prune", "--all").process.returncode == 2
