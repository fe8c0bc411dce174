"""The DAG walk: start a run, drain its outbox, park and resume input nodes, cancel and retry.

Every decision is one transaction under the run's row lock: effects, and the events that caused them
closed. Host hooks (providers, a host's ref resolver, widget builders) run between transactions.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Generator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeAlias

from queue_workflows import config, db, errors, refs
from queue_workflows.dag import definition as definitions
from queue_workflows.dag import graph, plan, readiness, widgets
from queue_workflows.store import nodes, outbox, payload, runs, submissions, tables
from queue_workflows.store import transitions as moves
from queue_workflows.types import Row

_log = logging.getLogger(__name__)
Begin: TypeAlias = Callable[[], AbstractContextManager[db.Connection]]
"""Opens a transaction: from the pool, or on a connection that the caller keeps."""

EVENTS_A_BATCH = 1000
RUNS_A_ROUND = 50
CACHED_RUNS = 64
RETRY_FIRST_S = 0.5
RETRY_MAX_S = 60.0
NOT_FOUND = (LookupError, FileNotFoundError)
"""What a provider raises for a workflow it does not know: the run fails at once (the contract)."""


class NoProvider(errors.InvalidConfig):
    """This process was given no workflow provider, so it cannot start or continue the run."""


@contextmanager
def _on(conn: db.Connection) -> Generator[db.Connection]:
    with conn.transaction():
        yield conn


def on_connection(conn: db.Connection) -> Begin:
    """A `Begin` on one autocommit connection, for callers that keep theirs."""
    return functools.partial(_on, conn)


class _Reader:
    """The database's truth about a run's nodes, read in the transactions that `begin` opens."""

    def __init__(self, begin: Begin, run_id: str) -> None:
        self._begin = begin
        self._run_id = run_id

    def done_among(self, ids: Collection[str]) -> set[str]:
        with self._begin() as conn:
            return nodes.done_among(conn, self._run_id, ids)

    def present(self, ids: Collection[str]) -> set[str]:
        with self._begin() as conn:
            return nodes.present(conn, self._run_id, ids)

    def done_all(self) -> set[str]:
        with self._begin() as conn:
            return nodes.all_done(conn, self._run_id)

    def context(self, heads: set[str] | None) -> dict[str, Any]:
        with self._begin() as conn:
            return nodes.context(conn, self._run_id, heads)


class _ProgressCache:
    """What this process knows of the runs it works on, by run and generation; least recent goes."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._lock = threading.Lock()
        self._items: OrderedDict[tuple[str, int], readiness.Progress] = OrderedDict()

    def get(self, key: tuple[str, int]) -> readiness.Progress | None:
        with self._lock:
            item = self._items.get(key)
            if item is not None:
                self._items.move_to_end(key)
            return item

    def put(self, key: tuple[str, int], item: readiness.Progress) -> None:
        with self._lock:
            self._items[key] = item
            while len(self._items) > self._size:
                self._items.popitem(last=False)

    def drop(self, run_id: str) -> None:
        with self._lock:
            for key in [key for key in self._items if key[0] == run_id]:
                del self._items[key]


_known = _ProgressCache(CACHED_RUNS)
_planning = threading.Lock()


def forget(run_id: str) -> None:
    """Drop what this process remembers of a run; the database stays the truth."""
    _known.drop(run_id)


# --- definitions -------------------------------------------------------------------------------


def _expand(run: Row) -> dict[str, Any]:
    cfg = config.get_config()
    if cfg.workflow_loader is None or cfg.pipeline_schema_loader is None:
        raise NoProvider(
            f"run {run['id']} waits: this process has no workflow provider; start it with --app, or "
            "call set_workflow_provider()"
        )
    try:
        workflow = cfg.workflow_loader(run["workflow_name"])
    except NOT_FOUND as error:
        raise errors.UnknownWorkflow(f"workflow {run['workflow_name']!r}: {error}") from error

    def load(name: str) -> Any:
        assert cfg.pipeline_schema_loader is not None
        try:
            return cfg.pipeline_schema_loader(name)
        except NOT_FOUND as error:
            raise errors.UnknownWorkflow(f"pipeline {name!r}: {error}") from error

    return definitions.expand(workflow, load, max_nodes=config.MAX_NODES_PER_RUN.read())


