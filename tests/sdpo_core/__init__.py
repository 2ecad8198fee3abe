"""Tests of sdpo_core."""
