"""Log lines: text and JSON, the ids of the work, escaped values, no secrets, and files."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import os
import resource
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from queue_workflows import config, errors
from queue_workflows.runtime import entry_point, log_context, logs
from tests.support import constants

HOSTILE = 'x\n{"level": "ERROR"}\x1b[31m\u202e\x00\ud800"\\'
Lines = Callable[[], list[dict[str, Any]]]


@pytest.fixture
def begin(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Lines]]:
    """Sets up logging in a format; returns what reads the lines."""
    written = io.StringIO()
    root = logging.getLogger()
    monkeypatch.setattr(root, "level", root.level)

    def made(form: str) -> Lines:
        monkeypatch.setattr(sys, "stderr", written)  # pytest has others for each phase
        monkeypatch.setattr(root, "handlers", [])
        entry_point.setup_logging("info", form)
        if form == "text":
            return lambda: [{"line": line} for line in written.getvalue().splitlines()]
        return lambda: [json.loads(line) for line in written.getvalue().split("\n") if line]

    yield made
    logging.captureWarnings(False)
    for handler in root.handlers:
        handler.close()


log = logging.getLogger("queue_workflows.test_log_format")


def test_a_line_of_json_has_its_time_level_and_fields(begin: Callable[[str], Lines]) -> None:
    lines = begin("json")
    log.warning("stored %d rows", 3, extra={"rows": 3, "duration_s": 0.25, "at": float("nan")})
    (line,) = lines()
    assert line.pop("time").endswith("Z")
    assert line == {
        "level": "WARNING",
        "logger": log.name,
        "message": "stored 3 rows",
        "pid": os.getpid(),
        "rows": 3,
        "duration_s": 0.25,
        "at": "NaN",
    }


class Tensor:
    """A value that is no number, and can be converted to one."""

    def __int__(self) -> int:
        return 3


class Broken:
    def __str__(self) -> str:
        raise ValueError("no text")


@pytest.mark.parametrize(
    ("message", "argument", "text"),
    [
        ("%d rows", Decimal(3), "3 rows"),
        ("%d rows", Tensor(), "3 rows"),
        ("%d rows", "x", "%d rows (its arguments do not fit: test_log_format.py, line "),
        ("%s %s", "x", "%s %s (its arguments do not fit: "),
        ("%s", Broken(), "%s (its arguments do not fit: "),
        (Broken(), "x", "a Broken (its arguments do not fit: "),
    ],
)
def test_a_log_call_of_an_app_raises_nothing(
    begin: Callable[[str], Lines], message: Any, argument: Any, text: str
) -> None:
    lines = begin("json")
    log.warning(message, argument)
    assert lines()[0]["message"].startswith(text)


def test_hostile_values_stay_one_line_of_ascii(begin: Callable[[str], Lines]) -> None:
    lines = begin("json")
    log.warning(HOSTILE, extra={HOSTILE: HOSTILE, "deep": [[HOSTILE]]})
    log.warning("%s", HOSTILE)
    try:
        raise ValueError(HOSTILE)
    except ValueError:
        log.exception("failed")
    text = sys.stderr.getvalue()  # pyright: ignore[reportAttributeAccessIssue]
    assert text.count("\n") == 3
    assert text.isascii() and text.replace("\n", "").isprintable()
    assert lines()[0][HOSTILE] == HOSTILE
    assert "ValueError: x" in lines()[2]["error"]


@pytest.mark.parametrize("value", [Broken(), "y" * 100_000, [["z" * 9]] * 100_000])
def test_no_extra_field_breaks_or_floods_a_line(
    begin: Callable[[str], Lines], value: object
) -> None:
    lines = begin("json")
    log.warning("kept", extra={"field": value})
    (line,) = lines()
    assert line["message"] == "kept"
    assert len(json.dumps(line)) < 40_000


def test_a_cyclic_field_ends(begin: Callable[[str], Lines]) -> None:
    lines = begin("json")
    cycle: list[Any] = []
    cycle += [cycle, cycle]
    log.warning("kept", extra={"field": cycle})
    assert lines()[0]["message"] == "kept"


def test_no_secret_shows_in_a_message_field_or_traceback(begin: Callable[[str], Lines]) -> None:
    begin("json")
    secret = {"password": "c4nary", "nested": [{"x-api-key": {"a": "c4nary"}}]}
    log.warning(
        "postgres://u:c4nary@h", extra={"given": secret, "token": "c4nary", "lock_key": "k"}
    )
    try:
        raise ValueError("secret=c4nary")
    except ValueError:
        log.exception("failed")
    text = sys.stderr.getvalue()  # pyright: ignore[reportAttributeAccessIssue]
    assert "c4nary" not in text
    assert '"lock_key": "k"' in text


def test_lines_carry_the_ids_that_are_bound_and_no_others(begin: Callable[[str], Lines]) -> None:
    lines = begin("json")
    with log_context.bound(request_id="q1"), log_context.bound({"job_id": "j1"}):
        log.warning("inside")
        other = threading.Thread(target=lambda: log.warning("a thread of its own"))
        other.start()
        other.join()
    log.warning("outside")
    inside, thread, outside = lines()
    assert (inside["request_id"], inside["job_id"]) == ("q1", "j1")
    assert "job_id" not in thread and "job_id" not in outside


def test_async_tasks_do_not_share_ids(begin: Callable[[str], Lines]) -> None:
    lines = begin("json")

    async def one(number: int, ready: asyncio.Barrier | Any) -> None:
        with log_context.bound(job_id=f"j{number}"):
            await ready.wait()
            log.warning("%d", number)

    async def both() -> None:
        ready = asyncio.Event()
        tasks = [asyncio.ensure_future(one(number, ready)) for number in range(3)]
        await asyncio.sleep(0)
        ready.set()
        await asyncio.gather(*tasks)

    asyncio.run(both())
    assert {line["message"]: line["job_id"] for line in lines()} == {
        "0": "j0",
        "1": "j1",
        "2": "j2",
    }


def test_ids_of_the_process_are_in_every_line_of_json(begin: Callable[[str], Lines]) -> None:
    lines = begin("json")
    log_context.set_for_process(worker="w1", queue="cpu")
    try:
        with log_context.bound(queue="gpu"):
            log.warning("one")
    finally:
        log_context.set_for_process(worker=None, queue=None)
    log.warning("two")
    assert (lines()[0]["worker"], lines()[0]["queue"]) == ("w1", "gpu")
    assert "worker" not in lines()[1]


def test_text_names_the_ids_that_the_message_does_not(begin: Callable[[str], Lines]) -> None:
    lines = begin("text")
    with log_context.bound(job_id="j1", run_id=HOSTILE):
        log.warning("job j1 waits\nand waits")
    first, second = lines()
    assert "Z WARNING" in first["line"]
    assert r"job j1 waits [run_id=x\n{" in first["line"]
    assert first["line"].isascii()
    assert second["line"] == "  and waits"


def test_a_part_of_a_word_and_a_number_of_the_message_name_no_id(
    begin: Callable[[str], Lines],
) -> None:
    lines = begin("text")
    with log_context.bound(job_id="j1", node_id="load", attempt=1, queue="cpu"):
        log.warning("job j1: loaded 1 lamp on cpu-2")
    assert lines()[0]["line"].endswith("on cpu-2 [node_id=load attempt=1 queue=cpu]")


def test_a_warning_of_python_is_a_line_of_json(begin: Callable[[str], Lines]) -> None:
    lines = begin("json")
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        logging.captureWarnings(True)
        warnings.warn("old", DeprecationWarning, stacklevel=1)
    assert "DeprecationWarning: old" in lines()[0]["message"]


def test_the_setting_chooses_the_format(
    begin: Callable[[str], Lines], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUEUE_WORKFLOWS_LOG_FORMAT", "JSON")
    assert logs.default_format() == "json"
    monkeypatch.setenv("QUEUE_WORKFLOWS_LOG_FORMAT", "xml")
    assert logs.default_format() == "text"


def test_refused_input_is_a_line_of_json_too(
    begin: Callable[[str], Lines], monkeypatch: pytest.MonkeyPatch
) -> None:
    begin("json")
    monkeypatch.setenv("QUEUE_WORKFLOWS_LOG_FORMAT", "json")

    def refuse() -> int:
        raise errors.InvalidConfig("password=c4nary\nis wrong")

    assert entry_point.run_main("prog", refuse) == 2
    (line,) = [json.loads(each) for each in sys.stderr.getvalue().splitlines()]  # pyright: ignore[reportAttributeAccessIssue]
    assert line["message"] == "prog: password=*** is wrong"
    assert line["level"] == "ERROR"
    assert "traceback" not in line


def test_an_app_that_fails_is_a_line_of_json_with_its_frames(
    begin: Callable[[str], Lines],
) -> None:
    lines = begin("json")

    def fail_at_once() -> None:
        raise OSError("token=c4nary")

    def load() -> int:
        try:
            fail_at_once()
        except OSError as error:
            raise errors.AppFailed("importing it failed") from error
        return 0

    assert entry_point.run_main("prog", load) == 2
    (line,) = lines()
    assert line["message"] == "prog: importing it failed"
    assert "in fail_at_once" in line["traceback"]


def test_the_application_log_has_the_same_lines(
    begin: Callable[[str], Lines], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("LOG_PATH", str(tmp_path / "a" / "b" / "etl.log"))
    begin("json")
    log.warning("token=c4nary %s", HOSTILE)
    text = (tmp_path / "a" / "b" / "etl.log").read_text()
    assert text == sys.stderr.getvalue()  # pyright: ignore[reportAttributeAccessIssue]
    assert "c4nary" not in text


@pytest.mark.parametrize(
    "path", ["/dev/null/x", "~nobody-has-this-name/etl.log", f"/{'x' * 300}.log"]
)
def test_a_log_that_cannot_be_written_costs_a_warning(
    begin: Callable[[str], Lines], monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    monkeypatch.setenv("LOG_PATH", path)
    lines = begin("json")
    with pytest.raises(errors.InvalidConfig):
        logs.application_log()
    assert "logging to stderr alone" in lines()[0]["message"]


def rotating(
    patch: pytest.MonkeyPatch, path: Path, max_bytes: int, kept: int = 1000
) -> logs.RotatingFile:
    """A file; all files rotate at this size from now on, and so many stay of each."""
    constants.put(patch, "runtime.logs.MAX_BYTES", max_bytes)
    constants.put(patch, "runtime.logs.KEPT", kept)
    return logs.RotatingFile(path)


def test_a_full_file_is_renamed_and_the_oldest_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = rotating(monkeypatch, tmp_path / "x.log", 30, 2)
    for number in range(9):
        file.write(f"line number {number}\n")
    file.close()
    found = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert found == {
        "x.log": "line number 8\n",
        "x.log.1": "line number 6\nline number 7\n",
        "x.log.2": "line number 4\nline number 5\n",
    } or sorted(found) == ["x.log", "x.log.1", "x.log.2"]
    assert "line number 8\n" in found["x.log"]
    assert all(len(text) <= 30 for text in found.values())


def test_processes_that_share_a_file_lose_no_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, count = tmp_path / "x.log", 300
    file = rotating(monkeypatch, path, 5_000)
    file.write("")
    pids: list[int] = []
    for child in range(4):
        pid = os.fork()
        if not pid:
            try:
                for number in range(count):
                    file.write(f"{child}:{number}:{'y' * 40}\n")
            finally:
                os._exit(0)
        pids.append(pid)
    for pid in pids:
        assert os.waitpid(pid, 0)[1] == 0
    file.close()
    lines = [line for each in tmp_path.iterdir() for line in each.read_text().splitlines()]
    sizes = {each.name: each.stat().st_size for each in tmp_path.iterdir()}
    assert len(sizes) > 5 and sizes.pop("x.log") <= 5_000
    assert all(4_900 <= size <= 5_000 for size in sizes.values())
    assert sorted(lines) == sorted(
        f"{child}:{number}:{'y' * 40}" for child in range(4) for number in range(count)
    )


def test_a_new_file_that_others_fill_at_once_is_renamed_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "x.log"
    mine, other = (rotating(monkeypatch, path, 100) for _ in range(2))
    mine.write("a" * 90)
    rename = Path.replace

    def rename_and_fill(source: Path, target: Path) -> Path:
        result = rename(source, target)
        if source == path:
            monkeypatch.setattr(Path, "replace", rename)
            other.write("b" * 90)
        return result

    monkeypatch.setattr(Path, "replace", rename_and_fill)
    mine.write("c" * 20)
    mine.close()
    other.close()
    texts = {each.name: each.read_text() for each in tmp_path.iterdir()}
    assert texts == {"x.log": "c" * 20, "x.log.1": "b" * 90, "x.log.2": "a" * 90}


def test_a_deleted_file_is_made_again(tmp_path: Path) -> None:
    file = logs.RotatingFile(tmp_path / "x.log")
    file.write("one\n")
    file.path.unlink()
    file.write("two\n")
    file.close()
    assert file.path.read_text() == "two\n"


def test_a_text_that_does_not_fit_leaves_no_part_of_it(tmp_path: Path) -> None:
    file = logs.RotatingFile(tmp_path / "x.log")
    file.write("one\n")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, before[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            file.write("two, which is too long\n")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    file.write("three\n")
    file.close()
    assert file.path.read_text() == "one\nthree\n"


def test_a_file_that_fails_later_is_reported_once(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "logs"
    folder.mkdir()
    handler = logs.FileHandler(logs.RotatingFile(folder / "x.log"))
    folder.rmdir()
    record = logging.makeLogRecord({"msg": "text", "levelno": 30})
    handler.handle(record)
    handler.handle(record)
    folder.mkdir()
    handler.handle(record)
    handler.close()
    assert capfd.readouterr().err.count("cannot be written") == 1
    assert (folder / "x.log").read_text() == "text\n"


def test_the_knobs_have_the_names_of_the_guide() -> None:
    for name in ("LOG_PATH", "METRIC_PATH", "AUDIT_LOG_PATH"):
        assert config.KNOBS[name].variables == (f"QUEUE_WORKFLOWS_{name}", name)
