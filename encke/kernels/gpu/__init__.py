"""Kernels for GPU tensors, written in Triton. They decode to the values of the reference."""

from encke.kernels.gpu.bits import bits_decode, bits_encode
from encke.kernels.gpu.bounded import bounded_decode, bounded_encode, bounded_encode_within, bounded_gate
from encke.kernels.gpu.dual import dual_decode, dual_encode
from encke.kernels.gpu.logs import log_decode, log_encode
from encke.kernels.gpu.norm_backward import norm_apply, norm_sums
from encke.kernels.gpu.plans import group_plan
from encke.kernels.gpu.seeds import site_seeds

NAME = "triton"

__all__ = [
    "NAME", "bits_decode", "bits_encode", "bounded_decode", "bounded_encode", "bounded_encode_within",
    "bounded_gate", "dual_decode", "dual_encode", "group_plan", "log_decode", "log_encode", "norm_apply", "norm_sums",
    "site_seeds",
]  # fmt: skip