def _progress(run: Row, frozen: dict[str, Any]) -> readiness.Progress:
    key = (run["id"], run["generation"])
    progress = _known.get(key)
    if progress is None:
        progress = readiness.Progress(graph.Graph(frozen))
        _known.put(key, progress)
    return progress


def _frozen(begin: Begin, run: Row) -> readiness.Progress:
    """What is known of a run whose definition is made or read now if need be; opens transactions."""
    progress = _known.get((run["id"], run["generation"]))
    if progress is not None:
        return progress
    if not run["has_definition"]:
        made = _expand(run)
        text = payload.encode_definition(made)
        with begin() as conn:
            runs.lock(conn, run["id"])
            runs.freeze(conn, run["id"], text, definitions.digest(made))
    with begin() as conn:
        frozen = runs.definition(conn, run["id"])
    if frozen is None:
        raise errors.UnknownJob(f"run {run['id']!r} is gone")
    return _progress(run, frozen)


# --- plans -------------------------------------------------------------------------------------


def _host_resolves() -> bool:
    return config.get_config().resolve_ref is not None


def _make_plan(
    progress: readiness.Progress, run: Row, reader: plan.Reader, finished: list[str] | None
) -> plan.Plan:
    resolver = config.get_config().get_resolve_ref()
    with _planning:
        if finished is None:
            return plan.plan_start(
                progress,
                reader,
                resolver,
                out_dir=run["out_dir"],
                custom_resolver=_host_resolves(),
            )
        return plan.plan(
            progress,
            finished,
            reader,
            resolver,
            out_dir=run["out_dir"],
            custom_resolver=_host_resolves(),
        )


def _apply(conn: db.Connection, run: Row, made: plan.Plan) -> int:
    """Write a plan under the run's lock; how many rows are new."""
    if made.failure is not None:
        node_id, reason = made.failure
        runs.fail(conn, run["id"], payload.error_text(f"node {node_id}: {reason}"))
        return 0
    count = 0
    if made.rows:
        count = nodes.insert_many(conn, run["id"], payload.encode_plan(made.rows))
    if made.complete:
        runs.complete(conn, run["id"])
    return count


def _attached(conn: db.Connection) -> Begin:
    """Reads join the transaction that is open already."""

    @contextmanager
    def begin() -> Generator[db.Connection]:
        yield conn

    return begin


def _advance(
    begin: Begin,
    run_id: str,
    finished: list[str] | None,
    settle: Callable[[db.Connection], None],
    expected: str,
) -> int:
    """Plan from `finished` (None: from the start) and write it, `settle` in the same transaction.

    Nothing is written unless the run is still in the state (`expected`) and generation that the plan
    was made for. With the built-in resolver all happens under the run's lock; a host's resolver
    runs before it is taken.
    """
    with begin() as conn:
        run = runs.head(conn, run_id)
    if run is None or not _in_state(run, expected):
        return 0
    progress = _frozen(begin, run)
    made = None
    try:
        if _host_resolves():
            made = _make_plan(progress, run, _Reader(begin, run_id), finished)
        with begin() as conn:
            locked = runs.lock(conn, run_id)
            if locked is None or not _in_state(locked, expected):
                return 0
            if locked["generation"] != run["generation"]:
                raise errors.ClaimLost(f"run {run_id} was reopened meanwhile")
            if made is None:
                reader = _Reader(_attached(conn), run_id)
                made = _make_plan(progress, locked, reader, finished)
            if expected == "queued":
                runs.start(conn, run_id)
            count = _apply(conn, locked, made)
            settle(conn)
            return count
    except BaseException:
        # The progress may hold skips that were rolled back.
        forget(run_id)
        raise


def _in_state(run: Row, expected: str) -> bool:
    if run["mode"] != "node":
        return False
    if expected == "queued":
        return run["status"] == "queued"
    return run["status"] not in tables.TERMINAL and run["status"] != "queued"


def _nothing(_: db.Connection) -> None:
    return


# --- runs --------------------------------------------------------------------------------------


