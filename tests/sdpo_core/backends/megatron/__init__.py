"""Tests of the `megatron` backend; all but `test_names` need the extra of that name."""
