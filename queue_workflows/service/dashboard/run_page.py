"""Show one run: its state in a sentence, time line, cost, graph, nodes and their logs."""

from __future__ import annotations

import functools
import shlex
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Final, Literal
from urllib.parse import quote

import fastapi
from starlette.requests import Request
from starlette.responses import Response

from queue_workflows import acts, config, db, errors, hw_metrics, jobs, runs, types
from queue_workflows import check as workflow_check
from queue_workflows.admin import attempt_history, stored_graph
from queue_workflows.dag import graph, item_ids
from queue_workflows.db import statements
from queue_workflows.requests import catalog
from queue_workflows.runtime import display, identity, stored_json
from queue_workflows.service import state
from queue_workflows.service.dashboard import forms, layered, session, strip, timeline, view
from queue_workflows.types import TERMINAL_RUN_STATUSES, JsonDict, Row

router = fastapi.APIRouter()
MOST_BYTES: Final = 262_144
"""Bytes of a value, beyond which a page only links to it."""
EVENTS: Final = 5_000
"""Events that the attempts of a page are made from, the newest."""
STEPS: Final = 250
"""Steps in the time line of a large run."""
GRAPHS: Final = 20
"""Drawings that are kept; the largest take a megabyte each."""
EXPLAINED: Final = 10
"""Nodes whose reasons to wait are shown."""
CHILDREN: Final = 20
"""Child runs that a page lists; one more is read."""
_UNQUEUED: Final[Row] = {"counts": {}, "of_items": 0}
"""The row of a step, or of a run, without jobs."""
Name = Annotated[str, fastapi.Query(max_length=1000)]
Attempt = Annotated[int | None, fastapi.Query(ge=0, le=2**62)]
Show = Literal["time", "graph", "list"]


# --- the run -----------------------------------------------------------------------------------


def ids_with(conn: db.Connection, prefix: str, *kinds: str) -> list[tuple[str, str]]:
    """Return the first ids of runs or jobs (`kinds`) with this beginning, each with its path."""
    among = identity.uuid_range(prefix)
    if among is None:
        return []
    rows = statements.history_rows.ids_in_range(
        conn, prefix=prefix, low=among[0], high=among[1], limit=5
    )
    chosen = [(row["kind"], row["id"]) for row in rows if row["kind"] in kinds]
    return [(id_, view.path("/runs/" if kind == "run" else "/jobs/", id_)) for kind, id_ in chosen]


def run_row(conn: db.Connection, run_id: str) -> Row:
    """Return the row of a run; raise `NotFound` with the ids that start with `run_id`."""
    found = statements.run_page.head(conn, run_id=run_id, most=MOST_BYTES)
    if found is None:
        days = config.RUN_RETENTION_DAYS.read()
        text = f"no run {display.line(run_id, 80)}: it never was here, or it was deleted after its "
        raise view.NotFound(f"{text}{days:g} days", ids_with(conn, run_id, "run"))
    over = found["status"] in TERMINAL_RUN_STATUSES
    begin = found["queued_at"] or found["created_at"]
    end = (over and found["finished_at"]) or found["read_at"]
    took_s = max(0.0, (end - begin).total_seconds())
    return found | {"over": over, "begin": begin, "took_s": took_s}


def _run(
    conn: db.Connection, run_id: str, sees: bool, show: Show, lit: str | None, zoom: int
) -> JsonDict:
    """Return the values of a run's page: its state, and its time line or its graph.

    `lit`: the box whose path is marked. `zoom`: the size of the graph in percent. `sentence` is
    called when the page is rendered, as it calls the redactor, which is code of the app.
    """
    head = run_row(conn, run_id)
    rows = statements.run_page.steps(conn, run_id=run_id, limit=layered.MOST + 1)
    whole, *steps = rows or [_UNQUEUED]
    queued = sum(whole["counts"].values())
    counts = _with_waiting(whole, head["graph_nodes"])
    large = queued > timeline.MOST
    nodes = statements.run_page.nodes(conn, run_id=run_id, active=large, limit=timeline.MOST)
    maps = statements.overview.maps(conn, run=run_id)
    found: JsonDict = {
        "run": head, "show": show, "zoom": zoom, "large": large, "maps": maps,
        "counts": counts, "done": _done(counts), "queued": queued, "total": sum(counts.values()),
        "sentence": functools.partial(sentence, head, counts, nodes, sees),
        "actions": _run_actions(head, counts),
    }  # fmt: skip
    if show != "time":
        return found | _drawn(conn, head, None if large else nodes, steps, maps, lit)
    shown = steps[:STEPS] if large else []
    nodes = nodes[: timeline.MOST - len(shown)]
    names = [node["node_id"] for node in nodes] if large else None
    is_cut = _add_attempts(conn, head, nodes, names)
    return found | {
        "table": timeline.table(nodes, shown, head["begin"], head["read_at"]),
        "cost": timeline.cost(nodes),
        "is_cut": is_cut,
        "steps_cut": len(shown) < len(steps),
        "acts": acts.list(kind="run", subject=run_id, limit=5, conn=conn) if sees else [],
    }


