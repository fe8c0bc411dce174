"""Change the pure modules in one place at a time, and see whether their tests notice.

`python -m tests.mutation` does it for all of `targets.TARGETS`; cosmic-ray makes the mutants.
"""
