"""Define the nodes of the picture book, and the workflow that connects them.

collect -> part-0 .. part-2: count_words -> paint (gpu) --+
   +-----> choose: a person picks the first text ---------+-> page -> picture of this run
colours: fails once, is tried again ----------------------+
"""

from __future__ import annotations

import json
import os
import re
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TypedDict

from queue_workflows import OFFERED, ask, current_job, history, node, pipeline, workflow
from queue_workflows.demo import page, painter, run_picture
from queue_workflows.demo.book_texts import SAMPLES, Text, read_texts

PARTS = 3
"""The graph is fixed before the folder is read: each part takes every third text."""
WORDS = 12
"""Words of a text that are painted: the most frequent ones."""


class Collected(TypedDict):
    """A file with the texts, and the choices of the question."""

    texts: Path
    titles: list[dict[str, str]]


@node
def collect(folder: Path | None = None, out: Path = OFFERED) -> Collected:
    """Read the folder, or the samples if None, once, so that later nodes see the same texts."""
    found = read_texts(folder or SAMPLES)
    print(f"{len(found)} texts in {folder or SAMPLES}")
    return {
        "texts": _write(out / "texts.json", json.dumps(found)),
        "titles": [{"label": text["title"], "value": text["title"]} for text in found],
    }


@node(retries=2, backoff={"kind": "exponential", "base_s": 0.5}, retry_on=[ConnectionError])
def fetch_colours() -> list[str]:
    """Return the colours of the book. The first attempt fails, as a remote service may."""
    attempt = current_job().attempt
    if attempt == 1:
        raise ConnectionError("the colour service is busy (simulated, on the first attempt)")
    print(f"attempt {attempt} got the colours")
    return ["#1f6f8b", "#f2a65a", "#99c24d", "#d64550", "#6a4c93"]


@node
def count_words(texts: Path, part: int) -> dict[str, dict[str, int]]:
    """Return the most frequent words of each text of one part, by the text's number."""
    return {
        str(number): dict(Counter(re.findall(r"\w{4,}", text["body"].lower())).most_common(WORDS))
        for number, text in enumerate(_texts(texts))
        if number % PARTS == part
    }


@node(model=painter.MODEL)
def paint(
    words: dict[str, dict[str, int]],
    out: Path = OFFERED,
    model_handle: painter.Painter = OFFERED,
    status_callback: Callable[[float], object] = OFFERED,
    cancel_event: threading.Event = OFFERED,
) -> Path:
    """Paint each text of one part, as `<number>.svg` in one folder."""
    for done, (number, counted) in enumerate(words.items(), 1):
        if cancel_event.is_set():
            break
        _write(out / f"{number}.svg", model_handle.paint(counted))
        print(f"painted text {number}")
        status_callback(done / len(words))
    return out


@pipeline
def illustrate(texts: Path, part: int) -> Path:
    """Count the words of one part of the texts, then paint them."""
    return paint(count_words(texts, part))


@node
def write_page(
    texts: Path, colours: list[str], first: str, out: Path = OFFERED, **paintings: Path
) -> Path:
    """Write the book with the chosen text first, as `book.html`."""
    files = [file for folder in paintings.values() for file in Path(folder).glob("*.svg")]
    svg = {int(file.stem): file.read_text("utf-8") for file in files}
    cards = [(text, svg[number]) for number, text in enumerate(_texts(texts))]
    titles = [text["title"] for text, _ in cards]
    if first not in titles:
        raise ValueError(f"{first!r} is no title; choose one of {', '.join(titles)}")
    cards.insert(0, cards.pop(titles.index(first)))
    return _write(out / "book.html", page.render(cards, colours))


@node
def draw_run(out: Path = OFFERED) -> Path:
    """Draw the run that this node belongs to, as `run.svg`; the node itself still runs in it."""
    run = history.get_run(current_job().run_id or "", logs=False)
    if run is None:
        raise LookupError("the run was deleted while it ran")
    return _write(out / "run.svg", run_picture.draw(run))


@workflow
def picture_book(folder: Path | None) -> None:
    """Make a picture book of the texts in a folder, or of the sample texts if None."""
    collected = collect.options("collect")(folder)
    colours = fetch_colours.options("colours")()
    paintings = {
        f"part_{part}": illustrate.options(f"part-{part}")(collected["texts"], part)
        for part in range(PARTS)
    }
    first = ask(
        "choose",
        "turnout",
        str,
        prompt="Which text comes first in the book?",
        turnout_options=collected["titles"],
    )
    book = write_page.options("page")(collected["texts"], colours, first, **paintings)
    draw_run.options("picture", after=[book])()


def _texts(path: Path) -> list[Text]:
    return json.loads(path.read_text("utf-8"))


def _write(path: Path, text: str) -> Path:
    # Two attempts may overlap: a reader must see a whole file, whichever wrote it.
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    unfinished.write_text(text, "utf-8")
    return unfinished.replace(path)
