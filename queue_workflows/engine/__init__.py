"""Change the state of runs, jobs and workers: one function a transition. None opens a connection."""
