"""Turn what the tables hold now into gauges of jobs, workers, schedules and machines."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Final, TypeAlias

from queue_workflows import db
from queue_workflows.db import statements
from queue_workflows.runtime import stored_json
from queue_workflows.telemetry.metrics import exposition, totals
from queue_workflows.types import Row

OTHER: Final = "(other)"
"""The label of queues beyond the limit, all together."""
MOST_NAMES: Final = 100
"""Queues, hosts or schedules with labels of their own."""
_MIB: Final = 1024 * 1024
_GONE: Final = frozenset({"dead", "stopped"})
_OFF: Final = frozenset({"parked", "paused", "draining"})


State: TypeAlias = "dict[str, list[Row]]"
"""Rows that describe jobs, workers and machines now, as `sql/queries/metrics.sql` returns them."""


def state(conn: db.Connection, *, stale_after_s: float) -> State:
    """Return the state now. `conn` is in a transaction, whose planner settings this changes."""
    limit, of = {"limit": MOST_NAMES}, statements.metrics
    of.in_order(conn)
    oldest = [*of.oldest_ingest(conn), *of.oldest_nodes(conn)]
    of.by_index(conn)
    return {
        "oldest": oldest,
        "running": [row for table in statements.JOB_TABLES for row in of.running[table](conn)],
        "awaiting": of.awaiting(conn),
        "runs": of.runs(conn),
        "paused": of.paused(conn, **limit),
        "workers": of.workers(conn, stale_s=stale_after_s),
        "outbox": [statements.overview.open_events(conn)],
        "schedules": of.schedules(conn, **limit),
        "machines": of.machines(conn, **limit),
        "waiting": _waiting(conn),  # the last: it changes the planner's settings again
    }


def _waiting(conn: db.Connection) -> list[Row]:
    found: list[Row] = []
    for table in statements.JOB_TABLES:
        statements.metrics.by_pages[table](conn)
        found += statements.metrics.waiting[table](conn)
    return found


def gauge(name: str, text: str, *, largest: bool = False) -> exposition.Family:
    """Return an empty gauge of the project."""
    return exposition.Family(totals.PREFIX + name, "gauge", text, largest=largest)


class Names:
    """Names that get a series of their own: the known ones first, up to a limit."""

    def __init__(self, known: Iterable[str], found: Iterable[str], limit: int) -> None:
        first = sorted({*known} - {OTHER})
        rest = sorted({*found}.difference(first))
        self._kept = frozenset([*first, *rest][:limit])

    def label(self, name: str) -> str:
        """Return the name, or OTHER."""
        return name if name in self._kept else OTHER


def families(state: State, known: Iterable[str]) -> list[exposition.Family]:
    """Return the gauges. `known`: the queues that have counters, the first to get a label."""
    of_queues = ("waiting", "running", "awaiting", "workers", "paused")
    found = (row["queue"] for name in of_queues for row in state[name])
    names = Names(known, found, MOST_NAMES)
    return [
        *_jobs(state, names),
        *_workers(state, names),
        *_runs_and_outbox(state),
        *_schedules(state["schedules"]),
        *_machines(state["machines"]),
    ]


def _jobs(state: State, names: Names) -> list[exposition.Family]:
    jobs = gauge("jobs", "Jobs that have not ended.")
    waiting = gauge("jobs_waiting", "Queued jobs, by what holds them back; ready: nothing does.")
    oldest = gauge(
        "oldest_ready_job_age_seconds",
        "Age of the oldest queued job that nothing holds back.",
        largest=True,
    )
    lapsed = gauge("jobs_lease_lapsed", "Running jobs whose lease has lapsed.")
    paused = gauge("queue_paused", "Whether a queue that has settings is paused.", largest=True)
    for row in state["waiting"]:
        queue = names.label(row["queue"])
        jobs.add(row["n"], {"queue": queue, "state": "queued"})
        waiting.add(row["n"], {"queue": queue, "why": row["why"]})
    for row in state["running"]:
        queue = names.label(row["queue"])
        jobs.add(row["n"], {"queue": queue, "state": "running"})
        lapsed.add(row["lapsed"], {"queue": queue})
    for row in state["awaiting"]:
        labels = {"queue": names.label(row["queue"]), "state": "awaiting_input"}
        jobs.add(row["n"], labels)
    for row in state["oldest"]:
        oldest.add(max(0.0, row["age_s"]), {"queue": names.label(row["queue"])})
    for row in state["paused"]:
        paused.add(int(bool(row["paused"])), {"queue": names.label(row["queue"])})
    return [jobs, waiting, oldest, lapsed, paused]


def _workers(state: State, names: Names) -> list[exposition.Family]:
    workers = gauge("workers", "Worker processes, by state; dead ones for a day.")
    slots = gauge("worker_slots", "Jobs that live workers can run at once, by what the slot does.")
    running: Counter[str] = Counter()
    for row in state["running"]:
        running[names.label(row["queue"])] += row["n"]
    on: Counter[str] = Counter()
    off: Counter[str] = Counter()
    for row in state["workers"]:
        queue = names.label(row["queue"])
        workers.add(row["n"], {"queue": queue, "state": row["state"]})
        if row["state"] not in _GONE:
            (off if row["state"] in _OFF else on)[queue] += row["slots"]
    for queue in sorted({*on, *off}):
        busy = min(running[queue], on[queue] + off[queue])
        free = max(0, on[queue] - busy)
        slots.add(busy, {"queue": queue, "state": "busy"})
        slots.add(free, {"queue": queue, "state": "free"})
        slots.add(on[queue] + off[queue] - busy - free, {"queue": queue, "state": "off"})
    return [workers, slots]


def _runs_and_outbox(state: State) -> list[exposition.Family]:
    runs = gauge("runs", "Runs that have not ended.")
    events = gauge("outbox_events", "Ends of nodes that are not dispatched.")
    lag = gauge("outbox_lag_seconds", "Age of the oldest of them that is due.", largest=True)
    counts = {row["status"]: row["n"] for row in state["runs"]}
    for status in ("queued", "running"):
        runs.add(counts.get(status, 0), {"state": status})
    for row in state["outbox"]:
        events.add(row["n"], {})
        lag.add(max(0.0, row["lag_s"]), {})
    return [runs, events, lag]


def _schedules(rows: list[Row]) -> list[exposition.Family]:
    late = gauge("schedule_lateness_seconds", "For how long a schedule is overdue.", largest=True)
    failing = gauge(
        "schedule_failing", "Whether an error keeps a schedule from firing.", largest=True
    )
    last = gauge(
        "schedule_last_fire_timestamp_seconds", "The last instant that fired.", largest=True
    )
    for row in rows:
        labels = {"schedule": row["name"]}
        late.add(max(0.0, row["late_s"]), labels)
        failing.add(int(row["has_error"]), labels)
        last.add(row["last_fire"], labels)
    return [late, failing, last]


_HOST: Final = (
    ("cpu_percent", "machine_cpu_ratio", "Share of the CPU in use.", 0.01),
    ("cpu_ours_percent", "machine_cpu_ours_ratio", "Share that our containers use.", 0.01),
    ("ram_used_mb", "machine_memory_used_bytes", "Memory in use.", _MIB),
    ("ram_total_mb", "machine_memory_total_bytes", "Memory of the machine.", _MIB),
    ("ram_ours_used_mb", "machine_memory_ours_bytes", "Memory that our containers use.", _MIB),
    ("swap_used_mb", "machine_swap_used_bytes", "Swap in use.", _MIB),
)
_GPU: Final = (
    ("use_pct", "gpu_utilization_ratio", "Share of the time in which a GPU computed.", 0.01),
    ("vram_used_mb", "gpu_memory_used_bytes", "Memory of a GPU in use.", _MIB),
    ("vram_total_mb", "gpu_memory_total_bytes", "Memory of a GPU.", _MIB),
)
_MOST_GPUS: Final = 32


def _machines(rows: list[Row]) -> list[exposition.Family]:
    hosts = [(key, gauge(name, text, largest=True), unit) for key, name, text, unit in _HOST]
    gpus = [(key, gauge(name, text, largest=True), unit) for key, name, text, unit in _GPU]
    for row in rows:
        sample = stored_json.mapping(row["sample"])
        labels = {"host": row["host_label"]}
        _measure(sample, hosts, labels)
        for card in stored_json.sequence(sample.get("gpus"))[:_MOST_GPUS]:
            found = stored_json.mapping(card)
            _measure(found, gpus, labels | {"gpu": str(found.get("id"))})
    return [family for _, family, _ in (*hosts, *gpus)]


def _measure(
    sample: Row, wanted: list[tuple[str, exposition.Family, float]], labels: Mapping[str, str]
) -> None:
    for key, family, unit in wanted:
        value = stored_json.number(sample.get(key))
        family.add(None if value is None else value * unit, labels)
