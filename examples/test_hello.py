"""Tests of hello.py: `pytest` in this folder, on the embedded server or beside a `*_test` DSN."""

import pytest

pytest_plugins = ["queue_workflows.testing"]


@pytest.fixture(scope="session")
def workflows_app():
    return "hello"


def test_words_are_counted_and_reported(flows):
    done = flows.run_workflow("hello", {"text": "to be or not to be"}).completed()
    assert done.outputs["count/count"] == {"result": 6}
    assert done.outputs["__output__"] == {"result": "6 words"}


def test_a_lost_connection_fails_the_run_and_a_retry_keeps_the_count(flows):
    flows.fail("tell/tell", ConnectionError("the printer is away"))
    failed = flows.run_workflow("hello", {"text": "to be"})
    assert "the printer is away" in failed.failures["tell/tell"]
    done = flows.retry(failed.run_id).completed()
    assert (done.nodes["count/count"].claims, done.nodes["tell/tell"].claims) == (1, 2)


def test_a_worker_that_dies_costs_a_second_claim(flows):
    flows.crash("count/*")
    done = flows.run_workflow("hello", {"text": "to be"}).completed()
    assert (done.nodes["count/count"].claims, done.nodes["count/count"].crashes) == (2, 1)
