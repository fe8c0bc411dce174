"""What a soak prints, and the block that it writes into a page."""

from __future__ import annotations

from collections import Counter, defaultdict
from pathlib import Path
from typing import NamedTuple

from tests.soak import checker, evidence, fleet, judge_claims

BEGIN, END = "<!-- soak:begin -->", "<!-- soak:end -->"
SHOWN = 12
RECOVERY_S = fleet.LEASE_S + fleet.SWEEP_S


class Report(NamedTuple):
    """The figures and the verdict."""

    head: str
    figures: list[tuple[str, str]]
    faults: list[tuple[str, int, str]]
    """Kind, how often, how its held jobs recovered."""
    found: dict[str, list[str]]

    @property
    def clean(self) -> bool:
        """Whether no check found anything."""
        return not any(self.found.values())

    def text(self) -> str:
        """For a terminal."""
        lines = [self.head, "", "faults"]
        lines += [f"  {kind:<20} {count:>4}  {took}" for kind, count, took in self.faults]
        lines += ["", *(f"{name:<56} {value}" for name, value in self.figures), ""]
        for name, found in self.found.items():
            lines.append(f"{name:<56} {len(found)}")
            lines += [f"    {line}" for line in found[:SHOWN]]
            if len(found) > SHOWN:
                lines.append(f"    and {len(found) - SHOWN} more")
        verdict = "clean" if self.clean else "VIOLATIONS: " + ", ".join(self.caught())
        return "\n".join([*lines, "", verdict])

    def caught(self) -> list[str]:
        """The checks that found something."""
        return [name for name, found in self.found.items() if found]

    def markdown(self) -> str:
        """For a page."""
        lines = [
            self.head,
            "",
            "| fault | times | from the fault to the next claim of what it held |",
        ]
        lines += ["|---|--:|---|", *(f"| {k} | {n} | {took} |" for k, n, took in self.faults)]
        lines += ["", "| | |", "|---|---|", *(f"| {name} | {v} |" for name, v in self.figures)]
        lines += ["", "| violations of | |", "|---|--:|"]
        lines += [f"| {name} | {len(found)} |" for name, found in self.found.items()]
        return "\n".join(lines)


def write(path: Path, made: Report) -> None:
    """Replace what stands between the two markers of a page; ValueError when it has none."""
    text = path.read_text()
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{path}: no {BEGIN} ... {END}")
    path.write_text(f"{before}{BEGIN}\n{made.markdown()}\n{END}{after}")


def make(seen: evidence.Evidence, *, head: str, settled_s: float) -> Report:
    """The report of a soak."""
    bodies = Counter(line.job for line in seen.lines if line.word == "start")
    status = Counter(run["status"] for run in seen.runs.values())
    figures = [
        ("faults", str(len(seen.faults))),
        ("runs", f"{len(seen.runs)} ({', '.join(f'{n} {s}' for s, n in sorted(status.items()))})"),
        ("jobs", str(len(seen.jobs))),
        ("bodies started", str(sum(bodies.values()))),
        ("bodies a job, mean and most", _mean_and_most(list(bodies.values()))),
        ("crashes counted", str(sum(job["crash_count"] for job in seen.jobs.values()))),
        (
            f"taken back after an unreported kill (lease + sweep: {RECOVERY_S:g} s)",
            percentiles(_taken(seen)),
        ),
        ("processes restarted", str(len(seen.ended) - len(fleet.SEATS))),
        ("overlapping bodies, the older one fenced off", str(judge_claims.overlaps(seen))),
        ("schedule fires", str(len(seen.fires))),
        ("answers refused as the second", str(seen.books.refused)),
        ("late writes refused", str(seen.books.late_writes - len(seen.books.moved))),
        ("settled after the last fault", f"{settled_s:.1f} s"),
    ]
    return Report(head, figures, _recoveries(seen), checker.check(seen))


def _mean_and_most(counts: list[int]) -> str:
    return f"{sum(counts) / len(counts):.3f}, {max(counts)}" if counts else "-"


def _recoveries(seen: evidence.Evidence) -> list[tuple[str, int, str]]:
    took: dict[str, list[float]] = defaultdict(list)
    last = {(held.id, held.claim_no): fault for fault in seen.faults for held in fault.held}
    for (job, claim), fault in last.items():
        following = seen.claims(job).get(claim + 1)
        if following is not None and following.at > fault.at:
            took[fault.kind].append(following.at - fault.at)
    kinds = Counter(fault.kind for fault in seen.faults)
    return [(kind, count, percentiles(took[kind])) for kind, count in sorted(kinds.items())]


def _taken(seen: evidence.Evidence) -> list[float]:
    """From a kill that nobody reported to the end of the claim that the process held."""
    return [
        event.at - fault.at
        for fault in seen.faults
        if fault.kind == "kill, unreported"
        for held in fault.held
        for event in seen.events.get(held.id, [])
        if event.kind == "reclaimed" and event.claim == held.claim_no
    ]


def percentiles(seconds: list[float]) -> str:
    """`p50 0.2 s, p99 1.4 s, most 1.4 s of 12`, or `-`."""
    if not seconds:
        return "-"
    ordered = sorted(seconds)

    def at(share: float) -> float:
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))]

    return f"p50 {at(0.5):.2f} s, p99 {at(0.99):.2f} s, most {ordered[-1]:.2f} s of {len(ordered)}"
