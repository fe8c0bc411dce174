"""Format the report of a soak, for the terminal and for a page."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from tests.soak import (
    check_claims,
    check_jobs,
    check_liveness,
    check_recovery,
    checker,
    evidence,
    fleet,
)

MARKS = "<!-- {}:{} -->"
SHOWN = 12
STORIES, STORY_LINES = 6, 60
_JOB = re.compile(r"\bjob ([0-9a-f-]{36})")
RECOVERY = (
    "who sees the worker die",
    "promised",
    "from kill -9 to the claim taken back",
    "to the next claim, a worker being idle",
    "later, as another fault held it up",
)
MEANING = {
    fleet.SUPERVISED: "its own parent (`--supervise`)",
    fleet.REAPED: "the supervisor that started it, as in `up`",
    fleet.DEFAULT: "nobody; every knob as by default, lease 600 s",
    fleet.UNSEEN: f"nobody; lease {fleet.LEASE_S:g} s, sweep {fleet.SWEEP_S:g} s",
}


class Report(NamedTuple):
    """The figures, and whether the soak was clean."""

    head: str
    figures: list[tuple[str, str]]
    faults: list[tuple[str, int]]
    """Kind, how often."""
    recovery: list[tuple[str, ...]]
    """Who cares for the worker that died, what is promised, and how soon: see `RECOVERY`."""
    found: dict[str, list[str]]
    stories: Sequence[str] = ()
    """What is known of the jobs that the findings name."""

    @property
    def clean(self) -> bool:
        """Return whether no check found anything."""
        return not any(self.found.values())

    def text(self) -> str:
        """Return the report for a terminal."""
        lines = [self.head, "", "faults"]
        lines += [f"  {kind:<20} {count:>4}" for kind, count in self.faults]
        lines += ["", "recovery of what a killed worker held"]
        for way in self.recovery:
            lines.append(f"  {way[0]}")
            lines += [f"    {n:<52} {v}" for n, v in zip(RECOVERY[1:], way[1:], strict=True)]
        lines += ["", *(f"{name:<56} {value}" for name, value in self.figures), ""]
        for name, found in self.found.items():
            lines.append(f"{name:<56} {len(found)}")
            lines += [f"    {line}" for line in found[:SHOWN]]
            if len(found) > SHOWN:
                lines.append(f"    and {len(found) - SHOWN} more")
        lines += ["", *self.stories] * bool(self.stories)
        verdict = "clean" if self.clean else "VIOLATIONS: " + ", ".join(self.caught())
        return "\n".join([*lines, "", verdict])

    def caught(self) -> list[str]:
        """Return the checks that found something."""
        return [name for name, found in self.found.items() if found]

    def markdown(self) -> str:
        """Return the report for a page."""
        lines = [self.head, "", f"| {' | '.join(RECOVERY)} |", "|---|---|---|---|---|"]
        lines += [f"| {' | '.join(way)} |" for way in self.recovery]
        lines += ["", "| fault | times |", "|---|--:|"]
        lines += [f"| {kind} | {count} |" for kind, count in self.faults]
        lines += ["", "| | |", "|---|---|", *(f"| {name} | {v} |" for name, v in self.figures)]
        lines += ["", "| violations of | |", "|---|--:|"]
        lines += [f"| {name} | {len(found)} |" for name, found in self.found.items()]
        return "\n".join(lines)


def write(path: Path, part: str, block: str) -> None:
    """Replace what stands between the two markers of a page's part; ValueError without them."""
    text = path.read_text()
    first, last = MARKS.format(part, "begin"), MARKS.format(part, "end")
    before, begin, rest = text.partition(first)
    _, end, after = rest.partition(last)
    if not begin or not end:
        raise ValueError(f"{path}: no {first} ... {last}")
    path.write_text(f"{before}{begin}\n{block}\n{end}{after}")


def make(seen: evidence.Evidence, *, head: str, settled_s: float) -> Report:
    """Return the report of a soak."""
    bodies = Counter(line.job for line in seen.lines if line.word == "start")
    status = Counter(run["status"] for run in seen.runs.values())
    figures = [
        ("faults", str(len(seen.faults))),
        ("runs", f"{len(seen.runs)} ({', '.join(f'{n} {s}' for s, n in sorted(status.items()))})"),
        ("jobs", str(len(seen.jobs))),
        ("handlers started", str(sum(bodies.values()))),
        ("handlers per job, mean and most", _mean_and_most(list(bodies.values()))),
        ("crashes counted", str(sum(job["crash_count"] for job in seen.jobs.values()))),
        ("processes restarted", str(len(seen.ended) - len(fleet.SEATS))),
        ("overlapping handlers, the older one fenced off", str(check_claims.overlaps(seen))),
        ("schedule fires", str(len(seen.fires))),
        ("answers refused as the second", str(seen.books.refused)),
        *check_jobs.figures(seen),
        *check_liveness.figures(seen),
        ("late writes refused", str(seen.books.late_writes - len(seen.books.moved))),
        ("settled after the last fault", f"{settled_s:.1f} s"),
    ]
    kinds = Counter(fault.kind for fault in seen.faults)
    found = checker.check(seen)
    story = [*stories(seen, found)]
    return Report(head, figures, sorted(kinds.items()), _recovery(seen), found, story)


def stories(seen: evidence.Evidence, found: Mapping[str, list[str]]) -> Iterator[str]:
    """Return what happened to each of the first jobs that findings name, second by second."""
    named = dict.fromkeys(_JOB.findall("\n".join(line for each in found.values() for line in each)))
    for job in list(named)[:STORIES]:
        story = [
            (e.at, f"{e.kind}, claim {e.claim} of {e.worker}") for e in seen.events.get(job, [])
        ]
        story += [
            (line.at, f"body: {line.word} {line.what}, claim {line.claim}, pid {line.pid}")
            for line in seen.by_job.get(job, [])
        ]
        yield f"job {job}:"
        for at, what in sorted(story)[:STORY_LINES]:
            yield f"  {at - seen.began:8.2f} s  {what}"


def _mean_and_most(counts: list[int]) -> str:
    return f"{sum(counts) / len(counts):.3f}, {max(counts)}" if counts else "-"


def _recovery(seen: evidence.Evidence) -> list[tuple[str, ...]]:
    deaths: dict[str, list[check_recovery.Death]] = defaultdict(list)
    for death in check_recovery.deaths(seen):
        deaths[death.care].append(death)
    return [
        (
            meaning,
            f"{check_recovery.PROMISED_S[care]:g} s",
            percentiles([d.taken - d.at for d in deaths[care] if not d.excused]),
            percentiles([d.again - d.at for d in deaths[care] if d.again and not d.excused]),
            str(sum(d.excused for d in deaths[care])),
        )
        for care, meaning in MEANING.items()
    ]


def percentiles(seconds: list[float]) -> str:
    """Return `p50 0.2 s, p99 1.4 s, most 1.4 s of 12`, or `-`."""
    if not seconds:
        return "-"
    ordered = sorted(seconds)

    def at(share: float) -> float:
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))]

    return f"p50 {at(0.5):.2f} s, p99 {at(0.99):.2f} s, most {ordered[-1]:.2f} s of {len(ordered)}"
