"""Thin Prefect tasks, Ray jobs, tracking."""