def _with_waiting(row: Row, nodes: int) -> dict[str, int]:
    """Return the `counts` of a row of `steps`, with the `nodes` of its graph that lack a job."""
    waiting = nodes - sum(row["counts"].values()) + row["of_items"]
    return row["counts"] | ({"waiting": waiting} if waiting > 0 else {})


def _done(counts: Mapping[str, int]) -> int:
    return counts.get("completed", 0) + counts.get("skipped", 0)


def _add_attempts(
    conn: db.Connection,
    head: Row,
    nodes: Iterable[Row],
    names: list[str] | None,
    claim: int | None = None,
) -> bool:
    """Give nodes their `attempts` and the `spans` of these; return whether old ones are cut.

    The nodes have these `names`; without names they are all nodes of the run. With a `claim` the
    attempts have their errors and use, and the attempt of this claim has its traceback.
    """
    events = statements.run_page.events(
        conn, run_id=head["id"], nodes=names, claim=claim, limit=EVENTS
    )
    by_node: dict[str, list[Row]] = {}
    for event in reversed(events):
        by_node.setdefault(event["node_id"], []).append(event)
    for node in nodes:
        own = by_node.get(node["node_id"], ())
        node["attempts"] = attempt_history.build(node, own, (), reopened=head["queued_at"])
        node["spans"] = timeline.spans(node, head["read_at"])
    return len(events) == EVENTS


def sentence(head: Row, counts: Mapping[str, int], nodes: Sequence[Row], sees: bool) -> str:
    """Return the state of a run in a sentence; without errors if they may not be seen."""
    status, took = head["status"], view.span(head["took_s"])
    if status == "completed":
        failed = counts.get("failed", 0)
        but = f", {display.counted(failed, 'node')} failed" if failed else ""
        return f"completed in {took}{but}"
    if status == "failed":
        failed_nodes = [node for node in nodes if node["status"] == "failed"]
        # The error of the run names the node that ended it; nodes of items that may fail did not.
        begun = (head["error"] or "").startswith
        named = [node for node in failed_nodes if begun(f"node {node['node_id']} failed:")]
        node = next(iter(named or failed_nodes), None)
        error = head["error"] if node is None else node["error"]
        text = display.line(view.redacted(error or "no error"), 300) if sees else "an error"
        if node is None:
            return f"failed: {text}"
        tries = node["attempts_failed"]
        after = f", attempt {tries} of {node['max_attempts']}" if tries else ""
        return f"failed: node {display.line(node['node_id'], 100)}, {text}{after}"
    if status == "queued":
        if head["available_at"]:
            return f"waits: its start is tried again {display.moment(head['available_at'])}"
        return "waits: no orchestrator has started it yet"
    if status != "running":
        return f"{display.line(status, 40)} after {took}"
    waits = _waits(counts, nodes)
    if running := counts.get("running", 0):
        of_running = {node["claimed_by"] for node in nodes if node["status"] == "running"}
        hosts = sorted(host for host in of_running if host is not None)
        on = f" on {', '.join(map(display.line, hosts[:3]))}" if hosts else ""
        more = f"; waits: {waits}" if waits else ""
        return f"runs: {display.counted(running, 'node')}{on}{more}"
    return f"waits: {waits}" if waits else f"runs for {took}"


def _waits(counts: Mapping[str, int], nodes: Sequence[Row]) -> str:
    """Return `4 nodes, 3 of them for a gpu worker with sdxl, 1 for an answer`, or ""."""
    total = sum(counts.get(status, 0) for status in timeline.WAITS)
    waiting = [node for node in nodes if node["status"] in timeline.WAITS]
    causes = Counter(map(timeline.waits_for, waiting)).most_common(3)
    if total and len(causes) == 1 and len(waiting) == total:
        return f"{display.counted(total, 'node')} for {causes[0][0]}"
    them = [" of them", "", ""] if len(causes) > 1 else [""]
    some = [f"{n}{of} for {cause}" for (cause, n), of in zip(causes, them, strict=False)]
    return ", ".join([display.counted(total, "node"), *some]) if total else ""


# --- its graph ---------------------------------------------------------------------------------


