"""Describe each operation that people start, once for commands, HTTP and clients.

`request` has the parts of a description, `catalog` the operations. The noun of an operation is
imported when the operation runs, since a client needs no database.
"""
