"""Define `queue-workflows show RUN|JOB`: show what happened, by node and attempt."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence

from queue_workflows import db, errors, history
from queue_workflows.admin import job_history, stored_graph
from queue_workflows.cli import command, define, ids, output, run_views, texts
from queue_workflows.dag import item_ids
from queue_workflows.db import statements
from queue_workflows.runtime import display
from queue_workflows.types import JsonDict, Row

_STEPS_HEAD = ("step", "key", "state", "tries", "crashes", "claim", "ended (UTC)", "")
CUT = 100
"""Characters of a step's result, error or arguments that are shown without --full."""
PAGE = 200
"""Nodes that are in memory at once if all of a run's nodes are shown."""


@define.command(
    "show",
    f"RUN|JOB  The id of a run or a job. {ids.PREFIX_HELP}",
    """--node NODE  Only this node of the run; repeatable.
    --item KEY  Only this item of a map: its state and nodes.
    --round N 1..  Only the nodes of this round of a loop.
    --full  Every node in detail, values and logs uncut; --json: every log.
    --follow  Show what happens until it is over.
    --steps  The steps of a job that are recorded.""",
)
def show(
    what: str, node: list[str] | None = None, item: str | None = None, round_no: int | None = None,
    full: bool = False, follow: bool = False, steps: bool = False, *, as_json: bool, debug: bool,
) -> int | define.Shown:  # fmt: skip
    """Show a run or a job: attempts, inputs, output, traceback, log.

    With --follow the exit code is that of `run`: 0: completed, 1: failed or cancelled, 130: left.
    """
    kind, any_id = ids.found(what)
    is_part = bool(node or item or round_no)
    if is_part and kind != "run":
        raise errors.InvalidConfig(
            f"--node, --item and --round need a run: {kind} {any_id} has no nodes of its own"
        )
    if steps:
        return _steps(kind, any_id, full=full)
    wanted = [*(node or ()), *_chosen(any_id, item, round_no)] if is_part else None
    if follow:
        return _follow(kind, any_id, wanted, item, as_json=as_json, full=full or debug)
    # A page of text reads the logs of the nodes that it prints.
    logs = (True if full else None) if as_json else False
    shown = collect(kind, any_id, wanted, item, every=as_json or full, logs=logs)
    if not as_json and is_part and item is None:
        shown["loops"] = []  # If single nodes are shown, a line about their loop would be wrong.
    return define.Shown(shown, lambda: print_out(shown, full=full, chosen=is_part))


def _chosen(run_id: str, item: str | None, round_no: int | None) -> list[str]:
    """Return the nodes of an item and of a round. Raises `InvalidConfig` for one without nodes."""
    found: list[str] = []
    with db.transaction() as conn:
        if item is not None:
            if (nodes := stored_graph.listed(conn, run_id, item)) is None:
                hint = stored_graph.key_hint(conn, run_id, item)
                raise errors.InvalidConfig(f"run {run_id} has no --item {item}{hint}")
            found += nodes
        if round_no is not None:
            if (nodes := stored_graph.of_round(conn, run_id, round_no)) is None:
                raise errors.InvalidConfig(f"run {run_id} has no --round {round_no}")
            found += nodes
    return found


def _items(run_id: str, key: str) -> list[Row]:
    with db.transaction() as conn:
        return statements.overview.items(conn, run=run_id, keys=[key])


def collect(
    kind: str, any_id: str, nodes: Sequence[str] | None = None, item: str | None = None, *,
    every: bool = True, logs: bool | None = None,
) -> JsonDict:  # fmt: skip
    """Return what `--json` shows; `logs` as in `history.get_run`.

    Without `nodes`, those that a person wants to see first, or an iterator over `every` node, which
    reads PAGE at a time. With `item`, a key, also `items`: the items that have it. Raises
    `UnknownJob` if the run or job is gone, and `InvalidConfig` for a node that it does not have.
    """
    if kind != "run":
        shown = history.get_job(any_id)
    elif nodes is not None:
        shown = history.get_run(any_id, nodes=nodes, logs=logs)
    elif every:
        shown = _paged(any_id, logs)
    else:
        with db.transaction() as conn:
            names = job_history.names_to_show(conn, any_id, most=texts.SMALL, some=texts.SHOWN)
            shown = history.get_run(any_id, nodes=names, logs=logs, conn=conn)
    if shown is None:
        raise errors.UnknownJob(f"{kind} {any_id!r} is gone")
    known = {node["node_id"] for node in shown["nodes"]} if nodes else set[str]()
    if missing := [name for name in nodes or () if name not in known]:
        with db.transaction() as conn:
            meant = stored_graph.hint(conn, any_id, missing[0])
        raise errors.InvalidConfig(f"run {any_id} has no --node {missing[0]}{meant}")
    if kind == "run":
        # The loops of the whole run, or those of the items that have these nodes.
        is_part, loops = nodes is not None, shown["loops"]
        shown["loops"] = [each for each in loops if item_ids.of_item(each["node_id"]) is is_part]
    if item is not None:
        shown["items"] = _items(any_id, item)
    return shown


