"""Write extreme values to every column that a role may write, and check that others still run."""
