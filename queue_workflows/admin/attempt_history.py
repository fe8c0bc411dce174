"""Build the attempts of a job, one for each claim, from its events, its logs and its row."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime

from queue_workflows.runtime import stored_json
from queue_workflows.types import TERMINAL_RUN_STATUSES, JsonDict, Row

_TRIPS = frozenset({"budget_trip", "stall_trip", "gpu_health_trip"})
ENDS = frozenset({"completed", "failed", "cancelled", "parked", "retried", "requeued", "reclaimed"})
"""Events that end an attempt; each has the claim's number."""
DEATHS = _TRIPS | {"death", "reclaimed"}
"""Events of attempts whose worker died or was stopped."""


def build(
    job: Row, events: Iterable[Row], logs: Iterable[Row], *, reopened: datetime | None = None
) -> list[JsonDict]:
    """Return one entry for each claim, the oldest first; `events` are in this order too.

    An event without a claim's number (a model load, an app's own) belongs to the claim before it.
    `reopened` is when the job's run was last queued, as a reopened node waits since then. A claim
    without events (pruned, or made by 0.3.0) is built from the row.
    """
    made: dict[int, JsonDict] = {}
    queued_at, current = job["created_at"], 0
    for event in events:
        number = event["claim_no"] or current
        kind, at = event["event_type"], event["created_at"]
        if kind == "claimed":
            current = number
            if queued_at is None and reopened is not None and reopened <= at:
                queued_at = reopened
            made[number] = _attempt(number, event, queued_at)
        elif number in made:
            _add(made[number], event)
        if kind in ENDS:
            queued_at = None if kind in TERMINAL_RUN_STATUSES else at
    if job["claim_no"] and job["claim_no"] not in made:
        made[job["claim_no"]] = _from_row(job)
    for number, attempt in made.items():
        _finish(attempt, job, runs=number == job["claim_no"] and job["status"] == "running")
    for log in logs:
        if log["claim_no"] in made:
            made[log["claim_no"]]["log"] = log_of(log)
    return [made[number] for number in sorted(made)]


def log_of(row: Row) -> JsonDict:
    """Return a stored log as `text`, with a line in place of the cut bytes, and `cut_bytes`."""
    cut = row["cut_bytes"]
    return {"text": row["head"] + (gap(cut) if cut else "") + row["tail"], "cut_bytes": cut}


def gap(cut_bytes: int) -> str:
    """Return the line that replaces so many omitted bytes in a log."""
    return f"\n[... {cut_bytes:,} bytes cut ...]\n"


def _attempt(number: int, event: Row, queued_at: datetime | None) -> JsonDict:
    claimed_at, worker_id = event["created_at"], event["worker_id"]
    pid = str(worker_id or "").partition(":")[2].partition(":")[0]
    return {
        "claim_no": number,
        "host_label": event["host_label"],
        "worker_id": worker_id,
        "pid": int(pid) if pid.isdecimal() else None,
        "queued_at": queued_at,
        "waited_s": _seconds(queued_at, claimed_at),
        "claimed_at": claimed_at,
        **dict.fromkeys(("ended_at", "ran_s", "outcome", "error", "traceback", "used")),
        "events": [_event(event)],
        "log": None,
        "machine": None,
    }


def _from_row(job: Row) -> JsonDict:
    claim = {
        "created_at": job["started_at"], "host_label": job["claimed_by"],
        "worker_id": job["worker_id"],
    }  # fmt: skip
    attempt = _attempt(job["claim_no"], claim | dict.fromkeys(_EVENT_COLUMNS), None)
    attempt["events"] = []
    if job["status"] not in ("running", "queued"):
        ended = {"ended_at": job["finished_at"], "outcome": job["status"], "error": job["error"]}
        attempt |= ended | {"ran_s": job["seconds"]}
    return attempt


_EVENT_COLUMNS = ("event_type", "elapsed_s", "error", "detail")


def _event(event: Row) -> JsonDict:
    shown = {key: event[key] for key in _EVENT_COLUMNS}
    return {"event_type": shown.pop("event_type"), "at": event["created_at"], **shown}


def _add(attempt: JsonDict, event: Row) -> None:
    attempt["events"].append(_event(event))
    kind = event["event_type"]
    detail = stored_json.mapping(event["detail"])
    attempt["traceback"] = stored_json.text(detail.get("traceback")) or attempt["traceback"]
    attempt["used"] = stored_json.mapping(detail.get("used")) or attempt["used"]
    if event["error"] and (kind in _TRIPS or attempt["error"] is None):
        attempt["error"] = event["error"]
    if kind in ENDS and attempt["ended_at"] is None:
        attempt["ended_at"], attempt["outcome"] = event["created_at"], kind
        attempt["ran_s"] = event["elapsed_s"]


def _finish(attempt: JsonDict, job: Row, *, runs: bool) -> None:
    """Set the outcome and the duration; without an ending event the outcome is `unknown`."""
    ended_at = attempt["ended_at"]
    if attempt["outcome"] is None:
        attempt["outcome"], ended_at = ("running", job["read_at"]) if runs else ("unknown", None)
    if attempt["ran_s"] is None:
        attempt["ran_s"] = _seconds(attempt["claimed_at"], ended_at)


def _seconds(start: datetime | None, end: datetime | None) -> float | None:
    if start is None or end is None:
        return None
    return max(0.0, (end - start).total_seconds())
