"""Errors that the command line shows as one line."""


class UsageError(ValueError):
    """A request that cannot be fulfilled as given; the command line shows its message as one line."""
