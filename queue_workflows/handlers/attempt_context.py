"""Make a claimed job the current one for the code of its handler, or refuse its row."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from queue_workflows import errors
from queue_workflows.model_cache import loading
from queue_workflows.runtime import log_context, trace_context
from queue_workflows.tasks import job as jobs
from queue_workflows.types import Row, Unreadable


class running:  # noqa: N801  used as a function, as `contextlib.suppress` is
    """A block in which `current_job()`, log lines and spans are those of a claimed job.

    A class, since the generators of three context managers cost more than a short handler.
    """

    __slots__ = ("_detach", "_ids", "_job", "_row", "_token")

    def __init__(self, job: jobs.Job, row: Row) -> None:
        self._job = job
        self._row = row

    def __enter__(self) -> None:
        self._token = jobs.current.set(self._job)
        self._ids = log_context.bind_job(self._row)
        self._detach: Callable[[], object] | None = trace_context.attach(self._row)

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if error is not None:
            # One that is in a variable of its own function keeps them all until a collection.
            loading.clear_frames(error)
        if self._detach is not None:
            self._detach()
        log_context.unbind(self._ids)
        jobs.current.reset(self._token)


_KINDS: Final = {
    "NoneType": "null",
    "bool": "a boolean",
    "int": "a number",
    "float": "a number",
    "str": "a text",
    "list": "an array",
}


def refused(column: str, value: Any, wanted: str = "an object") -> errors.UnreadableRow:
    """Return the error of a claimed job with which no handler can run, as a column has this."""
    if isinstance(value, Unreadable):
        return errors.UnreadableRow(f"{column} cannot be loaded: {value.reason}")
    name = type(value).__name__
    return errors.UnreadableRow(f"{column} is {_KINDS.get(name, f'a {name}')}, not {wanted}")
