"""The outcome of a handler: what it returned, what it raised, and the traceback to show for it."""

from __future__ import annotations

import itertools
import logging
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from queue_workflows import errors
from queue_workflows.dag import policy
from queue_workflows.runtime import process
from queue_workflows.store import payload

_log = logging.getLogger(__name__)
SNOOZE_LEAST_S = 1.0
"""A job that snoozes for less would be claimed again at once, before all that wait behind it."""


class Outcome(NamedTuple):
    """How a body ended, and what it leaves.

    Kinds: `completed`, `failed`, `parked`, `cancelled`, `snoozed`.
    """

    kind: str
    seconds: float
    result: str = "{}"
    """The result as checked JSON text."""
    error: str = ""
    """The error's text; of a snoozed or cancelled one the reason."""
    detail: str | None = None
    """JSON text for the job's history: the traceback."""
    value: Any = None
    """The result as the host returned it, for hooks."""
    resolved_inputs: str | None = None
    vm_rss_mb_peak: int | None = None
    raised: policy.Raised = policy.Raised()
    """What a failure says about the next attempt; `after_s` is a snoozed job's wait."""
    task: Mapping[str, Any] | None = None
    """The policy of its task, for what the job's row does not say."""


def of_error(error: BaseException, seconds: float, what: str) -> Outcome:
    """A failed outcome that says what was raised, with its traceback; or a snoozed one.

    The passwords of DSNs are masked in all that it says: it goes to rows, and from there anywhere.
    """
    if isinstance(error, errors.Snooze):
        raised = policy.Raised(after_s=max(error.seconds, SNOOZE_LEAST_S))
        said = process.mask(payload.error_text(error))
        return Outcome("snoozed", seconds, error=said, raised=raised)
    name, said = type(error).__name__, process.mask(payload.error_text(error))
    text = f"{name}: {said}" if said else name
    if isinstance(error, SystemExit):
        text = f"the body called sys.exit({error.code!r})"
    trace = process.mask(_told(error))[-payload.ERROR_LIMIT :]
    _log.warning("%s failed after %.1f s: %s", what, seconds, payload.error_text(text))
    detail = payload.encode({"traceback": payload.error_text(trace)}, "traceback")
    return Outcome(
        "failed", seconds, error=payload.error_text(text), detail=detail, raised=_raised(error)
    )


_PACKAGE = Path(__file__).resolve().parents[1]


def _told(error: BaseException) -> str:
    """The traceback of an error and of those behind it; of too many behind it only its own."""
    try:
        told = traceback.TracebackException.from_exception(error)
        if isinstance(error, errors.QueueWorkflowsError) and _is_ours_alone(told):
            # The message says it all; frames of the engine would tell the app's author nothing.
            return "".join(told.format_exception_only())
        _leave_out_engine(told)
        return "".join(told.format())
    except Exception as untold:  # noqa: BLE001  the boundary around host code: an error's own code
        frames = "".join(traceback.format_tb(error.__traceback__))
        return f"{frames}{type(error).__name__}; no more can be told: {type(untold).__name__}"


def _is_ours_alone(told: traceback.TracebackException) -> bool:
    """Return whether no code of the app raised it, and no other error stands behind it."""
    behind = told.__cause__ or (None if told.__suppress_context__ else told.__context__)
    return behind is None and all(map(_is_engine, told.stack))


def _is_engine(frame: traceback.FrameSummary) -> bool:
    path = Path(frame.filename)
    # An async task is reached through asyncio.
    between = path.parent.name == "asyncio"
    own = path.is_relative_to(_PACKAGE) and not path.is_relative_to(_PACKAGE / "demo")
    return own or between


def _leave_out_engine(first: traceback.TracebackException) -> None:
    """Drop the frames by which a body was reached, and those of its streams; not all there are."""
    streams = str(_PACKAGE / "worker" / "capture.py")
    todo: list[traceback.TracebackException | None] = [first]
    while todo:
        if (told := todo.pop()) is None:
            continue
        rest = itertools.dropwhile(_is_engine, told.stack)
        if frames := [frame for frame in rest if frame.filename != streams]:
            told.stack = traceback.StackSummary.from_list(frames)
        todo += (told.__cause__, told.__context__, *(getattr(told, "exceptions", None) or ()))


def _raised(error: BaseException) -> policy.Raised:
    names = policy.names_of(error)
    if isinstance(error, errors.Retry):
        return policy.Raised(names, "retry", error.after_s)
    hopeless = isinstance(error, (errors.Discard, errors.ArgsRefused, errors.UnreadableRow))
    return policy.Raised(names, "discard" if hopeless else "")


def unless_signal(value: Any) -> Any:
    """What a body returned; a signal that it returned is raised."""
    if isinstance(value, errors.JobSignal):
        raise value
    return value
