"""Parse and validate the pool configuration, the list in WORKERS_JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

from queue_workflows import config, errors
from queue_workflows.types import JsonDict
from queue_workflows.worker import shapes

MOST = 500
"""The most jobs that one worker runs at once."""
KEYS = ("queue", "concurrency")


class Entry(NamedTuple):
    """A queue and how many of its jobs run at once."""

    queue: str
    concurrency: int = 1


def option(text: str | None) -> list[Entry]:
    """Return the entries of `--workers`: JSON text, or the path of a file with it. See `check`.

    None or an empty text: those of WORKERS_JSON.
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
            f"--workers {text!r} cannot be read ({why}): give a file, or JSON as in "
            '[{"queue": "load", "concurrency": 2}]'
        ) from None


def shapes_of(entries: Sequence[Entry]) -> dict[str, shapes.Shape]:
    """Return how the jobs of each queue share executors."""
    return {each.queue: shapes.Shape(each.concurrency, mixed=True) for each in entries}


def add_queues(entries: Sequence[Entry]) -> None:
    """Add the queues to those of the app."""
    queues = {each.queue for each in entries}
    config.configure(ingest_queues=config.get_config().ingest_queues | queues)


def as_json(entries: Sequence[Entry]) -> str:
    """Return entries as JSON text."""
    return json.dumps([entry._asdict() for entry in entries])


def parse(text: str, source: str) -> list[Entry]:
    """Return the entries of a JSON text such as `[{"queue": "load", "concurrency": 2}]`."""
    if not text.strip():
        raise errors.InvalidConfig(
            f"{source} is empty: name the queues to serve, as in "
            '[{"queue": "load", "concurrency": 2}]'
        )
    try:
        return check(json.loads(text, object_pairs_hook=_once), source)
    except errors.QueueWorkflowsError:
        raise
    except json.JSONDecodeError as error:
        raise errors.InvalidConfig(f"{source} is not valid JSON: {error}") from None
    except ValueError as error:
        raise errors.InvalidConfig(f"{source} cannot be read: {error}") from None


def _once(pairs: list[tuple[str, Any]]) -> JsonDict:
    found: JsonDict = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"key {key!r} appears twice in one object")
        found[key] = value
    return found


def check(found: Any, source: str) -> list[Entry]:
    """Return the entries of such a list.

    Raises `InvalidConfig` with one line for each fault, which names its entry as `source[0]`.
    """
    if not isinstance(found, list) or not found:
        raise errors.InvalidConfig(f"{source} must be a list of at least one entry")
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
        wrong.append(f"{source} has {total} jobs at once; one process runs at most {MOST}")
    raise errors.InvalidConfig(";\n".join(wrong))


def _faults(found: Any, places: dict[str, int]) -> list[str]:
    """Return the faults of an entry; `places` has the queues of the entries before it."""
    if not isinstance(found, dict):
        return [f"{found!r:.40} is not an object with {' and '.join(KEYS)}"]
    entry = cast("JsonDict", found)
    faults = [
        f"unknown key {key!r}; known are {', '.join(KEYS)}" for key in entry if key not in KEYS
    ]
    if "queue" not in entry:
        faults.append("`queue` is missing")
    else:
        faults += _queue_faults(entry["queue"], places)
    concurrency = entry.get("concurrency", 1)
    if type(concurrency) is not int or not 1 <= concurrency <= MOST:
        faults.append(f"concurrency {concurrency!r:.40}: a whole number from 1 to {MOST}")
    return faults


def _queue_faults(queue: Any, places: dict[str, int]) -> list[str]:
    if not isinstance(queue, str):
        return [f"queue {queue!r:.40} is not a string"]
    if queue in config.DAG_QUEUES:
        return [f"queue {queue!r} runs workflow nodes: start queue-claim-worker --queue {queue}"]
    if not config.QUEUE_NAME.fullmatch(queue):
        return [
            f"{queue[:80]!r} is not a queue name: 1 to 63 of letters, digits, '_', '-', '.', none "
            "of the last two first"
        ]
    if queue in places:
        return [f"queue {queue!r} is also in entry {places[queue]}: name it once"]
    return []
