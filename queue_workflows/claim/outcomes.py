"""Describe how a handler ended, with its result, or its error and a readable traceback."""

from __future__ import annotations

import itertools
import json
import logging
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from queue_workflows import errors
from queue_workflows.dag import payload, policy
from queue_workflows.runtime import masking
from queue_workflows.tasks import control
from queue_workflows.types import JsonDict

_log = logging.getLogger(__name__)
SNOOZE_LEAST_S = 1.0
"""The shortest snooze in seconds. After a shorter one, the job would be claimed before others."""
USED_S = 2.0
"""Attempts that take at least so many seconds record the resources that they used."""


Cursor: TypeAlias = tuple[str, str, int]
"""The name and key of a cursor, and the number of its items that are done."""


class Outcome(NamedTuple):
    """How a handler ended; `kind` is a key of `record._EVENTS`.

    `timed_out` means that its worker had decided before that its time limit has passed.
    """

    kind: str
    seconds: float
    result: str = "{}"
    """The result as checked JSON text."""
    error: str = ""
    """The text of the error. It is the reason if the job waits, was snoozed or cancelled, and the
    first error that its handler logged if it completed."""
    detail: str | None = None
    """The traceback and the used resources, as JSON text for the history of the job."""
    value: Any = None
    """The result as the app returned it, for hooks."""
    resolved_inputs: str | None = None
    vm_rss_mb_peak: int | None = None
    raised: policy.Raised = policy.Raised()
    """How the error affects the next attempt; `after_s` is the wait of a snoozed job."""
    task: Mapping[str, Any] | None = None
    """The policy of the task, for columns that are NULL in the job's row."""
    cursors: tuple[Cursor, ...] = ()
    """The positions of cursors that the handler had not ended."""


def of_error(error: BaseException, seconds: float, what: str) -> Outcome:
    """Return a failed outcome with the error and its traceback, or a snoozed or waiting one.

    Masks the passwords of DSNs, since the outcome is stored and shown.
    """
    if isinstance(error, errors.Snooze):
        raised = policy.Raised(after_s=max(error.seconds, SNOOZE_LEAST_S))
        message = payload.error_text(error)
        return Outcome("snoozed", seconds, error=message, raised=raised)
    if isinstance(error, control.Suspended):
        return Outcome("waiting", seconds, error=payload.error_text(error))
    name, message = type(error).__name__, payload.error_text(error)
    # Not masked again, since that would hide the word after `InvalidToken:`.
    text = (f"{name}: {message}" if message else name)[: payload.ERROR_LIMIT]
    if isinstance(error, SystemExit):
        text = payload.error_text(f"the handler called sys.exit({error.code!r})")
    trace = masking.mask(_traceback(error))[-payload.ERROR_LIMIT :]
    taken = {"duration_s": round(seconds, 3)}
    _log.warning("%s failed after %.1f s: %s", what, seconds, text, extra=taken)
    detail = payload.encode({"traceback": payload.error_text(trace)}, "traceback")
    return Outcome("failed", seconds, error=text, detail=detail, raised=_raised(error))


_PACKAGE = Path(__file__).resolve().parents[1]


def _traceback(error: BaseException) -> str:
    """Return the traceback of an error and its causes, or of the error alone if that fails."""
    try:
        trace = traceback.TracebackException.from_exception(error)
        if isinstance(error, errors.QueueWorkflowsError) and _is_ours_alone(trace):
            # Frames of the engine do not help the author of the app; the message is enough.
            return "".join(trace.format_exception_only())
        _leave_out_engine(trace)
        return "".join(trace.format())
    except Exception as broken:  # noqa: BLE001  the boundary around app code: an error's own code
        frames = "".join(traceback.format_tb(error.__traceback__))
        return f"{frames}{type(error).__name__}; no further details: {type(broken).__name__}"


def _is_ours_alone(trace: traceback.TracebackException) -> bool:
    """Return whether the engine's own code raised the error, and the error has no cause."""
    cause = trace.__cause__ or (None if trace.__suppress_context__ else trace.__context__)
    return cause is None and all(map(_is_engine, trace.stack))


def _is_engine(frame: traceback.FrameSummary) -> bool:
    path = Path(frame.filename)
    # An async handler is called by asyncio, so its frames lie between ours and the app's.
    between = path.parent.name == "asyncio"
    own = path.is_relative_to(_PACKAGE) and not path.is_relative_to(_PACKAGE / "demo")
    return own or between


def _leave_out_engine(first: traceback.TracebackException) -> None:
    """Drop the engine's frames around the handler, unless only frames of the engine are there."""
    streams = str(_PACKAGE / "run" / "job_output.py")
    todo: list[traceback.TracebackException | None] = [first]
    while todo:
        if (shown := todo.pop()) is None:
            continue
        rest = itertools.dropwhile(_is_engine, shown.stack)
        if frames := [frame for frame in rest if frame.filename != streams]:
            shown.stack = traceback.StackSummary.from_list(frames)
        todo += (shown.__cause__, shown.__context__, *(getattr(shown, "exceptions", None) or ()))


def _raised(error: BaseException) -> policy.Raised:
    names = policy.names_of(error)
    if isinstance(error, errors.Retry):
        return policy.Raised(names, "retry", error.after_s)
    hopeless = isinstance(error, (errors.Discard, errors.ArgsRefused, errors.UnreadableRow))
    return policy.Raised(names, "discard" if hopeless else "")


def with_used(outcome: Outcome, used: JsonDict) -> Outcome:
    """Return the outcome with `used` (see `ClaimedJob.used`) added to its detail."""
    if not used:
        return outcome
    before = json.loads(outcome.detail or "{}")
    return outcome._replace(detail=payload.encode(before | used, "detail"))


def without_others(outcome: Outcome) -> Outcome:
    """Return the outcome without `elsewhere`, so that a node that is unknown here fails."""
    if outcome.raised.wish not in ("elsewhere", "no_gpu"):
        return outcome
    return outcome._replace(raised=outcome.raised._replace(wish=""))
