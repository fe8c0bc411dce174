"""Put the settings of the service into effect in this process and the workers that it starts."""

from __future__ import annotations

import os

from queue_workflows import config, errors
from queue_workflows.event_export import exporter
from queue_workflows.runtime import logs
from queue_workflows.service import settings

_LOGS = (("log_path", "log_file_name"), ("metric_path", "metric_file_name"),
         ("audit_log_path", "audit_log_file_name"))  # fmt: skip
"""Settings of folders and of the files in them."""


def variables(found: settings.Settings) -> dict[str, str]:
    """Return the variables that this process and its workers need."""
    made = {"DL_HEARTBEAT_SEC": str(found.dl_heartbeat_sec)}
    if (dsn := found.dsn) is not None:
        made["DB_URL"] = dsn
    for folder, name in _LOGS:
        if (path := logs.path_of(getattr(found, folder), getattr(found, name))) is not None:
            made[folder.upper()] = str(path)
    return {settings.PREFIX + name: text for name, text in made.items()}


def apply(found: settings.Settings) -> None:
    """Set the variables and the queues that this process and its workers need.

    Called again after the app was loaded, which may name the variable of the DSN.
    """
    os.environ.update(variables(found))
    cfg = config.get_config()
    cfg.engine_pool_max = found.pg_pool_size + found.pg_max_overflow
    cfg.pool_recycle_s = found.pg_pool_recycle if found.pg_pool_recycle > 0 else 366 * 86_400
    own = {name for name, _, _ in settings.describe()}
    for name, text in settings.file_variables(settings.PREFIX).items():
        if name not in own and name.removeprefix(settings.PREFIX) not in own:
            os.environ.setdefault(name, text)
    if found.dsn is not None:
        os.environ[config.db_url_variables()[0]] = found.dsn
    queues = [entry.queue for entry in found.pool]
    if queues:
        config.configure(ingest_queues=config.get_config().ingest_queues.union(queues))


def check_app(found: settings.Settings) -> None:
    """Raise `InvalidConfig` for queues without an app whose tasks their workers could run.

    Also for an audit or metric log that cannot be written.
    """
    exporter.wanted()
    if not found.pool:
        return
    if config.get_config().app is None:
        raise errors.InvalidConfig(
            "WORKERS_JSON needs the app that registers the tasks, which each worker process "
            "loads: --app or QUEUE_WORKFLOWS_APP"
        )
    if not config.get_config().ingest_task_map:
        raise errors.InvalidConfig(
            f"app {config.get_config().app} registers no ingest task, and WORKERS_JSON names "
            "queues: register_ingest_task()"
        )
