"""Tests of hello.py: `pytest` in this folder, on the embedded server or beside a `*_test` DSN."""

import pytest

pytest_plugins = ["queue_workflows.testing"]


@pytest.fixture(scope="session")
def workflows_app():
    return "hello"


def test_words_are_counted_and_written(flows):
    done = flows.run_workflow("hello", {"text": "to be or not to be"}).completed()
    assert done.outputs["read/count"] == {"words": 6}
    assert (done.out_dir / "tell" / "write" / "answer.txt").read_text() == "6 words\n"


def test_a_full_disk_fails_the_run_and_a_retry_keeps_the_count(flows):
    flows.fail("tell/write", OSError(28, "No space left on device"))
    failed = flows.run_workflow("hello", {"text": "to be"})
    assert "No space left on device" in failed.failures["tell/write"]
    done = flows.retry(failed.run_id).completed()
    assert {node.id: node.claims for node in done.nodes.values()} == {
        "read/count": 1, "tell/write": 2,
    }  # fmt: skip


def test_a_dying_worker_costs_a_second_try(flows):
    flows.crash("read/*")
    done = flows.run_workflow("hello", {"text": "to be"}).completed()
    assert (done.nodes["read/count"].claims, done.nodes["read/count"].crashes) == (2, 1)
