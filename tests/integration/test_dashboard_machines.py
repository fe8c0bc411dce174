"""The inbox and the pages of machines: usual, empty and hostile ones, and their actions."""

from __future__ import annotations

import asyncio
import gzip
import html
import json
import re
from datetime import datetime, timedelta, timezone
from typing import Any
from urllib.parse import quote

import pytest
from psycopg.types.json import Jsonb

from queue_workflows import acts, queues, runs, workers
from tests.support import constants, factories, named_statements, pages, transitions
from tests.support.pages import EVIL, Browser
from tests.support.worker_reports import report

NOW = datetime.now(timezone.utc)
pytestmark = pytest.mark.usefixtures("db")


def asks(conn: Any, minutes: float = 1, node_id: str = "ask", **spec: Any) -> str:
    """Insert a run with a question that waits for so many minutes; return its id."""
    run_id = factories.run(conn)
    factories.node(
        conn, run_id, node_id, node_module="__input__x", status="awaiting_input",
        started_at=NOW - timedelta(minutes=minutes), input_spec={"prompt": "Which?"} | spec,
    )  # fmt: skip
    return run_id


def answer(conn: Any, run_id: str) -> Any:
    rows = conn.execute(
        "SELECT value FROM workflow_input_submissions WHERE run_id = %s", [run_id]
    ).fetchall()
    return rows[0]["value"] if rows else None


TURNOUT = {"widget": "turnout", "turnout_options": [{"label": "Left", "value": 1}]}
CHOICE = {"widget": "choose_one", "options": ["red", {"label": "blue", "id": 2}]}


# --- inbox -------------------------------------------------------------------------------------


def test_nothing_is_asked() -> None:
    assert "No run asks anything." in pages.words(pages.opened("/inbox"))


def test_questions_come_with_the_longest_wait_first(conn: Any) -> None:
    asks(conn, 1, prompt="The second?", **CHOICE)
    run_id = asks(conn, 5, prompt="The first?")
    node = factories.one(conn, "SELECT id FROM workflow_node_jobs WHERE run_id = %s", run_id)
    factories.insert(
        conn, "workflow_input_timeouts", job_id=node, claim_no=1, due_at=NOW + timedelta(hours=1)
    )
    conn.execute(
        'UPDATE workflow_node_jobs SET policy = \'{"default": "tea"}\' WHERE id = %s', [node]
    )
    words = pages.words(pages.opened("/inbox"))
    assert words.index("The first?") < words.index("The second?")
    assert 'it takes "tea" then' in words
    assert "blue" in words


@pytest.mark.parametrize(
    ("spec", "given", "expected"),
    [
        (CHOICE, {"choice": "0"}, "red"),
        (CHOICE, {"choice": "1"}, {"label": "blue", "id": 2}),
        (CHOICE | {"multiple": True}, {"choice-0": "1"}, ["red"]),
        (TURNOUT, {"choice": "0"}, 1),
        ({"$answer_type": "string"}, {"value": "7"}, "7"),
        ({"$answer_type": "integer"}, {"value": "7"}, 7),
        ({"$answer_type": "boolean"}, {"choice": "false"}, False),
        ({"widget": "textarea"}, {"value": "a\nb"}, "a\nb"),
        ({"widget": "map", "layers": [1]}, {"value": '{"x": [1, 2]}'}, {"x": [1, 2]}),
        ({"widget": "file_upload", "accept": ".csv"}, {"value": "/data/a.csv"}, "/data/a.csv"),
        ({"widget": "pick_or_upload", "library": ["a.csv"]}, {"choice": "0", "value": ""}, "a.csv"),
        ({"widget": "pick_or_upload", "library": ["a.csv"]}, {"choice": "0", "value": "/b.csv"},
         "/b.csv"),
    ],
)  # fmt: skip
def test_an_answer_of_each_widget(
    conn: Any, spec: dict[str, Any], given: dict[str, Any], expected: Any
) -> None:
    run_id = asks(conn, **spec)

    async def use(browser: Browser) -> None:
        page = await browser.open("/inbox/question", run=run_id, node="ask")
        shown = await browser.follow(await browser.send(page, "/inbox/answer", **given))
        assert "Answered: ask takes" in html.unescape(shown)

    pages.browse(use)
    assert answer(conn, run_id) == expected
    (act,) = acts.list()
    assert (act["actor"], act["via"], act["action"], act["subject"]) == (
        "ann", "http", "answer", run_id,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("spec", "given", "reason"),
    [
        (CHOICE, {"choice": "2"}, "the question has no option 2"),
        (CHOICE, {"choice": "green"}, "the question has no option green"),
        (CHOICE, {"choice": "0000000007"}, "the question has no option 0000000007"),
        (CHOICE | {"multiple": True}, {"choice-7": "1"}, "the question has no option 7"),
        ({"$answer_type": "integer"}, {"value": '"x"'}, "its answer is of type integer"),
        ({"widget": "map"}, {"value": "{"}, "is not JSON"),
        ({"widget": "file_upload", "accept": ".csv"}, {"value": "a.png"}, "it accepts .csv"),
        ({"widget": "file_upload"}, {"value": ""}, "choose a file"),
    ],
)
def test_an_answer_that_does_not_fit_is_asked_again(
    conn: Any, spec: dict[str, Any], given: dict[str, Any], reason: str
) -> None:
    run_id = asks(conn, **spec)

    async def use(browser: Browser) -> None:
        page = await browser.open("/inbox/question", run=run_id, node="ask")
        reply = await browser.send(page, "/inbox/answer", **given)
        assert reply.status_code == 422
        assert reason in pages.words(reply.text)
        if text := given.get("value"):
            assert text in html.unescape(reply.text), "what was typed is kept"

    pages.browse(use)
    assert answer(conn, run_id) is None


