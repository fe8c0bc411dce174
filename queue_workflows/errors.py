"""Define every error that the package raises; a leaf also is the builtin that apps catch.

Two functions suggest the known name that a wrong one perhaps stands for. The last four translate
the errors of a library that this package does not import everywhere.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

COMPARED_CHARS = 200
"""Longer names are not compared with known names, since a row may have one of 16 MiB."""


class QueueWorkflowsError(Exception):
    """The root of all errors. The text names the fault and, if there is one, the remedy."""


class _Missing(QueueWorkflowsError, KeyError):
    """A KeyError too, whose text a KeyError would show in quotes."""

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""


class InvalidConfig(QueueWorkflowsError, ValueError):
    """A setting, hook or option cannot be used. Correct the one that the text names."""


class AppFailed(InvalidConfig):
    """The app raised while it was imported or called; the cause is its error. Correct the app."""


class DatabaseUrlMissing(QueueWorkflowsError, RuntimeError):
    """No database is named. Set QUEUE_WORKFLOWS_DB_URL, or request the embedded server."""


class DatabaseUnavailable(QueueWorkflowsError, ConnectionError):
    """The database of the DSN does not answer. Start it, or correct the DSN; `doctor` checks it."""


class DatabaseRefused(QueueWorkflowsError, PermissionError):
    """The database's user lacks a right. Run the GRANT that the text names."""


class RowRefused(QueueWorkflowsError, ValueError):
    """The database cannot compute with a stored row, or refuses its new value. Correct the row."""


class EmbeddedUnavailable(QueueWorkflowsError, RuntimeError):
    """The embedded server is missing, or cannot start, be joined or stop. Do as the text says."""


class MissingExtra(QueueWorkflowsError, ImportError):
    """The call needs an optional dependency. Run the pip command of the message."""


class UnknownQueue(QueueWorkflowsError, ValueError):
    """Neither the engine nor `configure(ingest_queues=...)` names the queue. Add it there."""


class UnknownTask(QueueWorkflowsError, ValueError):
    """Nobody has registered the ingest task. Correct the name, or register the task."""


class UnknownPolicy(QueueWorkflowsError, ValueError):
    """No worker state or stop policy has this name. The text has the known names."""


class UnknownWorker(QueueWorkflowsError, LookupError):
    """There is no live worker with this host label or id. The text names the live ones."""


class UnknownModel(_Missing):
    """The registry does not have the model id. Register it, or use an id that the message lists."""


class UnknownJob(_Missing):
    """There is no such node job, ingest job or run. Correct the id; it may be deleted by now."""


class UnknownSchedule(_Missing):
    """There is no schedule of this name. `queue-workflows schedules` lists them."""


class ArgsRefused(QueueWorkflowsError, ValueError):
    """A task, node or workflow does not take these args or inputs. Pass the ones that it takes.

    A job that fails with it is not retried, which would not help.
    """


class NoCurrentJob(QueueWorkflowsError, LookupError):
    """`current_job()` was called where no handler runs. Call it in a handler or its threads."""


class StepRefused(QueueWorkflowsError, ValueError):
    """A step has a name, key or arguments that cannot be taken. Correct it as the text says."""


class InvalidPayload(QueueWorkflowsError, ValueError):
    """JSON or the database cannot carry a value, or it is too deep or large. Pass it in a file."""


class UnreadableRow(InvalidPayload):
    """A stored row cannot be loaded, or has the wrong shape. Correct it, then retry its job."""


class FolderRefused(InvalidPayload):
    """A run's folder is outside of OUT_ROOTS, or a link is in its place. Choose another folder."""


class InvalidJob(QueueWorkflowsError, ValueError):
    """A job cannot be queued with these options. Correct the keyword that the text names."""


class IdempotencyClash(QueueWorkflowsError, ValueError):
    """A job with another task, queue or args has the idempotency key. Use another key.

    `job_id` is that job; it is empty when the job is of the same call.
    """

    def __init__(self, text: str, job_id: str = "") -> None:
        super().__init__(text)
        self.job_id = job_id


class NodeTaken(QueueWorkflowsError, ValueError):
    """A run has the node with other content (psycopg's `UniqueViolation` too). Use another id."""


class UpgradeRefused(QueueWorkflowsError, ValueError):
    """A run cannot move to today's code, in which nodes that have ended or run differ.

    Let it end as it is, or submit another one. `nodes` are the nodes that differ.
    """

    def __init__(self, text: str, nodes: list[str] | None = None) -> None:
        super().__init__(text)
        self.nodes = nodes or []


class UnknownConnection(QueueWorkflowsError, TypeError):
    """The value of `conn=` is not a connection that can be joined. Pass one that the text lists."""


class InvalidWorkflow(QueueWorkflowsError, ValueError):
    """A workflow definition cannot run. Correct the node or step that the text names."""


class UnknownWorkflow(QueueWorkflowsError, LookupError):
    """No provider knows this workflow or pipeline. Correct the name, or declare it."""


class UnknownColumn(QueueWorkflowsError, ValueError):
    """The table lacks the column, or the caller may not write it. The text has the columns."""


class RefNotFound(_Missing):
    """The context lacks a segment of a `$from` path. Correct the path or the output it reads."""