def _paged(run_id: str, logs: bool | None) -> JsonDict | None:
    """Return a run whose `nodes`, its last member, is an iterator that reads them by pages."""
    first = history.get_run_page(run_id, limit=PAGE, logs=logs)
    if first is None:
        return None

    def nodes() -> Iterator[JsonDict]:
        page: JsonDict | None = first
        while page is not None:
            yield from page["nodes"]
            after = page["next"]
            page = after and history.get_run_page(run_id, after=after, limit=PAGE, logs=logs)

    return {name: first[name] for name in first if name != "next"} | {"nodes": nodes()}


def print_out(shown: JsonDict, *, full: bool, chosen: bool = False) -> None:
    """Print what `collect` returned as a page cut to the terminal, unless `full`."""
    page = run_views.Page(full=full)
    if shown["kind"] == "run":
        page.run(shown, chosen=chosen)
    else:
        page.job(shown)


def _follow(
    kind: str, any_id: str, nodes: Sequence[str] | None, item: str | None, *, as_json: bool,
    full: bool,
) -> int:  # fmt: skip
    """Follow a run or job to its end, and print or dump it; return the exit code."""
    say = command.print_message if as_json else output.echo_now
    from queue_workflows.cli import follow

    text = command.STOPS_VIEW.format(f"the {'run' if kind == 'run' else 'job'}")
    with command.until_stopped(lambda: text) as stop:
        if kind == "run":
            if nodes is not None:
                collect(kind, any_id, nodes, logs=False)
            follower = follow.Follower(
                run_views.Lines(say), stop, printing_queues=tuple, nodes=nodes, asks=False
            )
            if (seen := follower.follow(any_id)) is None:
                return follow.left(kind, any_id)
            if as_json:
                output.dump(collect(kind, any_id, nodes, item, logs=True if full else None))
                return follow.exit_code(seen)
            for each in _items(any_id, item) if item else ():
                output.echo_now(texts.item_text(each))
            return follow.finish(seen, as_json=False, debug=full)
        if (ended := follow.job(kind, any_id, say, stop)) is None:
            return follow.left(kind, any_id)
    if as_json:
        output.dump(ended)
    else:
        run_views.Page(full=full).end(ended)
    return 0 if ended["status"] in texts.DONE else 1


def _steps(kind: str, job_id: str, *, full: bool) -> define.Shown:
    """Return the recorded steps of a job. Raises `InvalidConfig` for a run."""
    if kind == "run":
        raise errors.InvalidConfig(
            f"--steps needs the job of a node, and {job_id} is a run; "
            f"`{command.PROG} show {shlex.quote(job_id)} --node NODE` shows the job of a node"
        )
    from queue_workflows import jobs

    steps = jobs.steps(job_id)

    def print_steps() -> None:
        if not steps:
            output.echo(f"{kind} {job_id} has recorded no steps")
        elif not full:
            output.table(_STEPS_HEAD, map(_cells, steps))
        for step in steps if full else ():
            output.echo("  ".join(str(cell) for cell in _cells(step)[:-1] if cell != ""))
            for name in ("arguments", "output", "error"):
                if step[name]:
                    output.echo(f"  {name}: {step[name]}")

    return define.Shown({"kind": kind, "id": job_id, "steps": steps}, print_steps)


def _cells(step: Row) -> tuple[object, ...]:
    outcome = f"until {display.moment(step['due_at'])}" if step["due_at"] else ""
    if step["state"] == "failed":
        outcome = step["error"] or ""
    elif step["kind"] == "cursor":
        outcome = f"{step['position']} done"
    elif step["state"] == "done":
        outcome = step["output"] or ""
    return (
        step["name"] if step["kind"] == "step" else f"{step['kind']} {step['name']}",
        step["key"], step["state"], step["attempts"], step["crashes"], step["claim_no"],
        display.moment(step["ended_at"]) if step["ended_at"] else "",
        output.line(outcome, CUT),
    )  # fmt: skip
