"""Resolve the inputs of a node job when a worker runs it."""

from __future__ import annotations

from typing import Any

from queue_workflows import config, db, errors, refs
from queue_workflows.dag import payload
from queue_workflows.dispatch import hooks
from queue_workflows.engine import nodes
from queue_workflows.types import Row


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
    inputs = payload.stored_object(job["inputs"], f"inputs of {where}")
    from_app = job["input_template"] is None
    template = (
        inputs
        if from_app
        else payload.stored_object(job["input_template"], f"input_template of {where}")
    )
    custom = hooks.app_resolves()
    if not custom and not refs.has_refs(template):
        return dict(inputs)
    context = job.get("context")
    if context is None or custom:
        with db.transaction() as conn:
            heads = None if custom else refs.heads(template)
            try:
                context = db.run(conn, nodes.context(job["run_id"], heads))
            except errors.UnreadableRow as error:
                raise errors.UnreadableRow(f"run {job['run_id']}: {error}") from None
    context = payload.stored_object(context, f"context of {where}")
    resolver = config.get_config().get_resolve_ref()
    return refs.resolve_inputs(template, context, inputs, resolver)
