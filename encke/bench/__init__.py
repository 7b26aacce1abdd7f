"""Measurements, always beside the alternatives in the same run."""
