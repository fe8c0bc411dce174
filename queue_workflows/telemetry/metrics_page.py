"""Write the metrics page in the text format of Prometheus 0.0.4: counters of the history, gauges.

The gauges are made from the present rows of jobs, workers, schedules and machines. A scrape also
counts the events of the history if nobody else does.
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
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
"""After so many seconds without a count nobody else counts, so that a scrape does."""
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
_MIB: Final = 1024 * 1024
_MOST_GPUS: Final = 32
_GONE: Final = frozenset({"dead", "stopped"})
_OFF: Final = frozenset({"parked", "paused", "draining"})
_REASONS: Final = ("ready", "not_due", "locked", "limited", "unserved", "set_aside")
"""Columns of `queues.count_jobs` with jobs that wait; `locked` has those of `unserved`, too."""
_log = logging.getLogger(__name__)


class _Total(NamedTuple):
    """A metric of the history's totals: what names its series, and what its own label is called."""

    metric: str
    of: str = "queue"
    label: str = ""


_TOTALS: Final = {
    "jobs": _Total("jobs_total", label="outcome"),
    "claims": _Total("job_claims_total"),
    "retries": _Total("job_retries_total", label="cause"),
    "reclaims": _Total("leases_reclaimed_total", label="cause"),
    "requeues": _Total("jobs_requeued_total", label="cause"),
    "crashes": _Total("job_crashes_total"),
    "watchdog": _Total("watchdog_trips_total", label="watchdog"),
    "wait": _Total("job_wait_seconds", label="why"),
    "run": _Total("job_run_seconds"),
    "model_load": _Total("model_load_seconds", of="model"),
}
_COUNTERS: Final = {
    "jobs_total": "Jobs that ended, in any way.",
    "job_claims_total": "Claims of jobs by workers.",
    "job_retries_total": "Jobs that were queued again, after a failed attempt or by an operator.",
    "leases_reclaimed_total": "Claims that were taken from their workers.",
    "jobs_requeued_total": "Claims that workers gave back without a failed attempt.",
    "job_crashes_total": "Crashes that were counted for jobs.",
    "watchdog_trips_total": "Attempts that a watchdog ended.",
}
_HISTOGRAMS: Final = {
    "job_wait_seconds": "Time from the insert of a job, or its return to the queue, to its claim.",
    "job_run_seconds": "Time of attempts that completed or failed.",
    "model_load_seconds": "Time of loads of models.",
}
_SUMS: Final = {
    "jobs": "Jobs that have not ended.",
    "jobs_waiting": "Queued jobs, by what holds them back; ready: nothing does.",
    "jobs_lease_lapsed": "Running jobs whose lease has lapsed.",
    "workers": "Worker processes, by state; dead ones for a day.",
    "worker_slots": "Jobs that live workers can run at once, by what the slot does.",
    "runs": "Runs that have not ended.",
    "outbox_events": "Ends of nodes that are not dispatched.",
}
_LARGEST: Final = {
    "oldest_ready_job_age_seconds": "Age of the oldest queued job that nothing holds back.",
    "queue_paused": "Whether a queue that has settings is paused.",
    "outbox_lag_seconds": "Age of the oldest of them that is due.",
    "schedule_lateness_seconds": "For how long a schedule is overdue.",
    "schedule_failing": "Whether an error keeps a schedule from firing.",
    "schedule_last_fire_timestamp_seconds": "The last instant that fired.",
    "machine_cpu_ratio": "Share of the CPU in use.",
    "machine_cpu_ours_ratio": "Share that our containers use.",
    "machine_memory_used_bytes": "Memory in use.",
    "machine_memory_total_bytes": "Memory of the machine.",
    "machine_memory_ours_bytes": "Memory that our containers use.",
    "machine_swap_used_bytes": "Swap in use.",
    "gpu_utilization_ratio": "Share of the time in which a GPU computed.",
    "gpu_memory_used_bytes": "Memory of a GPU in use.",
    "gpu_memory_total_bytes": "Memory of a GPU.",
    "build_info": "The version of the package that made this page.",
    "history_counted_age_seconds": "Time since events were last counted.",
    "history_uncounted_transactions": "Transactions of the server since events were counted.",
    "scrape_duration_seconds": "Time that it took to make this page.",
}
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


