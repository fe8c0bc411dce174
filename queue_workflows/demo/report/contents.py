"""The report as a whole: the figures at the top, and the sections with the chosen one first."""

from __future__ import annotations

from pathlib import PurePath

from queue_workflows.demo import survey
from queue_workflows.demo.report import blocks, sections


def compose(findings: sections.Findings, focus: str) -> blocks.Report:
    """The report; ValueError that lists the choices for a focus which is none of them."""
    if focus not in survey.FOCUSES:
        choices = ", ".join(survey.FOCUSES)
        raise ValueError(f"a report cannot lead with {focus!r}: choose from {choices}")
    found = findings.survey
    parts = [
        sections.size(found),
        sections.complexity(found),
        sections.documentation(found),
        sections.imports(found),
        sections.similarity(findings),
        sections.duplicates(findings.groups),
        sections.vocabulary(findings),
        sections.left_out(found),
        sections.method(found),
    ]
    parts.sort(key=lambda section: section.key != focus)
    return blocks.Report(
        title=f"The code in {PurePath(found['folder']).name or found['folder']}",
        folder=found["folder"],
        summary=_summary(findings),
        tiles=_tiles(found),
        sections=[_without_empty(section) for section in parts],
    )


def _without_empty(section: blocks.Section) -> blocks.Section:
    return section._replace(blocks=list(filter(blocks.has_content, section.blocks)))


def _summary(findings: sections.Findings) -> str:
    total = findings.survey["total"]
    counted = [
        (total["files"], "file"),
        (len(findings.survey["packages"]), "package"),
        (total["code"], "line of code"),
        (total["functions"], "function"),
        (findings.groups["groups"], "group of near-duplicates"),
    ]
    return ", ".join(sections.count(number, noun) for number, noun in counted)


def _tiles(found: survey.Survey) -> list[tuple[str, str]]:
    total = found["total"]
    return [
        (f"{len(found['packages']):,}", "packages"),
        (f"{total['files']:,}", "files"),
        (f"{total['code']:,}", "lines of code"),
        (f"{total['functions']:,}", "functions"),
        (f"{total['classes']:,}", "classes"),
        (f"{survey.ratio(total['documented'], total['public']):.0%}", "documented"),
    ]
