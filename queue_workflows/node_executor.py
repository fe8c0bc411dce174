"""Run the handler of one node: resolve inputs, load its model, call it, check its result."""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import sys
import threading
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any, TypeVar, cast

import queue_workflows
from queue_workflows import config, db, errors, history, tasks
from queue_workflows.dag import arguments, confinement, payload, run_folder
from queue_workflows.declare import node_functions
from queue_workflows.dispatch import job_inputs
from queue_workflows.engine import claimed_jobs, claims, finish, job_tables, nodes, outcomes, runs
from queue_workflows.model_cache import ModelCache, RequiresModels, adapted
from queue_workflows.types import JsonDict, Row

_log = logging.getLogger(__name__)
INPUT_PREFIX = "__input__"
READ_AGAIN_FIRST_S = 0.1
READ_AGAIN_MAX_S = 5.0
T = TypeVar("T")


def _ignore(*_: object, **__: object) -> None:
    return


def execute_node(
    job: Row,
    *,
    model_cache: RequiresModels | None = None,
    cancel_event: threading.Event | None = None,
    status_callback: Callable[..., object] | None = None,
) -> str:
    """Run a claimed node job and record how it ended, fenced by the claim in `job`.

    Return `"completed"` (parked input nodes too), `"failed"`, or `"skipped"`: the job was
    cancelled, or its claim is not held and nothing was written. A job that is not claimed is
    skipped before its handler runs. `model_cache`: any object with `require_model(id)`; its other
    members are used if it has them.
    """
    lease = job_tables.lease_of(job_tables.NODE_JOBS, job)
    with db.statement() as conn:
        if not claims.is_held(conn, lease):
            return "skipped"
    cache = adapted(model_cache)
    with _keep_loaded(cache):
        outcome = run_handler(
            job, model_cache=cache, cancel_event=cancel_event, status_callback=status_callback
        )
    with db.transaction() as conn:
        recorded = finish.record(conn, lease, outcome)
    if recorded == "completed" and outcome.kind == "completed":
        call_completed_hook(job, outcome)
    return recorded


@contextlib.contextmanager
def _keep_loaded(cache: ModelCache | None) -> Generator[None]:
    """Keep the loaded model until the block ends."""
    if cache is None:
        yield
        return
    cache.mark_busy()
    try:
        yield
    finally:
        cache.mark_idle()


def call_completed_hook(job: Row, outcome: outcomes.Outcome) -> None:
    """Call the app's `on_node_completed` after the commit; its errors are logged and dropped."""
    hook = config.get_config().on_node_completed
    if hook is None:
        return
    try:
        full, run = _full_rows(job)
        hook(full, run, outcome.value)
    except (Exception, SystemExit):  # noqa: BLE001  the boundary around app code
        _log.exception("on_node_completed for node %s failed", job["node_id"])


def run_handler(
    job: Row,
    *,
    model_cache: ModelCache | None = None,
    cancel_event: threading.Event | None = None,
    status_callback: Callable[..., object] | None = None,
) -> outcomes.Outcome:
    """Run the handler of a claimed job and return its outcome, also if it raises; write nothing."""
    started = time.monotonic()
    cancel = cancel_event or threading.Event()
    resolved: str | None = None
    try:
        claimed_jobs.check_node(job)
        if job["node_module"].startswith(INPUT_PREFIX):
            return outcomes.Outcome("parked", 0.0)
        inputs = _read_despite_outages(
            lambda: job_inputs.resolve_inputs_for_job(job["id"], job=job), cancel
        )
        if inputs != job["inputs"] or job.get("ref_heads") != []:
            resolved = payload.encode(inputs, f"inputs of node {job['node_id']!r}")
        report = status_callback or _ignore
        with tasks.running(tasks.NodeJob(job, inputs, cancel, report)):
            value = _invoke(job, inputs, model_cache, cancel, report)
        text = payload.encode(value, f"result of node {job['node_id']!r}")
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # noqa: BLE001  the boundary around app code: it may exit
        outcome = outcomes.of_error(error, time.monotonic() - started, f"node {job['node_id']}")
        return _unless_cancelled(cancel, outcome._replace(resolved_inputs=resolved))
    outcome = outcomes.Outcome(
        "completed",
        time.monotonic() - started,
        text,
        value=value,
        resolved_inputs=resolved,
        vm_rss_mb_peak=peak_rss_mb(),
    )
    return _unless_cancelled(cancel, outcome)


