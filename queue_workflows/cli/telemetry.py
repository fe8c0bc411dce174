"""Define `queue-workflows samples`, `metrics` and `spans`, which show or send measurements."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import shlex
import sys
import time
from datetime import datetime, timedelta, timezone
from typing import NamedTuple

from queue_workflows import config, db, errors, history, hw_metrics
from queue_workflows.cli import command, define, ids, output, texts
from queue_workflows.db import statements
from queue_workflows.event_export import exporter
from queue_workflows.runtime import app_loading, clock, display, entry_point
from queue_workflows.telemetry import metrics_listener, metrics_page
from queue_workflows.types import JsonDict

LINES = 30
BEFORE_S = 300.0
"""Seconds before the end of a job's attempt from which its machine is shown."""
_HEAD = ("UTC", "cpu", "ours", "ram", "ours", "swap", "gpus: use, memory")


@define.command(
    "samples",
    """--host H  Host label; default: this machine's.
    --past SPAN  How far to look back: 30s, 10m, 2h, 1d.
    --job JOB  The machine of a job's last attempt, up to its end.
    --now  This machine as it is now, and what a sample costs.
    --full  Every sample on a line of its own.""",
    reads=False,
)
def samples(
    host: str | None = None, past: str = "10m", job: str | None = None, now: bool = False,
    full: bool = False, *, app: str | None,
) -> define.Shown:  # fmt: skip
    """Show the recent CPU, RAM and GPU use of a machine.

    A machine with a GPU has a sample every 2 s for the last hour; each machine has one a minute
    for the last day. More than 30 are merged to 30 lines, with the mean of percentages and the
    maximum in use.
    """
    if now:
        return _now()
    span = clock.span(past) or timedelta()
    if not timedelta() < span <= timedelta(days=1):
        text = f"--past {past[:20]} should be a time span up to 1d, such as 30s or 10m"
        raise errors.InvalidConfig(text)
    with command.reading(app):
        rows = _of_job(job) if job else _of_host(host or config.host_label(), span.total_seconds())
    shown = rows if full else _merged(rows)
    return define.Shown(rows, lambda: output.table(_HEAD, map(_cells, shown)))


def _of_host(host: str, past_s: float) -> list[JsonDict]:
    rows = hw_metrics.look_back(host, past_s=past_s)
    if not rows:
        with db.transaction() as conn:
            hosts = statements.samples.hosts(conn)
        known = f"; there are some of {', '.join(hosts)}{errors.hint(host, hosts)}"
        if not hosts:
            known = ", nor has another host; a worker takes them, unless DISABLE_HW_METRICS is set"
        raise errors.UnknownWorker(f"host {host!r} has no samples from then{known}")
    return rows


def _of_job(start: str) -> list[JsonDict]:
    """Return the samples of the machine of a job, from before its end."""
    kind, job_id = ids.found(start, jobs_first=True)
    if kind == "run":
        shows = f"`{command.PROG} show {shlex.quote(job_id)}` shows its jobs"
        raise errors.InvalidConfig(f"--job {start[:80]} is a run; {shows}")
    shown = history.get_job(job_id)
    if shown is None or not shown["attempts"]:
        raise errors.InvalidConfig(f"no worker has claimed --job {start[:80]} yet")
    last = shown["attempts"][-1]
    end: datetime | None = last["ended_at"]
    begin = (end or datetime.now(timezone.utc)).replace(tzinfo=timezone.utc)
    with contextlib.suppress(OverflowError):
        begin -= timedelta(seconds=BEFORE_S)
    if not last["host_label"]:
        raise errors.InvalidConfig(f"the machine of --job {start[:80]} is unknown")
    return hw_metrics.look_back(last["host_label"], since=begin, until=end)


