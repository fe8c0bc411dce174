"""Claim, record, hand back, reclaim and admit jobs of both families."""