_graphs: dict[str | None, JsonDict] = {}
"""By `definition_hash`."""


def _graph(conn: db.Connection, head: Row) -> JsonDict | None:
    """Return the graph of a run: `deps` of its boxes, the `deep` ones, their `drawing`, a `note`.

    It is None before the first start. Boxes that are maps or child runs are deep. A graph that is
    too large for a drawing has its steps as boxes (`are_steps`), or no boxes. `sizes` has the
    number of nodes of each step.
    """
    if (known := _graphs.get(head["definition_hash"])) is not None:
        return known
    definition = statements.runs.definition(conn, run_id=head["id"])
    if definition is None:
        return None
    entries = stored_graph.graph_nodes(definition)
    entries.pop(graph.OUTPUT, None)
    nodes = {name: [*dict.fromkeys(entry["deps"])] for name, entry in entries.items()}
    steps: dict[str, dict[str, None]] = {}
    for name, deps in nodes.items():
        own = steps.setdefault(name.partition("/")[0], {})
        own.update(dict.fromkeys(dep.partition("/")[0] for dep in deps))
    boxes: dict[str, list[str]] = nodes
    note = ""
    if not _fits(nodes):
        boxes = {step: [dep for dep in own if dep != step] for step, own in steps.items()}
        note = f"Steps only: the graph has {len(nodes):,} nodes."
    if not _fits(boxes):
        boxes = {}
        note = f"Too large to draw: {len(steps):,} steps. The time line has the first."
    deep = {
        name
        for name, entry in entries.items()
        if "map" in entry or graph.workflow_of(stored_json.text(entry.get("module")) or "")
    }
    made: JsonDict = {
        "deps": boxes, "note": note, "are_steps": boxes is not nodes, "deep": deep & {*boxes},
        "drawing": layered.draw(boxes),
        "sizes": Counter(name.partition("/")[0] for name in nodes),
    }  # fmt: skip
    if head["definition_hash"] is not None:
        if len(_graphs) >= GRAPHS:
            _graphs.clear()
        _graphs[head["definition_hash"]] = made
    return made


def _fits(deps: Mapping[str, Sequence[str]]) -> bool:
    return len(deps) <= layered.MOST and sum(map(len, deps.values())) <= layered.MOST_EDGES


def _drawn(
    conn: db.Connection,
    head: Row,
    nodes: Sequence[Row] | None,
    steps: Sequence[Row],
    maps: Sequence[Row],
    lit: str | None,
) -> JsonDict:
    """Return the graph of a run with its `boxes`, each with its state and how many of it are done.

    Only maps and steps have such a pair of counts. `lines` are the edges, and the edges of the lit
    path. Without `nodes` the states of the graph's nodes are read. The lit box may be the map or
    the step of the node `lit`.
    """
    drawn = _graph(conn, head)
    deps: dict[str, list[str]] = drawn["deps"] if drawn else {}
    done = {row["node_id"]: (row["done"], row["total"]) for row in maps}
    if drawn and drawn["are_steps"]:
        rows = {step["step"]: step for step in steps}
        sizes: dict[str, int] = drawn["sizes"]
        counts = {name: _with_waiting(rows.get(name, _UNQUEUED), n) for name, n in sizes.items()}
        states = {name: timeline.state_of(each) for name, each in counts.items()}
        done = {name: (_done(each), sum(each.values())) for name, each in counts.items()}
    else:
        if nodes is None:
            nodes = statements.history_rows.node_states(conn, run_id=head["id"], nodes=[*deps])
        states = {row["node_id"]: row["status"] for row in nodes}
    of_map = (lit or "").partition("[")[0]
    box = next((each for each in (lit, of_map, of_map.partition("/")[0]) if each in deps), None)
    path = set[str]() if box is None else layered.path_of(deps, box)
    lines: dict[bool, list[str]] = {False: [], True: []}
    for edge in drawn["drawing"].edges if drawn else ():
        lines[edge.source in path and edge.target in path].append(edge.path)
    return {
        "drawn": drawn, "chosen": box or lit, "lit": path,
        "boxes": [(name, states.get(name, "waiting"), done.get(name)) for name in deps],
        "lines": ["".join(each) for each in lines.values()],
    }  # fmt: skip


# --- one node ----------------------------------------------------------------------------------


