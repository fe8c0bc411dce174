"""What nodes hand to each other: JSON files in their `out` folders."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


def read(path: Path) -> Any:
    """The value in a JSON file."""
    return json.loads(path.read_text("utf-8"))


def write(path: Path, value: Any) -> Path:
    """Write a value as JSON; the path."""
    return write_text(path, json.dumps(value))


def write_text(path: Path, text: str) -> Path:
    """Write a file that is there as a whole or not at all, whenever the process dies; the path."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    unfinished.write_text(text, "utf-8", "replace")
    return unfinished.replace(path)
