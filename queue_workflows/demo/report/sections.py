"""The sections of the report: what each says, and the charts and tables that show it."""

from __future__ import annotations

from typing import NamedTuple

from queue_workflows.demo import likeness, source, survey
from queue_workflows.demo.report import blocks

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

    survey: survey.Survey
    pairs: list[likeness.Pair]
    positions: list[likeness.Position]
    groups: likeness.Groups
    words: dict[str, list[str]]


def size(found: survey.Survey) -> blocks.Section:
    """How large the packages are, and the longest functions."""
    total = found["total"]
    largest = sorted(found["packages"], key=lambda package: -package["code"])[:CHARTED]
    share = survey.ratio(sum(package["code"] for package in largest), total["code"])
    return blocks.Section(
        "size",
        "Size",
        f"{count(total['code'], 'line')} of code, {total['docstrings']:,} of docstrings and "
        f"{total['comments']:,} of comments. The largest {count(len(largest), 'package')} "
        f"hold {share:.0%} of the code.",
        [
            blocks.Bars(
                "Largest packages, lines of code",
                [_size_bar(package) for package in largest],
                ("Code", "Docstrings", "Comments"),
            ),
            _functions("Longest functions", "Lines", [(f, f["lines"]) for f in found["longest"]]),
        ],
    )


def _size_bar(package: survey.Package) -> blocks.Bar:
    parts = (package["code"], package["docstrings"], package["comments"])
    return blocks.Bar(package["name"], parts, f"{package['code']:,}")


def complexity(found: survey.Survey) -> blocks.Section:
    """How complex the functions are."""
    total = found["total"]
    counted = [(_mean_complexity(p), p) for p in found["packages"] if p["functions"] >= ENOUGH]
    counted.sort(key=lambda pair: -pair[0])
    simple = survey.ratio(sum(found["histogram"][:3]), total["functions"])
    return blocks.Section(
        "complexity",
        "Complexity",
        f"The complexity of a function is {_mean_complexity(total):.1f} on average; {simple:.0%} "
        f"have {survey.COMPLEXITY_STEPS[2]} or less, {found['histogram'][-1]:,} have more than "
        f"{survey.COMPLEXITY_STEPS[-1]}.",
        [
            blocks.Columns(
                "Functions by complexity",
                _classes(survey.COMPLEXITY_STEPS),
                found["histogram"],
                "complexity",
            ),
            blocks.Bars(
                f"Highest average, packages with {ENOUGH} functions or more",
                [_bar(p["name"], mean, f"{mean:.1f}") for mean, p in counted[:CHARTED]],
            ),
            _functions(
                "Most complex functions",
                "Complexity",
                [(f, f["complexity"]) for f in found["most_complex"]],
            ),
        ],
    )


def _mean_complexity(package: survey.Package) -> float:
    return survey.ratio(package["complexity"], package["functions"])


def _classes(steps: tuple[int, ...]) -> list[str]:
    """The labels of a histogram's classes: `1`, `2`, `3-5` … `51+`."""
    lows = [1, *(step + 1 for step in steps)]
    labels = [str(h) if low == h else f"{low}-{h}" for low, h in zip(lows, steps, strict=False)]
    return [*labels, f"{lows[-1]}+"]


def documentation(found: survey.Survey) -> blocks.Section:
    """How much of what is public has a docstring."""
    total = found["total"]
    counted = [package for package in found["packages"] if package["public"] >= ENOUGH]
    counted.sort(key=lambda package: (-_coverage(package), -package["public"]))
    best, rest = counted[:CHARTED], counted[CHARTED:]
    least = rest[: -CHARTED - 1 : -1]
    return blocks.Section(
        "documentation",
        "Documentation",
        f"{total['documented']:,} of {total['public']:,} public modules, classes and functions "
        f"have a docstring ({_coverage(total):.0%}). Packages with {ENOUGH} or more of them:",
        [
            blocks.Bars("Best documented", [_coverage_bar(p) for p in best], whole=1),
            blocks.Bars("Least documented", [_coverage_bar(p) for p in least], whole=1),
        ],
    )


def _coverage(package: survey.Package) -> float:
    return survey.ratio(package["documented"], package["public"])


def _coverage_bar(package: survey.Package) -> blocks.Bar:
    coverage = _coverage(package)
    return _bar(package["name"], coverage, f"{coverage:.0%} of {package['public']:,}")


def imports(found: survey.Survey) -> blocks.Section:
    """Which packages need which."""
    packages = sorted(found["packages"], key=lambda package: -package["imported_by"])
    needed = [package for package in packages[:CHARTED] if package["imported_by"]]
    links = sum(len(package["imports"]) for package in found["packages"])
    lonely = sum(not p["imports"] and not p["imported_by"] for p in found["packages"])
    names = [package["name"] for package in _most_linked(found["packages"])]
    by_name = {package["name"]: package for package in found["packages"]}
    return blocks.Section(
        "imports",
        "Imports",
        f"{count(links, 'link')} between packages of this folder; "
        f"{count(lonely, 'package')} without any.",
        [
            blocks.Bars(
                "Imported by most other packages",
                [_bar(p["name"], p["imported_by"], f"{p['imported_by']:,}") for p in needed],
            ),
            blocks.Matrix(
                "Files of a package (row) that import another (column)",
                names,
                [[by_name[row]["imports"].get(column, 0) for column in names] for row in names],
            ),
        ],
    )


