"""Plans of blocks, made from the decisions of their layers in the previous pass."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from encke.capture.facts import SiteFacts, SiteState
from encke.capture.hooks import Capture
from encke.capture.modules import Layer
from encke.capture.passes import EnterHook
from encke.fused.base import InstalledForward, LayerForward
from encke.fused.program import (
    ACTIVATIONS,
    CONVOLUTIONS,
    INSTANCE_NORMS,
    NORMS,
    POOL,
    PRODUCT,
    SUM,
    Call,
    Program,
)
from encke.fused.savings import ComputedSaving, PackedSaving, Saving, SharedSaving, SmallSaving
from encke.fused.smooth import SMOOTH
from encke.fused.squeeze import ActivationStep, PoolStep, ProductStep
from encke.fused.steps import ConvStep, InstanceNormStep, LeakyReluStep, NormStep, ReluStep, SmoothStep, Step, SumStep

SLOTS = ("self", "other")
"""Slots of a product's factors, in order."""


class Planner:
    """Planner of a block's steps. `modules` has the module of each call in the program."""

    def __init__(self, program: Program, modules: list[Any], x: Tensor, capture: Capture) -> None:
        self.calls = [*zip(program.calls, modules, strict=True)]
        self.x = x
        self.capture = capture
        self.steps: list[Step] = []
        self.sizes: list[tuple[int, ...]] = [tuple(x.shape)]
        """Sizes of the values so far."""
        self.small: set[int] = set()
        """Numbers of the small values: results of a pool, and values computed from them."""
        self.taken: list[SiteFacts] = []
        """Sites that save the block's input."""
        self.numbers: dict[Layer, int] = {}
        """Number of the last call of each layer."""

    def plan(self) -> bool:
        """Plan all steps; return False if a layer does not run fused, or has a site that is not steady."""
        for call, module in self.calls:
            step = self.step_of(call, module)
            if step is None:
                return False
            self.steps.append(step)
        for number, step in enumerate(self.steps, 1):
            if isinstance(step, NormStep):
                behind: Any = step.relu or step.smooth
                result = number if behind is None else self.steps.index(behind) + 1
                readers = [call.kind for call, _ in self.calls if result in call.inputs]
                # These return a new gradient for their input. A sum propagates its own, as does the block's caller.
                step.grad_is_own = bool(readers) and {*CONVOLUTIONS, POOL, PRODUCT}.issuperset(readers)
                step.plan_backward(self.x.device)
        return self.sources_are_known()

    def sources_are_known(self) -> bool:
        """Return whether every tensor recomputed from a saving of the block is in the block or can find its source.

        Later layers can find the input of a batch norm at the block's end, or the inputs of a batch norm and a smooth
        activation there.
        """
        savings = [saving for step in self.steps for saving in step.savings if saving.facts is not None]
        inside = {saving.facts for saving in savings}
        last = self.steps[-1]
        ends = (*last.savings, *last.norm.savings) if isinstance(last, SmoothStep) and last.norm else last.savings
        for saving in savings:
            saving.gives_sources = saving in ends or inside.issuperset(saving.facts.dependents)
            if not saving.gives_sources and self.capture.recomputations.concern(saving.facts):
                return False
        return True

    def sites_of(self, call: Call, module: Any) -> list[Any]:
        """Return the sites of a layer's call, if the first one is steady; else an empty list."""
        own = module.__dict__.get("forward")
        if call.kind in (SUM, PRODUCT) or not isinstance(own, LayerForward) or own.capture is not self.capture:
            return []
        calls, x = own.layer.calls, self.x
        sites = calls[call.number] if call.number < len(calls) else []
        facts = sites[0] if sites else None
        if facts is None or facts.steady is None or facts.state is not SiteState.KNOWN:
            return []
        return sites if facts.site.dtype is x.dtype and own.device_type == x.device.type else []

    def readers_of(self, number: int) -> list[tuple[Any, SiteFacts | None]]:
        """Return the layers that read a value, and the site that each of them saves first; None for a sum."""
        readers = [(call, module) for call, module in self.calls if number in call.inputs]
        return [(module, next(iter(self.sites_of(call, module)), None)) for call, module in readers]

    def savers_of(self, number: int) -> set[Any]:
        """Return the sites at which convolutions and products save a value that they read."""
        found = {site for module, site in self.readers_of(number) if type(module) in CONVOLUTIONS}
        products = [(call, module) for call, module in self.calls if call.kind is PRODUCT and number in call.inputs]
        for call, module in products:
            layer = layer_of(module, self.capture)
            found.add(None if layer is None else factors_of(call, layer).get(SLOTS[call.inputs.index(number)]))
        return found

    def step_of(self, call: Call, module: Any) -> Step | None:
        """Return the step of a call."""
        if call.kind is SUM:
            return self.sum_of(call)
        layer = layer_of(module, self.capture)
        if layer is None:
            return None
        self.numbers[layer] = call.number
        if call.kind is PRODUCT:
            return self.product_of(call, layer)
        sites = layer.calls[call.number] if call.number < len(layer.calls) else []
        small = call.kind is POOL or call.inputs[0] in self.small
        return self.small_step_of(call, module, sites) if small else self.layer_step_of(call, module)

    def sum_of(self, call: Call) -> Step | None:
        """Return the step of a sum; None if its two values differ in size."""
        first, second = (self.sizes[number] for number in call.inputs)
        self.sizes.append(first)
        return SumStep(call) if first == second else None

    def layer_step_of(self, call: Call, module: Any) -> Step | None:
        """Return the step of a layer whose input is not small."""
        sites, own = self.sites_of(call, module), module.__dict__.get("forward")
        if not sites:
            return None
        facts, steady, size = sites[0], sites[0].steady, self.sizes[call.inputs[0]]
        large = steady.length * self.x.element_size() >= own.min_bytes
        if steady.size != (planes_of(size) if call.kind in INSTANCE_NORMS else size):
            return None
        if type(module) in CONVOLUTIONS:
            return self.convolution_of(call, module, sites, large)
        self.sizes.append(size)
        if call.kind in SMOOTH:
            return smooth_of(call, module, facts, self.steps[call.inputs[0] - 1])
        if not large or steady.first is not facts or not packs_as_planned(facts):
            return None
        if call.kind in NORMS:
            return norm_of(call, module, facts, size)
        if facts.sharers != self.savers_of(len(self.steps) + 1):
            return None
        if not facts.function:
            return None
        if call.kind is nn.LeakyReLU:
            return LeakyReluStep(call, facts, module)
        relu = ReluStep(call, facts)
        relu.join(self.steps[call.inputs[0] - 1])
        return relu

    def convolution_of(self, call: Call, module: Any, sites: list[Any], split: bool) -> Step | None:
        """Return the step of a convolution."""
        facts, source = sites[0], call.inputs[0]
        saving = None
        if source:
            saving = self.saving_of(facts, source, ("Convolution", "input"))
        elif reads(facts, "Convolution", "input", "lossy"):
            saving = Saving()
            self.taken.append(facts)
        ((reader, result),) = self.readers_of(len(self.steps) + 1)
        if saving is None or result is None or result.steady is None:
            return None
        size: tuple[int, ...] = result.steady.size
        stride: tuple[int, ...] | None = result.steady.stride
        if type(reader) in INSTANCE_NORMS:
            size, stride = (self.sizes[source][0], module.weight.shape[0], *size[2:]), None
        return self.convolution(call, module, sites, saving, size, stride, split)

    def small_step_of(self, call: Call, module: Any, sites: list[Any]) -> Step | None:
        """Return the step of a pool, or of an activation or convolution of small values."""
        size = self.sizes[call.inputs[0]]
        self.small.add(len(self.steps) + 1)
        if call.kind is POOL:
            self.sizes.append((*size[:2], 1, 1))
            return PoolStep(call, size) if len(size) == 4 and PoolStep.serves(module) else None
        saving = self.small_saving(size, sites[0] if sites else None)
        if saving is None:
            return None
        if call.kind in ACTIVATIONS:
            self.sizes.append(size)
            return ActivationStep(call, saving)
        own, (channels, *rest) = module.__dict__.get("forward"), module.weight.shape
        if not isinstance(own, LayerForward) or own.device_type != self.x.device.type or rest != [size[1], 1, 1]:
            return None
        if (module.stride, module.padding, module.groups) != ((1, 1), (0, 0), 1):
            return None
        return self.convolution(call, module, sites, saving, (size[0], channels, 1, 1), None, False)

    def convolution(
        self, call: Call, module: Any, sites: list[Any], saving: Saving, size: tuple[int, ...],
        stride: tuple[int, ...] | None, split: bool,
    ) -> Step | None:  # fmt: skip
        """Return the step of a convolution whose result has the given size."""
        self.sizes.append(size)
        if (call.kind is nn.Conv2d) != (len(size) == 4):
            return None
        if module.bias is not None and module.bias.dtype is not module.weight.dtype:
            return None
        # Autocast's copy of the weight is kept if it is small; otherwise backward makes it again.
        copied = 0 if module.weight.dtype is self.x.dtype else module.weight.numel() * self.x.element_size()
        cast = None
        if copied >= max(self.capture.min_bytes, self.capture.negligible.weight_bytes):
            cast = sites[1] if len(sites) > 1 else None
            if cast is None or cast.site.need != "weight" or cast.cast is None or cast.cast.geometry is not None:
                return None
        facts = sites[0] if sites else None
        return ConvStep(call, saving, module, self.x, size, stride, split, facts, cast, self.capture)

    def product_of(self, call: Call, layer: Layer) -> Step | None:
        """Return the step of a product of a value and a small value."""
        known, savings = factors_of(call, layer), list[Saving]()
        for value, slot in zip(call.inputs, SLOTS, strict=True):
            facts = known.get(slot)
            if value in self.small:
                saving: Saving | None = self.small_saving(self.sizes[value], facts)
                size = self.sizes[value]
            else:
                self.sizes.append(self.sizes[value])
                saving = None if facts is None or not layer.compress else self.saving_of(facts, value, ("Mul", slot))
            if saving is None:
                return None
            savings.append(saving)
        ((_, result),) = self.readers_of(len(self.steps) + 1)
        if result is None or result.steady is None or size != (*self.sizes[-1][:2], 1, 1):
            return None
        step = ProductStep(call, (savings[0], savings[1]), result.steady.stride)
        step.number = len(self.steps)
        return step

    def small_saving(self, size: tuple[int, ...], facts: SiteFacts | None) -> SmallSaving | None:
        """Return the saving of a small tensor; None if the tensor would not be kept as it is."""
        nbytes = torch.Size(size).numel() * self.x.element_size()
        negligible = facts is not None and facts.site.place in self.capture.negligible.places
        return SmallSaving(nbytes) if negligible or nbytes < self.capture.min_bytes else None

    def saving_of(self, facts: SiteFacts, value: int, reader: tuple[str, str]) -> Saving | None:
        """Return the saving of a value for a reader's operation and slot; None if the block cannot hold the value."""
        steady, maker = facts.steady, self.steps[value - 1]
        if steady is None or facts.state is not SiteState.KNOWN or steady.size != self.sizes[value]:
            return None
        if not reads(facts, *reader, "lossy") or facts.site.dtype is not self.x.dtype:
            return None
        if isinstance(maker, ReluStep | LeakyReluStep):
            packed = maker.saving
            shared = steady.first is packed.facts and steady.codec == packed.steady.codec
            return SharedSaving(facts, value - 1) if shared else None
        if steady.first is not facts or facts.sharers or not maker.makes or facts.signature[3] != maker.makes:
            return None
        if steady.recomputed:
            return ComputedSaving(facts, maker.restore)
        return PackedSaving(facts) if packs_as_planned(facts) else None


