"""Kernels for CPU tensors, compiled by numba."""
