"""List the modules that are mutated, the tests that must notice, and the operators."""

from __future__ import annotations

_PLAN = ("unit/test_dag_plan_edges.py", "unit/test_dag_plan.py")
_GRAPH = (
    "unit/test_frozen_definition.py",
    "unit/test_run_steps.py",
    "unit/test_dag_graph_edges.py",
    "unit/test_dag_graph.py",
)
_DEFINITION = ("unit/test_dag_definition.py",)
_POLICY = ("unit/test_policy_edges.py", "unit/test_policy.py")
_BRANCHES = ("unit/test_branches_edges.py", "unit/test_branches.py")
_LOOPS = ("unit/test_loops_edges.py", "unit/test_loops.py")
_MAPS = ("unit/test_map_steps_edges.py", "unit/test_map_steps.py")
_ANSWERS = ("unit/test_answers_edges.py", "unit/test_answers.py")
_VALUES = ("unit/test_document_values_edges.py", *_DEFINITION)
_TYPES = ("unit/test_typed_values_edges.py", "unit/test_task_args.py")
_REFS = ("unit/test_refs_edges.py", "unit/test_refs.py")
_GUARDS = ("unit/test_guards_edges.py", "unit/test_guards.py")
_SCHEDULE = ("unit/test_schedule_edges.py", "unit/test_schedule.py")
_EXPRESSION = ("unit/test_expression_edges.py", "integration/test_expression.py")
TARGETS = {
    "dag/plan.py": (*_PLAN, *_BRANCHES, *_LOOPS),
    "dag/graph.py": (*_GRAPH, *_PLAN, *_BRANCHES, *_MAPS, *_DEFINITION),
    "dag/policy.py": _POLICY,
    "dag/items.py": _MAPS,
    "dag/branches.py": _BRANCHES,
    "dag/loops.py": _LOOPS,
    "dag/answers.py": _ANSWERS,
    "dag/document_values.py": _VALUES,
    "dag/typed_values.py": _TYPES,
    "refs/__init__.py": (*_REFS, *_LOOPS, *_MAPS),
    "worker/guards.py": _GUARDS,
    "worker/claim_times.py": ("unit/test_claim_times_edges.py", "unit/test_claim_times.py"),
    "schedule/timetable.py": _SCHEDULE,
    "schedule/expression.py": ("unit/test_schedule_edges.py", *_EXPRESSION),
    "runtime/clock.py": ("unit/test_durations_edges.py", "unit/test_cli_parts.py"),
}
"""Modules of `queue_workflows`, and files of `tests`. A file that does not exist is left out."""

_COMPARISONS = (
    # Three replacements of each order differ the most; whoever kills them kills the other ones.
    "Lt_LtE", "Lt_NotEq", "Lt_GtE", "LtE_Lt", "LtE_Eq", "LtE_Gt",
    "Gt_GtE", "Gt_NotEq", "Gt_LtE", "GtE_Gt", "GtE_Eq", "GtE_Lt",
    # `==` as `<=` or `is` has no meaning for most values here, and `is` as `==` is the same.
    "Eq_NotEq", "NotEq_Eq", "Is_IsNot", "IsNot_Is",
)  # fmt: skip
_BINARY = (  # one replacement of each, since the others raise TypeError or die with it
    "Add_Sub", "Sub_Add", "Mul_Div", "Div_Mul", "FloorDiv_Mul", "Mod_Mul", "Pow_Mul",
    "BitOr_BitAnd", "BitAnd_BitOr", "LShift_RShift",
)  # fmt: skip
OPERATORS = (
    *(f"ReplaceComparisonOperator_{name}" for name in _COMPARISONS),
    *(f"ReplaceBinaryOperator_{name}" for name in _BINARY),
    "ReplaceUnaryOperator_USub_UAdd", "ReplaceUnaryOperator_Delete_Not", "AddNot",
    "ReplaceTrueWithFalse", "ReplaceFalseWithTrue", "ReplaceAndWithOr", "ReplaceOrWithAnd",
    "ReplaceBreakWithContinue", "ReplaceContinueWithBreak",
    "NumberReplacer", "ZeroIterationForLoop", "Swap",
)  # fmt: skip
"""The names of cosmic-ray, and `Swap` of `mutants`.

Left out: `RemoveDecorator`, since a decorator here is a property, an overload or a cache, and
`ExceptionReplacer`, which fails for names with a dot.
"""
