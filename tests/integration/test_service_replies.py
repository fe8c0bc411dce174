"""The replies of the service, whose values may be large."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from queue_workflows import db, errors
from queue_workflows.client import AsyncClient
from queue_workflows.service import responses
from tests.support import factories
from tests.support.asgi_service import called


def test_no_value_is_encoded_on_the_event_loop(
    db: Any, conn: db.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_id = factories.run(conn)
    body, encoded = responses.body, list[bool]()

    def noted(content: Any) -> bytes:
        encoded.append(threading.current_thread() is threading.main_thread())
        return body(content)

    async def use(client: AsyncClient) -> None:
        await client.runs.get(run_id)
        with pytest.raises(errors.WaitTimeout):
            await client.runs.wait(run_id, timeout_s=0.3)
        await client.runs.list()
        await client.runs.cancel(run_id)

    monkeypatch.setattr(responses, "body", noted)
    called(use)
    assert len(encoded) > 4 and not any(encoded)
