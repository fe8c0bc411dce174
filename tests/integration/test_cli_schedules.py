"""`queue-workflows schedules`: each action, and what it refuses."""

from __future__ import annotations

import json
from types import ModuleType
from typing import Any

import pytest

from queue_workflows import config, schedules
from queue_workflows.__main__ import main


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
    assert run(capfd, "pause", "s")[0]["paused"] is True
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


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["explode"], "actions are list"),
        (["pause"], "needs the NAME"),
        (["pause", "nope"], "no schedule 'nope'"),
        (["add", "s"], "add NAME EXPRESSION"),
        (["add", "s", "every 1h"], "give --task or --workflow"),
        (["add", "s", "61 * * * *", "--task", "prices", "--queue", "fetch"], "Bad minute"),
        (["add", "s", "every 1h", "--task", "prices", "--args", "{"], "--args is no JSON"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    capfd: pytest.CaptureFixture[str], words: list[str], said: str
):
    assert main(["schedules", *words]) == 2
    err = capfd.readouterr().err
    assert said in err and err.count("\n") == 1


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
