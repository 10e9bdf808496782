"""Pallas kernels for NVIDIA's and AMD's GPUs, for JAX arrays; compiled for both, run on neither."""
