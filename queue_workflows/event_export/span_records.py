"""Turn an attempt's events, or the row of a run, into a record for spans and the metric log."""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Sequence
from typing import Any, Final, NamedTuple

from queue_workflows.admin import attempt_history
from queue_workflows.runtime import masking, stored_json, trace_context
from queue_workflows.types import Row

CAUSES: Final = frozenset({"death", "budget_trip", "stall_trip", "gpu_health_trip"})
"""Events that tell why an attempt ended; that of a death may come after the end."""
_BAD: Final = frozenset({"failed", "retried", "reclaimed"})
_DEATH: Final = ("signal", "exit_code", "core", "max_rss_mb", "oom_kills", "charged", "reason")
TEXT_LIMIT: Final = 2000


class Claim(NamedTuple):
    """A claim of a job; `run_id` and `node_id` are None outside of runs."""

    job_id: str
    claim_no: int
    run_id: str | None = None
    node_id: str | None = None


class Happening(NamedTuple):
    """An event within an attempt."""

    name: str
    at: datetime.datetime
    attributes: dict[str, Any]


class Record(NamedTuple):
    """What one span says. `parent`: the id of the parent's span; None: the trace begins here."""

    span: trace_context.SpanContext
    parent: str | None
    name: str
    started: datetime.datetime
    ended: datetime.datetime
    outcome: str
    error: str | None
    is_error: bool
    attributes: dict[str, Any]
    happenings: list[Happening]
    is_traced: bool
    """Whether who enqueued gave a trace."""


def ended_claims(rows: Iterable[Row]) -> list[Claim]:
    """Return the claims that these events end or explain, each once."""
    found: dict[Claim, None] = {}
    for row in rows:
        if row["event_type"] in attempt_history.ENDS | CAUSES and row["claim_no"] and row["job_id"]:
            claim = Claim(row["job_id"], row["claim_no"], row.get("run_id"), row.get("node_id"))
            found[claim] = None
    return [*found]


def of_attempt(events: Sequence[Row]) -> Record | None:
    """Return the record of one claim from its events; None while it has not ended."""
    end = next((each for each in events if each["event_type"] in attempt_history.ENDS), None)
    if end is None:
        return None
    claimed = next((each for each in events if each["event_type"] == "claimed"), None)
    if claimed is not None:
        started = min(claimed["created_at"], end["created_at"])
    else:
        seconds = min(max(stored_json.number(end["elapsed_s"]) or 0.0, 0.0), 1e8)
        started = end["created_at"] - datetime.timedelta(seconds=seconds)
    causes = [each for each in events if each["event_type"] in CAUSES]
    error = next((each["error"] for each in causes if each["error"]), None) or end["error"]
    outcome, trace = end["event_type"], end["traceparent"]
    given = trace_context.parse(trace)
    if "run_id" in end:
        run, name = trace_context.of_run(end["run_id"], trace), f"node {end['node_id']}"
        parent: str | None = run.span_id
        span = trace_context.of_node_attempt(end["run_id"], trace, end["job_id"], end["claim_no"])
    else:
        parent, name = given.span_id if given else None, f"job {end['name'] or end['queue'] or ''}"
        span = trace_context.of_job_attempt(trace, end["job_id"], end["claim_no"])
    attributes = _attributes(claimed or end, end, started) | _of_causes(causes)
    happenings = [_happening(each) for each in events if each not in (claimed, end)]
    return Record(
        span=span,
        parent=parent,
        name=_text(name.strip()),
        started=started,
        ended=max(started, end["created_at"]),
        outcome=outcome,
        error=_text(error) if error else None,
        is_error=outcome in _BAD or bool(causes),
        attributes=attributes | {"queue_workflows.outcome": outcome},
        happenings=happenings + _exception(end),
        is_traced=given is not None,
    )


def _attributes(begun: Row, end: Row, started: datetime.datetime) -> dict[str, Any]:
    since, in_run = end["waited_from"], "run_id" in end
    wait_s = None if since is None else round(max(0.0, (started - since).total_seconds()), 6)
    members = {
        "job_id": end["job_id"],
        "run_id": end.get("run_id"),
        "node_id": end.get("node_id"),
        "workflow": end["name"] if in_run else None,
        "task": None if in_run else end["name"],
        "queue": end["queue"],
        "model": end.get("model"),
        "claim_no": end["claim_no"],
        "attempt": begun["attempt"],
        "worker_id": begun["worker_id"],
        "host": begun["host_label"],
        "wait_s": wait_s,
        "handler_s": stored_json.number(end["elapsed_s"]),
    }
    return _named(members)


def _of_causes(causes: Sequence[Row]) -> dict[str, Any]:
    """Return how the attempt was ended from outside of its handler."""
    found: dict[str, Any] = {}
    for each in causes:
        found["cause"] = each["event_type"]
        if each["error"]:
            found["cause_detail"] = each["error"]
        detail = stored_json.mapping(each["detail"])
        found |= {name: detail[name] for name in _DEATH if name in detail}
    return _named(found)


def _named(members: dict[str, Any]) -> dict[str, Any]:
    return {
        f"queue_workflows.{name}": _text(value) if isinstance(value, str) else value
        for name, value in members.items()
        if isinstance(value, (str, int, float, bool))
    }


def _happening(event: Row) -> Happening:
    members = {"elapsed_s": stored_json.number(event["elapsed_s"]), "error": event["error"]}
    return Happening(_text(event["event_type"]), event["created_at"], _named(members))


def _exception(end: Row) -> list[Happening]:
    trace = stored_json.text(stored_json.mapping(end["detail"]).get("traceback"))
    if not trace:
        return []
    members = {"exception.stacktrace": _text(trace, 8000), "exception.message": _text(end["error"])}
    return [Happening("exception", end["created_at"], members)]


def of_run(row: Row) -> Record | None:
    """Return the record of a run that is over; None for one that was deleted."""
    if row["name"] is None:
        return None
    given = trace_context.parse(row["traceparent"])
    span = trace_context.of_run(row["run_id"], row["traceparent"])
    parent, generation = (given.span_id if given else None), row["generation"]
    if generation > 1:
        # The attempts of every generation are children of the first one's span.
        parent = span.span_id
        span = span._replace(span_id=trace_context.derived_span("run", row["run_id"], generation))
    ended = row["finished_at"] or row["started_at"] or row["created_at"]
    started = min(row["queued_at"] or row["created_at"], ended)
    members = {
        "run_id": row["run_id"],
        "workflow": row["name"],
        "generation": generation,
        "priority": row["priority"],
        "outcome": row["status"],
    }
    error = _text(row["error"]) if row["error"] else None
    failed, name = row["status"] == "failed", _text(f"run {row['name']}")
    return Record(
        span, parent, name, started, ended, row["status"], error, failed, _named(members), [],
        given is not None,
    )  # fmt: skip


def _text(value: Any, limit: int = TEXT_LIMIT) -> str:
    """Return a text that every exporter can encode, without secrets."""
    text = str(value or "")[: 2 * limit].encode("utf-8", "replace").decode()
    return masking.mask(text)[:limit]
