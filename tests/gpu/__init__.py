"""Check models and guards on a real GPU: `python -m tests.gpu`."""
