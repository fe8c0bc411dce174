"""Running one node: bind its arguments, bracket its body, check its result, record the outcome."""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import pathlib
import resource
import shutil
import sys
import threading
import time
import types as pytypes
import typing
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

from queue_workflows import config, db, dispatcher, errors, node_queue
from queue_workflows.model_cache import ModelCache
from queue_workflows.store import nodes, outcomes, payload, runs, tables
from queue_workflows.types import JsonDict, Row

_log = logging.getLogger(__name__)
INPUT_PREFIX = "__input__"


def _ignore(*_: object) -> None:
    return


def execute_node(
    job: Row,
    *,
    model_cache: ModelCache | None = None,
    cancel_event: threading.Event | None = None,
    status_callback: Callable[..., object] | None = None,
) -> str:
    """Run a claimed node job and record how it ended, fenced by the claim in `job`.

    `"completed"` (parked input nodes too), `"failed"`, or `"skipped"`: the job was cancelled, or
    its claim is no longer held and nothing was written.
    """
    outcome = run_body(
        job, model_cache=model_cache, cancel_event=cancel_event, status_callback=status_callback
    )
    lease = tables.lease_of(tables.NODE_JOBS, job)
    with db.transaction() as conn:
        recorded = outcomes.record(conn, lease, outcome)
    if recorded == "completed" and outcome.kind == "completed":
        announce(job, outcome)
    return recorded


def announce(job: Row, outcome: outcomes.Outcome) -> None:
    """Call the host's `on_node_completed` after the commit; its errors are logged and dropped."""
    hook = config.get_config().on_node_completed
    if hook is None:
        return
    try:
        full, run = _full_rows(job)
        hook(full, run, outcome.value)
    except Exception:  # noqa: BLE001  the boundary around host code
        _log.exception("on_node_completed for node %s failed", job["node_id"])


def run_body(
    job: Row,
    *,
    model_cache: ModelCache | None = None,
    cancel_event: threading.Event | None = None,
    status_callback: Callable[..., object] | None = None,
) -> outcomes.Outcome:
    """Run the body of a claimed job, writing nothing about it; whatever it raises is an outcome."""
    started = time.monotonic()
    if job["node_module"].startswith(INPUT_PREFIX):
        return outcomes.Outcome("parked", 0.0)
    cancel = cancel_event or threading.Event()
    resolved: str | None = None
    try:
        inputs = dispatcher.resolve_inputs_for_job(job["id"], job=job)
        if job.get("ref_heads") != []:
            resolved = payload.encode(inputs, f"inputs of node {job['node_id']!r}")
        value = _invoke(job, inputs, model_cache, cancel, status_callback or _ignore)
        text = payload.encode(value, f"result of node {job['node_id']!r}")
    except (Exception, SystemExit) as error:  # noqa: BLE001  the boundary around host code
        if cancel.is_set():
            return outcomes.Outcome("cancelled", time.monotonic() - started)
        return outcomes.of_error(error, time.monotonic() - started, f"node {job['node_id']}")
    seconds = time.monotonic() - started
    if cancel.is_set():
        return outcomes.Outcome("cancelled", seconds)
    return outcomes.Outcome(
        "completed",
        seconds,
        text,
        value=value,
        resolved_inputs=resolved,
        vm_rss_mb_peak=peak_rss_mb(),
    )


