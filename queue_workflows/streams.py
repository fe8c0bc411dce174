"""Stream parts of a result from a handler while it runs, and read them in order.

A part is a JSON value with a name. The parts of each attempt are numbered 1, 2, 3 ...; a new
attempt begins the stream again, and readers get a reset mark.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncGenerator, Generator
from datetime import datetime
from typing import Any, Final, NamedTuple

from queue_workflows import db, errors
from queue_workflows.admin import stored_graph
from queue_workflows.dag import payload
from queue_workflows.db import statements
from queue_workflows.tasks import attempt_requests, control, job
from queue_workflows.types import TERMINAL_JOB_STATUSES, Row

PAGE: Final = 200
"""The most parts that one statement reads."""
PAGE_BYTES: Final = 1024 * 1024
"""The most bytes of parts that one statement returns, not counting the last part."""
PAUSE_FIRST_S: Final = 0.1
PAUSE_MAX_S: Final = 1.0
"""Longest pause in seconds between two reads of a follower without a notification. The end of a job
is not notified."""
_WAKES: Final = db.Subscriptions("job_parts")


def stream(name: str, part: Any, /) -> None:
    """Add a part to the stream of the current job; for handlers of nodes and ingest tasks.

    Parts are sent in batches, at least ten times a second while parts come, and all of them before
    the attempt ends. If the database is slow, this waits. Raises `InvalidPayload` (a ValueError)
    for a value that is not JSON or exceeds the limits of `attempt_requests`, `StepRefused` for a
    bad name, and `ClaimLost` if the job was given to another worker.
    """
    sent = job.current_job().parts.add(name, part)
    if sent is not None:
        control.value_of(sent.result())


async def stream_async(name: str, part: Any, /) -> None:
    """Do as `stream` does, in an async handler, without blocking the event loop."""
    sent = job.current_job().parts.add(name, part)
    if sent is not None:
        control.value_of(await asyncio.wrap_future(sent))


class Part(NamedTuple):
    """A part of a stream, or a reset mark, after which the parts of a new attempt follow."""

    claim_no: int
    """The claim of the attempt."""
    seq: int
    """The number within the attempt, counted over all names; 0 for a reset mark."""
    name: str
    value: Any
    created_at: datetime | None

    @property
    def is_reset(self) -> bool:
        """Return whether this is not a part, but the mark of a new attempt."""
        return self.seq == 0

    @property
    def id(self) -> str:
        """Return the place in the stream, for `after`."""
        return f"{self.claim_no}-{self.seq}"


class Page(NamedTuple):
    """Some parts, the place after them, whether the stream has ended, and whether more can be read.

    `status` is the status of the job.
    """

    parts: list[Part]
    after: str
    over: bool
    full: bool
    status: str


def read(job_id: str, name: str | None = None, *, after: str | None = None) -> list[Part]:
    """Return all stored parts of a job, or only the parts of this name, with reset marks.

    The parts of the last three attempts that streamed are kept. `after` is the `id` of the last
    part that is known. Raises `UnknownJob`, and `InvalidConfig` for an invalid `after`.
    """
    found: list[Part] = []
    while True:
        page = read_page(job_id, name, after=after)
        found += page.parts
        after = page.after
        if not page.full:
            return found


def follow(
    job_id: str, name: str | None = None, *, after: str | None = None
) -> Generator[Part, None, None]:
    """Yield the parts of a job as `read` returns them, also new ones, until the job has ended.

    A notification of each batch wakes it; it also reads after 0.1 s, growing to 1 s.
    """
    pause_s, woken = PAUSE_FIRST_S, threading.Event()
    with contextlib.ExitStack() as waking:
        listens = False
        while True:
            page = read_page(job_id, name, after=after)
            yield from page.parts
            pause_s = next_pause(page, after, pause_s)
            after = page.after
            if page.over:
                return
            if not page.full and listens:
                woken.wait(pause_s)
                woken.clear()
            elif not page.full:
                listens = True
                waking.enter_context(_WAKES.waking(job_id, woken.set))


async def follow_async(
    job_id: str, name: str | None = None, *, after: str | None = None
) -> AsyncGenerator[Part, None]:
    """Do as `follow` does, without blocking the event loop."""
    loop, woken = asyncio.get_running_loop(), asyncio.Event()

    def wake() -> None:
        with contextlib.suppress(RuntimeError):  # its event loop has ended
            loop.call_soon_threadsafe(woken.set)

    pause_s, waking, listens = PAUSE_FIRST_S, contextlib.ExitStack(), False
    try:
        while True:
            page = await asyncio.to_thread(read_page, job_id, name, after=after)
            for part in page.parts:
                yield part
            pause_s = next_pause(page, after, pause_s)
            after = page.after
            if page.over:
                return
            if not page.full and listens:
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(woken.wait(), pause_s)
                woken.clear()
            elif not page.full:
                listens = True
                waking.enter_context(_WAKES.waking(job_id, wake))
    finally:
        if listens:
            await asyncio.to_thread(waking.close)


def next_pause(page: Page, before: str | None, pause_s: float) -> float:
    """Return the seconds until the next read, which are few after a read that found parts."""
    return PAUSE_FIRST_S if page.after != before else min(PAUSE_MAX_S, 1.5 * pause_s)


def read_page(
    job_id: str, name: str | None = None, *, after: str | None = None, limit: int = PAGE
) -> Page:
    """Return the next parts behind `after`, up to `limit` and about 1 MiB, in one statement."""
    if name is not None:
        name = attempt_requests.checked_name(name)
    place = _place(after)
    rows: list[Row] = []
    if payload.is_storable(job_id):
        with db.transaction() as conn:
            rows = statements.job_parts.behind(
                conn,
                job=job_id,
                claim=place[0],
                seq=place[1],
                name=name,
                limit=limit,
                bytes=PAGE_BYTES,
            )
    if not rows:
        raise errors.UnknownJob(f"there is no job {job_id!r:.80}")
    found: list[Part] = []
    parts = [row for row in rows if row["seq"] is not None]
    for row in parts:
        if 0 < place[0] < row["claim_no"]:
            found.append(_reset(row["claim_no"]))
        place = row["claim_no"], row["seq"]
        value = attempt_requests.stored_value(row["part"], f"part {_text(place)} of job {job_id}")
        found.append(Part(*place, row["name"], value, row["created_at"]))
    full = bool(parts) and (len(parts) < parts[0]["found"] or len(parts) == limit)
    status, claim_no = rows[0]["status"], rows[0]["job_claim"]
    if not full and 0 < place[0] < claim_no:
        place = claim_no, 0
        found.append(_reset(claim_no))
    if not full and rows[0]["last_claim"] is not None:
        # Parts of other names are not searched again.
        place = max(place, (rows[0]["last_claim"], rows[0]["last_seq"]))
    over = not full and status in TERMINAL_JOB_STATUSES
    return Page(found, _text(place), over, full, status)


def job_of_node(run_id: str, node_id: str) -> str:
    """Return the id of the job of a node, for the other functions here.

    Raises `UnknownJob` if the run has no such node (yet).
    """
    with db.transaction() as conn:
        found = None
        if payload.is_storable(run_id) and payload.is_storable(node_id):
            found = statements.job_parts.job_of_node(conn, run_id=run_id, node_id=node_id)
        if found is None:
            meant = stored_graph.hint(conn, run_id, node_id)
            raise errors.UnknownJob(f"run {run_id!r:.80} has no node {node_id!r:.80}{meant}")
    return found


def _reset(claim_no: int) -> Part:
    return Part(claim_no, 0, "", None, None)


def _text(place: tuple[int, int]) -> str:
    return f"{place[0]}-{place[1]}"


def _place(after: str | None) -> tuple[int, int]:
    """Return claim and number of an id. Raises `InvalidConfig`."""
    if after is None:
        return 0, 0
    claim, dash, seq = after.partition("-")
    known = dash and all(text.isascii() and text.isdigit() for text in (claim, seq))
    if not known or len(claim) > 18 or len(seq) > 9:
        raise errors.InvalidConfig(f"{after!r:.80} is no id of a part, such as '1-20'")
    return int(claim), int(seq)
