"""Layer norm and RMS norm with one forward kernel and one backward kernel, which reads the packed input.

transformers writes RMS norm in Python, as seven operations over fp32 values that save two or three tensors. Here any
RMS norm, whoever wrote it, saves only its packed input and one number for each row (kernels/gpu/row_norm.py). A trial
finds out which formula a layer computes, with which roundings: once when the model is attached, and again for each
combination of dtypes. The input of the next layers is recomputed from the codes of the norm's input
(encke/capture/expressions.py).
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch
from torch import Tensor, nn

from encke.capture.expressions import packed_rows, row_kernels
from encke.capture.facts import SiteFacts
from encke.capture.hooks import Capture, unusual
from encke.capture.ledger import Record
from encke.capture.modules import Layer
from encke.capture.passes import ForwardPass, Frame
from encke.capture.sites import Site
from encke.codecs.base import check_version
from encke.codecs.layout import layout_of, rows_inside
from encke.fused.base import Slot, TrackedForward, has_triton, in_place_of
from encke.fused.requests import KernelRequests
from encke.kernels import RowUse

OPERATIONS = {False: "FusedRmsNorm", True: "NativeLayerNorm"}
"""PyTorch operation that the function replaces; the key is True for a norm that subtracts the mean."""
TORCH = (nn.LayerNorm, nn.RMSNorm)
PLAIN = (Tensor, nn.Parameter)
EPSILONS = ("variance_epsilon", "eps")
"""Attributes in which layers keep their epsilon, which is added to the variance."""
SCALES = (1.0, 2.0**-10, 2.0**-4, 16.0, 2.0**-12, 2.0)
"""Scales of the rows in a trial. In small rows, epsilon affects the result."""
SAME_BITS = 0.97
"""Share of 16-bit values that must equal a formula's bit for bit. Another order of roundings changes a quarter."""


