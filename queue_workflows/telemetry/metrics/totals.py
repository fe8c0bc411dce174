"""Turn the totals of the history of jobs into counters and histograms."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate, groupby
from typing import Final, NamedTuple

from queue_workflows.telemetry.metrics import exposition
from queue_workflows.types import Row


class _Counter(NamedTuple):
    name: str
    text: str
    of: str = "queue"
    label: str = ""
    """What the total's label is called; empty: it has none."""


COUNTERS: Final = {
    "jobs": _Counter("jobs_total", "Jobs that ended, in any way.", label="outcome"),
    "claims": _Counter("job_claims_total", "Claims of jobs by workers."),
    "retries": _Counter(
        "job_retries_total",
        "Jobs that were queued again, after a failed attempt or by an operator.",
        label="cause",
    ),
    "reclaims": _Counter(
        "leases_reclaimed_total", "Claims that were taken from their workers.", label="cause"
    ),
    "requeues": _Counter(
        "jobs_requeued_total",
        "Claims that workers gave back without a failed attempt.",
        label="cause",
    ),
    "crashes": _Counter("job_crashes_total", "Crashes that were counted for jobs."),
    "watchdog": _Counter(
        "watchdog_trips_total", "Attempts that a watchdog ended.", label="watchdog"
    ),
}
HISTOGRAMS: Final = {
    "wait": _Counter(
        "job_wait_seconds",
        "Time from the insert of a job, or its return to the queue, to its claim.",
        label="why",
    ),
    "run": _Counter("job_run_seconds", "Time of attempts that completed or failed."),
    "model_load": _Counter("model_load_seconds", "Time of loads of models.", of="model"),
}
_LOADS: Final = _Counter("model_loads_total", "Loads of models.", of="model")
PREFIX: Final = "queue_workflows_"


def families(rows: Sequence[Row], bounds: Sequence[float]) -> list[exposition.Family]:
    """Return the counters and histograms; `rows` are in the order of `metrics:totals`.

    A total that this release does not know is left out.
    """
    made = {name: _family(one, "counter") for name, one in COUNTERS.items()}
    made |= {name: _family(one, "histogram") for name, one in HISTOGRAMS.items()}
    loads = _family(_LOADS, "counter")
    for (metric, name, label), group in groupby(rows, _series):
        if metric in COUNTERS:
            labels = _labels(COUNTERS[metric], name, label)
            made[metric].add(sum(row["n"] for row in group), labels)
        elif metric in HISTOGRAMS:
            labels = _labels(HISTOGRAMS[metric], name, label)
            count = _histogram(made[metric], list(group), bounds, labels)
            if metric == "model_load":
                loads.add(count, labels)
    return [*made.values(), loads]


def _family(one: _Counter, kind: exposition.Kind) -> exposition.Family:
    return exposition.Family(PREFIX + one.name, kind, one.text)


def _series(row: Row) -> tuple[str, str, str]:
    return row["metric"], row["name"], row["label"]


def _labels(one: _Counter, name: str, label: str) -> dict[str, str]:
    return {one.of: name} | ({one.label: label} if one.label else {})


def _histogram(
    family: exposition.Family,
    rows: Iterable[Row],
    bounds: Sequence[float],
    labels: dict[str, str],
) -> int:
    """Add the buckets, the sum and the count of one series; return the count."""
    counts = [0] * (len(bounds) + 1)
    seconds = 0.0
    for row in rows:
        counts[min(row["bucket"], len(bounds))] += row["n"]
        seconds += row["seconds"]
    below = list(accumulate(counts))
    for bound, count in zip([*map(exposition.number, bounds), "+Inf"], below, strict=True):
        family.add(count, labels | {"le": bound}, "_bucket")
    family.add(seconds, labels, "_sum")
    family.add(below[-1], labels, "_count")
    return below[-1]
