"""Define `queue-workflows demo`: run the example app, which needs no server."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path
from typing import Annotated

from queue_workflows import config, db, errors, runs
from queue_workflows.cli import (
    command,
    define,
    fleet,
    follow,
    options,
    output,
    run,
    unserved_queues,
)
from queue_workflows.db import statements
from queue_workflows.runtime import app_loading, signals

APP = "queue_workflows.demo:setup"
WORKFLOW = "picture_book"
RESULTS = {"book": "page/write_page/book.html", "picture of the run": "picture/draw_run/run.svg"}
TEXT_SUFFIXES = (".txt", ".md")
DEFAULT_OUT = Path("queue-workflows-demo")


@define.command("demo", "as_json debug db", reads=False)
def demo(
    folder: Annotated[
        Path | None,
        options.argument("FOLDER", "Texts (.txt, .md) for the book; default: five samples."),
    ] = None,
    yes: Annotated[bool, options.flag("--yes", "Answer its question by itself.")] = False,
    workers: Annotated[
        int | None, options.option("N", "cpu jobs at once; default: one per core.", min=1, max=64)
    ] = None,
    out: options.Out = DEFAULT_OUT,
    *,
    as_json: bool,
) -> int:
    """Make a picture book of a folder of texts. It starts and stops all that it needs."""
    if not yes and not sys.stdin.isatty():
        raise errors.InvalidConfig("demo asks one question on the way: use a terminal, or --yes")
    source = None if folder is None else str(_source(folder))
    with fleet.Fleet() as own:
        app_loading.load_app(APP)
        wanted = fleet.roles(cpu=workers or os.cpu_count() or 2, gpu=1)
        with command.until_stopped() as stop, command.database(create=True) as words:
            command.print_message(words)
            if not command.prepare(stop):
                return run.stopped_early()
            _refuse_company()
            request = run.Request(
                workflow=WORKFLOW,
                inputs={"folder": source},
                out_dir=run.folder(out),
                priority=100,
                queues={},
            )
            return _run(request, wanted, own, stop, yes=yes, as_json=as_json)


def _run(
    request: run.Request,
    wanted: fleet.Roles,
    own: fleet.Fleet,
    stop: signals.StopRequest,
    *,
    yes: bool,
    as_json: bool,
) -> int:
    with contextlib.ExitStack() as stack:
        view, log = run.view_for(stack, live=True, quiet=False, as_json=as_json)
        command.print_message(f"starting {wanted.describe()}")
        own.start(fleet.specs(wanted, app=APP, log_level="warning"), log)
        stack.callback(own.stop, stop)
        if stop.requested.is_set():
            return run.stopped_early()
        row = request.insert()
        follower = follow.Follower(view, stop, own.check, yes=yes)
        seen = follower.follow(row["id"])
        if seen is None:
            runs.cancel(row["id"])
    if seen is None:
        command.print_message(f"run {row['id']} is cancelled")
        return follow.exit_code(None)
    code = run.finish(row["id"], seen, as_json=as_json)
    if not as_json:
        if code == 0:
            _show_results(seen.run["out_dir"])
        _show_way_back(row["id"])
    return code


def _source(folder: Path) -> Path:
    if not folder.is_dir():
        raise errors.InvalidConfig(f"there is no folder {folder}")
    try:
        has_text = any(path.suffix in TEXT_SUFFIXES and path.is_file() for path in folder.iterdir())
    except OSError as error:
        raise errors.InvalidConfig(f"{folder} cannot be read: {error.strerror}") from None
    if not has_text:
        raise errors.InvalidConfig(f"{folder} has no {' or '.join(TEXT_SUFFIXES)} file")
    return folder.resolve()


def _refuse_company() -> None:
    """Refuse a database with other work: these workers would claim it and fail it."""
    cfg = config.get_config()
    with db.transaction() as conn:
        others = statements.overview.foreign_work(
            conn, workflows=[WORKFLOW], tasks=list(cfg.ingest_task_map)
        )
    serving = {"cpu", "gpu"} - unserved_queues.unserved({"cpu", "gpu"})
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


def _show_way_back(run_id: str) -> None:
    """Print the command that shows the run, since the demo's database belongs to no folder."""
    if config.database_url() is None:
        name = config.requested_database()
        output.echo(f"what happened: {command.PROG} show {run_id} --db {name}")


def _show_results(out_dir: str) -> None:
    for what, name in RESULTS.items():
        output.echo(f"{what}: {Path(out_dir) / name}")