class RowNormFunction(torch.autograd.Function):
    """Norm over rows. Arguments: input, weight, bias, plan.

    The first statistic of an RMS norm is 1 / standard deviation.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, plan: Any) -> Tensor:
        """Return the result. Only the input goes through the hooks: the rest is small."""
        out, mean, rstd = plan.forward(x, weight, bias)
        outer = x.dim() - plan.dimensions
        ctx.plan, ctx.shape = plan, x.shape[outer:]
        one_a_row = x.shape[:outer] + (1,) * plan.dimensions
        mean, rstd = mean.view(one_a_row), rstd.view(one_a_row)
        # Attributes of the plain operations' nodes, where capture looks for saved tensors.
        ctx._raw_saved_result1, ctx._raw_saved_result2 = Slot((mean, mean._version)), Slot((rstd, rstd._version))
        ctx._raw_saved_weight = None if weight is None else Slot((weight, weight._version))
        ctx._raw_saved_bias = None if bias is None else Slot((bias, bias._version))
        ctx.save_for_backward(x)
        return out

    node = {
        "encke_slots": ("input",),
        "encke_offset": property(lambda ctx: ctx.plan.norm.offset),
        "_saved_normalized_shape": property(lambda ctx: tuple(ctx.shape)),
    }

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        """Return the gradients of input, weight and bias."""
        plan, wanted = ctx.plan, ctx.needs_input_grad[:3]
        slots = ctx._raw_saved_result1, ctx._raw_saved_result2, ctx._raw_saved_weight, ctx._raw_saved_bias
        tensors = [None if slot is None else slot.data for slot in slots]
        for pair in tensors:
            if pair is not None and pair[0]._version != pair[1]:
                check_version(*pair)
        mean, rstd, weight, bias = [None if pair is None else pair[0] for pair in tensors]
        if torch.is_grad_enabled():
            return (*differentiable_gradients(ctx, grad, weight, bias, wanted), None)
        saved = ctx._raw_saved_tensors[0].data
        packed, stride = packed_rows(saved, plan.norm.width), None
        if packed is None:
            data, seed, format = ctx.saved_tensors[0].contiguous(), 0, None
        else:
            data, seed, format = packed.buffers[0], packed.seed, packed.plan.format
            stride = saved.layout.stride if plan.transposed else None
        return (*plan.backward(grad.contiguous(), data, seed, format, mean, rstd, weight, wanted, stride), None)


def differentiable_gradients(
    ctx: Any, grad: Tensor, weight: Tensor | None, bias: Tensor | None, wanted: tuple[bool, ...]
) -> tuple[Tensor | None, ...]:
    """Return the gradients from the restored input with plain operations, for a backward that is itself recorded."""
    (x,) = ctx.saved_tensors
    inputs = [t for t, want in zip((x, weight, bias), wanted, strict=True) if want]
    flat = [None if t is None else t.reshape(-1) for t in (weight, bias)]
    y = ctx.plan.norm.compute(x.reshape(-1, ctx.plan.norm.width), *flat).view(x.shape)
    found = iter(torch.autograd.grad(y, inputs, grad, create_graph=True))
    return tuple(next(found) if want else None for want in wanted)


class RowNormForward(TrackedForward):
    """Run `nn.LayerNorm`, `nn.RMSNorm` and RMS norms written in Python.

    A layer uses the function from its first call on, because formula and function save different tensors.
    """

    device_type = "cuda"
    """Type of device that the kernels run on."""

    def __init__(self, capture: Capture, layer: Layer) -> None:
        super().__init__(capture, layer)
        module: Any = layer.owner()
        self.kind = type(module)
        self.shape = shape_of(module)
        self.requests: KernelRequests | None = None
        """Kernels that the model has requested."""
        self.epsilon = epsilon_name(module)
        self.operation = OPERATIONS[self.kind is nn.LayerNorm]
        self.formulas: dict[Any, tuple[Any, int]] = {}
        """Formula that the layer computes (None if unknown) and bytes that plain autograd saves for each value; by
        dtypes and settings."""
        self.ways: dict[int, bool] = {}
        """Whether each call of the layer, by its number, used the kernels last time."""
        self.last: tuple[Any, tuple[Any, int]] = (None, (None, 0))
        """Key of the last call, with everything that its plan depends on, and the result of `plan_for`."""
        self.recomputed = SiteFacts(Site(layer.name, self.operation, "(formula)"))
        """Site in the report for the tensors that the formula would have saved."""

    @classmethod
    def serves(cls, module: nn.Module) -> bool:
        """Return whether a module is a norm of PyTorch, or computes an RMS norm in a trial."""
        return has_triton() and (type(module) in TORCH or is_rms_norm(module))

    def attempt(self, module: Any, inputs: tuple[Any, ...], frame: Frame, forward: ForwardPass) -> Tensor | None:
        x = inputs[0] if len(inputs) == 1 else None
        if type(x) is not Tensor or unusual(x) or not torch.is_grad_enabled():
            return None
        # Smaller inputs are not packed, not even an fp32 copy of them.
        if 4 * x.numel() < self.capture.min_bytes or not self.captured(x):
            return None
        parameters = module._parameters
        weight = parameters["weight"] if "weight" in parameters else getattr(module, "weight", None)
        bias = parameters["bias"] if "bias" in parameters else getattr(module, "bias", None)
        trained = weight is not None and weight.requires_grad
        if not (x.requires_grad or trained or (bias is not None and bias.requires_grad)):
            return None
        plan, held = self.plan_for(module, x, weight, bias, trained)
        fused = plan is not None and self.lossy(x, frame)
        if self.ways.setdefault(frame.number, fused) is not fused:
            # The other forward saves different tensors, so the facts learnt about this call do not apply.
            self.ways[frame.number] = fused
            frame.sites.clear()
        if not fused:
            return None
        if held > x.element_size():
            record = Record(self.recomputed, x.numel() * (held - x.element_size()))
            record.codec = "recomputed"
            forward.tally.records.append(record)
        result: Tensor = in_place_of(self.operation, RowNormFunction)(x, weight, bias, plan)
        return result

    def lossy(self, x: Tensor, frame: Frame) -> bool:
        """Return whether the policy packs the input lossily. If it is restored exactly, the gradient must be exact."""
        sites = frame.sites
        if sites and sites[0] is not None and self.ways.get(frame.number):
            site = sites[0].site
        else:
            site = Site(self.layer.name, self.operation, "input", frame.number, 0, "lossy", x.dtype, x.dim())
        codec = self.capture.policy.choose(site)
        return codec.takes(x.dtype) and not codec.exact

    def plan_for(self, module: Any, x: Tensor, weight: Any, bias: Any, trained: bool) -> tuple[Any, int]:
        """Return the plan for a call, or None if the kernels do not support it, and the formula's bytes per value."""
        device = self.device_type
        if x.device.type != device:
            return None, 0
        cast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        epsilon = None if self.epsilon is None else getattr(module, self.epsilon, None)
        tensors = [None if t is None else (type(t), t.shape, t.stride(), t.dtype, t.device) for t in (x, weight, bias)]
        call = (type(module), tensors, trained, cast, epsilon)
        before, found = self.last
        if call != before:
            found = self.make_plan(module, x, weight, bias, (trained, cast, epsilon))
            self.last = call, found
        return found

    def make_plan(self, module: Any, x: Tensor, weight: Any, bias: Any, settings: tuple[Any, ...]) -> tuple[Any, int]:
        """Make the plan for a call that differs from the last one; see `plan_for`."""
        shape, outer = self.shape, x.dim() - len(self.shape)
        if type(module) is not self.kind or outer < 1 or x.shape[outer:] != shape:
            return None, 0
        for t in (weight, bias):
            if t is None:
                continue
            if type(t) not in PLAIN or t.shape != shape or t.device != x.device or not t.is_contiguous():
                return None, 0
        weight_dtype = None if weight is None else weight.dtype
        width = math.prod(shape)
        inner = rows_inside(layout_of(x.shape, x.stride())[0], width)
        if inner is None or (bias is not None and bias.dtype != weight_dtype):
            return None, 0
        # Only layer norm has a contiguous result for any input; the results of others have their input's strides.
        if self.kind is not nn.LayerNorm and not x.is_contiguous():
            return None, 0
        key = (x.dtype, weight_dtype, bias is None, *settings)
        known = self.formulas.get(key)
        if known is None:
            known = self.formulas[key] = try_layer(module, x.dtype, x.device)
        norm, held = known
        if norm is None:
            return None, 0
        plan = row_kernels().row_plan(
            norm, x.numel() // width, inner, x.dtype, weight_dtype, bias is not None, len(shape), x.device
        )
        if plan is not None and self.requests is not None:
            weights = weight_dtype is not None, bias is not None, plan.transposed
            use = RowUse(
                width, norm.centred, norm.offset, norm.inner, norm.out, x.dtype, weight_dtype or norm.out, *weights,
                0, settings[1] or norm.out,
            )  # fmt: skip
            self.requests.ask_for_rows(self.layer.name, self.operation, self.kind, use)
        return plan, held


