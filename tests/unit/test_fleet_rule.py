"""The gpu claim rule passes no job over forever, and the fleet simulation counts correctly."""

from __future__ import annotations

import random

import pytest

from benchmarks import fleet_rule as rule
from benchmarks import fleet_sim, fleet_trace
from queue_workflows.worker import gpu_models
from tests.support import tabled

HOUR = 3600.0


def line(model: str, *jobs: rule.Job) -> rule.Line:
    ranked = sorted(jobs, key=lambda job: job[:2])
    return rule.Line(model, ranked, min(jobs, key=lambda job: job.seq))


def view(*lines: rule.Line, warm: str | None = None, **more: object) -> rule.View:
    same = {entry.model: 60.0 for entry in lines}
    return rule.View(lines, warm, same, same, **more)  # pyright: ignore[reportArgumentType]


def test_a_warm_worker_stays_while_there_is_work() -> None:
    given = view(
        line("a", rule.Job(100, 9, 1.0)), line("b", rule.Job(100, 1, 900.0)), warm="a"
    )  # fmt: skip
    assert rule.choose("balanced", given)[0::2] == ("a", "warm")
    assert rule.choose("strict", given).model == "a"


def test_an_urgent_job_waits_for_the_grace_and_no_longer() -> None:
    urgent, ordinary = rule.Job(50, 2, 200.0), rule.Job(100, 1, 250.0)
    given = view(line("a", ordinary), line("b", urgent), warm="a", grace_s=300.0)
    assert rule.choose("balanced", given).model == "a"
    assert rule.choose("strict", given).model == "b"
    given = view(line("a", ordinary), line("b", urgent), warm="a", grace_s=199.0)
    assert rule.choose("balanced", given)[0::2] == ("b", "urgent")
    given = view(line("a", ordinary), line("b", urgent), warm="a", grace_s=-1.0)
    assert rule.choose("balanced", given).model == "a"


def test_a_cold_worker_leaves_few_jobs_to_the_worker_with_their_model() -> None:
    few = line("a", rule.Job(100, 1, 30.0))
    held = {"a": [rule.Holder(free_s=20.0, run_s=10.0)]}
    assert rule.choose("balanced", view(few, holders=held)) == rule.LEFT
    far = {"a": [rule.Holder(free_s=500.0, run_s=10.0)]}
    assert rule.choose("balanced", view(few, holders=far)).model == "a"
    many = line("a", *(rule.Job(100, n, 30.0) for n in range(rule.WINDOW)))
    assert rule.choose("balanced", view(many, holders=held)).model == "a"


def test_no_job_is_passed_over_by_one_that_waited_two_bounds_less() -> None:
    for seed in range(200):
        with tabled.case(seed):
            rng = random.Random(seed)
            lines = [
                line(model, *(
                    rule.Job(rng.choice([10, 50, 100]), rng.randrange(10**6), 0.0)
                    for _ in range(rng.randint(1, 5))
                ))
                for model in "abc"
            ]  # fmt: skip
            # Who came first has waited longest.
            aged = [
                line(
                    entry.model,
                    *(job._replace(waited_s=(10**6 - job.seq) / 100) for job in entry.ahead),
                )
                for entry in lines
            ]
            holders = {
                model: [rule.Holder(rng.uniform(0, 300), 60.0)]
                for model in "abc"
                if rng.random() < 0.5
            }
            given = view(*aged, warm=rng.choice([None, "a"]), holders=holders, bound_s=HOUR)
            chosen = rule.choose("balanced", given)
            waited_s = chosen.job.waited_s if chosen.job else 0.0
            assert max(entry.oldest.waited_s for entry in aged) <= waited_s + 2 * HOUR


@pytest.mark.parametrize("kind", fleet_trace.KINDS)
def test_every_policy_serves_every_job(kind: str) -> None:
    found = fleet_sim.compare(kind, 0.5, fleet_sim.POLICIES, count=1, hours=1.0)
    loads = {name: rows[0].loads for name, rows in found.items()}
    assert loads["balanced"] <= loads["strict"] <= loads["fifo"]
    assert all(rows[0].makespan > 0 for rows in found.values())
    lines = list(fleet_sim.table(found))
    assert len(lines) == 2 + len(fleet_sim.POLICIES)


@pytest.mark.parametrize(
    ("text", "visible", "size"),
    [
        ("0, GPU-aa, 24564\n1, GPU-bb, 12288\n", None, 24564),
        ("0, GPU-aa, 24564\n1, GPU-bb, 24564\n", "1", 24564),
        ("0, GPU-aa, 24564\n1, GPU-bb, 12288\n", "GPU-b", 12288),
        ("0, GPU-aa, 24564\n1, GPU-bb, 12288\n", "", None),
        ("0, GPU-aa, [N/A]\n", None, None),
        ("NVIDIA-SMI has failed\n", None, None),
        ("", None, None),
    ],
)
def test_the_gpu_is_the_largest_one_visible(
    text: str, visible: str | None, size: int | None
) -> None:
    assert gpu_models.largest_mb(text, visible) == size


@pytest.mark.parametrize("visible", ["0", "1", "1,GPU-aa"])
def test_an_index_among_unequal_gpus_is_only_known_when_counted_by_the_bus(visible: str) -> None:
    """CUDA counts the fastest first by default, nvidia-smi by the bus."""
    text = "0, GPU-aa, 12288\n1, GPU-bb, 24564\n"
    assert gpu_models.largest_mb(text, visible) is None
    assert gpu_models.largest_mb(text, visible, by_bus=True) == (12288 if visible == "0" else 24564)
