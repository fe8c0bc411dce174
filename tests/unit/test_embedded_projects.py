"""Which embedded database an app uses: named by its folder, the same from every start folder."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from queue_workflows import errors
from queue_workflows.db import databases
from queue_workflows.runtime import app_loading


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A project with a module, a package, and a package below `src`."""
    root = tmp_path / "My Letters"
    for name in ("sub", "pack/deep", "src/packed", "lib/site-packages/installed"):
        (root / name).mkdir(parents=True)
    for name in (
        "letters_app.py", "pack/__init__.py", "pack/deep/__init__.py", "pack/deep/mod_of_pack.py",
        "src/packed/__init__.py", "lib/site-packages/installed/__init__.py",
        "lib/site-packages/alone_app.py",
    ):  # fmt: skip
        (root / name).write_text("def setup(): pass\n")
    before = set(sys.modules)
    yield root
    for name in set(sys.modules) - before:
        del sys.modules[name]


def loaded(monkeypatch: pytest.MonkeyPatch, path: Path, app: str) -> databases.Project:
    with monkeypatch.context() as patch:
        patch.syspath_prepend(str(path))
        importlib.import_module(app)
    return databases.of_module(app)


def test_the_name_is_the_folders_and_some_digits(folder: Path) -> None:
    made = databases.of_folder(folder)
    assert made.folder == folder.resolve()
    assert made.name.startswith("my_letters_")
    assert len(made.name) == len("my_letters_") + 8
    assert databases.of_folder(folder / "sub" / "..") == made
    assert databases.of_folder(folder / "sub").name != made.name


def test_two_folders_of_one_name_have_two_databases(tmp_path: Path) -> None:
    assert (
        databases.of_folder(tmp_path / "a/app").name != databases.of_folder(tmp_path / "b/app").name
    )
    assert len(databases.of_folder(tmp_path / ("x" * 200)).name) <= 63
    assert databases.of_folder(Path("/")).name.startswith("app_")


def test_the_app_has_the_folder_of_its_top_level_package(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = databases.of_folder(folder)
    monkeypatch.chdir(folder / "sub")
    assert loaded(monkeypatch, folder, "letters_app") == own
    assert loaded(monkeypatch, folder, "pack.deep") == own
    # From inside the package, as `--app mod_of_pack` in its folder.
    assert loaded(monkeypatch, folder / "pack/deep", "mod_of_pack") == own
    assert loaded(monkeypatch, folder / "src", "packed") == databases.of_folder(folder / "src")


def test_installed_apps_do_not_share_the_folder_of_packages(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = folder / "lib/site-packages"
    assert loaded(monkeypatch, site, "installed") == databases.of_folder(site / "installed")
    assert loaded(monkeypatch, site, "alone_app") == databases.of_folder(site / "alone_app")


def test_a_folder_lies_in_the_projects_above_it(folder: Path) -> None:
    around = databases.around(folder / "sub")
    assert around[0] == databases.of_folder(folder / "sub")
    assert around.index(databases.of_folder(folder)) < around.index(
        databases.of_folder(folder.parent)
    )
    assert databases.of_folder(folder / "src") in around


def test_a_process_outlives_the_folder_that_it_was_started_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert databases.here() == Path("/")


def test_the_demo_has_one_of_its_own() -> None:
    assert databases.of_module("queue_workflows.demo").name == "demo"


def test_a_script_has_the_folder_it_lies_in(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    main = sys.modules["__main__"]
    monkeypatch.setattr(main, "__file__", str(folder / "pack/deep/mod_of_pack.py"), raising=False)
    assert databases.of_script() == databases.of_folder(folder)
    for command in (f"{folder}/bin/gunicorn", f"{folder}/lib/site-packages/pytest/__main__.py"):
        monkeypatch.setattr(main, "__file__", command, raising=False)
        assert databases.of_script() is None
    monkeypatch.delattr(main, "__file__")
    assert databases.of_script() is None


@pytest.mark.parametrize("name", ["", "a b", "postgres", "template1", "x" * 64, "a;b", "ü"])
def test_a_name_that_no_database_may_have_is_refused(name: str) -> None:
    with pytest.raises(errors.InvalidConfig, match="--db"):
        databases.named(name)
    assert databases.named("Shared_1") == ("Shared_1", None)


def test_the_app_is_known_when_its_own_code_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "asks_early.py").write_text(
        "from queue_workflows import config\nseen = config.get_config().app\n"
    )
    app_loading.load_app("asks_early")
    assert sys.modules.pop("asks_early").seen == "asks_early"
