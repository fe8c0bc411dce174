"""Write the metrics page in the text format of Prometheus 0.0.4: counters of the history, gauges.

The gauges are made from the present rows of jobs, workers, schedules and machines. A scrape also
counts the events of the history if no other process does.
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate, groupby
from typing import Final, Literal, NamedTuple, TypeAlias

import queue_workflows
from queue_workflows import config, db, history
from queue_workflows.claim import row_isolation
from queue_workflows.db import statements
from queue_workflows.runtime import display, stored_json
from queue_workflows.types import Row

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
NEAR: Final = 1_000
"""Transactions whose events a scrape counts itself, in some milliseconds."""
LATE_S: Final = 60.0
"""A scrape counts the events itself if they were not counted for so many seconds."""
COUNT_FOR_S: Final = 1.0
MOST_TOTALS: Final = 30_000
"""Rows of totals that are read; the queues and models with labels of their own have fewer."""
MOST_LABEL: Final = 200
"""Characters of a label's value; longer ones are cut, and no control character is left."""
MOST_NAMES: Final = 100
"""Queues, hosts or schedules with labels of their own."""
OTHER: Final = "(other)"
"""The label of queues beyond the limit, all together."""
PREFIX: Final = "queue_workflows_"
IN_ORDER: Final = {
    "enable_seqscan": "off", "enable_bitmapscan": "off", "enable_sort": "off", "jit": "off",
}  # fmt: skip
"""Settings that keep the planner to the order of indexes: without statistics, it sorts all waiting
jobs to find the first one."""
BY_INDEX: Final = {**IN_ORDER, "enable_bitmapscan": "on", "enable_sort": "on"}
"""Settings that keep the planner to indexes: without statistics, it takes a scan of all finished
jobs for cheaper (decision 0019)."""
_MIB: Final = 1024 * 1024
_MOST_GPUS: Final = 32
_GONE: Final = frozenset({"dead", "stopped"})
_OFF: Final = frozenset({"parked", "paused", "draining"})
_log = logging.getLogger(__name__)


class Metric(NamedTuple):
    """A metric: its kind, the names of its labels, and a sentence about it."""

    kind: Literal["counter", "gauge", "histogram"]
    labels: str
    text: str


