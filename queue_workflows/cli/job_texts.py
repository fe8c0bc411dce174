"""Return lines about a run's or job's parts: its state, attempts, events, options and changes."""

from __future__ import annotations

import re
from datetime import datetime
from typing import Any

from queue_workflows.admin import waiting_reasons
from queue_workflows.cli import output, run_views
from queue_workflows.runtime import display, stored_json

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


def name_of(job: dict[str, Any]) -> str:
    """Return its node id or its task's name."""
    return job["node_id"] if "node_id" in job else job["task_name"]


def heading(job: dict[str, Any]) -> str:
    """Return `node job 5f0c (cut): running, 40 %`: its kind, id, name and state."""
    return f"{job['kind']} {job['id']} ({output.line(name_of(job))}): {state(job)}"


def keys_text(job: dict[str, Any]) -> str:
    """Return `lock key feed, headers {"by": "ann"}`: the options of an ingest job, or ""."""
    given = [("idempotency key", "idempotency_key"), ("lock key", "lock_key")]
    given += [("partition", "partition_key"), ("headers", "headers"), ("time-out", "timeout_s")]
    parts: list[str] = []
    for name, key in given:
        value = job.get(key)
        if value not in (None, {}):
            parts.append(f"{name} {value if isinstance(value, str) else output.compact(value)}")
    return ", ".join(parts) + (" s" if parts and job.get("timeout_s") is not None else "")


def act_text(act: dict[str, Any]) -> str:
    """Return `09:12:01.250 cancel requested by ann`."""
    reason = stored_json.mapping(act["detail"]).get("reason")
    why = f": {output.line(reason)}" if reason else ""
    what = act["event_type"].replace("_", " ")
    return output.line(f"{display.clock(act['at'])} {what} by {act['actor']}{why}", 500)


def place_text(attempt: dict[str, Any]) -> str:
    """Return `09:12:01.250 gpu-1 pid 77, waited 0.1 s`."""
    pid = f" pid {attempt['pid']}" if attempt["pid"] else ""
    text = (
        f"{display.clock(attempt['claimed_at'])} {attempt['host_label'] or 'an unknown host'}{pid}"
    )
    if attempt["waited_s"] is not None:
        text += f", waited {output.seconds(attempt['waited_s'])}"
    return output.line(text)


def attempt_text(attempt: dict[str, Any]) -> str:
    """Return `09:12:01.250 gpu-1 pid 77, waited 0.1 s, ran 2.0 s, failed: ValueError: ...`."""
    parts = [place_text(attempt)]
    if attempt["ran_s"] is not None:
        parts.append(f"ran {output.seconds(attempt['ran_s'])}")
    trips = (e["event_type"] for e in attempt["events"] if e["event_type"].endswith("_trip"))
    parts += [kind.replace("_", " ") for kind in trips]
    outcome: str = attempt["outcome"]
    parts.append(OUTCOMES.get(outcome, outcome))
    error = f": {attempt['error']}" if attempt["error"] else ""
    return output.line(", ".join(parts) + error, 500)


def event_text(event: dict[str, Any]) -> str:
    """Return `09:12:01.250 model load done, 3.1 s`."""
    text = f"{display.clock(event['at'])} {event['event_type'].replace('_', ' ')}"
    if event["elapsed_s"] is not None:
        text += f", {output.seconds(event['elapsed_s'])}"
    error = event["error"] or stored_json.mapping(event["detail"]).get("reason")
    return output.line(f"{text}: {output.line(error, 500)}" if error else text, 500)


def map_texts(found: dict[str, Any]) -> list[str]:
    """Return how many items of a map are done, and a line for each of the first that failed."""
    words = f"{found['done']}/{found['total']} done"
    words += f", {found['failed']} failed" if found["failed"] else ""
    words += f", {found['open']} open" if found["open"] else ""
    texts = [f"items of {output.line(found['node_id'])}: {words}"]
    for item in found["items_failed"]:
        error = output.line(item["error"] or "no error was given")
        texts.append(f"  {output.line(item['key'])}: {error}")
    if found["failed"] > len(found["items_failed"]):
        texts.append(f"  and {found['failed'] - len(found['items_failed'])} more")
    return texts


