"""The example app from its first node to its last, run by every role in this process."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path
from types import ModuleType

import pytest

import queue_workflows
from queue_workflows import config, demo, testing
from queue_workflows.testing import Harness, Result

SAMPLES = ["A garden in March", "The harbour at night", "Sunday kitchen", "Above the clouds"]


@pytest.fixture
def flows(db: ModuleType, dsn: str, tmp_path: Path) -> Iterator[Harness]:
    with testing.harness(app="queue_workflows.demo:setup", dsn=dsn, own=True, out=tmp_path) as made:
        yield made


def make_book(flows: Harness, folder: Path | None = None, first: str = SAMPLES[1]) -> Result:
    """Run the workflow to its end with this answer to its question."""
    context = {"folder": None if folder is None else str(folder)}
    return flows.run_workflow("picture_book", context, answers={"choose": first})


def book(made: Result) -> str:
    return (made.out_dir / "page/write_page/book.html").read_text("utf-8")


def picture(made: Result) -> list[str]:
    """Every text in the picture of the run."""
    root = ET.parse(made.out_dir / "picture/draw_run/run.svg").getroot()
    return [each.text or "" for each in root.iter("{http://www.w3.org/2000/svg}text")]


def test_the_samples_become_a_book_and_the_run_a_picture(flows: Harness, db: ModuleType) -> None:
    made = make_book(flows).completed()
    page = book(made)
    assert page.count("<article><svg") == 5
    assert min(page.index(title) for title in SAMPLES) == page.index(SAMPLES[1])

    fetched = made.nodes["colours/fetch_colours"]
    assert (fetched.status, fetched.attempts, fetched.claims) == ("completed", 1, 2)
    with db.connection() as conn:
        counts = conn.execute(
            "SELECT count(*) FILTER (WHERE event_type = 'model_load_done') AS loads,"
            " count(*) FILTER (WHERE event_type = 'retried') AS retries FROM workflow_node_events"
        ).fetchone()
    assert counts == {"loads": 1, "retries": 1}

    labels = picture(made)
    assert made.nodes.keys() <= set(labels)
    states = {name: labels[labels.index(name) + 1] for name in made.nodes}
    assert [name for name, state in states.items() if "attempt 2" in state] == [fetched.id]
    assert [name for name, state in states.items() if "completed" not in state] == [
        "picture/draw_run"
    ]
    assert states["picture/draw_run"].startswith("cpu, running, ")
    assert states["choose"].startswith("a person, completed, ")


def test_a_second_run_and_a_crash_give_the_same_book(flows: Harness) -> None:
    calm = make_book(flows).completed()
    flows.crash("part-1/paint")
    crashed = make_book(flows).completed()
    assert crashed.nodes["part-1/paint"].crashes == 1
    assert len([text for text in picture(crashed) if text.endswith("attempt 2")]) == 2
    assert book(calm) == book(crashed)


def test_a_folder_of_ones_own(flows: Harness, tmp_path: Path) -> None:
    folder = tmp_path / "notes"
    folder.mkdir()
    (folder / "only.md").write_bytes(b"# One <b>note\x00</b>\n\nwords, words & more \xff words\n")
    made = make_book(flows, folder, "One <b>note </b>").completed()
    assert "<h2>One &lt;b&gt;note &lt;/b&gt;</h2>" in book(made)
    assert "<title>words: 3</title>" in book(made)


def test_an_old_painting_in_the_folder_is_left_out(flows: Harness, tmp_path: Path) -> None:
    old = tmp_path / "out" / "part-0" / "paint"
    old.mkdir(parents=True)
    (old / "21.svg").write_text("<svg>of an earlier run</svg>")
    run_id = flows.submit("picture_book", {"folder": None}, out_dir=str(tmp_path / "out"))
    made = flows.finish(run_id, answers={"choose": SAMPLES[0]}).completed()
    assert "earlier run" not in book(made)


def test_a_folder_that_cannot_be_used_fails_the_run_by_name(flows: Harness, tmp_path: Path) -> None:
    gone = make_book(flows, tmp_path / "gone")
    assert f"{tmp_path / 'gone'}" in gone.failures["collect/collect"]
    (tmp_path / "empty").mkdir()
    empty = make_book(flows, tmp_path / "empty")
    assert f"{tmp_path / 'empty'}: no .txt or .md file" in empty.failures["collect/collect"]


def test_an_answer_that_is_no_title_fails_the_run_with_the_titles(flows: Harness) -> None:
    asked = flows.run_workflow("picture_book", {"folder": None})
    labels = [option["label"] for option in asked.waiting["choose"]["turnout_options"]]
    assert labels[:4] == SAMPLES
    queue_workflows.submit_input(asked.run_id, "choose", "The moon")
    failed = flows.finish(asked.run_id)
    assert (
        f"'The moon' is no title; choose one of {', '.join(labels)}"
        in (failed.failures["page/write_page"])
    )


def test_the_texts_are_counted_by_an_ingest_job(flows: Harness, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("Title\nfive.\n")
    job = flows.run_task("count_texts", {"folder": str(tmp_path)}, queue="fetch")
    assert (job["status"], job["result"]) == (
        "completed",
        {"reason": "tick", "texts": 1, "characters": 5},
    )
    assert flows.run_task("count_texts", queue="fetch")["result"]["texts"] == 5


def test_setup_may_be_called_again_and_schedules_the_count_once() -> None:
    demo.setup()
    demo.setup()
    (entry,) = config.get_config().ingest_schedule
    evening = datetime(2026, 5, 1, 18, tzinfo=timezone.utc)
    assert entry.next_fire_at(evening) == datetime(2026, 5, 2, 3, 15, tzinfo=timezone.utc)
    assert entry.task_name in config.get_config().ingest_task_map
    assert config.queues() == {"cpu", "gpu", "fetch"}
