"""Run real processes under seeded faults, then compare their journal with the database."""
