"""Node jobs: queued, claimed in order, ended once, reclaimed; functions for apps and operators."""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import ModuleType
from typing import Any

import psycopg
import pytest

from queue_workflows import config, errors, jobs, node_queue
from tests.support import constants, factories, flow, transitions

TERMINAL = ("completed", "failed", "cancelled", "skipped")


@pytest.fixture
def run(conn: Any) -> str:
    return factories.run(conn)


def enqueue(run: str, node_id: str = "n", **given: Any) -> str:
    return node_queue.enqueue_node_job(
        run_id=run, node_id=node_id, **{"node_module": "m", "queue": "cpu"} | given
    )


def claim_all(claim: Callable[[], Any]) -> list[str]:
    found: list[str] = []
    while (job := claim()) is not None:
        found.append(job["node_id"])
    return found


def cpu(**given: Any) -> Callable[[], Any]:
    return lambda: node_queue.claim_next_cpu_job(host="box", **given)


def gpu(model: str | None = None, **given: Any) -> Callable[[], Any]:
    return lambda: node_queue.claim_next_gpu_job(0, model, host="box", **given)


def outbox_kinds(conn: Any) -> list[tuple[str, str]]:
    rows = conn.execute("SELECT node_id, kind FROM workflow_dispatch_events ORDER BY id").fetchall()
    return [(row["node_id"], row["kind"]) for row in rows]


def history(conn: Any, job_id: str) -> list[str]:
    return factories.column(
        conn,
        "SELECT event_type::text FROM workflow_node_events WHERE job_id = %s ORDER BY id",
        job_id,
    )


# --- enqueue -----------------------------------------------------------------------------------


def test_a_job_is_queued_with_the_values_that_the_app_gives(
    run: str, heard: Callable[[], Any]
) -> None:
    job_id = enqueue(
        run, queue="gpu", required_model="big", inputs={"a": 1}, priority=7, pipeline_name="p"
    )
    assert heard() == [("node_job_ready", "gpu")]
    job = node_queue.get_node_job(job_id)
    assert job is not None
    assert (job["status"], job["queue"], job["required_model"]) == ("queued", "gpu", "big")
    assert (job["inputs"], job["priority"], job["pipeline_name"]) == ({"a": 1}, 7, "p")
    assert (job["claim_no"], job["worker_id"], job["lease_expires_at"]) == (0, None, None)
    assert node_queue.get_node_job("nope") is None


def test_a_run_has_one_row_a_node(run: str, conn: Any) -> None:
    first = enqueue(run, priority=7)
    assert enqueue(run, priority=8) == first
    assert factories.column(conn, "SELECT priority FROM workflow_node_jobs") == [7]


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ({"queue": "fetch"}, errors.UnknownQueue),
        ({"queue": "nope"}, errors.UnknownQueue),
        ({"required_model": "m"}, errors.InvalidConfig),
        ({"queue": "gpu", "required_model": "m\x00"}, errors.InvalidConfig),
        ({"queue": "gpu", "required_model": "m" * 401}, errors.InvalidConfig),
        ({"inputs": {"a": "\x00"}}, errors.InvalidPayload),
        ({"inputs": {"a": float("nan")}}, errors.InvalidPayload),
    ],
)
def test_a_job_that_cannot_be_is_refused_before_any_write(
    run: str, conn: Any, given: dict[str, Any], error: type[Exception]
) -> None:
    with pytest.raises(ValueError) as caught:
        enqueue(run, **given)
    assert isinstance(caught.value, error)
    assert factories.one(conn, "SELECT count(*) FROM workflow_node_jobs") == 0


def test_a_job_whose_model_is_empty_needs_none(run: str, conn: Any) -> None:
    """No worker knows a model of that name: the job would wait for ever."""
    job_id = enqueue(run, queue="gpu", required_model="")
    assert (node_queue.get_node_job(job_id) or {})["required_model"] is None
    assert transitions.claim_node(conn, transitions.who("gpu", models=["m"]))["id"] == job_id


def test_a_job_of_no_run_is_refused(db: ModuleType) -> None:
    with pytest.raises(KeyError, match="no run 'nope'"):
        enqueue("nope")
    with pytest.raises(KeyError, match="no run 'nope'"):
        node_queue.insert_skipped_job(run_id="nope", node_id="n", node_module="m")


def test_a_skipped_row_takes_a_nodes_place(run: str, heard: Callable[[], Any]) -> None:
    job_id = node_queue.insert_skipped_job(
        run_id=run, node_id="n", node_module="m", queue="gpu", required_model="big"
    )
    job = node_queue.get_node_job(job_id)
    assert job is not None
    assert (job["status"], job["required_model"]) == ("skipped", "big")
    assert job["finished_at"] is not None
    assert heard() == []
    with pytest.raises(errors.NodeTaken):
        enqueue(run)
    assert cpu()() is None
    with pytest.raises(errors.InvalidConfig, match="cpu job cannot require"):
        node_queue.insert_skipped_job(run_id=run, node_id="x", node_module="m", required_model="b")


