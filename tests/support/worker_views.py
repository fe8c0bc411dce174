"""Queue jobs for workers that run as processes, and read what becomes of jobs and processes."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

from queue_workflows import db, jobs, node_queue, run_store
from queue_workflows.types import Row
from tests.support import slot_app
from tests.support.commands import Command


def enqueued(task: str, **args: Any) -> str:
    """Queue a job of a task of `slot_app`; return its id."""
    return jobs.enqueue(task_name=task, queue=slot_app.QUEUE, args=args)


def node(module: str, **inputs: Any) -> str:
    """Queue a node of a run of its own; return its job's id."""
    run_id = run_store.insert_run(workflow_name="single", status="running")["id"]
    return node_queue.enqueue_node_job(
        run_id=run_id, node_id="n", node_module=module, queue="cpu", inputs=inputs
    )


def row(job_id: str) -> Row:
    """Return the row of an ingest job."""
    found = node_queue.get_ingest_job(job_id)
    assert found is not None
    return dict(found)


def node_row(job_id: str) -> Row:
    """Return the row of a node's job."""
    found = node_queue.get_node_job(job_id)
    assert found is not None
    return dict(found)


def status(job_id: str, wanted: str) -> bool:
    """Return whether an ingest job has this status."""
    return row(job_id)["status"] == wanted


def ended(*ids: str, status: str = "completed") -> bool:
    """Return whether all of these ingest jobs have the status."""
    return all(row(each)["status"] == status for each in ids)


def begun(*folders: Path, times: int = 1) -> bool:
    """Return whether a handler of `slot_app` has started in each folder, so many times."""
    return all(len(slot_app.starts_of(each)) >= times for each in folders)


def charges(job_id: str) -> tuple[int, int, int]:
    """Return the claims, failed attempts and crashes of an ingest job."""
    found = row(job_id)
    return found["claim_no"], found["attempts"], found["crash_count"]


def state(pid: int) -> str:
    """Return the state letter of a process; X if there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "X"


def alive(pid: int) -> bool:
    """Return whether the process runs; a zombie, which nobody may reap here, does not."""
    return state(pid) not in "XZ"


def sessions() -> set[int]:
    """Return the process ids of the connections of others to the test database."""
    with db.connect() as conn:
        found = conn.execute(
            "SELECT pid FROM pg_stat_activity"
            " WHERE datname = current_database() AND pid <> pg_backend_pid()"
            "   AND backend_type = 'client backend'"
        ).fetchall()
    return {each["pid"] for each in found}


def stopped(command: Command) -> None:
    """Stop a worker by SIGTERM; it exits with 0."""
    command.send(signal.SIGTERM)
    assert command.wait() == 0, command.err
