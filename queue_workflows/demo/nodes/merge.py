"""Node: put the parts together, and think of what a person may want to see first."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from queue_workflows.demo import files, source, survey


def run(
    sources: Path, parts: list[str], out: Path, status_callback: Callable[[float], object]
) -> dict[str, Any]:
    """Write `survey.json`, and what is to be compared: `functions.json` and `words.json`."""
    all_files: list[source.File] = []
    functions: list[source.Function] = []
    words: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for number, part in enumerate(parts, 1):
        measured = files.read(Path(part) / "measured.json")
        all_files += measured["files"]
        functions += measured["functions"]
        for package, counts in measured["words"].items():
            words[package].update(counts)
        status_callback(number / len(parts))
    made = survey.make_survey(files.read(sources), all_files, functions)
    files.write(out / "survey.json", made)
    files.write(out / "functions.json", survey.compared_functions(functions))
    files.write(out / "words.json", {name: words[name] for name in survey.compared_packages(made)})
    return {"survey": str(out), "focuses": survey.focuses(made)}
