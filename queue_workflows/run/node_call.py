"""Call the handler of one claimed node, and return its result or error as an outcome."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import resource
import sys
import threading
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias, cast

import queue_workflows
from queue_workflows import config, errors, refs
from queue_workflows.claim import outcomes
from queue_workflows.dag import confinement, document_values, payload, typed_values
from queue_workflows.model_cache import ModelCache, loading
from queue_workflows.run import task_call, wire
from queue_workflows.runtime import app_loading, log_context
from queue_workflows.tasks import control, handlers
from queue_workflows.tasks import job as jobs
from queue_workflows.types import JsonDict, Row

if TYPE_CHECKING:
    from queue_workflows.declare import node_functions

_log = logging.getLogger(__name__)
Ask: TypeAlias = Callable[[str, Any], Any]
"""Asks the worker for data beyond the claimed row: the named members of `context`, the `out_dir`
of the run, which is chosen if it has none, or `rows`, which has `job` and `run`."""


class Link(control.Control, Protocol):
    """The calls by which a node's handler talks to its worker.

    `cancel` is the event that a cancel sets. `status` takes reports of the handler. `ask` answers
    as `Ask` does, `ask_step` answers a question about steps. `note` records an event about the
    node's model, with its duration in seconds.
    """

    @property
    def cancel(self) -> threading.Event: ...
    def status(self, *values: Any, **fields: Any) -> object: ...
    def ask(self, what: str, request: Any, /) -> Any: ...
    def ask_step(self, request: JsonDict, /) -> control.Answered: ...
    def note(self, event_type: str, elapsed_s: float | None) -> object: ...


class Inputs(NamedTuple):
    """The resolved inputs of a node, and their JSON text unless the claim has stored it."""

    inputs: JsonDict
    resolved: str | None


class NodeCall(task_call.Attempt):
    """A claimed node while its handler runs; call `refused` with its row before."""

    def __init__(
        self, row: Row, link: Link, model_cache: ModelCache | None, ask: Ask | None = None
    ) -> None:
        """`ask` replaces `link.ask` if given."""
        self._inputs: JsonDict = {}
        self._resolved: str | None = None
        self._job = jobs.NodeJob(row, self._inputs, link, link.status, link.ask_step)
        super().__init__(row, self._job, link, self._delta)
        self._link = link
        self._ask = ask or link.ask
        self._cache = model_cache
        self._is_known = True
        self._has_begun = False
        self._finalize: Callable[[JsonDict], Any] = lambda delta: delta
        self._declared: node_functions.NodeFunction | None = None
        self._stack = contextlib.ExitStack()
        """Ends the scratch folder and the app's invoke context after the handler."""

    def __exit__(self, *error: Any) -> None:
        # The handler's error is raised even if the app's context suppresses it.
        try:
            self._stack.__exit__(*error)
        finally:
            super().__exit__(*error)

    def begin(self) -> Any:
        """Call the handler. Raises `Interrupted` if it was asked to end before.

        That may happen while its model is loaded, for example.
        """
        call = self._prepared()
        if (reason := self.control.interrupted) is not None:
            raise control.Interrupted(reason)
        self._has_begun = True
        value = call()
        self._job.takes_result = isinstance(value, AsyncGenerator)
        return value

    def _prepared(self) -> Callable[[], Any]:
        """Prepare inputs, model, folders and the app's context; return the handler's call."""
        inputs, self._resolved = inputs_of(self.row, functools.partial(self._ask, "context"))
        self._inputs.update(inputs)
        self.started = time.monotonic()
        try:
            module, run = handler_of(self.row)
        except errors.NodeNotFound as error:
            found = errors.NodeNotFound(self._unknown(error))
            self._is_known = False
            raise found from error
        self._declared = _declared(module)
        handle, load_seconds = self._model()
        if confinement.roots():
            confinement.check(self._out_dir)
        offers: dict[str, Callable[[], Any]] = {
            "inputs": lambda: self._inputs,
            "out": self._out,
            "scratch": self._scratch,
            "model_handle": lambda: handle,
            "model_load_seconds": lambda: load_seconds,
            "cancel_event": lambda: self._link.cancel,
            "status_callback": lambda: self._link.status,
        }
        # Annotations are enforced only for nodes declared by @node. In node modules of existing
        # apps, inputs may never have matched them.
        where = None if self._declared is None else f"inputs of node {self.row['node_id']!r}"
        bound = typed_values.signature(run).bind(self._inputs, offers, where=where)
        if (context := config.get_config().invoke_context) is not None:
            self._finalize = self._stack.enter_context(context(*self._rows))
        return functools.partial(run, **bound)

    # --- The handler's arguments.

    @functools.cached_property
    def _out_dir(self) -> str:
        """The folder of the run."""
        run: Row = self.row.get("run") or {}
        found = run.get("out_dir")
        return self._ask("out_dir", None) if found is None else found

    @functools.cached_property
    def _rows(self) -> tuple[Row, Row]:
        """The rows of the job and of its run with all columns."""
        found = self._ask("rows", None)
        return wire.timed(found["job"]), wire.timed(found["run"])

    def _out(self) -> Path:
        """Return `<out_dir>/<node_id>`, created."""
        node_id = self.row["node_id"]
        folder = document_values.folder(node_id)
        return confinement.make(self._out_dir, folder, f"node id {node_id!r:.120}")

    def _scratch(self) -> Path:
        """Return a folder for this attempt only, under `<out_dir>/.scratch`; it is removed."""
        root, prefix = self._out_dir, f"{self.row['claim_no']}-"
        parent = str(Path(os.path.realpath(root), confinement.SCRATCH))
        with confinement.opened(root, confinement.SCRATCH, create=True) as fd:
            scratch = confinement.Scratch(parent, fd, prefix)
        self._stack.callback(scratch.remove)
        return scratch.path

    def _unknown(self, error: errors.NodeNotFound) -> str:
        """Return an error's text with the worker and the run's age, as either may have old code."""
        created = None
        with contextlib.suppress(errors.QueueWorkflowsError):  # a row is unreadable
            created = self._rows[1].get("created_at")
        since = f"; the run exists since {created:%Y-%m-%d %H:%M:%S} UTC" if created else ""
        version = queue_workflows.__version__
        return (
            f"{error} [{app_loading.describe_app()} (queue_workflows {version}, pid {os.getpid()}) "
            f"met it{since}]"
        )

    def _model(self) -> tuple[Any, float | None]:
        """Return the node's model, or None, and the seconds that its load took, or None."""
        model_id, cache = self.row["required_model"], self._cache
        if model_id is None:
            return None, None
        if cache is None:
            raise errors.UnknownModel(
                f"node {self.row['node_id']!r} needs model {model_id!r}, and this worker has no "
                "model cache; only a gpu worker has one, or pass `model_cache` to execute_node()"
            )
        if cache.current_model == model_id:
            return cache.require_model(model_id), 0.0
        self._link.note("model_load_start", None)
        handle = cache.require_model(model_id)
        self._link.note("model_load_done", cache.last_load_seconds)
        return handle, cache.last_load_seconds

    # --- Its outcome.

    def _delta(self, value: Any) -> JsonDict:
        """Return the delta to store, which the app's `finalize` gets unless cancelled."""
        if self._declared is not None:
            value = self._declared.stored(value)
        delta = _delta_of(value)
        final = None if self.control.cancel_requested else self._finalize(delta)
        if final is not None and not isinstance(final, dict):
            raise errors.InvalidPayload(
                f"finalize of the invoke context returned {type(final).__name__}, not a"
                " context_delta"
            )
        return delta if final is None else cast("JsonDict", final)

    def completed(self, value: Any, seconds: float) -> outcomes.Outcome:
        """Return the outcome of a handler that returned this delta. Raises `InvalidPayload`."""
        text = payload.encode(value, f"result of node {self.row['node_id']!r}")
        return outcomes.Outcome(
            "completed",
            seconds,
            text,
            value=value,
            resolved_inputs=self._resolved,
            vm_rss_mb_peak=peak_rss_mb(),
        )

    def failed(self, error: BaseException, seconds: float) -> outcomes.Outcome:
        """Return the failure of a node; `wish` is set if the worker or its GPU is the cause."""
        outcome = failed(self.row, error, seconds)
        loads = not self._has_begun and self.row["required_model"] is not None
        wish = outcome.raised.wish
        if not self._is_known:
            wish = "elsewhere"  # but an attempt counts if the handler itself raised this error
        elif self._cache is not None and loading.sees_no_gpu(error):
            wish = "no_gpu"
        elif self._cache is not None and loads and loading.lacks_memory(error):
            wish = "no_memory"
        raised = outcome.raised._replace(wish=wish)
        return outcome._replace(raised=raised, resolved_inputs=self._resolved)


