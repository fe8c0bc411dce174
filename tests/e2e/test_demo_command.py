"""`queue-workflows demo` on a real folder, with a worker killed in the middle."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from pathlib import Path
from types import ModuleType
from typing import Any

import queue_workflows
from queue_workflows import run_store
from queue_workflows.db import Connection
from tests.support.commands import Command, Commands
from tests.support.wait import until

SOURCE = str(Path(queue_workflows.__file__).parent / "runtime")


def crashed(conn: Connection, worker_id: str) -> str:
    """The node that went down with a killed worker; "" when it held none any more.

    The server still does what the worker had sent before it was killed: a finish, and with it the
    claim of the next node, which then is the one to be taken back.
    """

    def outcome() -> dict[str, Any] | None:
        row = conn.execute(
            "SELECT (SELECT node_id FROM workflow_node_events WHERE event_type = 'death'"
            " AND worker_id = %(worker)s) AS crashed, EXISTS (SELECT FROM workflow_node_jobs"
            " WHERE status = 'running' AND worker_id = %(worker)s) AS holds",
            {"worker": worker_id},
        ).fetchone()
        assert row is not None
        return None if row["holds"] else row

    return until(outcome)["crashed"] or ""


def kill_one_at_work(db: ModuleType, demo: Command) -> str:
    """SIGKILL a worker while it holds a node; that node's id once the crash is counted."""
    ours = {pid for queue in ("cpu", "gpu") for pid in demo.pids(f"--queue {queue}")}
    with db.connect() as conn:
        for row in conn.execute(
            "SELECT id, node_id, worker_id FROM workflow_node_jobs WHERE status = 'running'"
        ).fetchall():
            pid = int(row["worker_id"].split(":")[1])
            if pid not in ours:
                continue
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)
                still = conn.execute(
                    "SELECT FROM workflow_node_jobs WHERE id = %s AND worker_id = %s",
                    (row["id"], row["worker_id"]),
                ).fetchone()
                os.kill(pid, signal.SIGKILL if still is not None else signal.SIGCONT)
                if still is not None and (node_id := crashed(conn, row["worker_id"])):
                    return node_id
    return ""


def demo_argv(out: Path) -> tuple[str, ...]:
    return (
        "queue-workflows",
        "demo",
        SOURCE,
        "--yes",
        "--workers",
        "2",
        "--out",
        str(out),
        "--json",
    )


def test_a_demo_with_a_killed_worker_ends_with_the_same_report(
    cli: Commands, db: ModuleType, tmp_path: Path
) -> None:
    demo = cli.start(*demo_argv(tmp_path / "killed"))
    node_id = until(lambda: kill_one_at_work(db, demo), timeout_s=40, every_s=0.002)
    assert demo.wait(60) == 0, demo.err
    assert demo.family() == {}
    found = json.loads(demo.out)
    assert found["taken_back"] == 1
    assert found["nodes"] == {"completed": found["nodes_total"]}
    assert sum(place["nodes"] for place in found["workers"]) == found["nodes_total"] - 1
    assert {place["queue"] for place in found["workers"]} == {"cpu", "gpu"}
    assert "taken back from a dead worker 1 time" in demo.err, node_id

    assert cli.run(*demo_argv(tmp_path / "calm"), timeout_s=60).process.returncode == 0
    for name in ("report.html", "report.md"):
        killed, calm = (tmp_path / k / "report" / "write" / name for k in ("killed", "calm"))
        assert killed.read_bytes() == calm.read_bytes()


def test_ctrl_c_cancels_the_demo_and_leaves_no_process(cli: Commands, tmp_path: Path) -> None:
    demo = cli.start("queue-workflows", "demo", SOURCE, "--yes", "--out", str(tmp_path))
    run = until(lambda: next(iter(run_store.list_runs()), None), timeout_s=30)
    demo.send(signal.SIGINT)
    assert demo.wait() == 130, demo.err
    until(lambda: not demo.family())
    ended = run_store.get_run(run["id"])
    assert ended
    assert ended["status"] == "cancelled"
