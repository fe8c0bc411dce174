"""Describe the queues that a worker serves, and refuse settings that cannot work.

It reads how many jobs of each queue run at once, the list in WORKERS_JSON, the GPUs of `--cards`,
and the options of `queue-claim-worker`.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

from queue_workflows import config, errors
from queue_workflows.runtime import entry_point, external_tool
from queue_workflows.types import JsonDict

MAX_LEASE_S = 30 * 86400.0
"""A longer lease would keep a dead worker's job for a month."""


class Limits(NamedTuple):
    """When executors are replaced, and when the worker ends by itself; None means never."""

    max_jobs: int | None = None
    max_rss_mb: float | None = None
    idle_exit_s: float | None = None
    burst: bool = False


NO_LIMITS = Limits()


class Shape(NamedTuple):
    """How many jobs of a queue a worker runs at once, and how its executors share them."""

    slots: int
    batch: int = 1
    """How many jobs may wait for each slot, if they are short; 1 stands for `queue_state.EACH`."""
    concurrent: bool = False
    """Whether one executor runs all of them, on one event loop."""
    gpu: bool = False
    """Whether its one executor holds the models of a GPU.

    A new executor is forked only after the old one has ended."""
    card: int | None = None
    """The one GPU that it uses, or None for all that its process sees."""
    mixed: bool = False
    """Whether its async jobs share one executor, and each of the others has one of its own."""


def _refuse(faults: Mapping[str, bool]) -> None:
    """Raise `InvalidConfig` with the first message whose value is True."""
    for message, is_there in faults.items():
        if is_there:
            raise errors.InvalidConfig(message)


def check_shape(queue: str, shape: Shape) -> None:
    """Raise `InvalidConfig` for slots that cannot work."""
    lone = shape.gpu and (shape.slots, shape.batch, shape.concurrent) == (1, 1, False)
    positive = shape.slots > 0 and shape.batch > 0
    _refuse({
        "--batch, --async and several slots are for cpu and ingest queues: a gpu worker has "
        "one job at a time; --cards 0,1 starts a worker for each of these GPUs":
            queue == "gpu" and not lone,
        "the number of slots, and batch, must be positive": not positive,
        "--async and --batch exclude each other: --async runs jobs at once, --batch one by one":
            shape.concurrent and shape.batch > 1,
    })  # fmt: skip


def check_times(lease_s: float, shutdown_timeout_s: float | None) -> None:
    """Raise `InvalidConfig` for a lease or a shutdown timeout that cannot work."""
    _refuse({
        f"lease of {lease_s} s: it must be positive and at most {MAX_LEASE_S:g}":
            not 0 < lease_s <= MAX_LEASE_S,
        f"shutdown timeout of {shutdown_timeout_s} s: it must be from 0 to {MAX_LEASE_S:g}":
            shutdown_timeout_s is not None and not 0 <= shutdown_timeout_s <= MAX_LEASE_S,
    })  # fmt: skip


def check_nodes(queue: str, knows_nodes: bool) -> None:
    """Raise for a queue that does not exist, and for a node queue if the app has no nodes."""
    config.check_queue(queue)
    if queue in config.DAG_QUEUES and not knows_nodes:
        raise errors.InvalidConfig(
            f"a {queue} worker that knows no node would fail every job: name the app with "
            "--app or QUEUE_WORKFLOWS_APP; it sets a node package or resolver, or registers nodes"
        )


MOST = 500
"""The most jobs that one worker runs at once."""
EXAMPLE = '[{"queue": "load", "concurrency": 2}]'
TIMEOUT_S = 3.0
"""Seconds that nvidia-smi has for its list."""
VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")
"""The variables of NVIDIA and AMD that limit which GPUs a process sees."""


class Entry(NamedTuple):
    """A queue and how many of its jobs run at once."""

    queue: str
    concurrency: int = 1