def _unless_cancelled(cancel: threading.Event, outcome: outcomes.Outcome) -> outcomes.Outcome:
    """Ignore what a handler returns after it was requested to end."""
    return outcomes.Outcome("cancelled", outcome.seconds) if cancel.is_set() else outcome


def _read_despite_outages(read: Callable[[], T], cancel: threading.Event) -> T:
    """Read for the engine beside a handler; repeat the read if the database is unreachable.

    An outage is not the node's failure. The worker watches the lease, whose end bounds the wait.
    """
    delay_s = READ_AGAIN_FIRST_S
    while True:
        try:
            return read()
        except (db.OperationalError, db.InterfaceError) as error:
            _log.warning("waiting for the database: %s", str(error).strip())
            if cancel.wait(delay_s):
                raise
            delay_s = min(READ_AGAIN_MAX_S, delay_s * 2)


def peak_rss_mb() -> int:
    """Return this process's peak memory in MB (`ru_maxrss` is KiB on Linux, bytes on macOS)."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(peak / (1024 * 1024 if sys.platform == "darwin" else 1024))


def _full_rows(job: Row) -> tuple[Row, Row]:
    with db.transaction() as conn:
        full = nodes.get(conn, job["id"])
        run = runs.get(conn, job["run_id"])
    return full or job, run or {}


def _invoke(
    job: Row,
    inputs: JsonDict,
    model_cache: ModelCache | None,
    cancel: threading.Event,
    status_callback: Callable[..., object],
) -> JsonDict:
    try:
        module = config.get_config().resolve_node_module(job["node_module"])
    except errors.NodeNotFound as error:
        raise errors.NodeNotFound(_unknown_node(job, cancel, error)) from error
    run = getattr(module, "run", None)
    if not callable(run):
        raise errors.NodeNotFound(f"node module {job['node_module']!r} has no run()")
    handle, load_seconds = _model(job, model_cache)
    folders = _Folders(job, cancel)
    folders.check()
    try:
        offers: dict[str, Callable[[], Any]] = {
            "inputs": lambda: inputs,
            "out": folders.out,
            "scratch": folders.scratch,
            "model_handle": lambda: handle,
            "model_load_seconds": lambda: load_seconds,
            "cancel_event": lambda: cancel,
            "status_callback": lambda: status_callback,
        }
        # Only nodes declared by @node have their annotations enforced: the modules of existing
        # apps may carry annotations that their inputs never matched.
        where = (
            f"inputs of node {job['node_id']!r}"
            if isinstance(module, node_functions.NodeFunction)
            else None
        )
        bound = arguments.signature(run).bind(inputs, offers, where=where)
        return _in_app_context(
            job, cancel, lambda: _context_delta(outcomes.unless_signal(run(**bound)))
        )
    finally:
        folders.close()


def _unknown_node(job: Row, cancel: threading.Event, error: errors.NodeNotFound) -> str:
    """Name the worker and the age of the run: an old worker or an old run is the usual cause."""
    run = _read_despite_outages(lambda: _full_rows(job), cancel)[1]
    created = run.get("created_at")
    since = f"; the run exists since {created:%Y-%m-%d %H:%M:%S} UTC" if created else ""
    return (
        f"{error} [{config.describe_app()} (queue_workflows {queue_workflows.__version__}, pid "
        f"{os.getpid()}) met it{since}]"
    )


def _in_app_context(job: Row, cancel: threading.Event, body: Callable[[], JsonDict]) -> JsonDict:
    """Call the handler inside the app's invoke context, if it set one; return the delta.

    `finalize` is applied to a success only, and not if the job was cancelled meanwhile. An error of
    the handler is raised even if the app's context suppresses it.
    """
    factory = config.get_config().invoke_context
    if factory is None:
        return body()
    rows = _read_despite_outages(lambda: _full_rows(job), cancel)
    raised: BaseException | None = None
    delta: JsonDict = {}
    with factory(*rows) as finalize:
        try:
            delta = body()
            if not cancel.is_set():
                delta = _finalized(finalize, delta)
        except BaseException as error:
            raised = error
            raise
    if raised is not None:
        raise raised
    return delta


def _finalized(finalize: Callable[[JsonDict], Any], delta: JsonDict) -> JsonDict:
    final = finalize(delta)
    if final is None:
        return delta
    if not isinstance(final, dict):
        raise errors.InvalidPayload(
            f"finalize of the invoke context returned {type(final).__name__}, not a context_delta"
        )
    return cast("JsonDict", final)


def _context_delta(value: Any) -> JsonDict:
    """Return the delta: the dict, or its member `context_delta`; {} for any other result."""
    if not isinstance(value, dict):
        return {}
    result = cast("JsonDict", value)
    inner: Any = result.get("context_delta", result)
    if isinstance(inner, dict):
        return cast("JsonDict", inner)
    return {} if inner is None else result


def _model(job: Row, cache: ModelCache | None) -> tuple[Any, float]:
    model_id = job["required_model"]
    if model_id is None:
        return None, 0.0
    if cache is None:
        raise errors.UnknownModel(
            f"node {job['node_id']!r} needs model {model_id!r}, and this worker has no model cache"
        )
    if cache.current_model == model_id:
        return cache.require_model(model_id), 0.0
    _model_event(job, "model_load_start", None)
    handle = cache.require_model(model_id)
    _model_event(job, "model_load_done", cache.last_load_seconds)
    return handle, cache.last_load_seconds


def _model_event(job: Row, event_type: str, elapsed_s: float | None) -> None:
    history.record_event(
        run_id=job["run_id"],
        node_id=job["node_id"],
        event_type=event_type,
        job_id=job["id"],
        attempt=job["attempts"],
        host_label=job["claimed_by"],
        queue=job["queue"],
        model=job["required_model"],
        elapsed_s=elapsed_s,
    )


class _Folders:
    """A node's folders, created on request; `close` removes the folder of this attempt."""

    def __init__(self, job: Row, cancel: threading.Event) -> None:
        self._job = job
        self._cancel = cancel
        self._scratch: confinement.Scratch | None = None

    def check(self) -> None:
        """Raise `FolderRefused` for a run whose `out_dir` OUT_ROOTS does not allow."""
        if confinement.roots():
            confinement.check(self._root())

    def _root(self) -> str:
        if "run" in self._job:
            found = self._job["run"]["out_dir"]
        else:
            found = _read_despite_outages(lambda: _full_rows(self._job), self._cancel)[1].get(
                "out_dir"
            )
        # A job that an app queued into a run of its own: no start has given the run a folder.
        return _read_despite_outages(self._choose_out_dir, self._cancel) if found is None else found

    def _choose_out_dir(self) -> str:
        default = run_folder.of_run(self._job["run_id"])
        with db.statement() as conn:
            return runs.set_out_dir(conn, self._job["run_id"], default) or default

    def out(self) -> Path:
        """Return `<out_dir>/<node_id>`, created."""
        node_id = self._job["node_id"]
        return confinement.make(self._root(), node_id, f"node id {node_id!r:.120}")

    def scratch(self) -> Path:
        """Return a folder of this attempt alone, under `<out_dir>/.scratch`."""
        root, prefix = self._root(), f"{self._job['claim_no']}-"
        parent = str(Path(os.path.realpath(root), confinement.SCRATCH))
        with confinement.opened(root, confinement.SCRATCH, create=True) as fd:
            self._scratch = confinement.Scratch(parent, fd, prefix)
        return self._scratch.path

    def close(self) -> None:
        """Remove the scratch folder and its content."""
        if self._scratch is not None:
            self._scratch.remove()


def takes_status_callback(body: Callable[..., Any]) -> bool:
    """Return whether a handler reports its progress."""
    return "status_callback" in arguments.signature(body).names
