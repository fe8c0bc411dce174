"""Where the embedded server lives, and what it refuses before it writes anything."""

from __future__ import annotations

import importlib.util
import os
import tempfile
from collections.abc import Generator
from pathlib import Path

import pytest

from queue_workflows import embedded, errors
from queue_workflows.embedded import cluster, running_apps

KNOB = "QUEUE_WORKFLOWS_EMBEDDED_DIR"


@pytest.fixture
def short_path() -> Generator[Path]:
    """A folder whose path leaves room for a socket's, wherever pytest keeps its own."""
    with tempfile.TemporaryDirectory(prefix="qw-", dir="/tmp") as folder:
        yield Path(folder)


@pytest.fixture
def as_user(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The home of an ordinary user."""
    monkeypatch.setattr(os, "geteuid", lambda: 4711)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_DATA_HOME", raising=False)
    return tmp_path


def test_a_user_has_it_in_the_data_folder(
    as_user: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert embedded.data_dir() == as_user / ".local/share/queue_workflows/pg18"
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "xdg"))
    assert embedded.data_dir() == tmp_path / "xdg/queue_workflows/pg18"


@pytest.mark.parametrize("value", ["", "relative/folder"])
def test_a_data_home_that_is_no_absolute_path_does_not_count(
    as_user: Path, monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", value)
    assert embedded.data_dir() == as_user / ".local/share/queue_workflows/pg18"


def test_root_has_it_for_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert embedded.data_dir() == Path("/var/lib/queue_workflows/pg18")


@pytest.mark.parametrize("uid", [0, 4711])
def test_the_knob_comes_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, uid: int) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: uid)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv(KNOB, "~/elsewhere/../pg")
    assert embedded.data_dir() == tmp_path / "pg"


def test_nobody_has_a_home(monkeypatch: pytest.MonkeyPatch, as_user: Path) -> None:
    def none() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", none)
    with pytest.raises(errors.EmbeddedUnavailable, match=KNOB):
        embedded.data_dir()


def test_a_cluster_is_not_created_with_create_false(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(KNOB, str(tmp_path / "above" / "pg"))
    with pytest.raises(errors.EmbeddedUnavailable, match=r"creates none.*queue-workflows up"):
        embedded.ensure(create=False)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("create", [True, False])
def test_another_major_version_is_named_and_left_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, create: bool
) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "PG_VERSION").write_text("17\n")
    monkeypatch.setenv(KNOB, str(tmp_path))
    with pytest.raises(errors.EmbeddedUnavailable, match=rf"PostgreSQL 17.* 18.*{KNOB}"):
        embedded.ensure(create=create)
    assert sorted(tmp_path.rglob("*")) == [tmp_path / "data", tmp_path / "data" / "PG_VERSION"]


@pytest.mark.parametrize("found", ["PG_VERSION", "data/photo.jpg"])
def test_a_folder_with_other_data_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, found: str
) -> None:
    (tmp_path / found).parent.mkdir(exist_ok=True)
    (tmp_path / found).write_text("18\n")
    before = sorted(tmp_path.rglob("*"))
    monkeypatch.setenv(KNOB, str(tmp_path))
    with pytest.raises(errors.EmbeddedUnavailable, match=f"not the embedded server's.*{KNOB}"):
        embedded.ensure()
    assert sorted(tmp_path.rglob("*")) == before


def test_a_folder_that_cannot_be_made_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv(KNOB, str(tmp_path / "file" / "pg"))
    with pytest.raises(errors.EmbeddedUnavailable, match=f"file/pg cannot be used.*{KNOB}"):
        embedded.ensure()


def test_without_the_wheel_it_reports_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def no_spec(name: str, package: str | None = None) -> None:
        return None

    monkeypatch.setattr(importlib.util, "find_spec", no_spec)
    monkeypatch.setenv(KNOB, str(tmp_path / "pg"))
    monkeypatch.setattr(cluster, "account", lambda folder: None)
    with pytest.raises(errors.EmbeddedUnavailable, match=r"pip install 'SOURCE\[embedded\]'"):
        embedded.ensure()


def test_the_socket_lies_in_the_folder_while_its_path_fits(short_path: Path) -> None:
    path = cluster.socket_dir(short_path, None)
    assert path == short_path / "socket"
    assert path.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("name", ["x" * 100, "a,b"])
def test_a_long_or_odd_path_gets_a_short_socket_folder_of_its_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, short_path: Path, name: str
) -> None:
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(short_path))
    folders = [tmp_path / "one" / name, tmp_path / "two" / name]
    for folder in folders:
        folder.mkdir(parents=True)
    paths = [cluster.socket_dir(folder, None) for folder in folders]
    assert {path.parent for path in paths} == {short_path}
    assert paths[0] != paths[1]
    assert paths == [cluster.socket_dir(folder, None) for folder in folders]
    assert all(path.stat().st_mode & 0o777 == 0o700 for path in paths)


def test_a_socket_folder_open_to_others_is_not_taken(
    monkeypatch: pytest.MonkeyPatch, short_path: Path
) -> None:
    runtime = short_path / "run"
    runtime.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    (short_path / "socket").mkdir()
    (short_path / "socket").chmod(0o777)
    assert cluster.socket_dir(short_path, None).parent == runtime


@pytest.mark.parametrize("runtime", ["/proc", "/nowhere", "/dev/null"])
def test_a_socket_folder_that_cannot_be_made_is_passed_over(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, short_path: Path, runtime: str
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", runtime)
    monkeypatch.setattr(tempfile, "tempdir", str(short_path))
    folder = tmp_path / ("x" * 100)
    folder.mkdir()
    assert cluster.socket_dir(folder, None).parent == short_path


def test_an_up_may_end_while_it_is_listed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    try_lock = cluster.try_lock

    def try_and_remove(fd: int) -> bool:
        is_taken = try_lock(fd)
        for path in (tmp_path / "up").iterdir():
            if os.path.samestat(path.stat(), os.fstat(fd)):
                path.unlink()
        return is_taken

    with running_apps.registered(tmp_path, "letters", "", refuse=lambda _: None):
        (tmp_path / "up" / "letters.left").touch()
        monkeypatch.setattr(cluster, "try_lock", try_and_remove)
        assert [each.pid for each in running_apps.live(tmp_path)] == [os.getpid()]
    assert list((tmp_path / "up").iterdir()) == []


@pytest.mark.parametrize("record", ["", '{"pid": 1, ', '{"pid": 1, "of_a_later_version": 1}', "[]"])
def test_an_up_whose_record_cannot_be_read_is_left_out(tmp_path: Path, record: str) -> None:
    with running_apps.registered(tmp_path, "letters", "", refuse=lambda _: None):
        (file,) = (tmp_path / "up").iterdir()
        file.write_text(record)
        assert running_apps.live(tmp_path) == []
        assert file.exists()


def test_a_lock_is_not_taken_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("kept")
    (tmp_path / "users.lock").symlink_to(tmp_path / "precious")
    with pytest.raises(OSError, match="symbolic"):
        cluster.open_lock(tmp_path / "users.lock")
