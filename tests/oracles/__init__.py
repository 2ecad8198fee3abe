"""Slow float64 re-derivations from the source equations; they import nothing of ours."""
