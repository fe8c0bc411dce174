"""Group failures of jobs and schedules by their errors, and hide groups that somebody has seen."""

from __future__ import annotations

import builtins
import functools
import hashlib
import re
import unicodedata
from collections import Counter
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Final, NamedTuple

from queue_workflows import acts, db, errors
from queue_workflows.dag import payload
from queue_workflows.db import statements
from queue_workflows.runtime import clock
from queue_workflows.types import JsonDict, Row, Rows

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from queue_workflows.types import Who

NEWEST: Final = 2_000
"""Failed jobs that are examined by default, the newest ones."""
MOST: Final = 10_000
BARS: Final = 24
"""Equal spans of time in which the failures of a group are counted."""
EXAMINED: Final = 400
"""Characters of an error from which its signature is made."""
SHOWN: Final = 200
"""Characters of a signature."""
NO_ERROR: Final = "no error was given"

# --- signatures --------------------------------------------------------------------------------

_UNITS = (
    r"(?:[kKMGTP]i?)?(?:B|[Bb]ytes?|[Bb]its?)|[nmuµμ]?s|secs?|seconds?|mins?|minutes?|h|hours?"
    r"|days?|[kMG]?Hz|°?C|%"
)
_QUOTED = r"""
    “[^“”]*(?:”|\Z) | „[^„“”]*(?:[“”]|\Z) | \u2018[^\u2018\u2019]*(?:\u2019|\Z)
    | «[^«»]*(?:»|\Z) | 「[^「」]*(?:」|\Z)
    # An apostrophe in a word neither begins nor ends a quotation.
    | (?<!\w)[bru]?'(?:[^'\\]|\\.|(?<=\w)'(?=\w))*(?:'(?!\w)|\\?\Z)
    | (?<!\w)[bru]?"(?:[^"\\]|\\.)*(?:"|\\?\Z)
    | `[^`]*(?:`|\Z)
"""
_PLACE = r"""
    (?<![\w+.-])[a-z][a-z0-9+.-]*://[^\s'"<>)\]},]+(?<![:;.!?])
    | (?<![\w/.~])(?:~|\.\.?)?/[^\s,;:'"()\[\]{}<>|]+
    | (?<![\w/.-])[\w.-]+(?:/[\w.@+-]+)*/[\w.@+-]*\.\w{1,8}(?![\w/])
    | (?<![\w/.-])[\w.-]+(?:/[\w.@+-]+){2,}
    | (?<!\w)[A-Za-z]:\\[^\s,;:'"]+
    | \\\\[\w.-]+\\[^\s,;:'"]+
"""
_NUMBER = rf"""
    (?<!\w)[0-9a-fA-F]{{8}}-(?:[0-9a-fA-F]{{4}}-){{3}}[0-9a-fA-F]{{12}}(?!\w)
    | (?<!\w)(?=[a-f]*\d)[0-9a-f]{{8,}}(?!\w)
    | (?<![\w.])\d{{4}}-\d\d-\d\d(?:[T ]\d\d:\d\d(?::\d\d(?:\.\d+)?)?(?:Z|[+-]\d\d:?\d\d)?)?(?!\w)
    | (?:(?<![\w.)\]])[-+])?(?<![\w.])\d+(?:[.:_-]\d+|,\d{{3}})*(?:[eE][-+]?\d+)?
      (?:\ ?(?:{_UNITS}))?(?!\w)
"""
_DIFFERS = re.compile(
    rf"(?P<quoted>{_QUOTED})|(?P<place>{_PLACE})|(?P<number>{_NUMBER})"
    r"|(?<!\w)(?P<head>[^\W\d]*)(?P<tail>\d\w*)(?P<more>(?:-\w*\d\w*)*)",
    re.VERBOSE,
)
"""Parts that differ between two errors of one cause; a quoted text without an end may be cut."""
_TYPE = re.compile(r"(?:[^\W\d]\w*\.)*[^\W\d]\w*(?=:\s|$)")
_LISTED = re.compile(r"(#|'…'|/…)(?:, ?\1)+")


_DIGITS = str.maketrans("123456789", "000000000")


