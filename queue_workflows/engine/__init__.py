"""Change the state of runs, jobs and workers: one function a transition, on a given connection."""
