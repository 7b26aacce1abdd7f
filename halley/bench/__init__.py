"""Measurements, always beside the alternatives in the same run."""


class UsageError(ValueError):
    """A request that cannot be fulfilled as given; the command line shows its message as one line."""
