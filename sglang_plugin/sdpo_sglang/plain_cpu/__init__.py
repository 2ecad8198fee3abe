"""SGLang on a CPU without AMX: platform and seeded sampling with the kernels of torch alone."""
