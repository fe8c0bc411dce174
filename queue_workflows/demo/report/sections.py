"""The sections of the report: what each says, and the charts and tables that show it."""

from __future__ import annotations

from typing import NamedTuple

from queue_workflows.demo.likeness import LIKE_FUNCTIONS, Group, Groups, Pair, Position
from queue_workflows.demo.report.blocks import (
    Bar,
    Bars,
    Block,
    Columns,
    Map,
    Matrix,
    Notes,
    Point,
    Section,
    Table,
)
from queue_workflows.demo.source import COMPARED_LINES, Function
from queue_workflows.demo.survey import COMPLEXITY_STEPS, Package, Survey, ratio

CHARTED = 12
"""How many packages a chart or a table shows."""
ENOUGH = 10
"""Fewer functions or public definitions than this make no average."""
LISTED_PROBLEMS = 40


_PLURALS = {
    "line of code": "lines of code",
    "group of near-duplicates": "groups of near-duplicates",
}


class Findings(NamedTuple):
    """All that was found out about a folder."""

    survey: Survey
    pairs: list[Pair]
    positions: list[Position]
    groups: Groups
    words: dict[str, list[str]]


def size(survey: Survey) -> Section:
    total = survey["total"]
    largest = sorted(survey["packages"], key=lambda package: -package["code"])[:CHARTED]
    share = ratio(sum(package["code"] for package in largest), total["code"])
    return Section(
        "size",
        "Size",
        f"{count(total['code'], 'line')} of code, {total['docstrings']:,} of docstrings and "
        f"{total['comments']:,} of comments. The largest {count(len(largest), 'package')} "
        f"hold {share:.0%} of the code.",
        [
            Bars(
                "Largest packages, lines of code",
                [_size_bar(package) for package in largest],
                ("Code", "Docstrings", "Comments"),
            ),
            _functions("Longest functions", "Lines", [(f, f["lines"]) for f in survey["longest"]]),
        ],
    )


def _size_bar(package: Package) -> Bar:
    parts = (package["code"], package["docstrings"], package["comments"])
    return Bar(package["name"], parts, f"{package['code']:,}")


def complexity(survey: Survey) -> Section:
    total = survey["total"]
    counted = [package for package in survey["packages"] if package["functions"] >= ENOUGH]
    counted.sort(key=lambda package: -_mean_complexity(package))
    simple = ratio(sum(survey["histogram"][:3]), total["functions"])
    return Section(
        "complexity",
        "Complexity",
        f"The complexity of a function is {_mean_complexity(total):.1f} on average; {simple:.0%} "
        f"have {COMPLEXITY_STEPS[2]} or less, {survey['histogram'][-1]:,} have more than "
        f"{COMPLEXITY_STEPS[-1]}.",
        [
            Columns(
                "Functions by complexity",
                _classes(COMPLEXITY_STEPS),
                survey["histogram"],
                "complexity",
            ),
            Bars(
                f"Highest average, packages with {ENOUGH} functions or more",
                [
                    Bar(p["name"], (_mean_complexity(p),), f"{_mean_complexity(p):.1f}")
                    for p in counted[:CHARTED]
                ],
            ),
            _functions(
                "Most complex functions",
                "Complexity",
                [(f, f["complexity"]) for f in survey["most_complex"]],
            ),
        ],
    )


def _mean_complexity(package: Package) -> float:
    return ratio(package["complexity"], package["functions"])


def _classes(steps: tuple[int, ...]) -> list[str]:
    """The labels of a histogram's classes: `1`, `2`, `3-5` … `51+`."""
    lows = [1, *(step + 1 for step in steps)]
    labels = [str(h) if low == h else f"{low}-{h}" for low, h in zip(lows, steps, strict=False)]
    return [*labels, f"{lows[-1]}+"]


def documentation(survey: Survey) -> Section:
    total = survey["total"]
    counted = [package for package in survey["packages"] if package["public"] >= ENOUGH]
    counted.sort(key=lambda package: (-_coverage(package), -package["public"]))
    blocks: list[Block] = [
        Bars("Best documented", [_coverage_bar(p) for p in counted[:CHARTED]], whole=1)
    ]
    if rest := counted[CHARTED:][-CHARTED:]:
        blocks.append(Bars("Least documented", [_coverage_bar(p) for p in reversed(rest)], whole=1))
    return Section(
        "documentation",
        "Documentation",
        f"{total['documented']:,} of {total['public']:,} public modules, classes and functions "
        f"have a docstring ({_coverage(total):.0%}). Packages with {ENOUGH} or more of them:",
        blocks,
    )


def _coverage(package: Package) -> float:
    return ratio(package["documented"], package["public"])


def _coverage_bar(package: Package) -> Bar:
    value = f"{_coverage(package):.0%} of {package['public']:,}"
    return Bar(package["name"], (_coverage(package),), value)