def layer_of(module: Any, capture: Capture) -> Layer | None:
    """Return the `Layer` of a module, found through its fused forward or our hook; None if it has neither."""
    own: Any = module.__dict__.get("forward")
    if isinstance(own, InstalledForward):
        return own.layer if own.capture is capture else None
    hooks = [hook for hook in module._forward_pre_hooks.values() if type(hook) is EnterHook]
    return next((hook.layer for hook in hooks if hook.passes is capture.passes), None)


def smooth_of(call: Call, module: Any, facts: SiteFacts, before: Step) -> Step | None:
    """Return the step of a smooth activation; None if the previous step does not compute it."""
    # An in-place layer saves a copy. Decisions learnt with the other value of `inplace` do not apply.
    own = facts.steady.recomputed and facts.steady.first is facts and not facts.sharers  # type: ignore[union-attr]
    learnt = (facts.signature[3] == "Clone") is module.inplace
    if not (reads(facts, SMOOTH[call.kind].operation, "self", "lossy") and own and learnt):
        return None
    step = SmoothStep(call, facts, module)
    step.join(before)
    return None if step.norm is None else step


def norm_of(call: Call, module: Any, facts: SiteFacts, size: tuple[int, ...]) -> Step | None:
    """Return the step of a norm with a packed input of the given size."""
    if not facts.function or facts.sharers or facts.steady.codec.signs:  # type: ignore[union-attr]
        return None
    if call.kind in INSTANCE_NORMS:
        return InstanceNormStep(call, facts, module, size) if InstanceNormStep.serves(module) else None
    return None if module.weight is None else NormStep(call, facts, module)


def reads(facts: SiteFacts, operation: str, slot: str, need: str) -> bool:
    """Return whether a site has the given operation, slot and need."""
    site = facts.site
    return (site.operation, site.slot, site.need) == (operation, slot, need)


def planes_of(size: tuple[int, ...]) -> tuple[int, ...]:
    """Return the size with which an instance norm saves its input: one sample with a channel for each plane."""
    return (1, size[0] * size[1], *size[2:])


def factors_of(call: Call, layer: Layer) -> dict[str, SiteFacts]:
    """Return the sites at which a product saves its factors, by slot."""
    sites = layer.calls[call.number] if call.number < len(layer.calls) else []
    return {each.site.slot: each for each in sites if each is not None and each.site.operation == "Mul"}


def packs_as_planned(facts: SiteFacts) -> bool:
    """Return whether a site packs with a plan, and its codes can be read by the fused layers."""
    steady, known = facts.steady, facts.encoder_state.plan
    if steady is None or known is None or not steady.codec.reads_packed:
        return False
    return known[0] == steady.codec and known[1] is steady.packed_layout and known[4] is not None
