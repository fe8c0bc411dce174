"""The report as a whole: the figures at the top, and the sections with the chosen one first."""

from __future__ import annotations

from pathlib import PurePath

from queue_workflows.demo.report import sections
from queue_workflows.demo.report.blocks import Report
from queue_workflows.demo.survey import FOCUSES, Survey, ratio


def compose(findings: sections.Findings, focus: str) -> Report:
    """The report; ValueError that lists the choices for a focus which is none of them."""
    if focus not in FOCUSES:
        raise ValueError(f"a report cannot lead with {focus!r}: choose from {', '.join(FOCUSES)}")
    survey = findings.survey
    parts = [
        sections.size(survey),
        sections.complexity(survey),
        sections.documentation(survey),
        sections.imports(survey),
        sections.likeness(findings),
        sections.duplicates(findings.groups),
        sections.words(findings),
        sections.left_out(survey),
        sections.method(survey),
    ]
    parts.sort(key=lambda section: section.key != focus)
    return Report(
        title=f"The code in {PurePath(survey['folder']).name or survey['folder']}",
        folder=survey["folder"],
        summary=_summary(findings),
        tiles=_tiles(survey),
        sections=parts,
    )


def _summary(findings: sections.Findings) -> str:
    survey, total = findings.survey, findings.survey["total"]
    counted = [
        (total["files"], "file"),
        (len(survey["packages"]), "package"),
        (total["code"], "line of code"),
        (total["functions"], "function"),
        (findings.groups["groups"], "group of near-duplicates"),
    ]
    return ", ".join(sections.count(number, noun) for number, noun in counted)


def _tiles(survey: Survey) -> list[tuple[str, str]]:
    total = survey["total"]
    return [
        (f"{len(survey['packages']):,}", "packages"),
        (f"{total['files']:,}", "files"),
        (f"{total['code']:,}", "lines of code"),
        (f"{total['functions']:,}", "functions"),
        (f"{total['classes']:,}", "classes"),
        (f"{ratio(total['documented'], total['public']):.0%}", "documented"),
    ]
