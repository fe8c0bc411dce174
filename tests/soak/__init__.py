"""The soak: real processes under seeded faults; journal and database are compared."""
