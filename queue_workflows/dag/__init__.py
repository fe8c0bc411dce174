"""Pure graph logic: expand a workflow, walk it, and plan the next rows."""
