"""The parts of the example app as plain functions: no database, no worker."""

from __future__ import annotations

import datetime
import json
import os
import re
import threading
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest

from queue_workflows import check, demo
from queue_workflows.cli import run as command
from queue_workflows.demo import book_texts, page, painter, run_picture, workflow

SVG = "{http://www.w3.org/2000/svg}"
NOW = datetime.datetime(2026, 3, 1, 12, tzinfo=datetime.timezone.utc)
HOSTILE = '<script>alert("x")</script> & {braces}'


# --- texts -------------------------------------------------------------------------------------


def test_texts_are_read_by_file_name_with_their_first_line_as_title(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_text("\n  Second  \n\nits body\nits end\n\n")
    (tmp_path / "a.md").write_text("# First\nbody\n")
    (tmp_path / "c.py").write_text("print('no text')\n")
    (tmp_path / "empty.txt").touch()
    assert book_texts.read_texts(tmp_path) == [
        {"title": "First", "body": "body"},
        {"title": "Second", "body": "its body\nits end"},
        {"title": "Untitled", "body": ""},
    ]


def test_an_odd_folder_gives_texts_that_json_and_postgresql_can_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.txt").write_bytes(b"na\x00me \x1b[31m\n\xff\r\nbody " + b"x" * 9000)
    (tmp_path / "folder.txt").mkdir()
    (tmp_path / "loop.txt").symlink_to("loop.txt")
    (tmp_path / "gone.txt").symlink_to("nowhere")
    os.mkfifo(tmp_path / "pipe.txt")
    Path(os.fsdecode(os.fsencode(tmp_path) + b"/z\xff.txt")).write_text("refused")
    real_open = Path.open

    def refusing_open(path: Path, *args: Any, **kwargs: Any) -> Any:
        if path.name.startswith("z"):
            raise PermissionError(13, "Permission denied")
        return real_open(path, *args, **kwargs)

    monkeypatch.setattr(Path, "open", refusing_open)
    first, last = book_texts.read_texts(tmp_path)
    assert first["title"] == "na me  [31m"
    assert first["body"].startswith("\ufffd \nbody xxx")
    assert len(first["body"]) < book_texts.MAX_BYTES
    assert last == {"title": "z .txt", "body": "Permission denied"}
    json.dumps([first, last]).encode("ascii")


def test_a_large_folder_gives_its_first_texts(tmp_path: Path) -> None:
    for number in range(book_texts.MAX_TEXTS + 5):
        (tmp_path / f"{number:03}.txt").write_text(f"text {number}")
    titles = [text["title"] for text in book_texts.read_texts(tmp_path)]
    assert titles == [f"text {number}" for number in range(book_texts.MAX_TEXTS)]


def test_a_folder_without_texts_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=re.escape(f"{tmp_path}: no .txt or .md file")):
        book_texts.read_texts(tmp_path)
    with pytest.raises(FileNotFoundError, match="gone"):
        book_texts.read_texts(tmp_path / "gone")


def test_the_command_and_the_app_agree_on_what_a_text_is() -> None:
    assert command.TEXT_SUFFIXES == book_texts.SUFFIXES


# --- the nodes ---------------------------------------------------------------------------------


def test_the_parts_are_all_texts_once(tmp_path: Path) -> None:
    found = tmp_path / "texts.json"
    found.write_text(json.dumps([{"title": "t", "body": "word " * n} for n in range(8)]))
    parts = [workflow.count_words(found, part) for part in range(workflow.PARTS)]
    assert sorted(int(number) for part in parts for number in part) == list(range(8))
    assert parts[5 % workflow.PARTS]["5"] == {"word": 5}


def test_the_most_frequent_words_are_painted(tmp_path: Path) -> None:
    body = "Seeds, seeds and roots. " + " ".join(f"rare{n}" for n in range(30)) + " Roots seeds"
    (tmp_path / "t").write_text(json.dumps([{"title": "t", "body": body}]))
    counted = workflow.count_words(tmp_path / "t", 0)["0"]
    assert list(counted.items())[:2] == [("seeds", 3), ("roots", 2)]
    assert len(counted) == workflow.WORDS


def circles(svg: str) -> dict[str, dict[str, str]]:
    found = ET.fromstring(svg).iter(f"{SVG}circle")
    return {(each[0].text or "").partition(":")[0]: each.attrib for each in found}


def test_a_painting_has_a_circle_for_each_word_sized_by_its_count() -> None:
    model = painter.Painter()
    drawn = circles(model.paint({"cloud": 3, "river": 1, "<&>": 1}))
    assert drawn.keys() == {"cloud", "river", "<&>"}
    assert float(drawn["cloud"]["r"]) > float(drawn["river"]["r"])
    for circle in drawn.values():
        assert circle["class"] in {f"c{n}" for n in range(painter.COLOURS)}
        assert 0 <= int(circle["cx"]) < 200 and 0 <= int(circle["cy"]) < 120
    # A hash that differs between processes would make each attempt's painting another one.
    assert drawn["cloud"] == {"class": "c1", "cx": "22", "cy": "17", "r": "23"}


def test_a_cancelled_node_stops_painting(tmp_path: Path) -> None:
    cancel, reported = threading.Event(), list[float]()

    def report(fraction: float) -> None:
        reported.append(fraction)
        cancel.set()

    words = {str(number): {"word": 1} for number in range(4)}
    workflow.paint(
        words,
        out=tmp_path,
        model_handle=painter.Painter(),
        status_callback=report,
        cancel_event=cancel,
    )
    assert reported == [0.25]
    assert [path.name for path in tmp_path.iterdir()] == ["0.svg"]


# --- the page ----------------------------------------------------------------------------------


def test_the_page_loads_nothing_and_shows_texts_as_text() -> None:
    painting = painter.Painter().paint({"word": 1})
    made = page.render(
        [({"title": HOSTILE, "body": HOSTILE}, painting), ({"title": "b", "body": ""}, painting)],
        ["red", "blue"],
    )
    assert "<script" not in made and "&lt;script&gt;" in made and "{braces}" in made
    assert made.count("<article><svg") == 2
    assert ".c0 { fill: red }" in made and ".c1 { fill: blue }" in made
    addresses = re.findall(r"""(?:src|href)\s*=|url\(|@import|https?://[^"]+""", made)
    assert set(addresses) == {"http://www.w3.org/2000/svg"}, "the name of SVG, not an address"


# --- the picture of a run ----------------------------------------------------------------------


def after(seconds: float) -> datetime.datetime:
    return NOW + datetime.timedelta(seconds=seconds)


def an_attempt(begin: float, end: float | None, outcome: str) -> dict[str, Any]:
    ended = None if end is None else after(end)
    return {"claimed_at": after(begin), "ended_at": ended, "outcome": outcome}


def a_node(node_id: str, status: str, *deps: str, **more: Any) -> dict[str, Any]:
    """A node as `history.get_run` returns it, as far as it is drawn."""
    node = {"node_id": node_id, "status": status, "depends_on": list(deps)}
    return node | {"queue": "cpu", "attempts": [], "finished_at": None, "input_spec": None} | more


NODES = [
    a_node("late", "waiting", "twice", "asks"),
    a_node("once", "completed", attempts=[an_attempt(0, 2.5, "completed")]),
    a_node(
        "twice",
        "completed",
        "once",
        queue="gpu",
        attempts=[an_attempt(2.5, 3, "retried"), an_attempt(3.5, 4, "completed")],
    ),
    a_node(
        "asks",
        "awaiting_input",
        "once",
        attempts=[an_attempt(2.5, 2.75, "parked")],
        input_spec={"prompt": "?"},
    ),
    a_node("<now>", "running", "twice", "gone", attempts=[an_attempt(4.5, None, "running")]),
    a_node("skipped", "skipped", "twice"),
]


def drawn(*nodes: dict[str, Any]) -> ET.Element:
    run = {"workflow_name": HOSTILE, "read_at": after(8), "nodes": nodes}
    return ET.fromstring(run_picture.draw(run))


def test_the_picture_has_a_row_for_each_node_with_state_time_and_attempts() -> None:
    made = drawn(*NODES)
    title, *labels = [each.text or "" for each in made.findall(f"{SVG}text")]
    assert title == f"{HOSTILE}: 6 nodes, 8.0 s"
    assert labels[:9] == [f"{second} s" for second in range(9)]
    assert list(zip(labels[9::2], labels[10::2], strict=True)) == [
        ("late", "cpu, waiting"),
        ("once", "cpu, completed, 2.50 s"),
        ("twice", "gpu, completed, 1.50 s, attempt 2"),
        ("asks", "a person, awaiting input, 5.50 s"),
        ("<now>", "cpu, running, 3.50 s"),
        ("skipped", "cpu, skipped"),
    ]


def test_bars_are_to_scale_and_lines_lead_from_an_end_to_a_begin() -> None:
    made = drawn(*NODES)
    second = run_picture.SPAN / 8
    bars = [
        (
            (float(bar.attrib["x"]) - run_picture.LEFT) / second,
            float(bar.attrib["width"]) / second,
            bar.attrib["fill"],
        )
        for bar in made.findall(f"{SVG}rect")[1:]
    ]
    fills = run_picture.FILLS
    assert bars == [
        (0, 2.5, fills["completed"]),
        (2.5, 0.5, fills["retried"]),
        (3.5, 0.5, fills["completed"]),
        (2.5, 0.25, run_picture.OTHER),
        (2.75, 5.25, run_picture.QUESTION),
        (4.5, 3.5, fills["running"]),
    ]
    lines = [p.attrib["d"] for p in made.findall(f"{SVG}path") if p.get("class") == "waits"]
    ends = [re.fullmatch(r"M([\d.]+) \d+V\d+H([\d.]+)", line) for line in lines]
    spans = [[(float(x) - run_picture.LEFT) / second for x in end.groups()] for end in ends if end]
    assert spans == [[2.5, 2.5], [2.5, 2.5], [4.0, 4.5]]


def test_a_picture_of_a_run_that_did_nothing() -> None:
    labels = [each.text for each in drawn(a_node("a", "waiting")).findall(f"{SVG}text")]
    assert labels == [f"{HOSTILE}: 1 nodes, 0.0 s", "0 s", "a", "cpu, waiting"]
    assert len(drawn().findall(f"{SVG}rect")) == 1


# --- the app -----------------------------------------------------------------------------------


def test_the_workflow_can_run() -> None:
    demo.setup()
    found = check.workflow("picture_book")
    assert found.ok, found.findings
    assert not found.findings
