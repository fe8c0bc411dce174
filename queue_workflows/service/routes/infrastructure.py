"""Report whether the service lives, is ready, its version, and the metrics of the fleet."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import fastapi
from starlette.responses import PlainTextResponse, Response

import queue_workflows
from queue_workflows.service import problems, responses, schemas, state
from queue_workflows.telemetry import metrics as fleet_metrics

router = fastapi.APIRouter(tags=["infrastructure"])
READY_S = 2.0
"""Longest wait for the database in /ready."""
_OPEN: dict[str, Any] = {"security": []}
_REFUSED = schemas.problems("GET", public=True)
"""Of endpoints that need no token."""


@router.get("/health", openapi_extra=_OPEN, responses=_REFUSED)
async def health() -> Response:
    """Return that the process answers; reads nothing."""
    return responses.reply({"status": "ok"})


@router.get("/status", openapi_extra=_OPEN, responses=_REFUSED)
async def status(request: fastapi.Request) -> Response:
    """Return the version, and for how many seconds the service has run; reads nothing."""
    own = state.of(request)
    return responses.reply(
        {
            "service": "queue_workflows",
            "version": queue_workflows.__version__,
            "uptime_s": round(time.monotonic() - own.started_at, 3),
            "read_only": own.settings.app_read_only,
            "queues": {entry.queue: entry.concurrency for entry in own.settings.pool},
        }
    )


@router.get("/ready", openapi_extra=_OPEN, responses=schemas.problems("GET", 503, public=True))
async def ready(request: fastapi.Request) -> Response:
    """Return whether the database has the schema and the workers run; else 503 with the reason."""
    own = state.of(request)
    try:
        await asyncio.wait_for(own.schema_check(), READY_S)
    except (asyncio.TimeoutError, Exception) as error:  # noqa: BLE001  any reason is one
        reason = str(error) or f"the database did not answer within {READY_S:g} s"
    else:
        reason = "; ".join(f"{name}: {text}" for name, text in sorted(own.problems.items()))
    if reason:
        return problems.problem(503, reason, kind="NotReady")
    return responses.reply({"status": "ready"})


@router.get("/metrics", response_class=PlainTextResponse, responses=schemas.problems("GET"))
async def metrics(request: fastapi.Request) -> Response:
    """Return the metrics of the whole fleet in the text format of Prometheus."""
    text = await state.of(request).calls.run(fleet_metrics.scrape)
    return Response(text, media_type=fleet_metrics.CONTENT_TYPE)