def option(text: str | None) -> list[Entry]:
    """Return the entries of `--workers`, which has JSON or the path of a JSON file. See `check`.

    Without a text, read WORKERS_JSON.
    """
    if not text:
        return parse(config.WORKERS_JSON.read(), "WORKERS_JSON")
    if text.lstrip()[:1] in ("[", "{"):
        return parse(text, "workers")
    try:
        return parse(Path(text).read_text(encoding="utf-8"), text)
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise errors.InvalidConfig(
            f"--workers {text!r} cannot be read ({why}): give a file, or JSON as in {EXAMPLE}"
        ) from None


def shapes_of(entries: Sequence[Entry]) -> dict[str, Shape]:
    """Return how the jobs of each queue share executors."""
    return {each.queue: Shape(each.concurrency, mixed=True) for each in entries}


def add_queues(entries: Sequence[Entry]) -> None:
    """Add these queues to the queues of the app."""
    queues = {each.queue for each in entries}
    config.configure(ingest_queues=config.get_config().ingest_queues | queues)


def as_json(entries: Sequence[Entry]) -> str:
    """Return entries as JSON text."""
    return json.dumps([entry._asdict() for entry in entries])


def parse(text: str, source: str) -> list[Entry]:
    """Return the entries of a JSON text such as `[{"queue": "load", "concurrency": 2}]`."""
    if not text.strip():
        raise errors.InvalidConfig(f"{source} is empty: name the queues to serve, as in {EXAMPLE}")
    try:
        found = json.loads(text, object_pairs_hook=_once)
    except json.JSONDecodeError as error:
        raise errors.InvalidConfig(f"{source} is not valid JSON: {error}") from None
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else error
        raise errors.InvalidConfig(f"{source} cannot be read: {reason}") from None
    return check(found, source)


def _once(pairs: list[tuple[str, Any]]) -> JsonDict:
    found: JsonDict = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"key {key!r} appears twice in one object")
        found[key] = value
    return found


def check(found: Any, source: str) -> list[Entry]:
    """Return the entries of a decoded list.

    Raises `InvalidConfig` with one line for each fault, which names its entry as `source[0]`.
    """
    if not isinstance(found, list) or not found:
        raise errors.InvalidConfig(f"{source} must be a list of at least one entry")
    wrong: list[str] = []
    places: dict[str, int] = {}
    for number, each in enumerate(cast("list[Any]", found)):
        wrong += [f"{source}[{number}]: {fault}" for fault in _faults(each, number, places)]
    entries = [] if wrong else [Entry(**each) for each in cast("list[Any]", found)]
    if (total := sum(entry.concurrency for entry in entries)) > MOST:
        wrong = [f"{source} has {total} jobs at once; one process runs at most {MOST}"]
    if wrong:
        raise errors.InvalidConfig(";\n".join(wrong))
    return entries


def _faults(found: Any, number: int, places: dict[str, int]) -> Generator[str]:
    """Yield the faults of an entry; `places` maps queues of earlier entries to their numbers."""
    if not isinstance(found, dict):
        yield f"{found!r:.40} is not an object with {' and '.join(Entry._fields)}"
        return
    entry = cast("JsonDict", found)
    for key in entry:
        if key not in Entry._fields:
            yield f"unknown key {key!r}; known are {', '.join(Entry._fields)}"
    queue, concurrency = entry.get("queue"), entry.get("concurrency", 1)
    if "queue" not in entry:
        yield "`queue` is missing"
    elif not isinstance(queue, str):
        yield f"queue {queue!r:.40} is not a string"
    elif queue in config.DAG_QUEUES:
        yield f"queue {queue!r} runs workflow nodes: start queue-claim-worker --queue {queue}"
    elif (fault := config.queue_name_fault(queue)) is not None:
        yield fault
    elif places.setdefault(queue, number) != number:
        yield f"queue {queue!r} is also in entry {places[queue]}: name it once"
    if type(concurrency) is not int or not 1 <= concurrency <= MOST:
        yield f"concurrency {concurrency!r:.40}: a whole number from 1 to {MOST}"


