"""The process main: exit codes, one-line errors, logging, secrets."""

from __future__ import annotations

import argparse
import logging
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from queue_workflows import config, errors
from queue_workflows.runtime import app_loading, entry_point, masking
from tests.support import tabled

SECRET = "s3cr3t"


def bare_root(monkeypatch: pytest.MonkeyPatch) -> logging.Logger:
    """The root logger without the handlers that pytest hung on it for this call."""
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", [])
    monkeypatch.setattr(root, "level", root.level)
    return root


def raising(error: BaseException) -> Callable[[], int]:
    def body() -> int:
        raise error

    return body


@pytest.mark.parametrize("code", [0, 3])
def test_the_bodys_code_is_the_exit_code(code: int) -> None:
    assert entry_point.run_main("prog", lambda: code) == code


def test_an_error_of_ours_is_one_masked_line_and_code_2(
    capsys: pytest.CaptureFixture[str],
) -> None:
    error = errors.DatabaseUnavailable(f"postgres://u:{SECRET}@h/db\ndoes not answer")
    assert entry_point.run_main("prog", raising(error)) == 2
    assert capsys.readouterr().err == "prog: postgres://u:***@h/db does not answer\n"


def test_an_error_without_text_is_named_by_its_class(capsys: pytest.CaptureFixture[str]) -> None:
    assert entry_point.run_main("prog", raising(errors.UnknownQueue())) == 2
    assert capsys.readouterr().err == "prog: UnknownQueue\n"


def test_debug_adds_the_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    error = errors.UnknownQueue(f"password={SECRET}")
    assert entry_point.run_main("prog", raising(error), debug=True) == 2
    err = capsys.readouterr().err
    assert err.startswith("Traceback")
    assert err.endswith("\nprog: password=***\n")
    assert SECRET not in err


def test_ctrl_c_is_130(capsys: pytest.CaptureFixture[str]) -> None:
    assert entry_point.run_main("prog", raising(KeyboardInterrupt())) == 130
    assert capsys.readouterr().err == ""


def test_any_other_error_is_logged_with_its_traceback_and_code_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bare_root(monkeypatch)
    error = ZeroDivisionError(f"host=h password='{SECRET}'")
    assert entry_point.run_main("prog", raising(error)) == 1
    err = capsys.readouterr().err
    assert "prog: unexpected error\n  Traceback" in err
    assert "ZeroDivisionError: host=h password=***" in err
    assert SECRET not in err


def test_an_error_that_a_layer_above_explains_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(errors, "_explanations", [])
    errors.explain_by(lambda error: errors.DatabaseRefused("no right") if error.args else None)
    assert entry_point.run_main("prog", raising(LookupError("x"))) == 2
    assert capsys.readouterr().err == "prog: no right\n"
    assert entry_point.run_main("prog", raising(LookupError("x")), debug=True) == 2
    assert "LookupError: x" in capsys.readouterr().err
    assert entry_point.run_main("prog", raising(LookupError())) == 1


