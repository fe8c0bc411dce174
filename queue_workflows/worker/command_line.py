"""Define the options of `queue-claim-worker`, and refuse those that clash.

`parser` is long because it lists every option.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from queue_workflows import errors
from queue_workflows.runtime import entry_point
from queue_workflows.worker import gpus, shapes


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command's options. Its length: a call for each option."""
    found = argparse.ArgumentParser(
        allow_abbrev=False,
        prog="queue-claim-worker",
        description="One worker of one queue, one job at a time; or a pool of several.",
    )
    found.add_argument("--queue", help="cpu, gpu or an ingest queue: one job at a time")
    found.add_argument(
        "--workers",
        nargs="?",
        const="",
        metavar="FILE|JSON",
        help="ingest queues and how many jobs of each at once, as in "
        '\'[{"queue": "load", "concurrency": 2}]\'; default: WORKERS_JSON; beside '
        "--queue cpu --slots N, one worker serves all",
    )
    found.add_argument(
        "--lease-seconds",
        type=float,
        default=600.0,
        metavar="N",
        help="how long a claim holds without being renewed; default: 600",
    )
    found.add_argument(
        "--batch",
        type=int,
        default=1,
        metavar="N",
        help="let up to N claimed jobs wait for each slot, if they are very short; default: 32",
    )
    found.add_argument(
        "--slots",
        type=int,
        metavar="N",
        help="run up to N jobs at once, each in a process of its own (gpu: 1)",
    )
    found.add_argument(
        "--cards",
        metavar="N,N",
        help="on the gpu queue: a worker for each of these GPUs, as nvidia-smi numbers them, whose "
        "handlers run in a process that sees this GPU alone",
    )
    found.add_argument(
        "--async",
        dest="async_jobs",
        action="store_true",
        help="with --slots: run the N jobs in one process, on one event loop, for async functions",
    )
    found.add_argument(
        "--inline",
        action="store_true",
        help="run handlers in the worker's process, one at a time, as for a debugger; one that "
        "crashes or holds the GIL then stops the worker too",
    )
    recycling = found.add_argument_group("processes", "Not with --inline.")
    recycling.add_argument(
        "--max-jobs", type=int, metavar="N", help="replace the process of a handler after N jobs"
    )
    recycling.add_argument(
        "--max-rss-mb", type=float, metavar="M", help="replace one that is larger after a job"
    )
    recycling.add_argument(
        "--idle-exit", type=float, metavar="S", help="end after so many seconds without a job"
    )
    recycling.add_argument("--burst", action="store_true", help="end when no job is left")
    found.add_argument(
        "--shutdown-timeout",
        type=float,
        metavar="N",
        help="seconds that a job gets to end after SIGTERM before it is handed back; default: "
        "SHUTDOWN_TIMEOUT_S (8)",
    )
    found.add_argument(
        "--supervise",
        action="store_true",
        help="run under a small parent that restarts it and hands back its claimed jobs at once",
    )
    entry_point.add_common_arguments(found)
    return found


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Return the options; exit with code 2 for unknown ones, or if no queue is named."""
    known = parser()
    options = known.parse_args(arguments)
    if options.queue is None and options.workers is None:
        known.error("one of the arguments --queue --workers is required")
    return options


def is_plain(options: argparse.Namespace) -> bool:
    """Return whether the worker has neither slots nor cards: it ends with a job that it ends."""
    return options.queue is not None and options.slots is None and options.cards is None


def limits(options: argparse.Namespace) -> shapes.Limits:
    """Return when the processes of slots end; raise `InvalidConfig` for options that clash."""
    chosen = shapes.Limits(
        options.max_jobs, options.max_rss_mb, options.idle_exit, burst=options.burst
    )
    if options.queue is None and options.batch != 1:
        raise errors.InvalidConfig("--batch needs --queue: a pool claims what is free")
    if options.queue is not None and options.workers is not None:
        _check_beside(options)
    ends = chosen.burst or chosen.idle_exit_s is not None
    if ends and options.supervise:
        raise errors.InvalidConfig(
            "--burst and --idle-exit exclude --supervise: a parent would start the worker again"
        )
    shapes.check_limits(chosen)
    if options.inline:
        _check_inline(options, chosen)
    if options.cards is not None:
        _check_cards(options, chosen)
    elif options.slots is None and options.async_jobs:
        raise errors.InvalidConfig("--async needs --slots N (how many jobs run at once)")
    elif options.slots is not None and options.queue is None:
        raise errors.InvalidConfig("--slots needs --queue; --workers has `concurrency` instead")
    elif options.queue is not None:
        shapes.check(options.queue, shape(options))
    return chosen


def _check_inline(options: argparse.Namespace, chosen: shapes.Limits) -> None:
    """Raise `InvalidConfig` for what cannot be where handlers run in the worker's process."""
    if not is_plain(options) or options.async_jobs:
        raise errors.InvalidConfig(
            "--inline is for one queue, without --slots, --cards and --async"
        )
    if chosen != shapes.NO_LIMITS:
        raise errors.InvalidConfig(
            "--max-jobs, --max-rss-mb, --idle-exit and --burst exclude --inline: it runs jobs "
            "in the worker's process"
        )


def _check_beside(options: argparse.Namespace) -> None:
    """Raise `InvalidConfig` for a pool beside a queue that cannot have one."""
    shaped = options.batch != 1 or options.async_jobs or options.inline
    if options.queue != "cpu" or options.slots is None or shaped or options.cards is not None:
        raise errors.InvalidConfig(
            "--workers goes with --queue cpu --slots N, without --batch, --async and --inline, or "
            "with no --queue"
        )


def _check_cards(options: argparse.Namespace, chosen: shapes.Limits) -> None:
    """Raise `InvalidConfig` for cards that cannot be, or that clash with other options."""
    if options.queue != "gpu":
        raise errors.InvalidConfig("--cards needs --queue gpu: only its jobs use GPUs")
    if options.slots is not None or options.async_jobs or options.batch != 1:
        raise errors.InvalidConfig(
            "--cards excludes --slots, --async and --batch: each GPU runs one job at a time"
        )
    numbers = gpus.parse(options.cards)
    if len(numbers) > 1 and (chosen.burst or chosen.idle_exit_s is not None):
        raise errors.InvalidConfig(
            "--burst and --idle-exit need a single GPU: a parent would start the workers again"
        )
    shapes.check("gpu", shapes.Shape(1, gpu=True, card=numbers[0]))
    gpus.check(numbers)


def shape(options: argparse.Namespace) -> shapes.Shape:
    """Return how many jobs run at once in how many processes."""
    if options.cards is not None:
        return shapes.Shape(1, gpu=True, card=gpus.parse(options.cards)[0])
    return shapes.Shape(
        1 if options.slots is None else options.slots,
        options.batch,
        concurrent=options.async_jobs,
        gpu=options.queue == "gpu",
    )