def start_run(run_id: str, *, begin: Begin = db.transaction) -> int:
    """Freeze the definition, queue the first nodes, and flip the run to running; how many new rows.

    Idempotent: 0 for a run that is not queued. A definition that cannot run fails the run, with the
    node and the reason in its `error`. Raises `NoProvider`, and what a provider raises besides
    not-found errors, with nothing changed.
    """
    try:
        return _advance(begin, run_id, None, _nothing, "queued")
    except (errors.InvalidWorkflow, errors.UnknownWorkflow) as error:
        _fail(begin, run_id, str(error))
        return 0


def _fail(begin: Begin, run_id: str, reason: str) -> None:
    with begin() as conn:
        runs.lock(conn, run_id)
        runs.fail(conn, run_id, payload.error_text(reason))


def start_queued(*, begin: Begin = db.transaction, limit: int = 50) -> tuple[int, list[str]]:
    """Start the queued runs that are due; how many were started, and those without a provider.

    A provider's error (other than not-found) delays its run with back-off; at DISPATCH_MAX_ATTEMPTS
    the run fails.
    """
    with begin() as conn:
        ids = runs.startable(conn, limit)
    started, waiting = 0, list[str]()
    for run_id in ids:
        try:
            start_run(run_id, begin=begin)
            started += 1
        except NoProvider:
            waiting.append(run_id)
        except (db.OperationalError, db.InterfaceError):
            raise
        except Exception as error:  # noqa: BLE001  host code: the provider
            _delay_start(begin, run_id, error)
    return started, waiting


def _delay_start(begin: Begin, run_id: str, error: Exception) -> None:
    reason = payload.error_text(f"{type(error).__name__}: {error}")
    with begin() as conn:
        head = runs.head(conn, run_id)
        failed = head["start_attempts"] + 1 if head else 1
        runs.delay(conn, run_id, error=reason, after_s=_backoff(failed))
    _log.warning("run %s could not start (try %d): %s", run_id, failed, reason)
    if failed >= config.DISPATCH_MAX_ATTEMPTS.read():
        _fail(begin, run_id, f"poison: the run could not start in {failed} tries: {reason}")


def _backoff(failures: int) -> float:
    return min(RETRY_MAX_S, RETRY_FIRST_S * 2 ** (failures - 1))


def on_node_completed(run_id: str, node_id: str) -> int:
    """Queue what became ready by this node, and complete the run if it was the last; new rows.

    The node's row is the truth: 0 when it is not completed or skipped, or the run is over.
    """
    with db.transaction() as conn:
        if not nodes.done_among(conn, run_id, [node_id]):
            return 0
    return _advance(db.transaction, run_id, [node_id], _nothing, "live")


def on_node_failed(run_id: str, node_id: str) -> int:
    """Fail the run, which cancels its waiting nodes; 0, since a failure makes no rows."""
    with db.transaction() as conn:
        runs.lock(conn, run_id)
        job = nodes.get_by_node(conn, run_id, node_id)
        if job is not None and job["status"] == "failed":
            runs.fail(conn, run_id, _node_failure(node_id, job["error"]))
    return 0


def _node_failure(node_id: str, error: str | None) -> str:
    return payload.error_text(f"node {node_id} failed: {error or 'no error was given'}")


def on_node_awaiting_input(run_id: str, node_id: str, *, begin: Begin = db.transaction) -> int:
    """Store what the parked node asks for as its `input_spec`; 0, since parking makes no rows."""
    with begin() as conn:
        run = runs.get(conn, run_id)
        job = nodes.get_by_node(conn, run_id, node_id)
    if run is None or job is None or job["status"] != "awaiting_input":
        return 0
    spec = payload.encode(_input_spec(begin, run, node_id), f"input_spec of {node_id!r}")
    with begin() as conn:
        nodes.set_input_spec(conn, job["id"], spec)
    return 0


def _input_spec(begin: Begin, run: Row, node_id: str) -> dict[str, Any]:
    head = run | {"has_definition": run["definition"] is not None}
    node = _frozen(begin, head).graph.nodes.get(node_id)
    step = dict(node.step or {}) if node else {"id": node_id}
    build = config.get_config().input_widgets.get(str(step.get("widget")))
    if build is not None:
        return dict(build(step, run))
    resolver = config.get_config().get_resolve_ref()
    wanted = None if _host_resolves() else refs.heads(step)
    with begin() as conn:
        context = nodes.context(conn, run["id"], wanted)
    return widgets.build_spec(step, context=context, out_dir=run["out_dir"], resolver=resolver)