class InvalidRef(QueueWorkflowsError, ValueError):
    """A ref has an unknown operator, or a pattern outside the safe subset. Correct the ref."""


class NodeNotFound(QueueWorkflowsError, LookupError):
    """Neither a registration, a resolver nor a package has the `node_module`. Register it."""


class ModelLoadFailed(QueueWorkflowsError, RuntimeError):
    """A model's loader or unloader raised. Correct it; the cache is empty and usable."""


class InputRefused(QueueWorkflowsError, ValueError):
    """An answer is not taken, because its node is answered, does not wait, or cannot store it.

    Read the state of the node. The first answer counts.
    """


class InvalidAnswer(InputRefused):
    """An answer is of another type than its question names, or is not allowed. Give one that is."""


class JobSignal(QueueWorkflowsError):
    """A handler raises or returns one of these to choose what happens to its job."""


class Retry(JobSignal):
    """Count this attempt as failed and try again if an attempt is left, regardless of the policy.

    `after_s`: wait that long; by default as the job's back-off says.
    """

    after_s: float | None = None
    """A class attribute too, for a subclass of an app that does not call this `__init__`."""

    def __init__(self, after_s: float | None = None, reason: str = "asked for a retry") -> None:
        super().__init__(reason)
        self.after_s = None if after_s is None else _wait(after_s)


class Snooze(JobSignal):
    """Queue the job again in `seconds`, one at the least; no attempt is counted."""

    seconds: float = 0.0

    def __init__(self, seconds: float, reason: str = "snoozed") -> None:
        super().__init__(reason)
        self.seconds = _wait(seconds)


class Discard(JobSignal):
    """Fail the job at once, whatever attempts are left."""

    def __init__(self, reason: str = "discarded") -> None:
        super().__init__(reason)


def _wait(seconds: float) -> float:
    if not isinstance(seconds, (int, float)):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"a wait of {seconds!r:.80}: it must be a number of seconds")
    if not 0 <= seconds <= 366 * 86400.0:
        raise ValueError(f"a wait of {seconds!r:.80} s: it must be 0 to 366 days")
    return float(seconds)


class ClaimLost(QueueWorkflowsError, RuntimeError):
    """The claim that tried to write no longer holds the job. Stop; another worker may have it."""


class MigrationFailed(QueueWorkflowsError, RuntimeError):
    """A migration file is missing, unpaired or changed, or its SQL failed. Correct that file."""


class SchemaTooNew(QueueWorkflowsError, RuntimeError):
    """The schema is of a newer version, with which this one cannot work. Install that version."""


class SchemaTimeout(QueueWorkflowsError, TimeoutError):
    """The schema was not up to date in time. Run `queue-workflows migrate`."""


class ExportFailed(QueueWorkflowsError, ConnectionError):
    """The receiver of the history does not answer or refuses it. Check it; the export retries."""


class RequestRefused(QueueWorkflowsError, ValueError):
    """The HTTP service refuses a request. Correct what the text names."""


class AccessDenied(QueueWorkflowsError, PermissionError):
    """The HTTP service does not know the token, or the token may not do this. Use another token."""


class ServiceUnavailable(QueueWorkflowsError, ConnectionError):
    """The HTTP service does not answer, or cannot work now. Try again later."""


class ServiceFailed(QueueWorkflowsError, RuntimeError):
    """The HTTP service failed, or another program answers. Check the URL and the service's log."""


class EventsLost(QueueWorkflowsError, LookupError):
    """A stream of events was interrupted for too long. Read the state, then follow again."""


class WaitTimeout(QueueWorkflowsError, TimeoutError):
    """A job or run was not over in time. Wait longer, or read its state later."""


class DataLossRefused(QueueWorkflowsError, RuntimeError):
    """A downgrade would drop the rows or values that the message lists. Save them, or allow it."""


def closest(name: object, known: Iterable[str]) -> str | None:
    """Return the known name that is most like this one; None if none is close or it is not text.

    Apps may pass any value; the caller raises the error about it.
    """
    if not isinstance(name, str) or len(name) > COMPARED_CHARS:
        return None
    import difflib  # late: most processes never see a wrong name

    found = difflib.get_close_matches(name, list(known), n=1, cutoff=0.75)
    return found[0] if found else None


def hint(name: object, known: Iterable[str]) -> str:
    """Return "; did you mean ...?" for a wrong name, or an empty text."""
    meant = closest(name, known)
    return f"; did you mean {meant!r}?" if meant else ""


_explanations: list[Callable[[Exception], QueueWorkflowsError | None]] = []
_outage_names: list[Callable[[BaseException], str | None]] = []


def explain_by(explain: Callable[[Exception], QueueWorkflowsError | None]) -> None:
    """Add a function that converts errors of other packages that end a command, or returns None."""
    _explanations.append(explain)


def explained(error: Exception) -> QueueWorkflowsError | None:
    """Return the error of this package that explains an error of another one, or None."""
    return next(filter(None, (explain(error) for explain in _explanations)), None)


def name_outages_by(name: Callable[[BaseException], str | None]) -> None:
    """Add a function that returns the name of the service whose outage caused an error, or None."""
    _outage_names.append(name)


def outage(error: BaseException) -> str | None:
    """Return the name of the service whose outage caused this error, or None."""
    return next(filter(None, (name(error) for name in _outage_names)), None)