def item_text(item: dict[str, Any]) -> str:
    """Return the state of an item, with its error if it has one."""
    state = item["state"]
    if item["error"] is not None:
        words = "fails when its open nodes end" if state == "open" else state
        state = f"{words}: {output.line(item['error'] or 'no error was given')}"
    return f"item {output.line(item['key'])} of {output.line(item['map_id'])}: {state}"


def loop_text(loop: dict[str, Any]) -> str:
    """Return how many rounds a loop has begun, and how the last one is."""
    begun = output.counted(loop["rounds"], "round")
    last = f", last {loop['last']}" if loop["last"] else ""
    return f"loop {output.line(loop['node_id'])}: {begun} of at most {loop['at_most']}{last}"


def output_text(returned: dict[str, Any]) -> str:
    """Return what a run returned, on one line; a text as it is, other values as JSON."""
    value: Any = returned["result"] if [*returned] == ["result"] else returned
    shown = value if isinstance(value, str) else output.compact(value, 2000)
    return output.line(f"output: {shown}", 2000)


def stored_moment(value: Any) -> str:
    """Return a time that PostgreSQL has stored in JSON; a value of another form as it is."""
    text = re.sub(r"\.\d+", "", stored_json.text(value) or "")
    try:
        return display.moment(datetime.fromisoformat(text))
    except ValueError:
        return output.compact(value, 40)


def moved(move: dict[str, Any]) -> str:
    """Return the nodes by which a run's new code differs: `+new, -old, cut: version 1 to 2`."""
    parts = [
        f"{sign}{name}"
        for sign, key in (("+", "added"), ("-", "removed"))
        for name in stored_json.sequence(move.get(key))
    ]
    for each in map(stored_json.mapping, stored_json.sequence(move.get("changed"))):
        parts.append(changed_text(each))
    more = f" and {len(parts) - MOVED} more" if len(parts) > MOVED else ""
    return output.line(", ".join(parts[:MOVED]), 500) + more


def changed_text(change: dict[str, Any]) -> str:
    """Return how a node differs: its id, its versions, and the other fields that differ."""
    fields = [str(name) for name in stored_json.sequence(change.get("fields"))]
    words = [name for name in fields if name != "version"]
    if "version" in fields:
        before, after = (
            change.get("version_before") or "none",
            change.get("version_after") or "none",
        )
        words.insert(0, f"version {before} to {after}")
    return f"{change.get('id')}: {', '.join(words)}"


def state(job: dict[str, Any]) -> str:
    """Return the state, progress, the reason of a wait, and the error."""
    status: str = job["status"]
    prompt = stored_json.mapping(job.get("input_spec")).get("prompt")
    words = {"awaiting_input": "waiting for an answer"}.get(status, status)
    parts = [run_views.waits_for(job) or words]
    if again := run_views.again_text(job, job["attempts_failed"]):
        parts.append(again)
    elif status == "queued" and job.get("blocked_reason"):
        due = f" until {display.moment(job['available_at'])}" if job["available_at"] else ""
        why = job["blocked_reason"].replace("_", " ")
        unserved = why == "unserved"
        parts.append(waiting_reasons.unserved_text(job["queue"]) if unserved else f"{why}{due}")
    if status == "running" and (shown := run_views.progress_text(job["progress"])):
        parts.append(shown)
    if status == "running" and job["cancel_requested_at"]:
        parts.append("asked to stop")
    if status == "awaiting_input" and prompt:
        parts.append(output.line(prompt, 500))
    return ", ".join(parts) + (f": {job['error']}" if job["error"] else "")


def after(node: dict[str, Any]) -> str:
    """Return ` (after load, cut and 2 others)`, or "" for a node without dependencies."""
    deps = node["depends_on"]
    if not deps:
        return ""
    more = len(deps) - DEPENDENCIES
    names = ", ".join(deps[:DEPENDENCIES])
    return f" (after {names}{f' and {more} others' if more > 0 else ''})"
