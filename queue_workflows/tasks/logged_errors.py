"""Note the first error that the handler of each job logs, for the history of the job."""

from __future__ import annotations

import logging

from queue_workflows.dag import payload
from queue_workflows.runtime import masking
from queue_workflows.tasks import job as jobs


class _Collector(logging.Handler):
    """Store the text of the first ERROR record that the current job logs."""

    def emit(self, record: logging.LogRecord) -> None:
        job = jobs.current.get(None)
        if job is None or job.logged_error:
            return
        try:
            text = record.getMessage()
        except Exception:  # noqa: BLE001  the boundary around app code: arguments of an app
            text = str(record.msg)
        if record.exc_info and record.exc_info[1] is not None:
            error = record.exc_info[1]
            text = f"{text}: {type(error).__name__}: {error}"
        job.logged_error = masking.mask(payload.error_text(text))


_collector = _Collector(logging.ERROR)


def collect() -> None:
    """Collect errors from now on, if this process has logging set up.

    A handler on a root logger that has none would end Python's own output of warnings to stderr,
    and make a later `logging.basicConfig()` of the app do nothing.
    """
    root = logging.root
    if root.handlers and _collector not in root.handlers:
        root.addHandler(_collector)
