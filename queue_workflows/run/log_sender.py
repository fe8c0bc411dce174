"""Send the log records of an executor to its worker, where they are stored and printed.

Records that an app's own logging prints reach the worker as output of the process.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
import threading
from collections.abc import Callable
from typing import Any

from queue_workflows.run import job_output, streams
from queue_workflows.runtime import entry_point, log_format
from queue_workflows.types import JsonDict

_FORMAT = logging.Formatter()


class LogSender(logging.Handler):
    """Take the place of the handler of `entry_point.setup_logging`: the worker prints instead."""

    def __init__(self, send: Callable[[logging.LogRecord], object], level: int) -> None:
        super().__init__(level)
        self._send = send
        self._busy = threading.local()

    def emit(self, record: logging.LogRecord) -> None:
        """Send a record, best effort. What sending it logs is dropped."""
        if getattr(self._busy, "now", False):
            return
        self._busy.now = True
        try:
            self._send(record)
        except Exception:  # noqa: BLE001  logging never raises into an app
            self.handleError(record)
        finally:
            self._busy.now = False


def install(
    send: Callable[[int, JsonDict], object],
    key: Callable[[], int],
    *,
    by_job: bool = False,
) -> None:
    """Send the records of this process from now on; call it once in an executor.

    `send` gets the key of a job (0: none) and a record: its level, name, text, whether the worker
    is to print it, and what the app gave as `extra`. `key` returns that of the job whose handler
    logs. `by_job`: the worker learns only from messages
    whose output it is, so records are sent too that the app prints past `job_output`.
    """

    def send_record(record: logging.LogRecord, *, printed: bool = True) -> None:
        fields = (log_format.fields(record) or None) if printed else None
        found: JsonDict = {"level": record.levelno, "name": record.name, "text": _text(record)}
        send(key(), found | {"printed": printed, "fields": fields})

    root = logging.getLogger()
    own = [
        handler
        for handler in root.handlers
        if any(isinstance(each, entry_point.MaskSecrets) for each in handler.filters)
    ]
    for handler in own:
        root.removeHandler(handler)
    if own:
        root.addHandler(LogSender(send_record, min(handler.level for handler in own)))
    make = logging.getLogRecordFactory()
    logging.setLogRecordFactory(
        _factory(make, functools.partial(send_record, printed=False), by_job=by_job)
    )


def _factory(
    make: Callable[..., logging.LogRecord],
    send: Callable[[logging.LogRecord], object],
    *,
    by_job: bool,
) -> Callable[..., logging.LogRecord]:
    """Return a record factory that sends the records which nothing prints.

    A handler on the root logger would disable `logging.basicConfig` and the handler of last resort.
    """

    def created(*args: Any, **kwargs: Any) -> logging.LogRecord:
        record = make(*args, **kwargs)
        with contextlib.suppress(Exception):
            if not _is_kept(record, by_job=by_job):
                send(record)
        return record

    return created


def _is_kept(record: logging.LogRecord, *, by_job: bool) -> bool:
    """Return whether a handler prints this record where the worker learns of it, or sends it."""
    logger: logging.Logger | None = logging.getLogger(record.name)
    found = False
    while logger is not None:
        for handler in logger.handlers:
            found = True
            if record.levelno >= handler.level and _prints(handler, by_job=by_job):
                return True
        logger = logger.parent if logger.propagate else None
    return not found and record.levelno >= logging.WARNING


def _prints(handler: logging.Handler, *, by_job: bool) -> bool:
    if isinstance(handler, LogSender):
        return True
    stream = getattr(handler, "stream", None)
    if by_job and not isinstance(stream, job_output.JobStream):
        return False
    return streams.fileno(stream) in (1, 2)


def _text(record: logging.LogRecord) -> str:
    """Return the message and the traceback of a record, which stays as it is."""
    return _FORMAT.format(copy.copy(record))
