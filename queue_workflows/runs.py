"""Submit, read, list, answer, cancel, retry, update, delete and explain runs and their nodes.

Each call is one transaction, or joins the transaction of `conn`. Its length: one noun of the public
API is one module.
"""

from __future__ import annotations

import builtins
import json
import uuid
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, cast

from queue_workflows import acts, config, db, errors, types
from queue_workflows.admin import stored_graph, waiting_reasons
from queue_workflows.claim import manual_changes
from queue_workflows.dag import answers, item_ids, payload
from queue_workflows.db import check_violations, statements
from queue_workflows.runtime import clock, identity, trace_context
from queue_workflows.types import JsonDict, NewRun, NodeJob, Row, Rows, Run, Upgrade, Who

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from queue_workflows.dag import graph

WRITABLE = frozenset(
    {
        "parcel_id", "workflow_name", "status", "priority", "current_step_id", "progress_pct",
        "steps_done", "context", "input_spec", "error", "out_dir", "mode", "resume_count",
        "queued_at", "started_at", "finished_at", "available_at",
    }
)  # fmt: skip
"""The columns that `update` can set."""
JSON_COLUMNS = frozenset({"steps_done", "context", "input_spec"})
EXPLAINED_NODES = 100
"""The most nodes that `explain` returns, since each needs several queries."""
EXAMINED = 10_000
"""The most runs that a page of a list examines, in about 20 ms of the server's time."""
ID_CHARACTERS = 8
"""The least characters of a text that may be the beginning of an id, as no word has so many
hexadecimal digits."""
_PLACE = frozenset({"fits", "place", "last_at", "last_id"})
MAX_HEADERS_BYTES = 6000
"""The most bytes of a run's headers as JSON. The database adds spaces, and refuses over 8,000."""

RUNS_OF_KEYS = uuid.UUID("8d3f1d0e-6a5c-4c0e-9a7e-5c3b8f3e2b61")
"""The namespace of the ids of runs that were submitted with an idempotency key."""


# --- submit ------------------------------------------------------------------------------------


@check_violations.translated()
def submit(
    workflow_name: str,
    *,
    inputs: dict[str, Any] | None = None,
    run_id: str | None = None,
    priority: int = 100,
    parcel_id: str | None = None,
    out_dir: str | None = None,
    status: str = "queued",
    mode: str = "node",
    headers: Mapping[str, str] | None = None,
    conn: Any = None,
) -> Run:
    """Insert a run and return its row; an orchestrator starts it if it is queued, of mode `node`.

    `inputs` become its column `context`. Without `run_id`, it gets a new id. `headers` are texts by
    name, 6,000 bytes at most; `traceparent` is added from the caller's span if it has one. With
    `conn` (psycopg, SQLAlchemy, Django), join the app's transaction. Raises before any write:
    `InvalidPayload` for inputs or headers that cannot be stored, `ArgsRefused` for inputs that a
    workflow declared in Python does not take (ValueErrors).
    """
    values: dict[str, Any] = {
        "run_id": run_id or str(uuid.uuid4()),
        "workflow_name": workflow_name,
        "parcel_id": parcel_id,
        "out_dir": None if out_dir is None else str(out_dir),
        "status": status,
        "priority": priority,
        "mode": mode,
        "context": _encode(inputs or {}, "inputs"),
        "headers": _headers(trace_context.with_current(headers)),
    }
    insert = statements.runs.insert  # it needs the privilege to insert a status and a mode
    if (status, mode) == ("queued", "node"):
        insert = statements.runs.submit
    # Inputs are only checked for workflows that this process has declared.
    declared = config.get_config().workflow_map.get(workflow_name) if mode == "node" else None
    if declared is not None:
        declared.check_inputs(inputs or {})
    with (
        db.statement(conn) as own,
        check_violations.of_columns("workflow_runs", values),
    ):
        return cast("Run", insert(own, **values))