METRICS: Final = {
    "jobs_total": Metric("counter", "queue outcome", "Jobs that ended, in any way."),
    "job_claims_total": Metric("counter", "queue", "Claims of jobs by workers."),
    "job_retries_total": Metric(
        "counter", "queue cause", "Jobs that were queued again, after a failure or by an operator."
    ),
    "leases_reclaimed_total": Metric("counter", "queue cause", "Claims taken from their workers."),
    "jobs_requeued_total": Metric(
        "counter", "queue cause", "Claims that workers gave back without a failed attempt."
    ),
    "job_crashes_total": Metric("counter", "queue", "Crashes that were counted for jobs."),
    "watchdog_trips_total": Metric("counter", "queue watchdog", "Attempts that a watchdog ended."),
    "job_wait_seconds": Metric(
        "histogram", "queue why", "Time from a job's insert or return to the queue to its claim."
    ),
    "job_run_seconds": Metric("histogram", "queue", "Time of attempts that completed or failed."),
    "model_load_seconds": Metric("histogram", "model", "Time of loads of models."),
    "model_loads_total": Metric("counter", "model", "Loads of models."),
    "jobs": Metric("gauge", "queue state", "Jobs that have not ended."),
    "jobs_waiting": Metric("gauge", "queue why", "Queued jobs, by the reason why they wait."),
    "oldest_ready_job_age_seconds": Metric("gauge", "queue", "Age of the oldest ready job."),
    "jobs_lease_lapsed": Metric("gauge", "queue", "Running jobs whose lease has lapsed."),
    "queue_paused": Metric("gauge", "queue", "Whether a queue that has settings is paused."),
    "runs": Metric("gauge", "state", "Runs that have not ended."),
    "workers": Metric("gauge", "queue state", "Worker processes; dead ones for a day."),
    "worker_slots": Metric("gauge", "queue state", "Jobs that live workers can run at once."),
    "outbox_events": Metric("gauge", "", "Outbox events that are not dispatched."),
    "outbox_lag_seconds": Metric("gauge", "", "Age of the oldest outbox event that is due."),
    "schedule_lateness_seconds": Metric("gauge", "schedule", "For how long a schedule is overdue."),
    "schedule_failing": Metric("gauge", "schedule", "Whether an error keeps it from firing."),
    "schedule_last_fire_timestamp_seconds": Metric("gauge", "schedule", "When it fired last."),
    "machine_cpu_ratio": Metric("gauge", "host", "Share of the CPU in use."),
    "machine_cpu_ours_ratio": Metric("gauge", "host", "Share that our containers use."),
    "machine_memory_used_bytes": Metric("gauge", "host", "Memory in use."),
    "machine_memory_total_bytes": Metric("gauge", "host", "Memory of the machine."),
    "machine_memory_ours_bytes": Metric("gauge", "host", "Memory that our containers use."),
    "machine_swap_used_bytes": Metric("gauge", "host", "Swap in use."),
    "gpu_utilization_ratio": Metric("gauge", "host gpu", "Share of time in which a GPU computed."),
    "gpu_memory_used_bytes": Metric("gauge", "host gpu", "Memory of a GPU in use."),
    "gpu_memory_total_bytes": Metric("gauge", "host gpu", "Memory of a GPU."),
    "build_info": Metric("gauge", "version", "The version of the package that made this page."),
    "history_counted_age_seconds": Metric("gauge", "", "Time since events were last counted."),
    "history_uncounted_transactions": Metric("gauge", "", "The server's transactions since then."),
    "scrape_duration_seconds": Metric("gauge", "", "Time that it took to make this page."),
}
"""The metrics by name without PREFIX, in the order of the page; docs/metrics.md lists them."""
_ADDED: Final = frozenset(
    {"jobs", "jobs_waiting", "jobs_lease_lapsed", "runs", "workers", "worker_slots"}
)
"""Gauges that count: values with equal labels are added. Other gauges keep the largest value."""
_TOTALS: Final = {
    "jobs": "jobs_total", "claims": "job_claims_total", "retries": "job_retries_total",
    "reclaims": "leases_reclaimed_total", "requeues": "jobs_requeued_total",
    "crashes": "job_crashes_total", "watchdog": "watchdog_trips_total",
    "wait": "job_wait_seconds", "run": "job_run_seconds", "model_load": "model_load_seconds",
}  # fmt: skip
"""The metrics of the history's totals."""
_HOST: Final = (
    ("cpu_percent", "machine_cpu_ratio", 0.01),
    ("cpu_ours_percent", "machine_cpu_ours_ratio", 0.01),
    ("ram_used_mb", "machine_memory_used_bytes", _MIB),
    ("ram_total_mb", "machine_memory_total_bytes", _MIB),
    ("ram_ours_used_mb", "machine_memory_ours_bytes", _MIB),
    ("swap_used_mb", "machine_swap_used_bytes", _MIB),
)
_GPU: Final = (
    ("use_pct", "gpu_utilization_ratio", 0.01),
    ("vram_used_mb", "gpu_memory_used_bytes", _MIB),
    ("vram_total_mb", "gpu_memory_total_bytes", _MIB),
)


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n")


def _number(value: float) -> str:
    """Return a number as the format writes it."""
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return str(int(value)) if value == int(value) and abs(value) < 1e15 else repr(float(value))


class Page:
    """The page that Prometheus scrapes: for each metric a value for each set of labels.

    The labels are cut to a maximum length. Values whose labels are equal after that are merged, as
    `_ADDED` says, since Prometheus refuses a page with a repeated series.
    """

    def __init__(self) -> None:
        self._values: dict[str, dict[tuple[str, tuple[tuple[str, str], ...]], float]] = {
            name: {} for name in METRICS
        }

    def add(self, metric: str, value: float | None, suffix: str = "", **labels: str) -> None:
        """Add a value; None means unknown, so that the series is left out."""
        if value is None:
            return
        key = suffix, tuple((name, display.line(text, MOST_LABEL)) for name, text in labels.items())
        own = self._values[metric]
        if (known := own.get(key)) is not None:
            is_largest = METRICS[metric].kind == "gauge" and metric not in _ADDED
            value = max(known, value) if is_largest else known + value
        own[key] = value

    def add_histogram(
        self, metric: str, rows: Iterable[Row], bounds: Sequence[float], labels: dict[str, str]
    ) -> None:
        """Add the buckets, the sum and the count of one series."""
        counts, seconds = [0] * (len(bounds) + 1), 0.0
        for row in rows:
            counts[min(row["bucket"], len(bounds))] += row["n"]
            seconds += row["seconds"]
        below = list(accumulate(counts))
        for bound, count in zip([*map(_number, bounds), "+Inf"], below, strict=True):
            self.add(metric, count, "_bucket", **labels, le=bound)
        self.add(metric, seconds, "_sum", **labels)
        self.add(metric, below[-1], "_count", **labels)

    def text(self) -> str:
        """Return the page, with HELP and TYPE also for metrics without a value."""
        lines: list[str] = []
        for metric, values in self._values.items():
            name, known = PREFIX + metric, METRICS[metric]
            lines.append(f"# HELP {name} {_escaped(known.text)}")
            lines.append(f"# TYPE {name} {known.kind}")
            for (suffix, labels), value in values.items():
                pairs = ((label, _escaped(text).replace('"', r"\"")) for label, text in labels)
                shown = ",".join(f'{label}="{text}"' for label, text in pairs)
                lines.append(f"{name}{suffix}{'{' + shown + '}' if shown else ''} {_number(value)}")
        return "\n".join(lines) + "\n"


