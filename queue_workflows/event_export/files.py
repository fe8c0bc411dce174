"""Write the audit log, a line per event of a job, and the metric log, a line per attempt or run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from queue_workflows.event_export import attempts
from queue_workflows.runtime import display, log_files, masking, stored_json
from queue_workflows.types import Row

_OF_EVENT = (
    "job_id", "run_id", "node_id", "queue", "claim_no", "attempt", "worker_id", "host_label",
    "elapsed_s", "error", "actor",
)  # fmt: skip


class AuditLog:
    """A sink that writes each event as a line of JSON."""

    wants_attempts = False
    wants_events = True

    def __init__(self, file: log_files.RotatingFile) -> None:
        self._file = file

    def events(self, rows: Sequence[Row]) -> None:
        """Write a line for each event, all at once. Raises OSError."""
        self._file.write("".join(map(_event_line, rows)))

    def records(self, records: Sequence[attempts.Record]) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class MetricLog:
    """A sink that writes each attempt and each run that has ended as a line of JSON."""

    wants_attempts = True
    wants_events = False

    def __init__(self, file: log_files.RotatingFile) -> None:
        self._file = file

    def events(self, rows: Sequence[Row]) -> None:
        """Do nothing."""

    def records(self, records: Sequence[attempts.Record]) -> None:
        """Write a line for each record, all at once. Raises OSError."""
        self._file.write("".join(map(_record_line, records)))

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _event_line(row: Row) -> str:
    members: dict[str, Any] = {"time": row["created_at"], "event": row["event_type"]}
    for name in _OF_EVENT:
        if row.get(name) is not None:
            members[name] = row[name]
    members["id"] = row["id"]
    return display.json_line(masking.mask_values(members)) + "\n"


def _record_line(record: attempts.Record) -> str:
    """Return what happened and how long it took, with a number for each duration."""
    given = {name.rpartition(".")[2]: value for name, value in record.attributes.items()}
    seconds = (record.ended - record.started).total_seconds()
    members = {
        "time": record.ended,
        "name": record.name,
        **given,
        "duration_s": round(seconds, 6),
        "error": record.error,
        "trace_id": record.span.trace_id,
        "span_id": record.span.span_id,
    }
    kept = {name: value for name, value in members.items() if value is not None}
    return display.json_line(stored_json.mapping(masking.mask_values(kept))) + "\n"
