"""Measure a worker's own use of the machine."""
