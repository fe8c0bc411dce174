"""Call the handler of one claimed node, and return whatever it does as an outcome."""

from __future__ import annotations

import contextlib
import functools
import os
import resource
import sys
import threading
import time
from collections.abc import AsyncGenerator, Callable, Generator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, cast

import queue_workflows
from queue_workflows import config, errors, refs
from queue_workflows.dag import confinement, document_values, payload, typed_values
from queue_workflows.engine import outcomes
from queue_workflows.handlers import attempt_context
from queue_workflows.model_cache import ModelCache, loading
from queue_workflows.runtime import app_loading
from queue_workflows.tasks import control as controls
from queue_workflows.tasks import handlers
from queue_workflows.tasks import job as jobs
from queue_workflows.types import JsonDict, Row

if TYPE_CHECKING:
    from queue_workflows.declare import node_functions


class Lookups(Protocol):
    """What a handler may need to know of its job beyond the claimed row, read when it is needed."""

    def out_dir(self) -> str:
        """Return the folder of the run."""
        ...

    def rows(self) -> tuple[Row, Row]:
        """Return the rows of the job and of its run with all columns."""
        ...

    def note_model(self, event_type: str, elapsed_s: float | None) -> None:
        """Record an event about the model that the node needs."""
        ...


class NodeCall(NamedTuple):
    """A claimed node whose handler can run: its row, its inputs, and what it may look up."""

    job: Row
    inputs: JsonDict
    resolved: str | None
    """The inputs as JSON text, if they are to be stored with the result."""
    lookups: Lookups
    model_cache: ModelCache | None
    cancel: threading.Event
    report: Callable[..., object]
    control: controls.Control | None = None
    """Interrupts a handler that yields or awaits; None: only `cancel` does, at a yield."""
    ask: controls.Ask = controls.refuse
    """Sends what the handler asks about its steps."""


def call(node: NodeCall, runner: handlers.Runner) -> outcomes.Outcome:
    """Run the handler of a node and return its outcome. Raises KeyboardInterrupt only."""
    attempt = _Attempt(node)
    try:
        with attempt_context.running(attempt.job, node.job), attempt.prepared() as handler:
            try:
                value = runner.run(attempt.begin(handler), attempt.control)
            except BaseException:
                with contextlib.suppress(Exception):  # the handler's own error counts
                    attempt.job.store_rest()
                raise
            attempt.job.store_rest()
            delta = handler.delta(attempt.result(value))
        return attempt.completed(delta)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # noqa: BLE001  the boundary around app code: it may exit
        return attempt.failed(error)


async def call_async(node: NodeCall) -> outcomes.Outcome:
    """Do as `call` does, for an async handler on the running event loop."""
    attempt = _Attempt(node)
    try:
        with attempt_context.running(attempt.job, node.job), attempt.prepared() as handler:
            try:
                begun = attempt.begin(handler)
                value = await handlers.run_async(begun, attempt.control)
            except BaseException:
                with contextlib.suppress(Exception):  # the handler's own error counts
                    await attempt.job.store_rest_async()
                raise
            await attempt.job.store_rest_async()
            delta = handler.delta(attempt.result(value))
        return attempt.completed(delta)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # noqa: BLE001  the boundary around app code: it may exit
        return attempt.failed(error)


