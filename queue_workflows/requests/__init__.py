"""Describe each operation that people start once: commands, HTTP and clients are made from it.

`request` has the parts of a description, `catalog` the operations. Their nouns are imported when an
operation runs, since a client needs no database.
"""
