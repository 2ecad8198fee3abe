"""The `megatron` backend: a model cut over the tensor, context and data parallel processes of megatron-core."""
