"""Return lines about runs, nodes, jobs, attempts, samples of machines, and queues that stand."""

from __future__ import annotations

import re
import shlex
from datetime import datetime
from typing import Any, cast

from queue_workflows.admin import waiting_reasons
from queue_workflows.cli import output
from queue_workflows.runtime import display, stored_json
from queue_workflows.types import JsonDict, Row

SMALL = 60
"""A run with more nodes shows only the nodes that run, wait or failed."""
SHOWN = 40
DONE = ("completed", "skipped")
DEPENDENCIES = 3
MOVED = 10
"""Nodes that are named of a move to other code."""
OUTCOMES = {
    "parked": "waits for an answer",
    "retried": "failed, to be tried again",
    "requeued": "queued again",
    "reclaimed": "taken back from a dead worker",
    "unknown": "end unknown",
}
"""What is printed of an outcome, where it is not its name."""


def words(status: str) -> str:
    """Return the status as people read it."""
    return "waiting for an answer" if status == "awaiting_input" else status


# --- a node or job -----------------------------------------------------------------------------


def name_of(job: JsonDict) -> str:
    """Return its node id or its task's name."""
    return job["node_id"] if "node_id" in job else job["task_name"]


def heading(job: JsonDict) -> str:
    """Return `node job 5f0c (cut): running, 40 %`: its kind, id, name and state."""
    return f"{job['kind']} {job['id']} ({output.line(name_of(job))}): {state(job)}"


def state(job: JsonDict) -> str:
    """Return the state, progress, the reason of a wait, and the error."""
    status: str = job["status"]
    why = job.get("blocked_reason") if status == "queued" else None
    again = again_text(job, job["attempts_failed"])
    if not again and why:
        again = waiting_reasons.unserved_text(job["queue"]) if why == "unserved" else blocked(job)
    prompt = stored_json.mapping(job.get("input_spec")).get("prompt")
    text = output.listed(
        waits_for(job) or words(status),
        again,
        status == "running" and progress_text(job["progress"]),
        status == "running" and job["cancel_requested_at"] and "asked to stop",
        status == "awaiting_input" and prompt and output.line(prompt, 500),
    )
    return f"{text}: {job['error']}" if job["error"] else text


def node_text(node: Row) -> str:
    """Return a node's state, time, progress, worker and error."""
    status, seconds = node["status"], node["elapsed_s"]
    crashes, lapses = node["crash_count"], node["lapse_count"]
    return output.listed(
        waits_for(node) or words(status),
        status != "queued" and seconds is not None and output.seconds(seconds),
        again_text(node, node["attempts"]),
        status == "running" and progress_text(node["progress"]),
        status == "running" and f"on {place(node['worker_id'])}",
        crashes and f"taken back from a dead worker {output.counted(crashes, 'time')}",
        lapses and f"its lease lapsed {output.counted(lapses, 'time')}",
        node["error"] and output.line(node["error"]),
    )


def blocked(job: Row, *, zone: bool = True) -> str:
    """Return why a queued job is not claimed, and until when."""
    at = job["available_at"]
    due = f" until {display.moment(at, zone=zone)}" if at else ""
    return job["blocked_reason"].replace("_", " ") + due


def waits_for(node: Row) -> str | None:
    """Return `waiting for run ID` for a node that waits for its child run; None for others."""
    child = node.get("child_run_id") if node["status"] == "awaiting_input" else None
    return None if child is None else f"waiting for run {output.line(child)}"


def again_text(job: Row, failed: int) -> str:
    """Return when a job runs again that failed `failed` times; "" for any other."""
    if job["status"] != "queued" or failed < 1:
        return ""
    if job["blocked_reason"] not in (None, "not_due"):
        return ""
    made = f"attempt {failed} of {job['max_attempts']} failed"
    return f"{made}, {display.again(job['available_at'])}"


def place(worker_id: str | None) -> str:
    """Return `queue host pid 123` without the rest of a worker's id; `?` for none."""
    label, _, rest = (worker_id or "").partition(":")
    pid = rest.partition(":")[0]
    shown = output.line(label or ("" if pid.isdecimal() else "?"), 40)
    return f"{shown} pid {pid}" if pid.isdecimal() else shown


def progress_text(progress: Any) -> str:
    """Return `40 %` for a number from 0 to 1, a text, or the members of a dict; "" for none."""
    if isinstance(progress, str):
        return output.line(progress, 60)
    if isinstance(progress, (int, float)) and not isinstance(progress, bool):
        return display.number(progress * 100, ".0f", " %")
    if isinstance(progress, dict):
        members = cast("dict[str, Any]", progress).items()
        return output.line(" ".join(f"{k}={output.word(v, 60)}" for k, v in members), 60)
    return ""