def resume_after_input(run_id: str, node_id: str, value: Any = None) -> int:
    """Complete a waiting input node with `{target: value}` and go on; how many new rows.

    0 when it no longer waits. Raises `UnknownJob` (a KeyError) for no such node, and `InvalidPayload`.
    """
    with db.transaction() as conn:
        job = nodes.get_by_node(conn, run_id, node_id)
        if job is None:
            raise errors.UnknownJob(f"run {run_id!r} has no node {node_id!r}")
        if nodes.answer(conn, job["id"], answer_delta(job, value)) is None:
            return 0
    return drain_run(run_id)


def answer_delta(job: Row, value: Any) -> str:
    """The `context_delta` (JSON text) that an answer makes: `{target: value}`, or `{}`."""
    inputs: dict[str, Any] = job["inputs"] or {}
    target = inputs.get("target")
    delta = {} if not target or value is None else {str(target): value}
    return payload.encode(delta, f"answer to {job['node_id']!r}")


# --- the outbox --------------------------------------------------------------------------------


def drain_run(
    run_id: str, *, begin: Begin = db.transaction, nowait: bool = False, only: int | None = None
) -> int:
    """Dispatch a run's open events (`only`: one of them); how many new rows.

    `nowait`: 0 at once when another dispatcher has the run, or when host hooks stand in the way.
    """
    total = 0
    while True:
        count, more = _drain_batch(run_id, begin, nowait, only)
        total += count
        if not more:
            return total


def _drain_batch(run_id: str, begin: Begin, nowait: bool, only: int | None) -> tuple[int, bool]:
    parked: list[Row] = []
    count = 0
    try:
        with begin() as conn:
            run = runs.lock(conn, run_id, nowait=nowait)
            if run is None:
                return 0, False
            events = outbox.open_events(conn, run_id, EVENTS_A_BATCH, only)
            if not events:
                return 0, False
            live = _in_state(run, "live")
            key = (run_id, run["generation"])
            finished = _finished(events)
            if live and finished and (_known.get(key) is None or _host_resolves()):
                if nowait and (_host_resolves() or not run["has_definition"]):
                    return 0, False
                raise _Outside(events)
            count, parked = _settle(conn, run, events, live, finished)
    except _Outside as request:
        return _drain_outside(run_id, begin, request.events)
    except BaseException:
        forget(run_id)
        raise
    for event in parked:
        on_node_awaiting_input(run_id, event["node_id"], begin=begin)
        with begin() as conn:
            outbox.processed(conn, [event["id"]])
    return count, len(events) == EVENTS_A_BATCH


class _Outside(Exception):
    """The definition must be read or made, or a host's resolver called, before the lock is taken."""

    def __init__(self, events: list[Row]) -> None:
        self.events = events


def _finished(events: list[Row]) -> list[str]:
    return list(
        dict.fromkeys(
            event["node_id"]
            for event in events
            if event["kind"] == "completed" and event["node_status"] in ("completed", "skipped")
        )
    )


def _failed(events: list[Row]) -> Row | None:
    return next((e for e in events if e["kind"] == "failed" and e["node_status"] == "failed"), None)


def _settle(
    conn: db.Connection, run: Row, events: list[Row], live: bool, finished: list[str]
) -> tuple[int, list[Row]]:
    """Act on events under the lock and close them, but for the parked ones, which are returned."""
    count = 0
    parked: list[Row] = []
    failed = _failed(events)
    if live and failed is not None:
        runs.fail(conn, run["id"], _node_failure(failed["node_id"], failed["node_error"]))
    elif live:
        parked = [
            event
            for event in events
            if event["kind"] == "awaiting_input" and event["node_status"] == "awaiting_input"
        ]
        if finished:
            progress = _known.get((run["id"], run["generation"]))
            assert progress is not None
            reader = _Reader(_attached(conn), run["id"])
            count = _apply(conn, run, _make_plan(progress, run, reader, finished))
    kept = {event["id"] for event in parked}
    outbox.processed(conn, [event["id"] for event in events if event["id"] not in kept])
    return count, parked


