"""The sweep: extreme values in every column that a role may write, and what they do to others."""