class _Attempt:
    """One claim of a node while its handler runs, and the outcome."""

    def __init__(self, node: NodeCall) -> None:
        self._node = node
        self._started = time.monotonic()
        self.job = jobs.NodeJob(
            node.job, node.inputs, node.cancel, node.report, node.ask, node.control
        )
        self.control = node.control or controls.EventControl(node.cancel, node.report)
        self._is_known = True
        self._has_begun = False

    def prepared(self) -> contextlib.AbstractContextManager[_Handler]:
        """Return the context in which the node's handler may be called. Raises `NodeNotFound`."""
        try:
            module, run = handler_of(self._node.job)
        except errors.NodeNotFound as error:
            found = errors.NodeNotFound(_unknown_node(self._node, error))
            self._is_known = False
            raise found from error
        return _prepared(self._node, module, run)

    def begin(self, handler: _Handler) -> Any:
        """Call the handler; return its result, or a generator or coroutine that must be run.

        Raises `Interrupted` if it was requested to end before, while its model was loaded say.
        """
        if (reason := self.control.interrupted) is not None:
            raise controls.Interrupted(reason)
        self._has_begun = True
        value = handler.begin()
        self.job.takes_result = isinstance(value, AsyncGenerator)
        return value

    def result(self, value: Any) -> Any:
        """Return what the handler returned, or gave to `set_result`."""
        return self.job.result_set if value is None else value

    def completed(self, value: JsonDict) -> outcomes.Outcome:
        """Return the outcome of a handler that returned this delta. Raises `InvalidPayload`."""
        text = payload.encode(value, f"result of node {self._node.job['node_id']!r}")
        outcome = outcomes.Outcome(
            "completed",
            time.monotonic() - self._started,
            text,
            value=value,
            resolved_inputs=self._node.resolved,
            vm_rss_mb_peak=peak_rss_mb(),
        )
        return unless_cancelled(self._node.cancel, outcome)

    def failed(self, error: BaseException) -> outcomes.Outcome:
        """Return the outcome of a handler that raised, or that was requested to end."""
        return self._failed(error)._replace(cursors=self.job.cursors)

    def _failed(self, error: BaseException) -> outcomes.Outcome:
        seconds = time.monotonic() - self._started
        if isinstance(error, controls.Interrupted) and not self._node.cancel.is_set():
            return outcomes.Outcome("cancelled", seconds, error=error.reason)
        if self._node.cancel.is_set():
            return outcomes.Outcome("cancelled", seconds)
        outcome = failed(self._node.job, error, seconds)
        if not self._is_known:
            # A handler may raise the same error, and must not run again uncounted.
            outcome = outcome._replace(raised=outcome.raised._replace(wish="elsewhere"))
        elif self._node.model_cache is not None and (fault := self._fault(error)):
            outcome = outcome._replace(raised=outcome.raised._replace(wish=fault))
        return outcome._replace(resolved_inputs=self._node.resolved)

    def _fault(self, error: BaseException) -> str:
        """Return `no_gpu` or `no_memory` if the GPU is at fault and not the node, else nothing."""
        if loading.sees_no_gpu(error):
            return "no_gpu"
        loads = not self._has_begun and self._node.job["required_model"] is not None
        return "no_memory" if loads and loading.lacks_memory(error) else ""


def check(job: Row) -> None:
    """Raise `UnreadableRow` if a node cannot run with what its row holds."""
    if not isinstance(job["node_module"], str):
        raise attempt_context.refused("node_module", job["node_module"], "a text")
    for column in ("inputs", "input_template", "context"):
        if (value := job.get(column)) is not None and not isinstance(value, dict):
            raise attempt_context.refused(column, value)
    if "run" in job and not isinstance(job["run"], dict):
        raise attempt_context.refused("run", job["run"])


def refused(job: Row) -> outcomes.Outcome | None:
    """Return the failure of a node whose row no handler can get, or None if it can run."""
    try:
        check(job)
    except errors.UnreadableRow as error:
        return failed(job, error, 0.0)
    return None


class Inputs(NamedTuple):
    """The resolved inputs of a node, and their JSON text if the claim has not stored them."""

    inputs: JsonDict
    resolved: str | None


def inputs_of(job: Row, context: Callable[[list[str] | None], Any]) -> Inputs:
    """Return the inputs of a node; `context` is called if `needs_context`, with what it names.

    Raises `UnreadableRow` (an `InvalidPayload`) for stored inputs that cannot be loaded.
    """
    where = f"node {job['node_id']!r}"
    inputs = resolve_inputs(job, context)
    if inputs == job["inputs"] and job.get("ref_heads") == []:
        return Inputs(inputs, None)
    return Inputs(inputs, payload.encode(inputs, f"inputs of {where}"))


