"""Define `queue-workflows run` and `demo`: submit one run and follow it to its end."""

from __future__ import annotations

import contextlib
import functools
import os
import shlex
import sys
import uuid
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path

from queue_workflows import config, db, errors, runs
from queue_workflows.admin import waiting_reasons
from queue_workflows.cli import answer, command, define, fleet, follow, output, run_views, texts
from queue_workflows.dag import graph, hooks
from queue_workflows.db import statements
from queue_workflows.runtime import app_loading, signals
from queue_workflows.types import JsonDict, Run
from queue_workflows.worker import parent

DEFAULT_OUT = Path("queue-workflows-out")
"""Parent of the folders of runs without one; created when a node asks for its folder."""


def submit(
    workflow: str, inputs: JsonDict, out_dir: Path | None, priority: int = 100, *,
    serves: bool = True,
) -> Run:  # fmt: skip
    """Insert a run and return its row. Raises `InvalidPayload` before any write.

    Without `out_dir`, and if this command `serves` it, the run gets a folder here, named by its id.
    Other workers may run as another user or elsewhere, so the orchestrator then chooses the folder.
    """
    run_id = str(uuid.uuid4())
    if out_dir is None and serves:
        out_dir = DEFAULT_OUT.absolute() / run_id
    out = None if out_dir is None else str(out_dir)
    return runs.submit(workflow, run_id=run_id, out_dir=out, priority=priority, inputs=inputs)


def inputs_of(workflow: str, given: Iterable[str]) -> JsonDict:
    """Return the run's inputs, checked if the app declares the workflow in Python."""
    declared = config.get_config().workflow_map.get(workflow)
    if declared is None:
        return answer.inputs(given)
    found = answer.inputs(given, declared.accepts_input)
    try:
        declared.check_inputs(found)
    except errors.ArgsRefused as error:
        raise errors.ArgsRefused(f"{error}; inputs are given by --input KEY=VALUE") from None
    return found


def folder(out: Path | None, *, serves: bool = True) -> Path | None:
    """Create the folder, unless others serve the run, whose it is then; return it, absolute.

    Raises `InvalidConfig` if it cannot be used.
    """
    if out is None:
        return None
    try:
        if serves:
            out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise errors.InvalidConfig(f"--out {out} cannot be used: {error.strerror}") from None
    return out.resolve()


def used_queues(workflow: str, *, app: str | None) -> set[str]:
    """Return the queues of the workflow's nodes, of its maps and of its child runs.

    Without an app and a provider it is cpu. Raises `UnknownWorkflow`, `InvalidWorkflow`, and
    `InvalidConfig` for an app without provider.
    """
    try:
        made = hooks.expand({"id": workflow, "workflow_name": workflow})
    except hooks.NoProvider:
        if app is None:
            return {"cpu"}
        raise errors.InvalidConfig(
            f"workflow {workflow!r}: --app {app} sets no workflow provider (set_workflow_provider)"
        ) from None
    except errors.UnknownWorkflow as error:
        hint = errors.hint(workflow, config.get_config().workflow_map)
        text = str(error).removesuffix(hint) + (hint or f"; is --app {app} the one that has it?")
        raise errors.UnknownWorkflow(text) from error
    found, graphs, known = set[str](), [made["nodes"]], {workflow}
    while graphs:
        for node in graphs.pop():
            found.add(node["queue"])
            if settings := node.get("map"):
                graphs.append(settings["body"])
            child = graph.workflow_of(node["module"])
            if child is not None and child not in known:
                known.add(child)
                # A child that cannot be read fails its node, which says why.
                with contextlib.suppress(errors.QueueWorkflowsError):
                    graphs.append(hooks.expand({"id": child, "workflow_name": child})["nodes"])
    return found


class _Progress:
    """How far a `run` is, which decides what its first Ctrl-C stops."""

    started: Sequence[fleet.Fleet] = ()
    queued = False
    """Whether the run is in the database."""

    def stops(self) -> str:
        """Return the sentence that says how far the first Ctrl-C stops this command."""
        is_view = self.queued and not self.started
        return command.STOPS_VIEW.format("the run") if is_view else command.STOPS_WORK