def submit_once(
    workflow_name: str, *, key: str, inputs: dict[str, Any] | None = None, priority: int = 100
) -> tuple[Run, bool]:
    """Insert the run of an idempotency key, or find it; return its row, and whether it is new.

    The run's id is made from the key, so the key is taken for as long as the run exists. Raises
    `IdempotencyClash` if that run has another workflow or inputs, and as `submit` does.
    """
    run_id = str(uuid.uuid5(RUNS_OF_KEYS, key))
    found = get(run_id)
    if found is None:
        try:
            submitted = submit(workflow_name, inputs=inputs, run_id=run_id, priority=priority)
        except db.Error as error:
            if not check_violations.is_violation_of(error, "workflow_runs_pkey"):
                raise
            found = get(run_id)
            if found is None:
                raise
        else:
            return submitted, True
    given = json.loads(_encode(inputs or {}, "inputs"))
    if (found["workflow_name"], found["context"]) != (workflow_name, given):
        raise errors.IdempotencyClash(
            f"idempotency key {key!r:.80} belongs to run {run_id}, which has another workflow or "
            "other inputs; use a separate key for each run",
            run_id,
        )
    return found, False


async def submit_async(workflow_name: str, *, conn: Any = None, **run: Unpack[NewRun]) -> Run:
    """Do as `submit` does, without blocking the event loop.

    `conn` is an AsyncConnection of psycopg or SQLAlchemy, or an AsyncSession, whose transaction is
    joined. Without it, another thread works on a connection of the engine, where a cancelled call
    may still take effect, but never in part.
    """
    return await db.call_async(submit, conn, workflow_name, **run)


