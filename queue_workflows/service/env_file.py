"""Read the file `.env` of the folder that the service is started in."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import dotenv
from dotenv import parser

from queue_workflows import errors

NAME: Final = ".env"
ENCODING: Final = "utf-8-sig"
"""UTF-8, where some editors put a byte order mark before the first line."""


def check() -> None:
    """Raise `InvalidConfig` for a line that would be left out, without its text."""
    if not Path(NAME).is_file():
        return
    with Path(NAME).open(encoding=ENCODING) as file:
        for found in parser.parse_stream(file):
            if found.error:
                text = found.original.string
                blank = text[: len(text) - len(text.lstrip())].count("\n")
                raise errors.InvalidConfig(
                    f"{NAME}, line {found.original.line + blank}: it must be NAME=value, with "
                    "a quote at both ends of the value or at none"
                )


def variables(prefix: str) -> dict[str, str]:
    """Return the values of the names that begin with `prefix`; none without the file."""
    found = dotenv.dotenv_values(NAME, encoding=ENCODING)
    return {
        name: text for name, text in found.items() if name.startswith(prefix) and text is not None
    }
