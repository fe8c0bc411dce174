"""Pure graph logic: expand a workflow, walk it, decide which rows come next."""
