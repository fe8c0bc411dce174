"""Run the transactions behind the API: manual claims, requeues, changes of many jobs, pruning."""
