"""`why` prints per live worker the first reason that keeps it from a job."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

from queue_workflows import jobs as jobs_api
from queue_workflows import runs as runs_api
from queue_workflows import workers as workers_api
from tests import test_invariant_gpu_claims as gpu
from tests.support import console, factories, sweeps, transitions
from tests.support.worker_reports import report

Row = dict[str, Any]


def claimed(conn: Any, who: transitions.Claimant) -> Row | None:
    return next(iter(transitions.claim(conn, who)), None)


def clauses(conn: Any, job: Row) -> dict[str, str | None]:
    explained = jobs_api.explain(job["id"], conn=conn)
    assert explained is not None
    return {worker["worker_id"]: worker["clause"] for worker in explained["workers"]}


def details(conn: Any, job: Row) -> list[str]:
    explained = jobs_api.explain(job["id"], conn=conn)
    assert explained is not None
    return [worker["detail"] for worker in explained["workers"]]


def agree(
    conn: Any, who: transitions.Claimant, jobs: list[Row], claim: Callable[[], Row | None]
) -> int:
    """`why` calls that job next which the claim takes, and none of the others; how many claims."""
    count = 0
    while True:
        with conn.transaction(force_rollback=True):
            taken = claim()
        explained = {job["id"]: clauses(conn, job).get(who.worker_id) for job in jobs}
        expected = [taken["id"]] if taken and taken["id"] in explained else []
        assert [job_id for job_id, clause in explained.items() if clause == "next"] == expected
        if claim() is None or count == 5:
            return count
        count += 1
        jobs = [job for job in jobs if taken is None or job["id"] != taken["id"]]


# --- the two cannot disagree -------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["strict", "balanced"])
@pytest.mark.parametrize(
    "seed", [100, 101, 102, *(pytest.param(n, marks=pytest.mark.slow) for n in (103, 104, 105))]
)
def test_next_is_what_a_gpu_claim_takes(db: ModuleType, policy: str, seed: int) -> None:
    with db.connect() as conn, conn.transaction(force_rollback=True):
        given = gpu.world(conn, seed)
        view = given.view
        who = transitions.who(
            "gpu", "me", host=gpu.HERE, model=view.warm, models=given.known, policy=policy,
            grace_s=view.grace_s, bound_s=view.bound_s, newest=seed % 3 == 0,
        )  # fmt: skip
        report(conn, who)
        rows = conn.execute("SELECT * FROM workflow_node_jobs WHERE status = 'queued'").fetchall()
        with conn.transaction(force_rollback=True):
            likely = [claimed(conn, who) for _ in range(6)]
        chosen = {job["id"] for job in likely if job}
        others = random.Random(seed).sample(rows, min(4, len(rows)))
        jobs = [row for row in rows if row["id"] in chosen or row in others]

        def claim() -> Row | None:
            taken = claimed(conn, who)
            # What it runs would be warm then, and a claim while it runs is none of a worker's.
            conn.execute("UPDATE workflow_node_jobs SET worker_id = 'w' WHERE worker_id = 'me'")
            return taken

        agree(conn, who, jobs, claim)


@pytest.mark.parametrize("newest", [False, True])
def test_next_is_what_a_cpu_claim_takes(conn: Any, newest: bool) -> None:
    run_id = factories.run(conn)
    jobs = [
        factories.node(conn, run_id, f"n{number}", priority=priority)
        for number, priority in enumerate([100, 50, 100, 50, 100])
    ]
    who = transitions.who("cpu", "me", newest=newest)
    report(conn, who)
    assert agree(conn, who, jobs, lambda: claimed(conn, who)) == 5


def test_next_is_what_an_ingest_claim_takes(conn: Any) -> None:
    jobs = [factories.ingest(conn, priority=priority) for priority in (100, 50, 100)]
    who = transitions.who("fetch", "me")
    report(conn, who)
    assert agree(conn, who, jobs, lambda: claimed(conn, who)) == 3


# --- the clauses -------------------------------------------------------------------------------


def test_reasons_that_hold_for_every_worker(conn: Any) -> None:
    run_id = factories.run(conn)
    due = factories.node(conn, run_id, "later", available_at="2999-01-01")
    first = factories.node(conn, run_id, "first", lock_key="k")
    second = factories.node(conn, run_id, "second", lock_key="k")
    done = factories.node(conn, run_id, "done", status="completed")
    explained = {job["node_id"]: jobs_api.explain(job["id"]) for job in (due, first, second, done)}
    assert {name: row and row["clause"] for name, row in explained.items()} == {
        "later": "not_due", "first": "no_worker", "second": "locked", "done": "status",
    }  # fmt: skip
    assert explained["second"] and first["id"] in explained["second"]["detail"]
    over = factories.node(conn, factories.run(conn, status="cancelled"))
    assert (jobs_api.explain(over["id"]) or {})["clause"] == "run_over"
    assert jobs_api.explain("nothing") is None


def test_a_node_is_explained_beside_entries_without_an_id(conn: Any) -> None:
    entries = [{"arm": "b"}, {"arm": "b", "round": 1}, {"id": 5, "arm": "b"}]
    run_id = factories.run(conn, status="failed", definition={"nodes": entries})
    for node_id in ("None", "5"):
        job = factories.node(conn, run_id, node_id, status="skipped")
        assert (jobs_api.explain(job["id"]) or {})["detail"] == "it is skipped"


def test_an_unserved_queue_lets_others_have_its_lock_key(conn: Any) -> None:
    report(conn, transitions.who("fetch", "me"))
    ghost = factories.ingest(conn, queue="my_ghost", lock_key="k")
    node = factories.node(conn, queue="gpu", lock_key="k")
    factories.ingest(conn, lock_key="k")
    factories.node(conn, lock_key="k")
    report(conn, transitions.who("cpu", "other"))
    assert sweeps.served(conn, 30) == ["cpu", "fetch"]
    assert sweeps.unserved(conn, 30) == (0, 2)
    said = "its queue {} is served by no worker, so its lock key passed to others"
    for job, text in ((ghost, said.format("my_ghost")), (node, said.format("gpu"))):
        explained = jobs_api.explain(job["id"]) or {}
        assert (explained["clause"], explained["detail"]) == ("unserved", text)
    listed = console.printed("jobs", "list")
    assert "no worker serves its queue; its lock key passed on\n" in listed
    assert said.format("gpu") in " ".join(console.printed("show", node["run_id"]).split())
    text = "no worker takes the jobs of queue {}, so the lock keys of 1 job passed to others"
    shown, checked = console.printed("status"), console.command("doctor").out
    for queue in ("my_ghost", "gpu"):
        assert f"{text.format(queue)}\n" in shown
        assert text.format(queue) in checked
    conn.execute("INSERT INTO queue_settings (queue, paused_at) VALUES ('my_ghost', now())")
    detail = (jobs_api.explain(ghost["id"]) or {})["detail"]
    assert detail == "its queue my_ghost is paused, so its lock key passed to others"
    conn.execute("DELETE FROM queue_settings")
    report(conn, transitions.who("my_ghost", "new"))
    detail = (jobs_api.explain(ghost["id"]) or {})["detail"]
    assert detail.startswith("its queue has a worker again")
    for shown in (console.printed("status"), console.command("doctor").out):
        assert text.format("my_ghost") not in shown
        assert text.format("gpu") in shown
    conn.execute("INSERT INTO queue_settings (queue, paused_at) VALUES ('my_ghost', now())")
    assert text.format("my_ghost") in console.printed("status"), "its worker takes none"


def test_why_a_run_waits_has_its_first_waiting_nodes(conn: Any) -> None:
    graph = [{"id": name, "deps": deps} for name, deps in (("m", []), ("n", ["m"]), ("o", ["n"]))]
    run_id = factories.run(conn, status="running", definition={"nodes": graph})
    child = factories.run(conn, status="running")
    factories.node(conn, run_id, "m", status="awaiting_input", child_run_id=child)
    for number in range(5):
        factories.node(conn, run_id, f"m[{number}]/x")
    factories.node(conn, run_id, "m[5]/x", status="completed")
    explained = runs_api.explain(run_id, limit=3) or {}
    assert [node["name"] for node in explained["nodes"]] == ["m", "m[0]/x", "m[1]/x"]
    assert explained["nodes"][0]["detail"] == f"it waits for its run {child} (running)"
    assert explained["left_out"] == 5
    whole = runs_api.explain(run_id) or {}
    assert [(node["name"], node["detail"]) for node in whole["nodes"][-2:]] == [
        ("n", "it waits for m (awaiting_input)"), ("o", "it waits for n (waiting)"),
    ]  # fmt: skip
    assert whole["left_out"] == 0


def test_workers_of_a_host_differ_by_their_gpus(conn: Any) -> None:
    factories.insert(conn, "gpu_models", host_label="box", model="m", est_vram_gb=24.0)
    report(conn, transitions.who("gpu", "small"), vram_total_mb=12288)
    report(conn, transitions.who("gpu", "large"), vram_total_mb=49152)
    report(conn, transitions.who("gpu", "unknown"))
    job = factories.node(conn, queue="gpu", required_model="m")
    assert clauses(conn, job) == {"small": "vram", "large": "next", "unknown": "next"}
    report(conn, transitions.who("gpu", "other", host="den"), known_models=["k"])
    job = factories.node(conn, queue="gpu", required_model="k")
    assert clauses(conn, job) == {
        "small": "model", "large": "model", "unknown": "model", "other": "next",
    }  # fmt: skip
    assert "it registers no model, and others know k" in details(conn, job)


def test_reasons_that_hold_for_one_worker(conn: Any) -> None:
    factories.insert(conn, "gpu_models", host_label="small", model="m", est_vram_gb=24.0)
    for host, more in (
        ("off", {}),
        ("stranger", {"known_models": ["n"]}),
        ("small", {"vram_total_mb": 12288}),
        ("box", {}),
    ):
        report(conn, transitions.who("gpu", host, host=host), **more)
    workers_api.disable("off", "gpu", by="me")
    job = factories.node(conn, queue="gpu", required_model="m")
    assert clauses(conn, job) == {
        "off": "off", "stranger": "model", "small": "vram", "box": "next",
    }  # fmt: skip
    assert "the model needs 24 GB, its GPU has 12 GB" in details(conn, job)


def test_a_worker_that_waits_for_memory(conn: Any) -> None:
    job = factories.node(conn)
    detail = {"throttle": "RAM at 93.1 % (limit 90 %)"}
    report(conn, transitions.who(), detail, state="throttled")
    assert clauses(conn, job) == {"w1": "throttled"}
    assert details(conn, job) == ["it waits for memory: RAM at 93.1 % (limit 90 %)"]
    why_not = jobs_api.explain(job["id"], conn=conn)
    assert why_not is not None and why_not["can_run"]


def test_a_worker_that_obeys_no_switch_is_never_off(conn: Any) -> None:
    report(conn, transitions.who("gpu", "deaf", obey=False), obey=False)
    workers_api.disable("box", "gpu")
    job = factories.node(conn, queue="gpu")
    assert clauses(conn, job) == {"deaf": "next"}
    assert claimed(conn, transitions.who("gpu", "deaf", obey=False)) is not None


@pytest.mark.parametrize("asked", [False, True])
def test_what_a_worker_loads_is_warm_when_it_claims_next(conn: Any, asked: bool) -> None:
    """Reported for the job that it runs, or on request."""
    run_id = factories.run(conn)
    who = transitions.who("gpu", "me")
    if asked:
        report(conn, who, {"model": {"id": "b", "loading": True}})
    else:
        factories.node(conn, run_id, "running", queue="gpu", required_model="b")
        assert claimed(conn, who) is not None
        report(conn, who, state="busy")
    first = factories.node(conn, run_id, "a", queue="gpu", required_model="a")
    second = factories.node(conn, run_id, "b", queue="gpu", required_model="b")
    assert [clauses(conn, job) for job in (first, second)] == [{"me": "warm"}, {"me": "next"}]


def test_jobs_that_are_claimed_before_it(conn: Any) -> None:
    run_id = factories.run(conn)
    report(conn, transitions.who("cpu", "me"))
    jobs = [factories.node(conn, run_id, f"n{n}", priority=p) for n, p in enumerate([100, 100, 1])]
    assert details(conn, jobs[0]) == ["behind 1 job of a better priority"]
    conn.execute("DELETE FROM workflow_node_jobs WHERE node_id = 'n2'")
    assert details(conn, jobs[1]) == ["behind 1 older job of its priority"]


def test_to_whom_it_is_left(conn: Any) -> None:
    report(conn, transitions.who("gpu", "warm", host="den", model="m", policy="balanced"))
    report(conn, transitions.who("gpu", "cold", policy="balanced"))
    job = factories.node(conn, queue="gpu", required_model="m")
    assert clauses(conn, job) == {"warm": "next", "cold": "left"}
    assert any(text.startswith("left to den") for text in details(conn, job))


# --- the command -------------------------------------------------------------------------------


def why(*arguments: str) -> tuple[int, str]:
    done = console.command("why", *arguments)
    return done.code, done.out + done.err


def test_the_exit_code_shows_whether_it_will_run(conn: Any) -> None:
    run_id = factories.run(conn)
    job = factories.node(conn, run_id)
    code, said = why(job["id"])
    assert code == 1 and "no live worker serves queue cpu" in said
    report(conn, transitions.who("cpu", "me"))
    code, said = why(job["id"][:20])
    assert code == 0 and "box pid 7 (idle): it is next in line" in said
    code, said = why(job["id"], "--json")
    assert code == 0 and json.loads(said)["workers"][0]["clause"] == "next"
    conn.execute("UPDATE workflow_runs SET status = 'cancelled'")
    code, said = why(job["id"])
    assert code == 0 and "it is cancelled" in said
    code, said = why(run_id)
    assert code == 0 and f"run {run_id} (w): cancelled" in said
    code, said = why("nothing")
    assert code == 1 and "there is no run or job" in said
