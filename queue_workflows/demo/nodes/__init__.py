"""The nodes, one a module, found by its name; what `run` takes is told by its parameters."""