def refused(job: Row) -> outcomes.Outcome | None:
    """Return the failure of a node whose row cannot be read, or None if it can run."""
    columns = ["inputs", "input_template", "context", *(["run"] if "run" in job else [])]
    error = None
    if not isinstance(job["node_module"], str):
        error = task_call.unreadable("node_module", job["node_module"], "a text")
    for column in columns:
        value = job.get(column)
        if not (isinstance(value, dict) or (value is None and column != "run")):
            error = error or task_call.unreadable(column, value)
    return None if error is None else failed(job, error, 0.0)


def inputs_of(job: Row, context: Callable[[list[str] | None], Any]) -> Inputs:
    """Return the inputs of a node; if it `needs_context`, call `context` with `context_heads`.

    Raises `UnreadableRow` (an `InvalidPayload`) for stored inputs that cannot be loaded.
    """
    inputs = resolve_inputs(job, context)
    if inputs == job["inputs"] and job.get("ref_heads") == []:
        return Inputs(inputs, None)
    return Inputs(inputs, payload.encode(inputs, f"inputs of node {job['node_id']!r}"))


def resolve_inputs(job: Row, context: Callable[[list[str] | None], Any]) -> JsonDict:
    """Return the inputs of a node, by resolving its template against the present context.

    A ref that does not resolve keeps the value from `inputs`. A job that an app has inserted itself
    has no template. Then `inputs` is the template, and such a ref is passed unchanged.
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
    """Return the members of the context that refs name; None if an app's resolver takes any."""
    custom = config.get_config().resolve_ref is not None
    return None if custom else [*refs.heads(_template(job))]


