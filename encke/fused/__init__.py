"""Fused layers, which pack in forward or read packed data in backward; `registry.install` installs them in a model."""
