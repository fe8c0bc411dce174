"""`queue-workflows schedules`: each action, and what it refuses."""

from __future__ import annotations

import json
from types import ModuleType
from typing import Any

import pytest

from queue_workflows import config, schedules
from queue_workflows.__main__ import main
from queue_workflows.schedule import timetable
from tests.support import tabled


@pytest.fixture(autouse=True)
def _task(clean_process: None, db: ModuleType) -> None:
    config.register_ingest_task("prices", lambda args: None)


def run(capfd: pytest.CaptureFixture[str], *words: str) -> Any:
    assert main(["schedules", *words, "--json"]) == 0
    return json.loads(capfd.readouterr().out)


def test_each_action(capfd: pytest.CaptureFixture[str]):
    added = ("add", "s", "30 2 * * *", "--task", "prices", "--queue", "fetch")
    (row,) = run(capfd, *added, "--tz", "Europe/Warsaw", "--args", '{"a": 1}')
    assert (row["tz"], row["args"], row["source"]) == ("Europe/Warsaw", {"a": 1}, "table")
    assert row["next_fire_at"] is not None, "before a scheduler has planned it"
    (row,) = run(capfd, "pause", "s")
    assert (row["paused"], row["next_fire_at"]) == (True, None)
    assert run(capfd, "resume", "s")[0]["paused"] is False
    assert run(capfd, "run-now", "s")["id"]
    notes = [one["note"] for one in run(capfd, "preview", "s", "--year") if one["note"]]
    assert sorted(notes) == [
        "02:30:00 does not exist: fires at the end of the gap",
        "first of two: the second does not fire",
    ]
    assert main(["schedules"]) == 0
    assert "queued" in capfd.readouterr().out
    assert run(capfd, "remove", "s") == []


def test_add_takes_every_option_of_a_schedule(capfd: pytest.CaptureFixture[str]):
    config.register_ingest_task("any", lambda **args: None)
    given = {
        "--priority": "7", "--idempotency-key": "k {fire_at}", "--headers": '{"x": "y"}',
        "--catch-up": "all", "--catch-up-max": "3", "--catch-up-within-s": "60",
        "--overlap": "queue", "--jitter-s": "2", "--start-at": "2030-01-01T06:00",
        "--end-at": "2030-06-01T06:00Z", "--tz": "Europe/Warsaw", "--args": '{"a": 1}',
    }  # fmt: skip
    words = [word for pair in given.items() for word in pair]
    (row,) = run(capfd, "add", "s", "every 1h", "--task", "any", "--queue", "fetch", *words)
    assert {
        name: row[name]
        for name in (
            "priority", "idempotency_key", "headers", "catch_up", "catch_up_max",
            "catch_up_within_s", "overlap", "jitter_s", "start_at", "end_at", "tz", "args",
        )
    } == {
        "priority": 7, "idempotency_key": "k {fire_at}", "headers": {"x": "y"},
        "catch_up": "all", "catch_up_max": 3, "catch_up_within_s": 60.0, "overlap": "queue",
        "jitter_s": 2.0, "start_at": "2030-01-01T05:00:00+00:00",
        "end_at": "2030-06-01T06:00:00+00:00", "tz": "Europe/Warsaw", "args": {"a": 1},
    }  # fmt: skip
    named = {f"--{name.replace('_', '-')}" for name in timetable.COLUMNS[2:]}
    named -= {"--task-name", "--workflow-name", "--inputs"}
    assert named <= {*given, "--queue"}, "each field has an option here"


def test_run_now_says_what_held_it_back(capfd: pytest.CaptureFixture[str], db: ModuleType):
    for name, more in (("busy", {}), ("keyed", {"overlap": "allow", "idempotency_key": "k"})):
        schedules.add(name, "every 1h", task_name="prices", queue="fetch", **more)
        assert run(capfd, "run-now", name)["skipped"] is None
    for name, text in (
        ("busy", "nothing queued: the last job or run is not over\n"),
        ("keyed", "nothing queued: another job has the idempotency key\n"),
    ):
        assert main(["schedules", "run-now", name]) == 0
        assert capfd.readouterr().out == text


def test_a_preview_that_is_cut_says_so(capfd: pytest.CaptureFixture[str]):
    schedules.add("s", "0 * * * *", tz="Europe/Warsaw", task_name="prices", queue="fetch")
    assert len(run(capfd, "preview", "s", "--year")) > 8700
    assert main(["schedules", "preview", "s", "--limit", "3"]) == 0
    printed = capfd.readouterr()
    assert printed.err == "these are the first 3: --limit N shows more\n"
    assert printed.out.count(":00:00") == 3
    schedules.add("rare", "0 0 29 2 *", task_name="prices", queue="fetch")
    assert main(["schedules", "preview", "rare"]) == 0
    assert "none: preview looks 7 days ahead" in capfd.readouterr().err


def test_a_workflow_that_the_app_does_not_know_is_refused(capfd: pytest.CaptureFixture[str]):
    adding = ["schedules", "add", "s", "every 1h", "--workflow", "nightyl"]
    assert main(adding) == 0, "a process without workflows cannot know them"
    config.set_workflow_provider({"nightly": {}}.__getitem__, {}.__getitem__)
    capfd.readouterr()
    assert main(adding) == 2
    assert "schedule 's': the provider knows no workflow 'nightyl'" in capfd.readouterr().err


