"""Kernels for CPU tensors, compiled by numba on the first call. Bytes and values are those of the reference."""

from encke.kernels.cpu.bounded import bounded_decode, bounded_encode
from encke.kernels.cpu.dual import dual_decode, dual_encode
from encke.kernels.cpu.fields import bits_decode, bits_encode
from encke.kernels.cpu.group import group_plan
from encke.kernels.cpu.logs import log_decode, log_encode
from encke.kernels.reference import norm_apply, norm_sums, site_seeds

NAME = "numba"

__all__ = [
    "NAME", "bits_decode", "bits_encode", "bounded_decode", "bounded_encode",
    "dual_decode", "dual_encode", "group_plan", "log_decode", "log_encode", "norm_apply", "norm_sums", "site_seeds",
]  # fmt: skip