def listed_gpus(tool: external_tool.Tool) -> str:
    """Return a line `index, uuid, MiB` for each GPU of nvidia-smi; block for TIMEOUT_S at most."""
    query = ("--query-gpu=index,uuid,memory.total", "--format=csv,noheader,nounits")
    return tool.ask(*query, timeout_s=TIMEOUT_S).text or ""


def gpu_rows(text: str) -> list[tuple[str, str, str]]:
    """Return index, UUID and size of each GPU in such a list."""
    rows = [[part.strip() for part in line.split(",")] for line in text.splitlines()]
    return [(row[0], row[1], row[2]) for row in rows if len(row) == 3]


def cards_of(text: str) -> list[int]:
    """Return the GPUs of a list such as `0,1`. Raises `InvalidConfig` for any other text."""
    found: list[int] = []
    for part in text.split(","):
        word = part.strip()
        if not (word.isascii() and word.isdigit()) or len(word) > 4:
            raise errors.InvalidConfig(
                f"--cards {text!r:.80} should be the numbers of GPUs, as nvidia-smi shows them, "
                "joined by commas, as in 0,1"
            )
        if int(word) in found:
            raise errors.InvalidConfig(f"--cards {text!r:.80} names GPU {int(word)} twice")
        found.append(int(word))
    return found


def check_cards(cards: Sequence[int]) -> None:
    """Raise `InvalidConfig` for a GPU that this process does not see or that does not exist.

    Without nvidia-smi, any number is accepted. Blocks for TIMEOUT_S at most.
    """
    for name in VISIBLE:
        visible = os.environ.get(name)
        if visible is not None and (hidden := _missing(cards, visible.split(","))):
            raise errors.InvalidConfig(
                f"--cards names GPU {hidden[0]}, and {name} is {visible!r:.80}, so this process "
                "does not see that GPU; name GPUs of the variable, or unset it"
            )
    known = [index for index, _, _ in gpu_rows(listed_gpus(external_tool.Tool("nvidia-smi")))]
    if known and (absent := _missing(cards, known)):
        raise errors.InvalidConfig(
            f"--cards names GPU {absent[0]}, and this machine has none; nvidia-smi lists "
            f"{', '.join(known)}"
        )


def _missing(cards: Sequence[int], among: Sequence[str]) -> list[int]:
    """Return the cards that are not in `among`; [] if it has other values than numbers."""
    words = [word.strip() for word in among if word.strip()]
    if not all(word.isdigit() for word in words):
        return []  # UUIDs
    return [card for card in cards if str(card) not in words]


