"""All queued jobs are grouped by what keeps them, in the words of `why` for one of them."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import pytest

from queue_workflows import db, jobs, queues, runs
from queue_workflows import workers as workers_api
from queue_workflows.admin import attention, waiting_reasons
from tests.support import console, database, factories, named_statements, transitions
from tests.support.worker_reports import report

Row = dict[str, Any]


def grouped(conn: Any) -> list[Row]:
    """Return the groups, each of which says what `why` says of its first job."""
    found = waiting_reasons.groups(conn)
    for group in found["groups"]:
        one = jobs.explain(group["job"], conn=conn)
        assert one is not None
        of_place = {"next", "age", "priority", "line", "left", "warm", "first", "worth"}
        own = {(each["clause"], each["detail"]) for each in one["workers"]}
        kept_out = {reason for reason in own if reason[0] and reason[0] not in of_place}
        expected = {(each["clause"], each["detail"]) for each in group["workers"] if each["clause"]}
        assert kept_out == expected, group
        assert (group["clause"], group["detail"]) == (one["clause"], one["detail"]), group
        assert (group["queue"], group["kind"]) == (one["queue"], one["kind"])
        assert group["can_run"] == one["can_run"]
    assert found["left_out"] == 0
    return found["groups"]


def counts(conn: Any) -> dict[tuple[str, str | None], int]:
    return {(group["queue"], group["clause"]): group["count"] for group in grouped(conn)}


def test_nothing_waits(conn: Any) -> None:
    factories.ingest(conn, status="completed")
    assert waiting_reasons.groups(conn) == {"groups": [], "left_out": 0}
    assert console.printed("why") == "no job waits\n"


def test_queues_without_workers_limits_and_pauses(conn: Any) -> None:
    report(conn, transitions.who("load", "l1"))
    report(conn, transitions.who("mail", "m1"))
    report(conn, transitions.who("free", "f1"))
    queues.limit("load", max_running=1)
    queues.pause("mail", by="ann")
    for queue, count in (("load", 4), ("mail", 2), ("free", 3), ("nobody", 1)):
        for _ in range(count):
            factories.ingest(conn, queue=queue)
    transitions.claim(conn, transitions.who("load", "l1"))
    assert counts(conn) == {
        ("load", "limited"): 3, ("mail", "paused"): 2, ("free", None): 3,
        ("nobody", "no_worker"): 1,
    }  # fmt: skip
    details = {group["detail"] for group in grouped(conn)}
    assert "queue load runs its limit of 1" in details
    assert "queue mail is paused by ann" in details
    assert "no live worker serves queue nobody" in details


def test_jobs_that_are_blocked(conn: Any) -> None:
    queues.limit("load", partition_max_running=1)
    report(conn, transitions.who("load", "l1"))
    for key in ("a", "a", "b"):
        factories.ingest(conn, queue="load", lock_key=key)
    for _ in range(3):
        factories.ingest(conn, queue="load", partition_key="p")
    for year in (2998, 2999):
        factories.ingest(conn, queue="load", available_at=f"{year}-01-01")
    found = grouped(conn)
    by_clause = {group["clause"]: group for group in found}
    assert {clause: group["count"] for clause, group in by_clause.items()} == {
        "locked": 1, "limited": 2, "not_due": 2, None: 3,
    }  # fmt: skip
    assert by_clause["not_due"]["detail"].startswith("it is not due until 2998")
    assert by_clause["limited"]["detail"].startswith("it waits for partition p")


def test_the_waiters_of_each_lock_key_are_a_group(conn: Any) -> None:
    report(conn, transitions.who("load", "l1"))
    for key in ("a", "a", "a", "b", "b"):
        factories.ingest(conn, queue="load", lock_key=key)
    locked = [group for group in grouped(conn) if group["clause"] == "locked"]
    assert [(group["detail"][:24], group["count"]) for group in locked] == [
        ("it waits for lock key a:", 2), ("it waits for lock key b:", 1),
    ]  # fmt: skip


def test_jobs_of_paused_partitions_are_apart(conn: Any) -> None:
    report(conn, transitions.who("load", "l1"))
    for key in ("a", "a", "b"):
        factories.ingest(conn, queue="load", partition_key=key)
    queues.pause("load", partition="a")
    assert counts(conn) == {("load", "paused"): 2, ("load", None): 1}


def test_an_awaited_event_and_a_kept_job_are_apart(conn: Any) -> None:
    for name in ("approve", "approve", "pay"):
        job = factories.ingest(conn, available_at="2999-01-01")
        factories.insert(
            conn, "job_steps", job_table="ingest_jobs", job_id=job["id"], kind="event", name=name,
            state="waiting", claim_no=0,
        )  # fmt: skip
    kept = factories.ingest(conn, available_at="2999-01-01")
    conn.execute(
        "UPDATE ingest_jobs SET resume_host = 'box', resume_at = now() - interval '1 s',"
        " resume_until = available_at WHERE id = %s",
        [kept["id"]],
    )
    assert {group["detail"]: group["count"] for group in grouped(conn)} == {
        "its handler waits for event 'approve'": 2,
        "its handler waits for event 'pay'": 1,
        "it may run now: it is kept for host box until 2999-01-01 00:00:00 UTC, then for any": 1,
    }


def test_nodes_by_model_and_code(conn: Any) -> None:
    factories.insert(conn, "gpu_models", host_label="small", model="m", est_vram_gb=24.0)
    report(conn, transitions.who("gpu", "small", host="small"), vram_total_mb=12288)
    run_id = factories.run(conn)
    for n, model in enumerate(["m", "m", "other", None]):
        factories.node(conn, run_id, f"n{n}", queue="gpu", required_model=model)
    found = grouped(conn)
    assert [(group["model"], group["count"], group["can_run"]) for group in found] == [
        ("m", 2, False), (None, 2, True),
    ]  # fmt: skip
    (worker,) = found[0]["workers"]
    assert (worker["clause"], worker["count"], worker["machines"]) == ("vram", 1, ["small"])
    assert worker["detail"] == "the model needs 24 GB, its GPU has 12 GB"


def test_workers_that_are_off_or_wait_for_memory(conn: Any) -> None:
    report(conn, transitions.who("cpu", "a", host="one"))
    report(conn, transitions.who("cpu", "b", host="two"), {"throttle": "RAM at 93 %"})
    workers_api.disable("one", "cpu")
    factories.node(conn)
    (group,) = grouped(conn)
    assert {each["clause"] for each in group["workers"]} == {"off", "throttled"}
    assert group["can_run"]


def test_jobs_that_no_live_worker_can_take_have_one_reason(conn: Any) -> None:
    """It is the one of the needs for a person, and names a switch only if that would help."""
    factories.insert(conn, "gpu_models", host_label="box", model="large", est_vram_gb=24.0)
    report(
        conn, transitions.who("gpu", "g", host="box"), known_models=["large", "small"],
        vram_total_mb=12288, state="parked",
    )  # fmt: skip
    workers_api.disable("box", "gpu", stop_policy="drain")
    run_id = factories.run(conn)
    for model in ("large", "small", "unknown"):
        factories.node(conn, run_id, model, queue="gpu", required_model=model)
        factories.insert(conn, "gpu_unassignable", model=model, reason="model", detail="old")
    found = {group["model"]: group for group in grouped(conn)}
    expected = {
        "large": ("vram", "it needs 24 GB, and the largest GPU that may load it has 12 GB"),
        "small": ("off", "every machine that can take it is off: box"),
        "unknown": ("model", "no live gpu worker knows the model"),
    }
    for model, (clause, reason) in expected.items():
        group = found[model]
        said = group["clause"], group["detail"], group["can_run"]
        assert said == (clause, f"no worker can take it, as {reason}", False)
    needs = {each.text for each in attention.facts(conn, attention.Facts()).needs}
    for model, (_, reason) in expected.items():
        assert f"no worker can take 1 queued gpu job of model {model}: {reason}" in needs
    done = console.command("why")
    assert done.code == 1 and "every machine that can take it is off: box" in done.out


def test_a_paused_queue_without_a_worker_says_both(conn: Any) -> None:
    """Starting a worker alone would end no wait, which the needs for a person say, too."""
    for _ in range(2):
        factories.ingest(conn, queue="mail")
    conn.execute("UPDATE ingest_jobs SET created_at = now() - interval '40 min'")
    queues.pause("mail", by="bob")
    (group,) = grouped(conn)
    assert group["clause"] == "paused"
    said = "queue mail is paused by bob, and no live worker serves its queue"
    assert group["detail"] == said
    (need,) = attention.facts(conn, attention.Facts()).needs
    assert need.text.startswith("mail: 2 due jobs, the first for 40 min ")
    assert need.text.endswith(": queue mail is paused by bob; also no live worker")
    assert need.remedy.startswith("`queue-workflows queues resume mail`, then start ")
    queues.resume("mail")
    (need,) = attention.facts(conn, attention.Facts()).needs
    assert need.text == "mail: 2 due jobs and no live worker"


def test_nodes_of_ended_runs_and_unknown_ones(conn: Any) -> None:
    report(conn, transitions.who("cpu", "a"), {"claim": {"nodes": ["other"]}})
    factories.node(conn, factories.run(conn, status="cancelled"))
    factories.node(conn)
    factories.node(conn)
    assert counts(conn) == {("cpu", "run_over"): 1, ("cpu", "unknown_node"): 2}


def test_more_jobs_than_are_read(conn: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting_reasons, "GROUPED", 50)
    for n in range(60):
        factories.ingest(conn, queue="load")
        factories.ingest(conn, queue="mail", available_at="2999-01-01")
        if n < 10:
            factories.ingest(conn, queue="small")
    found = {group["queue"]: group for group in grouped(conn)}
    assert {queue: (group["count"], group["is_more"]) for queue, group in found.items()} == {
        "load": (50, True), "mail": (50, True), "small": (10, False),
    }  # fmt: skip
    monkeypatch.setattr(waiting_reasons, "BUCKETS", 2)
    assert waiting_reasons.groups(conn)["left_out"] == 10


def test_the_command_prints_the_groups(conn: Any) -> None:
    factories.ingest(conn, queue="nobody")
    done = console.command("why")
    assert done.code == 1
    assert "1 ingest job of queue nobody: no live worker serves queue nobody" in done.out
    report(conn, transitions.who("nobody", "n1", host="box"))
    done = console.command("why")
    assert done.code == 0
    assert "1 ingest job of queue nobody: they wait for their turn" in done.out
    assert "1 worker (box): can take it in its turn" in done.out
    (group,) = console.reply("why")["groups"]
    assert (group["queue"], group["count"], group["clause"]) == ("nobody", 1, None)


def test_a_run_is_explained_as_before(conn: Any) -> None:
    run_id = factories.run(conn)
    job = factories.node(conn, run_id)
    explained = runs.explain(run_id)
    assert explained is not None
    assert [node["id"] for node in explained["nodes"]] == [job["id"]]


# --- a large fleet -----------------------------------------------------------------------------


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """Return the texts of the statements that were executed."""
    return named_statements.executed(monkeypatch)


def test_the_needs_for_a_person_are_found_by_few_statements(conn: Any, calls: list[bytes]) -> None:
    run_id = factories.run(conn)
    conn.execute(
        "INSERT INTO workflow_dispatch_events (run_id, node_id, kind, error, created_at)"
        " VALUES (%s, 'n', 'completed', 'no provider', now() - interval '20 s')",
        [run_id],
    )
    factories.run(conn, id="late", status="queued")
    conn.execute("UPDATE workflow_runs SET queued_at = now() - interval '1 min'")
    factories.ingest(conn, queue="mail")
    conn.execute("UPDATE ingest_jobs SET created_at = now() - interval '1 min'")
    calls.clear()
    found = attention.facts(conn, attention.Facts())
    assert len(calls) <= 7
    assert [need.kind for need in found.needs] == ["orchestrator", "orchestrator", "queue"]
    outbox, late, queue = (need.text for need in found.needs)
    assert outbox.startswith(f"an event of run {run_id} waits for ") and "no provider" in outbox
    assert late.startswith("run late has not been started for 1 min")
    assert queue == "mail: 1 due job and no live worker"
    assert found.absent is not None
    assert found.absent.startswith("No orchestrator has taken up work for 1 min")
    calls.clear()
    assert attention.facts(conn, found).needs == found.needs
    assert len(calls) == 1


def test_a_dead_worker_is_a_need_until_another_comes_or_its_queue_is_off(conn: Any) -> None:
    def needs() -> list[tuple[str, str]]:
        found = attention.facts(conn, attention.Facts()).needs
        return [(need.kind, need.text) for need in found]

    dead = {"queue": "gpu", "pid": 9, "state": "dead"}
    factories.insert(conn, "workers", worker_id="d", host_label="box-3", **dead)
    assert needs() == [], "its parent may start it again"
    conn.execute("UPDATE workers SET last_seen = now() - interval '6 min'")
    died = ("machine", "box-3: its worker of queue gpu died, and none came back")
    assert needs() == [died]
    conn.execute("UPDATE workers SET state = 'idle'")
    assert needs() == [died], "it is silent"
    report(conn, transitions.who("gpu", "new", host="box-3"))
    assert needs() == []
    conn.execute("DELETE FROM workers WHERE worker_id = 'new'")
    workers_api.disable("box-3", "gpu")
    assert needs() == []
    workers_api.enable("box-3", "gpu")
    conn.execute("UPDATE workers SET last_seen = now() - interval '25 h'")
    assert needs() == []


def test_the_needs_count_the_causes_of_failures(conn: Any) -> None:
    def causes() -> tuple[str, str | None]:
        (need,) = attention.facts(conn, attention.Facts()).needs
        return need.text, need.error

    failed = {"status": "failed", "finished_at": factories.one(conn, "SELECT now()")}
    factories.ingest(conn, error="ValueError: row 1 has no price", **failed)
    assert causes() == ("1 job failed within an hour", "ValueError: row 1 has no price")
    factories.ingest(conn, error="ValueError: row 2 has no price", **failed)
    text, error = causes()
    assert (text, error and error[:16]) == ("2 jobs failed within an hour", "ValueError: row ")
    factories.ingest(conn, error="KeyError: 'x'", **failed)
    assert causes() == (
        "3 jobs failed within an hour", "2 causes, most: ValueError: row # has no price (2)",
    )  # fmt: skip


def test_no_check_contradicts_that_no_orchestrator_runs(conn: Any) -> None:
    """Results of checks are reused, but not from before it went."""
    begin = factories.one(conn, "SELECT now()")
    factories.run(conn, id="others", started_at=begin)
    factories.run(conn, id="late", status="queued")
    conn.execute("UPDATE workflow_runs SET queued_at = now() - interval '1 min'")

    def late(found: attention.Facts) -> str:
        return next(need.text for need in found.needs if need.text.startswith("run late "))

    found = attention.facts(conn, attention.Facts())
    assert found.absent is None
    assert late(found).endswith("though others were started within the last minute")
    conn.execute(
        "UPDATE workflow_runs SET started_at = now() - interval '2 min' WHERE id = 'others'"
    )
    found = attention.facts(conn, found)
    assert found.absent is not None
    assert "others were started" not in late(found)


def test_workers_of_a_queue_share_the_count_of_the_jobs_before_one(
    conn: Any, calls: list[bytes]
) -> None:
    for number in range(30):
        report(conn, transitions.who("load", f"l{number}"))
    *_, job = [factories.ingest(conn, queue="load") for _ in range(3)]
    calls.clear()
    explained = jobs.explain(job["id"], conn=conn)
    assert len(calls) <= 6
    assert explained is not None and len(explained["workers"]) == 30
    reasons = {(worker["clause"], worker["detail"]) for worker in explained["workers"]}
    assert reasons == {("age", "behind 2 older jobs of its priority")}


def test_the_groups_of_retried_nodes_are_found_by_six_statements(
    conn: Any, calls: list[bytes]
) -> None:
    run_id = factories.run(conn)
    report(conn, transitions.who("cpu", "c"))
    for number in range(9):
        factories.node(
            conn, run_id, f"n{number}", node_module=f"m{number}", attempts=1, max_attempts=3,
            error="it failed",
        )  # fmt: skip
    calls.clear()
    found = waiting_reasons.groups(conn)
    assert len(calls) <= 6
    assert sum(group["count"] for group in found["groups"]) == 9


def test_workers_count_the_jobs_before_one_in_the_order_of_their_own_claims(conn: Any) -> None:
    run_id = factories.run(conn)
    report(conn, transitions.who("cpu", "oldest"))
    report(conn, transitions.who("cpu", "newest", newest=True))
    first, *_ = [factories.node(conn, run_id, f"n{number}") for number in range(3)]
    explained = jobs.explain(first["id"], conn=conn)
    assert explained is not None
    assert {worker["worker_id"]: worker["detail"] for worker in explained["workers"]} == {
        "oldest": "it is next in line", "newest": "behind 2 newer jobs of its priority",
    }  # fmt: skip


def test_the_nodes_of_a_run_are_explained_by_one_reading_of_the_workers(
    conn: Any, calls: list[bytes]
) -> None:
    run_id = factories.run(conn)
    for number in range(20):
        factories.node(conn, run_id, f"n{number}", queue="gpu" if number % 2 else "cpu")
    report(conn, transitions.who("cpu", "c"))
    calls.clear()
    explained = runs.explain(run_id, conn=conn)
    assert calls.count(named_statements.texts()["waiting_facts.workers"]) == 1
    assert explained is not None
    clauses = [(node["queue"], node["clause"], len(node["workers"])) for node in explained["nodes"]]
    assert clauses == [("cpu", None, 1), ("gpu", "no_worker", 0)] * 10
    assert explained["nodes"][2]["workers"][0]["detail"] == "behind 1 older job of its priority"


def test_the_choices_of_gpu_workers_are_read_once_for_all_jobs(
    conn: Any, calls: list[bytes]
) -> None:
    for number, policy in enumerate(["strict", "balanced"] * 3):
        who = transitions.who("gpu", f"g{number}", host=f"h{number}", policy=policy)
        report(conn, who, {"claim": {"grace_s": "x", "bound_s": -1, "policy": policy}})
    report(conn, transitions.who("gpu", "warm", host="den", model="m", policy="balanced"))
    run_id = factories.run(conn)
    for number, model in enumerate(["m", "m", "other", None]):
        factories.node(conn, run_id, f"n{number}", queue="gpu", required_model=model)
    with conn.transaction():  # the same now() for all
        calls.clear()
        explained = runs.explain(run_id, conn=conn)
        assert calls.count(named_statements.texts()["waiting_facts.gpu_choices"]) == 1
        assert len(calls) <= 12
        assert explained is not None and len(explained["nodes"]) == 4
        for node in explained["nodes"]:
            one = jobs.explain(node["id"], conn=conn)
            assert one is not None and one.pop("lost") is False
            assert node == one


def test_the_many_workers_of_a_queue_hide_no_others(conn: Any) -> None:
    conn.execute(
        "INSERT INTO workers (worker_id, host_label, queue, pid)"
        " SELECT 'm' || n, 'a', 'many', n FROM generate_series(1, 1100) n"
    )
    report(conn, transitions.who("few", "f", host="z"))
    for queue in ("many", "few"):
        factories.ingest(conn, queue=queue)
    found = {group["queue"]: group for group in waiting_reasons.groups(conn)["groups"]}
    assert {queue: group["clause"] for queue, group in found.items()} == {"many": None, "few": None}
    assert [(each["count"], each["machines"]) for each in found["few"]["workers"]] == [(1, ["z"])]


def test_jobs_of_many_queues_are_counted(conn: Any) -> None:
    conn.execute(
        "INSERT INTO ingest_jobs (task_name, queue)"
        " SELECT 't', 'queue-' || n FROM generate_series(1, 500) n"
    )
    found = waiting_reasons.groups(conn)
    assert sum(group["count"] for group in found["groups"]) + found["left_out"] == 500


def test_an_ingest_job_in_a_queue_of_nodes_is_explained(conn: Any) -> None:
    report(conn, transitions.who("gpu", "g"))
    job = factories.ingest(conn, queue="gpu")
    explained = jobs.explain(job["id"], conn=conn)
    assert explained is not None
    assert [worker["clause"] for worker in explained["workers"]] == ["next"]


# --- the plan ----------------------------------------------------------------------------------

MANY = 30_000
STATES = {"analyzed": "ANALYZE", "without statistics": "SELECT 1", "as of when it was empty": ""}


@pytest.fixture(scope="module", params=[*STATES])
def large(own_database: database.Database, request: pytest.FixtureRequest) -> Generator[str]:
    """Return the DSN of a database with many queued and many completed jobs."""
    name = own_database.fresh_name()
    dsn = own_database.create_migrated(name)
    with database.environment(QUEUE_WORKFLOWS_DB_URL=dsn), db.connect(limited=False) as conn:
        for table in ("ingest_jobs", "workflow_node_jobs", "workflow_runs"):
            conn.execute(f"ALTER TABLE {table} SET (autovacuum_enabled = off)".encode())
            conn.execute(f"ALTER TABLE {table} DISABLE TRIGGER USER".encode())
            if not STATES[request.param]:
                conn.execute(f"ANALYZE {table}".encode())
        conn.execute(
            b"INSERT INTO workflow_runs (id, workflow_name, status)"
            b" SELECT 'r' || g, 'w', 'running' FROM generate_series(1, 3000) g"
        )
        conn.execute(
            b"INSERT INTO ingest_jobs (id, task_name, queue, status, blocked_reason, available_at)"
            b" SELECT 'j' || g, 't', 'q' || mod(g, 5),"
            b" CASE WHEN mod(g, 2) = 0 THEN 'queued' ELSE 'completed' END,"
            b" CASE WHEN mod(g, 4) = 0 THEN 'not_due' END,"
            b" CASE WHEN mod(g, 4) = 0 THEN now() + interval '1 day' END"
            b" FROM generate_series(1, %s) g",
            [MANY],
        )
        conn.execute(
            b"INSERT INTO workflow_node_jobs (id, run_id, node_id, node_module, queue, status)"
            b" SELECT 'n' || g, 'r' || (1 + mod(g, 3000)), 'n' || g, 'm', 'cpu',"
            b" CASE WHEN mod(g, 2) = 0 THEN 'queued' ELSE 'completed' END"
            b" FROM generate_series(1, %s) g",
            [MANY],
        )
        if STATES[request.param]:
            conn.execute(STATES[request.param].encode())
    yield dsn
    own_database.drop(name)


def test_groups_read_little_of_a_large_table(large: str) -> None:
    most = 100
    with db.connect(url=large) as conn:
        read = conn.execute(
            b"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) "
            + named_statements.texts()["waiting_facts.buckets"],
            {"most": most, "limit": 100},
        ).fetchone()
        (plan,) = next(iter((read or {}).values()))
    blocks = plan["Plan"]["Shared Hit Blocks"] + plan["Plan"]["Shared Read Blocks"]
    # 5 queues and twice as many blocked ones, each with a look-up or two.
    assert blocks < 40 * most
