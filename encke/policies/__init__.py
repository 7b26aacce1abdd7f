"""Policies decide, for each site, which codec with which setting."""

from encke.policies.comet.policy import Comet
from encke.policies.division import Division
from encke.policies.fixed import Fixed

__all__ = ["Comet", "Division", "Fixed"]