def _template(job: Row) -> Any:
    return job["inputs"] if job["input_template"] is None else job["input_template"]


def failed(job: Row, error: BaseException, seconds: float) -> outcomes.Outcome:
    """Return the outcome of a node that failed with `error`."""
    return outcomes.of_error(error, seconds, f"node {job['node_id']}")


def unless_cancelled(cancel: threading.Event, outcome: outcomes.Outcome) -> outcomes.Outcome:
    """Return the outcome `cancelled` for a cancelled handler, else the given one."""
    return outcomes.Outcome("cancelled", outcome.seconds) if cancel.is_set() else outcome


def peak_rss_mb() -> int:
    """Return this process's peak memory in MB (`ru_maxrss` is KiB on Linux, bytes on macOS)."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(peak / (1024 * 1024 if sys.platform == "darwin" else 1024))


@contextlib.contextmanager
def keep_loaded(cache: ModelCache | None) -> Generator[None]:
    """Keep the loaded model in the cache until the block ends."""
    if cache is None:
        yield
        return
    cache.mark_busy()
    try:
        yield
    finally:
        cache.mark_idle()


def handler_of(job: Row) -> tuple[Any, Callable[..., Any]]:
    """Return the node's module and its `run`. Raises `NodeNotFound`."""
    cfg, name = config.get_config(), job["node_module"]
    module = cfg.resolve_node_module(name)
    run = getattr(module, "run", None)
    if not callable(run):
        raise errors.NodeNotFound(f"node module {name!r} has no run(){cfg.node_hint(name)}")
    return module, run


def _declared(module: Any) -> node_functions.NodeFunction | None:
    """Return the module as a `NodeFunction` if @node has declared it, else None."""
    loaded = sys.modules.get("queue_workflows.declare.node_functions")
    return module if loaded is not None and isinstance(module, loaded.NodeFunction) else None


def _delta_of(value: Any) -> JsonDict:
    """Return the delta, which is a dict's `context_delta` or the dict itself, else {}."""
    if not isinstance(value, dict):
        return {}
    result = cast("JsonDict", value)
    inner: Any = result.get("context_delta", result)
    if isinstance(inner, dict):
        return cast("JsonDict", inner)
    return {} if inner is None else result


# --- In an executor.


def run(
    row: Row, link: Link, runner: handlers.Runner, model_cache: ModelCache | None
) -> outcomes.Outcome:
    """Run the handler of a node whose row the worker has checked; raises KeyboardInterrupt only."""
    with keep_loaded(model_cache):
        return NodeCall(row, link, model_cache).run(runner)


async def run_async(
    row: Row, link: Link, ask: Callable[[str, Any], Awaitable[Any]]
) -> outcomes.Outcome:
    """Do as `run` does, for an async handler on the running event loop.

    All data that it may need is read before it starts, since a wait would block other jobs.
    """
    started = time.monotonic()
    answers = dict[str, Any]()
    try:
        if needs_context(row):
            answers["context"] = await ask("context", context_heads(row))
        if _needs_out_dir(row):
            answers["out_dir"] = await ask("out_dir", None)
        if config.get_config().invoke_context is not None:
            answers["rows"] = await ask("rows", None)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # noqa: BLE001  the boundary around app code: it finds the node
        return unless_cancelled(link.cancel, failed(row, error, time.monotonic() - started))
    return await NodeCall(row, link, None, lambda what, _: answers[what]).run_async()


def _needs_out_dir(row: Row) -> bool:
    """Return whether the handler takes a folder, and its run has no `out_dir` yet."""
    run: Row = row.get("run") or {}
    if run.get("out_dir") is not None:
        return False
    names = typed_values.signature(handler_of(row)[1]).names
    return bool(confinement.roots()) or not {"out", "scratch"}.isdisjoint(names)


def announce(rows: JsonDict, value: Any) -> None:
    """Call the app's `on_node_completed` with `job` and `run`, if set; log its errors."""
    hook = config.get_config().on_node_completed
    if hook is None:
        return
    try:
        hook(wire.timed(rows["job"]), wire.timed(rows["run"]), value)
    except (Exception, SystemExit, KeyboardInterrupt):  # noqa: BLE001  app code
        _log.exception(
            "on_node_completed for node %s failed",
            rows["job"].get("node_id"),
            extra=log_context.ids_of_job(rows["job"]),
        )
