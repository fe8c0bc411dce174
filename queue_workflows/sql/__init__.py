"""Every SQL text of the engine, as package data: `queries/` has the statements, by noun."""

from __future__ import annotations

from pathlib import Path

QUERIES = Path(__file__).parent / "queries"
