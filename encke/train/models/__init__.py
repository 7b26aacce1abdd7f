"""Networks that recipes name."""
