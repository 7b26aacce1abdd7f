"""Plans of blocks, made from what their layers have decided in the pass before."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from encke.capture.facts import SiteFacts, SiteState
from encke.capture.hooks import Capture
from encke.capture.modules import Layer
from encke.fused.base import LayerForward
from encke.fused.program import CONVOLUTIONS, NORMS, Call, Program
from encke.fused.steps import ConvStep, NormStep, ReluStep, SiluStep, Step, SumStep


class Planner:
    """Plans the steps of a block. `modules` are the layers of the program's calls, None for sums."""

    def __init__(self, program: Program, modules: list[Any], x: Tensor, capture: Capture) -> None:
        self.calls = [*zip(program.calls, modules, strict=True)]
        self.x = x
        self.capture = capture
        self.steps: list[Step] = []
        self.sizes: list[tuple[int, ...]] = [tuple(x.shape)]
        """Sizes of the values so far."""
        self.taken: list[SiteFacts] = []
        """Sites that save the block's input."""
        self.numbers: dict[Layer, int] = {}
        """Number of the last call of each layer."""

    def plan(self) -> bool:
        """Plan all steps; return False if a layer does not run as a fused one, or has a site that is not steady."""
        for call, module in self.calls:
            step = self.sum_of(call) if module is None else self.step_of(call, module)
            if step is None:
                return False
            self.steps.append(step)
        for step in self.steps:
            if isinstance(step, ReluStep | SiluStep):
                step.join(self.steps[step.inputs[0] - 1])
            if isinstance(step, SiluStep) and step.norm is None:
                return False
        for number, step in enumerate(self.steps, 1):
            if isinstance(step, NormStep):
                result = number if step.relu is None else self.steps.index(step.relu) + 1
                readers = [reader for reader, _ in self.readers_of(result)]
                # Convolutions make their input's gradient; a sum passes on its own, as does whoever calls the block.
                step.grad_is_own = bool(readers) and all(type(reader) in CONVOLUTIONS for reader in readers)
                step.plan_backward(self.x.device)
        return True

    def sites_of(self, call: Call, module: Any) -> list[Any]:
        """Return the sites of a layer's call, if the first one is steady; else an empty list."""
        own = None if module is None else module.__dict__.get("forward")
        if not isinstance(own, LayerForward) or own.capture is not self.capture:
            return []
        calls, x = own.layer.calls, self.x
        sites = calls[call.number] if call.number < len(calls) else []
        facts = sites[0] if sites else None
        if facts is None or facts.steady is None or facts.state is not SiteState.KNOWN:
            return []
        return sites if facts.site.dtype is x.dtype and own.device_type == x.device.type else []

    def readers_of(self, number: int) -> list[tuple[Any, SiteFacts | None]]:
        """Return the layers that take a value, and the sites that they save first; None for a sum."""
        readers = [(call, module) for call, module in self.calls if number in call.inputs]
        return [(module, next(iter(self.sites_of(call, module)), None)) for call, module in readers]

    def sum_of(self, call: Call) -> Step | None:
        """Return the step of a sum of two values of one size."""
        first, second = (self.sizes[number] for number in call.inputs)
        self.sizes.append(first)
        return SumStep(call) if first == second else None

    def step_of(self, call: Call, module: Any) -> Step | None:
        """Return the step of a layer's call."""
        sites, own = self.sites_of(call, module), module.__dict__.get("forward")
        if not sites:
            return None
        facts, steady, size = sites[0], sites[0].steady, self.sizes[call.inputs[0]]
        self.numbers[own.layer] = call.number
        large = steady.length * self.x.element_size() >= own.min_bytes
        if steady.size != size:
            return None
        if type(module) in CONVOLUTIONS:
            return self.convolution_of(call, module, sites, large)
        self.sizes.append(size)
        if type(module) is nn.SiLU:
            reads = (facts.site.operation, facts.site.slot, facts.site.need) == ("Silu", "self", "lossy")
            own = steady.recomputed and steady.first is facts and not facts.sharers
            return SiluStep(call, facts, module) if reads and own else None
        if not large or not facts.function or steady.first is not facts or not packs_as_planned(facts):
            return None
        readers = self.readers_of(len(self.steps) + 1)
        if type(module) in NORMS:
            # What is computed again from codes of the block finds them behind a SiLU alone.
            source = facts.dependents or facts.site.place in self.capture.recomputations.sources
            if module.weight is None or facts.sharers or steady.codec.signs:
                return None
            if source and [type(reader) for reader, _ in readers] != [nn.SiLU]:
                return None
            return NormStep(call, facts, module)
        inside = {site for reader, site in readers if type(reader) in CONVOLUTIONS}
        return ReluStep(call, facts) if facts.sharers == inside else None

    def convolution_of(self, call: Call, module: Any, sites: list[Any], split: bool) -> Step | None:
        """Return the step of a convolution, of the block's input or of a ReLU's result."""
        facts, source = sites[0], call.inputs[0]
        if (facts.site.operation, facts.site.slot, facts.site.need) != ("Convolution", "input", "lossy"):
            return None
        if source == 0:
            self.taken.append(facts)
        else:
            packer = self.steps[source - 1]
            if facts.steady.first is not packer.facts or facts.steady.codec != packer.steady.codec:
                return None
        ((_, result),) = self.readers_of(len(self.steps) + 1)
        if result is None or result.steady is None:
            return None
        self.sizes.append(result.steady.size)
        # The copy that autocast makes of the weight: kept if it is small, else made again in backward.
        copied = 0 if module.weight.dtype is self.x.dtype else module.weight.numel() * self.x.element_size()
        cast = None
        if copied >= max(self.capture.min_bytes, self.capture.negligible.weight_bytes):
            cast = sites[1] if len(sites) > 1 else None
            if cast is None or cast.site.need != "weight" or cast.cast is None or cast.cast.geometry is not None:
                return None
        inner = facts if source else None
        return ConvStep(call, inner, module, self.x, result.steady, split, cast, self.capture.keep_casts)


def packs_as_planned(facts: SiteFacts) -> bool:
    """Return whether a site packs with a plan, in codes that the fused layers read."""
    steady, known = facts.steady, facts.encoder_state.plan
    if steady is None or known is None or not steady.codec.reads_packed:
        return False
    return known[0] == steady.codec and known[1] is steady.packed_layout and known[4] is not None
