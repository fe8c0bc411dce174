"""Expand workflows, walk graphs and plan the next rows, as pure functions."""
