"""Objectives, teacher, step loop and cell: what the project exists for. Imports no other project folder."""
