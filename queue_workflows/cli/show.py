"""Define `queue-workflows show RUN|JOB`: show what happened, by node and attempt."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Annotated, Any, TypeVar

from queue_workflows import db, errors, history
from queue_workflows.admin import item_nodes, overview
from queue_workflows.cli import (
    command,
    define,
    follow,
    ids,
    job_texts,
    options,
    output,
    report,
    run,
    run_snapshot,
    run_views,
    step_report,
)
from queue_workflows.db import statements
from queue_workflows.runtime import entry_point, signals
from queue_workflows.types import Row

T = TypeVar("T")


@define.command("show")
def show(
    what: Annotated[
        str,
        options.argument("RUN|JOB", f"The id of a run or a job, or its start. {ids.HELP}"),
    ],
    node: Annotated[
        list[str] | None, options.option("NODE", "Only this node of the run; repeatable.", "--node")
    ] = None,
    item: Annotated[
        str | None, options.option("KEY", "Only this item of a map: its state and nodes.", "--item")
    ] = None,
    round_no: Annotated[
        int | None, options.option("N", "Only the nodes of this round of a loop.", "--round", min=1)
    ] = None,
    full: Annotated[
        bool,
        options.flag("--full", "Every node in detail, values and logs uncut; --json: every log."),
    ] = False,
    follow: Annotated[
        bool, options.flag("--follow", "Show what happens until it is over.")
    ] = False,
    steps: Annotated[
        bool, options.flag("--steps", "The steps of a job that are recorded.")
    ] = False,
    *,
    as_json: bool,
    debug: bool,
) -> int | define.Shown:
    """Show a run or a job: attempts, inputs, output, traceback, log.

    With --follow the exit code is that of `run`: 0: completed, 1: failed or cancelled, 130: left.
    """
    kind, any_id = found(what, "show")
    if kind is None:
        return 1
    if (node or item or round_no) and kind != "run":
        raise errors.InvalidConfig(
            f"--node, --item and --round need a run: {kind} {any_id} has no nodes of its own"
        )
    if steps:
        return step_report.show(kind, any_id, full=full)
    of_item = _chosen(any_id, "--item", item, item_nodes.listed, item_nodes.key_hint)
    of_round = _chosen(any_id, "--round", round_no, overview.nodes_of_round)
    wanted = [*(node or ()), *of_item, *of_round] if node or item or round_no else None
    if follow:
        text = command.STOPS_VIEW.format(f"the {'run' if kind == 'run' else 'job'}")
        with command.until_stopped(lambda: text) as stop:
            return _follow(kind, any_id, stop, wanted, item, as_json=as_json, full=full or debug)
    # The page reads the logs of the nodes that it prints.
    logs = (True if full else None) if as_json else False
    shown = collect(kind, any_id, wanted, item, logs=logs)
    if not as_json and wanted and item is None:
        shown["loops"] = []  # Of single nodes, a line about their loop would be wrong.
    return define.Shown(shown, lambda: print_out(shown, full=full))


def _chosen(
    run_id: str,
    option: str,
    value: T | None,
    find: Callable[[db.Connection, str, T], list[str] | None],
    hint: Callable[[db.Connection, str, T], str] | None = None,
) -> list[str]:
    """Return the nodes that an option names; raise `InvalidConfig` if `find` returns None."""
    if value is None:
        return []
    with db.transaction() as conn:
        nodes = find(conn, run_id, value)
        if nodes is None:
            raise errors.InvalidConfig(
                f"run {run_id} has no {option} {value}{hint(conn, run_id, value) if hint else ''}"
            )
    return nodes


def _items(run_id: str, key: str) -> list[Row]:
    with db.transaction() as conn:
        return statements.overview.items(conn, run=run_id, keys=[key])


def found(start: str, name: str, *, jobs_first: bool = False) -> tuple[str | None, str]:
    """Return kind and id of the run or job with this id or unique prefix.

    Returns (None, "") after reporting on stderr that there is none, or several; `name`: the command
    that asks; `jobs_first` as in `ids.resolve`.
    """
    text = f"there is no run or job {start!r}"
    try:
        with db.transaction() as conn:
            any_id, row = ids.resolve(conn, start, jobs_first=jobs_first)
        if row is not None:
            return row["kind"], any_id
    except ids.AmbiguousId as error:
        text = str(error)
    command.refuse(name, text)
    return None, ""


def collect(
    kind: str,
    any_id: str,
    nodes: Sequence[str] | None = None,
    item: str | None = None,
    *,
    logs: bool | None = None,
) -> dict[str, Any]:
    """Return what `--json` shows; `logs` as in `history.get_run`.

    With `item`, a key, also `items`: the items that have it. Raises `UnknownJob` if the run or job
    is gone, and `InvalidConfig` for a node that it does not have.
    """
    if kind != "run":
        shown = history.get_job(any_id)
    else:
        shown = history.get_run(any_id, nodes=nodes, logs=logs)
    if shown is None:
        raise errors.UnknownJob(f"{kind} {any_id!r} is gone")
    known = {node["node_id"] for node in shown["nodes"]} if nodes else set[str]()
    if missing := [name for name in nodes or () if name not in known]:
        with db.transaction() as conn:
            meant = item_nodes.hint(conn, any_id, missing[0])
        raise errors.InvalidConfig(f"run {any_id} has no --node {missing[0]}{meant}")
    if item is not None:
        shown["items"] = _items(any_id, item)
    return shown


def print_out(shown: dict[str, Any], *, full: bool) -> None:
    """Print what `collect` returned as a page cut to the terminal, unless `full`."""
    page = report.Page(full=full)
    if shown["kind"] == "run":
        page.run(shown, read_logs=history.add_logs)
    else:
        page.job(shown)


def _follow(
    kind: str,
    any_id: str,
    stop: signals.StopRequest,
    nodes: Sequence[str] | None,
    item: str | None,
    *,
    as_json: bool,
    full: bool,
) -> int:
    say = command.print_message if as_json else _line
    if kind == "run":
        collect(kind, any_id, nodes, logs=False)
        follower = follow.Follower(
            run_views.Lines(say), stop, printing_queues=tuple, nodes=nodes, asks=False
        )
        seen = follower.follow(any_id)
        if seen is None:
            return _left(kind, any_id)
        if not as_json:
            for each in _items(any_id, item) if item else ():
                _line(job_texts.item_text(each))
            return run.finish(any_id, seen, as_json=False, debug=full)
        output.dump(collect(kind, any_id, nodes, item, logs=True if full else None))
        return follow.exit_code(seen)
    ended = follow.job(kind, any_id, say, stop)
    if ended is None:
        return _left(kind, any_id)
    if as_json:
        output.dump(ended)
    else:
        report.Page(full=full).end(ended)
    return 0 if ended["status"] in run_snapshot.DONE else 1


def _left(kind: str, any_id: str) -> int:
    """Report that only the view was stopped; return the exit code."""
    shown = output.line(any_id)
    command.print_message(
        f"stopped the view of {kind} {shown}, which continues: `{command.PROG} show {shown}"
        f" --follow` shows it again, `{command.PROG} cancel {shown}` ends it"
    )
    return entry_point.INTERRUPTED


def _line(text: str) -> None:
    output.echo(text)
    sys.stdout.flush()
