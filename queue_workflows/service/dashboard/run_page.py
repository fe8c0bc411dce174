"""Show one run: its state in a sentence, time line, cost, graph, nodes and their logs."""

from __future__ import annotations

import functools
import shlex
import threading
from collections import Counter
from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Annotated, Any, Final, Literal
from urllib.parse import quote

import fastapi
from starlette.requests import Request
from starlette.responses import Response

from queue_workflows import acts, config, db, errors, hw_metrics, runs, types
from queue_workflows import check as workflow_check
from queue_workflows.admin import attempt_history, stored_graph, waiting_reasons
from queue_workflows.dag import answers, graph, item_ids, payload
from queue_workflows.db import statements
from queue_workflows.requests import catalog
from queue_workflows.runtime import display, identity, stored_json
from queue_workflows.service import state
from queue_workflows.service.dashboard import forms, layered, session, strip, timeline, view
from queue_workflows.types import TERMINAL_RUN_STATUSES, JsonDict, Row

router = fastapi.APIRouter()
MOST_BYTES: Final = 262_144
"""Bytes of a value, beyond which a page only links to it."""
EVENTS: Final = 20_000
GRAPHS: Final = 64
EXPLAINED: Final = 10
"""Nodes whose reasons to wait are shown; each needs several queries."""
PAGE: Final = 50
CHILDREN: Final = 20
"""Child runs that a page lists; one more is read."""
LOG_LINES: Final = 1_500
"""Lines of a log up to which each has a link."""
Name = Annotated[str, fastapi.Query(max_length=1000)]


# --- graphs ------------------------------------------------------------------------------------


class Graph:
    """A definition as far as pages need it: at most as many names as a drawing has boxes."""

    def __init__(self, definition: Any) -> None:
        entries = stored_graph.graph_nodes(definition)
        self.total = len(entries)
        entries.pop(graph.OUTPUT, None)
        deps = {name: tuple(entry["deps"]) for name, entry in entries.items()}
        self.note = ""
        self.are_steps = len(deps) > layered.MOST or _count(deps) > layered.MOST_EDGES
        if self.are_steps:
            self.note = f"Steps only: the graph has {len(deps):,} nodes."
            deps = _steps(deps)
        if len(deps) > layered.MOST or _count(deps) > layered.MOST_EDGES:
            self.note = f"Too large to draw: {len(deps):,} steps. The time line has them."
            deps = {}
        self.deps: dict[str, tuple[str, ...]] = deps
        self.kinds = {name: _kind(entries.get(name, {})) for name in deps}

    @functools.cached_property
    def drawing(self) -> layered.Drawing:
        """Return where the boxes and edges are."""
        return layered.draw(self.deps)


def _count(deps: Mapping[str, Iterable[str]]) -> int:
    return sum(len({*each}) for each in deps.values())


def _steps(deps: Mapping[str, Iterable[str]]) -> dict[str, tuple[str, ...]]:
    found: dict[str, dict[str, None]] = {}
    for name, before in deps.items():
        step = name.partition("/")[0]
        own = found.setdefault(step, {})
        own.update(dict.fromkeys(each.partition("/")[0] for each in before))
        own.pop(step, None)
    return {step: tuple(before) for step, before in found.items()}


def _kind(entry: Row) -> str:
    module = stored_json.text(entry.get("module")) or ""
    if "map" in entry:
        return "map"
    return (
        "run" if graph.workflow_of(module) else "ask" if module.startswith(answers.MODULE) else ""
    )


_graphs: dict[str, Graph] = {}
"""By `definition_hash`, the last to be used last. A thread that reads takes a copy first."""
_changing = threading.Lock()


def _graph(head: Row, known: Mapping[str, Graph]) -> Graph | None:
    """Return the graph of a run, or None before its first start.

    `known` has the graphs whose definitions were not read.
    """
    digest: str | None = head["definition_hash"]
    found = known.get(digest) if digest is not None else None
    if found is None and head["definition"] is not None:
        found = Graph(head["definition"])
    if found is not None and digest is not None:
        with _changing:
            _graphs.pop(digest, None)
            _graphs[digest] = found
            while len(_graphs) > GRAPHS:
                _graphs.pop(next(iter(_graphs)))
    return found


