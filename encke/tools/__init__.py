"""Helpers shared by all commands."""