def test_the_message_of_an_answer_is_redacted(conn: Any) -> None:
    run_id = asks(conn, widget="choose_one", options=[{"label": "red", "password": "hidden1"}])

    async def use(browser: Browser) -> None:
        page = await browser.open("/inbox/question", run=run_id, node="ask")
        shown = await browser.follow(await browser.send(page, "/inbox/answer", choice="0"))
        assert "Answered: ask takes" in shown
        assert "hidden1" not in page + shown

    pages.browse(use)
    assert answer(conn, run_id) == {"label": "red", "password": "hidden1"}


def test_a_question_that_has_changed_is_not_answered(conn: Any) -> None:
    run_id = asks(conn, **CHOICE)

    async def use(browser: Browser) -> None:
        page = await browser.open("/inbox/question", run=run_id, node="ask")
        conn.execute(
            "UPDATE workflow_node_jobs SET input_spec = input_spec || '{\"options\": [1]}'"
        )
        reply = await browser.send(page, "/inbox/answer", choice="0")
        assert reply.status_code == 409
        assert "The question has changed" in pages.words(reply.text)

    pages.browse(use)
    assert answer(conn, run_id) is None


def test_a_question_without_a_spec_yet(conn: Any) -> None:
    run_id = factories.run(conn)
    factories.node(conn, run_id, "ask", node_module="__input__x", status="awaiting_input")

    async def use(browser: Browser) -> None:
        page = await browser.open("/inbox/question", run=run_id, node="ask")
        assert "What it asks is not known yet" in page
        reply = await browser.send(page, "/inbox/answer", value="1")
        assert reply.status_code == 422
        assert "has asked nothing yet" in pages.words(reply.text)

    pages.browse(use)


def test_the_second_of_two_answers_hears_who_was_faster(conn: Any) -> None:
    run_id = asks(conn, **CHOICE)

    async def use(browser: Browser) -> None:
        first, second = [
            await browser.open("/inbox/question", run=run_id, node="ask") for _ in range(2)
        ]
        replies = await asyncio.gather(
            *(browser.send(page, "/inbox/answer", choice="0") for page in (first, second))
        )
        assert sorted(reply.status_code for reply in replies) == [303, 409]
        (late,) = (reply for reply in replies if reply.status_code == 409)
        assert re.search(r"answered by ann \d+\.\d s ago", pages.words(late.text))
        gone = await browser.open("/inbox/question", 404, run=run_id, node="ask")
        assert "answered by ann" in gone
        assert "an answer has come in" in await browser.open("/inbox")

    pages.browse(use)


def test_unknown_questions(conn: Any) -> None:
    async def use(browser: Browser) -> None:
        for query in ({}, {"run": "x", "node": "y"}, {"run": "a\x01", "node": EVIL}):
            await browser.open("/inbox/question", 404, **query)
        await browser.open("/inbox", after="2026-01-01T00:00:00Z", seq="0")
        await browser.open("/inbox", 422, after="2026-01-01T00:00:00")

    pages.browse(use)


def test_many_questions_come_in_pages(conn: Any) -> None:
    for n in range(30):
        asks(conn, 30 - n, prompt=f"Question {n}?")

    async def use(browser: Browser) -> None:
        page = await browser.open("/inbox")
        assert page.count("<article") == 25
        rest = await browser.open(pages.next_page(page) or "")
        assert rest.count("<article") == 5
        assert "Question 29?" in rest
        assert "first page" in rest
        assert "newest" not in rest, "the longest wait is first"
        at = (NOW - timedelta(minutes=3.5)).isoformat()
        assert "3 new questions" in await browser.open("/inbox/news", at=at)

    pages.browse(use)


