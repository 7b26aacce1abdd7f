"""Packing inside the graphs of torch.compile."""