def test_a_runs_jobs_come_oldest_first(run: str, conn: Any) -> None:
    with conn.transaction():
        for name in "cab":
            factories.node(conn, run, name)
    assert [job["node_id"] for job in node_queue.list_jobs_for_run(run)] == ["c", "a", "b"]
    assert node_queue.list_jobs_for_run("nope") == []


def test_a_statement_of_many_rows_notifies_once_a_queue(
    run: str, conn: Any, heard: Callable[[], Any]
) -> None:
    conn.execute(
        "INSERT INTO workflow_node_jobs (run_id, node_id, node_module, queue)"
        " SELECT %s, i::text, 'm', CASE WHEN i %% 2 = 0 THEN 'cpu' ELSE 'gpu' END"
        " FROM generate_series(1, 50) i",
        (run,),
    )
    assert heard() == [("node_job_ready", "cpu"), ("node_job_ready", "gpu")]


def test_the_wake_up_leaves_with_the_writers_transaction(
    run: str, conn: Any, heard: Callable[[], Any]
) -> None:
    with conn.transaction():
        factories.node(conn, run)
        assert heard() == []
    assert heard() == [("node_job_ready", "cpu")]
    with conn.transaction(force_rollback=True):
        factories.node(conn, run, "other")
    assert heard() == []


@pytest.mark.parametrize(
    "case", ["it is claimed", "another is claimed", "none is", "other queue", "two follow"]
)
def test_a_node_wakes_its_workers_unless_it_is_claimed_as_it_is_queued(
    run: str, conn: Any, heard: Callable[[], Any], case: str
) -> None:
    if case == "another is claimed":
        factories.node(conn, run, "better", priority=2)
    queue = "gpu" if case == "other queue" else "cpu"
    following = ["next", "too"] if case == "two follow" else ["next"]
    factories.node(conn, run, "first", priority=1)
    job = transitions.claim_node(conn)
    heard()
    done = [(job, transitions.plan(*following, queue=queue))]
    taken = transitions.complete_with_plans(conn, done, count=int(case != "none is"))
    assert [each["node_id"] for each in taken] == {
        "it is claimed": ["next"], "another is claimed": ["better"], "none is": [],
        "other queue": [], "two follow": ["next"],
    }[case]  # fmt: skip
    assert heard() == ([] if case == "it is claimed" else [("node_job_ready", queue)])
    # The next INSERT of the connection is heard again.
    factories.node(conn, run, "later")
    assert heard() == [("node_job_ready", "cpu")]


# --- claim, cpu --------------------------------------------------------------------------------


def test_a_claim_sets_identity_lease_and_label(run: str, conn: Any) -> None:
    job_id = enqueue(run)
    job = node_queue.claim_next_cpu_job(3, host="box", lease_s=60)
    assert job is not None
    assert job == node_queue.get_node_job(job_id)
    assert (job["status"], job["claim_no"], job["worker_lane"]) == ("running", 1, 3)
    assert (job["claimed_by"], job["host_label"]) == ("box", "box")
    assert job["worker_id"].startswith("box:")
    left = "SELECT extract(epoch FROM lease_expires_at - now())::float8 FROM workflow_node_jobs"
    assert 55 < factories.one(conn, left) <= 60
    assert job["started_at"] is not None
    assert history(conn, job_id) == ["claimed"]
    assert node_queue.claim_next_cpu_job(host="box") is None


