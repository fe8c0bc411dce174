"""Run a node's handler in this executor; ask its worker for a missing context, folder or row."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any, cast

from queue_workflows import config
from queue_workflows.dag import confinement, typed_values
from queue_workflows.engine import outcomes
from queue_workflows.handlers import node_call
from queue_workflows.model_cache import ModelCache
from queue_workflows.run import running, wire
from queue_workflows.runtime import log_context
from queue_workflows.tasks import control, handlers
from queue_workflows.types import JsonDict, Row

_log = logging.getLogger(__name__)
AskFn = Callable[[int, str, Any], Any]
"""Asks the worker about a job, with a request, and returns the value of its answer."""
AsyncAskFn = Callable[[int, str, Any], Awaitable[Any]]


def run(
    row: Row,
    job: running.Running,
    *,
    model_cache: ModelCache | None,
    runner: handlers.Runner,
    ask: AskFn,
    ask_step: control.Ask,
    send: running.Send,
) -> outcomes.Outcome:
    """Run the handler of a node whose row the worker has checked; raises KeyboardInterrupt only."""
    started = time.monotonic()
    lookups = _Lookups(row, job.key, ask, send)
    try:
        inputs = node_call.inputs_of(row, lambda heads: ask(job.key, "context", heads))
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # noqa: BLE001  the boundary around app code: its resolver
        return _failed(job, row, error, time.monotonic() - started)
    if model_cache is not None:
        model_cache.mark_busy()
    try:
        return node_call.call(
            node_call.NodeCall(
                row, *inputs, lookups, model_cache, job.cancel, job.status, job, ask_step
            ),
            runner,
        )
    finally:
        if model_cache is not None:
            model_cache.mark_idle()


async def run_async(
    row: Row,
    job: running.Running,
    *,
    ask: AsyncAskFn,
    ask_step: control.Ask,
    send: running.Send,
) -> outcomes.Outcome:
    """Do as `run` does, for an async handler on the running event loop.

    What the handler may look up is asked before it starts, since a wait would hold up other jobs.
    """
    started = time.monotonic()
    answers = dict[str, Any]()
    try:
        if node_call.needs_context(row):
            answers["context"] = await ask(job.key, "context", node_call.context_heads(row))
        if _needs_out_dir(row):
            answers["out_dir"] = await ask(job.key, "out_dir", None)
        if config.get_config().invoke_context is not None:
            answers["rows"] = await ask(job.key, "rows", None)
        inputs = node_call.inputs_of(row, lambda _: answers["context"])
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # noqa: BLE001  the boundary around app code: its resolver
        return _failed(job, row, error, time.monotonic() - started)
    lookups = _Lookups(row, job.key, lambda _, what, __: answers[what], send)
    return await node_call.call_async(
        node_call.NodeCall(row, *inputs, lookups, None, job.cancel, job.status, job, ask_step)
    )


def _needs_out_dir(row: Row) -> bool:
    """Return whether the handler takes a folder of a run that has none yet."""
    run: Row = row.get("run") or {}
    if run.get("out_dir") is not None:
        return False
    names = typed_values.signature(node_call.handler_of(row)[1]).names
    return bool(confinement.roots()) or not {"out", "scratch"}.isdisjoint(names)


def _failed(
    job: running.Running, row: Row, error: BaseException, seconds: float
) -> outcomes.Outcome:
    return node_call.unless_cancelled(job.cancel, node_call.failed(row, error, seconds))


class _Lookups:
    """`node_call.Lookups` from the claimed row, else from the worker."""

    def __init__(self, row: Row, key: int, ask: AskFn, send: running.Send) -> None:
        self._key = key
        self._ask = ask
        self._send = send
        run: Row = row.get("run") or {}
        self._out_dir: str | None = run.get("out_dir")
        self._rows: tuple[Row, Row] | None = None

    def out_dir(self) -> str:
        """Return the folder of the run; the worker gives it one if it has none."""
        if self._out_dir is None:
            self._out_dir = cast("str", self._ask(self._key, "out_dir", None))
        return self._out_dir

    def rows(self) -> tuple[Row, Row]:
        """Return the rows of the job and of its run with all columns."""
        if self._rows is None:
            found = self._ask(self._key, "rows", None)
            self._rows = wire.timed(found["job"]), wire.timed(found["run"])
        return self._rows

    def note_model(self, event_type: str, elapsed_s: float | None) -> None:
        """Let the worker record an event about the model that the node needs."""
        self._send(wire.EVENT, self._key, wire.encoded([event_type, elapsed_s]))


def announce(rows: JsonDict, value: Any) -> None:
    """Call `on_node_completed` with `job` and `run`, if the app has set it; log what it raises."""
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
