"""Find queues that no worker serves or that are OFF; describe these, and pauses, in one line."""

from __future__ import annotations

import contextlib
import shlex

from queue_workflows import config, db
from queue_workflows.cli import output
from queue_workflows.db import statements
from queue_workflows.runtime import display, identity
from queue_workflows.types import Row

_SERVING = frozenset({"idle", "busy"})


def unserved(queues: set[str]) -> set[str]:
    """Return those of the queues that no live worker serves.

    A worker of this machine whose process has ended counts as dead.
    """
    with contextlib.closing(db.connect()) as conn:
        rows = statements.workers.list(conn, stale_s=config.STALE_WORKER_AFTER_S.read())
    here = identity.machine()
    return queues - {
        row["queue"]
        for row in rows
        if row["state"] in _SERVING
        and row["desired_state"] == "on"
        and (f":{here}:" not in row["worker_id"] or identity.process_exists(row["pid"]))
    }


def switched_off(queues: set[str]) -> list[Row]:
    """Return the OFF rows in force that stop this machine's workers of these queues."""
    if config.DISABLE_WORKER_CONTROL.read():
        return []
    with contextlib.closing(db.connect()) as conn:
        rows = statements.workers.switched_off(conn)
    here = config.host_label()
    return [row for row in rows if row["host_label"] == here and row["queue"] in {*queues, "all"}]


def switch_text(row: Row) -> str:
    """Return `gpu-1 cpu is switched off by ops (new disk), on again in 29 min: COMMAND ...`."""
    by = f" by {row['requested_by']}" if row["requested_by"] else ""
    reason = f" ({row['reason']})" if row["reason"] else ""
    ends = "" if row["until_s"] is None else f", on again in {output.seconds(row['until_s'])}"
    host, queue = (shlex.quote(row[key]) for key in ("host_label", "queue"))
    turn_on = f"queue-worker-control --queue={queue} --on --host {host}"
    what = f"{row['host_label']} {row['queue']} is switched off{by}{reason}{ends}"
    return output.line(f"{what}: `{turn_on}` turns it on", 500)


def pause_text(row: Row) -> str:
    """Return `queue load, partition a is paused until TIME by ops: COMMAND resumes it`."""
    key = f", partition {row['partition']}" if row["partition"] is not None else ""
    until = f" until {display.moment(row['until'])}" if row["until"] else ""
    by = f" by {row['by']}" if row["by"] else ""
    resume = f"queue-workflows queues resume {shlex.quote(row['queue'])}"
    if row["partition"] is not None:
        resume += f" --partition {shlex.quote(row['partition'])}"
    what = f"queue {row['queue']}{key} is paused{until}{by}"
    return output.line(f"{what}: `{resume}` resumes it", 500)


def unserved_text(row: Row) -> str:
    """Return what `unserved_jobs.count_by_queue` found of a queue, in one sentence."""
    jobs = output.counted(row["n"], "job")
    text = f"no worker takes the jobs of queue {row['queue']}, so the lock keys of {jobs} passed to"
    return output.line(f"{text} others", 500)
