"""The docs as a site: it builds without a warning, has every page, and loads no external files."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
from mkdocs.utils import yaml

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
MADE_BY_THE_BUILD = {"readme.md", "changelog.md"}
LOADED = {"script": "src", "img": "src", "link": "href", "iframe": "src", "source": "src"}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    return folder


def _nav(entry: Any) -> Iterator[str]:
    if isinstance(entry, str):
        yield entry
    else:
        for each in entry.values() if isinstance(entry, dict) else entry:
            yield from _nav(each)


def test_every_page_but_the_decisions_is_in_the_nav_once() -> None:
    with (ROOT / "mkdocs.yml").open(encoding="utf-8") as file:
        listed = list(_nav(yaml.yaml_load(file)["nav"]))
    pages = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")}
    pages -= {page for page in pages if page.startswith("decisions/0")}
    assert sorted(listed) == sorted(pages | MADE_BY_THE_BUILD)


class Page(HTMLParser):
    """What a built page loads, links to, and can be linked to."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.links: list[str] = []
        self.ids: set[str] = set()
        self.classes: set[str] = set()
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.ids.add(given.get("id", ""))
        self.classes.update(given.get("class", "").split())
        if tag in LOADED and (target := given.get(LOADED[tag])):
            self.loads.append(target)
        if tag == "a" and "href" in given:
            self.links.append(given["href"])


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Page]:
    return {path: Page(path) for path in site.rglob("*.html") if path.name != "404.html"}


def test_nothing_is_loaded_from_elsewhere(site: Path, pages: dict[Path, Page]) -> None:
    for path, page in pages.items():
        assert not [url for url in page.loads if urlsplit(url).netloc], path
        # What has this class is drawn by a script that the theme fetches.
        assert "mermaid" not in page.classes, path
    for path in site.rglob("*.css"):
        assert not re.search(r"(?:url\(|@import)\s*['\"]?(?:https?:)?//", path.read_text()), path


def test_links_and_what_is_loaded_are_there(pages: dict[Path, Page]) -> None:
    assert len(pages) > 25
    for path, page in pages.items():
        for target in page.links + page.loads:
            parts = urlsplit(target)
            if parts.netloc or parts.scheme:
                continue
            found = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            found = found / "index.html" if found.is_dir() else found
            assert found.exists(), f"{path}: {target}"
            if parts.fragment and found in pages:
                assert unquote(parts.fragment) in pages[found].ids, f"{path}: {target}"


def test_search_finds_a_page_and_a_function(site: Path) -> None:
    index = json.loads((site / "search" / "search_index.json").read_text(encoding="utf-8"))
    where = {entry["location"]: entry["text"] for entry in index["docs"]}
    assert "api/runs/#queue_workflows.runs.retry" in where
    assert any("dead letter" in text or "poison" in text for text in where.values())


def test_pictures_are_drawn(site: Path) -> None:
    for page, pictures in {"": 1, "pictures": 3, "reliability": 1}.items():
        text = (site / page / "index.html").read_text(encoding="utf-8")
        assert text.count('<figure class="diagram"') == pictures
        assert "stateDiagram" not in text
        assert "sequenceDiagram" not in text


def test_pictures_fill_the_width_of_the_text(site: Path) -> None:
    # The theme's own rule, which a style of the element comes before.
    theme = "".join(path.read_text() for path in site.rglob("main*.css"))
    assert re.search(r"\.md-typeset figure\{[^}]*width:fit-content", theme)
    text = (site / "pictures" / "index.html").read_text(encoding="utf-8")
    figures = re.findall(r'<figure class="diagram" style="([^"]*)"><svg [^>]*style="([^"]*)"', text)
    assert figures == [("width:100%", "width:100%;height:auto")] * 3


def test_ci_builds_the_site() -> None:
    assert '/bin/mkdocs" build --strict' in (ROOT / ".ci" / "run").read_text(encoding="utf-8")
