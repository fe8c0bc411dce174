"""The app of the tutorial, with a question, for the pictures of the docs."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TypedDict

from queue_workflows import OFFERED, ask, node, workflow


class Text(TypedDict):
    name: str
    path: str


class Count(TypedDict):
    name: str
    words: int


@node
def scan(folder: Path) -> list[Text]:
    files = sorted(folder.glob("*.txt"))
    print(f"{len(files)} files in {folder.name}")
    return [{"name": file.name, "path": str(file.absolute())} for file in files]


@node
def count(text: Text) -> Count:
    content = Path(text["path"]).read_text(encoding="utf-8")
    time.sleep(0.2)
    if not content.strip():
        raise ValueError(f"{text['name']} is empty")
    return {"name": text["name"], "words": len(content.split())}


@node
def page(counts: list[Count], title: str, out: Path = OFFERED) -> Path:
    lines = [title, *(f"{each['name']}: {each['words']}" for each in counts)]
    (out / "page.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return out / "page.txt"


@workflow
def texts(folder: Path) -> None:
    counts = count.map(scan(folder), key="name", at_once=8, may_fail=5)
    title = ask("title", "text", str, prompt="Which title does the page get?")
    page(counts, title)
