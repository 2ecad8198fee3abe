"""Tests of `experiments/`."""