def test_hostile_questions(conn: Any) -> None:
    asks(conn, prompt=EVIL, widget=EVIL, x={EVIL: EVIL})
    asks(
        conn,
        prompt={"a": 1},
        widget=7,
        options=[EVIL, {"label": EVIL, "rel_path": EVIL, "kind": "image"}, 7, None, []],
    )
    asks(conn, prompt="p" * 100_000, widget="choose_one", options=[f"o{n}" for n in range(2_000)])
    run_id = asks(conn, node_id=f"{EVIL}/?#", widget="choose_one", options="text")
    for spec in ("[1]", '"x"', "7", "null"):
        one = factories.run(conn, workflow_name=EVIL)
        factories.node(conn, one, "ask", node_module="__input__x", status="awaiting_input")
        conn.execute(
            "UPDATE workflow_node_jobs SET input_spec = %s::jsonb WHERE run_id = %s", [spec, one]
        )

    async def use(browser: Browser) -> None:
        page = await browser.open("/inbox")
        links = {
            html.unescape(one) for one in re.findall(r'href="(/ui/inbox/question[^"]*)"', page)
        }
        assert len(links) == 8
        for link in links:
            await browser.open(link.removeprefix("/ui"))
        one = await browser.open("/inbox/question", run=run_id, node=f"{EVIL}/?#")
        await browser.follow(await browser.send(one, "/inbox/answer", value=json.dumps(EVIL)))

    pages.browse(use)


def test_the_scope_look_sees_that_a_question_waits(conn: Any) -> None:
    run_id = asks(conn, prompt="the name of Ann", **CHOICE)

    async def use(browser: Browser) -> None:
        for page in (
            await browser.open("/inbox"),
            await browser.open("/inbox/question", run=run_id, node="ask"),
        ):
            assert run_id in page
            assert "the name of Ann" not in page
            assert "blue" not in page
            assert "/inbox/answer" not in page
        runs.answer(run_id, "ask", "red", by="bob")
        gone = await browser.open("/inbox/question", 404, run=run_id, node="ask")
        assert re.search(r"answered \d+\.\d s ago", pages.words(gone)), "not by whom"

    pages.browse(use, "look")


def test_the_inbox_reads_an_index(conn: Any) -> None:
    asks(conn)
    # Whatever the statistics say about a table with one row: the index has this order.
    conn.execute("SET enable_seqscan = off")
    conn.execute("SET enable_sort = off")
    plan = conn.execute(
        "EXPLAIN SELECT * FROM workflow_node_jobs j WHERE j.status = 'awaiting_input'"
        " AND j.child_run_id IS NULL"
        " ORDER BY coalesce(j.started_at, j.created_at), j.seq LIMIT 5"
    ).fetchall()
    assert "workflow_node_jobs_asking_idx" in str(plan)
    assert "Sort" not in str(plan)


# --- machines ----------------------------------------------------------------------------------


def test_no_worker_was_seen() -> None:
    assert "No worker was seen within a day." in pages.words(pages.opened("/machines"))