def test_the_host_label_is_the_environments_unless_given(
    run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUEUE_WORKFLOWS_HOST_LABEL", "from-env")
    enqueue(run)
    job = node_queue.claim_next_cpu_job()
    assert job is not None
    assert job["claimed_by"] == "from-env"


def test_the_claim_takes_priority_then_age(run: str, conn: Any) -> None:
    rows = [("a", 100), ("b", 5), ("c", 100), ("d", 5), ("e", 50)]
    with conn.transaction():  # one now() for all: only seq gives their order
        for name, priority in rows:
            factories.node(conn, run, name, priority=priority)
    assert claim_all(cpu()) == ["b", "d", "e", "a", "c"]


def test_an_overflow_machine_takes_the_newest_of_the_best_priority(run: str, conn: Any) -> None:
    for name, priority in [("a", 100), ("b", 5), ("c", 100), ("d", 5)]:
        factories.node(conn, run, name, priority=priority)
    assert claim_all(cpu(host_priority=-1)) == ["d", "b", "c", "a"]


def test_each_queue_has_its_own_order(run: str) -> None:
    enqueue(run, "c")
    enqueue(run, "g", queue="gpu")
    assert claim_all(gpu()) == ["g"]
    assert claim_all(cpu()) == ["c"]


@pytest.mark.parametrize("over", ["completed", "failed", "cancelled"])
@pytest.mark.parametrize("overflow", [0, -1])
def test_nothing_of_a_run_that_is_over_is_claimed(conn: Any, over: str, overflow: int) -> None:
    done, live = factories.run(conn, status=over), factories.run(conn)
    for queue, model in (("cpu", None), ("gpu", None), ("gpu", "m")):
        for run, band in ((done, 1), (live, 2)):
            factories.node(
                conn, run, f"{queue}{model}", queue=queue, required_model=model, priority=band
            )
    assert claim_all(cpu(host_priority=overflow)) == ["cpuNone"]
    assert len(claim_all(gpu(known_models=["m"], host_priority=overflow))) == 2
    assert claim_all(gpu("m", host_priority=overflow)) == []


@pytest.mark.parametrize("status", ["draft", "paused", "queued"])
def test_a_run_status_of_the_app_stops_no_claim(conn: Any, status: str) -> None:
    factories.node(conn, factories.run(conn, status=status))
    assert claim_all(cpu()) == ["n"]


def test_a_machine_that_is_off_claims_nothing(run: str, conn: Any) -> None:
    enqueue(run)
    factories.insert(conn, "worker_controls", host_label="box", queue="cpu", desired_state="off")
    assert cpu()() is None
    conn.execute("UPDATE worker_controls SET until_at = now() - interval '1 second'")
    assert claim_all(cpu()) == ["n"]


def test_with_the_switches_disabled_an_off_row_stops_no_claim(
    run: str, conn: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    enqueue(run)
    factories.insert(conn, "worker_controls", host_label="box", queue="cpu", desired_state="off")
    monkeypatch.setenv("AI_LEADS_DISABLE_WORKER_CONTROL", "1")
    assert claim_all(cpu()) == ["n"]


# --- claim, gpu --------------------------------------------------------------------------------


@pytest.fixture
def models(run: str, conn: Any) -> str:
    """a1 b1 x1 a2 b2 in one band, then a0 in a better one; x has no model."""
    rows = [("a1", "a"), ("b1", "b"), ("x1", None), ("a2", "a"), ("b2", "b")]
    for name, model in rows:
        factories.node(conn, run, name, queue="gpu", required_model=model)
    factories.node(conn, run, "a0", queue="gpu", required_model="a", priority=1)
    return run


@pytest.mark.parametrize("known", [None, ["a", "b"]])
def test_a_cold_worker_takes_priority_then_no_model_then_age(
    models: str, known: list[str] | None
) -> None:
    assert claim_all(gpu(known_models=known)) == ["a0", "x1", "a1", "b1", "a2", "b2"]


@pytest.mark.parametrize("known", [None, ["a", "b"]])
def test_a_warm_worker_takes_its_model_first_inside_the_best_band(
    models: str, known: list[str] | None
) -> None:
    assert claim_all(gpu("b", known_models=known)) == ["a0", "b1", "b2", "a1", "x1", "a2"]


def test_a_worker_takes_only_models_that_it_knows_and_jobs_without_one(models: str) -> None:
    assert claim_all(gpu(known_models=["b"])) == ["x1", "b1", "b2"]
    assert claim_all(gpu(known_models=[])) == []
    assert claim_all(gpu(known_models=["a"])) == ["a0", "a1", "a2"]


@pytest.mark.parametrize("known", [None, ["a", "b"]])
def test_a_gpu_overflow_machine_takes_the_newest_of_the_best_priority(
    models: str, known: list[str] | None
) -> None:
    found = claim_all(gpu(known_models=known, host_priority=-1))
    assert found == ["a0", "x1", "b2", "a2", "b1", "a1"]


@pytest.mark.parametrize("known", [None, ["a", "b"]])
def test_a_warm_gpu_overflow_machine_takes_the_newest_of_its_model_first(
    models: str, known: list[str] | None
) -> None:
    found = claim_all(gpu("b", known_models=known, host_priority=-1))
    assert found == ["a0", "b2", "b1", "a2", "x1", "a1"]


def test_an_empty_model_is_none_for_plain_sql_too(run: str, conn: Any) -> None:
    factories.node(conn, run, "inserted", queue="gpu", required_model="")
    factories.node(conn, run, "updated", queue="gpu", required_model="m")
    factories.node(conn, run, "cpu", required_model="")
    conn.execute("UPDATE workflow_node_jobs SET required_model = '' WHERE node_id = 'updated'")
    assert {job["required_model"] for job in node_queue.list_jobs_for_run(run)} == {None}
    assert claim_all(gpu(known_models=["n"])) == ["inserted", "updated"]


def test_two_claimants_take_no_job_of_a_model_twice(models: str, db: ModuleType) -> None:
    with db.connect(autocommit=False) as one, db.connect(autocommit=False) as two:
        first = transitions.claim_node(one, transitions.who("gpu", "w1", models=["a", "b"]))
        second = transitions.claim_node(two, transitions.who("gpu", "w2", models=["a", "b"]))
        assert (first["node_id"], second["node_id"]) == ("a0", "a1")


# --- not due -----------------------------------------------------------------------------------


def test_a_job_that_is_not_due_is_not_claimed_and_wakes_no_worker(
    run: str, conn: Any, heard: Callable[[], Any]
) -> None:
    job = factories.node(conn, run, available_at="2999-01-01")
    assert job["blocked_reason"] == "not_due"
    assert heard() == []
    assert cpu()() is None
    assert transitions.promote_due(conn) == 0


def test_an_orchestrator_promotes_what_has_become_due_which_wakes_its_workers(
    run: str, conn: Any, toy: flow.Flow, heard: Callable[[], Any]
) -> None:
    job = factories.node(conn, run, available_at="2999-01-01")
    conn.execute("UPDATE workflow_node_jobs SET available_at = now() - interval '1 ms'")
    assert factories.reread(conn, job)["blocked_reason"] == "not_due"
    heard()
    toy.look()
    assert heard() == [("node_job_ready", "cpu")]
    job = factories.reread(conn, job)
    assert (job["blocked_reason"], job["available_at"]) == (None, None)
    assert transitions.promote_due(conn) == 0


def test_a_workers_own_claim_promotes_what_is_due(run: str, conn: Any) -> None:
    factories.node(conn, run, available_at="2999-01-01")
    conn.execute("UPDATE workflow_node_jobs SET available_at = now() - interval '1 ms'")
    assert claim_all(cpu()) == ["n"]


def test_a_job_that_was_due_when_inserted_is_claimed_at_once(run: str, conn: Any) -> None:
    factories.node(conn, run, available_at="2001-01-01")
    assert claim_all(cpu()) == ["n"]


def test_an_app_delays_and_releases_by_a_plain_update(
    run: str, conn: Any, heard: Callable[[], Any]
) -> None:
    job = factories.node(conn, run)
    conn.execute("UPDATE workflow_node_jobs SET available_at = now() + interval '1 day'")
    assert factories.reread(conn, job)["blocked_reason"] == "not_due"
    heard()
    conn.execute("UPDATE workflow_node_jobs SET available_at = NULL")
    assert factories.reread(conn, job)["blocked_reason"] is None
    assert heard() == [("node_job_ready", "cpu")]
    assert claim_all(cpu()) == ["n"]


def test_another_reason_to_wait_is_not_promoted(run: str, conn: Any) -> None:
    factories.node(conn, run, available_at="2001-01-01", blocked_reason="lock")
    assert transitions.promote_due(conn) == 0
    assert cpu()() is None


# --- mark_* ------------------------------------------------------------------------------------

MARKS: dict[str, Callable[[str], Any]] = {
    "completed": lambda job: node_queue.mark_completed(job, context_delta={"k": 1}, seconds=2.5),
    "failed": lambda job: node_queue.mark_failed(job, error="bad", seconds=2.5),
    "awaiting_input": node_queue.mark_awaiting_input,
}


@pytest.mark.parametrize("status", ["queued", "running"])
@pytest.mark.parametrize("mark", MARKS)
def test_a_mark_ends_a_job_once_with_one_event(run: str, conn: Any, mark: str, status: str) -> None:
    job_id = enqueue(run)
    if status == "running":
        cpu()()
    row = MARKS[mark](job_id)
    assert row == node_queue.get_node_job(job_id)
    assert row["status"] == mark
    assert (row["worker_id"], row["lease_expires_at"]) == (None, None)
    again = MARKS[mark](job_id)
    assert again == (row if mark == "awaiting_input" else None)
    assert outbox_kinds(conn) == [("n", mark)]
    (event,) = node_queue.list_unprocessed_dispatch_events()
    assert (event["job_id"], event["claim_no"]) == (job_id, row["claim_no"])
    ended = {"completed": "completed", "failed": "failed", "awaiting_input": "parked"}[mark]
    assert history(conn, job_id)[-1] == ended
    assert (
        factories.one(
            conn, "SELECT count(*) FROM workflow_node_events WHERE event_type = %s", ended
        )
        == 1
    )


def test_a_mark_stores_what_it_was_given(run: str) -> None:
    row = node_queue.mark_completed(
        enqueue(run), context_delta={"k": [1]}, seconds=2.5, vm_rss_mb_peak=99
    )
    assert row is not None
    assert (row["context_delta"], row["seconds"], row["vm_rss_mb_peak"]) == ({"k": [1]}, 2.5, 99)
    assert row["finished_at"] is not None
    failed = node_queue.mark_failed(enqueue(run, "m"), error="a\x00" + "x" * 9000)
    assert failed is not None
    assert len(failed["error"]) == 8000
    assert (failed["seconds"], failed["context_delta"]) == (None, {})


@pytest.mark.parametrize("over", TERMINAL)
@pytest.mark.parametrize("mark", MARKS)
def test_a_mark_on_a_job_that_is_over_does_nothing(
    run: str, conn: Any, over: str, mark: str
) -> None:
    job = factories.node(conn, run, status=over)
    assert MARKS[mark](job["id"]) is None
    assert factories.reread(conn, job) == job
    assert outbox_kinds(conn) == []
    assert MARKS[mark]("nope") is None


def test_a_waiting_node_is_completed_or_failed_by_hand(run: str, conn: Any) -> None:
    first, second = enqueue(run, "a"), enqueue(run, "b")
    for job_id in (first, second):
        node_queue.mark_awaiting_input(job_id)
    assert node_queue.mark_completed(first, context_delta={}) is not None
    assert node_queue.mark_failed(second, error="e") is not None
    assert outbox_kinds(conn) == [
        ("a", "awaiting_input"), ("b", "awaiting_input"), ("a", "completed"), ("b", "failed"),
    ]  # fmt: skip


def test_a_result_that_cannot_be_stored_changes_nothing(run: str, conn: Any) -> None:
    job = factories.node(conn, run)
    for delta in ({"a": "\x00"}, {"a": {1}}, {1: 1}):
        with pytest.raises(errors.InvalidPayload, match="context_delta"):
            node_queue.mark_completed(job["id"], context_delta=delta)
    assert factories.reread(conn, job) == job
    assert outbox_kinds(conn) == []


def test_a_mark_wakes_the_orchestrator(run: str, heard: Callable[[], Any]) -> None:
    job_id = enqueue(run)
    heard()
    node_queue.mark_completed(job_id, context_delta=None)
    assert heard() == [("orchestrator_work", "event")]


def test_inputs_and_specs_are_stored(run: str) -> None:
    job_id = enqueue(run)
    row = node_queue.set_resolved_inputs(job_id, {"a": 1})
    assert row is not None
    assert row["resolved_inputs"] == {"a": 1}
    row = node_queue.set_input_spec(run, "n", {"widget": "w"})
    assert row is not None
    assert row["input_spec"] == {"widget": "w"}
    assert node_queue.set_resolved_inputs("nope", {}) is None
    assert node_queue.set_input_spec(run, "nope", {}) is None
    with pytest.raises(errors.InvalidPayload):
        node_queue.set_resolved_inputs(job_id, {"a": float("nan")})


# --- reclaim -----------------------------------------------------------------------------------


def crash(conn: Any, job_id: str) -> Any:
    """Claim the job and let somebody see its process die; its row."""
    conn.execute("UPDATE workflow_node_jobs SET available_at = NULL WHERE status = 'queued'")
    job = transitions.claim_node(conn)
    assert job["id"] == job_id
    assert transitions.charge(conn, job)
    return factories.reread(conn, job)


def test_a_crashed_job_goes_to_the_front_then_waits_then_is_poison(
    run: str, conn: Any, heard: Callable[[], Any]
) -> None:
    job_id = enqueue(run)
    first = crash(conn, job_id)
    assert (first["status"], first["priority"], first["crash_count"]) == ("queued", 10, 1)
    assert (first["worker_id"], first["lease_expires_at"]) == (None, None)
    assert (first["available_at"], first["blocked_reason"]) == (None, None)
    assert ("node_job_ready", "cpu") in heard()
    conn.execute("UPDATE workflow_node_jobs SET priority = 50")
    second = crash(conn, job_id)
    assert (second["status"], second["priority"], second["crash_count"]) == ("queued", 50, 2)
    assert second["blocked_reason"] == "not_due"
    wait_s = "SELECT extract(epoch FROM available_at - now())::float8 FROM workflow_node_jobs"
    assert 55 < factories.one(conn, wait_s) <= 60
    assert cpu()() is None
    third = crash(conn, job_id)
    assert (third["status"], third["crash_count"]) == ("failed", 3)
    assert third["error"].startswith("poison: took down 3 workers, the last one w1; it died; last")
    assert third["finished_at"] is not None
    assert outbox_kinds(conn) == [("n", "failed")]
    assert history(conn, job_id) == [
        "claimed", "reclaimed", "claimed", "reclaimed", "claimed", "failed",
    ]  # fmt: skip


def test_a_better_priority_than_the_front_is_kept(run: str, conn: Any) -> None:
    assert crash(conn, enqueue(run, priority=3))["priority"] == 3


def test_the_last_crash_fails_the_job(run: str, conn: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    constants.put(monkeypatch, "claim.recovery.MAX_CRASHES", 1)
    assert crash(conn, enqueue(run))["status"] == "failed"


def test_a_fresh_lease_is_never_touched(run: str, conn: Any) -> None:
    enqueue(run)
    job = transitions.claim_node(conn)
    assert node_queue.reclaim_expired_leases() == []
    assert factories.reread(conn, job)["status"] == "running"


def test_a_row_that_is_locked_is_left_for_the_next_sweep(
    run: str, conn: Any, db: ModuleType
) -> None:
    enqueue(run)
    job = transitions.claim_node(conn)
    transitions.expire(conn, job)
    with db.connect(autocommit=False) as other:
        other.execute("SELECT FROM workflow_node_jobs FOR UPDATE")
        assert node_queue.reclaim_expired_leases() == []
    assert len(node_queue.reclaim_expired_leases()) == 1


def test_the_four_counters_are_four(run: str, conn: Any) -> None:

    job_id = enqueue(run)
    conn.execute("UPDATE workflow_node_jobs SET max_attempts = 5")

    def claim() -> Any:
        conn.execute("UPDATE workflow_node_jobs SET available_at = NULL WHERE status = 'queued'")
        return transitions.claim_node(conn)

    def counters() -> tuple[int, ...]:
        row = node_queue.get_node_job(job_id)
        assert row is not None
        names = ("claim_no", "attempts", "crash_count", "watchdog_retries")
        assert row["lapse_count"] == 0
        return tuple(row[name] for name in names)

    crash(conn, job_id)
    assert counters() == (1, 0, 1, 0)
    transitions.fail(conn, claim(), error="e")
    assert counters() == (2, 1, 1, 0)
    transitions.end_by_watchdog(conn, claim(), error="e", seconds=1)
    assert counters() == (3, 1, 1, 1)
    transitions.hand_back(conn, claim(), reason="r")
    assert counters() == (4, 1, 1, 1)
    claim()
    node_queue.requeue_job_for_retry(job_id)
    assert counters() == (5, 1, 1, 2)
    claim()
    node_queue.reclaim_all_running_for_resume()
    assert counters() == (6, 1, 1, 2)
    claim()
    node_queue.requeue_running_for_worker("box", "cpu")
    assert counters() == (7, 1, 1, 2)


# --- the operators' requeues -------------------------------------------------------------------


def requeued(job: Any) -> tuple[Any, ...]:
    return tuple(
        job[name] for name in ("status", "priority", "worker_id", "lease_expires_at", "started_at")
    )


BACK = ("queued", 10, None, None, None)


def test_one_job_is_requeued_for_a_retry(run: str, conn: Any, heard: Callable[[], Any]) -> None:
    job_id = enqueue(run)
    assert node_queue.requeue_job_for_retry(job_id) is None
    cpu()()
    heard()
    row = node_queue.requeue_job_for_retry(job_id)
    assert row is not None
    assert requeued(row) == BACK
    assert row["watchdog_retries"] == 1
    assert heard() == [("node_job_ready", "cpu")]
    assert history(conn, job_id) == ["claimed", "requeued"]
    assert node_queue.requeue_job_for_retry("nope") is None


def test_all_running_jobs_are_taken_back_for_a_resume(run: str, conn: Any) -> None:
    for name in ("a", "b", "c"):
        enqueue(run, name)
    cpu()()
    cpu()()
    rows = node_queue.reclaim_all_running_for_resume()
    assert sorted(row["node_id"] for row in rows) == ["a", "b"]
    assert {requeued(job)[0] for job in node_queue.list_jobs_for_run(run)} == {"queued"}
    assert (
        factories.one(conn, "SELECT sum(watchdog_retries + crash_count) FROM workflow_node_jobs")
        == 0
    )


def test_one_machines_running_jobs_of_a_queue_are_taken_back(run: str, conn: Any) -> None:
    enqueue(run, "a")
    enqueue(run, "b")
    enqueue(run, "g", queue="gpu")
    node_queue.claim_next_cpu_job(host="box")
    node_queue.claim_next_cpu_job(host="other")
    node_queue.claim_next_gpu_job(host="box")
    assert node_queue.requeue_running_for_worker("box", "cpu") == 1
    assert node_queue.requeue_running_for_worker("box", "cpu") == 0
    statuses = {j["node_id"]: j["status"] for j in node_queue.list_jobs_for_run(run)}
    assert statuses == {"a": "queued", "b": "running", "g": "running"}


def test_a_requeue_of_what_is_to_end_cancels_it(run: str, conn: Any) -> None:
    enqueue(run, "a")
    enqueue(run, "b")
    cpu()()
    second = cpu()()
    conn.execute(
        "UPDATE workflow_node_jobs SET cancel_requested_at = now() WHERE id = %s", (second["id"],)
    )
    assert node_queue.requeue_running_for_worker("box", "cpu") == 2
    statuses = {j["node_id"]: j["status"] for j in node_queue.list_jobs_for_run(run)}
    assert statuses == {"a": "queued", "b": "cancelled"}
    cpu()()
    conn.execute("UPDATE workflow_runs SET status = 'cancelled'")
    row = node_queue.requeue_job_for_retry(node_queue.list_jobs_for_run(run)[0]["id"])
    assert row is not None
    assert row["status"] == "cancelled"
    assert row["finished_at"] is not None


def test_a_runs_queued_jobs_are_cancelled(run: str, conn: Any) -> None:
    factories.node(conn, run, "running")
    cpu()()
    factories.node(conn, run, "a")
    factories.node(conn, run, "b", available_at="2999-01-01")
    factories.node(conn, run, "c", status="awaiting_input")
    factories.node(conn, None, "another run's")
    assert node_queue.cancel_queued_jobs_for_run(run) == 2
    assert node_queue.cancel_queued_jobs_for_run(run) == 0
    statuses = [job["status"] for job in node_queue.list_jobs_for_run(run)]
    assert statuses == ["running", "cancelled", "cancelled", "awaiting_input"]


# --- the terminal guard ------------------------------------------------------------------------


@pytest.mark.parametrize("over", TERMINAL)
def test_no_plain_update_leaves_a_terminal_state(run: str, conn: Any, over: str) -> None:
    job = factories.node(conn, run, status=over)
    for late in {"queued", "running", "awaiting_input", *TERMINAL} - {over}:
        with pytest.raises(psycopg.Error, match="and stays so") as caught:
            conn.execute("UPDATE workflow_node_jobs SET status = %s", (late,))
        assert caught.value.sqlstate == "QW002"
    conn.execute("UPDATE workflow_node_jobs SET error = 'a note'")
    assert factories.reread(conn, job)["status"] == over


def test_a_plain_update_ends_no_claim_of_ours(run: str, conn: Any) -> None:
    enqueue(run)
    job = transitions.claim_node(conn)
    for status in ("completed", "failed", "awaiting_input"):
        with pytest.raises(psycopg.Error, match=r"claim 1 of job .* is held by w1") as caught:
            conn.execute("UPDATE workflow_node_jobs SET status = %s", (status,))
        assert caught.value.sqlstate == "QW001"
    assert factories.reread(conn, job)["status"] == "running"
    transitions.complete_node(conn, job)
    assert outbox_kinds(conn) == [("n", "completed")]


# --- outbox and history ------------------------------------------------------------------------


def test_open_events_are_listed_oldest_first(run: str, conn: Any) -> None:
    for number in range(4):
        node_queue.mark_completed(enqueue(run, f"n{number}"), context_delta=None)
    conn.execute("UPDATE workflow_dispatch_events SET processed_at = now() WHERE node_id = 'n0'")
    assert node_queue.count_unprocessed_dispatch_events() == 3
    found = [event["node_id"] for event in node_queue.list_unprocessed_dispatch_events(limit=2)]
    assert found == ["n1", "n2"]


def test_an_app_adds_to_a_nodes_history(run: str, conn: Any) -> None:
    node_queue.record_node_event(
        run_id=run,
        node_id="n",
        event_type="progress_beat",
        job_id="j",
        attempt=2,
        host_label="h",
        queue="gpu",
        model="m",
        elapsed_s=1.5,
        error="e\x00" * 9000,
        detail={"a": 1},
    )
    row = conn.execute("SELECT * FROM workflow_node_events").fetchone()
    assert (row["event_type"], row["attempt"], row["elapsed_s"]) == ("progress_beat", 2, 1.5)
    assert (row["detail"], len(row["error"])) == ({"a": 1}, 8000)


@pytest.mark.parametrize(
    "given", [{"event_type": "nonsense"}, {"detail": {"a": {1}}}, {"attempt": 10**30}]
)
def test_an_event_that_cannot_be_recorded_is_logged_and_raises_nothing(
    run: str, caplog: pytest.LogCaptureFixture, given: dict[str, Any]
) -> None:
    with caplog.at_level(logging.WARNING):
        node_queue.record_node_event(
            **{"run_id": run, "node_id": "n", "event_type": "error"} | given
        )
    assert "of node n was not recorded" in caplog.text


@pytest.mark.parametrize(("attempt", "stored"), [(10**9, 32767), (-5, 0)])
def test_an_attempt_beyond_the_column_is_recorded_at_its_end(
    run: str, conn: Any, attempt: int, stored: int
) -> None:
    node_queue.record_node_event(run_id=run, node_id="n", event_type="error", attempt=attempt)
    assert factories.one(conn, "SELECT attempt FROM workflow_node_events") == stored


def test_an_event_is_lost_without_a_word_to_the_caller_when_the_database_is_away(
    clean_process: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        node_queue.record_node_event(run_id="r", node_id="n", event_type="error")
    assert "was not recorded: no database" in caplog.text


def test_old_events_are_pruned(run: str, conn: Any) -> None:
    conn.execute(
        "INSERT INTO workflow_node_events (run_id, node_id, event_type, created_at)"
        " SELECT %s, 'n', 'claimed', now() - i * interval '1 day' FROM generate_series(0, 39) i",
        (run,),
    )
    assert node_queue.prune_node_events() == 10
    assert node_queue.prune_node_events(older_than_days=4.5) == 25
    assert node_queue.prune_node_events(older_than_days=4.5) == 0
    conn.execute(
        "INSERT INTO workflow_node_events (run_id, node_id, event_type, created_at)"
        " SELECT %s, 'n', 'claimed', '2001-01-01' FROM generate_series(1, 5001)",
        (run,),
    )
    assert node_queue.prune_node_events() == 5001


# --- snapshot and heartbeats -------------------------------------------------------------------


def test_the_snapshot_lists_and_counts(run: str, conn: Any) -> None:
    assert node_queue.snapshot() == {
        "cpu": {"running": [], "queued": []},
        "gpu": {"running": [], "queued": []},
        "counts": {"cpu_queued": 0, "cpu_running": 0, "gpu_queued": 0, "gpu_running": 0},
    }
    for number in range(55):
        factories.node(conn, run, f"c{number}", priority=200 - number)
    factories.node(conn, run, "g", queue="gpu")
    gpu()()
    found = node_queue.snapshot()
    assert found["counts"] == {
        "cpu_queued": 55, "cpu_running": 0, "gpu_queued": 0, "gpu_running": 1,
    }  # fmt: skip
    assert [row["node_id"] for row in found["cpu"]["queued"]] == [f"c{n}" for n in range(54, 4, -1)]
    assert found["gpu"]["running"] == [node_queue.get_node_job(found["gpu"]["running"][0]["id"])]


def beat(**given: Any) -> None:
    node_queue.upsert_worker_heartbeat(
        **{"host_label": "box", "queue": "cpu", "concurrency": 1} | given
    )


def heartbeat(conn: Any) -> Any:
    return conn.execute("SELECT * FROM worker_heartbeats").fetchone()


def test_a_heartbeat_records_which_queue_a_machine_serves(db: ModuleType, conn: Any) -> None:
    beat(current_model="a", known_models=["b", "a"])
    row = heartbeat(conn)
    assert (row["concurrency"], row["current_model"], row["known_models"]) == (1, "a", ["a", "b"])
    beat(concurrency=3, update_current_model=False)
    row = heartbeat(conn)
    assert (row["concurrency"], row["current_model"], row["known_models"]) == (3, "a", ["a", "b"])
    beat(known_models=[])
    row = heartbeat(conn)
    assert (row["current_model"], row["known_models"]) == (None, [])


@pytest.mark.parametrize("stale", [True, False])
def test_a_machines_warm_model_is_forgotten(db: ModuleType, conn: Any, stale: bool) -> None:
    beat(current_model="a")
    assert node_queue.clear_worker_current_model("box", "cpu", mark_stale=stale) is not None
    assert node_queue.clear_worker_current_model("nope", "cpu") is None
    assert heartbeat(conn)["current_model"] is None
    old = "SELECT last_seen < now() - interval '5 minutes' FROM worker_heartbeats"
    assert factories.one(conn, old) is stale


def test_a_stale_machine_with_running_jobs_is_flagged_once(
    run: str, conn: Any, caplog: pytest.LogCaptureFixture
) -> None:
    enqueue(run)
    cpu()()
    beat()
    assert node_queue.flag_stale_workers_holding_running_jobs() == []
    conn.execute("UPDATE worker_heartbeats SET last_seen = now() - interval '31 s'")
    with caplog.at_level(logging.ERROR):
        (row,) = node_queue.flag_stale_workers_holding_running_jobs()
        assert row["last_flagged_dead_at"] is not None
        assert node_queue.flag_stale_workers_holding_running_jobs() == []
    (record,) = caplog.records
    assert record.levelname == "ERROR"
    assert record.getMessage().startswith("DEAD WORKER: host box queue cpu")
    beat()
    assert heartbeat(conn)["last_flagged_dead_at"] is None


def test_only_a_machine_with_running_jobs_of_that_queue_is_flagged(run: str, conn: Any) -> None:
    enqueue(run)
    node_queue.claim_next_cpu_job(host="other")
    config.register_ingest_task("t", lambda reason: {})
    jobs.enqueue(task_name="t", queue="fetch")
    node_queue.claim_next_ingest_job("fetch", host="box")
    for queue in ("cpu", "gpu", "fetch"):
        beat(queue=queue)
    conn.execute("UPDATE worker_heartbeats SET last_seen = now() - interval '31 s'")
    flagged = node_queue.flag_stale_workers_holding_running_jobs()
    assert [row["queue"] for row in flagged] == ["fetch"]
    assert node_queue.flag_stale_workers_holding_running_jobs(stale_after_s=0) == []
