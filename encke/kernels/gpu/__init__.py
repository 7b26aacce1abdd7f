"""Kernels for GPU tensors, written in Triton."""