def signature(error: str) -> str:
    """Return the text that errors of one cause have in common: type, and message without details.

    `#` stands for a number, with its unit, and for an id; `'…'` for a quoted text; `/…` for a path
    or address. At most SHOWN characters, made from the first EXAMINED ones.
    """
    text = error[:EXAMINED]
    kind = _TYPE.match(text)
    begins = kind.end() if kind else 0
    # Which digits a number has does not matter, so that most messages have been seen before.
    found = text[:begins] + _message(text[begins:].translate(_DIGITS))
    return found if len(found) <= SHOWN else found[: SHOWN - 1] + "…"


@functools.lru_cache(maxsize=2048)
def _message(given: str) -> str:
    """Return a message in one line, its variable parts (ids, numbers, names) replaced."""
    text = " ".join(unicodedata.normalize("NFC", given).split())
    return _LISTED.sub(r"\1, …", _DIFFERS.sub(_stand_in, text))


def _stand_in(found: re.Match[str]) -> str:
    kind = found.lastgroup
    if kind == "quoted":
        return "'…'"
    if kind == "place":
        return "/…"
    # A name with a number, such as item7, keeps its name. A random id is dropped.
    if kind == "number" or found["more"] or not found["tail"].isdecimal():
        return "#"
    return f"{found['head']}#"


def group_id(signature: str) -> str:
    """Return the id of the group of failures with this signature: 16 hexadecimal digits."""
    return hashlib.sha256(signature.encode()).hexdigest()[:16]


# --- groups ------------------------------------------------------------------------------------


class Found(NamedTuple):
    """Groups of failures, and how far the search for them went."""

    groups: builtins.list[JsonDict]
    now: datetime
    begin: datetime
    """Where the first bar begins; the last one ends at `until`, or now."""
    examined: int
    """Failed jobs that were read; if these are as many as were asked for, there may be more."""
    back_to: datetime | None
    """When the oldest of them failed; None if there is none."""
    is_whole: bool
    """Whether no older failure was left out."""
    hidden: int
    """Groups that somebody has seen."""


def list(  # noqa: A001  the verb that users look for
    *,
    since: datetime | timedelta | None = None,
    until: datetime | timedelta | None = None,
    queue: str | None = None,
    workflow: str | None = None,
    machine: str | None = None,
    text: str | None = None,
    newest: int = NEWEST,
    seen: bool = False,
    conn: db.Connection | None = None,
) -> Found:
    """Return the newest failures of jobs and schedules in groups, the group that failed last first.

    A group has `id`, `signature`, `count`, `first_at`, `last_at`, `bars`, `names` (its workflows,
    tasks and schedules), `queues`, `machines`, `unplaced` (failures without one), `seen_at`,
    `seen_by`, and `members`, the newest first: `kind` (`node job`, `ingest job`, `schedule`), `id`,
    `at`, `error` (400 characters), `name`, `queue`, `host_label`, `run_id`, `node_id`. The filters
    (`workflow`: or a task; `text`: in the error) choose among the `newest`, 10,000 at most. `seen`:
    also groups marked as seen that have not failed since. Raises `InvalidConfig` (a ValueError).
    """
    clock.check_since(since)
    clock.check_since(until, "until")
    if type(newest) is not int or not 1 <= newest <= MOST:
        raise errors.InvalidConfig(f"newest {newest!r:.40} is not a whole number 1-{MOST:,}")
    given = {"queue": queue, "workflow": workflow, "machine": machine, "text": text}
    # A text that no row can hold matches none; a row never holds an empty queue.
    if not all(map(payload.is_storable, given.values())):
        given = {"queue": "", "workflow": None, "machine": None, "text": None}
    with db.transaction(conn) as own:
        read = statements.failures.newest(
            own, **given, most=newest, cut=EXAMINED,
            since=since if isinstance(since, datetime) else None,
            since_ago=since if isinstance(since, timedelta) else None,
            until=until if isinstance(until, datetime) else None,
            until_ago=until if isinstance(until, timedelta) else None,
        )  # fmt: skip
        now, jobs = read[0]["now"], [row for row in read if row["place"] is not None]
        examined, back_to = (jobs[-1]["place"], jobs[-1]["at"]) if jobs else (0, None)
        is_whole = examined < newest
        begin, end = (now - at if isinstance(at, timedelta) else at for at in (since, until))
        if not is_whole:
            begin = back_to
        rows = [row for row in jobs if row["fits"]]
        for row in statements.failures.of_schedules(own, **given):
            if (begin is None or row["at"] >= begin) and (end is None or row["at"] <= end):
                rows.append(row)
        rows.sort(key=lambda row: row["id"])
        rows.sort(key=lambda row: row["at"], reverse=True)
        by_signature: dict[str, Rows] = {}
        for row in rows:
            by_signature.setdefault(signature(row["error"] or NO_ERROR), []).append(row)
        marked = statements.failures.seen(own, signatures=[*by_signature])
    marks = {row["signature"]: row for row in marked}
    begin = begin or (rows[-1]["at"] if rows else now)
    end = max(begin, end or now)
    groups = [_group(name, of, marks.get(name), begin, end) for name, of in by_signature.items()]
    shown = [group for group in groups if seen or group["seen_at"] is None]
    return Found(shown, now, begin, examined, back_to, is_whole, len(groups) - len(shown))


