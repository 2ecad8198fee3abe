"""Declarations: profiles, arms, experiments."""
