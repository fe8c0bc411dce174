"""Node: write the report, for a browser and as plain text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from queue_workflows.demo import files
from queue_workflows.demo.report import contents, html, markdown, sections


def run(
    survey: Path, pairs: Path, positions: Path, groups: Path, words: Path, focus: str, out: Path
) -> dict[str, Any]:
    """Write `report.html` and `report.md`, led by what the person chose."""
    report = contents.compose(
        sections.Findings(
            survey=files.read(survey / "survey.json"),
            pairs=files.read(pairs),
            positions=files.read(positions),
            groups=files.read(groups),
            words=files.read(words),
        ),
        focus,
    )
    return {
        "html": str(files.write_text(out / "report.html", html.render(report))),
        "markdown": str(files.write_text(out / "report.md", markdown.render(report))),
        "summary": report.summary,
    }
