"""Data sets and how they are read."""