def _merged(rows: list[JsonDict]) -> list[JsonDict]:
    """Return at most LINES rows, each made of consecutive samples, with the last one's time."""
    size = -(-len(rows) // LINES) if rows else 1
    parts = [rows[at : at + size] for at in range(0, len(rows), size)]
    return [
        part[-1]
        if len(part) == 1
        else hw_metrics.fold(part) | {"sampled_at": part[-1]["sampled_at"]}
        for part in parts
    ]


def _cells(row: JsonDict) -> tuple[str, ...]:
    return (
        display.clock(row["sampled_at"])[:8],
        texts.percent(row.get("cpu_percent")),
        texts.percent(row.get("cpu_ours_percent")),
        texts.used(row.get("ram_used_mb"), row.get("ram_total_mb")),
        texts.gb(row.get("ram_ours_used_mb")),
        texts.gb(row.get("swap_used_mb")),
        texts.gpus(row),
    )


class Cost(NamedTuple):
    """A sample's cost: CPU seconds of this process and of its tools, and elapsed ones."""

    cpu_s: float
    tools_cpu_s: float
    wall_s: float


def measure(probe: hw_metrics.Probe, times: int = 10) -> Cost:
    """Return the mean cost of a sample that reads the GPUs; block for that many samples."""
    tools = resource.getrusage(resource.RUSAGE_CHILDREN)
    own, began = time.thread_time(), time.monotonic()
    for _ in range(times):
        probe.reread()
        probe.sample()
    now = resource.getrusage(resource.RUSAGE_CHILDREN)
    spent = now.ru_utime + now.ru_stime - tools.ru_utime - tools.ru_stime
    return Cost(
        (time.thread_time() - own) / times, spent / times, (time.monotonic() - began) / times
    )


def _now() -> define.Shown:
    probe = hw_metrics.Probe()
    try:
        cost = measure(probe)
        found = probe.sample()
        source = probe.source
    finally:
        probe.close()
    text = (
        f"GPUs by {source}; a sample costs {cost.cpu_s * 1000:.1f} ms CPU here"
        f" and {cost.tools_cpu_s * 1000:.1f} ms in tools, and takes {cost.wall_s * 1000:.0f} ms"
    )
    shown = {"sample": found, "gpus_by": source, "cost": cost._asdict()}
    return define.Shown(shown, lambda: [*map(output.echo, (texts.sample(found), text))])


EVERYWHERE = (
    "{} is not this machine's loopback: every client that reaches it reads the names of queues, "
    "schedules and machines without a token"
)


@define.command(
    "metrics",
    "--listen HOST:PORT  Serve http://HOST:PORT/metrics until SIGTERM or Ctrl-C.",
    takes="app debug db",
    reads=False,
)
def metrics(listen: str | None = None, *, app: str | None) -> int:
    """Print the metrics for Prometheus, or serve them.

    Counters go on through restarts and `prune`: they are kept in the database.
    """
    if listen is None:
        with command.reading(app):
            metrics_page.count(within_s=float("inf"))
            sys.stdout.write(metrics_page.scrape())
        return 0
    where = metrics_listener.address(listen)
    entry_point.setup_logging("warning")
    app_loading.load_app(app)
    if not where.is_loopback:
        command.print_message(EVERYWHERE.format(where.host))
    # The database need not answer yet. Until it does, the reply is 503.
    with command.database(create=False), command.until_stopped(lambda: "stopping") as stop:
        asyncio.run(
            metrics_listener.serve(
                where,
                is_stopped=stop.requested.is_set,
                on_ready=lambda url: command.print_message(f"metrics on {url}"),
            )
        )
    return 0


@define.command(
    "spans",
    "--only-traced  Only of jobs and runs whose enqueuer gave a traceparent.",
    takes="app debug db log_level log_format",
    reads=False,
)
def spans(
    only_traced: bool = False, *, app: str | None, log_level: str, log_format: str | None
) -> int:
    """Send spans of attempts and runs to a collector, until Ctrl-C.

    They are OpenTelemetry spans, one for each attempt and run; OTEL_EXPORTER_OTLP_ENDPOINT names
    the collector. Also writes the audit log and the metric log if AUDIT_LOG_PATH and METRIC_PATH
    are set. Only one such process works at a time.
    """
    entry_point.setup_logging(log_level, log_format)
    exports = exporter.wanted(spans="traced" if only_traced else "all")
    with command.until_stopped() as stop, command.reading(app) as words:
        command.print_message(f"{words}: sending spans; Ctrl-C stops it")
        with exporter.running(exports):
            stop.requested.wait()
    return 0
