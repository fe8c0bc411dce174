"""Call the HTTP service: `Client`, and `AsyncClient` for an event loop (extra: client).

Both have the verbs of `jobs`, `runs`, `workers`, `queues` and `schedules`, and raise their errors.
"""

from __future__ import annotations

from queue_workflows import errors

try:
    import httpx as _httpx
except ImportError as missing:
    raise errors.MissingExtra(
        "the client needs httpx: pip install 'SOURCE[client]' "
        "(SOURCE is the checkout or wheel of queue_workflows)"
    ) from missing

from queue_workflows.client.clients import AsyncClient, Client
from queue_workflows.requests.catalog import Event, JobStatus, Part

del _httpx

__all__ = ["AsyncClient", "Client", "Event", "JobStatus", "Part"]
