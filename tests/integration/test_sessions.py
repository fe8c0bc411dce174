"""A test session ends by itself, names the tests that hold it up, and leaves nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import pytest_timeout

from tests.support import commands, reaper, session_limit, wait
from tests.support.wait import patience, until

CONFTEST = """
from tests.support import session_limit


def pytest_configure(config):
    session_limit.install(config)
"""
TESTS = """
import time


def test_quick():
    pass


def test_fails():
    assert 1 == 2


def test_hangs():
    time.sleep(600)
"""
STARTS = """
import os, shutil, subprocess, sys, tempfile, time
from pathlib import Path
from tests.support import reaper

reaper.start()
owned = tempfile.mkdtemp(prefix="qw-left-", dir=sys.argv[1])
reaper.own(Path(owned))
made = tempfile.mkdtemp()
stray = [subprocess.Popen(["sleep", "600"], start_new_session=True)]
for folder in (owned, made):  # as PostgreSQL does: with a clean environment
    program = shutil.copy(shutil.which("sleep"), os.path.join(folder, "postgres"))
    stray.append(subprocess.Popen([program, "600"], start_new_session=True, env={}, cwd=folder))
print(owned, made, *(each.pid for each in stray), flush=True)
time.sleep(600)
"""


def python(*args: str, cwd: Path | str = commands.ROOT, **env: str) -> subprocess.Popen[str]:
    own = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    return subprocess.Popen(
        [sys.executable, *args],
        cwd=cwd,
        env={**own, "PYTHONPATH": str(commands.ROOT), **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.slow
def test_a_session_that_takes_too_long_ends_and_names_its_test(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_it.py").write_text(TESTS)
    limit = f"{patience(4):.0f}"
    given = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:randomly")
    own = {session_limit.VARIABLE: limit}
    folder = ("--rootdir", str(tmp_path), "-c", os.devnull, str(tmp_path))
    sessions = [python(*given, *processes, *folder, **own) for processes in ((), ("-n", "1"))]
    for session in sessions:
        told, _ = session.communicate(timeout=patience(60))
        assert session.returncode == session_limit.EXIT_CODE, told
        assert f"took longer than {limit} s" in told
        assert "test_it.py::test_hangs" in told
        end = told.partition("took longer")[2]
        assert "test_it.py::test_quick" not in end
        assert end.index("test_it.py::test_fails") < end.index("assert 1 == 2")


def test_what_a_killed_session_leaves_behind_is_ended(tmp_path: Path) -> None:
    session = python("-c", STARTS, str(tmp_path), TMPDIR=str(tmp_path))
    assert session.stdout is not None
    owned, made, *stray = session.stdout.readline().split()
    assert len(stray) == 3
    session.send_signal(signal.SIGKILL)
    session.wait(patience(10))
    session.stdout.close()
    until(lambda: not any(Path(f"/proc/{pid}/cwd").exists() for pid in stray))
    until(lambda: not Path(owned).exists() and not Path(made).exists())


def test_each_test_process_has_a_reaper() -> None:
    assert os.environ[reaper.MARK]
    assert all(Path(f"/proc/{pid}").exists() for pid in reaper.pids)


def test_the_time_limit_of_a_test_grows_on_a_busy_machine(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits: list[float] = []

    def set_timer(_: pytest.Item, settings: pytest_timeout.Settings) -> bool:
        limits.append(settings.timeout)
        return True

    monkeypatch.setattr(pytest_timeout, "pytest_timeout_set_timer", set_timer)
    monkeypatch.setattr(wait, "Deadline", lambda _: SimpleNamespace(factor=3.0))
    settings = pytest_timeout.Settings(240.0, "signal", False, False)
    request.config.hook.pytest_timeout_set_timer(item=request.node, settings=settings)
    assert limits == [720.0]


def test_children_use_the_temporary_folder_of_their_test_process() -> None:
    code = "import tempfile; print(tempfile.gettempdir())"
    found = subprocess.check_output([sys.executable, "-c", code], text=True).strip()
    assert found == tempfile.gettempdir()
    assert (Path(found) / reaper.FILE).read_text() == os.environ[reaper.MARK]


FLAKY = """
from pathlib import Path

MARK = Path(__file__).parent / "ran"


def test_passes():
    pass


def test_fails_once():
    first = not MARK.exists()
    MARK.touch()
    assert not first, "the first time"


def test_fails_always():
    assert {always}
"""


@pytest.mark.slow
def test_a_test_that_passes_alone_is_listed_as_flaky_and_no_other(tmp_path: Path) -> None:
    report = tmp_path / "flaky"
    codes: list[int] = []
    for always in ("True", "False"):
        project = tmp_path / always
        project.mkdir()
        (project / "conftest.py").write_text(
            "from tests.conftest import pytest_runtest_logreport\n"
        )
        (project / "test_it.py").write_text(FLAKY.format(always=always))
        suite = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(project)]
        given = ["--python", sys.executable, "--flaky", str(report), "--"]
        rerun = commands.ROOT / ".ci" / "rerun.py"
        options = {"PYTEST_ADDOPTS": "-c /dev/null --rootdir /"}
        session = python(str(rerun), *given, *suite, cwd="/", **options)
        session.communicate(timeout=patience(60))
        codes.append(session.returncode)
    assert codes == [0, 1]
    text = report.read_text()
    assert text.count("FLAKY ") == 2
    assert "test_fails_once" in text
    assert "the first time" in text
    assert "test_fails_always" not in text