@define.command(
    "run",
    f"""WORKFLOW  Its name, as the app's provider knows it.
    --input K=V|@FILE  An input: JSON if it is, else text; repeatable.
    --out DIR  Folder of the run's files; default: {DEFAULT_OUT}/<run id>, and with
        --no-up the workers choose one in their OUTPUTS_DIR.
    --priority N -32768..32767  Lower is sooner.
    --watch  Show the nodes while they run.
    --no-up  Start no processes: others serve the database.
    --no-wait  Queue it, print its id, and leave; implies --no-up.""",
    reads=False,
)
def run(
    workflow: str, given: list[str] | None = None, out: Path | None = None, priority: int = 100,
    watch: bool = False, no_up: bool = False, no_wait: bool = False, *, app: str | None,
    as_json: bool, debug: bool,
) -> int | define.Shown:  # fmt: skip
    """Run a workflow to its end.

    Exit code 0: completed, 1: failed or cancelled, 130: left by Ctrl-C.
    """
    own = None if no_up or no_wait else fleet.Fleet()
    with own or contextlib.nullcontext():
        chosen = app_loading.load_app(app)
        serves = own is not None
        inputs, out_dir = inputs_of(workflow, given or ()), folder(out, serves=serves)
        insert = functools.partial(submit, workflow, inputs, out_dir, priority, serves=serves)
        queues = used_queues(workflow, app=chosen)
        joined = command.database(create=serves, app=chosen if own else None)
        progress = _Progress()
        with command.until_stopped(progress.stops) as stop, joined as words:
            command.print_message(words)
            if not command.prepare(stop, migrates=serves):
                return _stopped_early()
            if no_wait:
                row = insert()
                keys = ("id", "workflow_name", "status", "priority", "out_dir")
                queued = {key: row[key] for key in keys}
                return define.Shown(queued, lambda: output.echo(row["id"]))
            ended = _see_through(
                insert, queues, stop, progress, own, app=chosen, watch=watch, as_json=as_json
            )
            if ended is None:
                return _stopped_early()
            run_id, seen = ended
            if seen is None:
                return follow.left("run", run_id, stopped=bool(progress.started))
            return follow.finish(seen, as_json=as_json, debug=debug)


def _see_through(
    insert: Callable[[], Run], queues: set[str], stop: signals.StopRequest,
    progress: _Progress, own: fleet.Fleet | None, *, app: str | None, watch: bool, as_json: bool,
) -> tuple[str, run_views.RunSnapshot | None] | None:  # fmt: skip
    """Return the run's id and how it ended, or None there; None if stopped before the insert."""
    wanted = fleet.roles(ingest=False) if app else None
    with contextlib.ExitStack() as stack:
        view, log = _view(stack, watch=watch, as_json=as_json)
        helper = fleet.RunProcesses(queues, wanted, app=app, stop=stop, log=log, waiting=own)
        if own:
            progress.started = stack.enter_context(helper).started
            helper.begin()
        if stop.requested.is_set():
            return None
        row = insert()
        progress.queued = True
        if not watch:
            command.print_message(f"run {row['id']} is queued")
        for text in _delays(row["id"], queues):
            view.print_message(text)
        # Our own workers' output goes to stderr, or to the file beside a live picture.
        follower = follow.Follower(
            view, stop, printing_queues=lambda: () if log is not None else helper.served
        )
        if own:
            follower = follower._replace(tick=helper.tick)
        return row["id"], follower.follow(row["id"])


def _view(
    stack: contextlib.ExitStack, *, watch: bool, as_json: bool
) -> tuple[run_views.View, Path | None]:
    """Return how to show a run, and a file for the processes' output while a picture is drawn.

    To watch it, this is a live tree on a terminal, else lines on stdout, or on stderr beside JSON.
    """
    if not watch:
        return run_views.View(command.print_message), None
    if not as_json and sys.stdout.isatty():
        from rich.console import Console

        from queue_workflows.cli import tree

        log = stack.enter_context(fleet.child_log())
        return stack.enter_context(tree.Tree(Console())), log
    return run_views.Lines(command.print_message if as_json else output.echo_now), None


def _stopped_early() -> int:
    """Report that nothing was queued; return the exit code."""
    command.print_message("stopped before a run was queued")
    return follow.exit_code(None)


def _delays(run_id: str, queues: Collection[str]) -> list[str]:
    """Return why the run waits, for older runs that come before it, and queues that are paused."""
    with db.transaction() as conn:
        found = statements.overview.runs_ahead(conn, run=run_id)
        paused = waiting_reasons.paused(waiting_reasons.live_queues(conn))
    delays = [texts.pause_text(row) for row in paused if row["queue"] in queues]
    if found["n"]:
        what = f"{output.counted(found['n'], 'older run')} of {', '.join(found['names'])}"
        first = f"`{command.PROG} cancel {shlex.quote(found['first'])}`"
        many = found["n"] > 1
        ends = f"are ahead, {first} ends the first" if many else f"is ahead, {first} ends it"
        delays.insert(0, output.line(f"{what} {ends}", 500))
    return delays


DEMO = "queue_workflows.demo:setup"
DEMO_WORKFLOW = "picture_book"
RESULTS = {"book": "page/write_page/book.html", "picture of the run": "picture/draw_run/run.svg"}
TEXT_SUFFIXES = (".txt", ".md")
DEMO_OUT = Path("queue-workflows-demo")


