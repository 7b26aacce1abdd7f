"""Training: the models that Encke's accuracy is measured with."""
