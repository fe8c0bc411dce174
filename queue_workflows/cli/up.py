"""Define `queue-workflows up`: run every process of an app until Ctrl-C."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path
from typing import Annotated

from queue_workflows import config, errors
from queue_workflows.cli import command, define, fleet, options
from queue_workflows.runtime import app_loading, entry_point, supervisor
from queue_workflows.worker import parent, shapes

_TRIAL = """
import sys
from queue_workflows.runtime import app_loading, entry_point
name, app = sys.argv[1:]
sys.exit(entry_point.run_main(name, lambda: app_loading.load_app(app) and 0))
"""


@define.command("up", "app debug db", reads=False)
def up(
    cpu: Annotated[
        int | None, options.option("N", "cpu jobs at once; default: WORKFLOW_CPU_WORKERS.", min=0)
    ] = None,
    gpu: Annotated[
        int | None,
        options.option(
            "N", "gpu workers; default: WORKFLOW_GPU_WORKERS, 0 without a model or gpu node.", min=0
        ),
    ] = None,
    cards: Annotated[
        str | None,
        options.option(
            "N,N",
            "A gpu worker for each of these GPUs, as of queue-claim-worker; instead of --gpu.",
        ),
    ] = None,
    workers: Annotated[
        str | None,
        options.option(
            "FILE|JSON", "A pool of ingest queues, as of queue-claim-worker; default: WORKERS_JSON."
        ),
    ] = None,
    ingest: Annotated[
        list[str] | None,
        options.option("QUEUE", "A worker of this queue, beside the pool's; again."),
    ] = None,
    no_ingest: Annotated[
        bool, options.flag("--no-ingest", "No ingest workers, no pool, no scheduler.")
    ] = False,
    reload: Annotated[
        bool, options.flag("--reload", "Start again when a file of the app changes.")
    ] = False,
    log_level: options.LogLevel = "info",
    log_format: options.LogFormat = None,
    *,
    app: str | None,
) -> int:
    """Run orchestrator, workers and scheduler of an app. Ctrl-C stops them, twice at once."""
    entry_point.setup_logging(log_level, log_format)
    chosen = app_loading.load_app(app)
    if no_ingest and (workers is not None or ingest):
        raise errors.InvalidConfig("--no-ingest excludes --workers and --ingest")
    if cards is not None and gpu is not None:
        raise errors.InvalidConfig("--cards and --gpu exclude each other")
    pool = [] if no_ingest else _pool(workers)
    wanted = fleet.roles(
        cpu=cpu,
        gpu=gpu,
        ingest=not no_ingest,
        pool=pool,
        beside=set(ingest or ()),
        cards=_cards(cards),
    )
    if reload and chosen is None:
        raise errors.InvalidConfig("--reload needs --app: it watches the files of an app")
    edits = _Edits(chosen) if reload and chosen else None
    joined = command.database(create=True, app=chosen or "", up=True)
    with command.until_stopped() as stop, joined as words:
        command.print_message(words)
        if not command.prepare(stop, patience_s=None) or stop.requested.is_set():
            return 0
        if found := fleet.strangers():
            command.print_message(
                "WARNING: unfinished runs of workflows that this app does not know "
                f"({found}): these processes will fail them; Ctrl-C now, and see "
                "`queue-workflows runs`, if another app is to finish them"
            )
        children = fleet.specs(wanted, app=chosen, log_level=log_level, log_format=log_format)
        command.print_message(f"starting {wanted.describe()}; Ctrl-C stops them")
        code = parent.Parent(children).run(stop, outdated=edits.found if edits else lambda: False)
        if edits is None or not edits.loadable or stop.requested.is_set():
            return code
    # This process has the old code too, and with it perhaps other queues.
    return os.execv(sys.executable, [sys.executable, "-m", "queue_workflows", *sys.argv[1:]])


class _Edits:
    """Find that files of the app have changed, and that they can be loaded."""

    def __init__(self, app: str) -> None:
        self._app = app
        self._seen = self._times()
        self._trial: supervisor.Child | None = None
        self.loadable = False

    def found(self) -> bool:
        """Return whether to start again: another process has loaded the files that changed."""
        if self._trial is None and (now := self._times()) != self._seen:
            self._seen = now
            self._trial = supervisor.Child(
                [sys.executable, "-c", _TRIAL, f"{command.PROG} up", self._app]
            )
        death = self._trial.reap() if self._trial else None
        if death is not None:
            self._trial = None
            self.loadable = death.code == 0
            ends = (
                "starting again" if self.loadable else "which cannot be loaded; going on as before"
            )
            command.print_message(f"files of {self._app} have changed, {ends}")
        return self.loadable

    def _times(self) -> dict[str, int]:
        found: dict[str, int] = {}
        for name in app_loading.sources(self._app):
            with contextlib.suppress(OSError):
                found[name] = Path(name).stat().st_mtime_ns
        return found


def _cards(text: str | None) -> list[int]:
    """Return the GPUs of the option; they are checked before anything starts."""
    if text is None:
        return []
    found = shapes.cards_of(text)
    shapes.check_cards(found)
    return found


def _pool(workers: str | None) -> list[shapes.Entry]:
    """Return the pool of the option, else of WORKERS_JSON, else none."""
    if workers is None and not config.WORKERS_JSON.read().strip():
        return []
    if workers == "":
        raise errors.InvalidConfig("--workers is empty: leave it out, or give a file or JSON")
    return shapes.option(workers)