def test_the_list_shows_problems(capfd: pytest.CaptureFixture[str], db: ModuleType):
    for name in ("gone", "wrong", "still"):
        schedules.add(name, "every 1h", task_name="prices", queue="fetch")
    with db.connection() as conn:
        conn.execute("UPDATE schedules SET gone_at = now() WHERE name = 'gone'")
        conn.execute("UPDATE schedules SET error = 'no zone' WHERE name = 'wrong'")
        conn.execute("UPDATE schedules SET paused = true WHERE name = 'still'")
    assert main(["schedules", "list"]) == 0
    out = capfd.readouterr().out
    assert "gone from the code" in out and "cannot fire: no zone" in out and "paused" in out
    schedules.add("still", "every 2h", task_name="prices", queue="fetch", overlap="allow")
    schedules.resume("still")
    schedules.run_now("still")
    assert main(["schedules", "list"]) == 0
    assert "queued; changed: expression, overlap" in capfd.readouterr().out


@pytest.mark.parametrize(
    "words", [["list"], ["pause"], ["resume"], ["remove"], ["run-now"], ["preview"]]
)
def test_an_unknown_schedule_is_compared_with_the_known_ones(
    capfd: pytest.CaptureFixture[str], words: list[str]
):
    schedules.add("nightly", "every 1h", task_name="prices", queue="fetch")
    assert main(["schedules", *words, "nightyl"]) == 2
    assert "no schedule 'nightyl'; did you mean 'nightly'?" in capfd.readouterr().err


def test_bad_input_is_one_line_and_exit_code_2(capfd: pytest.CaptureFixture[str]):
    cases: list[Any] = [
        (["explode"], "is none of list"),
        (["pause"], "needs the NAME"),
        (["pause", "nope"], "no schedule 'nope'"),
        (["list", "nope"], "no schedule 'nope'"),
        (["pause", "s", "--tz", "UTC"], "schedules pause: --tz is an option of add"),
        (["add", "s", "every 1h", "--task", "prices", "--year"], "--year is an option of preview"),
        (["add", "s", "every 1h", "--task", "prices", "--queue", "x"], "--app names the app"),
        (
            [
                "add",
                "s",
                "every 1h",
                "--task",
                "prices",
                "--start-at",
                "0001-01-01",
                "--tz",
                "Asia/Tokyo",
            ],
            "start_at is from 2000-01-01",
        ),
        (["add", "s"], "add NAME EXPRESSION"),
        (["add", "s", "every 1h"], "schedules add: give --task or --workflow, and not both"),
        (["add", "s", "61 * * * *", "--task", "prices", "--queue", "fetch"], "Bad minute"),
        (["add", "s", "every 1h", "--task", "prices", "--args", "{"], "--args { is not JSON"),
        (["add", "s", "every 1h", "--task", "prices", "--headers", "["], "--headers [ is not JSON"),
        (["add", "s", "every 1h", "--task", "prices", "--headers", "[]"], "a mapping of texts"),
        (["add", "s", "every 1h", "--task", "prices", "--start-at", "soon"], "is no ISO time"),
        (["add", "s", "every 1h", "--task", "prices", "--catch-up-max", "0"], "1-1000"),
    ]
    for words, said in cases:
        with tabled.case(words, said):
            assert main(["schedules", *words]) == 2
            err = capfd.readouterr().err
            assert said in err and err.count("\n") == 1


def test_the_hint_at_an_app_is_for_a_process_that_has_none(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    adding = ["schedules", "add", "s", "every 1h", "--task", "prices", "--queue", "x"]
    assert main(adding) == 2
    assert "--app names the app that has it" in capfd.readouterr().err
    monkeypatch.setenv("QUEUE_WORKFLOWS_APP", "tests.support.toy_app:ingest_only")
    assert main(adding) == 2
    err = capfd.readouterr().err
    assert "'x'" in err and "--app names" not in err


def test_status_doctor_and_list_show_what_is_wrong(
    capfd: pytest.CaptureFixture[str], db: ModuleType
):
    for name in ("fine", "paused", "failing", "clash", "late", "missed", "wrong"):
        schedules.add(name, "every 1h", task_name="prices", queue="fetch", overlap="allow")
    with db.connection() as conn:
        for _ in range(3):
            conn.execute(
                "UPDATE ingest_jobs SET status = 'failed', finished_at = now() WHERE id = %s",
                (schedules.run_now("failing", conn=conn),),
            )
            conn.commit()
        changes = {
            "clash": "clash = 'other:setup'",
            "late": "next_at = now(), wake_at = now() - interval '5 min'",
            "missed": "missed_at = now(), last_fire_at = now() - interval '1 h'",
            "wrong": "error = 'no zone'",
            "paused": "error = 'no zone', paused = true",
        }
        for name, change in changes.items():
            conn.execute(f"UPDATE schedules SET {change} WHERE name = '{name}'")
        conn.execute("UPDATE schedules SET error = 'x' WHERE name = 'paused'")
    found = {row["name"]: schedules.problem(row) or "" for row in schedules.troubled()}
    assert [*found] == ["clash", "failing", "late", "missed", "wrong"]
    assert found["failing"] == "failed 3 times in a row"
    assert found["late"].startswith("overdue by 30")
    assert found["missed"].startswith("missed its instant ")
    assert found["clash"].startswith("app other:setup names one too")
    assert [row["name"] for row in schedules.troubled(limit=2)] == ["clash", "failing"]
    assert main(["status"]) == 0
    shown = capfd.readouterr().out
    assert "schedule wrong: cannot fire: no zone" in shown and "paused" not in shown
    assert main(["status", "--json"]) == 0
    listed = json.loads(capfd.readouterr().out)["schedules"]
    shown_again = {one["name"]: one["problem"] for one in listed}
    assert shown_again.pop("late").startswith("overdue by 30")
    assert shown_again == {name: text for name, text in found.items() if name != "late"}
    main(["doctor"])
    assert "failing: failed 3 times in a row" in capfd.readouterr().out
    assert main(["schedules", "list"]) == 0
    assert "failed 3 times in a row" in capfd.readouterr().out
