"""Define `queue-workflows run WORKFLOW`: submit one run and follow it to its end."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Annotated

import typer

from queue_workflows import db
from queue_workflows.cli import (
    command,
    fleet,
    interactive_run,
    options,
    output,
    run_processes,
    run_request,
    run_snapshot,
    run_views,
    summary,
    unserved_queues,
)
from queue_workflows.db import statements
from queue_workflows.runtime import app_loading, signals


def run(
    workflow: Annotated[
        str, typer.Argument(metavar="WORKFLOW", help="Its name, as the app's provider knows it.")
    ],
    app: options.App = None,
    given: Annotated[
        list[str] | None,
        typer.Option(
            "--input", metavar="K=V|@FILE", help="An input: JSON if it is, else text; repeatable."
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help=f"Folder of the run's files; default: {run_request.DEFAULT_OUT}/<run id>.",
        ),
    ] = None,
    priority: Annotated[
        int, typer.Option(min=-32768, max=32767, metavar="N", help="Lower is sooner.")
    ] = 100,
    watch: Annotated[bool, typer.Option("--watch", help="Show the nodes while they run.")] = False,
    no_up: Annotated[
        bool, typer.Option("--no-up", help="Start no processes: others serve the database.")
    ] = False,
    no_wait: Annotated[
        bool, typer.Option("--no-wait", help="Queue it, print its id, and leave; implies --no-up.")
    ] = False,
    as_json: options.AsJson = False,
    debug: options.Debug = False,
) -> None:
    """Run a workflow to its end.

    Exit code 0: completed, 1: failed or cancelled, 130: left by Ctrl-C.
    """

    def run_command() -> int:
        if no_up or no_wait:
            return run_beside(None)
        with fleet.Fleet() as own:
            return run_beside(own)

    def run_beside(own: fleet.Fleet | None) -> int:
        chosen = app_loading.load_app(app)
        request = run_request.Request(
            workflow=workflow,
            inputs=run_request.inputs_of(workflow, given or ()),
            out_dir=run_request.folder(out),
            priority=priority,
            queues=run_request.used_queues(workflow, app=chosen),
        )
        joined = command.database(create=own is not None, app=chosen if own else None)
        ours = run_processes.StartedProcesses()
        with command.until_stopped(ours.stops) as stop, joined as words:
            command.print_message(words)
            ready = command.prepare(stop) if own else _ready(stop)
            if not ready or stop.requested.is_set():
                return stopped_early()
            if no_wait:
                return _queue_only(request, as_json=as_json)
            ended = _see_through(request, stop, ours, own, app=chosen, watch=watch, as_json=as_json)
            if ended is None:
                return stopped_early()
            return finish(*ended, as_json=as_json, debug=debug, ours=ours.started)

    command.execute("run", run_command, debug=debug)


def _see_through(
    request: run_request.Request,
    stop: signals.StopRequest,
    ours: run_processes.StartedProcesses,
    own: fleet.Fleet | None,
    *,
    app: str | None,
    watch: bool,
    as_json: bool,
) -> tuple[str, run_snapshot.RunSnapshot | None] | None:
    """Return the run's id and how it ended, for `finish`; None if stopped before the insert."""
    wanted = fleet.roles(ingest=False) if app else None
    with contextlib.ExitStack() as stack:
        view, log = view_for(stack, live=watch, quiet=not watch, as_json=as_json)
        helper = run_processes.RunProcesses(
            request.queues, wanted, app=app, stop=stop, log=log, waiting=own
        )
        if own:
            ours.add(stack.enter_context(helper))
            helper.begin()
        if stop.requested.is_set():
            return None
        row = request.insert()
        ours.queued = True
        if not watch:
            command.print_message(f"run {row['id']} is queued")
        if older := _ahead(row["id"]):
            view.print_message(older)
        for text in _paused(request.queues):
            view.print_message(text)
        # Our own workers' output goes to stderr, or to the file beside a live picture.
        follower = interactive_run.Follower(
            view,
            stop,
            helper.tick if own else None,
            printing_queues=lambda: () if log is not None else helper.served,
        )
        return row["id"], follower.follow(row["id"])


def _ready(stop: signals.StopRequest) -> bool:
    if not command.wait_for_database(stop):
        return False
    db.wait_for_schema(db.REQUIRED_VERSION, timeout_s=0)
    return True


def _queue_only(request: run_request.Request, *, as_json: bool) -> int:
    row = request.insert()
    if as_json:
        output.dump(
            {key: row[key] for key in ("id", "workflow_name", "status", "priority", "out_dir")}
        )
    else:
        output.echo(row["id"])
    return 0


def view_for(
    stack: contextlib.ExitStack, *, live: bool, quiet: bool, as_json: bool
) -> tuple[run_views.View, Path | None]:
    """Return how to show a run, and a file for the processes' output while a picture is drawn.

    A live tree on a terminal, else lines: to stdout, or to stderr beside JSON.
    """
    if live and not as_json and sys.stdout.isatty():
        from rich.console import Console

        from queue_workflows.cli import tree

        log = stack.enter_context(fleet.ChildLog())
        stack.callback(lambda: log.text and command.print_message(log.text))
        return stack.enter_context(tree.Tree(Console())), log.path
    if quiet:
        return run_views.Quiet(command.print_message), None
    return run_views.Lines(command.print_message if as_json else _print), None


def _print(text: str) -> None:
    output.echo(text)
    sys.stdout.flush()


def stopped_early() -> int:
    """Report that nothing was queued; return the exit code."""
    command.print_message("stopped before a run was queued")
    return interactive_run.exit_code(None)


def _ahead(run_id: str) -> str:
    """Return a text about the older runs that come before this one; "" for none."""
    with db.transaction() as conn:
        found = statements.overview.runs_ahead(conn, run=run_id)
    if not found["n"]:
        return ""
    what = f"{output.counted(found['n'], 'older run')} of {', '.join(found['names'])}"
    first = f"`{command.PROG} cancel {found['first']}`"
    ends = f"are ahead, {first} ends the first" if found["n"] > 1 else f"is ahead, {first} ends it"
    return output.line(f"{what} {ends}", 500)


def _paused(used: Collection[str]) -> list[str]:
    """Return a text for each of these queues that is paused, so that the run waits."""
    with db.transaction() as conn:
        return [
            unserved_queues.pause_text(row)
            for row in statements.queues.paused(conn)
            if row["queue"] in used
        ]


def _left(run_id: str, *, ours: bool) -> str:
    """Return a text about which processes were stopped, and what happens to the run."""
    ends = f"`{command.PROG} cancel {run_id}` ends it"
    if ours:
        return (
            "stopped the processes that this command started; "
            f"left run {run_id} as it is: `{command.PROG} up` with its app continues it, {ends}"
        )
    again = f"`{command.PROG} show {run_id} --follow` shows it again"
    return (
        f"stopped the view only; run {run_id} continues with the processes that serve it: "
        f"{again}, {ends}"
    )


def finish(
    run_id: str,
    seen: run_snapshot.RunSnapshot | None,
    *,
    as_json: bool,
    debug: bool = False,
    ours: bool = False,
) -> int:
    """Report how the run ended, and its errors; return the exit code.

    `debug`: whole tracebacks. `ours`: this command started processes, which are stopped now.
    """
    if seen is None:
        command.print_message(_left(run_id, ours=ours))
        return interactive_run.exit_code(None)
    found = summary.collect(seen)
    if as_json:
        output.dump(found)
    else:
        summary.show(found)
        summary.show_traces(found, whole=debug)
    return interactive_run.exit_code(seen)
