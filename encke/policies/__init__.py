"""Policies decide, for each site, which codec with which setting."""

from encke.policies.base import AdaptivePolicy, Policy
from encke.policies.comet.policy import Comet
from encke.policies.division import Division
from encke.policies.fixed import Fixed
from encke.policies.presets import PRESETS, preset

__all__ = ["PRESETS", "AdaptivePolicy", "Comet", "Division", "Fixed", "Policy", "preset"]
