"""Integrations with training libraries. Each module imports its library only when it is used."""

from encke.integrations.logits import ChunkedLoss, chunk_loss

__all__ = ["ChunkedLoss", "chunk_loss"]
