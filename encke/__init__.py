"""Encke: train in a fraction of the memory. What autograd saves is kept compressed under an error bound that holds."""

from encke import codecs, policies
from encke.api import Handle, attach, compress
from encke.report import Report

__version__ = "0.2.0"
__all__ = ["Handle", "Report", "attach", "codecs", "compress", "policies"]
