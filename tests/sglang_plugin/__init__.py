"""Tests of the server package that need no SGLang."""