def peak_rss_mb() -> int:
    """This process's peak resident memory in MB (`ru_maxrss` is KiB on Linux, bytes on macOS)."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(peak / (1024 * 1024 if sys.platform == "darwin" else 1024))


def _full_rows(job: Row) -> tuple[Row, Row]:
    with db.transaction() as conn:
        full = nodes.get(conn, job["id"])
        run = runs.get(conn, job["run_id"])
    return full or job, run or {}


def _out_dir(job: Row) -> str | None:
    if "run" in job:
        return job["run"]["out_dir"]
    with db.transaction() as conn:
        run = runs.get(conn, job["run_id"])
    return run["out_dir"] if run else None


def _invoke(
    job: Row,
    inputs: JsonDict,
    model_cache: ModelCache | None,
    cancel: threading.Event,
    status_callback: Callable[..., object],
) -> JsonDict:
    module = config.get_config().resolve_node_module(job["node_module"])
    run = getattr(module, "run", None)
    if not callable(run):
        raise errors.NodeNotFound(f"node module {job['node_module']!r} has no run()")
    signature = _signature(run)
    with contextlib.ExitStack() as stack:
        handle, load_seconds = _model(job, model_cache)
        folders = _Folders(job, stack)
        offers: dict[str, Callable[[], Any]] = {
            "inputs": lambda: inputs,
            "out": folders.out,
            "scratch": folders.scratch,
            "model_handle": lambda: handle,
            "model_load_seconds": lambda: load_seconds,
            "cancel_event": lambda: cancel,
            "status_callback": lambda: status_callback,
        }
        arguments = signature.bind(inputs, offers)
        factory = config.get_config().invoke_context
        if factory is None:
            return _delta(run(**arguments))
        finalize = stack.enter_context(factory(*_full_rows(job)))
        return finalize(_delta(run(**arguments)))


def _delta(value: Any) -> JsonDict:
    if not isinstance(value, dict):
        return {}
    result: JsonDict = value  # pyright: ignore[reportUnknownVariableType]  a host's dict
    inner = result.get("context_delta")
    return inner if isinstance(inner, dict) else result  # pyright: ignore[reportUnknownVariableType]


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
    node_queue.record_node_event(
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
    """A node's folders, made when it asks for them."""

    def __init__(self, job: Row, stack: contextlib.ExitStack) -> None:
        self._job = job
        self._stack = stack

    def out(self) -> Path | None:
        """`<out_dir>/<node_id>`, created; None when the run has no out_dir."""
        root = _out_dir(self._job)
        if root is None:
            return None
        folder = _inside(Path(root), self._job["node_id"])
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def scratch(self) -> Path:
        """A folder of this attempt alone, removed when the body ends."""
        return self._stack.enter_context(_scratch(_out_dir(self._job), self._job))


@contextlib.contextmanager
def _scratch(root: str | None, job: Row) -> Generator[Path]:
    import tempfile

    parent = None
    if root is not None:
        folder = Path(root) / ".scratch"
        folder.mkdir(parents=True, exist_ok=True)
        parent = str(folder)
    made = Path(tempfile.mkdtemp(prefix=f"{job['claim_no']}-", dir=parent))
    try:
        yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)


def _inside(root: Path, node_id: str) -> Path:
    top = root.resolve()
    folder = (top / node_id).resolve()
    if folder == top or not folder.is_relative_to(top):
        raise errors.InvalidPayload(f"node id {node_id!r} leads outside the run's out_dir")
    return folder


class _Signature:
    """A body's parameters, looked at once."""

    def __init__(self, run: Callable[..., Any]) -> None:
        parameters = inspect.signature(run).parameters.values()
        self.names = [p.name for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
        self.defaulted = {p.name for p in parameters if p.default is not p.empty}
        self.takes_rest = any(p.kind is p.VAR_KEYWORD for p in parameters)
        self.paths = _path_parameters(run, self.names)

    def bind(self, inputs: JsonDict, offers: dict[str, Callable[[], Any]]) -> dict[str, Any]:
        """Keyword arguments: inputs by name, then what the engine offers by name.

        None leaves a parameter to its default. A missing argument is the call's own TypeError.
        """
        bound: dict[str, Any] = {}
        for name in self.names:
            if name in inputs:
                value = inputs[name]
                if value is None and name in self.defaulted:
                    continue
                bound[name] = (
                    Path(value) if name in self.paths and isinstance(value, str) else value
                )
            elif name in offers:
                bound[name] = offers[name]()
        if self.takes_rest:
            bound |= {name: value for name, value in inputs.items() if name not in bound}
        return bound


@functools.lru_cache(maxsize=512)
def _signature(run: Callable[..., Any]) -> _Signature:
    return _Signature(run)


def takes_status_callback(run: Callable[..., Any]) -> bool:
    """Whether a body reports its progress."""
    return "status_callback" in _signature(run).names


def _path_parameters(run: Callable[..., Any], names: list[str]) -> frozenset[str]:
    """The parameters annotated `Path`, alone or in a union."""
    try:
        hints = typing.get_type_hints(run)
    except (NameError, TypeError, AttributeError):
        # An annotation that only a type checker can evaluate says nothing about this process.
        raw: dict[str, Any] = getattr(run, "__annotations__", {})
        return frozenset(
            n for n in names if "Path" in str(raw.get(n, "")).replace(".", " ").split()
        )
    return frozenset(name for name in names if _has_path(hints.get(name)))


def _has_path(hint: Any) -> bool:
    if typing.get_origin(hint) in (typing.Union, pytypes.UnionType):
        return any(_has_path(member) for member in typing.get_args(hint))
    return isinstance(hint, type) and issubclass(hint, pathlib.PurePath)