def imports(survey: Survey) -> Section:
    packages = sorted(survey["packages"], key=lambda package: -package["imported_by"])
    needed = [package for package in packages[:CHARTED] if package["imported_by"]]
    links = sum(len(package["imports"]) for package in survey["packages"])
    lonely = sum(not p["imports"] and not p["imported_by"] for p in survey["packages"])
    names = [package["name"] for package in _most_linked(survey["packages"])]
    by_name = {package["name"]: package for package in survey["packages"]}
    return Section(
        "imports",
        "Imports",
        f"{count(links, 'link')} between packages of this folder; "
        f"{count(lonely, 'package')} without any.",
        [
            Bars(
                "Imported by most other packages",
                [Bar(p["name"], (p["imported_by"],), f"{p['imported_by']:,}") for p in needed],
            ),
            Matrix(
                "Files of a package (row) that import another (column)",
                names,
                [[by_name[row]["imports"].get(column, 0) for column in names] for row in names],
            ),
        ],
    )


def _most_linked(packages: list[Package]) -> list[Package]:
    def links(package: Package) -> int:
        return sum(package["imports"].values()) + package["imported_by"]

    most = sorted(packages, key=lambda package: -links(package))[:CHARTED]
    return sorted((package for package in most if links(package)), key=lambda p: p["name"])


def likeness(findings: Findings) -> Section:
    sizes = {package["name"]: package["code"] for package in findings.survey["packages"]}
    return Section(
        "likeness",
        "Likeness",
        "Packages that talk about the same things in the same words lie close on the map. Only "
        "nearness means something, neither axis has a unit.",
        [
            Map(
                "The largest packages by the words in their code",
                [Point(p["name"], p["x"], p["y"], sizes[p["name"]]) for p in findings.positions],
            ),
            Bars(
                "Most alike",
                [
                    Bar(f"{p['one']} + {p['other']}", (p["likeness"],), f"{p['likeness']:.0%}")
                    for p in findings.pairs
                ],
                whole=1,
            ),
        ],
    )


def duplicates(groups: Groups) -> Section:
    return Section(
        "duplicates",
        "Near-duplicates",
        f"Of {count(groups['compared'], 'function')} with {COMPARED_LINES} lines or more, "
        f"{groups['functions']:,} stand in {count(groups['groups'], 'group')} where each is at "
        f"least {LIKE_FUNCTIONS:.0%} like the first: {count(groups['repeated'], 'repeated line')}.",
        [
            Table(
                "Groups with the most repeated lines",
                ("Functions", "Members", "Alike", "Repeated lines"),
                [_group_row(group) for group in groups["largest"]],
                numbers=3,
            )
        ],
    )


def _group_row(group: Group) -> tuple[str, ...]:
    places = group["places"]
    shown = [f"{place['name']} ({place['path']}:{place['line']})" for place in places[:2]]
    if len(places) > 2:
        shown.append(f"and {len(places) - 2:,} more")
    return (
        ", ".join(shown),
        f"{len(places):,}",
        f"{group['likeness']:.0%}",
        f"{group['repeated']:,}",
    )


def words(findings: Findings) -> Section:
    return Section(
        "words",
        "What it is about",
        "The words that the largest packages use more than other code does.",
        [
            Table(
                "Telling words",
                ("Package", "Words"),
                [(name, " · ".join(words)) for name, words in list(findings.words.items())[:20]],
            )
        ],
    )


def left_out(survey: Survey) -> Section:
    problems, left_out = survey["problems"], survey["left_out"]
    blocks: list[Block] = []
    if problems:
        rows = [(problem["path"], problem["problem"]) for problem in problems[:LISTED_PROBLEMS]]
        blocks.append(Table("Sources that could not be parsed", ("Source", "Reason"), rows))
    skipped = [(kind, f"{count:,}") for kind, count in left_out.items()]
    if skipped:
        blocks.append(Table("Not looked at", ("Kind", "How many"), skipped, numbers=1))
    summary = "Every source was parsed."
    if problems:
        summary = f"{count(len(problems), 'source')} could not be parsed: counted as files only."
    if len(problems) > LISTED_PROBLEMS:
        summary += f" The first {LISTED_PROBLEMS} are listed."
    return Section("left-out", "Left out", summary, blocks)


def method(survey: Survey) -> Section:
    return Section(
        "method",
        "How it was measured",
        f"Every source was parsed with the grammar of Python {survey['python']}; nothing was run.",
        [
            Notes(
                [
                    "A package is a folder with Python files; a module right in the top folder "
                    "stands for itself.",
                    "Links are not followed; folders whose name starts with a dot are not entered.",
                    "A line counts once: as docstring, comment, code or blank. With code and a "
                    "comment in it, it is code.",
                    "Complexity is cyclomatic: one, and one more for each if, loop, except, case, "
                    "conditional expression, and, or, and each for and if of a comprehension.",
                    "Public is what neither has a name that starts with an underscore nor stands "
                    "in something that has, or in a function.",
                    "Likeness is the cosine of vectors of the words in the text, weighted by how "
                    "rare they are in the standard library. It says what looks alike; whether one "
                    "is a copy of the other is for a person to see.",
                ]
            )
        ],
    )


def _functions(title: str, figure: str, ranked: list[tuple[Function, int]]) -> Table:
    return Table(
        title,
        ("Function", "Where", figure),
        [(f["name"], f"{f['path']}:{f['line']}", f"{value:,}") for f, value in ranked],
        numbers=1,
    )


def count(number: int, noun: str) -> str:
    """The number with its noun, in the plural but after one."""
    return f"{number:,} {noun if number == 1 else _PLURALS.get(noun, noun + 's')}"
