"""The sweep: write extreme values to every column that a role may write, and check the others."""
