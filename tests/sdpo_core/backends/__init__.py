"""Backends against full forwards and hand-made gradients."""
