"""Layers that pack in forward or read packed data in backward; `registry.install` gives a model its own."""