# --- the run -----------------------------------------------------------------------------------


def run_row(conn: db.Connection, run_id: str) -> Row:
    """Return the row of a run with its `graph`; raise `NotFound` with the ids that begin so."""
    known = dict(_graphs)
    is_id = payload.is_storable(run_id)
    found = None
    if is_id:
        found = statements.run_page.head(conn, run_id=run_id, known=[*known], most=MOST_BYTES)
    if found is None:
        days = config.RUN_RETENTION_DAYS.read()
        text = f"no run {display.line(run_id, 80)}: it never was here, or it was deleted after its "
        among = identity.uuid_range(run_id) if is_id else None
        near = among and statements.history_rows.ids_in_range(
            conn, prefix=run_id, low=among[0], high=among[1], limit=5
        )
        ids = [row["id"] for row in near or () if row["kind"] == "run"]
        raise view.NotFound(
            f"{text}{days:g} days", [(id_, view.path("/runs/", id_)) for id_ in ids]
        )
    over = found["status"] in TERMINAL_RUN_STATUSES
    end = found["finished_at"] if over and found["finished_at"] else found["read_at"]
    begin = found["queued_at"] or found["created_at"]
    took_s = max(0.0, (end - begin).total_seconds())
    return found | {"graph": _graph(found, known), "over": over, "took_s": took_s}


def _with_attempts(
    conn: db.Connection,
    head: Row,
    nodes: list[Row],
    chosen: list[str] | None,
    *,
    whole: bool = False,
) -> list[JsonDict]:
    """Return the nodes with their attempts; `chosen` None: these are all nodes of the run."""
    events = statements.run_page.events(
        conn, run_id=head["id"], nodes=chosen, whole=whole, limit=EVENTS
    )
    by_node: dict[str, list[Row]] = {}
    for event in reversed(events):
        by_node.setdefault(event["node_id"], []).append(event)
    return [
        node | {
            "attempts_failed": node["attempts"],
            "attempts": attempt_history.build(
                node, by_node.get(node["node_id"], ()), (), reopened=head["queued_at"]
            )
        }
        for node in nodes
    ]  # fmt: skip


def _counted(conn: db.Connection, head: Row) -> JsonDict:
    """Return the run's `steps`, its nodes by state as `counts`, and how many are `done`."""
    steps = statements.run_page.steps(conn, run_id=head["id"])
    counts: Counter[str] = Counter()
    for step in steps:
        counts.update(step["counts"])
        step["state"] = timeline.state_of(step["counts"])
    queued = counts.total()
    of_graph = queued - sum(step["of_items"] for step in steps)
    waiting = max(0, (head["graph"].total if head["graph"] else 0) - of_graph)
    done = counts["completed"] + counts["skipped"]
    total = queued + waiting
    return {
        "steps": steps, "counts": counts | Counter(waiting=waiting), "done": done, "total": total,
        "queued": queued,
    }  # fmt: skip


def _state(conn: db.Connection, run_id: str, sees: bool) -> JsonDict:
    """Return the values of a run's state and time line."""
    head = run_row(conn, run_id)
    found = _counted(conn, head)
    large = found["queued"] > timeline.MOST
    rows = statements.run_page.nodes(conn, run_id=run_id, active=large, limit=timeline.MOST)
    chosen = [row["node_id"] for row in rows] if large else None
    nodes = _with_attempts(conn, head, rows, chosen)
    steps = found["steps"] if large else []
    return found | {
        "run": head,
        "large": large,
        "table": timeline.table(
            nodes, steps, head["queued_at"] or head["created_at"], head["read_at"]
        ),
        "cost": timeline.cost(nodes),
        "sentence": sentence(head, found["counts"], nodes, sees=sees),
        "maps": statements.overview.maps(conn, run=run_id),
        "acts": acts.list(kind="run", subject=run_id, limit=5, conn=conn) if sees else [],
    }


