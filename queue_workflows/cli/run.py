"""Define `queue-workflows run WORKFLOW`: submit one run and follow it to its end."""

from __future__ import annotations

import contextlib
import sys
import uuid
from collections import Counter
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Annotated, NamedTuple

from queue_workflows import config, db, errors, runs
from queue_workflows.cli import (
    command,
    define,
    fleet,
    follow,
    input_option,
    options,
    output,
    run_processes,
    run_snapshot,
    run_views,
    summary,
    unserved_queues,
)
from queue_workflows.dag import graph
from queue_workflows.db import statements
from queue_workflows.dispatch import hooks
from queue_workflows.runtime import app_loading, signals
from queue_workflows.types import JsonDict, Run

DEFAULT_OUT = Path("queue-workflows-out")
"""Parent of the folders of runs without one; created when a node asks for its folder."""
ITEMS = 8
"""How often the body of a map counts, since the number of its items is not known yet."""


class Request(NamedTuple):
    """A validated request for a run; `out_dir` None: a folder of its own, named by its id."""

    workflow: str
    inputs: JsonDict
    out_dir: Path | None
    priority: int
    queues: dict[str, int]

    def insert(self) -> Run:
        """Insert the run and return its row. Raises `InvalidPayload` before any write."""
        run_id = str(uuid.uuid4())
        return runs.submit(
            self.workflow,
            run_id=run_id,
            out_dir=str(self.out_dir or DEFAULT_OUT.absolute() / run_id),
            priority=self.priority,
            inputs=self.inputs,
        )


def inputs_of(workflow: str, given: Iterable[str]) -> JsonDict:
    """Return the run's inputs, checked if the app declares the workflow in Python."""
    declared = config.get_config().workflow_map.get(workflow)
    if declared is None:
        return input_option.inputs(given)
    found = input_option.inputs(given, declared.accepts_input)
    try:
        declared.check_inputs(found)
    except errors.ArgsRefused as error:
        raise errors.ArgsRefused(f"{error}; inputs are given by --input KEY=VALUE") from None
    return found


def folder(out: Path | None) -> Path | None:
    """Create the folder and return it, absolute. Raises `InvalidConfig` if it cannot be used."""
    if out is None:
        return None
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise errors.InvalidConfig(f"--out {out} cannot be used: {error.strerror}") from None
    return out.resolve()


def used_queues(workflow: str, *, app: str | None) -> dict[str, int]:
    """Return how many nodes of the workflow go to each queue; one cpu node without a provider.

    Those of its maps and of its child runs count too, the body of a map ITEMS times.

    Raises `UnknownWorkflow`, `InvalidWorkflow`, and `InvalidConfig` for an app without provider.
    """
    try:
        made = hooks.expand({"id": workflow, "workflow_name": workflow})
    except hooks.NoProvider:
        if app is None:
            return {"cpu": 1}
        raise errors.InvalidConfig(
            f"workflow {workflow!r}: --app {app} sets no workflow provider (set_workflow_provider)"
        ) from None
    except errors.UnknownWorkflow as error:
        hint = errors.hint(workflow, config.get_config().workflow_map)
        text = str(error).removesuffix(hint) + (hint or f"; is --app {app} the one that has it?")
        raise errors.UnknownWorkflow(text) from error
    found, graphs, known = Counter[str](), [(made["nodes"], 1)], {workflow}
    while graphs:
        nodes, times = graphs.pop()
        for node in nodes:
            found[node["queue"]] += times
            if settings := node.get("map"):
                graphs.append((settings["body"], times * ITEMS))
            child = graph.workflow_of(node["module"])
            if child is not None and child not in known:
                known.add(child)
                # A child that cannot be read fails its node, which says why.
                with contextlib.suppress(errors.QueueWorkflowsError):
                    below = hooks.expand({"id": child, "workflow_name": child})
                    graphs.append((below["nodes"], times))
    return dict(found)


@define.command("run", reads=False)
def run(
    workflow: Annotated[
        str, options.argument("WORKFLOW", "Its name, as the app's provider knows it.")
    ],
    given: Annotated[
        list[str] | None,
        options.option("K=V|@FILE", "An input: JSON if it is, else text; repeatable.", "--input"),
    ] = None,
    out: Annotated[
        Path | None,
        options.option("DIR", f"Folder of the run's files; default: {DEFAULT_OUT}/<run id>."),
    ] = None,
    priority: Annotated[int, options.option("N", "Lower is sooner.", min=-32768, max=32767)] = 100,
    watch: Annotated[bool, options.flag("--watch", "Show the nodes while they run.")] = False,
    no_up: Annotated[
        bool, options.flag("--no-up", "Start no processes: others serve the database.")
    ] = False,
    no_wait: Annotated[
        bool, options.flag("--no-wait", "Queue it, print its id, and leave; implies --no-up.")
    ] = False,
    *,
    app: str | None,
    as_json: bool,
    debug: bool,
) -> int:
    """Run a workflow to its end.

    Exit code 0: completed, 1: failed or cancelled, 130: left by Ctrl-C.
    """

    def run_beside(own: fleet.Fleet | None) -> int:
        chosen = app_loading.load_app(app)
        request = Request(
            workflow=workflow,
            inputs=inputs_of(workflow, given or ()),
            out_dir=folder(out),
            priority=priority,
            queues=used_queues(workflow, app=chosen),
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

    if no_up or no_wait:
        return run_beside(None)
    with fleet.Fleet() as own:
        return run_beside(own)


def _see_through(
    request: Request,
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
        follower = follow.Follower(
            view,
            stop,
            helper.tick if own else _nothing,
            printing_queues=lambda: () if log is not None else helper.served,
        )
        return row["id"], follower.follow(row["id"])


def _nothing(_: run_snapshot.RunSnapshot) -> None:
    """Check no processes: others serve the database."""


def _ready(stop: signals.StopRequest) -> bool:
    if not command.wait_for_database(stop):
        return False
    db.wait_for_schema(db.REQUIRED_VERSION, timeout_s=0)
    return True


def _queue_only(request: Request, *, as_json: bool) -> int:
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
        return run_views.View(command.print_message), None
    return run_views.Lines(command.print_message if as_json else _print), None


def _print(text: str) -> None:
    output.echo(text)
    sys.stdout.flush()


def stopped_early() -> int:
    """Report that nothing was queued; return the exit code."""
    command.print_message("stopped before a run was queued")
    return follow.exit_code(None)


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
        return follow.exit_code(None)
    found = summary.collect(seen)
    if as_json:
        output.dump(found)
    else:
        summary.show(found)
        summary.show_traces(found, whole=debug)
    return follow.exit_code(seen)