def test_what_an_app_raised_is_one_line_and_its_frames(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "boomapp.py").write_text("def setup():\n    raise RuntimeError('boom')\nsetup()\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])

    def body() -> int:
        app_loading.load_app("boomapp")
        return 0

    assert entry_point.run_main("prog", body) == 2
    first, *frames = capsys.readouterr().err.splitlines()
    assert first == (
        "prog: --app boomapp: importing it failed: RuntimeError: boom (boomapp.py, line 3)"
    )
    files = [line for line in frames if line.startswith("  File")]
    assert len(files) == 2
    assert all("boomapp.py" in line for line in files)
    assert entry_point.run_main("prog", body, debug=True) == 2
    assert "Traceback (most recent call last)" in capsys.readouterr().err


def printing(out: int, count: int, unbuffered: str) -> tuple[int, str]:
    """Exit code and stderr of a command that prints so much to this descriptor."""
    code = (
        "import sys; from queue_workflows.runtime import entry_point\n"
        f"sys.exit(entry_point.run_main('prog', lambda: print('x' * {count}) or 0))"
    )
    env = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    argv = [sys.executable, "-c", code]
    done = subprocess.run(
        argv, stdout=out, stderr=subprocess.PIPE, env=env, text=True, check=False, timeout=30
    )
    return done.returncode, done.stderr


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("count", [1, 100_000])
def test_output_that_nobody_reads_ends_it_quietly(count: int, unbuffered: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        assert printing(writer, count, unbuffered) == (1, "")
    finally:
        os.close(writer)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device of Linux")
@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("count", [1, 100_000])
def test_output_that_cannot_be_written_is_one_line(count: int, unbuffered: str) -> None:
    with Path("/dev/full").open("w") as full:
        code, said = printing(full.fileno(), count, unbuffered)
    line = "prog: what it prints cannot be written: No space left on device"
    assert (code, said.strip()) == (1, line)


def test_an_os_error_of_the_handler_is_not_blamed_on_the_output(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bare_root(monkeypatch)
    assert entry_point.run_main("prog", raising(OSError(28, "No space left on device"))) == 1
    assert "unexpected error" in capsys.readouterr().err


@pytest.mark.parametrize("fd", [0, 1, 2])
def test_a_closed_stream_is_an_empty_one(fd: int) -> None:
    code = (
        "import os, sys; from queue_workflows.runtime import entry_point\n"
        "def body():\n"
        "    print('out'); sys.stderr.write('err'); sys.stdin.read()\n"
        f"    return os.readlink('/proc/self/fd/{fd}') != os.devnull\n"
        "sys.exit(entry_point.run_main('prog', body))"
    )
    done = subprocess.run(
        ["/bin/sh", "-c", f'exec "$0" -c "$1" {fd}>&-', sys.executable, code],
        stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (
        0,
        "" if fd == 1 else "out\n",
        "" if fd == 2 else "err",
    )


def test_system_exit_passes() -> None:
    with pytest.raises(SystemExit) as caught:
        entry_point.run_main("prog", raising(SystemExit(4)))
    assert caught.value.code == 4


def test_mask_hides_passwords_and_nothing_else() -> None:
    cases: list[Any] = [
        ("postgresql://u:s3cr3t@h:5432/db", "postgresql://u:***@h:5432/db"),
        ("postgres://:s3cr3t@h", "postgres://:***@h"),
        ("two postgres://a:s3cr3t@h/x and redis://b:s3cr3t@i", "two postgres://a:***@h/x and redis://b:***@i"),
        ("typed raw postgres://u:s3c/r3t@s3cr3t@h/db", "typed raw postgres://u:***@h/db"),
        ("host=h password=s3cr3t user=u", "host=h password=*** user=u"),
        ("host=h PASSWORD = 's3 \\' cr3t' user=u", "host=h PASSWORD = *** user=u"),
        ("postgres:///db?user=u&password=s3cr3t", "postgres:///db?user=u&password=***"),
        ("{'password': 's3cr3t', 'host': 'h'}", "{'password': ***, 'host': 'h'}"),
        ("PGPASSWORD=s3,cr3t psql", "PGPASSWORD=*** psql"),
        ("postgres://u@h:5432/db", "postgres://u@h:5432/db"),
        ("http://h:8080/x says password refused", "http://h:8080/x says password refused"),
    ]  # fmt: skip
    for text, masked in cases:
        with tabled.case(text, masked):
            assert masking.mask(text) == masked


def test_logging_is_one_masked_utc_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bare_root(monkeypatch)
    entry_point.setup_logging("warning")
    log = logging.getLogger("queue_workflows.some.module")
    log.info("not shown")
    log.warning("connecting to %s", f"postgres://u:{SECRET}@h")
    try:
        raise ValueError(f"password={SECRET}")
    except ValueError:
        log.exception("failed")
    lines = capsys.readouterr().err.splitlines()
    stamp = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z"
    assert re.fullmatch(
        rf"{stamp} WARNING queue_workflows\.some\.module: connecting to postgres://u:\*\*\*@h",
        lines[0],
    )
    assert lines[1].endswith("ERROR queue_workflows.some.module: failed")
    assert lines[-1] == "  ValueError: password=***"


def test_log_lines_are_in_utc_wherever_the_machine_is(monkeypatch: pytest.MonkeyPatch) -> None:
    root = bare_root(monkeypatch)
    entry_point.setup_logging()
    record = logging.LogRecord("name", logging.INFO, "path", 1, "text", None, None)
    record.created, record.msecs = 0.0, 7.0
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    time.tzset()
    try:
        line = root.handlers[0].format(record)
    finally:
        monkeypatch.undo()
        time.tzset()
    assert line == "1970-01-01T00:00:00.007Z INFO name: text"


def test_an_apps_logging_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    root = bare_root(monkeypatch)
    handler = logging.NullHandler()
    root.addHandler(handler)
    entry_point.setup_logging("debug")
    assert root.handlers == [handler]


def test_the_common_arguments() -> None:
    parser = argparse.ArgumentParser()
    entry_point.add_common_arguments(parser)
    plain = parser.parse_args([])
    common = {"app": None, "db": "", "embedded": False, "debug": False}
    assert vars(plain) == common | {"log_level": "info", "log_format": None}
    given = parser.parse_args(["--app", "m:f", "--embedded", "--debug", "--log-level", "DEBUG"])
    common = {"app": "m:f", "db": "", "embedded": True, "debug": True}
    assert vars(given) == common | {"log_level": "debug", "log_format": None}
    with pytest.raises(SystemExit) as caught:
        parser.parse_args(["--log-level", "loud"])
    assert caught.value.code == 2


def test_a_removed_setting_that_is_set_is_warned_of_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("QUEUE_WORKFLOWS_DISPATCH_POLL_S", "3")
    monkeypatch.setenv("AI_LEADS_MAP_WINDOW", "7")
    monkeypatch.setenv("LOG_FILE_NAME", "etl.log")
    for _ in range(2):
        entry_point.warn_of_removed()
    assert sorted(caplog.messages) == [
        "AI_LEADS_MAP_WINDOW='7': no effect; set `at_once` of the map",
        "LOG_FILE_NAME='etl.log': no effect; name the file in LOG_PATH",
        "QUEUE_WORKFLOWS_DISPATCH_POLL_S='3': no effect; set CLAIM_POLL_S",
    ]


def test_the_name_of_a_log_that_serve_has_put_into_its_path_is_none_of_them(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("LOG_FILE_NAME", "etl.log")
    monkeypatch.setenv("QUEUE_WORKFLOWS_LOG_PATH", "/logs/etl.log")
    entry_point.warn_of_removed()
    assert not caplog.records


def test_no_removed_setting_exists() -> None:
    assert len(config.KNOBS) <= 55
    assert not config.KNOBS.keys() & entry_point.REMOVED.keys()
