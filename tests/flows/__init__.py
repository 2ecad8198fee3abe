"""Tests of `flows/`."""