def sentence(
    head: Row, counts: Mapping[str, int], nodes: Iterable[JsonDict], *, sees: bool = True
) -> str:
    """Return the state of a run in a sentence; without errors if they may not be seen."""
    status, took = head["status"], display.duration(head["took_s"])
    if status == "completed":
        failed = counts.get("failed", 0)
        but = f", {display.counted(failed, 'node')} failed" if failed else ""
        return f"completed in {took}{but}"
    if status == "failed":
        node = next((node for node in nodes if node["status"] == "failed"), None)
        error = head["error"] if node is None else node["error"]
        text = display.line(view.redacted(error or "no error"), 300) if sees else "an error"
        if node is None:
            return f"failed: {text}"
        tries = f"attempt {node['attempts_failed']} of {node['max_attempts']}"
        return f"failed: node {display.line(node['node_id'], 100)}, {text}, {tries}"
    if status == "queued":
        if head["available_at"]:
            return f"waits: its start is tried again {display.moment(head['available_at'])}"
        return "waits: no orchestrator has started it yet"
    if status != "running":
        return f"{display.line(status, 40)} after {took}"
    running = [node for node in nodes if node["status"] == "running"]
    waits = _waits(counts, nodes)
    if running:
        hosts = sorted({node["claimed_by"] for node in running if node["claimed_by"]})
        on = f" on {', '.join(map(display.line, hosts[:3]))}" if hosts else ""
        more = f"; waits: {waits}" if waits else ""
        return f"runs: {display.counted(len(running), 'node')}{on}{more}"
    return f"waits: {waits}" if waits else f"runs for {took}"


def _waits(counts: Mapping[str, int], nodes: Iterable[JsonDict]) -> str:
    """Return `4 nodes, 3 of them for a gpu worker with sdxl, 1 for an answer`, or ""."""
    groups: Counter[str] = Counter()
    for node in nodes:
        if node["status"] == "awaiting_input":
            groups["their runs" if node["child_run_id"] else "an answer"] += 1
        elif node["status"] == "queued":
            worker = f"a {node['queue']} worker"
            if model := node["required_model"]:
                worker += f" with {display.line(model, 60)}"
            groups[timeline.CLAUSES.get(node["blocked_reason"] or "", worker)] += 1
    total = counts.get("queued", 0) + counts.get("awaiting_input", 0)
    if not total:
        return ""
    some = [f"{count} for {what}" for what, count in groups.most_common(3)]
    if some and len(groups) > 1:
        some[0] = some[0].replace(" for ", " of them for ", 1)
    elif groups.total() == total:
        return f"{display.counted(total, 'node')} for {groups.most_common(1)[0][0]}"
    return ", ".join([display.counted(total, "node"), *some])


# --- one node ----------------------------------------------------------------------------------


def _node(conn: db.Connection, run_id: str, name: str, claim: int | None, sees: bool) -> JsonDict:
    """Return the values of a node's panel, with an attempt, by default the last."""
    head = run_row(conn, run_id)
    row = None
    if payload.is_storable(name):
        row = statements.run_page.node(conn, run_id=run_id, node=name, most=MOST_BYTES)
    if row is None:
        return {"run": head, "node": None, "name": name, "waits_for": _waits_for(conn, head, name)}
    (node,) = _with_attempts(conn, head, [row], [name], whole=True)
    attempts = node["attempts"]
    chosen = next((each for each in attempts if each["claim_no"] == claim), None)
    chosen = chosen or (attempts[-1] if attempts else None)
    spec = stored_json.mapping(row["input_spec"])
    found: JsonDict = {
        "prompt": stored_json.text(spec.get("prompt")), "run": head, "name": name, "node": node,
        "chosen": chosen, "curves": [], "log": None, "steps": [], "deaths": [],
        "cost": timeline.cost([node]),
        "asks": row["status"] == "awaiting_input" and not row["child_run_id"],
        "parts": item_ids.split(name),
    }  # fmt: skip
    if chosen is not None:
        found |= _machine(conn, chosen, head["read_at"])
        if sees:
            found["log"] = _log(conn, run_id, name, chosen["claim_no"])
    if sees and row["steps"]:
        found["steps"] = statements.run_page.job_steps(conn, job=row["id"], limit=PAGE)
    return found


