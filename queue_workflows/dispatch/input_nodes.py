"""Build and store an input node's question, and compute what its answer adds to the context."""

from __future__ import annotations

import copy
import logging
from typing import Any

from queue_workflows import config, db, errors, refs
from queue_workflows.dag import answers, hooks, payload, widgets
from queue_workflows.db import statements
from queue_workflows.dispatch import run_cache
from queue_workflows.runtime import display
from queue_workflows.types import Row, Unreadable

_log = logging.getLogger(__name__)


def store_question(
    begin: run_cache.Begin, run_id: str, node_id: str, event_id: int | None = None
) -> None:
    """Store the `input_spec` of a parked node, and close the event that parked it.

    The spec is built outside any transaction. It is written only if the node still waits as before.
    """
    with begin() as conn:
        run = statements.runs.get(conn, run_id=run_id)
        head = statements.runs.head(conn, run_id=run_id)
        job = statements.nodes.get_by_node(conn, run_id=run_id, node_id=node_id)
    spec = None
    if run and head and job is not None and job["status"] == "awaiting_input":
        node = run_cache.learn(begin, head).graph.nodes.get(node_id)
        # A copy: the graph is shared by all runs of this definition, and a builder may change it.
        step = copy.deepcopy(node.step or {}) if node else {"id": node_id}
        spec = payload.encode(_spec(begin, run, step), f"input_spec of node {node_id!r}")
    stored = False
    with begin() as conn:
        statements.runs.lock(conn, run_id=run_id)
        now = statements.nodes.get_by_node(conn, run_id=run_id, node_id=node_id)
        same = ("id", "status", "claim_no", "generation")
        if spec is not None and job and now and all(job[each] == now[each] for each in same):
            stored = statements.nodes.set_input_spec(conn, job=now["id"], spec=spec) is not None
        if event_id is not None:
            statements.outbox.close(conn, events=[event_id], error=None)
    if stored:
        _log.info(
            "run %s waits for an answer to node %s: `%s`",
            run_id,
            node_id,
            display.answer_command(run_id, node_id),
            extra={"run_id": run_id},
        )


def _spec(begin: run_cache.Begin, run: Row, step: dict[str, Any]) -> dict[str, Any]:
    made = hooks.widget_spec(step, run)
    if made is not None:
        return widgets.head(step) | made
    wanted = None if hooks.app_resolves() else refs.heads(step)
    with begin() as conn:
        context = db.run(conn, run_cache.read_context(run["id"], wanted))
    resolver = config.get_config().get_resolve_ref()
    return widgets.build_spec(step, context=context, out_dir=run["out_dir"], resolver=resolver)


def answer_delta(job: Row, value: Any) -> str:
    """Return the `context_delta` (JSON text) of an answer: `{target: value}`, or `{}`.

    A text that is JSON is decoded if the question takes no text.
    Raises `InvalidPayload` for a value that cannot be stored or has another type than the question
    asks for, and `UnreadableRow` if the value or the node's inputs cannot be loaded.
    """
    what = f"answer to {job['node_id']!r}"
    if isinstance(value, Unreadable):
        raise errors.UnreadableRow(f"{what} cannot be read: {value.reason}")
    # Check the value as JSON stores it, since a question only knows the types of JSON.
    value = answers.decoded(job.get("input_spec"), payload.plain(value, what))
    try:
        answers.check_type(job.get("input_spec"), value, what)
    except errors.InputRefused as refused:
        raise errors.InvalidPayload(str(refused)) from None
    given = payload.stored_object(job["inputs"], f"inputs of node {job['node_id']!r}")
    target = given.get("target")
    return payload.encode({} if not target or value is None else {str(target): value}, what)
