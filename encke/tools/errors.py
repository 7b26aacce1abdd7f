"""Errors that the command line shows as one line."""

OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "bad_alloc", "cannot allocate memory", "could not create")
"""Phrases of libraries that have run out of memory, in lower case."""


class UsageError(ValueError):
    """A request that cannot be fulfilled as given; the command line shows its message as one line."""


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def out_of_memory(error: BaseException) -> bool:
    """Return whether an error, of torch or of a library below it, means out of memory."""
    named = type(error).__name__ in ("MemoryError", "OutOfMemoryError")
    # oneDNN raises this for an unsupported primitive as well.
    text = str(error).lower().replace("could not create a primitive descriptor", "")
    return named or any(words in text for words in OUT_OF_MEMORY)
