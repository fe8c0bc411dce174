"""Read the page of metrics for Prometheus."""

from __future__ import annotations

from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from tests.support import console

LABELS = {
    "jobs_total": {"queue", "outcome"}, "job_claims_total": {"queue"},
    "job_retries_total": {"queue", "cause"}, "leases_reclaimed_total": {"queue", "cause"},
    "jobs_requeued_total": {"queue", "cause"}, "job_crashes_total": {"queue"},
    "watchdog_trips_total": {"queue", "watchdog"},
    "job_wait_seconds": {"queue", "why", "le"}, "job_run_seconds": {"queue", "le"},
    "model_load_seconds": {"model", "le"}, "model_loads_total": {"model"},
    "jobs": {"queue", "state"}, "jobs_waiting": {"queue", "why"},
    "oldest_ready_job_age_seconds": {"queue"}, "jobs_lease_lapsed": {"queue"},
    "queue_paused": {"queue"}, "runs": {"state"}, "workers": {"queue", "state"},
    "worker_slots": {"queue", "state"}, "outbox_events": set[str](), "outbox_lag_seconds": set(),
    "schedule_lateness_seconds": {"schedule"}, "schedule_failing": {"schedule"},
    "schedule_last_fire_timestamp_seconds": {"schedule"},
    "machine_cpu_ratio": {"host"}, "machine_cpu_ours_ratio": {"host"},
    "machine_memory_used_bytes": {"host"}, "machine_memory_total_bytes": {"host"},
    "machine_memory_ours_bytes": {"host"}, "machine_swap_used_bytes": {"host"},
    "gpu_utilization_ratio": {"host", "gpu"}, "gpu_memory_used_bytes": {"host", "gpu"},
    "gpu_memory_total_bytes": {"host", "gpu"},
    "build_info": {"version"}, "history_counted_age_seconds": set(),
    "history_uncounted_transactions": set(), "scrape_duration_seconds": set(),
}  # fmt: skip
"""Every metric without its prefix, and its labels: a promise to dashboards of others."""
Series = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def read(text: str | None = None) -> Series:
    """Return the values of a page by name and labels; a series stands there once, with LABELS.

    None: the page that the command prints now.
    """
    found: Series = {}
    page = console.printed("metrics") if text is None else text
    for family in text_string_to_metric_families(page):
        name = family.name.removeprefix("queue_workflows_")
        labels = LABELS[f"{name}_total" if family.type == "counter" else name] - {"le"}
        for sample in family.samples:
            key = sample.name, tuple(sorted(sample.labels.items()))
            assert key not in found
            assert {*sample.labels} - {"le"} == labels, key
            found[key] = sample.value
    return found


def value(found: Series, name: str, **labels: str) -> float:
    """Return the sum of the series of a metric that have these labels."""
    return sum(
        number
        for (one, given), number in found.items()
        if one == f"queue_workflows_{name}" and labels.items() <= dict(given).items()
    )


def falls(before: Series, after: Series) -> dict[Any, Any]:
    """Return the counters, with buckets, counts and sums, that are lower than before or gone."""
    return {
        key: (number, after.get(key))
        for key, number in before.items()
        if key[0].endswith(("_total", "_bucket", "_count", "_sum")) and after.get(key, -1) < number
    }
