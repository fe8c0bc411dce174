"""Run `python -m benchmarks`: measure the engine beside a bare psycopg loop, print the table."""

from __future__ import annotations

import argparse
import importlib
import signal
import sys
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, ModuleType

from benchmarks import bench, machine, peers, processes, report, results, server
from queue_workflows import errors

SECTIONS = {
    "import": "imports",
    "enqueue": "enqueue",
    "drain": "drain",
    "slots": "slots",
    "batch": "batch",
    "pickup": "pickup",
    "chain": "chain",
    "fan": "fan",
    "map": "maps",
    "idle": "idle",
    "claim": "claim",
    "limits": "limits",
    "fires": "fires",
    "local": "local_queue",
    "http": "http",
}
FULL_S = 900.0
QUICK_S = 84.0
PEERS_S = 400.0
"""Longest run; what is not measured by then is said to be missing. Peers come on top."""


class Ended(KeyboardInterrupt):
    """The time is over, or somebody wants us to stop. psycopg cancels what runs at a Ctrl-C."""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="at most 90 s: fewer rounds, smaller")
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=SECTIONS, help="these alone")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there too")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the page there too")
    parser.add_argument("--dsn", help="a server to use; its database must be named *_bench")
    parser.add_argument("--peers", action="store_true", help="other queues and engines as well")
    return parser


def _end(signum: int, _: FrameType | None) -> None:
    raise Ended("time is up" if signum == signal.SIGALRM else signal.Signals(signum).name)


@contextmanager
def _bounded() -> Generator[None]:
    """End the run in good order on a signal; set the alarm when measuring begins."""
    for signum in (signal.SIGALRM, signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(signum, _end)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def _measure(run: bench.Bench, name: str, module: ModuleType) -> tuple[report.Section, bool]:
    """Measure one section; return it, and whether the run is over.

    What goes wrong in it is its error, and what was measured before stays.
    """
    section = report.Section(name, module.ABOUT, [], [])
    try:
        for row in module.run(run):
            if isinstance(row, results.Row):
                section.rows.append(row)
                run.say("  ".join(cell for cell in report.cells(row) if cell))
            else:
                section.peer_rows.append(row)
                run.say(f"{row.work}, {row.peer}: {results.number(row.value)} {row.unit}")
    except Ended as end:
        return section._replace(error=str(end)), True
    except Exception as error:  # noqa: BLE001  the other sections and the table go on
        run.say(f"{name}: {error}")
        return section._replace(error=f"{type(error).__name__}: {error}"), False
    return section, False


def _run(options: argparse.Namespace) -> report.Report:
    names: Sequence[str] = options.only or list(SECTIONS)
    modules = {
        name: importlib.import_module(f"benchmarks.measurements.{SECTIONS[name]}") for name in names
    }
    importlib.import_module(processes.APP)
    begun, load_before = time.monotonic(), machine.load()
    sections: list[report.Section] = []
    with server.scratch_folder() as scratch:
        kits = peers.prepare(scratch) if options.peers else []
        limit = (QUICK_S if options.quick else FULL_S) + (PEERS_S if kits else 0)
        signal.setitimer(signal.ITIMER_REAL, limit)
        with server.running(options.dsn, scratch) as where:
            about = machine.describe(where.admin, where.kind)
            logs = scratch / "logs"
            logs.mkdir()
            others = [peers.Peer(kit, where, logs) for kit in kits]
            run = bench.Bench(where, logs, quick=options.quick, peers=others)
            for name in names:
                section, ended = _measure(run, name, modules[name])
                sections.append(section)
                if ended:
                    break
    about["load average"] = f"{load_before} before the run, {machine.load()} after it"
    missing = [name for name in names if name not in {section.name for section in sections}]
    sections += [report.Section(name, modules[name].ABOUT, [], [], "not begun") for name in missing]
    return report.Report(about, options.quick, time.monotonic() - begun, sections)


def main(argv: list[str] | None = None) -> int:
    """Return 0 if all was measured, whether targets are met or missed, else 1."""
    options = _parser().parse_args(argv)
    processes.forget_knobs()
    try:
        with _bounded():
            made = _run(options)
    except (Ended, errors.QueueWorkflowsError) as error:
        sys.stderr.write(f"benchmarks: {error}\n")
        return 1
    sys.stdout.write(report.terminal(made))
    if options.json:
        options.json.write_text(made.as_json())
    if options.markdown:
        options.markdown.write_text(report.markdown(made))
    return 1 if any(section.error for section in made.sections) else 0


if __name__ == "__main__":
    raise SystemExit(main())
