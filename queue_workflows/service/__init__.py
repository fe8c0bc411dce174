"""Serve jobs, runs, workers, queues and schedules over HTTP (extra: service)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from queue_workflows import errors

if TYPE_CHECKING:
    from fastapi import FastAPI


def app(**settings: Any) -> FastAPI:
    """Return the service as an ASGI application, to run or to mount in an app's own.

    `settings` replace values of the environment and of `.env`, by their names in lower case:
    `workers_json`, `app_read_only`, `token`, ... Its lifespan loads the app that
    QUEUE_WORKFLOWS_APP names, makes the schema, and starts and stops the workers and the
    maintenance. An app that mounts it runs the lifespan itself, as `lifespan_context` of the
    returned application's router. Raises `InvalidConfig` for a setting that cannot be used,
    `MissingExtra` without the extra `service`.
    """
    try:
        from queue_workflows.service import application
        from queue_workflows.service import settings as service_settings
    except ModuleNotFoundError as error:
        raise missing(error) from None
    found = service_settings.load(**settings)
    service_settings.apply(found)
    return application.build(found)


def missing(error: ModuleNotFoundError) -> Exception:
    """Return the error for a package that is not installed, else the given error."""
    if (error.name or __name__).partition(".")[0] == __name__.partition(".")[0]:
        return error
    extra = "dashboard" if error.name in ("jinja2", "python_multipart") else "service"
    return errors.MissingExtra(
        f"{error.name} is not installed: pip install 'SOURCE[{extra}]' "
        "(SOURCE is the checkout or wheel of queue_workflows)"
    )
