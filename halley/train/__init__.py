"""Training: the models that Halley's accuracy is measured with."""
