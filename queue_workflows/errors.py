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
    """The root of all errors. The text names what is wrong and, if there is one, the remedy."""


class _Missing(QueueWorkflowsError, KeyError):
    """A KeyError too, whose text a KeyError would show in quotes."""

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""


class InvalidConfig(QueueWorkflowsError, ValueError):
    """A setting, hook or command line option that cannot be used."""


class AppFailed(InvalidConfig):
    """The app raised while it was imported or called; the cause is its error."""


class DatabaseUrlMissing(QueueWorkflowsError, RuntimeError):
    """No database was named, and the embedded server was not requested."""


class DatabaseUnavailable(QueueWorkflowsError, ConnectionError):
    """The database named by the DSN does not answer."""


class DatabaseRefused(QueueWorkflowsError, PermissionError):
    """The database's user lacks a right; the text names the user and the grant."""


class RowRefused(QueueWorkflowsError, ValueError):
    """The database cannot compute with a stored row, or refuses its new value."""


class EmbeddedUnavailable(QueueWorkflowsError, RuntimeError):
    """The embedded server is not installed, or cannot be started, joined or stopped."""


class MissingExtra(QueueWorkflowsError, ImportError):
    """The call needs an optional dependency; the message has the pip command."""


class UnknownQueue(QueueWorkflowsError, ValueError):
    """A queue that neither the engine nor `configure(ingest_queues=...)` names."""


class UnknownTask(QueueWorkflowsError, ValueError):
    """An ingest task that nobody registered."""


class UnknownPolicy(QueueWorkflowsError, ValueError):
    """A worker-control state or stop policy that is not registered."""


class UnknownWorker(QueueWorkflowsError, LookupError):
    """There is no live worker with this host label or id; the text lists the live workers."""


class UnknownModel(_Missing):
    """A model id that is not in the registry; the text lists those that are."""


class UnknownJob(_Missing):
    """No such node job, ingest job or run."""


class UnknownSchedule(_Missing):
    """There is no schedule of this name."""


class ArgsRefused(QueueWorkflowsError, ValueError):
    """Args, inputs of a node or of a run that a task, node or workflow does not take.

    A job that fails with it is not retried: that would not help.
    """


class NoCurrentJob(QueueWorkflowsError, LookupError):
    """`current_job()` was called where neither a task nor a node runs."""


class StepRefused(QueueWorkflowsError, ValueError):
    """A step whose name, key or arguments cannot be taken; the text names the step."""


class InvalidPayload(QueueWorkflowsError, ValueError):
    """A value that JSON or the database cannot carry, or that is too deep or too large."""


class UnreadableRow(InvalidPayload):
    """A stored row that cannot be loaded or has the wrong shape; trying again would not help."""


class FolderRefused(InvalidPayload):
    """A run's folder outside of OUT_ROOTS, or a symbolic link in its place; the text names it."""


class InvalidJob(QueueWorkflowsError, ValueError):
    """A job that cannot be queued with these options; the text names the keyword."""


class IdempotencyClash(QueueWorkflowsError, ValueError):
    """An idempotency key that a job with another task, queue or args has.

    `job_id`: that job; empty when it is of the same call.
    """

    def __init__(self, text: str, job_id: str = "") -> None:
        super().__init__(text)
        self.job_id = job_id


class NodeTaken(QueueWorkflowsError, ValueError):
    """A node that the run has already, with other content; also psycopg's `UniqueViolation`."""


class UpgradeRefused(QueueWorkflowsError, ValueError):
    """A run cannot move to today's code; `nodes`: those that have ended or run, and differ."""

    def __init__(self, text: str, nodes: list[str] | None = None) -> None:
        super().__init__(text)
        self.nodes = nodes or []


class UnknownConnection(QueueWorkflowsError, TypeError):
    """The value of `conn=` is not a connection that can be joined; the text lists those."""


class InvalidWorkflow(QueueWorkflowsError, ValueError):
    """A workflow definition that cannot run; the text names the node or step and the reason."""


class UnknownWorkflow(QueueWorkflowsError, LookupError):
    """The workflow provider does not know this workflow or pipeline."""


class UnknownColumn(QueueWorkflowsError, ValueError):
    """A column that the table does not have or that the caller may not write."""


class RefNotFound(_Missing):
    """A `$from` path with a segment that the context does not have."""


class InvalidRef(QueueWorkflowsError, ValueError):
    """A ref with an unknown operator or a pattern outside the safe subset."""


class NodeNotFound(QueueWorkflowsError, LookupError):
    """No registered node, resolver or package provides this `node_module`."""


class ModelLoadFailed(QueueWorkflowsError, RuntimeError):
    """A model's loader or unloader raised; the cache is empty and usable."""


class InputRefused(QueueWorkflowsError, ValueError):
    """A human answer that cannot be taken: already answered, not waiting, or not storable."""


class InvalidAnswer(InputRefused):
    """A human answer of another type than its question names, or one that it does not allow."""


class JobSignal(QueueWorkflowsError):
    """A handler raises or returns one of these to choose what happens to its job."""


class Retry(JobSignal):
    """Count this attempt as failed and try again if an attempt is left, regardless of the policy.

    `after_s`: wait that long; None: as by the job's back-off.
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
    """The job is no longer held under the claim that tried to write."""


class MigrationFailed(QueueWorkflowsError, RuntimeError):
    """A migration file is missing, unpaired, changed after it was applied, or its SQL failed."""


class SchemaTooNew(QueueWorkflowsError, RuntimeError):
    """The database was migrated by a newer version in a way this one cannot work with."""


class SchemaTimeout(QueueWorkflowsError, TimeoutError):
    """The schema did not reach the version that this code needs in time."""


class ExportFailed(QueueWorkflowsError, ConnectionError):
    """What exports the history cannot be reached or refuses it; it is tried again."""


class RequestRefused(QueueWorkflowsError, ValueError):
    """The HTTP service refuses a request; the text says why."""


class AccessDenied(QueueWorkflowsError, PermissionError):
    """The HTTP service does not know the token, or the token is not allowed to do this."""


class ServiceUnavailable(QueueWorkflowsError, ConnectionError):
    """The HTTP service does not answer, or cannot work now."""


class ServiceFailed(QueueWorkflowsError, RuntimeError):
    """The HTTP service failed, or what answers is not the service."""


class EventsLost(QueueWorkflowsError, LookupError):
    """A stream of events was interrupted for too long: read the state, then follow again."""


class WaitTimeout(QueueWorkflowsError, TimeoutError):
    """A job or run was not over in time."""


class DataLossRefused(QueueWorkflowsError, RuntimeError):
    """A downgrade would drop rows or values; the text lists them."""


def closest(name: object, known: Iterable[str]) -> str | None:
    """Return the known name that is most like this one; None if none comes close, or it is no text.

    Apps pass any value: the error about it is the caller's.
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
    """Add a function that converts foreign errors which leave a command, or returns None."""
    _explanations.append(explain)


def explained(error: Exception) -> QueueWorkflowsError | None:
    """Return the error of ours that explains a foreign error to a person, or None."""
    return next(filter(None, (explain(error) for explain in _explanations)), None)


def name_outages_by(name: Callable[[BaseException], str | None]) -> None:
    """Add a function that returns the name of a service that is away by this error, or None."""
    _outage_names.append(name)


def outage(error: BaseException) -> str | None:
    """Return the name of the service that is away by this error, or None."""
    return next(filter(None, (name(error) for name in _outage_names)), None)
