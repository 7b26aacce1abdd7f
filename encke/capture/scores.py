"""Bits for queries and keys of attention, by the score error they cause.

A score is scale * (q . k). Errors of q and k that are independent for each value give it an error of variance

    scale^2 * (|k|^2 * var_q + |q|^2 * var_k)

with the squares of the norms averaged over rows, and the variances measured by packing a sample. An error of 0.1
changes a weight of the softmax by a tenth. Queries and keys get the fewest bits that keep the error within that, and
are exact if 8 bits are not enough. They are measured when their reader becomes known, before they are packed for the
first time, and again in collection steps, as attention becomes sharper while a model learns. These measurements never
wait for the GPU. Queries and keys that were not measured have 8 bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from encke.capture.attention import raw_saved
from encke.capture.needs import MIN_BITS
from encke.capture.saved import Saved
from encke.capture.sites import Site
from encke.codecs import Codec
from encke.codecs.exact import Keep
from encke.policies.base import Policy
from encke.torch_internals import saved_setting

SCORE_ERROR = 0.1
"""Largest RMS error of a score."""
RATES = (2, 3, 4, 8)
SAFE = 8
"""Bits of queries and keys that were not measured."""
EXACT = 0
"""Marks a query or key for which no rate is enough."""
SAMPLE = 1 << 20
"""Number of values of a tensor that are packed for measuring, or one sample of the batch if that is more."""
EVERY = 1000
"""Passes between measurements for policies without collection steps, once the early ones (10, 20, 40, ...) are over."""


class Figures(NamedTuple):
    """Mean square of a query or key, and mean square of its error at each of `RATES`."""

    power: float
    errors: tuple[float, ...]


class Call(NamedTuple):
    """One use of attention."""

    query: str
    """Name of the query's figures: the site's place, or another name if the query is not packed."""
    key: str
    factor: float
    """Square of the scale, times the values in a row."""


class Scores:
    """Bits of the queries and keys of one model."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.bits: dict[str, int] = {}
        """Decided bits, by place; 0 means exact."""
        self._calls: dict[str, Call] = {}
        self._figures: dict[str, Figures] = {}
        self._measured: dict[str, Tensor] = {}
        """Figures that are not numbers yet, by name."""
        self._in_flight: list[tuple[str, Tensor, torch.cuda.Event]] = []
        """Figures being copied to the host, each with its name and the event that follows the copy."""
        self._refined: dict[str, tuple[Codec, int, Codec]] = {}

    def codec(self, site: Site, lasting: bool = False) -> Codec:
        """Return the policy's codec for a site, refined where the site's reader needs more bits.

        Args:
            site: Where a tensor is saved.
            lasting: Whether the codec cannot change soon.
        """
        codec = self.policy.choose_lasting(site) if lasting else self.policy.choose(site)
        if site.need == "attention":
            bits = self.bits.get(site.place, SAFE)
        else:
            floor = MIN_BITS.get((site.operation, site.slot))
            if floor is None:
                return codec
            bits = floor if codec.unbiased else 8
        known = self._refined.get(site.place)
        if known is None or known[0] is not codec or known[1] != bits:
            refined = codec if codec.exact else codec.refined(min_bits=bits) if bits != EXACT else None
            known = self._refined[site.place] = (codec, bits, refined or Keep())
        return known[2]

    def due(self, step: int) -> bool:
        """Return whether a policy without collection steps measures in this pass."""
        doubled = step // 10
        early = step < EVERY and step % 10 == 0 and doubled & (doubled - 1) == 0
        return early or step % EVERY == 0

    def learn(self, node: Any, savings: Mapping[str, Saved]) -> None:
        """Record the query and key of a node of attention that have just become known and are still unpacked.

        Args:
            node: The node.
            savings: Tensors that the node saved through our hooks, by slot.
        """
        packed = [slot for slot in ("query", "key") if slot in savings and savings[slot].site.need == "attention"]
        if not packed:
            return
        names: list[str] = []
        for slot in ("query", "key"):
            if slot in packed:
                saved = savings[slot]
                names.append(saved.site.place)
                if saved.site.place not in self.bits and saved.cell is not None and saved.cell.held is not None:
                    self.measure(saved.site, saved.layout.restore(saved.cell.held))
                continue
            # Kept unpacked, because it is small or a weight.
            names.append(f"{savings[packed[0]].site.place}, its {slot}")
            raw = raw_saved(node, slot)
            t = raw.tensor if isinstance(raw, Saved) else raw[0]
            if t is not None:
                power = mean_square(t.detach())
                self._measured[names[-1]] = torch.stack([power, *[0 * power] * len(RATES)])
        scale, width = saved_setting(node, "scale"), savings[packed[0]].layout.size[-1]
        call = Call(names[0], names[1], 1.0 if scale is None else scale**2 * width)
        self._calls |= dict.fromkeys(names, call)
        if any(name not in self.bits for name in names):
            self.decide({name: t.tolist() for name, t in self._take().items()})

    def measure(self, site: Site, t: Tensor) -> None:
        """Measure a query or key before it is packed."""
        codec = self.policy.choose(site)
        if codec.exact or not codec.takes(t.dtype) or codec.refined(min_bits=SAFE) is None:
            return
        with torch.no_grad():
            t = t.detach()
            sample = t[: max(1, SAMPLE * t.shape[0] // max(t.numel(), 1))]
            errors = [error_power(codec.refined(min_bits=bits) or codec, sample) for bits in RATES]
            self._measured[site.place] = torch.stack([mean_square(t), *errors])

    def end_pass(self) -> None:
        """Send the measurements of a pass to the host, without waiting for them."""
        measured = self._take()
        self.decide({name: t.tolist() for name, t in measured.items() if t.device.type != "cuda"})
        for name, t in measured.items():
            if t.device.type == "cuda":
                event = torch.cuda.Event()
                copy = t.to("cpu", non_blocking=True)
                event.record(torch.cuda.current_stream(t.device))
                self._in_flight.append((name, copy, event))

    def settle(self, wait: bool = False) -> None:
        """Decide by the figures that have arrived; with `wait`, by all."""
        arrived = {}
        while self._in_flight and (wait or self._in_flight[0][2].query()):
            name, copy, event = self._in_flight.pop(0)
            if wait:
                event.synchronize()
            arrived[name] = copy.tolist()
        self.decide(arrived)

    def decide(self, measured: Mapping[str, list[float]]) -> None:
        """Set the bits of all calls of attention with new figures."""
        for name, (power, *errors) in measured.items():
            self._figures[name] = Figures(power, tuple(errors))
        for call in {self._calls[name] for name in measured if name in self._calls}:
            query, key = self._figures.get(call.query), self._figures.get(call.key)
            if query is not None and key is not None:
                within = [variance <= SCORE_ERROR**2 for variance in score_variances(query, key, call.factor)]
                bits = RATES[within.index(True)] if True in within else EXACT
                self.bits[call.query] = self.bits[call.key] = bits

    def load(self, bits: Any) -> None:
        """Take over the bits that another run has decided.

        Raises:
            ValueError: The argument is not a dictionary of such bits.
        """
        if not isinstance(bits, dict) or not all(value in (EXACT, *RATES) for value in bits.values()):
            raise ValueError(f"bits of queries and keys must be 2, 3, 4, 8 or 0 (exact) by place, got {bits!r}")
        self.bits = dict(bits)

    def _take(self) -> dict[str, Tensor]:
        measured, self._measured = self._measured, {}
        return measured


def score_variances(query: Figures, key: Figures, factor: float) -> list[float]:
    """Return the variance of a score's error at each of `RATES`; `factor` is `Call.factor`."""
    pairs = zip(query.errors, key.errors, strict=True)
    return [factor * (key.power * of_query + query.power * of_key) for of_query, of_key in pairs]


def mean_square(t: Tensor) -> Tensor:
    """Return the mean square of a tensor's values."""
    kind = torch.float64 if t.dtype == torch.float64 else torch.float32
    return torch.linalg.vector_norm(t, dtype=kind).square() / max(t.numel(), 1)


def error_power(codec: Codec, t: Tensor) -> Tensor:
    """Return the mean square of a codec's error."""
    return mean_square(codec.encode(t).decode() - t)
