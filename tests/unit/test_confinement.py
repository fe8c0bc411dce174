"""A run's folders are opened so that no symbolic link leads the engine out of them."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from queue_workflows import errors
from queue_workflows.dag import confinement, widgets


@pytest.fixture
def foreign(tmp_path: Path) -> Path:
    """A folder outside of the run's with a file that must survive."""
    folder = tmp_path / "foreign"
    folder.mkdir()
    (folder / "precious").write_text("x")
    return folder


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The one folder that OUT_ROOTS allows."""
    folder = tmp_path / "root"
    folder.mkdir()
    monkeypatch.setenv("QUEUE_WORKFLOWS_OUT_ROOTS", f"{folder}{os.pathsep}")
    return folder


def swap(monkeypatch: pytest.MonkeyPatch, name: str, plant: Callable[[], object]) -> None:
    """Have `plant` run right after the check of that name, before what was checked is used."""
    check = getattr(confinement, name)

    def checked(*given: object) -> object:
        found = check(*given)
        plant()
        return found

    monkeypatch.setattr(confinement, name, checked)


def made_scratch(out_dir: Path) -> confinement.Scratch:
    with confinement.opened(str(out_dir), confinement.SCRATCH, create=True) as fd:
        return confinement.Scratch(str(out_dir / confinement.SCRATCH), fd, "1-")


def test_without_roots_a_run_keeps_its_files_anywhere(tmp_path: Path) -> None:
    confinement.check(str(tmp_path))
    assert confinement.make(str(tmp_path / "new"), "a/b", "node id") == tmp_path / "new" / "a" / "b"


@pytest.mark.parametrize("place", ["root", "root/run", "root/run/deep", "root/../root/run"])
def test_what_resolves_into_a_root_is_allowed(root: Path, tmp_path: Path, place: str) -> None:
    out_dir = str(tmp_path / place)
    confinement.check(out_dir)
    assert confinement.make(out_dir, "n", "node id").is_dir()


@pytest.mark.parametrize("place", ["", "rooted", "root/../foreign", "root/link/run", "/etc"])
def test_what_resolves_elsewhere_is_refused_by_name(
    root: Path, foreign: Path, tmp_path: Path, place: str
) -> None:
    (root / "link").symlink_to(foreign)
    out_dir = str(tmp_path / place)
    for use in (
        lambda: confinement.check(out_dir),
        lambda: confinement.make(out_dir, "n", "node id"),
        lambda: made_scratch(Path(out_dir)),
    ):
        with pytest.raises(errors.FolderRefused, match="QUEUE_WORKFLOWS_OUT_ROOTS") as refused:
            use()
        assert out_dir in str(refused.value)
    assert widgets.listings(out_dir, None) == {}
    assert [path.name for path in foreign.iterdir()] == ["precious"]


def test_a_root_that_is_not_mounted_is_not_made(root: Path) -> None:
    root.rmdir()
    with pytest.raises(FileNotFoundError):
        confinement.make(str(root / "run"), "n", "node id")
    assert not root.exists()


def test_a_link_that_is_planted_after_the_check_of_out_dir_leads_nowhere(
    root: Path, foreign: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (root / "run").mkdir()

    def plant() -> None:
        (root / "run").rmdir()
        (root / "run").symlink_to(foreign)

    swap(monkeypatch, "_place", plant)
    with pytest.raises(errors.FolderRefused, match="symbolic link"):
        confinement.make(str(root / "run"), "n", "node id")
    assert [path.name for path in foreign.iterdir()] == ["precious"]


@pytest.mark.parametrize("planted", ["a", "a/b"])
def test_a_link_that_is_planted_after_the_check_of_a_node_leads_nowhere(
    tmp_path: Path, foreign: Path, monkeypatch: pytest.MonkeyPatch, planted: str
) -> None:
    out_dir = tmp_path / "run"
    (out_dir / planted).parent.mkdir(parents=True)
    swap(monkeypatch, "inside", lambda: (out_dir / planted).symlink_to(foreign))
    with pytest.raises(errors.FolderRefused, match="symbolic link"):
        confinement.make(str(out_dir), "a/b/c", "node id")
    assert [path.name for path in foreign.iterdir()] == ["precious"]


def test_a_scratch_folder_is_not_made_behind_a_link(tmp_path: Path, foreign: Path) -> None:
    out_dir = tmp_path / "run"
    out_dir.mkdir()
    (out_dir / ".scratch").symlink_to(foreign)
    with pytest.raises(errors.FolderRefused, match="symbolic link"):
        made_scratch(out_dir)
    assert [path.name for path in foreign.iterdir()] == ["precious"]


def test_a_scratch_folder_is_removed_where_it_was_made_not_where_its_name_leads(
    tmp_path: Path, foreign: Path
) -> None:
    out_dir = tmp_path / "run"
    scratch = made_scratch(out_dir)
    (scratch.path / "waste").write_text("x")
    twin = foreign / scratch.path.name
    twin.mkdir()
    (twin / "precious").write_text("x")
    (out_dir / ".scratch").rename(tmp_path / "moved")
    (out_dir / ".scratch").symlink_to(foreign)
    scratch.remove()
    assert (twin / "precious").exists()
    assert list((tmp_path / "moved").iterdir()) == []


def test_targets_of_links_in_a_scratch_folder_are_not_removed(
    tmp_path: Path, foreign: Path
) -> None:
    scratch = made_scratch(tmp_path / "run")
    (scratch.path / "deep").mkdir()
    (scratch.path / "deep" / "folder").symlink_to(foreign)
    (scratch.path / "file").symlink_to(foreign / "precious")
    scratch.remove()
    assert not scratch.path.exists()
    assert (foreign / "precious").exists()


def test_a_scratch_folder_that_is_a_link_by_then_is_left_alone(
    tmp_path: Path, foreign: Path
) -> None:
    scratch = made_scratch(tmp_path / "run")
    scratch.path.rmdir()
    scratch.path.symlink_to(foreign)
    scratch.remove()
    assert (foreign / "precious").exists()


@pytest.mark.parametrize("path", ["a\0b", "x" * 5000, "y/" * 2500 + "y", "z" * 300, "é" * 200])
def test_what_is_no_path_is_refused_with_its_reason(tmp_path: Path, path: str) -> None:
    with pytest.raises(errors.InvalidPayload, match=r"NUL character|too long"):
        confinement.make(str(tmp_path), path, "node id")
    with pytest.raises(errors.InvalidPayload, match=r"NUL character|too long"):
        confinement.make(str(tmp_path / path), "n", "node id")
    assert widgets.listings(str(tmp_path / path), None) == {}
    assert list(tmp_path.iterdir()) == []


def test_a_folder_swapped_for_a_link_during_a_listing_is_not_entered(
    tmp_path: Path, foreign: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out_dir = tmp_path / "run"
    (out_dir / "scan" / "deep").mkdir(parents=True)
    is_folder = widgets._is_folder

    def swapped(entry: os.DirEntry[str]) -> bool:
        found = is_folder(entry)
        if entry.name == "deep":
            (out_dir / "scan" / "deep").rmdir()
            (out_dir / "scan" / "deep").symlink_to(foreign)
        return found

    monkeypatch.setattr(widgets, "_is_folder", swapped)
    assert widgets.listings(str(out_dir), ["scan"]) == {"scan": []}


def test_a_very_deep_folder_is_listed_down_to_a_bound_and_leaves_no_descriptor_open(
    tmp_path: Path,
) -> None:
    top = tmp_path / "scan"
    top.mkdir()
    fd = os.open(top, os.O_RDONLY)
    for _ in range(2 * widgets.MAX_DEPTH):
        os.mkdir("d", dir_fd=fd)
        deeper = os.open("d", os.O_RDONLY, dir_fd=fd)
        os.close(fd)
        fd = deeper
    os.close(os.open("too-deep", os.O_CREAT | os.O_WRONLY, dir_fd=fd))
    os.close(fd)
    (top / "d" / "file").write_text("x")
    gc.collect()  # what earlier tests left to it may hold descriptors
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208  no folder of ours
    found = widgets.listings(str(tmp_path), ["scan"])
    assert [file["rel_path"] for file in found["scan"]] == ["scan/d/file"]
    assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208


# --- the root of a run's folder ----------------------------------------------------------------


def test_the_root_is_one_of_out_roots(root: Path, foreign: Path) -> None:
    (root / "link").symlink_to(foreign)
    assert confinement.root_of(f"{root}/a/../b") == (str(root), ("b",))
    for out_dir in (foreign, root / "link", root.parent):
        with pytest.raises(errors.FolderRefused, match="is outside the folders"):
            confinement.root_of(str(out_dir))


def test_without_out_roots_the_root_is_the_folder_of_the_engine(
    tmp_path: Path, foreign: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("QUEUE_WORKFLOWS_OUT_ROOTS", raising=False)
    own = tmp_path / "outputs"
    own.mkdir()
    monkeypatch.setenv("QUEUE_WORKFLOWS_OUTPUTS_DIR", str(own))
    (own / "link").symlink_to(foreign)
    assert confinement.root_of(f"{own}/run-1/a") == (str(own), ("run-1", "a"))
    for out_dir in (own, own / "link", foreign, "/etc"):
        with pytest.raises(errors.FolderRefused, match="set OUT_ROOTS"):
            confinement.root_of(str(out_dir))
