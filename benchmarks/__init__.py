"""Measure what the engine costs beside a bare psycopg loop of the same run. Not shipped."""
