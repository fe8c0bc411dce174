"""Write metrics in the text format of Prometheus 0.0.4: counters of the history, and gauges.

The gauges are made from the present rows of jobs, workers, schedules and machines.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, groupby
from typing import Final, Literal, NamedTuple, TypeAlias

from queue_workflows import db
from queue_workflows.db import statements
from queue_workflows.runtime import display, stored_json
from queue_workflows.types import Row

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
MOST_LABEL: Final = 200
"""Characters of a label's value; longer ones are cut, and no control character is left."""
Kind: TypeAlias = Literal["counter", "gauge", "histogram"]
_Labels: TypeAlias = "tuple[tuple[str, str], ...]"


class Family:
    """One metric: its name, what it is, and a value for each set of labels.

    `name` is complete, so that of a counter ends in `_total`. Values whose labels are equal once
    they are cut become one, as a repeated series would spoil the whole page: counts are added, of
    the others (`largest`) the largest is kept.
    """

    def __init__(self, name: str, kind: Kind, text: str, *, largest: bool = False) -> None:
        self.name = name
        self.kind: Kind = kind
        self.text = text
        self._largest = largest
        self._values: dict[tuple[str, _Labels], float] = {}

    def add(self, value: float | None, labels: Mapping[str, str], suffix: str = "") -> None:
        """Add a value; None: unknown, so that the series is left out."""
        if value is None:
            return
        key = suffix, tuple((name, display.line(text, MOST_LABEL)) for name, text in labels.items())
        known = self._values.get(key)
        if known is None:
            self._values[key] = value
        else:
            self._values[key] = max(known, value) if self._largest else known + value

    def lines(self) -> Iterable[str]:
        """Return the lines of this metric; HELP and TYPE also where it has no value."""
        yield f"# HELP {self.name} {_help(self.text)}"
        yield f"# TYPE {self.name} {self.kind}"
        for (suffix, labels), value in self._values.items():
            shown = ",".join(f'{name}="{_label(text)}"' for name, text in labels)
            yield f"{self.name}{suffix}{'{' + shown + '}' if shown else ''} {number(value)}"


def page(families: Iterable[Family]) -> str:
    """Return the page that Prometheus scrapes."""
    return "\n".join(line for family in families for line in family.lines()) + "\n"


def number(value: float) -> str:
    """Return a number as the format writes it."""
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return str(int(value)) if value == int(value) and abs(value) < 1e15 else repr(float(value))


def _label(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


def _help(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n")


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


def counted(rows: Sequence[Row], bounds: Sequence[float]) -> list[Family]:
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


def _family(one: _Counter, kind: Kind) -> Family:
    return Family(PREFIX + one.name, kind, one.text)


def _series(row: Row) -> tuple[str, str, str]:
    return row["metric"], row["name"], row["label"]


def _labels(one: _Counter, name: str, label: str) -> dict[str, str]:
    return {one.of: name} | ({one.label: label} if one.label else {})


def _histogram(
    family: Family,
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
    for bound, count in zip([*map(number, bounds), "+Inf"], below, strict=True):
        family.add(count, labels | {"le": bound}, "_bucket")
    family.add(seconds, labels, "_sum")
    family.add(below[-1], labels, "_count")
    return below[-1]


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
    limit = {"limit": MOST_NAMES}
    statements.metrics.in_order(conn)
    oldest = [*statements.metrics.oldest_ingest(conn), *statements.metrics.oldest_nodes(conn)]
    statements.metrics.by_index(conn)
    return {
        "oldest": oldest,
        "running": [
            row
            for table in statements.JOB_TABLES
            for row in statements.metrics.running[table](conn)
        ],
        "awaiting": statements.metrics.awaiting(conn),
        "runs": statements.metrics.runs(conn),
        "paused": statements.metrics.paused(conn, **limit),
        "workers": statements.metrics.workers(conn, stale_s=stale_after_s),
        "outbox": [statements.overview.open_events(conn)],
        "schedules": statements.metrics.schedules(conn, **limit),
        "machines": statements.metrics.machines(conn, **limit),
        "waiting": _waiting(conn),  # the last: it changes the planner's settings again
    }


def _waiting(conn: db.Connection) -> list[Row]:
    found: list[Row] = []
    for table in statements.JOB_TABLES:
        statements.metrics.by_pages[table](conn)
        found += statements.metrics.waiting[table](conn)
    return found


def gauge(name: str, text: str, *, largest: bool = False) -> Family:
    """Return an empty gauge of the project."""
    return Family(PREFIX + name, "gauge", text, largest=largest)


class Names:
    """Names that get a series of their own: the known ones first, up to a limit."""

    def __init__(self, known: Iterable[str], found: Iterable[str], limit: int) -> None:
        first = sorted({*known} - {OTHER})
        rest = sorted({*found}.difference(first))
        self._kept = frozenset([*first, *rest][:limit])

    def label(self, name: str) -> str:
        """Return the name, or OTHER."""
        return name if name in self._kept else OTHER


def gauges(state: State, known: Iterable[str]) -> list[Family]:
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


def _jobs(state: State, names: Names) -> list[Family]:
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


def _workers(state: State, names: Names) -> list[Family]:
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


def _runs_and_outbox(state: State) -> list[Family]:
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


def _schedules(rows: list[Row]) -> list[Family]:
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


def _machines(rows: list[Row]) -> list[Family]:
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
    sample: Row, wanted: list[tuple[str, Family, float]], labels: Mapping[str, str]
) -> None:
    for key, family, unit in wanted:
        value = stored_json.number(sample.get(key))
        family.add(None if value is None else value * unit, labels)
