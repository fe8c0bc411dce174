"""What a pool serves: the list of WORKERS_JSON, checked entry by entry."""

from __future__ import annotations

import json
from typing import Any, NamedTuple, cast

from queue_workflows import config, errors
from queue_workflows.types import JsonDict
from queue_workflows.worker import board

MOST = board.PLACES
"""Bodies that one process may run at once."""
KEYS = ("queue", "concurrency")


class Entry(NamedTuple):
    """A queue, and how many of its jobs run at once."""

    queue: str
    concurrency: int = 1


def parse(text: str, source: str) -> list[Entry]:
    """The entries of a JSON text such as `[{"queue": "load", "concurrency": 2}]`: see `check`."""
    if not text.strip():
        raise errors.InvalidConfig(
            f"{source} is empty: say which queues to serve, as in "
            '[{"queue": "load", "concurrency": 2}]'
        )
    try:
        return check(json.loads(text), source)
    except ValueError as error:
        if isinstance(error, errors.QueueWorkflowsError):
            raise
        raise errors.InvalidConfig(f"{source} is no JSON: {error}") from None


def check(found: Any, source: str) -> list[Entry]:
    """The entries of such a list.

    Raises `InvalidConfig` with a line for each thing that is wrong, which names its entry as
    `source[0]`.
    """
    if not isinstance(found, list) or not found:
        raise errors.InvalidConfig(f"{source}: it must be a list of at least one entry")
    every = cast("list[Any]", found)
    wrong: list[str] = []
    places: dict[str, int] = {}
    for number, each in enumerate(every):
        wrong += [f"{source}[{number}]: {fault}" for fault in _faults(each, places)]
        queue = cast("JsonDict", each).get("queue") if isinstance(each, dict) else None
        if isinstance(queue, str):
            places.setdefault(queue, number)
    if not wrong:
        entries = [Entry(**each) for each in every]
        total = sum(entry.concurrency for entry in entries)
        if total <= MOST:
            return entries
        wrong.append(f"{source}: {total} jobs at once; one process runs at most {MOST}")
    raise errors.InvalidConfig(";\n".join(wrong))


def _faults(found: Any, places: dict[str, int]) -> list[str]:
    """What is wrong with an entry; `places` of the queues before it."""
    if not isinstance(found, dict):
        return [f"{found!r:.40} is no object with {' and '.join(KEYS)}"]
    entry = cast("JsonDict", found)
    faults = [
        f"unknown key {key!r}; known are {', '.join(KEYS)}" for key in entry if key not in KEYS
    ]
    if "queue" not in entry:
        faults.append("it names no queue")
    else:
        faults += _queue_faults(entry["queue"], places)
    concurrency = entry.get("concurrency", 1)
    if type(concurrency) is not int or not 1 <= concurrency <= MOST:
        faults.append(f"concurrency {concurrency!r:.40}: a whole number from 1 to {MOST}")
    return faults


def _queue_faults(queue: Any, places: dict[str, int]) -> list[str]:
    if not isinstance(queue, str):
        return [f"queue {queue!r:.40} is no name"]
    if queue in config.DAG_QUEUES:
        return [f"queue {queue!r} is of workflow nodes: start queue-claim-worker --queue {queue}"]
    if not config.QUEUE_NAME.fullmatch(queue):
        return [
            f"{queue[:80]!r} is no queue name: 1 to 63 of letters, digits, '_', '-', '.', none of "
            "the last two first"
        ]
    if queue in places:
        return [f"queue {queue!r} again, as in entry {places[queue]}: give it once"]
    return []