def _node(conn: db.Connection, run_id: str, name: str, claim: int | None, sees: bool) -> JsonDict:
    """Return the values of a node's panel, with an attempt, by default the last."""
    head = run_row(conn, run_id)
    node = statements.run_page.node(conn, run_id=run_id, node=name, most=MOST_BYTES)
    if node is None:
        waits_for = _waits_for(conn, head, name)
        return {
            "run": head, "node": None, "name": name, "attempt": claim, "waits_for": waits_for,
            "actions": [],
        }  # fmt: skip
    number = node["claim_no"] if claim is None else claim
    is_cut = _add_attempts(conn, head, [node], [name], number)
    attempts: Sequence[JsonDict] = node["attempts"]
    last = attempts[-1] if attempts else None
    chosen = next((each for each in attempts if each["claim_no"] == number), last)
    prompt = stored_json.text(stored_json.mapping(node["input_spec"]).get("prompt"))
    text = f"Run node {display.line(name, 120)} and all that depends on it again."
    may = head["over"] and node["status"] != "running"
    found: JsonDict = {
        "run": head, "name": name, "node": node, "attempt": claim, "chosen": chosen,
        "is_cut": is_cut, "prompt": prompt, "curves": [], "deaths": [], "log": None, "steps": [],
        "cost": timeline.cost([node]), "parts": item_ids.split(name),
        "actions": [retried(head, "Retry from here", text, name)] if may else [],
    }  # fmt: skip
    if chosen is not None:
        found |= _machine(conn, chosen, head)
        if sees:
            found["log"] = _log(conn, run_id, name, chosen["claim_no"])
    if sees and node["steps"]:
        found["steps"] = statements.run_page.job_steps(conn, job=node["id"], limit=view.PAGE)
    return found


def _waits_for(conn: db.Connection, head: Row, name: str) -> list[Row]:
    """Return the first dependencies of a node without a job, the unfinished ones before others.

    Raises `NotFound` for no such node.
    """
    run_id = head["id"]
    definition = statements.runs.definition(conn, run_id=run_id)
    is_of_graph = name in stored_graph.graph_nodes(definition)
    if not is_of_graph and name not in stored_graph.waiting(conn, run_id, definition, [name]):
        meant = stored_graph.hint(conn, run_id, name)
        text = f"run {display.line(run_id, 80)} has no node {display.line(name, 120)}{meant}"
        raise view.NotFound(text, near=[(f"run {run_id}", view.path("/runs/", run_id))])
    found = states_of(conn, run_id, stored_graph.dependencies(definition, [name]).get(name, ()))
    return sorted(found, key=lambda each: each["state"] in ("completed", "skipped"))[: view.PAGE]


def states_of(conn: db.Connection, run_id: str, names: Sequence[str]) -> list[Row]:
    """Return `name` and `state` of these nodes; one without a job is `waiting`."""
    rows = statements.history_rows.node_states(conn, run_id=run_id, nodes=[*names])
    states = {row["node_id"]: row["status"] for row in rows}
    return [{"name": name, "state": states.get(name, "waiting")} for name in names]


def _machine(conn: db.Connection, attempt: JsonDict, head: Row) -> JsonDict:
    """Return the curves of an attempt's machine, and where it died on them."""
    begin, host = attempt["claimed_at"], attempt["host_label"]
    end = attempt["ended_at"] or head["read_at"]
    if begin is None or not host or not types.is_name(host) or end <= begin:
        return {}
    samples = hw_metrics.look_back(host, since=begin, until=end, conn=conn)
    deaths = [e["at"] for e in attempt["events"] if e["event_type"] in attempt_history.DEATHS]
    return {
        "curves": strip.curves(samples, begin, end),
        "deaths": [round(strip.WIDTH * timeline.share(at, begin, end), 1) for at in deaths],
    }


def _log(conn: db.Connection, run_id: str, node: str, claim: int) -> JsonDict | None:
    row = statements.run_page.log(conn, run_id=run_id, node=node, claim=claim)
    return None if row is None else attempt_history.log_of(row) | {"at": row["updated_at"]}


# --- pages -------------------------------------------------------------------------------------


@router.get("/runs/{run_id}")
async def run(
    request: Request, run_id: view.Segment, node: view.Text = None, attempt: Attempt = None,
    show: Show = "time", lit: view.Text = None,
    zoom: Annotated[int, fastapi.Query(ge=0, le=200)] = 100,
) -> Response:  # fmt: skip
    """Show a run with its time line, or its graph, or one of its nodes."""
    sees = session.of(request).sees_values
    if node is not None:
        return await view.live(
            request, "run_node_state.html", _node, run_id, node, attempt, sees,
            title=f"{node} of run {run_id}", command=command(run_id, node=node),
            page="run_node.html",
        )  # fmt: skip
    part = "run_state.html" if show == "time" else "run_graph.html"
    return await view.live(
        request, part, _run, run_id, sees, show, lit, zoom,
        title=f"Run {run_id}", command=command(run_id), page="run.html",
    )  # fmt: skip


