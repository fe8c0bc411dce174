"""The templates and static files of the dashboard: whose they are, how large, and what they may."""

from __future__ import annotations

import gzip
import hashlib
import re
from pathlib import Path

import pytest

import queue_workflows

ROOT = Path(__file__).parents[2]
FOLDER = Path(queue_workflows.__path__[0]) / "service" / "dashboard"
STATIC, TEMPLATES = FOLDER / "static", FOLDER / "templates"
STYLES = ("dashboard.css", "run.css")
OTHERS = {"htmx.min.js", "idiomorph.min.js"}
ALLOWED = {"hx-get", "hx-target", "hx-swap", "hx-trigger", "hx-select"}
"""What htmx 2 and htmx 4 both understand."""


def templates() -> dict[str, str]:
    return {path.name: path.read_text(encoding="utf-8") for path in TEMPLATES.iterdir()}


def test_files_of_others_are_those_of_third_party_md() -> None:
    text = (ROOT / "THIRD_PARTY.md").read_text(encoding="utf-8")
    listed = dict(re.findall(r"\| `([^`]*/static/[^`]*)` .* `([0-9a-f]{64})` \|", text))
    found = {
        path.relative_to(ROOT).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in STATIC.iterdir()
        if path.name in OTHERS
    }
    assert len(found) == len(OTHERS)
    assert listed == found


def test_all_assets_are_small() -> None:
    total = sum(len(gzip.compress(path.read_bytes(), 9)) for path in STATIC.iterdir())
    assert total <= 60 * 1024


def test_own_modules_are_together_at_most_600_lines() -> None:
    own = [path for path in STATIC.glob("*.js") if path.name not in OTHERS]
    assert {path.stem for path in own} == {"live", "time", "keys", "dialogs", "log"}
    assert sum(path.read_text(encoding="utf-8").count("\n") for path in own) <= 600


def test_templates_use_what_both_versions_of_htmx_have() -> None:
    used = {name for text in templates().values() for name in re.findall(r"\bhx-[\w:-]+", text)}
    assert used <= ALLOWED


@pytest.mark.parametrize(
    "pattern",
    [
        r"\|\s*safe\b", r"\bMarkup\b", r"autoescape\s+false", r"<script(?![^>]*\bsrc=)", r"<style",
        r"\sstyle\s*=", r"\son[a-z]+\s*=", r"javascript:", r"https?://", r"{%-?\s*raw",
    ],
)  # fmt: skip
def test_templates_have_nothing_that_runs_or_styles_inline(pattern: str) -> None:
    found = {name for name, text in templates().items() if re.search(pattern, text, re.I)}
    assert not found


def test_drawings_with_links_are_no_images_and_hidden_ones_are_passed_by_the_keyboard() -> None:
    for name, text in templates().items():
        for attributes, content in re.findall(r"<svg\b([^>]*)>(.*?)</svg>", text, re.S):
            for link in re.findall(r"<a\b[^>]*>", content):
                assert 'role="img"' not in attributes, name
                assert 'aria-hidden="true"' not in attributes or 'tabindex="-1"' in link, name


def test_each_class_has_a_style_in_a_file_of_its_page() -> None:
    """The pages of a run alone have `run.css`."""
    styles = {name: (STATIC / name).read_text(encoding="utf-8") for name in STYLES}
    for name, text in templates().items():
        loaded = [*styles.values()] if name.startswith(("run.", "run_")) else [styles[STYLES[0]]]
        for given in re.findall(r'\bclass="([^"{]*)"', text):
            for each in given.split():
                assert any(re.search(rf"\.{each}\b", style) for style in loaded), (name, each)


def test_each_table_scrolls_by_itself_and_its_heads_have_words() -> None:
    for name, text in templates().items():
        for before in text.split("<table")[:-1]:
            assert re.search(r'<div class="scroll"[^>]*>\s*$', before), name
        assert not re.search(r"<th[^>]*>\s*</th>", text), name


def test_live_parts_name_runs_without_spaces() -> None:
    """A browser takes a part's value apart at its spaces, which an id may have."""
    found = [run for text in templates().values() for run in re.findall(r'"run:{{([^}]*)}}', text)]
    assert found
    assert all(run.strip().endswith("|segment") for run in found), found


def test_no_module_makes_markup_from_data() -> None:
    for path in FOLDER.glob("*.py"):
        text = path.read_text(encoding="utf-8")
        assert "Markup" not in text, path.name
        assert "innerHTML =" not in text, path.name
    for path in STATIC.glob("*.js"):
        if path.name not in OTHERS:
            text = path.read_text(encoding="utf-8")
            assert not re.search(r"\.innerHTML\s*=|outerHTML|insertAdjacentHTML|\beval\b", text)
