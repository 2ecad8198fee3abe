"""Rollout engines: the protocol, the table, the local engine."""