@define.command(
    "demo",
    """FOLDER  Texts (.txt, .md) for the book; default: five samples.
    --yes  Answer its question by itself.
    --workers N 1..64  cpu jobs at once; default: one per core.
    --out DIR  Folder of the run's files; nodes write below it.""",
    takes="as_json debug db",
    reads=False,
)
def demo(
    source: Path | None = None, yes: bool = False, workers: int | None = None,
    out: Path | None = DEMO_OUT, *, as_json: bool,
) -> int:  # fmt: skip
    """Make a picture book of texts. On a terminal it then serves the page of its run."""
    if not yes and not sys.stdin.isatty():
        raise errors.InvalidConfig("demo asks one question on the way: use a terminal, or --yes")
    texts_of = None if source is None else str(_source(source))
    with fleet.Fleet() as own:
        app_loading.load_app(DEMO)
        wanted = fleet.roles(cpu=workers or os.cpu_count() or 2, gpu=1)
        with command.until_stopped() as stop, command.database(create=True) as words:
            command.print_message(words)
            if not command.prepare(stop):
                return _stopped_early()
            _refuse_company()
            insert = functools.partial(submit, DEMO_WORKFLOW, {"folder": texts_of}, folder(out))
            return _see_demo(insert, wanted, own, stop, yes=yes, as_json=as_json)


def _see_demo(
    insert: Callable[[], Run], wanted: fleet.Roles, own: fleet.Fleet, stop: signals.StopRequest, *,
    yes: bool, as_json: bool,
) -> int:  # fmt: skip
    with contextlib.ExitStack() as stack:
        view, log = _view(stack, watch=True, as_json=as_json)
        command.print_message(f"starting {wanted.describe()}")
        own.start(fleet.specs(wanted, app=DEMO, log_level="warning"), log)
        stack.callback(own.stop, stop)
        if stop.requested.is_set():
            return _stopped_early()
        row = insert()
        follower = follow.Follower(view, stop, own.check, yes=yes)
        seen = follower.follow(row["id"])
        if seen is None:
            runs.cancel(row["id"])
    if seen is None:
        command.print_message(f"run {row['id']} is cancelled")
        return follow.exit_code(None)
    code = follow.finish(seen, as_json=as_json)
    if as_json:
        return code
    if code == 0:
        for what, name in RESULTS.items():
            output.echo(f"{what}: {Path(seen.run['out_dir']) / name}")
    chosen = ""
    if config.database_url() is None:  # the database belongs to no folder
        chosen = f" --db {config.requested_database()}"
        output.echo(f"what happened: {command.PROG} show {row['id']}{chosen}")
    return _show_page(f"/runs/{row['id']}", seen.run["out_dir"], chosen, stop) or code


def _show_page(page: str, out: str, chosen: str, stop: signals.StopRequest) -> int:
    """Serve the dashboard until Ctrl-C, whose link opens the page of the run.

    Without a terminal it only prints how to open the page. `chosen`: the option of the database.
    Returns 2 if the dashboard refuses to start, else 0.
    """
    pages = fleet.dashboard(DEMO, "warning", opens=page, shows=out)
    if pages is None:
        return 0
    if sys.stdin.isatty() and sys.stdout.isatty():
        command.print_message("the address below opens the page of the run; Ctrl-C ends the demo")
        return parent.Parent([pages]).run(stop)
    up = f"`{command.PROG} up --app {DEMO}{chosen}`"
    output.echo(f"its page, while {up} runs: http://127.0.0.1:{fleet.PAGES_PORT}/ui{page}")
    return 0


def _source(folder: Path) -> Path:
    if not os.path.isdir(folder):  # noqa: PTH112  `Path.is_dir` raises for a name that is too long
        raise errors.InvalidConfig(f"there is no folder {folder}")
    try:
        has_text = any(path.suffix in TEXT_SUFFIXES and path.is_file() for path in folder.iterdir())
    except OSError as error:
        raise errors.InvalidConfig(f"{folder} cannot be read: {error.strerror}") from None
    if not has_text:
        raise errors.InvalidConfig(f"{folder} has no {' or '.join(TEXT_SUFFIXES)} file")
    return folder.resolve()


def _refuse_company() -> None:
    """Refuse a database with other work, since these workers would claim it and fail it."""
    cfg = config.get_config()
    with db.transaction() as conn:
        tasks = list(cfg.ingest_task_map)
        others = statements.overview.foreign_work(conn, workflows=[DEMO_WORKFLOW], tasks=tasks)
    serving = {"cpu", "gpu"} - fleet.unserved({"cpu", "gpu"})
    if others:
        first = others[0]
        what = f"unfinished work of another app ({first['kind']} of {first['name']!r})"
    elif serving:
        what = f"workers already ({', '.join(sorted(serving))})"
    else:
        return
    raise errors.InvalidConfig(
        f"this database has {what}, which the demo's workers must not mix with: name another one "
        "by QUEUE_WORKFLOWS_DB_URL, or one of the embedded server by --db NAME; unfinished "
        "runs are ended by `queue-workflows cancel RUN`"
    )