def _drain_outside(run_id: str, begin: Begin, events: list[Row]) -> tuple[int, bool]:
    with begin() as conn:
        run = runs.head(conn, run_id)
    if run is None:
        return 0, False
    try:
        _frozen(begin, run)
    except (errors.InvalidWorkflow, errors.UnknownWorkflow) as error:
        _fail(begin, run_id, str(error))
        return 0, True
    if not _host_resolves():
        return 0, True
    finished = _finished(events)
    failed = _failed(events)
    closed = [e["id"] for e in events if e["kind"] != "awaiting_input"]
    if failed is not None:
        _fail(begin, run_id, _node_failure(failed["node_id"], failed["node_error"]))
        return 0, True
    count = _advance(begin, run_id, finished, lambda conn: outbox.processed(conn, closed), "live")
    return count, True


def drain_outbox(*, begin: Begin = db.transaction, limit: int = RUNS_A_ROUND) -> int:
    """Dispatch open events of up to `limit` runs, oldest first; how many runs were looked at.

    A run whose dispatch fails is retried event by event with back-off; at DISPATCH_MAX_ATTEMPTS the
    event is poison and the run fails with a message that says so.
    """
    with begin() as conn:
        ids = outbox.runs_with_events(conn, limit)
    for run_id in ids:
        try:
            drain_run(run_id, begin=begin)
        except NoProvider:
            continue
        except (db.OperationalError, db.InterfaceError):
            raise
        except Exception as error:  # noqa: BLE001  host code: providers, resolvers, widget builders
            _log.warning("dispatch of run %s failed: %s", run_id, error)
            _drain_singly(begin, run_id)
    return len(ids)


def _drain_singly(begin: Begin, run_id: str) -> None:
    with begin() as conn:
        events = outbox.open_events(conn, run_id, EVENTS_A_BATCH)
    for event in events:
        try:
            drain_run(run_id, begin=begin, only=event["id"])
        except (db.OperationalError, db.InterfaceError):
            raise
        except Exception as error:  # noqa: BLE001  host code: providers, resolvers, widget builders
            _count_failure(begin, run_id, event, error)


def _count_failure(begin: Begin, run_id: str, event: Row, error: Exception) -> None:
    reason = payload.error_text(f"{type(error).__name__}: {error}")
    attempts = event["attempts"] + 1
    with begin() as conn:
        outbox.postpone(conn, event["id"], error=reason, after_s=_backoff(attempts))
        if attempts < config.DISPATCH_MAX_ATTEMPTS.read():
            return
        runs.lock(conn, run_id)
        outbox.processed(conn, [event["id"]], reason)
        message = (
            f"poison: dispatching {event['kind']} of node {event['node_id']} failed {attempts} times: "
            f"{reason}"
        )
        runs.fail(conn, run_id, payload.error_text(message))
    _log.error("run %s: %s", run_id, message)


# --- what executors ask ------------------------------------------------------------------------


def resolve_inputs_for_job(job_id: str, *, job: Row | None = None) -> dict[str, Any]:
    """The inputs of a job, its template resolved once against the context as it is now.

    A ref that has stopped resolving keeps the value from `inputs`. A host that queued the job itself
    left no template: there `inputs` is the template. Raises `UnknownJob` (a KeyError).
    """
    if job is None:
        with db.transaction() as conn:
            job = nodes.get(conn, job_id)
        if job is None:
            raise errors.UnknownJob(f"no node job {job_id!r}")
    inputs: dict[str, Any] = job["inputs"] or {}
    template: dict[str, Any] = (
        job["input_template"] if job["input_template"] is not None else inputs
    )
    if job["ref_heads"] == [] or not refs.has_refs(template):
        return inputs if job["input_template"] is not None else dict(template)
    context = job.get("context")
    if context is None or _host_resolves():
        with db.transaction() as conn:
            heads = None if _host_resolves() else refs.heads(template)
            context = nodes.context(conn, job["run_id"], heads)
    fallback = inputs if job["input_template"] is not None else {}
    resolver = config.get_config().get_resolve_ref()
    return refs.resolve_inputs(template, context, fallback, resolver)


# --- operations --------------------------------------------------------------------------------