def _waits_for(conn: db.Connection, head: Row, name: str) -> list[Row]:
    """Return the dependencies of a node without a job; raise `NotFound` for no such node."""
    run_id = head["id"]
    definition = statements.runs.definition(conn, run_id=run_id)
    entry = stored_graph.graph_nodes(definition).get(name)
    if entry is None and payload.is_storable(name):
        entry = stored_graph.waiting(conn, run_id, definition, [name]).get(name)
    if entry is None:
        meant = stored_graph.hint(conn, run_id, name)
        text = f"run {display.line(run_id, 80)} has no node {display.line(name, 120)}{meant}"
        raise view.NotFound(text, near=[(f"run {run_id}", view.path("/runs/", run_id))])
    deps = [*entry["deps"]][:PAGE]
    rows = statements.history_rows.node_states(conn, run_id=run_id, nodes=deps)
    states = {row["node_id"]: row["status"] for row in rows}
    return [{"name": dep, "state": states.get(dep, "waiting")} for dep in deps]


def _machine(conn: db.Connection, attempt: JsonDict, now: datetime) -> JsonDict:
    """Return the curves of an attempt's machine, and where it died on them."""
    begin, host = attempt["claimed_at"], attempt["host_label"]
    end = attempt["ended_at"] or now
    if begin is None or not host or not types.is_name(host) or end <= begin:
        return {}
    samples = hw_metrics.look_back(host, since=begin, until=end, conn=conn)
    kinds = attempt_history.DEATHS
    deaths = [event for event in attempt["events"] if event["event_type"] in kinds]
    return {
        "curves": strip.curves(samples, begin, end),
        "deaths": [strip.place(event["at"], begin, end) for event in deaths],
    }


def _log(conn: db.Connection, run_id: str, node: str, claim: int) -> JsonDict | None:
    row = statements.run_page.log(conn, run_id=run_id, node=node, claim=claim)
    if row is None:
        return None
    found = attempt_history.log_of(row)
    lines = display.lines(view.redacted(found["text"].rstrip("\r\n")))
    return found | {"lines": lines, "linked": len(lines) <= LOG_LINES, "at": row["updated_at"]}


# --- pages -------------------------------------------------------------------------------------


@router.get("/runs/{run_id}")
async def run(
    request: Request, run_id: view.Segment, node: view.Text = None, attempt: int | None = None,
    show: Literal["time", "graph", "list"] = "time", lit: view.Text = None,
    zoom: Annotated[int, fastapi.Query(ge=10, le=200)] = 100,
) -> Response:  # fmt: skip
    """Show a run with its time line, or its graph, or one of its nodes."""
    sees = session.of(request).sees_values
    shown = command("show", run_id)
    if node is not None:
        found = await view.read(request, _node, run_id, node, attempt, sees)
        shown += f" --node {shlex.quote(node)}"
        found["actions"] = _node_actions(found)
        title = f"{node} of run {run_id}"
        return view.page(request, "run_node.html", title=title, command=shown, **found)
    if show != "time":
        found = await view.read(request, _drawn, run_id, lit, sees) | {"zoom": zoom}
        drawn: Graph | None = found["drawn"]
        if drawn is not None and show == "graph":
            # The first layout takes up to 0.3 s, for which the event loop would stand still.
            await state.of(request).reads.run(lambda: drawn.drawing)
    else:
        found = await view.read(request, _state, run_id, sees)
    found["actions"] = _run_actions(found["run"], found["counts"])
    title = f"Run {run_id}"
    return view.page(request, "run.html", title=title, command=shown, show=show, **found)


def command(name: str, run_id: str) -> str:
    """Return the command for a run."""
    begins = "-- " if run_id.startswith("-") else ""
    return f"queue-workflows {name} {begins}{shlex.quote(run_id)}"


