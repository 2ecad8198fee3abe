"""Algorithms against dense oracles."""
