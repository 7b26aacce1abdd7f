"""Forward passes of fused layers that are deferred until the tensor they save is packed.

A batch norm reads its input to normalise it, and the encoder reads the same input to pack it. To read it once, the
layer announces its forward pass and defers the computation until autograd saves the input:

    layer's forward            autograd                       Capture.pack            DeferredForward d
    forward.deferred = d
    function(x, d)       ->    Function.forward returns
                               d's result: memory that
                               is not yet written;
                               saves x                  ->    d.t is x          ->    d.encode(): writes the result,
                                                                                      returns x packed
                         <-    result
    forward.deferred is
    None: it has run, else
    run_deferred()       ->                                                           d.run_unfused(): writes the
    returns the result                                                                result

A ReLU does the same with its result in place of `x`. Convolutions and other dtypes use the base class, which defers
nothing: it only spares capture the search for the site.

Invariants, each with a test of its name in tests/fused/test_deferred.py:

- No code reads the result before it is written. Between `Function.forward` and the hook only autograd itself runs, and
  the layer's forward returns after `encode` or `run_unfused`.
- The hook may not be called: no gradient is needed, or the memory is packed already. Then `run_unfused` runs.
- The hook may be called for another tensor first. Then `run_unfused` runs before that tensor is packed.
- Packing may raise. The error leaves the layer's forward, no result is returned, and nothing stays announced.
- Another library's hooks may be on top. The layer checks for them immediately before, and runs unfused.
"""

from __future__ import annotations

from typing import Any

from encke.capture.facts import SiteFacts
from encke.codecs import Codec, Packed
from encke.codecs.base import EncoderState
from encke.codecs.layout import Layout


class DeferredForward:
    """Announcement of the tensor that a fused layer saves next, and of its site.

    Derived classes write the layer's result in `encode` and `run_unfused`. One of the two runs, once.
    """

    __slots__ = ("alone", "codec", "facts", "t")
    restores = False
    """Whether the layer reads the restored tensor and no codes: then backward may recompute it."""

    def __init__(self, facts: SiteFacts, codec: Codec | None, t: Any) -> None:
        self.facts = facts
        self.codec = codec
        """Codec that the policy has chosen for the site, if it was asked."""
        self.t = t
        """The tensor."""
        self.alone = False
        """Whether the layer alone reads its input, which a block has made (`ForwardPass.read_once`)."""

    def encode(self, codec: Codec, layout: Layout, length: int, key: int, state: EncoderState) -> Packed:
        """Compute the layer's result and return the tensor packed; the arguments are those of `Codec.encode_run`."""
        return codec.encode_run(self.t, layout, length, key, state)

    def run_unfused(self) -> None:
        """Compute the layer's result where nothing is packed."""


class RestoredInput(DeferredForward):
    """Announcement of an input whose restored values the layer's backward reads."""

    __slots__ = ()
    restores = True
