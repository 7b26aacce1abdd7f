"""Encke: train PyTorch models in a fraction of the memory, with the error of every weight's gradient under control.

Tensors that autograd saves are kept compressed from forward to backward. By default they take 2 to 8 bits per value,
unbiased, and a policy measures the training and sets the bits of each layer so that the error of every weight's
gradient stays small beside its momentum. A training only needs `encke.attach(model, optimizer=optimizer)`.
"""

from encke import codecs, policies
from encke.api import Handle, attach, compress
from encke.capture.needs import register_reader
from encke.capture.sites import Site
from encke.codecs import Codec, Packed
from encke.estimation import Estimate, estimate
from encke.policies.base import AdaptivePolicy, Policy
from encke.report import Report

__version__ = "0.2.0"
__all__ = [
    "AdaptivePolicy",
    "Codec",
    "Estimate",
    "Handle",
    "Packed",
    "Policy",
    "Report",
    "Site",
    "attach",
    "codecs",
    "compress",
    "estimate",
    "policies",
    "register_reader",
]


def __dir__() -> list[str]:
    """Return the public names, without submodules that were imported along with them."""
    return [*__all__, "__version__"]
