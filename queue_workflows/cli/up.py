"""Define `queue-workflows up` and `serve`: run every process of an app, or the HTTP service."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from queue_workflows import config, errors, service
from queue_workflows.cli import command, define, fleet
from queue_workflows.embedded import cluster
from queue_workflows.runtime import app_loading, entry_point, supervisor
from queue_workflows.worker import parent, shapes

_TRIAL = """
import sys
from queue_workflows.runtime import app_loading, entry_point
name, app = sys.argv[1:]
sys.exit(entry_point.run_main(name, lambda: app_loading.load_app(app) and 0))
"""


@define.command(
    "up",
    """--cpu N 0..  cpu jobs at once; default: WORKFLOW_CPU_WORKERS.
    --gpu N 0..  gpu workers; default: WORKFLOW_GPU_WORKERS, 0 without a model or gpu node.
    --cards N,N  A gpu worker for each of these GPUs, as of queue-claim-worker; instead of --gpu.
    --workers FILE|JSON  A pool of ingest queues, as of queue-claim-worker; default: WORKERS_JSON.
    --ingest QUEUE  One more job of this queue at once than in the pool; repeatable.
    --no-ingest  No ingest workers, no pool, no scheduler.
    --no-dashboard  No dashboard; APP_DASHBOARD=0 does the same.
    --reload  Start again when a file of the app changes.""",
    takes="app debug db log_level log_format",
    reads=False,
)
def up(
    cpu: int | None = None, gpu: int | None = None, cards: str | None = None,
    workers: str | None = None, ingest: list[str] | None = None, no_ingest: bool = False,
    no_dashboard: bool = False, reload: bool = False, *, app: str | None, log_level: str,
    log_format: str | None,
) -> int:  # fmt: skip
    """Run all processes of an app, and the dashboard. A second Ctrl-C ends them at once."""
    entry_point.setup_logging(log_level, log_format)
    chosen = app_loading.load_app(app)
    if no_ingest and (workers is not None or ingest):
        raise errors.InvalidConfig("--no-ingest excludes --workers and --ingest")
    if cards is not None and gpu is not None:
        raise errors.InvalidConfig("--cards and --gpu exclude each other")
    if workers == "" and not no_ingest:
        raise errors.InvalidConfig("--workers is empty: leave it out, or give a file or JSON")
    has_pool = workers is not None or bool(config.WORKERS_JSON.read().strip())
    pool = shapes.option(workers) if has_pool and not no_ingest else []
    gpus = shapes.cards_of(cards) if cards is not None else []
    if gpus:
        shapes.check_cards(gpus)
    wanted = fleet.roles(
        cpu=cpu, gpu=gpu, ingest=not no_ingest, pool=pool, beside=set(ingest or ()), cards=gpus
    )
    if reload and chosen is None:
        raise errors.InvalidConfig("--reload needs --app: it watches the files of an app")
    edits = _Edits(chosen) if reload and chosen else None
    joined = command.database(create=True, app=chosen or "", up=True)
    with command.until_stopped() as stop, joined as words:
        command.print_message(words)
        if not command.prepare(stop, patience_s=None):
            return 0
        if found := fleet.strangers():
            command.print_message(
                "WARNING: unfinished runs of workflows that this app does not know "
                f"({found}): these processes will fail them; Ctrl-C now, and see "
                "`queue-workflows runs`, if another app is to finish them"
            )
        children = fleet.specs(wanted, app=chosen, log_level=log_level, log_format=log_format)
        pages = None if no_dashboard else fleet.dashboard(chosen, log_level, log_format)
        children += [pages] if pages else []
        started = wanted.describe() + (", dashboard" if pages else "")
        command.print_message(f"starting {started}; Ctrl-C stops them")
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
            argv = [sys.executable, "-c", _TRIAL, f"{command.PROG} up", self._app]
            self._trial = supervisor.Child(argv)
        death = self._trial.reap() if self._trial else None
        if death is not None:
            self._trial = None
            self.loadable = death.code == 0
            stays = "which cannot be loaded; going on as before"
            ends = "starting again" if self.loadable else stays
            command.print_message(f"files of {self._app} have changed, {ends}")
        return self.loadable

    def _times(self) -> dict[str, int]:
        found: dict[str, int] = {}
        for name in app_loading.sources(self._app):
            with contextlib.suppress(OSError):
                found[name] = Path(name).stat().st_mtime_ns
        return found


@define.command(
    "serve",
    """--host ADDRESS  Where to listen; default: 127.0.0.1.
    --port N 0..65535  The port; default: 8081. With 0 it takes a free one.
    --workers-json JSON  The queues to serve here; default: WORKERS_JSON.
    --read-only  Take no changes.
    --behind-proxy  Listen on every address, for a proxy in front that has TLS.
    --allow-host NAME  A name that a request's Host may have; repeatable.
    --beside-up PATH  As `up` starts it: without maintenance, with a link that opens this page once.
    --check  Check the settings and the app, and exit.""",
    takes="app debug db log_level log_format",
    reads=False,
)
def serve(
    host: str | None = None, port: int | None = None, workers_json: str | None = None,
    read_only: bool = False, behind_proxy: bool = False, allow_host: list[str] | None = None,
    beside_up: str | None = None, check: bool = False, *, app: str | None, log_level: str,
    log_format: str | None,
) -> int:  # fmt: skip
    """Serve jobs, runs and queues over HTTP, and the dashboard. Ctrl-C stops it."""
    given: dict[str, Any] = {
        "app_host": host,
        "app_port": port,
        "workers_json": workers_json,
        "app_read_only": read_only or None,
        "app_behind_proxy": behind_proxy or None,
        "app_allowed_hosts": " ".join(allow_host) if allow_host else None,
    }
    try:
        from queue_workflows.service import application, server, settings
    except ModuleNotFoundError as error:
        raise service.missing(error) from None

    found = settings.load(**given)
    if log_format:
        os.environ["QUEUE_WORKFLOWS_LOG_FORMAT"] = log_format  # also of the workers
    settings.apply(found)
    entry_point.setup_logging("debug" if found.debug else log_level, log_format)
    app_loading.load_app(app)
    settings.apply(found)
    settings.check_app(found)
    if check:
        if config.database_url() is None:
            cluster.installed()
        command.print_message(f"the settings are valid; {_where(found.host, found.app_port)}")
        return 0
    with command.database(create=not found.app_read_only or bool(found.pool)) as words:
        bound = server.bind(found)
        made = application.build(found, upkeep=beside_up is None)
        address = _where(found.host, bound.getsockname()[1])
        if made.state.token_path is not None and beside_up is None:
            command.print_message(f"the token is in {made.state.token_path}")
        serving = f"serving {words} on {address}"
        link = getattr(made.state, "link", None)
        if link and beside_up is not None:
            query = {"link": link()} | ({} if beside_up == "/" else {"next": beside_up})
            once = f"{address}/ui/login?{urlencode(query, safe='/')}"
            serving = f"the dashboard opens once, within 5 minutes: {once}"
        return server.run(made, bound, lambda: command.print_message(serving))


def _where(host: str, port: int) -> str:
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
