"""The app of a process: how it is named, imported and called, and how its errors are told."""

from __future__ import annotations

import sys
import traceback
from pathlib import Path

import pytest

from queue_workflows import errors
from queue_workflows.runtime import app_loading


@pytest.fixture
def app_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "hostapp.py").write_text(
        "calls = []\ndef setup(): calls.append(1)\nclass deep:\n    setup = staticmethod(setup)\n"
        "number = 7\n"
    )
    monkeypatch.delitem(sys.modules, "hostapp", raising=False)
    return tmp_path


def test_no_app_is_nothing() -> None:
    assert app_loading.load_app(None) is None


def test_an_app_is_imported_from_the_folder_and_its_callable_called(app_folder: Path) -> None:
    assert app_loading.load_app("hostapp") == "hostapp"
    calls = sys.modules["hostapp"].calls
    assert calls == []
    app_loading.load_app("hostapp:setup")
    app_loading.load_app("hostapp:deep.setup")
    assert calls == [1, 1]


def test_an_app_comes_from_the_environment(
    app_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUEUE_WORKFLOWS_APP", "hostapp:setup")
    assert app_loading.load_app(None) == "hostapp:setup"
    assert sys.modules["hostapp"].calls == [1]


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("no_such_app", "no module 'no_such_app'"),
        ("hostap:setup", "no module 'hostap' here; did you mean 'hostapp'?"),
        ("hostapp:nope", r"hostapp.py\) has no 'nope'"),
        ("hostapp:setupp", "has no 'setupp'; did you mean 'setup'?"),
        ("hostapp:number", "'number' cannot be called"),
    ],
)
def test_an_app_that_is_not_there_is_named(app_folder: Path, spec: str, said: str) -> None:
    with pytest.raises(errors.InvalidConfig, match=said) as caught:
        app_loading.load_app(spec)
    assert f"--app {spec}" in str(caught.value)


BROKEN = {
    "import nothing_of_this_name": "importing it failed: ModuleNotFoundError: No module named "
    "'nothing_of_this_name' (brokenapp.py, line 1)",
    "\nraise OSError('boom')": "importing it failed: OSError: boom (brokenapp.py, line 2)",
    "def setup(:": "importing it failed: SyntaxError: invalid syntax (brokenapp.py, line 1)",
    "import sys\nsys.exit(3)": "importing it failed: SystemExit: 3 (brokenapp.py, line 2)",
    "\ndef __getattr__(name): raise ImportError(name)": "reading 'setup' failed: ImportError: "
    "setup (brokenapp.py, line 2)",
    "def setup(): raise ValueError": "setup() failed: ValueError (brokenapp.py, line 1)",
    "def setup(x): ...": "setup() failed: TypeError: setup() missing 1 required positional "
    "argument: 'x'",
}


@pytest.mark.parametrize("text", BROKEN)
def test_what_an_app_raises_is_named_with_its_option_and_place(
    app_folder: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    (app_folder / "brokenapp.py").write_text(text)
    monkeypatch.delitem(sys.modules, "brokenapp", raising=False)
    with pytest.raises(errors.AppFailed) as caught:
        app_loading.load_app("brokenapp:setup")
    assert str(caught.value) == f"--app brokenapp:setup: {BROKEN[text]}"
    frames = traceback.extract_tb(getattr(caught.value.__cause__, "__traceback__", None))
    assert {frame.filename for frame in frames} <= {
        str(app_folder / "brokenapp.py"),
        "brokenapp.py",
    }


def test_an_app_that_the_environment_named_is_refused_under_that_name(
    app_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUEUE_WORKFLOWS_APP", "no_such_app")
    with pytest.raises(errors.InvalidConfig, match=r"^QUEUE_WORKFLOWS_APP=no_such_app: no module"):
        app_loading.load_app(None)


@pytest.mark.parametrize("error", [KeyboardInterrupt, errors.UnknownTask])
def test_ctrl_c_and_an_error_of_ours_pass_through_an_app(
    app_folder: Path, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    (app_folder / "hostpass.py").write_text("def setup(): raise error")
    monkeypatch.delitem(sys.modules, "hostpass", raising=False)
    app_loading.load_app("hostpass")
    sys.modules["hostpass"].__dict__["error"] = error
    with pytest.raises(error):
        app_loading.load_app("hostpass:setup")


def test_the_sources_of_an_app_are_its_package_or_its_module_and_those_that_it_imports(
    app_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = {
        "single.py": "import beside", "beside.py": "", "unused.py": "",
        "packed/__init__.py": "", "packed/sub/later.py": "", "packed/.venv/lib.py": "",
        "packed/data.json": "",
    }  # fmt: skip
    for name, text in texts.items():
        (app_folder / name).parent.mkdir(parents=True, exist_ok=True)
        (app_folder / name).write_text(text)
    for name in ("single", "beside", "packed"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    for app, files in {
        "single:setup": ["beside.py", "single.py"],
        "packed": ["packed/__init__.py", "packed/sub/later.py"],
    }.items():
        app_loading.load_app(app.partition(":")[0])
        found = app_loading.sources(app)
        assert found == [str(app_folder / name) for name in files]
        before = app_loading.checksum(found)
        assert app_loading.checksum(found) == before
        Path(found[0]).write_text("edited = True")
        assert app_loading.checksum(found) != before
