"""Transactions behind the API: claim and record by hand, requeue, change many jobs, prune."""
