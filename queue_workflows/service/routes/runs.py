"""Submit, list, show, cancel, retry, answer and explain runs."""

from __future__ import annotations

from datetime import datetime
from typing import Any, Final

import fastapi
from starlette.responses import Response

from queue_workflows import check as workflow_check
from queue_workflows import config, errors, history
from queue_workflows import runs as api
from queue_workflows.service import responses, schemas, state
from queue_workflows.service.routes import long_polls, parameters
from queue_workflows.types import TERMINAL_RUN_STATUSES, JsonDict, Row, Run

router = fastapi.APIRouter(prefix="/api/v1/runs", tags=["runs"])
_ERRORS = parameters.problems(401, 403, 404, 422, 503)
_REFUSED = _ERRORS | parameters.problems(409)
_HIDDEN = frozenset({"definition", "definition_hash", "celery_task_id"})


_SUBMITTED: Final[dict[int | str, dict[str, Any]]] = {
    200: {"description": "The run that has the key, which was there already"},
    201: {"description": "The new run"},
    **parameters.problems(401, 403, 409, 422, 503),
}


@router.post("", status_code=201, responses=_SUBMITTED)
async def submit(
    request: fastapi.Request,
    body: schemas.Submit,
    idempotency_key: parameters.IdempotencyKey = None,
) -> Response:
    """Submit a run after its inputs were checked; 200 if the run of the key is there already."""
    key = parameters.idempotency_key(body.idempotency_key, idempotency_key)
    row, created = await state.of(request).calls.run(_submit, body, key)
    where = {"location": f"{request.scope.get('root_path', '')}/api/v1/runs/{row['id']}"}
    return responses.reply(_shown(row), 201 if created else 200, where if created else None)


def _submit(body: schemas.Submit, key: str | None) -> tuple[Run, bool]:
    # A process without any workflow cannot know which ones the orchestrators have.
    if config.get_config().workflow_loader is not None:
        workflow_check.workflow(body.workflow)
    if key is not None:
        return api.submit_once(body.workflow, key=key, inputs=body.inputs, priority=body.priority)
    return api.submit(body.workflow, inputs=body.inputs, priority=body.priority), True


@router.get("", responses={200: {"model": schemas.Page}} | parameters.problems(401, 403, 422, 503))
async def list_(
    request: fastapi.Request,
    status: parameters.Filter = None,
    workflow: parameters.Filter = None,
    limit: parameters.Limit = 50,
    cursor: parameters.Cursor = None,
) -> Response:
    """Return a page of runs that match every filter, the newest first, with their node counts."""
    place = parameters.decode_cursor(cursor, str, str)
    rows = await state.of(request).calls.run(
        api.list,
        limit=limit + 1,
        status=status,
        workflow_name=workflow,
        before=(_instant(place[0]), place[1]) if place else None,
    )
    content: JsonDict = {"items": rows[:limit], "next": None}
    if len(rows) > limit:
        last = rows[limit - 1]
        content["next"] = parameters.encode_cursor(last["created_at"].isoformat(), last["id"])
    return responses.reply(content)


def _instant(text: str) -> datetime:
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        found = None
    if found is None or found.tzinfo is None:
        raise errors.InvalidConfig("cursor: it is `next` of the page before, of the same list")
    return found


@router.get("/{run_id}", responses=_ERRORS | parameters.UNCHANGED)
async def show(
    request: fastapi.Request, run_id: parameters.RunId, wait: parameters.Wait = None
) -> Response:
    """Return a run with its output, and an ETag; `wait`: only when it has changed, or is over."""
    return await long_polls.watched(
        request,
        wait,
        lambda: _with_output(parameters.found(api.get(run_id), "run", run_id)),
        final=lambda found: found["status"] in TERMINAL_RUN_STATUSES,
        run_id=run_id,
    )


@router.get("/{run_id}/nodes", responses=_ERRORS | parameters.UNCHANGED)
async def nodes(
    request: fastapi.Request,
    run_id: parameters.RunId,
    limit: parameters.Limit = 200,
    cursor: parameters.Cursor = None,
) -> Response:
    """Return a page of the nodes of a run with their attempts: the workflow's, then the items'.

    The first are in the workflow's order, the nodes of items in that of their ids. Pages have logs
    if `limit`, or the number of the run's nodes, is at most 60.
    """
    read = state.of(request).calls.run
    found = await read(history.get_run_page, run_id, after=cursor, limit=limit)
    return responses.tagged(request, parameters.found(found, "run", run_id))


@router.get("/{run_id}/why", responses=_ERRORS)
async def why(request: fastapi.Request, run_id: parameters.RunId) -> Response:
    """Return why each node of a run that does not run yet waits."""
    found = await state.of(request).calls.run(api.explain, run_id)
    return responses.reply(parameters.found(found, "run", run_id))


@router.post("/{run_id}/cancel", responses=_ERRORS)
async def cancel(request: fastapi.Request, run_id: parameters.RunId) -> Response:
    """Cancel a run with its nodes; a run that is over stays as it is. Return the run."""
    return responses.reply(await state.of(request).calls.run(_cancel, run_id))


def _cancel(run_id: str) -> JsonDict:
    row = api.cancel(run_id) or api.get(run_id)
    return _shown(parameters.found(row, "run", run_id))


@router.post("/{run_id}/retry", responses=_REFUSED)
async def retry(
    request: fastapi.Request, run_id: parameters.RunId, body: schemas.RetryRun | None = None
) -> Response:
    """Run a run that is over again, from a node or from those that did not complete."""
    own = state.of(request)
    from_node = None if body is None else body.from_node
    try:
        row = await own.calls.run(api.retry, run_id, from_node=from_node)
    except errors.InvalidConfig as error:
        raise errors.InputRefused(str(error)) from None  # a conflict with the run's state
    return responses.reply(_shown(row))


@router.post("/{run_id}/nodes/{node_id:path}/answer", responses=_REFUSED)
async def answer(
    request: fastapi.Request,
    run_id: parameters.RunId,
    node_id: parameters.NodeId,
    body: schemas.Answer,
) -> Response:
    """Answer an input node; the first answer counts, and must be one that the node allows."""
    submission = await state.of(request).calls.run(
        api.answer, run_id, node_id, body.value, check=True
    )
    return responses.reply({"submission_id": submission, "run_id": run_id, "node_id": node_id})


def _shown(row: Row | Run) -> JsonDict:
    return {name: value for name, value in row.items() if name not in _HIDDEN}


def _with_output(row: Row | Run) -> JsonDict:
    return _shown(row) | {"output": api.output(row["id"])}
