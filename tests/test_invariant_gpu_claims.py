"""A gpu claim takes the job that the rule chooses, for any fleet and queue."""

from __future__ import annotations

import random
from collections.abc import Generator
from types import ModuleType
from typing import Any, NamedTuple

import pytest

from benchmarks import fleet_rule as rule
from tests.support import factories, tabled, transitions

MODELS = ("a", "b", "c", "d")
HERE = "box"


class World(NamedTuple):
    """What the database was filled with, as a rule sees it."""

    view: rule.View
    """Without its lines."""
    jobs: dict[str, list[rule.Job]]
    """What the worker can take, of runs that are not over."""
    known: list[str] | None


@pytest.fixture
def still(db: ModuleType) -> Generator[Any]:
    """A transaction, in which now() stands still; rolled back."""
    with db.connect() as conn, conn.transaction(force_rollback=True):
        yield conn


def times(conn: Any, rng: random.Random, host: str) -> None:
    """What was learned of some models there."""
    for model in MODELS:
        if rng.random() < 0.7:
            factories.insert(
                conn, "gpu_models", model=model, host_label=host,
                load_s=rng.choice([None, rng.uniform(1, 200)]),
                run_s=rng.choice([None, rng.uniform(1, 240)]),
            )  # fmt: skip


def here(conn: Any, host: str, column: str) -> dict[str, float]:
    """How long each model takes on a host: its own average, else the others', else a minute."""
    rows = conn.execute("SELECT * FROM gpu_models").fetchall()
    found: dict[str, float] = {}
    for model in MODELS:
        known = {row["host_label"]: row[column] for row in rows if row["model"] == model}
        known = {name: value for name, value in known.items() if value is not None}
        other = sum(known.values()) / len(known) if known else 60.0
        found[model] = known.get(host, other)
    return found


def others(
    conn: Any, rng: random.Random, run_id: str
) -> tuple[dict[str, list[rule.Holder]], set[str]]:
    """Live workers with a model, idle, at work or loading, and some that do not count.

    And what those register that live, of which some are switched off.
    """
    holders: dict[str, list[rule.Holder]] = {}
    registered: set[str] = set()
    for number in range(rng.randint(0, 4)):
        host, model = rng.choice([HERE, "den", "attic"]), rng.choice(MODELS)
        state = rng.choice(["idle", "busy", "loading", "parked", "silent"])
        began_s, warm_s = rng.uniform(0, 300), rng.uniform(0, 300)
        known = rng.choice([None, None, rng.sample(MODELS, 2)])
        registered |= set(known or ()) if state != "silent" else set()
        conn.execute(
            "INSERT INTO workers (worker_id, host_label, queue, pid, state, current_model,"
            " known_models, model_since, last_seen) VALUES (%s, %s, 'gpu', 1, %s, %s, %s,"
            " now() - %s * interval '1 second', now() - %s * interval '1 second')",
            (f"w{number}", host, {"loading": "busy", "silent": "idle"}.get(state, state),
             None if state == "loading" else model, known, warm_s, 60 if state == "silent" else 5),
        )  # fmt: skip
        load_s, run_s = here(conn, host, "load_s")[model], here(conn, host, "run_s")[model]
        free_s = 0.0
        if state in ("busy", "loading"):
            held = f"w{number}"
            node = factories.node(
                conn, run_id, f"held {number}", queue="gpu", required_model=model,
                status="running", worker_id=held, claimed_by=host, claim_no=1,
            )  # fmt: skip
            conn.execute(
                "UPDATE workflow_node_jobs SET lease_expires_at = now() + interval '1 hour',"
                " started_at = now() - %s * interval '1 second' WHERE id = %s",
                (began_s, node["id"]),
            )
            left_s = (
                load_s + run_s - began_s if state == "loading" else run_s - min(began_s, warm_s)
            )
            free_s = max(0.0, left_s)
        if state in ("idle", "busy", "loading"):
            holders.setdefault(model, []).append(rule.Holder(free_s, run_s))
    return holders, registered


def world(conn: Any, seed: int) -> World:
    """A random fleet and queue, and of the jobs some that their runs left behind."""
    rng = random.Random(seed)
    run_id, over = factories.run(conn), factories.run(conn, status="cancelled")
    for host in (HERE, "den", "attic"):
        times(conn, rng, host)
    known = rng.choice([None, list(MODELS), rng.sample(MODELS, 2)])
    holders, registered = others(conn, rng, run_id)
    can = {*MODELS} - registered if known is None else {*known}
    factories.insert(
        conn, "workers", worker_id="me", host_label=HERE, queue="gpu", pid=1, known_models=known
    )
    waits = sorted((rng.uniform(0, 6000) for _ in range(rng.randint(0, 60))), reverse=True)
    jobs: dict[str, list[rule.Job]] = {}
    for number, waited_s in enumerate(waits):
        model = rng.choice([*MODELS, *MODELS, rule.NO_MODEL])
        priority = rng.choice([10, 50, 100, 100])
        row = conn.execute(
            "INSERT INTO workflow_node_jobs (run_id, node_id, node_module, queue, required_model,"
            " priority, created_at) VALUES (%s, %s, 'm', 'gpu', nullif(%s, ''), %s,"
            " now() - %s * interval '1 second') RETURNING seq",
            (over if (left := rng.random() < 0.15) else run_id, f"n{number}", model, priority,
             waited_s),
        ).fetchone()  # fmt: skip
        if not left and model in (*can, rule.NO_MODEL):
            jobs.setdefault(model, []).append(rule.Job(priority, row["seq"], waited_s))
    view = rule.View(
        [],
        rng.choice([None, *MODELS]),
        here(conn, HERE, "load_s"),
        here(conn, HERE, "run_s"),
        holders,
        rng.choice([-1.0, 0.0, 300.0, 2000.0]),
        rng.choice([100.0, 1000.0, 2400.0, 10000.0]),
    )
    return World(view, jobs, known)


def lines(jobs: dict[str, list[rule.Job]]) -> list[rule.Line]:
    """The lines of these jobs."""
    return [
        rule.Line(model, sorted(line, key=lambda job: job[:2]), min(line, key=lambda job: job.seq))
        for model, line in jobs.items()
        if line
    ]


@pytest.mark.parametrize("policy", ["strict", "balanced"])
def test_the_claim_takes_the_job_that_the_rule_chooses(still: Any, policy: str) -> None:
    for seed in range(20):
        with tabled.undone(still, seed):
            claims_follow_the_rule(still, policy, seed)


def claims_follow_the_rule(still: Any, policy: str, seed: int) -> None:
    given = world(still, seed)
    view = given.view
    who = transitions.who(
        "gpu", "me", host=HERE, model=view.warm, models=given.known, policy=policy,
        grace_s=view.grace_s, bound_s=view.bound_s,
    )  # fmt: skip
    while True:
        now = rule.View(
            lines(given.jobs), view.warm, view.load_s, view.run_s, view.holders, view.grace_s,
            view.bound_s,
        )  # fmt: skip
        expected = rule.choose(policy, now)
        claimed = transitions.claim(still, who)
        if not claimed or expected.job is None or expected.model is None:
            assert (claimed, expected.job) == ([], None), expected
            return
        (job,) = claimed
        model = job["required_model"] or rule.NO_MODEL
        assert (model, job["seq"]) == (expected.model, expected.job.seq), expected
        given.jobs[model].remove(expected.job)
