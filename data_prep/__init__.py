"""Data sets: source shapes to canonical problems, grading, feedback, splits, manifest."""