@router.get("/runs/{run_id}/live")
async def live(request: Request, run_id: view.Segment) -> Response:
    """Return the part of a run's page that changes while it runs."""
    sees = session.of(request).sees_values
    return await view.fragment(
        request, "run_state.html", lambda: view.read(request, _state, run_id, sees)
    )


@router.get("/runs/{run_id}/why")
async def why(request: Request, run_id: view.Segment) -> Response:
    """Return why the first waiting nodes wait: for each, the reason of each live worker."""
    check_values(request)

    def read(conn: db.Connection) -> JsonDict:
        is_id = payload.is_storable(run_id)
        found = waiting_reasons.of_run(conn, run_id, EXPLAINED) if is_id else None
        return found or {"detail": None, "nodes": [], "left_out": 0}

    async def make() -> JsonDict:
        return {"why": await view.read(request, read)}

    return await view.fragment(request, "run_why.html", make)


def _drawn(conn: db.Connection, run_id: str, lit: str | None, sees: bool) -> JsonDict:
    """Return the graph of a run with the states of its boxes; `lit`: whose path is marked."""
    head = run_row(conn, run_id)
    found = _counted(conn, head)
    drawn: Graph | None = head["graph"]
    states = {step["step"]: step["state"] for step in found["steps"]}
    totals = {step["step"]: step["counts"] for step in found["steps"]}
    if drawn is not None and not drawn.are_steps:
        rows = statements.history_rows.node_states(conn, run_id=run_id, nodes=[*drawn.deps])
        states = {row["node_id"]: row["status"] for row in rows}
    maps = {row["node_id"]: row for row in statements.overview.maps(conn, run=run_id)}
    return found | {
        "lit": layered.path_of(drawn.deps, lit) if drawn and lit in drawn.deps else set[str](),
        "chosen": lit, "run": head, "drawn": drawn, "states": states, "by_step": totals,
        "by_map": maps,
        "sentence": sentence(head, found["counts"], (), sees=sees),
    }  # fmt: skip


# --- logs and values ---------------------------------------------------------------------------


@router.get("/runs/{run_id}/log")
async def log(
    request: Request,
    run_id: view.Segment,
    node: Name,
    attempt: Annotated[int, fastapi.Query(ge=0, le=2**62)],
) -> Response:
    """Return the stored log of an attempt as a download."""
    check_values(request)

    def read(conn: db.Connection) -> str:
        is_id = payload.is_storable(run_id) and payload.is_storable(node)
        found = _log(conn, run_id, node, attempt) if is_id else None
        if found is None:
            raise view.NotFound(f"no log of attempt {attempt} is stored")
        return "\n".join(found["lines"]) + "\n"

    return download(await view.read(request, read), f"attempt-{attempt}.log")


@router.get("/runs/{run_id}/value")
async def value(
    request: Request,
    run_id: view.Segment,
    name: Literal["inputs", "output"],
    node: view.Text = None,
) -> Response:
    """Return a whole value of a run or node as a download, redacted."""
    check_values(request)
    given = {"run_id": run_id, "node": node, "name": name}
    storable = all(payload.is_storable(text) for text in given.values() if text is not None)

    def read(conn: db.Connection) -> Any:
        return statements.run_page.value(conn, **given) if storable else None

    found = await view.read(request, read)
    # A large value takes long, and the redactor is code of the app.
    text = await state.of(request).reads.run(lambda: display.strict_json(view.redacted(found)))
    return download(text, f"{name}.json")


def check_values(request: Request) -> None:
    """Refuse values to the scope `look`, and a search by values, which shows them by guesses."""
    if not session.of(request).sees_values:
        raise forms.Refused(
            403, "Your session has scope look, which sees no values; read is needed."
        )


def attachment(name: str) -> dict[str, str]:
    """Return the headers of a file that a browser stores and never opens."""
    return {"content-disposition": f"attachment; filename*=UTF-8''{quote(name, safe='')}"}


