"""Resolve the inputs of a job when it runs, and store people's answers."""

from __future__ import annotations

import copy
import logging
from typing import Any, cast

from queue_workflows import config, db, errors, refs
from queue_workflows.dag import answers, payload, widgets
from queue_workflows.db import app_connections, check_violations
from queue_workflows.dispatch import hooks, run_cache
from queue_workflows.engine import input_answers, nodes, outbox, runs
from queue_workflows.runtime import display
from queue_workflows.types import Row, Unreadable

_log = logging.getLogger(__name__)
PREFIX = "__input__"
"""The prefix of an input node's `node_module` (a contract name)."""


def ask(begin: run_cache.Begin, run_id: str, node_id: str, event_id: int | None = None) -> None:
    """Store the `input_spec` of a parked node, and close the event that parked it.

    The spec is built outside any transaction. It is written only if the node still waits as before.
    """
    with begin() as conn:
        run = runs.get(conn, run_id)
        head = runs.head(conn, run_id)
        job = nodes.get_by_node(conn, run_id, node_id)
    spec = None
    if run and head and job is not None and job["status"] == "awaiting_input":
        node = run_cache.learn(begin, head).graph.nodes.get(node_id)
        # A copy: the graph is shared by all runs of this definition, and a builder may change it.
        step = copy.deepcopy(node.step or {}) if node else {"id": node_id}
        made = _spec(begin, run, step)
        spec = payload.encode(made, f"input_spec of node {node_id!r}")
    stored = False
    with begin() as conn:
        runs.lock(conn, run_id)
        now = nodes.get_by_node(conn, run_id, node_id)
        if spec is not None and now is not None and _same_wait(job, now):
            stored = nodes.set_input_spec(conn, now["id"], spec) is not None
        if event_id is not None:
            outbox.close(conn, [event_id])
    if stored:
        command = display.answer_command(run_id, node_id)
        _log.info("run %s waits for an answer to node %s: `%s`", run_id, node_id, command)


def _same_wait(then: Row | None, now: Row) -> bool:
    what = ("id", "status", "claim_no", "generation")
    return then is not None and all(then[column] == now[column] for column in what)


def _spec(begin: run_cache.Begin, run: Row, step: dict[str, Any]) -> dict[str, Any]:
    made = hooks.widget_spec(step, run)
    if made is not None:
        return widgets.head(step) | made
    wanted = None if hooks.app_resolves() else refs.heads(step)
    with begin() as conn:
        context = nodes.context(conn, run["id"], wanted)
    resolver = config.get_config().get_resolve_ref()
    return widgets.build_spec(step, context=context, out_dir=run["out_dir"], resolver=resolver)


def answer_delta(job: Row, value: Any) -> str:
    """Return the `context_delta` (JSON text) of an answer: `{target: value}`, or `{}`.

    Raises `InvalidPayload` for a value that cannot be stored, and `UnreadableRow` for one that
    cannot be loaded and for a node whose inputs cannot.
    """
    what = f"answer to {job['node_id']!r}"
    if isinstance(value, Unreadable):
        raise errors.UnreadableRow(f"{what} cannot be read: {value.reason}")
    target = _record(job["inputs"], f"inputs of node {job['node_id']!r}").get("target")
    delta = {} if not target or value is None else {str(target): value}
    return payload.encode(delta, what)


def _record(value: Any, what: str) -> dict[str, Any]:
    """Return a stored JSON object, {} for null; `UnreadableRow` for anything else."""
    if isinstance(value, Unreadable):
        raise errors.UnreadableRow(f"{what} cannot be read: {value.reason}")
    if value is not None and not isinstance(value, dict):
        raise errors.UnreadableRow(f"{what}: a JSON object is needed, not {type(value).__name__}")
    return cast("dict[str, Any]", value or {})


@check_violations.translated()
def submit_input(
    run_id: str,
    node_id: str,
    value: Any,
    *,
    check: bool = False,
    conn: Any = None,
) -> str:
    """Answer an input node; return the submission's id.

    `conn` (psycopg, SQLAlchemy, Django): join the caller's transaction.

    The first answer wins: `InputRefused` (a ValueError) for a later one and for a node that does
    not wait; `check`: also for one that its `input_spec` does not allow. A node that has not parked
    yet keeps the answer until it does. Raises `UnknownJob` (a KeyError) and `InvalidPayload` before
    any write.
    """
    text = payload.encode(value, f"answer to {node_id!r}")
    where = f"node {node_id!r} of run {run_id!r}"
    with app_connections.transaction(conn) as own:
        # First, and outside the block: without an open transaction the block would commit its own.
        job = _refuse_unless_open(nodes.get_by_node(own, run_id, node_id), where)
        if check:
            answers.check(
                _record(job["input_spec"], f"input_spec of {where}") or None, value, where
            )
        with own.transaction():
            row = input_answers.submit(own, run_id, node_id, text)
            if row is None:
                raise errors.InputRefused(
                    f"{where} has been answered already; the first answer counts"
                )
            # The insert may have waited for the transaction of the first answer. The row is locked,
            # since the end of a wait (`timeout_s`) counts the answers that it sees.
            _refuse_unless_open(input_answers.hold_node(own, run_id, node_id), where)
        return row["id"]


async def submit_input_async(
    run_id: str, node_id: str, value: Any, *, check: bool = False, conn: Any = None
) -> str:
    """`submit_input` for an event loop, which it does not block.

    `conn`: an AsyncConnection of psycopg or SQLAlchemy, or an AsyncSession; None: a connection of
    the engine's, in another thread. A call that is cancelled may have answered all the same.
    """
    return await app_connections.call_async(submit_input, conn, run_id, node_id, value, check=check)


def _refuse_unless_open(job: Row | None, where: str) -> Row:
    if job is None:
        raise errors.UnknownJob(f"there is no {where} yet")
    if not job["node_module"].startswith(PREFIX):
        raise errors.InputRefused(f"{where} asks for no input")
    if job["status"] not in ("queued", "running", "awaiting_input"):
        raise errors.InputRefused(f"{where} is {job['status']}: it takes no answer now")
    return job


def resolve_inputs_for_job(job_id: str, *, job: Row | None = None) -> dict[str, Any]:
    """Return the inputs of a job, its template resolved once against the context as it is now.

    A ref that does not resolve keeps the value from `inputs`. An app that queued the job itself
    left no template: there `inputs` is the template, so that such a ref is passed as it stands.
    Raises `UnknownJob` (a KeyError), and `UnreadableRow` (an `InvalidPayload`) for stored inputs
    that cannot be loaded.
    """
    if job is None:
        with db.transaction() as conn:
            job = nodes.get(conn, job_id)
        if job is None:
            raise errors.UnknownJob(f"no node job {job_id!r}")
    where = f"node {job['node_id']!r}"
    inputs = _record(job["inputs"], f"inputs of {where}")
    from_app = job["input_template"] is None
    template = inputs if from_app else _record(job["input_template"], f"input_template of {where}")
    custom = hooks.app_resolves()
    if not custom and not refs.has_refs(template):
        return dict(inputs)
    context = job.get("context")
    if context is None or custom:
        with db.transaction() as conn:
            heads = None if custom else refs.heads(template)
            try:
                context = nodes.context(conn, job["run_id"], heads)
            except errors.UnreadableRow as error:
                raise errors.UnreadableRow(f"run {job['run_id']}: {error}") from None
    context = _record(context, f"context of {where}")
    resolver = config.get_config().get_resolve_ref()
    return refs.resolve_inputs(template, context, inputs, resolver)
