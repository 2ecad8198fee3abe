"""Rollout engines against inverse-transform oracles."""