def download(text: str, name: str) -> Response:
    """Return a text as a download."""
    content = text.encode("utf-8", "backslashreplace")
    return Response(content, media_type="application/octet-stream", headers=attachment(name))


# --- actions -----------------------------------------------------------------------------------


def _run_actions(head: Row, counts: Mapping[str, int]) -> list[forms.Action]:
    """Return the actions on a run that work in its state."""
    where, shown = view.path("/runs/", head["id"]), display.line(head["id"], 80)
    if not head["over"]:
        waiting = sum(counts.get(name, 0) for name in ("queued", "awaiting_input", "waiting"))
        running, children = counts.get("running", 0), head["children"] or ()
        live = sum(each["status"] not in TERMINAL_RUN_STATUSES for each in children)
        text = (
            f"Cancel run {shown}: {waiting} of its nodes wait and are cancelled, {running} run and "
            "are asked to stop"
        )
        if len(children) > CHILDREN:
            text += ", the child runs that are not over too"
        elif live:
            text += f", {display.counted(live, 'child run')} too"
        text += "."
        to = f"{where}/cancel"
        return [forms.Action(to, "Cancel", "submit", {}, "ends", text, asks_reason=True)]
    if head["status"] == "completed":
        return []
    again = counts.get("failed", 0) + counts.get("cancelled", 0)
    nodes = display.counted(again, "node")
    text = f"Run {nodes} of run {shown} again; completed ones keep their outputs."
    return [forms.Action(f"{where}/retry", "Retry failed nodes", "submit", {}, "makes", text)]


def _node_actions(found: JsonDict) -> list[forms.Action]:
    head, node = found["run"], found["node"]
    if node is None or not head["over"] or node["status"] == "running":
        return []
    fields = {"node": found["name"]}
    text = f"Run node {display.line(found['name'], 120)} and all that depends on it again."
    to = view.path("/runs/", head["id"], "retry")
    return [forms.Action(to, "Retry from here", "submit", fields, "makes", text)]


@router.post("/runs/{run_id}/cancel")
async def cancel(request: Request, run_id: view.Segment) -> Response:
    """Cancel a run."""
    form = await forms.act(request, "submit")
    done = await form.run(runs.cancel, run_id)
    text = "The run is cancelled." if done else "The run is over already."
    return form.done(text, back=view.path("/runs/", run_id))


@router.post("/runs/{run_id}/retry")
async def retry(request: Request, run_id: view.Segment) -> Response:
    """Run the failed nodes of a run again, or a node with all that depends on it."""
    form = await forms.act(request, "submit")
    node = form.values.get("node") or None
    await form.run(runs.retry, run_id, from_node=node)
    return form.done("The run is queued again.", back=view.path("/runs/", run_id))


@router.get("/runs/{run_id}/again")
async def changed(request: Request, run_id: view.Segment) -> Response:
    """Show a form with the inputs of a run, for another run with changed ones."""
    check_values(request)
    head = await view.read(request, run_row, run_id)
    inputs = view.editable(head["context"])
    command = f"queue-workflows submit {shlex.quote(head['workflow_name'])}"
    title = f"Run {head['workflow_name']} again"
    return view.page(
        request, "run_again.html", title=title, command=command, run=head, inputs=inputs
    )


@router.post("/runs/{run_id}/again")
async def again(request: Request, run_id: view.Segment) -> Response:
    """Submit a run of the same workflow with the inputs of the form; it names this one."""
    form = await forms.act(request, "submit")
    inputs = catalog.json_object(form.values.get("inputs", ""))

    def submit() -> types.Run:
        old = runs.get(run_id) if payload.is_storable(run_id) else None
        if old is None:
            raise errors.UnknownJob(f"there is no run {run_id!r:.80}")
        if config.get_config().workflow_loader is not None:
            workflow_check.workflow(old["workflow_name"])
        return runs.submit(
            old["workflow_name"],
            inputs=inputs,
            priority=old["priority"],
            headers={"again_of": run_id},
        )

    made = await form.run(submit)
    return form.done(f"Run {made['id']} is queued.", back=view.path("/runs/", made["id"]))
