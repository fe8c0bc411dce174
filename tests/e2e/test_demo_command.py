"""`queue-workflows demo` runs to its end, stops on request, and survives a killed worker."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx

from queue_workflows import run_store, runs
from queue_workflows.db import Connection
from tests.support.commands import Command, Commands
from tests.support.dashboard import Page
from tests.support.terminal import SCREEN, Terminal
from tests.support.wait import until

RESULTS = {"book": "page/write_page/book.html", "picture of the run": "picture/draw_run/run.svg"}
"""What the demo names at its end, in its folder."""
PAGES = {"QUEUE_WORKFLOWS_APP_DASHBOARD": "1"}


def crashed(conn: Connection, job_id: str) -> str:
    """Return the node whose executor was killed; "" if its handler had ended before."""

    def outcome() -> dict[str, Any] | None:
        row = conn.execute(
            "SELECT node_id, crash_count, status = 'running' AND claim_no = 1 AS holds"
            " FROM workflow_node_jobs WHERE id = %s",
            (job_id,),
        ).fetchone()
        assert row is not None
        return None if row["holds"] else row

    found = until(outcome)
    return found["node_id"] if found["crash_count"] else ""


def kill_one_at_work(db: ModuleType, demo: Command) -> str:
    """Kill the executor of the gpu worker while it runs a node, whose handlers take a while.

    Return the node's id once the crash is counted.
    """
    ours = set(demo.pids("--queue gpu"))
    with db.connect() as conn:
        for row in conn.execute(
            "SELECT id, node_id, worker_id FROM workflow_node_jobs WHERE status = 'running'"
        ).fetchall():
            pid = int(row["worker_id"].split(":")[1])
            if pid not in ours:
                continue
            launchers = demo.pids(f"launcher of worker {pid}")
            executors = [
                each for one in launchers for each in demo.pids(f"executor of launcher {one}")
            ]
            if not executors:
                continue
            with contextlib.suppress(ProcessLookupError):
                os.kill(executors[0], signal.SIGSTOP)
                still = conn.execute(
                    "SELECT FROM workflow_node_jobs WHERE id = %s AND worker_id = %s",
                    (row["id"], row["worker_id"]),
                ).fetchone()
                os.kill(executors[0], signal.SIGKILL if still is not None else signal.SIGCONT)
                if still is not None and (node_id := crashed(conn, row["id"])):
                    return node_id
    return ""


def demo_argv(out: Path, *more: str) -> tuple[str, ...]:
    return ("queue-workflows", "demo", "--yes", "--workers", "2", "--out", str(out), *more)


def test_the_demo_ends_with_a_book_and_shows_what_happened(cli: Commands, tmp_path: Path) -> None:
    out = tmp_path / "new" / "out"
    done = cli.run(*demo_argv(out), timeout_s=60, **PAGES)
    assert done.process.returncode == 0, done.err
    until(lambda: not done.family())
    assert "colours/fetch_colours: queued, attempt 1 of 3 failed, it runs again" in done.out
    assert "answered choose: " in done.out
    assert "nodes: 11 completed" in done.out
    for what, name in RESULTS.items():
        assert f"{what}: {out / name}\n" in done.out
        assert (out / name).stat().st_size > 1000

    run = runs.list()[0]
    up = "`queue-workflows up --app queue_workflows.demo:setup`"
    assert f"its page, while {up} runs: http://127.0.0.1:8082/ui/runs/{run['id']}\n" in done.out
    shown = cli.run("queue-workflows", "show", run["id"], "--json")
    nodes = {node["node_id"]: node for node in json.loads(shown.out)["nodes"]}
    logs = [[a["log"] and a["log"]["text"] for a in node["attempts"]] for node in nodes.values()]
    assert sum("painted text" in (log or "") for attempts in logs for log in attempts) == 3
    assert sum("loaded the painter" in (log or "") for attempts in logs for log in attempts) == 1
    first, second = nodes["colours/fetch_colours"]["attempts"]
    assert (first["outcome"], second["outcome"]) == ("retried", "completed")
    assert "ConnectionError" in first["error"]


def test_a_demo_with_a_killed_worker_ends_with_the_same_book(
    cli: Commands, db: ModuleType, tmp_path: Path
) -> None:
    # A whole demo may pass between two polls of a busy machine: then another one is started.
    for _ in range(5):
        demo = cli.start(*demo_argv(tmp_path / "killed", "--json"))
        killed_node = until(
            lambda demo=demo: kill_one_at_work(db, demo) or demo.process.poll() is not None,
            timeout_s=60, every_s=0.002,
        )  # fmt: skip
        if isinstance(killed_node, str):
            break
    assert isinstance(killed_node, str)
    assert demo.wait(60) == 0, demo.err
    assert demo.family() == {}
    found = json.loads(demo.out)
    assert found["taken_back"] == 1
    assert found["nodes"] == {"completed": found["nodes_total"]}
    assert sum(place["nodes"] for place in found["workers"]) == found["nodes_total"] - 1
    assert {place["queue"] for place in found["workers"]} == {"cpu", "gpu"}
    assert "taken back from a dead worker 1 time" in demo.err, killed_node

    assert cli.run(*demo_argv(tmp_path / "calm", "--json"), timeout_s=60).process.returncode == 0
    killed, calm = (tmp_path / name / RESULTS["book"] for name in ("killed", "calm"))
    assert killed.read_bytes() == calm.read_bytes()


def test_a_failed_demo_ends_with_1_and_names_the_node(cli: Commands, tmp_path: Path) -> None:
    folder, out = tmp_path / "notes", tmp_path / "out"
    folder.mkdir()
    (folder / "a.txt").write_text("A note\n\nof one line\n")
    earlier = out / RESULTS["picture of the run"]
    earlier.parent.mkdir(parents=True)
    earlier.touch()
    (out / "page").mkdir()
    (out / "page" / "write_page").write_text("a file where the node's folder would be")
    failed = cli.run(*demo_argv(out, str(folder)), timeout_s=60)
    assert failed.process.returncode == 1, failed.err
    assert "page/write_page" in failed.out
    assert "picture of the run:" not in failed.out, "the one in the folder is of an earlier run"


def test_ctrl_c_cancels_the_demo_and_leaves_no_process(cli: Commands, tmp_path: Path) -> None:
    demo = cli.start(*demo_argv(tmp_path))
    run = until(lambda: next(iter(runs.list()), None), timeout_s=30)
    demo.send(signal.SIGINT)
    assert demo.wait() == 130, demo.err
    until(lambda: not demo.family())
    ended = run_store.get_run(run["id"])
    assert ended
    assert ended["status"] == "cancelled"


def test_on_a_terminal_the_demo_ends_with_the_page_of_its_run(
    cli: Commands, tmp_path: Path, terminal: Terminal
) -> None:
    demo = cli.start(*demo_argv(tmp_path), terminal=terminal.theirs, **SCREEN, **PAGES)
    printed = r"(http://127\.0\.0\.1:\d+)/ui/login\?link=[\w-]+&next=/runs/([0-9a-f-]{36})"
    link = until(lambda: terminal.shows(printed), timeout_s=60)
    (run,) = runs.list()
    assert run["id"] == link[2]
    with httpx.Client(timeout=30) as http:
        form = Page(http.get(link[0])).form("/login")
        sent = {"data": dict(form.fields) | {"name": "ann"}, "follow_redirects": True}
        headers = {"sec-fetch-site": "same-origin"}
        page = Page(http.post(f"{link[1]}/ui/login", headers=headers, **sent))
        assert page.response.url.path == f"/ui/runs/{run['id']}"
        assert "picture_book" in page.text
        files = Page(http.get(f"{link[1]}/ui/runs/{run['id']}/files"))
        assert any("path=page" in to for to in files.links), files.text
    assert demo.process.poll() is None
    demo.send(signal.SIGINT)
    assert demo.wait() == 0
    until(lambda: not demo.family())
