"""Tests of sdpo_core.objectives."""
