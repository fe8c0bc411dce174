"""List the SQL functions that a submitter's role may call, and those that no role may call.

Of the others, a role for `work` may call all, and every role those that only read. `filled` puts
both lists into `sql/privileges.sql`, which grants and revokes the rights.
"""

from __future__ import annotations

SUBMIT = ("queue_workflows_enqueue", "queue_workflows_put_jobs", "queue_workflows_hold_node")
INTERNAL = (
    "queue_workflows_admit", "queue_workflows_alert", "queue_workflows_ask_partition",
    "queue_workflows_ask_turn",
    "queue_workflows_audit", "queue_workflows_charge_steps", "queue_workflows_check_payload",
    "queue_workflows_demand", "queue_workflows_end_parent_node",
    "queue_workflows_forget_steps", "queue_workflows_give_turns",
    "queue_workflows_give_turns_singly",
    "queue_workflows_leave_partition", "queue_workflows_limit_gate", "queue_workflows_partitions",
    "queue_workflows_rate_room", "queue_workflows_refuse", "queue_workflows_release_key",
    "queue_workflows_take_locks", "queue_workflows_wake_jobs",
)  # fmt: skip
"""Functions that only functions of the tables' owner call: nobody is granted them."""


def filled(text: str) -> str:
    """Return `sql/privileges.sql` with both lists in the place of its empty arrays."""
    for name, functions in (("submit", SUBMIT), ("internal", INTERNAL)):
        text = text.replace(f"'{{{name}}}'", f"'{{{','.join(functions)}}}'")
    return text