def scrape(conn: db.Connection | None = None) -> str:
    """Return all metrics in the text format of Prometheus; CONTENT_TYPE is its media type.

    First counts the last events, if the database allows it, and if that is little work or no other
    process does it. `conn`: a connection outside of a transaction; by default one of the engine's
    pool. Raises the errors of `db`.
    """
    started = time.monotonic()
    with db.statement(conn) as own:
        seen = statements.metrics.progress(own)
        if seen["may_count"]:
            if seen["behind"] is None or (seen["counted_s"] or 0.0) > LATE_S:
                count(own, within_s=COUNT_FOR_S)
            elif seen["behind"] <= NEAR:
                count(own, within_s=0)
        with own.transaction():
            seen = statements.metrics.progress(own)
            rows = statements.metrics.totals(own, limit=MOST_TOTALS)
            bounds = statements.metrics.bounds(own)
            state = _state(own)
    page = Page()
    _add_totals(page, rows, bounds)
    queue_of = _labels_of_queues(
        state, {row["name"] for row in rows if row["metric"] != "model_load"}
    )
    _add_jobs(page, state, queue_of)
    _add_workers(page, state, queue_of)
    _add_runs(page, state)
    _add_machines(page, state["machines"])
    page.add("build_info", 1, version=queue_workflows.__version__)
    page.add("history_counted_age_seconds", seen["counted_s"])
    page.add("history_uncounted_transactions", seen["behind"])
    page.add("scrape_duration_seconds", time.monotonic() - started)
    return page.text()


def count(conn: db.Connection | None = None, *, within_s: float) -> bool:
    """Count events of the history in small transactions, for `within_s` at least one.

    Returns whether all are counted. Does nothing while another process counts, and where this role
    and server may not write the totals. An error of the database is logged, so that a scrape still
    returns the counted totals; an outage is raised. `conn`: as in `scrape`.
    """
    with db.statement(conn) as own:
        if not statements.metrics.progress(own)["may_count"]:
            return False
    until = time.monotonic() + within_s
    try:
        while history.count_step(conn):
            if time.monotonic() >= until:
                return False
    except db.Error as error:
        if row_isolation.is_outage(error):
            raise
        _log.warning("the history of jobs is not counted: %s", row_isolation.described(error))
        return False
    return True


def _add_totals(page: Page, rows: Sequence[Row], bounds: Sequence[float]) -> None:
    """Add the counters and histograms; `rows` are in the order of `metrics:totals`.

    A total that this release does not know is left out.
    """
    for (name, of, label), group in groupby(
        rows, lambda row: (row["metric"], row["name"], row["label"])
    ):
        if (metric := _TOTALS.get(name)) is None:
            continue
        labels = dict(zip(METRICS[metric].labels.split(), (of, label), strict=False))
        each = list(group)
        if METRICS[metric].kind == "histogram":
            page.add_histogram(metric, each, bounds, labels)
        else:
            page.add(metric, sum(row["n"] for row in each), **labels)
        if name == "model_load":
            page.add("model_loads_total", sum(row["n"] for row in each), **labels)


_State: TypeAlias = "dict[str, list[Row]]"
"""Rows that describe jobs, workers and machines now, as `sql/queries/metrics.sql` returns them."""