def submit_input(
    run_id: str, node_id: str, value: Any, *, conn: db.Connection | None = None
) -> str:
    """Answer an input node; the submission's id. `conn`: join the caller's transaction.

    The first answer wins: `InputRefused` (a ValueError) for a later one and for a node that does not
    wait. A node that has not parked yet keeps the answer until it does. Raises `UnknownJob` (a
    KeyError) and `InvalidPayload` before any write.
    """
    text = payload.encode(value, f"answer to {node_id!r}")
    with db.transaction(conn) as own:
        job = nodes.get_by_node(own, run_id, node_id)
        if job is None:
            raise errors.UnknownJob(f"run {run_id!r} has no node {node_id!r} yet")
        if not job["node_module"].startswith("__input__"):
            raise errors.InputRefused(f"node {node_id!r} of run {run_id!r} asks for no input")
        if job["status"] not in ("queued", "running", "awaiting_input"):
            raise errors.InputRefused(
                f"node {node_id!r} of run {run_id!r} is {job['status']}: it takes no answer now"
            )
        row = submissions.insert(own, run_id, node_id, text)
        if row is None:
            raise errors.InputRefused(
                f"node {node_id!r} of run {run_id!r} has been answered already; the first answer counts"
            )
        return row["id"]


def cancel_run(run_id: str, *, conn: db.Connection | None = None) -> Row | None:
    """Cancel a run and, in the same transaction, its waiting nodes; running ones get `cancel_event`.

    The run's row; None when there is no such run or it is over.
    """
    with db.transaction(conn) as own:
        return runs.cancel(own, run_id)


def cancel_job(job_id: str) -> Row | None:
    """Cancel a job of either family: a waiting one at once, a running one through `cancel_event`.

    A cancelled node takes its run with it, since what depends on it can never run. The job's row;
    None when there is no such job or it is over.
    """
    with db.transaction() as conn:
        job = nodes.get(conn, job_id)
        if job is None:
            return nodes.cancel(conn, tables.INGEST_JOBS, job_id)
        runs.lock(conn, job["run_id"])
        row = nodes.cancel(conn, tables.NODE_JOBS, job_id)
        if row is not None:
            runs.cancel(conn, job["run_id"])
        return row


def retry_run(run_id: str, *, from_node: str | None = None) -> Row:
    """Run a finished run again in a new generation; its row.

    Completed nodes keep their outputs, but for `from_node` and what depends on it. Raises `UnknownJob`
    (a KeyError) for no such run or node, `InvalidConfig` (a ValueError) for a run that is not over, or
    a completed one without `from_node`.
    """
    with db.transaction() as conn:
        run = runs.lock(conn, run_id)
        if run is None:
            raise errors.UnknownJob(f"no run {run_id!r}")
        if run["status"] not in tables.TERMINAL:
            raise errors.InvalidConfig(
                f"run {run_id!r} is {run['status']}: only a finished one is retried"
            )
        if from_node is None:
            if run["status"] == "completed":
                raise errors.InvalidConfig(
                    f"run {run_id!r} is completed: name the node to retry from"
                )
            reopened = runs.reopen(conn, run_id)
        else:
            reopened = runs.reopen_from(conn, run_id, _descendants(conn, run_id, from_node))
        assert reopened is not None
        return reopened


def _descendants(conn: db.Connection, run_id: str, node_id: str) -> list[str]:
    frozen = runs.definition(conn, run_id)
    walk = graph.Graph(frozen) if frozen else None
    if walk is None or node_id not in walk.nodes:
        raise errors.UnknownJob(f"run {run_id!r} has no node {node_id!r}")
    found, todo = {node_id}, [node_id]
    while todo:
        for following in walk.downstream(todo.pop()):
            if following not in found:
                found.add(following)
                todo.append(following)
    return sorted(found)


def retry_job(job_id: str) -> Row:
    """Run a failed or cancelled job again in a new generation; its row.

    A node's retry reopens its run. Raises `UnknownJob` (a KeyError) and `InvalidConfig` (a ValueError).
    """
    with db.transaction() as conn:
        job = nodes.get(conn, job_id)
        if job is None:
            row = moves.reopen_ingest(conn, job_id)
            if row is None:
                raise errors.UnknownJob(f"no failed or cancelled job {job_id!r}")
            return row
    if job["status"] not in ("failed", "cancelled"):
        raise errors.InvalidConfig(
            f"job {job_id!r} is {job['status']}: only a failed one is retried"
        )
    retry_run(job["run_id"])
    with db.transaction() as conn:
        return nodes.get(conn, job_id) or job