def _headers(given: Mapping[str, str] | None) -> str | None:
    if given is None:
        return None
    if not isinstance(given, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise errors.InvalidPayload(f"headers: must be a dict of texts, not {given!r:.80}")
    members: dict[Any, Any] = dict(given)
    if not all(isinstance(each, str) for pair in members.items() for each in pair):
        raise errors.InvalidPayload("headers: a name or a value is not a string")
    text = payload.encode(members, "headers")
    if len(text.encode()) > MAX_HEADERS_BYTES:
        raise errors.InvalidPayload(f"headers: longer than {MAX_HEADERS_BYTES:,} bytes")
    return text


def _encode(value: Any, column: str) -> str:
    if column in ("context", "inputs") and not isinstance(value, dict):
        named = "inputs (insert_run: context)" if column == "inputs" else column
        raise errors.InvalidPayload(f"{named} must be a JSON object")
    return payload.encode(value, column)


# --- read --------------------------------------------------------------------------------------


def get(run_id: str, *, conn: Any = None) -> Run | None:
    """Return a run's row, or None if there is none; `history.get_run` has its nodes and attempts.

    `conn` (psycopg, SQLAlchemy, Django): read in its transaction.
    """
    if not payload.is_storable(run_id):
        return None
    with db.statement(conn) as own:
        return cast("Run | None", statements.runs.get(own, run_id=run_id))


def output(run_id: str, *, conn: Any = None) -> JsonDict | None:
    """Return the output of a completed run, as `{"result": value}` or a dict.

    Returns None if its workflow has no output, the run has not completed, or there is no such run.
    For `conn` see `get`.
    """
    if not payload.is_storable(run_id):
        return None
    with db.statement(conn) as own:
        return statements.runs.output(own, run_id=run_id)


async def get_async(run_id: str, *, conn: Any = None) -> Run | None:
    """Do as `get` does, without blocking the event loop; `conn` as in `submit_async`."""
    return await db.call_async(get, conn, run_id)


def list(  # noqa: A001  the usual verb
    *,
    limit: int = 50,
    status: str | None = None,
    workflow_name: str | None = None,
    since: datetime | timedelta | None = None,
    until: datetime | timedelta | None = None,
    text: str | None = None,
    input: Mapping[str, Any] | None = None,  # noqa: A002  as the command and HTTP name it
    schedule: str | None = None,
    machine: str | None = None,
    before: tuple[datetime, str] | None = None,
) -> Rows:
    """Return the newest runs, each with its node counts by status as `nodes`, and `nodes_total`.

    `nodes_total` is None before a run's first start. `since` and `until` limit the creation, as
    times or time spans ago. `text` is the beginning of an id, or a part of an error. `input` has
    members that the inputs have, too. `schedule` has started the run, `machine` has run a node of
    it. `before` is `created_at` and `id` of the last run of the previous page. It reads pages until
    it has `limit` runs, which may take seconds if few runs match. Raises as `page`.
    """
    found: Rows = []
    while len(found) < limit:
        items, before = page(
            limit=min(limit - len(found), EXAMINED),
            status=status,
            workflow_name=workflow_name,
            since=since,
            until=until,
            text=text,
            input=input,
            schedule=schedule,
            machine=machine,
            before=before,
        )
        found += items
        if before is None:
            break
    return found


def page(
    *,
    limit: int = 50,
    status: str | None = None,
    workflow_name: str | None = None,
    since: datetime | timedelta | None = None,
    until: datetime | timedelta | None = None,
    text: str | None = None,
    input: Mapping[str, Any] | None = None,  # noqa: A002  as the command and HTTP name it
    schedule: str | None = None,
    machine: str | None = None,
    before: tuple[datetime, str] | None = None,
    conn: Any = None,
) -> types.RunPage:
    """Return a page of the runs that `list` returns, and the `before` of the next page.

    It examines EXAMINED runs at most, so it may have fewer than `limit` runs, even none, while
    others follow. Raises `InvalidConfig` for a time without its zone or a limit below 1, and
    `InvalidPayload` for an `input` that cannot be stored (both are ValueErrors). `conn` as in
    `get`.
    """
    if limit < 1:
        raise errors.InvalidConfig(f"limit {limit!r:.40}: a whole number from 1")
    clock.check_since(since)
    clock.check_since(until, "until")
    inputs = None if input is None else payload.encode({**input}, "input")
    texts = (status, workflow_name, text, schedule, machine, before and before[1])
    if not all(map(payload.is_storable, texts)):
        return types.RunPage([], None)
    among = identity.uuid_range(text) if text and len(text) >= ID_CHARACTERS else None
    low, high = among or (None, None)
    at, run_id = before or (None, None)
    given: dict[str, Any] = {
        "status": status,
        "workflow": workflow_name,
        "since": since if isinstance(since, datetime) else None,
        "since_ago": since if isinstance(since, timedelta) else None,
        "until": until if isinstance(until, datetime) else None,
        "until_ago": until if isinstance(until, timedelta) else None,
        "text": text or None,
        "low": low,
        "high": high,
        "inputs": inputs,
        "schedule": schedule,
        "machine": machine,
        "before": at,
        "before_id": run_id,
    }
    with db.statement(conn) as own:
        found = _found(own, limit, given)
        if len(found.items) < limit and found.next is not None and status and workflow_name:
            # The workflow may have fewer runs than the status, so that they reach further back.
            other = _found(own, limit, given, by_workflow=True)
            if other.next is None or other.next[0] < found.next[0]:
                return other
    return found


def _found(
    conn: db.Connection, limit: int, given: dict[str, Any], *, by_workflow: bool = False
) -> types.RunPage:
    rows = statements.runs.newest(
        conn, limit=limit + 1, most=EXAMINED, by_workflow=by_workflow, **given
    )
    fitting = [row for row in rows if row["fits"]]
    last = rows[-1] if rows and rows[-1]["place"] == EXAMINED else None
    if len(fitting) > limit:
        last = fitting[limit - 1]
    items = [{name: row[name] for name in row if name not in _PLACE} for row in fitting[:limit]]
    return types.RunPage(items, None if last is None else (last["last_at"], last["last_id"]))


def nodes(run_id: str) -> builtins.list[NodeJob]:
    """Return the jobs of a run's nodes, the oldest first; nodes not queued yet have none."""
    if not payload.is_storable(run_id):
        return []
    with db.statement() as conn:
        return cast("builtins.list[NodeJob]", statements.nodes.of_run(conn, run_id=run_id))


def explain(
    run_id: str, *, limit: int = EXPLAINED_NODES, conn: db.Connection | None = None
) -> JsonDict | None:
    """Return why each node of a run that does not run yet waits, or None if there is no such run.

    `id`, `kind`, `name`, `status`, `detail` (why the run itself waits, or None). `nodes`: at most
    `limit`, each as `jobs.explain` returns it, its `name` being the node id. The `clause` of a node
    that waits for an answer is `answer`, of one that waits for other nodes `dependencies` (its `id`
    is None); both have no `workers`. `left_out`: how many more wait. Takes no lock.
    """
    if not payload.is_storable(run_id):
        return None
    with db.transaction(conn) as own:
        return waiting_reasons.of_run(own, run_id, limit)


# --- change ------------------------------------------------------------------------------------


@check_violations.translated()
def update(run_id: str, **columns: Any) -> Run | None:
    """Set columns of a run and return its row.

    Returns None if there is no such run, or if the status of a run that is over would change; only
    `failed|cancelled -> queued` reopens one. Raises `UnknownColumn` (a ValueError) and
    `InvalidPayload`, with nothing written.
    """
    unknown = sorted(columns.keys() - WRITABLE)
    if unknown:
        raise errors.UnknownColumn(
            f"update_run: {', '.join(unknown)}: columns are {', '.join(sorted(WRITABLE))}"
        )
    if not columns:
        return get(run_id)
    if not payload.is_storable(run_id):
        return None
    values = {
        name: _encode(value, name) if name in JSON_COLUMNS and value is not None else value
        for name, value in columns.items()
    }
    if isinstance(values.get("error"), str):
        values["error"] = payload.error_text(values["error"])
    given: dict[str, Any] = (
        dict.fromkeys(WRITABLE) | values | {"run_id": run_id, "given": [*values]}
    )
    with db.transaction() as conn, check_violations.of_columns("workflow_runs", values):
        return cast("Run | None", statements.runs.update(conn, **given))


def cancel(run_id: str, *, conn: Any = None, **who: Unpack[Who]) -> Row | None:
    """Cancel a run with its waiting nodes and return its row; running ones get `cancel_event`.

    Returns None if there is no such run or it is over. `by`, `reason`: who does it and why, for the
    record, see `acts`. `conn` (psycopg, SQLAlchemy, Django): join the app's transaction.
    """
    if not payload.is_storable(run_id):
        return None
    with db.transaction(conn) as own, acts.recorded(own, "cancel", ("run", run_id), **who) as act:
        row = statements.runs.cancel(own, run_id=run_id, error=None)
        if row is None:
            act.subjects.clear()
        return row


async def cancel_async(run_id: str, *, conn: Any = None, **who: Unpack[Who]) -> Row | None:
    """Do as `cancel` does, without blocking the event loop; `conn` as in `submit_async`."""
    return await db.call_async(cancel, conn, run_id, **who)


@check_violations.translated()
def retry(
    run_id: str, *, from_node: str | None = None, conn: Any = None, **who: Unpack[Who]
) -> Row:
    """Run a finished run again and return its row.

    Completed nodes keep their outputs, except `from_node` and the nodes that depend on it. Raises
    `UnknownJob` (a KeyError) for no such run or node, `InvalidConfig` (a ValueError) for a run that
    is not over, for a completed one without `from_node`, and while a node that would run again
    still runs. `by`, `reason`, `conn`: as in `cancel`.
    """
    from queue_workflows.dag import graph  # late: a process that queues jobs reads no graphs

    if not payload.is_storable(run_id):
        raise errors.UnknownJob(f"no run {run_id!r:.80}")
    subject = ("run", run_id)
    with (
        db.transaction(conn) as own,
        acts.recorded(own, "retry", subject, **who, from_node=from_node),
    ):
        if from_node is None:
            return manual_changes.reopen_run(own, run_id)
        manual_changes.lock_over(own, run_id)
        stored, again = statements.runs.definition(own, run_id=run_id), _Again()
        if stored is None or not again.add(graph.read(stored), from_node):
            meant = stored_graph.hint(own, run_id, from_node)
            raise errors.UnknownJob(f"run {run_id!r} has no node {from_node!r}{meant}")
        _refuse(own, run_id, again)
        reopened = _reopen_nodes(own, run_id, again)
        assert reopened is not None
        return reopened


async def retry_async(
    run_id: str, *, from_node: str | None = None, conn: Any = None, **who: Unpack[Who]
) -> Row:
    """Do as `retry` does, without blocking the event loop; `conn` as in `submit_async`."""
    return await db.call_async(retry, conn, run_id, from_node=from_node, **who)


def upgrade(run_id: str, *, dry_run: bool = False, **who: Unpack[Who]) -> Upgrade:
    """Move a run from its frozen graph to today's code; return how they differ, and the outcome.

    `dry_run`: change nothing; `blocked` then names the nodes that keep the run from moving. `by`,
    `reason`: as in `cancel`; the run's `upgrades` name the actor too. Raises `UpgradeRefused` (a
    ValueError) if a node that has ended or runs differs, `UnknownJob` (a KeyError) for no such run,
    `InvalidConfig` for a run that is over or has not started, `UnknownWorkflow` if today's code has
    no such workflow.
    """
    from queue_workflows.dispatch import run_upgrades  # late: it reads graphs, as above

    if not payload.is_storable(run_id):
        raise errors.UnknownJob(f"no run {run_id!r:.80}")
    return run_upgrades.upgrade(run_id, dry_run=dry_run, **who)


def delete(run_id: str, **who: Unpack[Who]) -> bool:
    """Delete a run with its jobs, files, events and answers; return False if there is none.

    `by`, `reason`: as in `cancel`.
    """
    if not payload.is_storable(run_id):
        return False
    with db.transaction() as conn, acts.recorded(conn, "delete", ("run", run_id), **who) as act:
        is_gone = statements.runs.delete(conn, run_id=run_id) == 1
        if not is_gone:
            act.subjects.clear()
        return is_gone


def requeue_running(**who: Unpack[Who]) -> int:
    """Queue every running run at priority 10, `resume_count` + 1; return how many.

    For operators: no process of the engine does this. `by`, `reason`: as in `cancel`.
    """
    with db.transaction() as conn, acts.recorded(conn, "requeue", **who) as act:
        ids = statements.runs.requeue_running(conn)
        act.subjects.extend(("run", run_id) for run_id in ids)
        return len(ids)


# --- change many ---------------------------------------------------------------------------------


def cancel_many(
    ids: str | Iterable[str], *, conn: db.Connection | None = None, **who: Unpack[Who]
) -> builtins.list[JsonDict]:
    """Cancel runs with their nodes, each in a transaction of its own, or all in `conn`'s.

    Returns for each id, in order: `id`, `outcome` (`cancelled`, `refused`, `unknown`), `status`
    before the call, and `reason`. `by`, `reason`: as in `cancel`. Raises `InvalidConfig` (a
    ValueError) for an id that is not a text.
    """
    return _each(ids, "cancelled", cancel, who, conn)


def retry_many(
    ids: str | Iterable[str], *, conn: db.Connection | None = None, **who: Unpack[Who]
) -> builtins.list[JsonDict]:
    """Run failed and cancelled runs again, as `retry` does.

    Returns the same as `cancel_many`; `outcome`: `queued`, `refused`, `unknown`.
    """
    return _each(ids, "queued", retry, who, conn)


def _each(
    ids: str | Iterable[str],
    outcome: str,
    change: Callable[..., Row | None],
    who: Who,
    conn: db.Connection | None,
) -> builtins.list[JsonDict]:
    done: builtins.list[JsonDict] = []
    with acts.acting(**who):
        for run_id in payload.distinct_ids(ids):
            found: JsonDict = {"id": run_id, "outcome": outcome, "status": None, "reason": None}
            with db.transaction(conn) as own:
                known = payload.is_storable(run_id)
                run = statements.runs.lock(own, run_id=run_id) if known else None
                if run is None:
                    found |= {"outcome": "unknown", "reason": "there is no such run"}
                else:
                    found["status"] = run["status"]
                    try:
                        if change(run_id, conn=own) is None:
                            found |= {"outcome": "refused", "reason": f"it is {run['status']}"}
                    except errors.InvalidConfig as error:
                        found |= {"outcome": "refused", "reason": str(error)}
            done.append(found)
    return done


# --- what runs again ---------------------------------------------------------------------------


def _refuse(conn: db.Connection, run_id: str, again: _Again) -> None:
    """Raise `UnknownJob` for an item that does not exist, `InvalidConfig` for a node that runs.

    A running node would record a result of the old generation beside the new one.
    """
    among = statements.nodes.among
    running = sorted(among(conn, run_id=run_id, nodes=[*again.nodes], statuses=["running"]))
    for map_id, key in again.items:
        if not running and not statements.maps.items(conn, run_id=run_id, map=map_id, keys=[key]):
            meant = stored_graph.key_hint(conn, run_id, key, map_id)
            raise errors.UnknownJob(f"run {run_id!r}: map {map_id!r} has no item {key!r}{meant}")
    for map_id in sorted(again.maps):
        inside = statements.maps.running_inside(conn, run_id=run_id, inside=f"{map_id}[")
        running += [] if inside is None else [inside]
    if running:
        raise errors.InvalidConfig(
            f"node {running[0]!r} of run {run_id!r} still runs: retry once it has ended"
        )


def _reopen_nodes(conn: db.Connection, run_id: str, again: _Again) -> Row | None:
    """Queue a run that has ended, so that these nodes run again; return its row, or None.

    The run's generation increases by two, and the nodes are cancelled in the one between, so that
    the next start reopens them. Cancel requests for nodes that still run are withdrawn. Maps that
    get new items lose their items and nodes.
    """
    row = statements.runs.reopen_two_generations_on(conn, run_id=run_id)
    if row is not None:
        between = row["generation"] - 1
        nodes = sorted(again.nodes)
        statements.runs.cancel_nodes_again(conn, run_id=run_id, generation=between, nodes=nodes)
        statements.runs.withdraw_cancel_requests(conn, run_id=run_id)
    for map_id, key in again.items:
        statements.maps.reopen_item(conn, run_id=run_id, map=map_id, key=key)
    for map_id in sorted(again.maps):
        statements.maps.drop_nodes(conn, run_id=run_id, inside=f"{map_id}[")
        statements.maps.drop(conn, run_id=run_id, map=map_id, inside=f"{map_id}[")
    return row


class _Again:
    """The parts of a run to run again: nodes, maps that get new items, and items of other maps."""

    def __init__(self) -> None:
        self.nodes: set[str] = set()
        """Nodes with a row that is kept."""
        self.maps: set[str] = set()
        """Maps whose items are dropped with their nodes, since their list may change."""
        self.items: builtins.list[tuple[str, str]] = []
        """Map and key of items that run again in a map that keeps its other items."""

    def add(self, of: graph.Graph, node_id: str) -> bool:
        """Add the parts that run again from a node, an item (`cut[clip-7]`) or an item's node.

        Returns False if the definition has no such node. It does not check that the item exists.
        """
        parts = item_ids.split(node_id)
        if parts is None:
            if node_id not in of.nodes:
                return False
            self._add_following(of, "", _with_own(of, node_id))
            return True
        body = _body(of, parts.map_id)
        if body is None or (parts.inner and parts.inner not in body.nodes):
            return False
        prefix = f"{item_ids.folder(parts.map_id, parts.key)}/"
        start = _with_own(body, parts.inner) if parts.inner else body.nodes
        self._add_following(body, prefix, start)
        self._add_around(of, parts)
        return True

    def _add_around(self, of: graph.Graph, item: item_ids.ItemNode) -> None:
        """Add an item, its map's node, the nodes that depend on that, and so on outwards."""
        self.items.append((item.map_id, item.key))
        self.nodes.add(item.map_id)
        above = item_ids.split(item.map_id)
        if above is None:
            self._add_following(of, "", of.downstream(item.map_id))
            return
        body = _body(of, above.map_id)
        if body is not None:
            prefix = f"{item_ids.folder(above.map_id, above.key)}/"
            self._add_following(body, prefix, body.downstream(above.inner))
        self._add_around(of, above)

    def _add_following(self, of: graph.Graph, prefix: str, start: Iterable[str]) -> None:
        """Add nodes and all nodes that depend on them, each id with `prefix` in front."""
        todo = builtins.list(start)
        found = set(todo)
        while todo:
            following = set(of.downstream(todo.pop())) - found
            found |= following
            todo += following
        self.nodes |= {prefix + node_id for node_id in found}
        self.maps |= {prefix + node_id for node_id in found if of.nodes[node_id].map is not None}


def _with_own(of: graph.Graph, node_id: str) -> builtins.list[str]:
    """Return a node, and the nodes of the branch or loop that it ends, which run again too."""
    return [node_id, *(node.id for node in of.nodes.values() if node.arm == node_id)]


def _body(of: graph.Graph, map_id: str) -> graph.Graph | None:
    owner = item_ids.node(of, map_id)
    return None if owner is None or owner.map is None else owner.map.body


# --- answers -----------------------------------------------------------------------------------


@check_violations.translated()
def answer(
    run_id: str,
    node_id: str,
    value: Any,
    *,
    check: bool = False,
    conn: Any = None,
    **who: Unpack[Who],
) -> str:
    """Answer an input node of a run and return the submission's id.

    The first answer wins: `InputRefused` (a ValueError) is raised for a later one and for a node
    that does not wait, for an answer of another type than `ask` names, and with `check` for one
    that the node's `input_spec` does not allow. A node that has not parked yet keeps the answer
    until it does. Raises `UnknownJob` (a KeyError) and `InvalidPayload` before any write.
    `by`, `reason`, `conn`: as in `cancel`.
    """
    text = payload.encode(value, f"answer to {node_id!r}")
    where = f"node {node_id!r} of run {run_id!r}"
    if not (payload.is_storable(run_id) and payload.is_storable(node_id)):
        raise errors.UnknownJob(f"there is no {where}")
    with db.transaction(conn) as own:
        job = _refuse_unless_open(
            statements.nodes.get_by_node(own, run_id=run_id, node_id=node_id), where
        )
        # Check the value as JSON stores it, since a question only knows the types of JSON.
        meant = answers.decoded(job["input_spec"], json.loads(text))
        answers.check_type(job["input_spec"], meant, where)
        if check:
            spec = payload.stored_object(job["input_spec"], f"input_spec of {where}")
            answers.check(spec or None, meant, where)
        subject = ("run", run_id)
        with acts.recorded(own, "answer", subject, **who, node=node_id):
            row = statements.input_answers.submit(own, run_id=run_id, node_id=node_id, value=text)
            if row is None:
                raise errors.InputRefused(
                    f"{where} has been answered already; the first answer counts"
                )
            # The insert may have waited for the transaction that took the first answer. The node is
            # locked, as the end of its wait (`timeout_s`) only sees answers that are committed.
            statements.input_answers.hold_node(own, run_id=run_id, node_id=node_id)
            job = statements.nodes.get_by_node(own, run_id=run_id, node_id=node_id)
            _refuse_unless_open(job, where)
        return row["id"]


async def answer_async(
    run_id: str,
    node_id: str,
    value: Any,
    *,
    check: bool = False,
    conn: Any = None,
    **who: Unpack[Who],
) -> str:
    """Do as `answer` does, without blocking the event loop; `conn` as in `submit_async`."""
    return await db.call_async(answer, conn, run_id, node_id, value, check=check, **who)


def _refuse_unless_open(job: Row | None, where: str) -> Row:
    if job is None:
        raise errors.UnknownJob(f"there is no {where} yet")
    if not job["node_module"].startswith(answers.MODULE):
        raise errors.InputRefused(f"{where} asks for no input")
    if job["status"] not in ("queued", "running", "awaiting_input"):
        raise errors.InputRefused(f"{where} is {job['status']}: it takes no answer now")
    return job


# --- nodes without a graph ---------------------------------------------------------------------


@check_violations.translated()
def add_node(
    run_id: str,
    node_id: str,
    *,
    node_module: str,
    queue: str,
    required_model: str | None = None,
    inputs: dict[str, Any] | None = None,
    priority: int = 100,
    pipeline_name: str | None = None,
) -> str:
    """Queue a node of a run without a graph; return its job's id.

    If the run already has this node with the same content, its row and id are kept. Raises before
    any write: `NodeTaken` (a ValueError, and psycopg's UniqueViolation) for other content,
    `UnknownQueue` (a ValueError) unless cpu or gpu, `InvalidConfig` (a ValueError) for a cpu job
    with a model, `InvalidPayload`, `UnknownJob` (a KeyError) for no such run.
    """
    values: dict[str, Any] = {
        "run_id": run_id,
        "node_id": node_id,
        "node_module": node_module,
        "queue": queue,
        "required_model": _check_model(node_id, queue, required_model),
        "inputs": payload.encode(inputs or {}, f"inputs of node {node_id!r}"),
        "priority": priority,
        "pipeline_name": pipeline_name,
    }
    with db.transaction() as conn:
        row = statements.nodes.enqueue(conn, **values)
        if row is None:
            row = statements.nodes.same_node(conn, **values)
            if row is None:
                raise errors.UnknownJob(f"no run {run_id!r}")
            if not row["is_same"]:
                raise _taken(run_id, node_id, "with other content")
    return row["id"]


@check_violations.translated()
def add_skipped_node(
    run_id: str,
    node_id: str,
    *,
    node_module: str | None = None,
    queue: str = "cpu",
    required_model: str | None = None,
    pipeline_name: str | None = None,
) -> str:
    """Put a `skipped` row in a node's place, which satisfies its dependents; return its job's id.

    `node_module` defaults to the node's id, since it is not imported. A node that is skipped
    already keeps its row and id. Raises `NodeTaken` for a node in another state, and otherwise as
    `add_node` does.
    """
    row: dict[str, Any] = {
        "node_id": node_id,
        "node_module": node_id if node_module is None else node_module,
        "queue": queue,
        "required_model": _check_model(node_id, queue, required_model),
        "status": "skipped",
        "pipeline_name": pipeline_name,
        "inputs": {},
    }
    with db.transaction() as conn:
        statements.nodes.insert_planned(conn, run_id=run_id, nodes=payload.encode([row], "row"))
        job = statements.nodes.get_by_node(conn, run_id=run_id, node_id=node_id)
        if job is None:
            raise errors.UnknownJob(f"no run {run_id!r}")
        if job["status"] != "skipped":
            raise _taken(run_id, node_id, f"which is {job['status']}")
    return job["id"]


def _taken(run_id: str, node_id: str, what: str) -> errors.NodeTaken:
    """Return the error for a node that the run already has; `what` describes that node."""
    return check_violations.NodeTaken(
        f"run {run_id!r} has a node {node_id!r} already, {what}: give the new one another id"
    )


def _check_model(node_id: str, queue: str, model: str | None) -> str | None:
    """Return the model, or None for an empty one; raise if no worker can ever have it."""
    config.check_queue(queue, config.DAG_QUEUES)
    if not model:
        return None
    if queue == "cpu":
        raise errors.InvalidConfig(f"node {node_id!r}: a cpu job cannot require a model")
    if not types.is_name(model):
        raise errors.InvalidConfig(
            f"node {node_id!r}: model {model!r:.40}: an id has 1 to 400 bytes of UTF-8"
        )
    return model
