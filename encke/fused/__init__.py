"""Layers that pack in forward or read packed data in backward."""
