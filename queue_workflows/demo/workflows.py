"""The workflow and its pipelines: plain data, which could as well be JSON or YAML files.

survey: list → 24 parts → merge ─┬─ compare: packages, map, functions, words ─┬─ report: write
                                 └─ choose_focus: a person answers ───────────┘
"""

from __future__ import annotations

from typing import Any

from queue_workflows.demo import models

PARTS = [f"part-{number:02}" for number in range(24)]
"""A graph is fixed before the folder is known: each part takes its share of the packages."""

CODE_REPORT = {
    "name": "code_report",
    "steps": [
        {
            "id": "survey",
            "kind": "pipeline",
            "pipeline": "survey",
            "inputs": {"folder": {"$from": "folder"}},
        },
        {
            "id": "compare",
            "kind": "pipeline",
            "pipeline": "compare",
            "depends_on": ["survey"],
            "inputs": {"survey": {"$from": "survey/merge.survey"}},
        },
        {
            "id": "choose_focus",
            "kind": "input",
            "depends_on": ["survey"],
            "widget": "turnout",
            "prompt": "What should the report lead with?",
            "turnout_options": {"$from": "survey/merge.focuses"},
            "target": "focus",
        },
        {
            "id": "report",
            "kind": "pipeline",
            "pipeline": "report",
            "depends_on": ["compare", "choose_focus"],
            "inputs": {
                "survey": {"$from": "survey/merge.survey"},
                "pairs": {"$from": "compare/packages.pairs"},
                "positions": {"$from": "compare/map.positions"},
                "groups": {"$from": "compare/functions.groups"},
                "words": {"$from": "compare/words.words"},
                "focus": {"$from": "choose_focus.focus"},
            },
        },
    ],
}

SURVEY = {
    "name": "survey",
    "nodes": [
        {
            "id": "list",
            "node": "list_sources",
            "inputs": [{"name": "folder", "from": "pipeline.folder"}],
        },
        *(
            {
                "id": part,
                "node": "measure",
                "depends_on": ["list"],
                "inputs": [
                    {"name": "sources", "from": "list.listing.json"},
                    {"name": "part", "from": f"pipeline._implicit({number})"},
                    {"name": "parts", "from": f"pipeline._implicit({len(PARTS)})"},
                ],
            }
            for number, part in enumerate(PARTS)
        ),
        {
            "id": "merge",
            "node": "merge",
            "depends_on": PARTS,
            "inputs": [
                {"name": "sources", "from": "list.listing.json"},
                {"name": "parts", "from": f"pipeline._siblings([{', '.join(PARTS)}])"},
            ],
        },
    ],
}


def _on_gpu(node_id: str, node: str) -> dict[str, Any]:
    """A node for the gpu queue; the four share a model, so that a worker loads it once."""
    return {
        "id": node_id,
        "node": node,
        "gpu": True,
        "model": models.CODE_WORDS,
        "inputs": [{"name": "survey", "from": "pipeline.survey"}],
    }


COMPARE = {
    "name": "compare",
    "nodes": [
        _on_gpu("packages", "similar_packages"),
        _on_gpu("map", "package_map"),
        _on_gpu("functions", "similar_functions"),
        _on_gpu("words", "package_words"),
    ],
}

REPORT = {
    "name": "report",
    "nodes": [
        {
            "id": "write",
            "node": "write_report",
            "inputs": [
                {"name": name, "from": f"pipeline.{name}"}
                for name in ("survey", "pairs", "positions", "groups", "words", "focus")
            ],
        }
    ],
}

WORKFLOWS: dict[str, dict[str, Any]] = {"code_report": CODE_REPORT}
PIPELINES: dict[str, dict[str, Any]] = {"survey": SURVEY, "compare": COMPARE, "report": REPORT}


def load_workflow(name: str) -> dict[str, Any]:
    """The workflow; a KeyError tells the engine that there is none of that name."""
    return WORKFLOWS[name]


def load_pipeline(name: str) -> dict[str, Any]:
    """The pipeline; a KeyError tells the engine that there is none of that name."""
    return PIPELINES[name]
