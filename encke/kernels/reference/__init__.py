"""Kernels in plain torch: slow, readable, and the oracle for the others. docs/design.md explains the formats."""

from encke.kernels.reference.bounded import bounded_decode, bounded_encode
from encke.kernels.reference.dual import dual_decode, dual_encode
from encke.kernels.reference.fields import bits_decode, bits_encode
from encke.kernels.reference.group import group_plan
from encke.kernels.reference.logs import log_decode, log_encode
from encke.kernels.reference.norm import norm_apply, norm_sums
from encke.kernels.reference.seeds import site_seeds

NAME = "reference"

__all__ = [
    "NAME", "bits_decode", "bits_encode", "bounded_decode", "bounded_encode",
    "dual_decode", "dual_encode", "group_plan", "log_decode", "log_encode", "norm_apply", "norm_sums", "site_seeds",
]  # fmt: skip
