"""Provide what every process needs: threads, child processes, signals, logs and printed text.

No other code of the package starts a thread.
"""
