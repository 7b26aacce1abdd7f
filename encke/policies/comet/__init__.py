"""Adaptive control of the compression error (COMET, VLDB'22)."""

from encke.policies.comet.policy import Comet

__all__ = ["Comet"]
