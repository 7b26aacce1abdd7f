"""Sizes from which layers get a fused function, in eager and in compiled mode alike."""

FUSE_MIN_BYTES = 1 << 20
"""Smaller inputs of batch norms and ReLUs are packed and restored by the plain hooks."""

SPLIT_CONV_MIN_BYTES = 32 << 20
"""Convolutions with smaller inputs compute their gradients in one call: two calls save memory, but no time."""

CONV_PART_BYTES = 128 << 20
"""Convolutions of volumes take larger contiguous inputs in parts of at most so many bytes: cuDNN copies them meanwhile.
"""

CAST_MIN_BYTES = 1 << 20
"""Compiled graphs keep smaller copies of weights: each recomputed cast would take a launch of its own."""