def resolve_inputs(job: Row, context: Callable[[list[str] | None], Any]) -> JsonDict:
    """Return the inputs of a node, its template resolved once against the context as it is now.

    A ref that does not resolve keeps the value from `inputs`. An app that queued the job itself
    left no template: there `inputs` is the template, so that such a ref is passed as it stands.
    """
    where = f"node {job['node_id']!r}"
    inputs = payload.stored_object(job["inputs"], f"inputs of {where}")
    template = payload.stored_object(_template(job), f"input_template of {where}")
    custom = config.get_config().resolve_ref is not None
    if not custom and not refs.has_refs(template):
        return dict(inputs)
    values = job.get("context")
    if values is None or custom:
        values = context(context_heads(job))
    values = payload.stored_object(values, f"context of {where}")
    return refs.resolve_inputs(template, values, inputs, config.get_config().get_resolve_ref())


def needs_context(job: Row) -> bool:
    """Return whether the refs of a node need more than its row has."""
    custom = config.get_config().resolve_ref is not None
    return custom or (job.get("context") is None and refs.has_refs(_template(job)))


def context_heads(job: Row) -> list[str] | None:
    """Return which members of the context the refs name; None: an app's resolver may take any."""
    custom = config.get_config().resolve_ref is not None
    return None if custom else [*refs.heads(_template(job))]


def _template(job: Row) -> Any:
    return job["inputs"] if job["input_template"] is None else job["input_template"]


def failed(job: Row, error: BaseException, seconds: float) -> outcomes.Outcome:
    """Return the outcome of a node that failed with `error`."""
    return outcomes.of_error(error, seconds, f"node {job['node_id']}")


def unless_cancelled(cancel: threading.Event, outcome: outcomes.Outcome) -> outcomes.Outcome:
    """Ignore what a handler returns after it was requested to end."""
    return outcomes.Outcome("cancelled", outcome.seconds) if cancel.is_set() else outcome


def peak_rss_mb() -> int:
    """Return this process's peak memory in MB (`ru_maxrss` is KiB on Linux, bytes on macOS)."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(peak / (1024 * 1024 if sys.platform == "darwin" else 1024))


def handler_of(job: Row) -> tuple[Any, Callable[..., Any]]:
    """Return the node's module and its `run`. Raises `NodeNotFound`."""
    cfg, name = config.get_config(), job["node_module"]
    module = cfg.resolve_node_module(name)
    run = getattr(module, "run", None)
    if not callable(run):
        raise errors.NodeNotFound(f"node module {name!r} has no run(){cfg.node_hint(name)}")
    return module, run


def _declared(module: Any) -> node_functions.NodeFunction | None:
    """Return the module if it was declared by @node, for which the app has imported `declare`."""
    loaded = sys.modules.get("queue_workflows.declare.node_functions")
    return module if loaded is not None and isinstance(module, loaded.NodeFunction) else None


class _Handler:
    """A handler with its arguments, inside the app's invoke context."""

    def __init__(
        self,
        module: Any,
        begin: Callable[[], Any],
        finalize: Callable[[JsonDict], JsonDict],
    ) -> None:
        self._module = module
        self.begin = begin
        self._finalize = finalize

    def delta(self, value: Any) -> JsonDict:
        """Return what is stored for a result. Raises a signal that the handler returned."""
        value = handlers.unless_signal(value)
        if (declared := _declared(self._module)) is not None:
            value = declared.stored(value)
        return self._finalize(_delta(value))


class _Folders:
    """A node's folders, made when it asks for them; `close` removes what is of this attempt.

    `out_dir` returns the folder of the run.
    """

    def __init__(self, job: Row, out_dir: Callable[[], str]) -> None:
        self._job = job
        self._out_dir = out_dir
        self._scratch: confinement.Scratch | None = None

    def check(self) -> None:
        """Raise `FolderRefused` for a run whose `out_dir` OUT_ROOTS does not allow."""
        if confinement.roots():
            confinement.check(self._out_dir())

    def out(self) -> Path:
        """Return `<out_dir>/<node_id>`, created."""
        node_id = self._job["node_id"]
        folder = document_values.folder(node_id)
        return confinement.make(self._out_dir(), folder, f"node id {node_id!r:.120}")

    def scratch(self) -> Path:
        """Return a folder of this attempt alone, under `<out_dir>/.scratch`."""
        root, prefix = self._out_dir(), f"{self._job['claim_no']}-"
        parent = str(Path(os.path.realpath(root), confinement.SCRATCH))
        with confinement.opened(root, confinement.SCRATCH, create=True) as fd:
            self._scratch = confinement.Scratch(parent, fd, prefix)
        return self._scratch.path

    def close(self) -> None:
        """Remove the scratch folder and its content."""
        if self._scratch is not None:
            self._scratch.remove()


