"""Sizes from which layers are worth a function of our own, in eager and in compiled mode alike."""

FUSE_MIN_BYTES = 1 << 20
"""Smaller inputs of batch norms and ReLUs are packed and restored by the plain hooks."""

SPLIT_CONV_MIN_BYTES = 32 << 20
"""Convolutions with smaller inputs compute their gradients in one call: two calls are a matter of memory alone."""

CAST_MIN_BYTES = 1 << 20
"""Smaller copies of weights are kept in compiled graphs: to make them again would take a launch each."""
