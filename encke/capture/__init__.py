"""Code between autograd and the codecs."""
