"""What the site needs beyond the pages: README and changelog as pages, links to them led there."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File

sys.path.insert(0, str(Path(__file__).parent))
import diagrams

ROOT = Path(__file__).resolve().parents[2]
PAGES = {"readme.md": ROOT / "README.md", "changelog.md": ROOT / "CHANGELOG.md"}
_UP = re.compile(r"\]\((?:\.\./)+(README|CHANGELOG)\.md")
_TO_DOCS = re.compile(r"\]\(docs/")
_ELSEWHERE = re.compile(r"\[([^\]]+)\]\((?:CLAUDE|AGENTS)\.md\)")
_TO_DEPLOY = re.compile(r"\[([^\]]+)\]\((?:\.\./)+(deploy[^)]*)\)")
_TO_CHANGELOG = re.compile(r"\]\(CHANGELOG\.md")


def on_files(files: Any, config: Any) -> Any:
    """Two files of the root are pages as well, and what `deploy/` holds can be fetched."""
    for name, path in PAGES.items():
        files.append(File.generated(config, name, content=path.read_text(encoding="utf-8")))
    for path in sorted((ROOT / "deploy").rglob("*")):
        if path.is_file():
            name = path.relative_to(ROOT).as_posix()
            files.append(File.generated(config, name, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links that hold in the repository hold on the site, and diagrams are drawn."""
    uri = page.file.src_uri
    try:
        markdown = diagrams.BLOCK.sub(lambda found: diagrams.svg(found[1]), markdown)
    except ValueError as error:
        raise PluginError(f"{uri}: {error}") from error
    if uri in PAGES:
        markdown = _TO_CHANGELOG.sub("](changelog.md", _TO_DOCS.sub("](", markdown))
        return _ELSEWHERE.sub(r"\1", markdown)
    up = "../" * uri.count("/")

    def to_deploy(found: re.Match[str]) -> str:
        # A folder is no page.
        return f"[{found[1]}]({up}{found[2]})" if (ROOT / found[2]).is_file() else found[1]

    markdown = _TO_DEPLOY.sub(to_deploy, markdown)
    return _UP.sub(lambda found: f"]({up}{found[1].lower()}.md", markdown)