def _most_linked(packages: list[survey.Package]) -> list[survey.Package]:
    def links(package: survey.Package) -> int:
        return sum(package["imports"].values()) + package["imported_by"]

    most = sorted(packages, key=lambda package: -links(package))[:CHARTED]
    return sorted((package for package in most if links(package)), key=lambda p: p["name"])


def similarity(findings: Findings) -> blocks.Section:
    """Which packages are alike, as a map and as a ranking."""
    sizes = {package["name"]: package["code"] for package in findings.survey["packages"]}
    points = [blocks.Point(p["name"], p["x"], p["y"], sizes[p["name"]]) for p in findings.positions]
    pairs = [(f"{pair['one']} + {pair['other']}", pair["likeness"]) for pair in findings.pairs]
    return blocks.Section(
        "similarity",
        "Likeness",
        "Packages that talk about the same things in the same words lie close on the map. Only "
        "nearness means something, neither axis has a unit.",
        [
            blocks.Map("The largest packages by the words in their code", points),
            blocks.Bars(
                "Most alike", [_bar(names, like, f"{like:.0%}") for names, like in pairs], whole=1
            ),
        ],
    )


def duplicates(groups: likeness.Groups) -> blocks.Section:
    """Which functions are near-duplicates."""
    compared = f"{count(groups['compared'], 'function')} with {source.COMPARED_LINES} lines or more"
    if groups["compared"] == survey.COMPARED_FUNCTIONS:
        compared = f"the {survey.COMPARED_FUNCTIONS:,} longest functions"
    return blocks.Section(
        "duplicates",
        "Near-duplicates",
        f"Of {compared}, {groups['functions']:,} stand in {count(groups['groups'], 'group')} "
        f"where each is at least {likeness.LIKE_FUNCTIONS:.0%} like the first: "
        f"{count(groups['repeated'], 'repeated line')}.",
        [
            blocks.Table(
                "Groups with the most repeated lines",
                ("Functions", "Members", "Alike", "Repeated lines"),
                [_group_row(group) for group in groups["largest"]],
                numbers=3,
            )
        ],
    )


def _group_row(group: likeness.Group) -> tuple[str, ...]:
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


def vocabulary(findings: Findings) -> blocks.Section:
    """Which words tell what a package is about."""
    return blocks.Section(
        "vocabulary",
        "What it is about",
        "The words that the largest packages use more than other code does.",
        [
            blocks.Table(
                "Telling words",
                ("Package", "Words"),
                [(name, " · ".join(words)) for name, words in list(findings.words.items())[:20]],
            )
        ],
    )


def left_out(found: survey.Survey) -> blocks.Section:
    """What could not be parsed, and what was not looked at."""
    problems = found["problems"]
    summary = "Every source was parsed." if found["packages"] else "There are no Python files here."
    if problems:
        summary = f"{count(len(problems), 'source')} could not be parsed and count as files only."
    if len(problems) > LISTED_PROBLEMS:
        summary += f" The first {LISTED_PROBLEMS} are listed."
    return blocks.Section(
        "left-out",
        "Left out",
        summary,
        [
            blocks.Table(
                "Sources that could not be parsed",
                ("Source", "Reason"),
                [(each["path"], each["problem"]) for each in problems[:LISTED_PROBLEMS]],
            ),
            blocks.Table(
                "Not looked at",
                ("Kind", "How many"),
                [(kind, f"{number:,}") for kind, number in found["left_out"].items()],
                numbers=1,
            ),
        ],
    )


def method(found: survey.Survey) -> blocks.Section:
    """How the figures come about."""
    return blocks.Section(
        "method",
        "How it was measured",
        f"Sources are parsed with the grammar of Python {found['python']}; nothing of them is run.",
        [
            blocks.Notes(
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
                    f"Compared are packages with {survey.COMPARED_CODE} lines of code or more, at "
                    f"most the {survey.COMPARED_PACKAGES} largest.",
                ]
            )
        ],
    )


def _functions(title: str, figure: str, ranked: list[tuple[source.Function, int]]) -> blocks.Table:
    return blocks.Table(
        title,
        ("Function", "Where", figure),
        [(f["name"], f"{f['path']}:{f['line']}", f"{value:,}") for f, value in ranked],
        numbers=1,
    )


def _bar(label: str, length: float, value: str) -> blocks.Bar:
    return blocks.Bar(label, (length,), value)


def count(number: int, noun: str) -> str:
    """The number with its noun, in the plural but after one."""
    return f"{number:,} {noun if number == 1 else _PLURALS.get(noun, noun + 's')}"
