"""Input specs: what each widget is given, and which files it may offer."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from queue_workflows.dag import widgets


def spec(step: dict[str, Any], out_dir: Path | None = None, **context: Any) -> dict[str, Any]:
    full = {"id": "ask", "kind": "input", "depends_on": ["x"], "skip_if": None, **step}
    return widgets.build_spec(full, context=context, out_dir=str(out_dir) if out_dir else None)


def put(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)


def rel_paths(out_dir: Path, name: str = "scan") -> list[str]:
    return [file["rel_path"] for file in widgets.listings(str(out_dir), [name]).get(name, [])]


BASE = {"step_id": "ask", "prompt": "", "target": None}


def test_choose_one_offers_what_its_source_names() -> None:
    step = {
        "widget": "choose_one",
        "source": {"$from": "s/n.options"},
        "prompt": "?",
        "target": "t",
    }
    assert spec(step, **{"s/n": {"options": [1, {"$from": "data"}]}}) == {
        "step_id": "ask", "widget": "choose_one", "prompt": "?", "target": "t",
        "options": [1, {"$from": "data"}], "multiple": False,
    }  # fmt: skip
    assert spec({"widget": "choose_one", "source": [1, 2], "multiple": True}) == {
        **BASE, "widget": "choose_one", "options": [1, 2], "multiple": True,
    }  # fmt: skip


UNUSABLE: list[Any] = [
    None, "text", {"a": 1}, {"$from": "gone"}, {"$from": 5}, {"$from": "x", "$filter": {}},
    {"$from": "../etc.files"}, {"$from": "x" * 5000 + ".files"}, {"$from": "\x00.files"},
]  # fmt: skip


@pytest.mark.parametrize("source", UNUSABLE)
def test_choose_one_with_no_usable_source_offers_nothing(source: Any, tmp_path: Path) -> None:
    found = spec({"widget": "choose_one", "source": source}, tmp_path, x={})
    assert found["options"] == []


def test_choose_one_offers_the_files_that_a_step_left(tmp_path: Path) -> None:
    put(tmp_path, "scan/n/b.PNG", "scan/a.json", "other/c.png")
    found = spec({"widget": "choose_one", "source": {"$from": "scan.files"}}, tmp_path)
    assert found["options"] == [
        {"rel_path": "scan/a.json", "kind": "json", "size_bytes": 11,
         "abs_path": str(tmp_path / "scan/a.json")},
        {"rel_path": "scan/n/b.PNG", "kind": "image", "size_bytes": 12,
         "abs_path": str(tmp_path / "scan/n/b.PNG")},
    ]  # fmt: skip
    source = {"$from": "scan.files", "$filter": {"kind:eq": "image"}}
    found = spec({"widget": "choose_one", "source": source}, tmp_path)
    assert [option["rel_path"] for option in found["options"]] == ["scan/n/b.PNG"]


def test_files_stand_beside_what_the_context_has_under_that_name(tmp_path: Path) -> None:
    put(tmp_path, "scan/a.txt")
    step = {"widget": "choose_one", "source": {"$from": "scan.mine"}}
    assert spec(step, tmp_path, scan={"mine": [1]})["options"] == [1]
    step["source"] = {"$from": "scan.files.0.kind", "$eq": "text"}
    assert spec(step, tmp_path, scan={"mine": [1]})["options"] == []
    step["source"] = {"$from": "scan.files"}
    assert len(spec(step, tmp_path, scan={"mine": [1]})["options"]) == 1


def test_an_apps_resolver_sees_the_files_of_every_folder(tmp_path: Path) -> None:
    put(tmp_path, "one/a.txt", "two/b.txt", "loose.txt")
    seen: list[set[str]] = []

    def resolver(value: Any, context: Any) -> Any:
        seen.append({name for name in context if "files" in context[name]})
        raise RuntimeError("host trouble")

    step = {"id": "ask", "widget": "choose_one", "source": "@one"}
    found = widgets.build_spec(step, context={}, out_dir=str(tmp_path), resolver=resolver)
    assert (found["options"], seen) == ([], [{"one", "two"}])


def test_uploads_and_turnout() -> None:
    assert spec({"widget": "file_upload", "accept": [".png"], "other": 1}) == {
        **BASE, "widget": "file_upload", "accept": [".png"],
    }  # fmt: skip
    library = {"$from": "shelf"}
    assert spec({"widget": "pick_or_upload", "library": library, "accept": ".x"}, shelf=["b"]) == {
        **BASE, "widget": "pick_or_upload", "library": ["b"], "accept": ".x",
    }  # fmt: skip
    assert spec({"widget": "pick_or_upload", "library": library})["library"] == []
    given = [{"label": "Yes", "value": True}, "no", {"value": 3}, {"label": "L"}]
    assert spec({"widget": "turnout", "turnout_options": given})["turnout_options"] == [
        {"label": "Yes", "value": True}, {"label": "no", "value": "no"}, {"label": "3", "value": 3},
        {"label": "L", "value": "L"},
    ]  # fmt: skip
    assert spec({"widget": "turnout"})["turnout_options"] == []


def test_any_other_widget_gets_the_steps_own_keys() -> None:
    step = {"widget": "hosts.map", "layers": [{"$from": "gone"}], "zoom": 3, "inputs": {"a": 1}}
    assert spec(step) == {
        **BASE, "widget": "hosts.map", "layers": [{"$from": "gone"}], "zoom": 3, "inputs": {"a": 1},
    }  # fmt: skip


@pytest.mark.parametrize(
    ("name", "kind"),
    [("a.png", "image"), ("a.JPEG", "image"), ("a.json", "json"), ("a.csv", "csv"),
     ("a.md", "text"), ("a.las", "pointcloud"), ("a.glb", "mesh"), ("a.bin", "file"),
     ("png", "file"), (".png", "file"), ("a.tar.gz", "file")],
)  # fmt: skip
def test_the_kind_of_a_file_follows_from_its_suffix(name: str, kind: str) -> None:
    assert widgets.kind_of(name) == kind


def test_links_that_leave_the_folder_are_not_followed(tmp_path: Path) -> None:
    out, outside = tmp_path / "out", tmp_path / "outside"
    put(out, "scan/real.txt", "else/shared.txt")
    put(outside, "secret.txt", "deep/secret.txt")
    (out / "scan/link.txt").symlink_to(outside / "secret.txt")
    (out / "scan/folder").symlink_to(outside)
    (out / "scan/inside.txt").symlink_to(out / "else/shared.txt")
    (out / "scan/loop").symlink_to(out / "scan")
    (out / "scan/dangling.txt").symlink_to(out / "nowhere")
    (out / "scan/self.txt").symlink_to(out / "scan/self.txt")
    (out / "away").symlink_to(outside)
    assert rel_paths(out) == ["scan/inside.txt", "scan/real.txt"]
    assert rel_paths(out, "away") == []
    assert "away" not in widgets.listings(str(out), None)


def test_an_out_dir_that_is_itself_a_link_is_fine(tmp_path: Path) -> None:
    put(tmp_path / "real", "scan/a.txt")
    (tmp_path / "real/scan/b.txt").symlink_to(tmp_path / "real/scan/a.txt")
    (tmp_path / "out").symlink_to(tmp_path / "real")
    assert rel_paths(tmp_path / "out") == ["scan/a.txt", "scan/b.txt"]


def test_what_is_no_regular_file_or_no_utf8_is_left_out(tmp_path: Path) -> None:
    put(tmp_path, "scan/a.txt")
    os.mkfifo(tmp_path / "scan/pipe")
    (Path(os.fsdecode(os.fsencode(tmp_path) + b"/scan/\xff.txt"))).write_text("x")
    assert rel_paths(tmp_path) == ["scan/a.txt"]


@pytest.mark.parametrize("name", ["..", ".", "", "a/b", "missing", "loose.txt", "x" * 300])
def test_names_that_are_no_folder_right_under_out_dir_list_nothing(
    tmp_path: Path, name: str
) -> None:
    put(tmp_path, "a/b/c.txt", "loose.txt")
    assert widgets.listings(str(tmp_path), [name]) == {}
    assert widgets.listings(None, [name]) == widgets.listings("/no/such", [name]) == {}


def test_a_listing_is_bounded_and_keeps_the_first_paths(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(tmp_path, *(f"scan/{index}.txt" for index in range(9)), "zeta/a.txt")
    monkeypatch.setattr(widgets, "MAX_FILES", 5)
    found = widgets.listings(str(tmp_path), None)
    assert [file["rel_path"] for file in found["scan"]] == [f"scan/{i}.txt" for i in range(5)]
    assert found["zeta"] == []
    monkeypatch.setattr(widgets, "MAX_FILES", 100)
    monkeypatch.setattr(widgets, "MAX_ENTRIES", 3)
    assert len(rel_paths(tmp_path)) == 3
