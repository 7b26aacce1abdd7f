"""SiLU, which blocks compute together with the batch norm in front of it (block.py)."""

from __future__ import annotations

from typing import Any

from torch import nn

from encke.capture.facts import SiteFacts
from encke.fused.base import LayerForward


class SiluForward(LayerForward):
    """Run `nn.SiLU` as it is. On its own it reads packed values as the plain hooks restore them."""

    layers = (nn.SiLU,)

    def function(self, facts: SiteFacts) -> Any:
        """Return None: no function runs in its place."""
        return None
