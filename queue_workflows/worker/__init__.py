"""Worker internals: claim jobs, run handlers, renew leases, check guards, recover crashes."""
