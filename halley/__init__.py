"""Halley: train in a fraction of the memory. What autograd saves is kept compressed under an error bound that holds."""

from halley import codecs, policies
from halley.api import Handle, attach, compress
from halley.report import Report

__version__ = "0.1.0"
__all__ = ["Handle", "Report", "attach", "codecs", "compress", "policies"]
