"""Schemathesis generates requests from the service's OpenAPI document, alone and in sequences."""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator
from typing import Any

import hypothesis
import pytest
import schemathesis
from hypothesis import HealthCheck

from tests.support import commands, http_service
from tests.support.wait import patience

LONGEST_S = 1.0
STREAMS = ("/events", "/stream")
HEADERS = {"Authorization": f"Bearer {http_service.TOKEN}"}
KNOWN = {"host": "h", "queue": "load.a"}
QUIET = {
    "deadline": None,
    "derandomize": True,
    "database": None,
    "suppress_health_check": list(HealthCheck),
}


@pytest.fixture(scope="module")
def service(modules_database: str) -> Generator[http_service.Service]:
    with (
        commands.commands(QUEUE_WORKFLOWS_DB_URL=modules_database) as cli,
        http_service.served(cli, workers="") as made,
    ):
        yield made


@pytest.fixture(scope="module")
def schema(service: http_service.Service) -> Any:
    """The service's document, without the streams that do not end and the waits of long polls.

    Machines and queues are known or not; `test_service_hostile.py` has strange ones.
    """
    document = service.get("/openapi.json").json()
    for path in [each for each in document["paths"] if each.endswith(STREAMS)]:
        if path != "/api/v1/jobs/{job_id}/events":
            del document["paths"][path]
    for operations in document["paths"].values():
        for operation in operations.values():
            given = operation.get("parameters", [])
            operation["parameters"] = [each for each in given if each["name"] != "wait"]
            for each in operation["parameters"]:
                if each["in"] == "path" and each["name"] in KNOWN:
                    each["schema"] = {"enum": [KNOWN[each["name"]], "nowhere"]}
    found = schemathesis.openapi.from_dict(document)
    found.config.update(base_url=service.url, headers=HEADERS)
    return found


def judge(case: Any, reply: Any, seen: Counter[int]) -> None:
    seen[reply.status_code] += 1
    assert reply.status_code < 500, f"{case.as_curl_command()}\n{reply.text}"
    took = reply.elapsed
    for _ in range(5):  # the machine of a test may be busy, but not each time
        took = took if took < LONGEST_S else case.call().elapsed
    assert took < patience(LONGEST_S), f"{took:.1f} s: {case.as_curl_command()}"
    if reply.status_code >= 400 and reply.content:
        assert "json" in (reply.headers.get("content-type") or [""])[0], reply.text


def test_no_generated_request_fails_or_takes_long(schema: Any) -> None:
    seen = Counter[int]()
    operations = [found.ok() for found in schema.get_all_operations()]
    assert len(operations) > 25
    for operation in operations:

        @hypothesis.settings(max_examples=12, **QUIET)
        @hypothesis.given(case=operation.as_strategy())
        def ask(case: Any) -> None:
            judge(case, case.call(), seen)

        ask()
    assert seen[200] > 30 and seen[422] > 20 and seen[404] > 20, seen


def test_no_sequence_of_requests_fails_or_takes_long(schema: Any) -> None:
    """What one reply returns, such as the id of a job, is used by the requests that follow."""

    seen = Counter[int]()

    class Machine(schema.as_state_machine()):  # type: ignore[misc]
        def validate_response(self, response: Any, case: Any, *_: Any, **__: Any) -> None:
            judge(case, response, seen)

    Machine.run(settings=hypothesis.settings(max_examples=15, stateful_step_count=8, **QUIET))
    assert seen[200] > 20, seen
