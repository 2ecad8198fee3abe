"""Bugs that others had, put into copies of our code: each must make a test fail."""
