"""Compute the instants of a schedule and which of them are due; pure functions."""