@contextlib.contextmanager
def _prepared(node: NodeCall, module: Any, run: Callable[..., Any]) -> Generator[_Handler]:
    """Prepare model, folders and arguments of a handler, to be called while the block runs."""
    job = node.job
    handle, load_seconds = _model(node)
    folders = _Folders(job, node.lookups.out_dir)
    folders.check()
    try:
        offers: dict[str, Callable[[], Any]] = {
            "inputs": lambda: node.inputs,
            "out": folders.out,
            "scratch": folders.scratch,
            "model_handle": lambda: handle,
            "model_load_seconds": lambda: load_seconds,
            "cancel_event": lambda: node.cancel,
            "status_callback": lambda: node.report,
        }
        # Only nodes declared by @node have their annotations enforced: the modules of existing
        # apps may carry annotations that their inputs never matched.
        where = None if _declared(module) is None else f"inputs of node {job['node_id']!r}"
        bound = typed_values.signature(run).bind(node.inputs, offers, where=where)
        with _app_context(node) as finalize:
            yield _Handler(module, functools.partial(run, **bound), finalize)
    finally:
        folders.close()


def _unknown_node(node: NodeCall, error: errors.NodeNotFound) -> str:
    """Name the worker and the age of the run: an old worker or an old run is the usual cause."""
    created = node.lookups.rows()[1].get("created_at")
    since = f"; the run exists since {created:%Y-%m-%d %H:%M:%S} UTC" if created else ""
    return (
        f"{error} [{app_loading.describe_app()} (queue_workflows {queue_workflows.__version__}, "
        f"pid {os.getpid()}) met it{since}]"
    )


@contextlib.contextmanager
def _app_context(node: NodeCall) -> Generator[Callable[[JsonDict], JsonDict]]:
    """Enter the app's invoke context, if it set one; yield what makes the delta final.

    `finalize` is applied to a success only, and not if the job was cancelled meanwhile. An error of
    the handler is raised even if the app's context suppresses it.
    """
    factory = config.get_config().invoke_context
    if factory is None:
        yield lambda delta: delta
        return
    raised: BaseException | None = None
    with factory(*node.lookups.rows()) as finalize:
        try:
            yield lambda delta: delta if node.cancel.is_set() else _finalized(finalize, delta)
        except BaseException as error:
            raised = error
            raise
    if raised is not None:
        raise raised


def _finalized(finalize: Callable[[JsonDict], Any], delta: JsonDict) -> JsonDict:
    final = finalize(delta)
    if final is None:
        return delta
    if not isinstance(final, dict):
        raise errors.InvalidPayload(
            f"finalize of the invoke context returned {type(final).__name__}, not a context_delta"
        )
    return cast("JsonDict", final)


def _delta(value: Any) -> JsonDict:
    """A dict is the delta, or holds it as `context_delta`; anything else is none."""
    if not isinstance(value, dict):
        return {}
    result = cast("JsonDict", value)
    inner: Any = result.get("context_delta", result)
    if isinstance(inner, dict):
        return cast("JsonDict", inner)
    return {} if inner is None else result


def _model(node: NodeCall) -> tuple[Any, float | None]:
    """Return the handle of the node's model and the seconds of its load; None, None without one."""
    model_id, cache = node.job["required_model"], node.model_cache
    if model_id is None:
        return None, None
    if cache is None:
        raise errors.UnknownModel(
            f"node {node.job['node_id']!r} needs model {model_id!r}, and this worker has no model "
            "cache"
        )
    if cache.current_model == model_id:
        return cache.require_model(model_id), 0.0
    node.lookups.note_model("model_load_start", None)
    handle = cache.require_model(model_id)
    node.lookups.note_model("model_load_done", cache.last_load_seconds)
    return handle, cache.last_load_seconds
