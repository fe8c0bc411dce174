"""Provide what every process needs: threads, child processes, signals, logs and printed text.

Nothing else starts a thread.
"""
