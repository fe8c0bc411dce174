"""Call the HTTP service in this process, as an ASGI application."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import httpx

from queue_workflows import service
from queue_workflows.client import AsyncClient
from tests.support import http_service

T = TypeVar("T")
TIMEOUT_S = 30.0


def scope_of(path: str, query: str = "", method: str = "GET", **headers: str) -> dict[str, Any]:
    """The scope of a request that has the token."""
    given = {"host": "localhost", "authorization": f"Bearer {http_service.TOKEN}", **headers}
    pairs = [(name.replace("_", "-").encode(), text.encode()) for name, text in given.items()]
    return {
        "type": "http", "method": method, "path": path, "raw_path": path.encode(),
        "headers": pairs, "query_string": query.encode(), "asgi": {"version": "3.0"},
        "http_version": "1.1", "scheme": "http",
    }  # fmt: skip


def streamed(
    query: str = "",
    *,
    path: str = "/api/v1/events",
    last: str = "",
    opened: Callable[[], object] = lambda: None,
    until: Callable[[str], bool] = lambda text: False,
    others: int = 0,
    **settings: Any,
) -> tuple[int, str]:
    """Return the status and the text of a response, once it has ended or `until` holds for it.

    `opened`: called once the response has begun. `others`: how many other viewers get it, too.
    """
    app = service.app(token=http_service.TOKEN, workers_json="", **settings)
    headers = {"last_event_id": last} if last else {}
    status, text = 0, ""

    async def run() -> None:
        over = asyncio.Event()

        async def receive() -> Any:
            await over.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            nonlocal status, text
            if message["type"] == "http.response.start":
                status = message["status"]
                return
            first = not text
            text += message.get("body", b"").decode()
            if first:
                await asyncio.get_running_loop().run_in_executor(None, opened)
            if until(text):
                over.set()

        async def drop(_: Any) -> None:
            pass

        async with app.router.lifespan_context(app):
            scope = scope_of(path, query, **headers)
            beside = [asyncio.ensure_future(app({**scope}, receive, drop)) for _ in range(others)]
            await asyncio.wait_for(app(scope, receive, send), TIMEOUT_S)
            over.set()
            await asyncio.gather(*beside)

    asyncio.run(run())
    return status, text


def post(path: str, body: Any) -> httpx.Response:
    """Return the reply to a request that has the token."""

    async def send() -> httpx.Response:
        app = service.app(token=http_service.TOKEN, workers_json="")
        transport = httpx.ASGITransport(app=app)
        async with (
            app.router.lifespan_context(app),
            httpx.AsyncClient(
                transport=transport,
                base_url="http://localhost",
                headers=http_service.bearer(http_service.TOKEN)
                | {"content-type": "application/json"},
            ) as client,
        ):
            return await client.post(path, content=json.dumps(body))

    return asyncio.run(send())


def called(
    use: Callable[[AsyncClient], Coroutine[Any, Any, T]],
    token: str = http_service.TOKEN,
    headers: Any = None,
    **settings: Any,
) -> T:
    """Return what a function does with a client of a service that has only just started."""

    async def run() -> T:
        app = service.app(token=http_service.TOKEN, workers_json="", **settings)
        transport = httpx.ASGITransport(app=app)
        async with (
            app.router.lifespan_context(app),
            httpx.AsyncClient(transport=transport, headers=headers) as http,
            AsyncClient("http://localhost", token=token, http=http) as client,
        ):
            return await use(client)

    return asyncio.run(run())
