"""The report as one HTML page that needs nothing else: style and charts are in it, no script is."""

from __future__ import annotations

import re
from html import escape
from importlib import resources
from string import Template

from queue_workflows.demo.report import blocks, charts

_SEAMS = re.compile(r"[/._](?=\w)")


def render(report: blocks.Report) -> str:
    """The page."""
    return Template(_asset("page.html")).substitute(
        title=escape(report.title),
        folder=escape(report.folder),
        style=_asset("style.css"),
        tiles="".join(
            f"<div><dd>{escape(value)}</dd><dt>{escape(label)}</dt></div>"
            for value, label in report.tiles
        ),
        links="".join(
            f'<a href="#{section.key}">{escape(section.title)}</a>' for section in report.sections
        ),
        sections="\n".join(_section(section) for section in report.sections),
    )


def _asset(name: str) -> str:
    return (resources.files(__package__ or "") / name).read_text("utf-8")


def _section(section: blocks.Section) -> str:
    figures = "\n".join(_figure(block) for block in section.blocks)
    return (
        f'<section id="{section.key}"><h2>{escape(section.title)}</h2>'
        f'<p>{escape(section.summary)}</p><div class="figures">\n{figures}\n</div></section>'
    )


def _figure(block: blocks.Block) -> str:
    kind = type(block).__name__.lower()
    return f'<figure class="{kind}-figure">{_block(block)}</figure>'


def _block(block: blocks.Block) -> str:
    match block:
        case blocks.Bars():
            return charts.bars(block)
        case blocks.Columns():
            return charts.columns(block)
        case blocks.Matrix():
            return charts.matrix(block)
        case blocks.Map():
            return charts.plot(block)
        case blocks.Table():
            return _table(block)
        case blocks.Notes():
            return f"<ul>{''.join(f'<li>{escape(text)}</li>' for text in block.sentences)}</ul>"


def _table(block: blocks.Table) -> str:
    texts = len(block.head) - block.numbers

    def line(tag: str, cells: tuple[str, ...]) -> str:
        shown = (
            f"<{tag}{' class=number' if place >= texts else ''}>{_breakable(cell)}</{tag}>"
            for place, cell in enumerate(cells)
        )
        return f"<tr>{''.join(shown)}</tr>"

    rows = "".join(line("td", row) for row in block.rows)
    return (
        f"<figcaption>{escape(block.title)}</figcaption>"
        f'<div class="scroll"><table><thead>{line("th", block.head)}</thead>'
        f"<tbody>{rows}</tbody></table></div>"
    )


def _breakable(text: str) -> str:
    """The text, escaped, with places where a long path or name may go on in the next line."""
    return _SEAMS.sub(r"\g<0><wbr>", escape(text))
