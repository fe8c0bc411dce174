"""The nodes: each module is one, found by its name; its `run` says by its parameters what it takes."""