def keys_text(job: JsonDict) -> str:
    """Return `lock key feed, headers {"by": "ann"}`: the options of an ingest job, or ""."""
    given = [("idempotency key", "idempotency_key"), ("lock key", "lock_key")]
    given += [("partition", "partition_key"), ("headers", "headers"), ("time-out", "timeout_s")]
    used = [(name, job[key]) for name, key in given if job.get(key) not in (None, {})]
    parts = [f"{name} {output.word(value)}" for name, value in used]
    return ", ".join(parts) + (" s" if job.get("timeout_s") is not None else "")


def after(node: JsonDict) -> str:
    """Return ` (after load, cut and 2 others)`, or "" for a node without dependencies."""
    deps = node["depends_on"]
    more = len(deps) - DEPENDENCIES
    names = ", ".join(deps[:DEPENDENCIES])
    return f" (after {names}{f' and {more} others' if more > 0 else ''})" if deps else ""


# --- attempts, events and changes by people ----------------------------------------------------


def act_text(act: JsonDict) -> str:
    """Return `09:12:01.250 cancel requested by ann`."""
    reason = stored_json.mapping(act["detail"]).get("reason")
    why = f": {output.line(reason)}" if reason else ""
    what = act["event_type"].replace("_", " ")
    return output.line(f"{display.clock(act['at'])} {what} by {act['actor']}{why}", 500)


def place_text(attempt: JsonDict) -> str:
    """Return `09:12:01.250 gpu-1 pid 77, waited 0.1 s`."""
    pid = f" pid {attempt['pid']}" if attempt["pid"] else ""
    where = f"{attempt['host_label'] or 'an unknown host'}{pid}"
    waited = attempt["waited_s"]
    text = "" if waited is None else f", waited {output.seconds(waited)}"
    return output.line(f"{display.clock(attempt['claimed_at'])} {where}{text}")


def attempt_text(attempt: JsonDict) -> str:
    """Return `09:12:01.250 gpu-1 pid 77, waited 0.1 s, ran 2.0 s, failed: ValueError: ...`.

    If the attempt was handed back, the text has the reason instead of an error.
    """
    trips = [e["event_type"] for e in attempt["events"] if e["event_type"].endswith("_trip")]
    outcome: str = attempt["outcome"]
    text = output.listed(
        place_text(attempt),
        attempt["ran_s"] is not None and f"ran {output.seconds(attempt['ran_s'])}",
        *(kind.replace("_", " ") for kind in trips),
        OUTCOMES.get(outcome, outcome),
    )
    why = attempt["error"]
    for event in attempt["events"]:
        if not why and event["event_type"] == outcome == "requeued":
            why = stored_json.mapping(event["detail"]).get("reason")
    return output.line(f"{text}: {why}" if why else text, 500)


def used_text(found: JsonDict) -> str:
    """Return `used 0.8 GB RAM, GPU 63 %, 20.3 GB GPU memory`: peaks, and the mean of the GPU."""
    known = {
        "ram_mb": f"{gb(found.get('ram_mb'))} RAM",
        "gpu_pct": f"GPU {percent(found.get('gpu_pct'))}",
        "vram_mb": f"{gb(found.get('vram_mb'))} GPU memory",
    }
    return f"used {', '.join(text for name, text in known.items() if name in found)}"


def event_text(event: JsonDict) -> str:
    """Return `09:12:01.250 model load done, 3.1 s`."""
    text = f"{display.clock(event['at'])} {event['event_type'].replace('_', ' ')}"
    if event["elapsed_s"] is not None:
        text += f", {output.seconds(event['elapsed_s'])}"
    error = event["error"] or stored_json.mapping(event["detail"]).get("reason")
    return output.line(f"{text}: {output.line(error, 500)}" if error else text, 500)


# --- a run -------------------------------------------------------------------------------------


def run_text(run: JsonDict, done: int, total: int, limit: int | None = display.LIMIT) -> str:
    """Return `run ID (workflow): running, 3/10 nodes, 1.2 s: error`; `limit`: of each value."""
    nodes = f" {done}/{total} nodes," if total else ""
    state = f"{output.line(run['status'])},{nodes} {output.seconds(run['elapsed_s'])}"
    name = f"run {output.line(run['id'], limit)} ({output.line(run['workflow_name'], limit)})"
    return f"{name}: {state}" + (f": {output.line(run['error'], limit)}" if run["error"] else "")


def map_texts(found: JsonDict) -> list[str]:
    """Return how many items of a map are done, and a line for each of the first that failed."""
    failed, some = found["failed"], found["items_failed"]
    counts = output.listed(
        f"{found['done']}/{found['total']} done",
        failed and f"{failed} failed",
        found["open"] and f"{found['open']} open",
    )
    texts = [f"items of {output.line(found['node_id'])}: {counts}"]
    for item in some:
        error = output.line(item["error"] or "no error was given")
        texts.append(f"  {output.line(item['key'])}: {error}")
    return texts + ([f"  and {failed - len(some)} more"] if failed > len(some) else [])


