"""The diagrams of the docs are drawn when the site is built; one that cannot be drawn fails it."""

from __future__ import annotations

import importlib.util
import re
import xml.etree.ElementTree as ElementTree
from html import unescape
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
_SPEC = importlib.util.spec_from_file_location("diagrams", ROOT / "docs/_site/diagrams.py")
assert _SPEC is not None
assert _SPEC.loader is not None
diagrams = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(diagrams)

BLOCKS = [
    (path.name, found)
    for path in sorted((ROOT / "docs").rglob("*.md"))
    for found in diagrams.BLOCK.findall(path.read_text(encoding="utf-8"))
]


def test_there_are_pictures() -> None:
    assert len(BLOCKS) >= 4


@pytest.mark.parametrize(("page", "block"), BLOCKS)
def test_a_picture_shows_every_word_of_its_block(page: str, block: str) -> None:
    drawn = diagrams.svg(block)
    ElementTree.fromstring(drawn)
    shown = unescape(re.sub(r"<[^>]+>", " ", drawn))
    words = set(re.findall(r"\w+", re.sub(r"participant \w+ as|Note over \w+:", "", block)))
    hidden = {"sequenceDiagram", "stateDiagram", "v2"} | set(re.findall(r"\b[A-Z]\b", block))
    assert words - hidden <= set(re.findall(r"\w+", shown))
    assert "\n\n" not in drawn, "a blank line would end the HTML block"


@pytest.mark.parametrize(
    "block",
    [
        "flowchart LR\n a --> b",
        "stateDiagram-v2\n queued --> nowhere: x",
        "stateDiagram-v2\n state fork <<fork>>",
        "sequenceDiagram\n participant A\n loop every day",
    ],
)
def test_what_cannot_be_drawn_is_an_error(block: str) -> None:
    with pytest.raises(ValueError, match=r"cannot|no place"):
        diagrams.svg(block)


def test_text_is_text() -> None:
    drawn = diagrams.svg("sequenceDiagram\nparticipant A as <b>&\nA->>A: a < b")
    assert "&lt;b&gt;&amp;" in drawn
    assert "a &lt; b" in drawn
