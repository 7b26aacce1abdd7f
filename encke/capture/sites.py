"""Sites: where a tensor is saved (layer, operation, slot), and what its reader needs of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from encke.codecs.base import EncoderState

Need = Literal["weight", "shape", "mask", "sign", "range", "exact", "attention", "logprob", "lossy"]


@dataclass(eq=False, slots=True)
class Site:
    """One place where the forward pass saves a tensor; what a policy keys its settings by."""

    layer: str
    index: int
    signature: tuple[Any, ...]
    operation: str = "?"
    slot: str = "?"
    need: Need = "exact"
    window: tuple[tuple[int, ...], ...] | None = None
    """Kernel, stride, padding and dilation, if this is where a max-pool saves its indices."""
    pair: int = -1
    """Index, within the same layer, of the site that the window's input is saved at."""
    high: int | None = None
    """A known limit of the integers saved here."""
    readers: set[Site] = field(default_factory=set)
    """Sites that later save the same memory: the strictest of them decides."""
    hint: EncoderState = field(default_factory=EncoderState)
    place: str = ""
    """Layer, call of the layer within a forward pass, and index within the call: the same in every run."""
    number: int = 0
    """A hash of the place: it varies stochastic rounding from site to site."""
    stable: bool = True
    """False once another operation than the one learnt has read from here: then every pass learns it anew."""
    function: Any = None
    """What runs in the operation's place (encke/fused); False if nothing does, None if that was not asked yet."""

    @property
    def stays(self) -> bool:
        """Whether packing what must be exact gains nothing: floats that did not shrink last time, and labels.

        To find the range of labels, a GPU would have to be waited for.
        """
        return self.hint.share >= 1 or self.operation.startswith("NllLoss")

    @property
    def name(self) -> str:
        return f"{self.layer or '(root)'}:{self.operation}.{self.slot}"

    def __repr__(self) -> str:
        return f"Site({self.name}, {self.need})"