def shape_of(module: Any) -> tuple[int, ...]:
    """Return the shape of the dimensions that a norm normalises over."""
    return tuple(module.normalized_shape) if type(module) in TORCH else tuple(module.weight.shape)


def epsilon_name(module: Any) -> str | None:
    """Return the name of the attribute with a norm's epsilon; None if it has none."""
    return next((name for name in EPSILONS if hasattr(module, name)), None)


def epsilon_of(module: Any) -> Any:
    """Return a norm's epsilon; None if it has none."""
    name = epsilon_name(module)
    return None if name is None else getattr(module, name)


def is_rms_norm(module: nn.Module) -> bool:
    """Return whether a layer is an RMS norm over the last dimension: check its attributes, values and gradients."""
    weight = module._parameters.get("weight")
    if weight is None or weight.dim() != 1 or len(module._parameters) > 1 or module._buffers or module._modules:
        return False
    if type(module).forward is nn.Module.forward or not isinstance(epsilon_of(module), float):
        return False
    return try_layer(module, torch.float32, torch.device("cpu"), at_first=True)[0] is not None


def trial_copy(module: Any, device: torch.device, dtype: torch.dtype | None) -> Any:
    """Return a copy of a norm with weights that distinguish formulas. The module itself does not change.

    The weights have the given dtype, or keep their own.
    """
    copy = object.__new__(type(module))
    copy.__dict__.update(module.__dict__)
    copy.__dict__["_parameters"] = parameters = dict(module._parameters)
    for i, name in enumerate(("weight", "bias")):
        t = getattr(module, name, None)
        if t is not None:
            values = 0.75 + ((torch.arange(t.numel()) * 37 + 11 * i) % 64) / 128
            values = values.view(t.shape).to(device, dtype or t.dtype)
            parameters[name] = nn.Parameter(values, requires_grad=t.requires_grad)
    return copy


