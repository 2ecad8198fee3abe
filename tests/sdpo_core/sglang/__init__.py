"""Tests of the SGLang server, its client and what is built on them."""
