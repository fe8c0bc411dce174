"""Adding up: from the figures of sources to those of packages and of the whole folder."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Final, Literal, TypedDict

from queue_workflows.demo import listing, source

RANKED = 12
"""How many functions the report names in a ranking."""

FOCUSES: Final = ("size", "complexity", "documentation", "imports")
"""What a report can lead with; the first is what a person in a hurry gets."""

COMPARED_CODE = 20
"""Lines of code below which a package is too small to be like another."""
COMPARED_PACKAGES = 300
COMPARED_FUNCTIONS = 20_000
"""The largest ones, so that a huge folder takes seconds more and not hours."""

COMPLEXITY_STEPS = (1, 2, 5, 10, 20, 50)
"""Upper ends of the classes in the histogram; what is beyond makes one more class."""


class Package(source.Figures):
    """One package in numbers. `imports`: per package that it imports, by how many of its files."""

    name: str
    files: int
    imports: dict[str, int]
    imported_by: int


class Problem(TypedDict):
    """A source that is not parsed, and why."""

    path: str
    problem: str


class Survey(TypedDict):
    """All that the report tells without a model; `packages` in the order of their names."""

    folder: str
    python: str
    left_out: dict[str, int]
    total: Package
    packages: list[Package]
    histogram: list[int]
    longest: list[source.Function]
    most_complex: list[source.Function]
    problems: list[Problem]


class Option(TypedDict):
    """A choice that a person is offered."""

    label: str
    value: str


def make_survey(
    found: listing.Listing, files: list[source.File], functions: list[source.Function]
) -> Survey:
    """The survey of a folder out of what was measured, in whatever order that came."""
    files = sorted(files, key=lambda file: file["path"])
    packages = {name: _empty(name) for name in sorted({file["package"] for file in files})}
    total = _empty("")
    modules = Modules(files)
    for file in files:
        _add(packages[file["package"]], file)
        _add(total, file)
        linked = {modules.package_of(name) for name in file["imports"]} - {file["package"]}
        for name in sorted(name for name in linked if name):
            links = packages[file["package"]]["imports"]
            links[name] = links.get(name, 0) + 1
    for package in packages.values():
        for name in package["imports"]:
            packages[name]["imported_by"] += 1
    return Survey(
        folder=found["folder"],
        python=found["python"],
        left_out=found["left_out"],
        total=total,
        packages=list(packages.values()),
        histogram=_histogram(functions),
        longest=_ranking(functions, "lines"),
        most_complex=_ranking(functions, "complexity"),
        problems=[Problem(path=f["path"], problem=f["problem"]) for f in files if f["problem"]],
    )


class Modules:
    """Which package of the folder provides what an import names."""

    def __init__(self, files: Iterable[source.File]) -> None:
        self._packages = {file["module"]: file["package"] for file in files}
        containers = {file["module"] for file in files if file["path"].endswith("__init__.py")}
        for module, package in sorted(self._packages.items()):
            self._packages.setdefault(_importable(module, containers), package)

    def package_of(self, name: str) -> str | None:
        """The package of a dotted name's longest known beginning; None for what is elsewhere."""
        while name and name not in self._packages:
            name = name.rpartition(".")[0]
        return self._packages.get(name)


def _importable(module: str, containers: set[str]) -> str:
    """The name without leading folders that are no packages, such as `src`."""
    parts = module.split(".")
    start = len(parts) - (module not in containers)
    while start and ".".join(parts[:start]) in containers:
        start -= 1
    is_inside = start < len(parts) - 1 or module in containers
    return ".".join(parts[start:]) if is_inside else module


def _empty(name: str) -> Package:
    return Package(**source.no_figures(), name=name, files=0, imports={}, imported_by=0)


def _add(package: Package, file: source.File) -> None:
    package["files"] += 1
    for figure in source.FIGURES:
        package[figure] += file[figure]


def _histogram(functions: Iterable[source.Function]) -> list[int]:
    counts = [0] * (len(COMPLEXITY_STEPS) + 1)
    for complexity, times in Counter(f["complexity"] for f in functions).items():
        counts[sum(complexity > step for step in COMPLEXITY_STEPS)] += times
    return counts


def _ranking(
    functions: Iterable[source.Function], figure: Literal["lines", "complexity"]
) -> list[source.Function]:
    def place(function: source.Function) -> tuple[int, str, int]:
        return -function[figure], function["path"], function["line"]

    return sorted(functions, key=place)[:RANKED]


def compared_packages(survey: Survey) -> list[str]:
    """The packages that are worth comparing, largest first."""
    large = [package for package in survey["packages"] if package["code"] >= COMPARED_CODE]
    large.sort(key=lambda package: -package["code"])
    return [package["name"] for package in large[:COMPARED_PACKAGES]]


def compared_functions(functions: Iterable[source.Function]) -> list[source.Function]:
    """The functions that are worth comparing, in the order of the sources."""
    comparable = [function for function in functions if function["words"]]
    comparable.sort(key=lambda function: -function["lines"])
    comparable = comparable[:COMPARED_FUNCTIONS]
    return sorted(comparable, key=lambda function: (function["path"], function["line"]))


def focuses(survey: Survey) -> list[Option]:
    """What the report can lead with, each with the first thing that it has to tell."""
    total, packages = survey["total"], survey["packages"]
    if not packages:
        return [Option(label=f"{name.capitalize()}: nothing found", value=name) for name in FOCUSES]
    largest = max(packages, key=lambda package: package["code"])
    needed = max(packages, key=lambda package: package["imported_by"])
    mean = ratio(total["complexity"], total["functions"])
    knotty = max((function["complexity"] for function in survey["most_complex"]), default=0)
    share = ratio(total["documented"], total["public"])
    told = {
        "size": f"{largest['name']} is the largest package, {largest['code']:,} lines of code",
        "complexity": f"{mean:.1f} for the average function, {knotty:,} for one",
        "documentation": f"{share:.0%} of the public definitions have a docstring",
        "imports": f"{needed['name']} is imported by {needed['imported_by']:,} "
        f"of {len(packages) - 1:,} other packages",
    }
    return [Option(label=f"{name.capitalize()}: {told[name]}", value=name) for name in FOCUSES]


def ratio(part: float, whole: float) -> float:
    """The part over the whole; 0 of nothing."""
    return part / whole if whole else 0.0
