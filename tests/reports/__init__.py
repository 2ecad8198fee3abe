"""Tests of reports/."""
