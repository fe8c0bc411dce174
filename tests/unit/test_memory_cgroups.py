"""Cgroups of executors: where they are made, what they count, and when they are removed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from queue_workflows.run import memory_cgroups


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that names the cgroup of this process, whose cgroups are below `tmp_path`."""
    monkeypatch.setattr(memory_cgroups, "OWN", tmp_path / "own")
    monkeypatch.setattr(memory_cgroups, "MOUNTED", tmp_path)
    return tmp_path / "own"


def folder_of(tmp_path: Path, name: str) -> Path:
    folder = tmp_path / name
    folder.mkdir(parents=True)
    return folder


@pytest.mark.parametrize(
    ("text", "folder", "version"),
    [
        ("4:memory:/a/b\n0::/\n", "memory/a/b", 1),
        ("3:cpu,memory:/\n", "memory", 1),
        ("1:name=x:/y\n0::/slice/me\n", "slice/me", 2),
    ],
)
def test_the_own_cgroup_is_that_of_the_memory_controller(
    own: Path, tmp_path: Path, text: str, folder: str, version: int
) -> None:
    own.write_text(text)
    assert memory_cgroups.own_folder() == (tmp_path / folder, version)


@pytest.mark.parametrize("text", ["", "1:name=x:/y\n"])
def test_without_a_memory_controller_there_is_none(own: Path, tmp_path: Path, text: str) -> None:
    own.write_text(text)
    assert memory_cgroups.own_folder() is None
    own.unlink()
    assert memory_cgroups.own_folder() is None


def test_kills_are_read_from_either_version(tmp_path: Path) -> None:
    assert memory_cgroups.oom_kills(tmp_path) is None
    (tmp_path / "memory.oom_control").write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 2\n")
    assert memory_cgroups.oom_kills(tmp_path) == 2
    (tmp_path / "memory.events").write_text("oom 4\noom_kill 3\noom_group_kill 0\n")
    assert memory_cgroups.oom_kills(tmp_path) == 3
    (tmp_path / "memory.events").write_text("oom_kill many\n")
    assert memory_cgroups.oom_kills(tmp_path) == 2


def test_version_1_makes_them_in_the_own_one_and_removes_those_that_are_empty(
    own: Path, tmp_path: Path
) -> None:
    own.write_text("4:memory:/a\n")
    parent = folder_of(tmp_path, "memory/a")
    old = folder_of(tmp_path, f"memory/a/{memory_cgroups.PREFIX}999999999-1")
    ours = folder_of(tmp_path, f"memory/a/{memory_cgroups.PREFIX}{os.getpid()}-7")
    made = memory_cgroups.Cgroups()
    assert not old.exists() and ours.exists()
    cgroup = made.make()
    assert cgroup is not None and cgroup.folder.parent == parent
    (cgroup.folder / "process").touch()
    assert made.end(cgroup) is None
    assert cgroup.folder.exists(), "a process that the handler left is in it"
    (cgroup.folder / "process").unlink()
    again = made.make()
    assert again is not None and not cgroup.folder.exists()
    assert made.end(again) is None and not again.folder.exists()


def test_where_no_folder_can_be_made_executors_have_none(own: Path, tmp_path: Path) -> None:
    own.write_text("4:memory:/gone\n")
    made = memory_cgroups.Cgroups()
    assert made.make() is None
    (tmp_path / "memory" / "gone").mkdir(parents=True)
    assert made.make() is None, "it does not try again at each fork"
    own.write_text("4:memory:/other\n")
    (tmp_path / "memory" / "other").mkdir()
    cgroup = made.make()
    assert cgroup is not None and cgroup.folder.parent.name == "other", "it was moved"


def test_version_2_makes_them_only_below_what_was_delegated(own: Path, tmp_path: Path) -> None:
    own.write_text("0::/service/worker\n")
    service = folder_of(tmp_path, "service/worker").parent
    (service / "cgroup.subtree_control").write_text("cpu memory\n")
    assert memory_cgroups.parent_of_executors() is None
    try:
        os.setxattr(service, "user.delegate", b"1")
    except OSError:
        os.setxattr(service, "trusted.delegate", b"1")
    assert memory_cgroups.parent_of_executors() == service
    assert (service / "cgroup.subtree_control").read_text() == "cpu memory\n"
    (service / "cgroup.subtree_control").write_text("cpu\n")
    assert memory_cgroups.parent_of_executors() == service
    assert (service / "cgroup.subtree_control").read_text() == "+memory"
    (service / "cgroup.subtree_control").unlink()
    assert memory_cgroups.parent_of_executors() is None


def test_an_executor_that_cannot_join_stays_where_it_is(tmp_path: Path) -> None:
    memory_cgroups.Cgroup(tmp_path / "gone").join()
    assert memory_cgroups.oom_kills(tmp_path / "gone") is None
    assert memory_cgroups.Cgroup(tmp_path / "gone").remove()


def test_an_executor_without_a_cgroup_has_the_new_kills_of_ours(own: Path, tmp_path: Path) -> None:
    own.write_text("0::/me\n")
    count = folder_of(tmp_path, "me") / "memory.events"
    count.write_text("oom_kill 3\n")
    found = memory_cgroups.Cgroups()
    count.write_text("oom_kill 4\n")
    assert found.end(None) == 1
    assert found.end(None) == 0
    count.unlink()
    assert found.end(None) is None