def try_layer(module: Any, dtype: torch.dtype, device: torch.device, at_first: bool = False) -> tuple[Any, int]:
    """Return the formula that a layer computes (None if unknown) and the bytes that it saves for each value.

    Args:
        module: The layer.
        dtype: Dtype of its input.
        device: Device of its input.
        at_first: Whether the weights get the dtype of the input, and gradients are compared as well.
    """
    shape, layer = shape_of(module), trial_copy(module, device, dtype if at_first else None)
    size = (2, 3, *shape)
    # With these values, sums of squares are exact in any order.
    values = ((torch.arange(math.prod(size)) * 7919 + 13) % 20 - 8).view(6, -1) * torch.tensor(SCALES)[:, None]
    x = values.view(size).to(device, dtype).requires_grad_()
    storages: dict[int, torch.UntypedStorage] = {}

    def pack(t: Tensor) -> Tensor:
        storages[t.untyped_storage()._cdata] = t.untyped_storage()
        return t.detach()

    try:
        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            y = type(module).forward(layer, x)
    except Exception:
        return None, 0
    held = sum(storage.nbytes() // x.numel() for storage in storages.values())
    weight, bias = getattr(layer, "weight", None), getattr(layer, "bias", None)
    norm = next((each for each in candidates(module, x, y, weight) if agrees(each, x, y, weight, bias)), None)
    if norm is not None and at_first and not same_gradients(norm, x, y, weight):
        norm = None
    return norm, held


def candidates(module: Any, x: Tensor, y: Any, weight: Tensor | None) -> list[Any]:
    """Return the formulas that may have computed `y`."""
    if not isinstance(y, Tensor) or y.shape != x.shape or not y.requires_grad:
        return []
    row_norm, eps = row_kernels(), epsilon_of(module)
    # If epsilon is None, PyTorch uses the machine epsilon of the dtype, under autocast that of fp32.
    epsilons = dict.fromkeys(torch.finfo(kind).eps for kind in (x.dtype, torch.float32)) if eps is None else (eps,)
    width = math.prod(shape_of(module))
    inners = dict.fromkeys((torch.float32, x.dtype, x.dtype if weight is None else weight.dtype))
    offsets = (0.0,) if weight is None or type(module) in TORCH else (0.0, 1.0)
    centred = type(module) is nn.LayerNorm
    return [
        row_norm.RowNorm(width, centred, each, offset, inner, y.dtype)
        for inner, offset, each in itertools.product(inners, offsets, epsilons)
    ]


def agrees(norm: Any, x: Tensor, y: Tensor, weight: Tensor | None, bias: Tensor | None) -> bool:
    """Return whether a formula gives `y`, up to the order of summation."""
    with torch.no_grad():
        flat = [None if t is None else t.reshape(-1) for t in (weight, bias)]
        wanted = norm.compute(x.reshape(-1, norm.width), *flat).view(x.shape)
        near = 1e-5 if y.element_size() == 4 else 2 * torch.finfo(y.dtype).eps
        if not bool(((y.double() - wanted.double()).abs() <= near * (0.1 + wanted.double().abs())).all()):
            return False
        return y.element_size() == 4 or bool((y == wanted).double().mean() >= SAME_BITS)


def same_gradients(norm: Any, x: Tensor, y: Tensor, weight: Tensor | None) -> bool:
    """Return whether the gradients of `y` are those of a formula. A layer may stop some gradients."""
    inputs = [x] if weight is None or not weight.requires_grad else [x, weight]
    grad = torch.linspace(-1, 2, y.numel(), device=y.device).view(y.shape).sin()
    found = torch.autograd.grad(y, inputs, grad, allow_unused=True)
    wanted = torch.autograd.grad(norm.compute(x, weight, None), inputs, grad)
    pairs = zip(found, wanted, strict=True)
    return all(a is not None and torch.allclose(a, b, 1e-3, 1e-4 * float(b.abs().max())) for a, b in pairs)
