"""Claim jobs, run handlers, renew leases, check guards and recover crashes."""
