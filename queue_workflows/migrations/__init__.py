"""Hold the engine's migrations as package data: `NNNN_name.sql`, each with a `.down.sql`."""

from __future__ import annotations

from pathlib import Path


def dir() -> Path:  # noqa: A001  the contract names it
    """The folder that holds the chain."""
    return Path(__file__).parent