def _state(conn: db.Connection) -> _State:
    """Return the state now. `conn` is in a transaction, whose planner settings this changes."""
    limit = {"limit": MOST_NAMES}
    db.set_local(conn, IN_ORDER)
    oldest = [*statements.metrics.oldest_ingest(conn), *statements.metrics.oldest_nodes(conn)]
    db.set_local(conn, BY_INDEX)
    running = statements.metrics.running
    state: _State = {
        "oldest": oldest,
        "running": [row for table in statements.JOB_TABLES for row in running[table](conn)],
        "awaiting": statements.metrics.awaiting(conn),
        "runs": statements.metrics.runs(conn),
        "paused": statements.queues.settings(conn, queue=None)[:MOST_NAMES],
        "workers": statements.metrics.workers(conn, stale_s=config.STALE_WORKER_AFTER_S.read()),
        "outbox": [statements.overview.open_events(conn)],
        "schedules": statements.metrics.schedules(conn, **limit),
        "machines": statements.metrics.machines(conn, **limit),
        "waiting": [],
    }
    for table in statements.JOB_TABLES:  # the last: it changes the planner's settings again
        statements.metrics.by_pages[table](conn)
        state["waiting"] += statements.metrics.waiting[table](conn)
    return state


def _labels_of_queues(state: _State, known: set[str]) -> Callable[[Row], str]:
    """Return the function for a row's labels. `known`: queues that have counters come first."""
    of_queues = ("waiting", "running", "awaiting", "workers", "paused")
    first = sorted(known - {OTHER})
    rest = sorted({row["queue"] for name in of_queues for row in state[name]}.difference(first))
    kept = frozenset([*first, *rest][:MOST_NAMES])
    return lambda row: row["queue"] if row["queue"] in kept else OTHER


def _add_jobs(page: Page, state: _State, queue_of: Callable[[Row], str]) -> None:
    for row in state["waiting"]:
        page.add("jobs", row["n"], queue=queue_of(row), state="queued")
        page.add("jobs_waiting", row["n"], queue=queue_of(row), why=row["why"])
    for row in state["running"]:
        page.add("jobs", row["n"], queue=queue_of(row), state="running")
        page.add("jobs_lease_lapsed", row["lapsed"], queue=queue_of(row))
    for row in state["awaiting"]:
        page.add("jobs", row["n"], queue=queue_of(row), state="awaiting_input")
    for row in state["oldest"]:
        page.add("oldest_ready_job_age_seconds", max(0.0, row["age_s"]), queue=queue_of(row))
    for row in state["paused"]:
        page.add("queue_paused", int(bool(row["paused"])), queue=queue_of(row))


def _add_workers(page: Page, state: _State, queue_of: Callable[[Row], str]) -> None:
    running, on, off = Counter[str](), Counter[str](), Counter[str]()
    for row in state["running"]:
        running[queue_of(row)] += row["n"]
    for row in state["workers"]:
        page.add("workers", row["n"], queue=queue_of(row), state=row["state"])
        if row["state"] not in _GONE:
            (off if row["state"] in _OFF else on)[queue_of(row)] += row["slots"]
    for queue in sorted({*on, *off}):
        slots = on[queue] + off[queue]
        busy = min(running[queue], slots)
        free = max(0, on[queue] - busy)
        for state_, n in (("busy", busy), ("free", free), ("off", slots - busy - free)):
            page.add("worker_slots", n, queue=queue, state=state_)


def _add_runs(page: Page, state: _State) -> None:
    """Add the gauges of runs, of the outbox and of schedules."""
    counts = {row["status"]: row["n"] for row in state["runs"]}
    for status in ("queued", "running"):
        page.add("runs", counts.get(status, 0), state=status)
    for row in state["outbox"]:
        page.add("outbox_events", row["n"])
        page.add("outbox_lag_seconds", max(0.0, row["lag_s"]))
    for row in state["schedules"]:
        name = row["name"]
        page.add("schedule_lateness_seconds", max(0.0, row["late_s"]), schedule=name)
        page.add("schedule_failing", int(row["has_error"]), schedule=name)
        page.add("schedule_last_fire_timestamp_seconds", row["last_fire"], schedule=name)


def _add_machines(page: Page, rows: list[Row]) -> None:
    def add(sample: Row, wanted: tuple[tuple[str, str, float], ...], **labels: str) -> None:
        for key, metric, unit in wanted:
            value = stored_json.number(sample.get(key))
            page.add(metric, None if value is None else value * unit, **labels)

    for row in rows:
        sample, host = stored_json.mapping(row["sample"]), row["host_label"]
        add(sample, _HOST, host=host)
        for card in stored_json.sequence(sample.get("gpus"))[:_MOST_GPUS]:
            found = stored_json.mapping(card)
            add(found, _GPU, host=host, gpu=str(found.get("id")))
