"""Encode rows as JSON responses with an ETag, and name the states of jobs as the service does."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from datetime import datetime
from typing import Any, Final, cast, get_args

from starlette.requests import Request
from starlette.responses import Response

from queue_workflows import errors, types
from queue_workflows.runtime import display
from queue_workflows.service import tokens
from queue_workflows.types import JsonDict, Row

MEDIA_TYPE = "application/json"


scope: ContextVar[tokens.Scope] = ContextVar("scope", default="operate")
"""That of the request's token."""
STATES: Final = frozenset([
    *("attempts", "counts", "events", "items", "kind", "loops", "maps", "next", "nodes", "used"),
    *("child_run_id", "claimed_by", "current_model", "depends_on", "host_label", "id", "job_id"),
    *("job_ids", "jobs", "name", "node_id", "node_module", "parent_node_id", "parent_run_id"),
    *("pid", "pipeline_name", "queue", "required_model", "run_id", "task_name", "worker_id"),
    *("workflow_name", "blocked_reason", "desired_state", "event_type", "last", "last_status"),
    *("lost", "missed", "outcome", "paused", "state", "status", "stop_policy", "throttle"),
    *("at_most", "attempt", "attempts_failed", "card", "claim_no", "crash_count", "done"),
    *("failures", "generation", "gpu_pct", "in_per_min", "lapse_count", "limited", "locked"),
    *("max_attempts", "max_running", "nodes_total", "not_due", "open", "out_per_min", "priority"),
    *("progress_pct", "ram_mb", "rate", "ready", "revision", "rounds", "total", "vram_mb"),
    *("watchdog_retries", "at", "expression", "hours", "last_seen", "minute", "paused_until"),
    *("seconds", "tz", *get_args(types.NodeStatus), "waiting"),
])  # fmt: skip
"""The members that the scope `look` sees besides times and durations; all others are null."""


def _states(content: Any) -> Any:
    """Return content without the values of runs and jobs."""
    if isinstance(content, (list, tuple)):
        return [_states(each) for each in cast("Sequence[Any]", content)]
    if not isinstance(content, dict):
        return content
    return {
        name: _states(value) if name in STATES or name.endswith(("_at", "_s")) else None
        for name, value in cast("JsonDict", content).items()
    }


def body(content: Any) -> bytes:
    """Return content as JSON: times in ISO 8601 (UTC), NaN and infinite numbers as texts.

    Every answer with rows is made here, so that this is where the scope `look` loses the values.
    """
    if scope.get() == "look":
        content = _states(content)
    try:
        return json.dumps(content, allow_nan=False, default=_time, separators=(",", ":")).encode()
    except (TypeError, ValueError, RecursionError, OverflowError):
        return display.strict_json(content).encode()


def _time(value: object) -> str:
    if isinstance(value, datetime):
        offset = value.utcoffset()
        if offset is not None and not offset:
            return value.isoformat()
    raise TypeError(type(value).__name__)  # `strict_json` encodes everything


def etag(text: bytes) -> str:
    """Return the entity tag of a response's body."""
    return f'"{hashlib.sha256(text).hexdigest()[:32]}"'


def matches(request: Request, tag: str) -> bool:
    """Return whether the request has this entity tag in If-None-Match."""
    given = ",".join(request.headers.getlist("if-none-match"))
    return any(each.strip().removeprefix("W/") in (tag, "*") for each in given.split(","))


def reply(content: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Return a JSON response."""
    return Response(body(content), status, headers, MEDIA_TYPE)


def tagged(request: Request, content: Any) -> Response:
    """Return a JSON response with its ETag, or 304 if the request has that tag."""
    text = body(content)
    tag = etag(text)
    if matches(request, tag):
        return Response(status_code=304, headers={"etag": tag})
    return Response(text, 200, {"etag": tag}, MEDIA_TYPE)


# --- states of jobs ----------------------------------------------------------------------------

_NAMES: Final = {"completed": "succeeded", "cancelled": "canceled"}
"""The service's names of statuses, where the engine has others."""
_ENGINE: Final = ("queued", "running", "completed", "failed", "cancelled")


def state_name(status: str, *, lost: bool = False) -> str:
    """Return the name of a status of the engine; `lost`: the job's lease has lapsed."""
    return "lost" if lost else _NAMES.get(status, status)


def named(row: Row | JsonDict) -> JsonDict:
    """Return a row of a job with the name of its state as `status`, without `lost` and `seq`."""
    shown = {key: value for key, value in row.items() if key not in ("lost", "seq")}
    return shown | {"status": state_name(row["status"], lost=row["lost"])}


def wanted_states(names: Sequence[str] | None) -> dict[str, Any]:
    """Return the filters `status` and `lost` of `jobs.list` for these names of states, or for all.

    The engine's names are accepted too. Raises `InvalidConfig` for any other name.
    """
    if names is None:
        return {}
    of_engine = {state_name(status): status for status in _ENGINE} | {"lost": "running"}
    for one in names:
        if one not in of_engine and one not in _ENGINE:
            raise errors.InvalidConfig(
                f"status {one!r:.80} is not known; the states are {', '.join(of_engine)}"
            )
    found = [of_engine.get(one, one) for one in names]
    both = "running" in names and "lost" in names
    return {"status": found, "lost": None if both else "lost" in names}
