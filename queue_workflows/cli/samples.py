"""Define `queue-workflows samples`: show the recent CPU, RAM and GPU use of a machine."""

from __future__ import annotations

import contextlib
import resource
import time
from datetime import datetime, timedelta, timezone
from typing import Annotated, NamedTuple

from queue_workflows import config, db, errors, history, hw_metrics
from queue_workflows.cli import command, define, options, output, sample_text, show
from queue_workflows.db import statements
from queue_workflows.runtime import display
from queue_workflows.types import JsonDict

LINES = 30
BEFORE_S = 300.0
"""Seconds before the end of a job's attempt from which its machine is shown."""
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


@define.command("samples", reads=False)
def samples(
    host: Annotated[str | None, options.option("H", "Host label; default: this machine's.")] = None,
    past: Annotated[str, options.option("SPAN", "How far to look back: 30s, 10m, 2h, 1d.")] = "10m",
    job: Annotated[
        str | None, options.option("JOB", "The machine of a job's last attempt, up to its end.")
    ] = None,
    now: Annotated[
        bool, options.flag("--now", "This machine as it is now, and what a sample costs.")
    ] = False,
    full: Annotated[bool, options.flag("--full", "Every sample on a line of its own.")] = False,
    *,
    app: str | None,
) -> int | define.Shown:
    """Show the recent CPU, RAM and GPU use of a machine.

    There is a sample every 2 s for the last hour, and one a minute for the last day. Longer
    spans are merged to 30 lines: the mean of percentages, the maximum in use.
    """
    if now:
        return _now()
    past_s = _seconds(past)
    with command.reading(app):
        rows = _of_job(job) if job else _of_host(host or config.host_label(), past_s)
    if rows is None:
        return 1
    return define.Shown(rows, lambda: table(rows if full else drawn_together(rows)))


def _seconds(text: str) -> float:
    try:
        value = float(text[:-1]) * _UNITS[text[-1:]]
    except (ValueError, KeyError):
        value = 0.0
    if not 0 < value <= 86400:
        raise errors.InvalidConfig(
            f"--past {text[:20]} should be a time span up to 1d, such as 30s or 10m"
        )
    return value


def _of_host(host: str, past_s: float) -> list[JsonDict]:
    rows = hw_metrics.look_back(host, past_s=past_s)
    if not rows:
        with db.transaction() as conn:
            hosts = statements.samples.hosts(conn)
        known = ", ".join(hosts) or "no host: gpu workers take them"
        raise errors.UnknownWorker(
            f"host {host!r} has no samples from then; there are some of {known}"
            f"{errors.hint(host, hosts)}"
        )
    return rows


def _of_job(start: str) -> list[JsonDict] | None:
    """Return the machine and time span of a job; None after reporting that nothing has this id."""
    kind, job_id = show.found(start, "samples", jobs_first=True)
    if kind is None:
        return None
    shown = history.get_job(job_id) if kind != "run" else None
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


def drawn_together(rows: list[JsonDict], lines: int = LINES) -> list[JsonDict]:
    """Return at most so many rows, each made of consecutive samples, with the last one's time."""
    size = -(-len(rows) // lines) if rows else 1
    parts = [rows[at : at + size] for at in range(0, len(rows), size)]
    return [
        part[-1]
        if len(part) == 1
        else hw_metrics.fold(part) | {"sampled_at": part[-1]["sampled_at"]}
        for part in parts
    ]


def table(rows: list[JsonDict]) -> None:
    """Print the samples, the oldest first."""
    output.table(
        ("UTC", "cpu", "ours", "ram", "ours", "swap", "gpus: use, memory"),
        [
            (
                display.clock(row["sampled_at"])[:8],
                sample_text.percent(row.get("cpu_percent")),
                sample_text.percent(row.get("cpu_ours_percent")),
                sample_text.of(row.get("ram_used_mb"), row.get("ram_total_mb")),
                sample_text.gb(row.get("ram_ours_used_mb")),
                sample_text.gb(row.get("swap_used_mb")),
                sample_text.gpus(row),
            )
            for row in rows
        ],
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
        (time.thread_time() - own) / times,
        spent / times,
        (time.monotonic() - began) / times,
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
    return define.Shown(shown, lambda: [*map(output.echo, (sample_text.line(found), text))])