def sample(conn: Any, host: str, minute: int, **more: Any) -> None:
    found = {"cpu_percent": 10.0 * minute, "ram_percent": 50.0, "ram_used_mb": 1024,
             "ram_total_mb": 4096, "gpus": [{"id": 0, "use_pct": 63.0, "vram_used_mb": 2048,
                                             "vram_total_mb": 8192}]}  # fmt: skip
    at = NOW - timedelta(minutes=minute)
    factories.insert(
        conn, "hw_samples", host_label=host, every_s=60, slot=int(at.timestamp() // 60 % 1440),
        sample=found | more, sampled_at=at,
    )  # fmt: skip


def test_machines_with_what_runs_where(conn: Any) -> None:
    report(conn, transitions.who("cpu", "w1", host="box-1"))
    report(
        conn, transitions.who("gpu", "w2", host="box-2"),
        {"model": {"id": "sdxl", "held_s": 60.0, "load_s": 41.0}}, known_models=["sdxl", "flux"],
        current_model="sdxl",
    )  # fmt: skip
    run_id = factories.run(conn)
    factories.node(conn, run_id, "cut")
    transitions.claim(conn, transitions.who("cpu", "w1", host="box-1"))
    for minute in (1, 2, 3):
        sample(conn, "box-2", minute)
    factories.insert(
        conn, "workers", worker_id="w3", host_label="box-3", queue="load", pid=3, state="dead",
        detail=Jsonb({"signal": 9}),
    )  # fmt: skip

    async def use(browser: Browser) -> None:
        page = await browser.open("/machines")
        words = pages.words(page)
        assert words.index("box-3") < words.index("box-1"), "what is dead comes first"
        assert "killed by SIGKILL" in words
        assert "3 machines. A worker is dead or absent on box-3." in words
        assert re.search(r"killed by SIGKILL 0 no samples on \S", words)
        assert page.count('class="state done"') == 2, "that its switch is on helps no dead worker"
        assert "sdxl CPU 10 %" in words
        assert "CPU 10 %" in words and "GPU 0 63 %, 2.0 GB" in words
        assert "killed by SIGKILL" in await browser.part("/machines")
        one = await browser.open("/machines/box-1")
        assert f'href="/ui/runs/{run_id}?node=cut"' in one
        assert "No samples" in one
        gpu = pages.words(await browser.open("/machines/box-2"))
        assert "Loaded: sdxl." in gpu
        assert "CPU: mean 20.0, peak 30.0 of 100.0 %" in gpu
        assert "GPU memory: mean 2.0" in gpu
        assert "sdxl for" in gpu
        assert "sdxl for" in await browser.part("/machines/box-2")
        now = pages.words(await browser.open("/"))
        assert "sdxl CPU 10 %" in now, "the machines of Now are the same list"
        await browser.open("/machines/nothing", 404)
        await browser.open("/machines/" + quote("a/b\x01", safe=""), 404)

    pages.browse(use)


def test_a_queue_is_switched_and_undo_restores_it(conn: Any) -> None:
    report(conn, transitions.who("cpu", "w1", host="a/b"))
    where = "/machines/" + quote("a/b", safe="")

    async def use(browser: Browser) -> None:
        page = await browser.open(where)
        page = await browser.follow(
            await browser.send(page, "/machines/switch", label="Pause", queue="cpu", reason="smoke")
        )
        assert factories.one(conn, "SELECT reason FROM worker_controls") == "smoke"
        assert "Queue cpu of a/b is switched off (pause)." in page
        assert workers.policy_in_force("a/b", "cpu") == "pause"
        page = await browser.follow(
            await browser.send(page, "/machines/switch", label="Drain", queue="cpu")
        )
        assert workers.policy_in_force("a/b", "cpu") == "drain"
        page = await browser.follow(await browser.send(page, "/machines/switch", label="Undo"))
        assert workers.policy_in_force("a/b", "cpu") == "pause"
        page = await browser.follow(await browser.send(page, "/machines/switch", label="Undo"))
        assert workers.policy_in_force("a/b", "cpu") == "drain", "an Undo can be undone"
        await browser.follow(await browser.send(page, "/machines/switch", label="On", queue="cpu"))
        assert workers.policy_in_force("a/b", "cpu") is None

    pages.browse(use)
    assert {(act["action"], act["actor"], act["subject"]) for act in acts.list()} == {
        ("off", "ann", "a/b"), ("on", "ann", "a/b"),
    }  # fmt: skip


def test_off_at_once_names_the_effect_and_takes_a_reason(conn: Any) -> None:
    report(conn, transitions.who("cpu", "w1", host="box"))
    factories.node(conn)
    transitions.claim(conn, transitions.who("cpu", "w1", host="box"))

    async def use(browser: Browser) -> None:
        page = await browser.open("/machines/box")
        assert (
            "Switch queue cpu of box off at once: 1 running job goes back to its queue, "
            "1 process ends, and loaded models are lost."
        ) in pages.words(page)
        page = await browser.follow(
            await browser.send(
                page, "/machines/switch", label="Off at once", queue="cpu", reason="new disk"
            )
        )
        assert "Undo</button>" not in page
        assert "by ann: new disk" in " ".join(pages.words(page).split())
        (control,) = conn.execute("SELECT * FROM worker_controls").fetchall()
        assert (control["stop_policy"], control["requested_by"], control["reason"]) == (
            "hard", "ann", "new disk",
        )  # fmt: skip
        page = await browser.follow(
            await browser.send(page, "/machines/switch", label="On", queue="cpu")
        )
        assert "Queue cpu of box is switched on." in page
        assert "Undo</button>" not in page, "an Undo ends no jobs"
        link = re.search(r'href="/ui(/acts[^"]+)">Who did what to it', page)
        assert link is not None
        assert "new disk" in pages.words(await browser.open(html.unescape(link[1])))

    pages.browse(use)


def test_off_at_once_of_more_than_twenty_jobs_needs_their_number(conn: Any) -> None:
    report(conn, transitions.who("cpu", "w", host="box"))
    report(conn, transitions.who("load", "w2", host="box"))
    run_id = factories.run(conn)
    for number in range(20):
        factories.node(conn, run_id, f"n{number}", **CLAIM, started_at=NOW)

    async def use(browser: Browser) -> None:
        few = await browser.open("/machines/box")
        assert "to confirm" not in few
        factories.node(conn, run_id, "one more", **CLAIM, started_at=NOW)
        many = await browser.open("/machines/box")
        assert pages.words(many).count("Type 21 to confirm") == 2, "of all queues, and of cpu"
        for page, typed in ((few, ""), (many, ""), (many, "20")):
            for place in (0, 1):
                reply = await browser.send(
                    page, "/machines/switch", place, label="Off at once", typed=typed
                )
                assert reply.status_code == 422
                assert "This would end 21" in pages.words(reply.text)
        assert factories.one(conn, "SELECT count(*) FROM worker_controls") == 0
        await browser.follow(await browser.send(many, "/machines/switch", 2, label="Off at once"))
        assert workers.policy_in_force("box", "load") == "hard", "which runs none"
        factories.node(conn, run_id, "another", **CLAIM, started_at=NOW)
        await browser.follow(
            await browser.send(many, "/machines/switch", 1, label="Off at once", typed="21")
        )
        assert workers.policy_in_force("box", "cpu") == "hard", "the number of the page counts"

    pages.browse(use)


def test_a_draining_worker_says_when_it_is_probably_drained(conn: Any) -> None:
    factories.node(
        conn, factories.run(conn, workflow_name="w"), "cut", status="completed", seconds=440.0,
        finished_at=NOW,
    )  # fmt: skip
    run_id = factories.run(conn, workflow_name="w")
    report(conn, transitions.who("cpu", "w", host="box"))

    def runs_for(seconds: float, node_id: str = "cut") -> str:
        began = datetime.now(timezone.utc) - timedelta(seconds=seconds)
        factories.node(conn, run_id, node_id, **CLAIM, started_at=began)
        return pages.words(pages.opened("/machines/box"))

    assert "drained" not in runs_for(40)
    workers.disable("box", "cpu", stop_policy="drain")
    assert "draining drained in about 6 min" in pages.words(pages.opened("/machines/box"))
    conn.execute(
        "UPDATE workflow_node_jobs SET started_at = started_at - interval '1 hour'"
        " WHERE status = 'running'"
    )
    assert "draining its jobs take longer than usual" in pages.words(pages.opened("/machines/box"))
    assert "usual" not in runs_for(1, "of unknown time")


def test_the_loads_of_a_gpu_worker_are_counted(conn: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    report(conn, transitions.who("gpu", "w2", host="box"), {"model": {"id": "sdxl"}})
    run_id, now = factories.run(conn), datetime.now(timezone.utc)
    for hours, worker in ((30, "w2"), (20, "w2"), (10, "w2"), (5, "other")):
        factories.insert(
            conn, "workflow_node_events", run_id=run_id, node_id="n", worker_id=worker,
            event_type="model_load_done", created_at=now - timedelta(hours=hours),
        )  # fmt: skip
    assert "sdxl 2 loads in 1 d" in pages.words(pages.opened("/machines/box"))
    constants.put(monkeypatch, "service.dashboard.machines_page.EVENTS", 2)
    assert "sdxl 1 load in 10 h 00 min" in pages.words(pages.opened("/machines/box"))


def test_models_are_loaded_and_unloaded(conn: Any) -> None:
    report(
        conn, transitions.who("gpu", "w2", host="box"),
        {"model": {"id": "sdxl", "held_s": 60.0, "load_s": 41.0}}, known_models=["sdxl", "flux"],
    )  # fmt: skip

    async def use(browser: Browser) -> None:
        page = await browser.open("/machines/box")
        assert "Unload sdxl from process 7 of box between two jobs." in pages.words(page)
        page = await browser.follow(
            await browser.send(page, "/machines/models", label="Unload sdxl")
        )
        page = await browser.follow(
            await browser.send(page, "/machines/models", label="Load", model="flux")
        )
        assert "Model flux: box loads it between two jobs." in page
        for name, status in (("no", 404), ("", 422)):
            reply = await browser.send(page, "/machines/models", label="Load", model=name)
            assert reply.status_code == status
        reply = await browser.send(page, "/machines/models", label="Unload sdxl", model="")
        assert reply.status_code == 422

    pages.browse(use)
    rows = conn.execute("SELECT action, model FROM model_controls ORDER BY request_no").fetchall()
    assert [(row["action"], row["model"]) for row in rows] == [("unload", "sdxl"), ("load", "flux")]


def test_a_wrong_switch_is_refused(conn: Any) -> None:
    report(conn, transitions.who("cpu", "w1", host="box"))

    async def use(browser: Browser) -> None:
        page = await browser.open("/machines/box")
        wrong: list[dict[str, Any]] = [
            {"to": "x"}, {"to": "pause", "queue": ""}, {"to": "pause", "until": "x"},
        ]  # fmt: skip
        for values in wrong:
            reply = await browser.send(page, "/machines/switch", **values)
            assert reply.status_code == 422, reply.text

    pages.browse(use)
    assert factories.one(conn, "SELECT count(*) FROM worker_controls") == 0


def test_a_switch_is_shown_where_it_was_set(conn: Any) -> None:
    report(conn, transitions.who("cpu", "w1", host="box"))
    report(conn, transitions.who("load", "w2", host="box"))

    async def use(browser: Browser) -> None:
        workers.disable("box", "cpu", stop_policy="pause")
        page = await browser.open("/machines/box")
        words = pages.words(page)
        shown = "every queue on 0 Pause Pause every queue of box. Running jobs continue. Reason"
        assert shown in words, "ON for every queue would change nothing"
        assert "queue cpu off pause 0" in words and "queue load on 0" in words
        workers.disable("box", workers.ALL, stop_policy="drain")
        words = pages.words(await browser.part("/machines/box"))
        assert "every queue off drain 0" in words and "queue load off with every queue 0" in words
        page = await browser.follow(
            await browser.send(page, "/machines/switch", label="Off at once")
        )
        assert "Every queue of box is switched off at once." in page
        words = pages.words(page)
        assert "every queue off hard 0" in words
        assert "queue cpu off pause 0" in words, "its own switch, which will be in force again"

    pages.browse(use)
    assert workers.policy_in_force("box", "load") == "hard"


def test_who_switched_a_machine_off_is_said_where_machines_are_listed(conn: Any) -> None:
    report(conn, transitions.who("cpu", "w1", host="box"))
    report(conn, transitions.who("gpu", "w2", host="box"))
    workers.disable("box", "gpu", stop_policy="drain", by="ann", reason="it smells of smoke")
    conn.execute("UPDATE worker_controls SET updated_at = now() - interval '19 min'")

    async def use(browser: Browser) -> None:
        for path in ("/machines", "/"):
            words = pages.words(await browser.open(path))
            assert "off gpu by ann 19 min ago : it smells of smoke" in words
            lead = "1 machine. No worker is dead. Switched off, as a whole or in part: box."
            assert (lead in words) == (path == "/machines")

    pages.browse(use)

    async def look(browser: Browser) -> None:
        for path in ("/machines", "/"):
            words = pages.words(await browser.open(path))
            assert "off gpu 19 min ago" in words
            assert "smoke" not in words and "by ann" not in words

    pages.browse(look, "look")
    workers.disable("box", workers.ALL, by="bob")
    words = pages.words(pages.opened("/machines"))
    assert re.search(r"off by bob \d", words), "every queue of it"


def test_a_machine_that_should_be_on_again_is_listed_without_a_worker(conn: Any) -> None:
    report(conn, transitions.who("cpu", "w1", host="box-1"))
    factories.insert(
        conn, "worker_controls", host_label="box-4", queue="all", desired_state="off",
        stop_policy="hard", until_at=NOW - timedelta(minutes=40),
    )  # fmt: skip

    async def use(browser: Browser) -> None:
        page = await browser.open("/machines")
        words = pages.words(page)
        assert "box-4 who switched it absent since its switch is on again" in words
        assert words.index("box-4") < words.index("box-1"), "it comes first"
        assert 'href="/ui/acts?kind=machine&amp;subject=box-4"' in page
        now = pages.words(await browser.open("/"))
        assert "box-4 should be on again, but no worker of it runs" in now
        assert "absent since its switch is on again" in now

    pages.browse(use)


NAMES = ("..", ".", "a/b", "%2e%2e", "x?y#z&host=w", "new\nline", "\u202e\x1b")


def test_machines_and_schedules_of_any_name_are_opened_by_their_links(conn: Any) -> None:
    """A browser would resolve `..` in a path, and some proxies an escaped slash."""
    for number, name in enumerate(NAMES):
        report(conn, transitions.who("cpu", f"w{number}", host=name))
        factories.insert(
            conn, "schedules", name=name, expression="0 3 * * *", task_name="t", queue="load"
        )

    async def use(browser: Browser) -> None:
        for of, act, label in (
            ("machines?host", "switch", "Pause"),
            ("schedules?name", "pause", "Pause"),
        ):
            page = await browser.open("/" + of.partition("?")[0])
            links = re.findall(rf'href="(/ui/{re.escape(of)}=[^"]+)"', page)
            assert len(links) == len(NAMES)
            for link in links:
                page = await browser.open(html.unescape(link).removeprefix("/ui"))
                action = f"/{of.partition('?')[0]}/{act}"
                await browser.follow(await browser.send(page, action, label=label))

    pages.browse(use)
    assert {workers.policy_in_force(name, "cpu") for name in NAMES} == {"pause"}
    assert factories.one(conn, "SELECT bool_and(paused) FROM schedules")


def test_a_running_node_without_a_start_leaves_pages_open(conn: Any) -> None:
    """An app may write its own rows; the node has ended before, so its usual time is known."""
    for claim in ({"status": "completed", "seconds": 5.0, "finished_at": NOW}, CLAIM):
        factories.node(conn, factories.run(conn, workflow_name="w"), "cut", **claim)
    report(conn, transitions.who(worker_id="w"))
    words = pages.words(pages.opened("/"))
    assert "cut w cpu box - 5.0 s" in words
    assert "cut -" in pages.words(pages.opened("/machines/box"))


def test_an_app_without_runs_hears_that_its_jobs_have_run(conn: Any) -> None:
    factories.ingest(conn, status="completed", finished_at=NOW)
    page = pages.opened("/")
    assert "Nothing needs you." in page
    assert "Nothing has run yet" not in page


CLAIM = {
    "status": "running", "worker_id": "w", "claim_no": 1, "claimed_by": "box",
    "lease_expires_at": NOW + timedelta(days=1),
}  # fmt: skip


def test_hostile_machines(conn: Any) -> None:
    hosts = [EVIL[:100], "x" * 400, "a/b?c#d%00", "..a", "\u202e\x1b"]
    for n, host in enumerate(hosts):
        factories.insert(
            conn, "workers", worker_id=f"w{n}{EVIL}", host_label=host, queue="gpu", pid=7,
            current_model=EVIL,
            detail=Jsonb({
                "model": {"id": EVIL, "held_s": "x", "load_s": [], "loading": EVIL},
                "throttle": EVIL, "card": EVIL, "claim": [],
            }),
        )  # fmt: skip
        for model in ([EVIL], {EVIL: EVIL}, 7, True, ""):
            factories.insert(
                conn, "workers", worker_id=f"{n}{model}", host_label=host, queue="gpu", pid=7,
                detail=Jsonb({"model": {"id": model}, "card": {EVIL: 1}}),
            )  # fmt: skip
        factories.insert(
            conn, "worker_controls", host_label=host, queue="gpu", desired_state="off",
            stop_policy="hard", requested_by=EVIL, reason=EVIL,
        )  # fmt: skip
        sample(conn, host, 1, cpu_percent=EVIL, gpus=[EVIL, {"id": EVIL}, None, 7])
    # It is a float that is infinite, and an integer that no float can hold.
    conn.execute(
        "UPDATE hw_samples SET sample = sample || jsonb_build_object("
        "'ram_percent', '1e400'::numeric + 0.5, 'cpu_percent', '1e400'::numeric)"
        " WHERE host_label = '..a'"
    )

    async def use(browser: Browser) -> None:
        page = await browser.open("/machines")
        links = {
            html.unescape(one) for one in re.findall(r'href="(/ui/machines\?host=[^"]+)"', page)
        }
        assert len(links) == len(hosts)
        for link in links:
            await browser.open(link.removeprefix("/ui"))
        for host in hosts:
            await browser.open("/machines/" + quote(host, safe=""))
        for host in ("a\x00b", "", "x" * 900):
            if "\x00" not in host:  # the guard of the service refuses it
                await browser.open("/machines", 404, host=host)
            reply = await browser.send(
                await browser.open(link.removeprefix("/ui")), "/machines/switch",
                host=host, queue="gpu", to="pause",
            )  # fmt: skip
            assert reply.status_code == (400 if "\0" in host else 422), host

    pages.browse(use)


# --- a large fleet -----------------------------------------------------------------------------


def small(page: str) -> str:
    """Return a page that is as small as each has to be, in bytes raw and compressed."""
    assert len(page.encode()) <= 150 * 1024
    assert len(gzip.compress(page.encode())) <= 30 * 1024
    return page


def whole(page: str, link: str) -> set[str]:
    return {
        html.unescape(one) for one in re.findall(rf'<td[^>]*><a href="(/ui{link}=[^"&]+)"', page)
    }


@pytest.fixture
def large(conn: Any) -> None:
    """Insert 200 machines with eight workers each, and 500 queues of which each has a job."""
    conn.execute(
        "INSERT INTO workers (worker_id, host_label, queue, pid, state)"
        " SELECT format('w-%s-%s', h, n), format('machine-%s.example', h), 'queue-' || mod(h, 9),"
        " n,"
        " CASE WHEN h = 150 THEN 'dead' WHEN mod(n, 2) = 0 THEN 'busy' ELSE 'idle' END"
        " FROM generate_series(1, 200) h, generate_series(1, 8) n"
    )
    conn.execute(
        "INSERT INTO workers (worker_id, host_label, queue, pid)"
        " SELECT 'v-' || n, 'machine-1.example', 'queue-' || n, n FROM generate_series(10, 130) n"
    )
    conn.execute(
        "INSERT INTO ingest_jobs (task_name, queue, created_at)"
        " SELECT 't', 'queue-' || n, now() - interval '1 hour' FROM generate_series(1, 500) n"
    )
    conn.execute(
        "INSERT INTO queue_partitions (queue, partition_key, max_running)"
        " SELECT 'queue-1', 'partition-' || n, n FROM generate_series(1, 120) n"
    )
    conn.execute(
        "INSERT INTO schedules (name, expression, task_name, queue)"
        " SELECT 'schedule-' || n, '0 3 * * *', 't', 'load' FROM generate_series(1, 120) n"
    )


def test_the_use_of_machines_is_read_by_its_slots(conn: Any) -> None:
    conn.execute(
        "INSERT INTO hw_samples (host_label, every_s, slot, sampled_at, sample)"
        " SELECT 'machine-' || h, 60, s, now() - interval '1 day',"
        " jsonb_build_object('x', repeat('x', 1000))"
        " FROM generate_series(1, 5) h, generate_series(0, 1439) s"
    )
    for cpu, ago_s in ((10, 120), (20, 60), (30, 0)):
        conn.execute(
            "UPDATE hw_samples SET sampled_at = t.at,"
            " sample = jsonb_build_object('cpu_percent', %(cpu)s::int)"
            " FROM (SELECT now() - %(ago)s * interval '1 second' AS at) t"
            " WHERE host_label = 'machine-3'"
            " AND slot = mod(floor(extract(epoch FROM t.at) / 60), 1440)",
            {"ago": ago_s, "cpu": cpu},
        )
    conn.execute("ANALYZE hw_samples")
    given: dict[str, Any] = {
        "hosts": [f"machine-{number}" for number in range(1, 6)], "past_s": 300.0, "limit": 1,
    }  # fmt: skip
    text = named_statements.texts()["samples.of_hosts"]
    (row,) = conn.execute(text, given).fetchall()
    assert (row["host_label"], row["sample"]) == ("machine-3", {"cpu_percent": 30})
    read = conn.execute(b"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) " + text, given).fetchone()
    (plan,) = next(iter((read or {}).values()))
    # Six slots of each, by an index of a few levels; a machine's day has 360 blocks.
    assert plan["Plan"]["Shared Hit Blocks"] + plan["Plan"]["Shared Read Blocks"] < 5 * 50


@pytest.mark.usefixtures("large")
@pytest.mark.parametrize(
    ("path", "name"), [("/machines", "host"), ("/queues", "queue"), ("/schedules", "name")]
)
def test_a_long_list_has_pages_with_all_of_it(path: str, name: str) -> None:
    counts = {"host": 200, "queue": len(queues.list(used_only=True)), "name": 120}
    count = counts[name]

    async def use(browser: Browser) -> None:
        found: set[str] = set()
        for start in range(0, count, 50):
            page = small(await browser.open(path, start=start))
            shown = whole(page, rf"{path}\?{name}")
            assert len(shown) == min(50, count - start) and not shown & found
            found |= shown
            more = f"{path}?start={start + 50}" if start + 50 < count else None
            assert pages.next_page(page) == more
            assert (">first page</a>" in page) == (start > 0)
        assert len(found) == count
        beyond = await browser.open(path, start=100_000)
        assert len(whole(beyond, rf"{path}\?{name}")) == 50, "the list has become shorter"

    pages.browse(use)


@pytest.mark.usefixtures("large")
def test_pages_of_a_large_fleet_are_small() -> None:
    async def use(browser: Browser) -> None:
        now = small(await browser.open("/"))
        assert "more: queue-workflows doctor lists them" in pages.words(now)
        assert now.count('id="machine-') == now.count('id="queue-') == 20
        assert now.index("machine-150.example") < now.index("machine-1.example")
        more = len(queues.list(used_only=True)) - 20
        assert f"All queues, {more} more" in pages.words(now)
        one = small(await browser.open("/machines", host="machine-1.example"))
        assert "129 workers, 0 jobs running." in pages.words(one)
        assert "And 112 more queues" in pages.words(one)
        assert 'href="/ui/machines?host=machine-1.example&amp;start=50"' in one
        queue = small(await browser.open("/queues", queue="queue-1"))
        assert queue.count("partition-") > 50 and "partition-60<" not in queue
        waiting = small(await browser.open("/waiting"))
        assert waiting.count('id="group-') == 50
        assert "And 450 jobs that wait for other reasons." in pages.words(waiting)

    pages.browse(use)


@pytest.mark.usefixtures("large")
def test_the_pages_of_a_large_fleet_need_few_statements(
    conn: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    report(conn, transitions.who("gpu", "g", host="box"))
    workers.disable("box", "gpu", stop_policy="pause")

    async def use(browser: Browser) -> None:
        calls = named_statements.executed(monkeypatch)
        for path, most in (
            ("/", 6), ("/machines", 2), ("/machines?host=machine-1.example", 2),
            ("/machines?host=box", 5), ("/queues", 1), ("/queues?queue=queue-1", 1),
            ("/schedules", 1), ("/schedules?name=schedule-1", 4), ("/waiting", 6),
        ):  # fmt: skip
            calls.clear()
            await browser.part(path)
            assert len(calls) <= most, (path, calls)

    pages.browse(use)


def test_a_group_that_waits_for_many_reasons_names_some(conn: Any) -> None:
    for number in range(12):
        detail = {"throttle": f"RAM at {number} %"}
        report(conn, transitions.who("load", f"l{number}"), detail, state="throttled")
    job = factories.ingest(conn, queue="load")

    async def use(browser: Browser) -> None:
        words = pages.words(await browser.open("/waiting"))
        assert words.count("it waits for memory: RAM at") == 5
        assert "and 7 workers for other reasons" in words
        one = pages.words(await browser.open("/waiting", job=job["id"]))
        assert one.count("it waits for memory: RAM at") == 12

    pages.browse(use)


def test_the_command_that_starts_a_worker_can_be_pasted(conn: Any) -> None:
    factories.ingest(conn, queue="x; rm -rf $HOME")
    words = pages.words(pages.opened("/waiting"))
    assert "queue-claim-worker --queue 'x; rm -rf $HOME' --app" in words


def test_the_scope_look_switches_nothing(conn: Any) -> None:
    report(conn, transitions.who("cpu", "w1", host="box"))
    workers.disable("box", "cpu", by="ann", reason="the secret of Ann")

    async def use(browser: Browser) -> None:
        page = await browser.open("/machines/box")
        assert "the secret of Ann" not in page
        assert "/switch" not in page
        assert "box" in await browser.open("/machines")

    pages.browse(use, "look")
    assert runs.get("nothing") is None