class _Family:
    """One metric: its name, what it is, and a value for each set of labels.

    The name is complete, so that of a counter ends in `_total`. Values whose labels are equal once
    they are cut become one, as a repeated series would spoil the whole page: counts are added, of
    the others (`largest`) the largest is kept.
    """

    def __init__(
        self,
        name: str,
        kind: Literal["counter", "gauge", "histogram"],
        text: str,
        *,
        largest: bool = False,
    ) -> None:
        self.name, self.kind, self.text, self.largest = PREFIX + name, kind, text, largest
        self.values: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}

    def add(self, value: float | None, labels: Mapping[str, str], suffix: str = "") -> None:
        """Add a value; None: unknown, so that the series is left out."""
        if value is None:
            return
        key = suffix, tuple((name, display.line(text, MOST_LABEL)) for name, text in labels.items())
        known = self.values.get(key)
        if known is not None:
            value = max(known, value) if self.largest else known + value
        self.values[key] = value

    def lines(self) -> Iterable[str]:
        """Return the lines of this metric; HELP and TYPE also where it has no value."""
        yield f"# HELP {self.name} {_escaped(self.text)}"
        yield f"# TYPE {self.name} {self.kind}"
        for (suffix, labels), value in self.values.items():
            pairs = ((name, _escaped(text).replace('"', r"\"")) for name, text in labels)
            shown = ",".join(f'{name}="{text}"' for name, text in pairs)
            yield f"{self.name}{suffix}{'{' + shown + '}' if shown else ''} {_number(value)}"


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
    """The page that Prometheus scrapes."""

    def __init__(self) -> None:
        made = [_Family(name, "counter", text) for name, text in _COUNTERS.items()]
        made += [_Family(name, "histogram", text) for name, text in _HISTOGRAMS.items()]
        made += [_Family("model_loads_total", "counter", "Loads of models.")]
        made += [_Family(name, "gauge", text) for name, text in _SUMS.items()]
        made += [_Family(name, "gauge", text, largest=True) for name, text in _LARGEST.items()]
        self._families = {each.name: each for each in made}

    def add(self, metric: str, value: float | None, **labels: str) -> None:
        """Add a value of a counter or gauge; None: unknown, so that the series is left out."""
        self._families[PREFIX + metric].add(value, labels)

    def add_histogram(
        self, metric: str, rows: Iterable[Row], bounds: Sequence[float], labels: dict[str, str]
    ) -> None:
        """Add the buckets, the sum and the count of one series."""
        family, counts, seconds = self._families[PREFIX + metric], [0] * (len(bounds) + 1), 0.0
        for row in rows:
            counts[min(row["bucket"], len(bounds))] += row["n"]
            seconds += row["seconds"]
        below = list(accumulate(counts))
        for bound, count in zip([*map(_number, bounds), "+Inf"], below, strict=True):
            family.add(count, labels | {"le": bound}, "_bucket")
        family.add(seconds, labels, "_sum")
        family.add(below[-1], labels, "_count")

    def text(self) -> str:
        """Return the page."""
        return "\n".join(line for each in self._families.values() for line in each.lines()) + "\n"


def scrape(conn: db.Connection | None = None) -> str:
    """Return all metrics in the text format of Prometheus; CONTENT_TYPE is its media type.

    Counts the last events first where the database lets it and that is little work, or nobody else
    does it. `conn`: a connection outside of a transaction; None: one of the engine's pool. Raises
    the errors of `db`.
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
    and server may not write the totals. An error of the database is logged, as it must not keep a
    scrape from what is counted; an outage is raised. `conn`: as in `scrape`.
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
        if (total := _TOTALS.get(name)) is None:
            continue
        labels = {total.of: of} | ({total.label: label} if total.label else {})
        each = list(group)
        if total.metric in _HISTOGRAMS:
            page.add_histogram(total.metric, each, bounds, labels)
        if total.metric in _COUNTERS:
            page.add(total.metric, sum(row["n"] for row in each), **labels)
        elif name == "model_load":
            page.add("model_loads_total", sum(row["n"] for row in each), **labels)


_State: TypeAlias = "dict[str, list[Row]]"
"""Rows that describe jobs, workers and machines now, as `sql/queries/metrics.sql` returns them."""


def _state(conn: db.Connection) -> _State:
    """Return the state now. `conn` is in a transaction, whose planner settings this changes."""
    limit = {"limit": MOST_NAMES}
    statements.metrics.by_index(conn)
    return {
        "jobs": statements.queues.count_jobs(conn, window=0.0),
        "awaiting": statements.metrics.awaiting(conn),
        "runs": statements.metrics.runs(conn),
        "paused": statements.queues.settings(conn, queue=None)[:MOST_NAMES],
        "workers": statements.metrics.workers(conn, stale_s=config.STALE_WORKER_AFTER_S.read()),
        "outbox": [statements.overview.open_events(conn)],
        "schedules": statements.metrics.schedules(conn, **limit),
        "machines": statements.metrics.machines(conn, **limit),
    }


def _labels_of_queues(state: _State, known: set[str]) -> Callable[[Row], str]:
    """Return what labels the queue of a row. `known`: those that have counters come first."""
    of_queues = ("jobs", "awaiting", "workers", "paused")
    first = sorted(known - {OTHER})
    rest = sorted({row["queue"] for name in of_queues for row in state[name]}.difference(first))
    kept = frozenset([*first, *rest][:MOST_NAMES])
    return lambda row: row["queue"] if row["queue"] in kept else OTHER


def _add_jobs(page: Page, state: _State, queue_of: Callable[[Row], str]) -> None:
    for row in state["jobs"]:
        queue, waiting = queue_of(row), {why: row[why] for why in _REASONS}
        waiting["locked"] -= waiting["unserved"]
        waiting["other"] = row["ready"] + row["blocked"] - sum(waiting.values())
        for why, n in waiting.items():
            page.add("jobs_waiting", n or None, queue=queue, why=why)
        page.add("jobs", row["ready"] + row["blocked"] or None, queue=queue, state="queued")
        if row["running"]:
            page.add("jobs", row["running"], queue=queue, state="running")
            page.add("jobs_lease_lapsed", row["lapsed"], queue=queue)
        if row["ready"]:
            page.add("oldest_ready_job_age_seconds", max(0.0, row["ready_s"]), queue=queue)
    for row in state["awaiting"]:
        page.add("jobs", row["n"], queue=queue_of(row), state="awaiting_input")
    for row in state["paused"]:
        page.add("queue_paused", int(bool(row["paused"])), queue=queue_of(row))


def _add_workers(page: Page, state: _State, queue_of: Callable[[Row], str]) -> None:
    running, on, off = Counter[str](), Counter[str](), Counter[str]()
    for row in state["jobs"]:
        running[queue_of(row)] += row["running"]
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
