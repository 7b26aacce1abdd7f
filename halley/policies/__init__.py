"""Policies decide, for each site, which codec with which setting."""

from halley.policies.comet import Comet
from halley.policies.division import Division
from halley.policies.fixed import Fixed

__all__ = ["Comet", "Division", "Fixed"]