def command(run_id: str, **options: str) -> str:
    """Return the command that shows a run, its item or node."""
    given = {name: display.line(text, None) for name, text in options.items()}
    begins = "-- " if run_id.startswith("-") else ""
    shown = view.command("queue-workflows show", given)
    return f"{shown} {begins}{shlex.quote(display.line(run_id, None))}"


@router.get("/runs/{run_id}/why")
async def why(request: Request, run_id: view.Segment, job: view.Text = None) -> Response:
    """Show why the first nodes of a run wait, or the job of one: each worker's reason."""
    check_values(request)

    def read(conn: db.Connection) -> JsonDict:
        none: JsonDict = {"nodes": [], "left_out": 0}
        if job is None:
            run = runs.explain(run_id, limit=EXPLAINED, conn=conn)
            return none if run is None else {key: run[key] for key in none}
        found = jobs.explain(job, conn=conn)
        return none if found is None else none | {"nodes": [found]}

    title = f"Why run {display.line(run_id, 80)} waits"
    command = f"queue-workflows why {shlex.quote(display.line(job or run_id, None))}"
    return await view.live(request, "run_why.html", read, title=title, command=command)


# --- logs and values ---------------------------------------------------------------------------


@router.get("/runs/{run_id}/value")
async def value(
    request: Request,
    run_id: view.Segment,
    name: Literal["inputs", "output", "log"],
    node: view.Text = None,
    attempt: Attempt = None,
) -> Response:
    """Return a value of a run or node, or the log of an attempt, whole and redacted."""
    check_values(request)

    def read(conn: db.Connection) -> Any:
        if name == "log":
            found = _log(conn, run_id, node or "", attempt or 0)
        else:
            found = statements.run_page.value(conn, run_id=run_id, node=node, name=name)
        if found is None:
            raise view.NotFound(f"no such {name} is stored")
        return found

    found = await view.read(request, read)
    if name == "log":
        return await log_file(request, found, f"{attempt}")
    return await value_file(request, found, f"{name}.json")


def check_values(request: Request) -> None:
    """Refuse values to the scope `look`, and a search by values, which shows them by guesses."""
    if not session.of(request).sees_values:
        raise forms.Refused(
            403, "Your session has scope look, which sees no values; read is needed."
        )


async def value_file(request: Request, found: Any, name: str) -> Response:
    """Return a JSON value, redacted, as a download."""
    # On a thread, since a large value takes long, and the redactor is code of the app.
    text = await state.of(request).reads.run(lambda: display.strict_json(view.redacted(found)))
    return download(text, name)


async def log_file(request: Request, log: JsonDict, attempt: str) -> Response:
    """Return a stored log without secrets as a download."""
    text: str = log["text"].rstrip("\r\n")
    shown = await state.of(request).renders.run(lambda: display.block(view.redacted(text)))
    return download(f"{shown}\n", f"attempt-{attempt}.log")


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
    shown = display.line(head["id"], 80)
    if head["status"] == "completed":
        return []
    if head["over"]:
        nodes = display.counted(counts.get("failed", 0) + counts.get("cancelled", 0), "node")
        text = f"Run {nodes} of run {shown} again; completed ones keep their outputs."
        return [retried(head, "Retry failed nodes", text)]
    waiting = sum(counts.get(name, 0) for name in (*timeline.WAITS, "waiting"))
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
    to = view.path("/runs/", head["id"], "cancel")
    return [forms.Action(to, "Cancel", "submit", {}, "ends", f"{text}.", asks_reason=True)]


def retried(head: Row, label: str, text: str, node: str | None = None) -> forms.Action:
    """Return the action that runs failed nodes again, or `node` with all that depends on it."""
    fields = {} if node is None else {"node": node}
    to = view.path("/runs/", head["id"], "retry")
    return forms.Action(to, label, "submit", fields, "makes", text)


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
    name = head["workflow_name"]
    return view.Page(
        request, "again.html", title=f"Run {name} again", kind="run", id=run_id, name=name,
        command=f"queue-workflows submit {shlex.quote(display.line(name, None))}",
        own=view.path("/runs/", run_id), values=head["context"],
    )  # fmt: skip


@router.post("/runs/{run_id}/again")
async def again(request: Request, run_id: view.Segment) -> Response:
    """Submit a run of the same workflow with the inputs of the form; it names this one."""
    form = await forms.act(request, "submit")
    inputs = catalog.json_object(form.values.get("inputs", ""))

    def submit() -> types.Run:
        old = runs.get(run_id)
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