def _group(name: str, rows: Rows, mark: Row | None, begin: datetime, end: datetime) -> JsonDict:
    """Return a group of `list`; `rows` are its failures, the newest first."""
    last_at = rows[0]["at"]
    if mark is None or last_at > mark["until"]:
        mark = {"seen_at": None, "seen_by": None}
    span_s = (end - begin).total_seconds() / BARS
    bars = [0] * BARS
    for row in rows:
        place = int((row["at"] - begin).total_seconds() / span_s) if span_s else 0
        bars[min(max(place, 0), BARS - 1)] += 1
    return {
        "id": group_id(name),
        "signature": name,
        "count": len(rows),
        "first_at": rows[-1]["at"],
        "last_at": last_at,
        "bars": bars,
        "names": _ordered(rows, "name"),
        "queues": _ordered(rows, "queue"),
        "machines": _ordered(rows, "host_label"),
        "unplaced": sum(row["host_label"] is None for row in rows),
        "seen_at": mark["seen_at"],
        "seen_by": mark["seen_by"],
        "members": rows,
    }


def _ordered(rows: Rows, key: str) -> builtins.list[str]:
    """Return the values of a column, the most frequent one first."""
    counts = Counter(row[key] for row in rows if row[key] is not None)
    return [value for value, _ in counts.most_common()]


def traceback(failure: Row, *, conn: db.Connection | None = None) -> str | None:
    """Return the traceback of a job's failure, a member of a group; None if none was recorded."""
    if failure["kind"] == "schedule":
        return None
    with db.transaction(conn) as own:
        return statements.failures.traceback(
            own, job=failure["id"], run=failure["run_id"], node=failure["node_id"]
        )


# --- marks -------------------------------------------------------------------------------------


def mark_seen(
    signature: str,
    until: datetime | None,
    *,
    conn: db.Connection | None = None,
    **who: Unpack[Who],
) -> bool:
    """Hide the group of this signature from `list` until it fails after `until`.

    `until`: the time of the last failure that was seen. With None the group is shown again; returns
    False if it was not marked. `by`, `reason`: who does it and why, for the record, see `acts`.
    Raises `InvalidConfig` (a ValueError) for a text that is not a signature, or a time without a
    zone.
    """
    if until is not None and (not isinstance(until, datetime) or until.tzinfo is None):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise errors.InvalidConfig(
            f"until must be a datetime with a time zone, or None, not {until!r:.80}"
        )
    if not 1 <= len(signature) <= SHOWN or not payload.is_storable(signature):
        raise errors.InvalidConfig(f"{signature!r:.80} is no signature of `failures.list`")
    action, subject = "mark seen" if until else "mark unseen", ("failures", signature)
    at = until and until.isoformat()
    with db.transaction(conn) as own, acts.recorded(own, action, subject, until=at, **who) as act:
        if until is not None:
            statements.failures.mark_seen(own, signature=signature, until=until, by=act.actor)
        elif not statements.failures.unmark_seen(own, signature=signature):
            act.subjects.clear()
        return bool(act.subjects)
