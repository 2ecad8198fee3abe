"""Policies (trainable models): the protocol, the table, one file a backend."""
