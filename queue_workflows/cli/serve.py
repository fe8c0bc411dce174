"""Define `queue-workflows serve`: run the HTTP service."""

from __future__ import annotations

import importlib
import os
from typing import Annotated, Any

from queue_workflows import config, service
from queue_workflows.cli import command, define, options
from queue_workflows.embedded import cluster
from queue_workflows.runtime import app_loading, entry_point


@define.command("serve", "app debug db", reads=False)
def serve(
    host: Annotated[
        str | None, options.option("ADDRESS", "Where to listen; default: 127.0.0.1.")
    ] = None,
    port: Annotated[
        int | None, options.option("N", "Default: 8081; 0: any.", min=0, max=65_535)
    ] = None,
    workers_json: Annotated[
        str | None, options.option("JSON", "The queues to serve here; default: WORKERS_JSON.")
    ] = None,
    read_only: Annotated[bool, options.flag("--read-only", "Take no changes.")] = False,
    behind_proxy: Annotated[
        bool,
        options.flag(
            "--behind-proxy", "Listen on every address, for a proxy in front that has TLS."
        ),
    ] = False,
    allow_host: Annotated[
        list[str] | None,
        options.option("NAME", "A name that a request's Host may have; repeatable."),
    ] = None,
    check: Annotated[
        bool, options.flag("--check", "Check the settings and the app, and exit.")
    ] = False,
    log_level: options.LogLevel = "info",
    log_format: options.LogFormat = None,
    *,
    app: str | None,
) -> int:
    """Serve jobs, runs and queues over HTTP. Ctrl-C stops it."""
    given: dict[str, Any] = {
        "app_host": host,
        "app_port": port,
        "workers_json": workers_json,
        "app_read_only": read_only or None,
        "app_behind_proxy": behind_proxy or None,
        "app_allowed_hosts": " ".join(allow_host) if allow_host else None,
    }

    _load()
    from queue_workflows.service import application, server, settings

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
            cluster.check_installed()
        command.print_message(f"the settings are valid; {_where(found.host, found.app_port)}")
        return 0
    with command.database(create=not found.app_read_only or bool(found.pool)) as words:
        bound = server.bind(found)
        made = application.build(found)
        address = _where(found.host, bound.getsockname()[1])
        if made.state.token_path is not None:
            command.print_message(f"the token is in {made.state.token_path}")
        serving = f"serving {words} on {address}"
        return server.run(made, bound, lambda: command.print_message(serving))


def _load() -> None:
    try:
        importlib.import_module("queue_workflows.service.application")
    except ModuleNotFoundError as error:
        raise service.missing(error) from None


def _where(host: str, port: int) -> str:
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