def card_environment(card: int) -> Mapping[str, str]:
    """Return the variables that limit a process to this GPU, by nvidia-smi's number."""
    return {**dict.fromkeys(VISIBLE, str(card)), "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}


def options_of(arguments: Sequence[str]) -> argparse.Namespace:
    """Return the parsed options; exit with code 2 for an unknown one, or without a queue."""
    found = argparse.ArgumentParser(
        allow_abbrev=False,
        prog="queue-claim-worker",
        description="One worker of one queue, one job at a time; or a pool of several.",
    )
    recycling = found.add_argument_group("processes", "Not with --inline.")
    # fmt: off
    add, recycle = found.add_argument, recycling.add_argument
    add("--queue", help="cpu, gpu or an ingest queue: one job at a time")
    add("--workers", nargs="?", const="", metavar="FILE|JSON",
        help=f"ingest queues and how many jobs of each at once, as in '{EXAMPLE}'; default: "
        "WORKERS_JSON; beside --queue cpu --slots N, one worker serves all")
    add("--lease-seconds", type=float, default=600.0, metavar="N",
        help="how long a claim holds without being renewed; default: 600")
    add("--batch", type=int, default=1, metavar="N",
        help="let up to N claimed jobs wait for each slot, if they are very short; default: 32")
    add("--slots", type=int, metavar="N",
        help="run up to N jobs at once, each in a process of its own (gpu: 1)")
    add("--cards", metavar="N,N",
        help="on the gpu queue: a worker for each of these GPUs, as nvidia-smi numbers them, whose "
        "handlers run in a process that sees this GPU alone")
    add("--async", dest="async_jobs", action="store_true",
        help="with --slots: run the N jobs in one process, on one event loop, for async functions")
    add("--inline", action="store_true",
        help="run handlers in the worker's process, one at a time, as for a debugger; one that "
        "crashes or holds the GIL then stops the worker too")
    recycle("--max-jobs", type=int, metavar="N",
            help="replace the process of a handler after N jobs")
    recycle("--max-rss-mb", type=float, metavar="M", help="replace one that is larger after a job")
    recycle("--idle-exit", type=float, metavar="S", help="end after so many seconds without a job")
    recycle("--burst", action="store_true", help="end when no job is left")
    add("--shutdown-timeout", type=float, metavar="N",
        help="seconds that a job gets to end after SIGTERM before it is handed back; default: "
        "SHUTDOWN_TIMEOUT_S (8)")
    add("--supervise", action="store_true",
        help="run under a small parent that restarts it and hands back its claimed jobs at once")
    # fmt: on
    entry_point.add_common_arguments(found)
    options = found.parse_args(arguments)
    if options.queue is None and options.workers is None:
        found.error("one of the arguments --queue --workers is required")
    return options


def is_plain(options: argparse.Namespace) -> bool:
    """Return whether neither --slots nor --cards is set: the worker exits to stop a handler."""
    return options.queue is not None and options.slots is None and options.cards is None


def limits(options: argparse.Namespace) -> Limits:
    """Return when the processes of slots end; raise `InvalidConfig` for options that clash."""
    chosen = Limits(options.max_jobs, options.max_rss_mb, options.idle_exit, burst=options.burst)
    ends = chosen.burst or chosen.idle_exit_s is not None
    queue, slots, cards = options.queue, options.slots, options.cards
    shaped = options.batch != 1 or options.async_jobs
    beside = queue == "cpu" and slots is not None and not (shaped or options.inline or cards)
    values = (chosen.max_jobs, chosen.max_rss_mb, chosen.idle_exit_s)
    _refuse({
        "--batch needs --queue: a pool claims what is free": queue is None and options.batch != 1,
        "--workers goes with --queue cpu --slots N, without --batch, --async and --inline, or with "
        "no --queue": queue is not None and options.workers is not None and not beside,
        "--burst and --idle-exit exclude --supervise: a parent would start the worker again":
            ends and options.supervise,
        "the values of --max-jobs, --max-rss-mb and --idle-exit must be positive":
            any(value is not None and not value > 0 for value in values),
        "--inline is for one queue, without --slots, --cards and --async":
            options.inline and (not is_plain(options) or options.async_jobs),
        "--max-jobs, --max-rss-mb, --idle-exit and --burst exclude --inline: it runs jobs in the "
        "worker's process": options.inline and chosen != NO_LIMITS,
        "--cards needs --queue gpu: only its jobs use GPUs": cards is not None and queue != "gpu",
        "--cards excludes --slots, --async and --batch: each GPU runs one job at a time":
            cards is not None and (slots is not None or shaped),
        "--async needs --slots N (how many jobs run at once)": slots is None and options.async_jobs,
        "--slots needs --queue; --workers has `concurrency` instead":
            slots is not None and queue is None,
    })  # fmt: skip
    if cards is not None:
        numbers = cards_of(cards)
        _refuse({
            "--burst and --idle-exit need a single GPU: a parent would start the workers again":
                len(numbers) > 1 and ends,
        })  # fmt: skip
        check_cards(numbers)
    elif queue is not None:
        check_shape(queue, shape_of(options))
    return chosen


def shape_of(options: argparse.Namespace) -> Shape:
    """Return how many jobs run at once in how many processes."""
    if options.cards is not None:
        return Shape(1, gpu=True, card=cards_of(options.cards)[0])
    return Shape(
        1 if options.slots is None else options.slots,
        options.batch,
        concurrent=options.async_jobs,
        gpu=options.queue == "gpu",
    )