def item_text(item: JsonDict) -> str:
    """Return the state of an item, with its error if it has one."""
    shown = item["state"]
    if item["error"] is not None:
        ends = "fails when its open nodes end" if shown == "open" else shown
        shown = f"{ends}: {output.line(item['error'] or 'no error was given')}"
    return f"item {output.line(item['key'])} of {output.line(item['map_id'])}: {shown}"


def loop_text(loop: JsonDict) -> str:
    """Return how many rounds a loop has begun, and how the last one is."""
    begun = output.counted(loop["rounds"], "round")
    last = f", last {loop['last']}" if loop["last"] else ""
    return f"loop {output.line(loop['node_id'])}: {begun} of at most {loop['at_most']}{last}"


def output_text(returned: JsonDict) -> str:
    """Return what a run returned, on one line; a text as it is, other values as JSON."""
    value: Any = returned["result"] if [*returned] == ["result"] else returned
    return output.line(f"output: {output.word(value, 2000)}", 2000)


def moved_text(move: JsonDict) -> str:
    """Return when a run was moved to other code, by whom, and the nodes that differ.

    It reads `moved to other code at TIME by ann: +new, -old, cut: version 1 to 2`.
    """
    parts = [
        f"{sign}{name}"
        for sign, key in (("+", "added"), ("-", "removed"))
        for name in stored_json.sequence(move.get(key))
    ]
    for each in map(stored_json.mapping, stored_json.sequence(move.get("changed"))):
        parts.append(changed_text(each))
    more = f" and {len(parts) - MOVED} more" if len(parts) > MOVED else ""
    actor = f" by {output.line(str(move['actor']))}" if move.get("actor") else ""
    text = re.sub(r"\.\d+", "", stored_json.text(move.get("at")) or "")
    try:
        at = display.moment(datetime.fromisoformat(text))
    except ValueError:
        at = output.compact(move.get("at"), 40)
    return f"moved to other code at {at}{actor}: {output.line(', '.join(parts[:MOVED]), 500)}{more}"


def changed_text(change: JsonDict) -> str:
    """Return how a node differs: its id, its versions, and the other fields that differ."""
    fields = [str(name) for name in stored_json.sequence(change.get("fields"))]
    differs = [name for name in fields if name != "version"]
    if "version" in fields:
        versions = (change.get(f"version_{when}") or "none" for when in ("before", "after"))
        differs.insert(0, f"version {' to '.join(map(str, versions))}")
    return f"{change.get('id')}: {', '.join(differs)}"


# --- a machine and its queues ------------------------------------------------------------------


def sample(row: JsonDict) -> str:
    """Return a sample as a line: `cpu 98 %, ram 63.1/64.0 GB, swap 2.0 GB, gpus 0 % ...`."""
    return (
        f"cpu {percent(row.get('cpu_percent'))},"
        f" ram {used(row.get('ram_used_mb'), row.get('ram_total_mb'))},"
        f" swap {gb(row.get('swap_used_mb'))}, gpus {gpus(row)}"
    )


def gpus(row: JsonDict) -> str:
    """Return `97 % 21.3/24.0 GB, 0 % 0.2/24.0 GB`; `-` for none."""
    each = [
        f"{percent(gpu.get('use_pct'))} {used(gpu.get('vram_used_mb'), gpu.get('vram_total_mb'))}"
        for gpu in map(stored_json.mapping, stored_json.sequence(row.get("gpus")))
    ]
    return ", ".join(each) or "-"


def percent(value: Any) -> str:
    """Return `97 %`, or `-`."""
    return display.number(value, ".0f", " %")


def gb(value: Any) -> str:
    """Return MB as `21.3 GB`, or `-`."""
    mb = stored_json.number(value)
    return "-" if mb is None else f"{mb / 1024:.1f} GB"


def used(some: Any, total: Any) -> str:
    """Return MB as `21.3/24.0 GB`, or `-`."""
    if stored_json.number(some) is None or stored_json.number(total) is None:
        return "-"
    return f"{gb(some).removesuffix(' GB')}/{gb(total)}"


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
    key = option = ""
    if row["partition"] is not None:
        key = f", partition {row['partition']}"
        option = f" --partition {shlex.quote(row['partition'])}"
    resume = f"queue-workflows queues resume {shlex.quote(row['queue'])}{option}"
    what = f"queue {row['queue']}{key} is {paused(row['until'], row['by'])}"
    return output.line(f"{what}: `{resume}` resumes it", 500)


def paused(until: Any, by: str | None) -> str:
    """Return `paused until TIME by ops`."""
    ends = f" until {display.moment(until)}" if until else ""
    return f"paused{ends}{f' by {by}' if by else ''}"
