"""Policies decide, for each site, which codec with which setting."""

from halley.policies.fixed import Fixed

__all__ = ["Fixed"]
