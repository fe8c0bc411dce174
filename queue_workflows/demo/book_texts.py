"""Read the texts of a folder for the picture book, and count texts and characters in a task."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypedDict

SAMPLES = Path(__file__).with_name("sample_texts")
SUFFIXES = (".txt", ".md")
MAX_TEXTS = 24
MAX_BYTES = 4000
"""The book has only the beginning of a longer text."""


class Text(TypedDict):
    """A text without control characters; the title is its first line."""

    title: str
    body: str


def read_texts(folder: Path) -> list[Text]:
    """Return the first MAX_TEXTS texts by file name; raise OSError, ValueError if there is none."""
    files = sorted(path for path in folder.iterdir() if path.suffix in SUFFIXES and path.is_file())
    if not files:
        raise ValueError(f"{folder}: no {' or '.join(SUFFIXES)} file")
    return [_read(path) for path in files[:MAX_TEXTS]]


def _read(path: Path) -> Text:
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES).decode("utf-8", "replace")
    except OSError as error:
        content = f"{path.name}\n{error.strerror}"
    # PostgreSQL stores no NUL, and a file name that is not UTF-8 has characters that JSON refuses.
    clean = "".join(char if char.isprintable() or char == "\n" else " " for char in content)
    title, _, body = clean.strip().partition("\n")
    return Text(title=title.strip(" #")[:60] or "Untitled", body=body.strip())


def count_texts(reason: str, args: dict[str, Any]) -> dict[str, Any]:
    """Return how many texts `args["folder"]` has, by default the samples, and their length."""
    found = read_texts(Path(args.get("folder") or SAMPLES))
    return {
        "reason": reason,
        "texts": len(found),
        "characters": sum(len(text["body"]) for text in found),
    }
