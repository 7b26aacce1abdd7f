"""Blocks: convolutions, norms, activations, sums and squeeze-and-excite that run as one autograd function.

When layers run one by one, each saved tensor costs a module call, an autograd function, a node and a hook. All of this
is Python code, and with small batches the GPU waits for it. A block is a container whose forward only calls such
layers (`program.py`), such as a ResNet bottleneck or the contents of EfficientNet's `MBConv`. It runs layer by layer
until all of its sites save as in the previous pass. From then on, one function runs the same kernels in the same order
(`steps.py`, `squeeze.py`) and holds the packed tensors (`savings.py`). Values, gradients, random numbers and the report
are the same, bit for bit. The exceptions are SiLU and hard swish: the kernels of the previous batch norm compute them,
and the results agree within rounding. A ReLU or leaky ReLU at the end remains a separate layer.

Before it computes anything, the block makes the same checks as its layers: whether modules, hooks, parameters or the
policy's choices have changed. If so, the call runs layer by layer, and the block is planned again once its sites are
steady again. Collection steps run layer by layer, too.
"""

from __future__ import annotations

from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from encke.capture.encoding import save_again
from encke.capture.expressions import Recomputed, normalised
from encke.capture.facts import SiteState
from encke.capture.hooks import Capture, unpack
from encke.capture.modules import Layer
from encke.capture.passes import EnterHook, ForwardPass, Frame, LeaveHook
from encke.capture.readers import matches
from encke.capture.saved import Saved, SharedCell
from encke.codecs import Packed
from encke.fused.base import Slot, TrackedForward, has_triton, in_place_of, take_over
from encke.fused.batchnorm import slot_of
from encke.fused.planner import Planner
from encke.fused.program import program_of
from encke.fused.savings import Run, Saving
from encke.fused.squeeze import PoolStep
from encke.fused.steps import TOGETHER, ConvStep, InstanceNormStep, NormStep, SmoothStep, Step, SumStep, cast_together
from encke.torch_internals import (
    has_global_module_hooks,
    keeps_graph,
    pop_saved_tensors_hooks,
    push_saved_tensors_hooks,
)

ALIGNED = 16
"""Alignment of codes in memory, in bytes."""
ATTEMPTS, PAUSE = 8, 32
"""Number of consecutive passes that try to make a plan, and number of passes to wait after all of them have failed."""
OUR_HOOKS = {EnterHook, LeaveHook}
Operands = list[tuple[Any, ...]]
"""Parameters of each step."""


class BlockSaved(Saved):
    """Everything that a block holds from forward to backward, stored in place of its saved input."""

    __slots__ = ("kept", "plan", "scratch")

    def __init__(self, plan: BlockPlan, saved: Saved, x: Tensor) -> None:
        super().__init__(saved.owner, saved.facts, x, saved.layout, saved.cell)
        self.plan = plan
        self.kept: list[Any] = []
        """Packed tensors and other data that the backward of each step needs."""
        self.scratch: Any = (None, None)
        """Memory for the sums and for the coefficients in backward, shared by all batch norms."""

    def hold(self, t: Tensor) -> BlockSaved:
        """Return this object. Serves as the pack hook for the block's input."""
        return self

    def smooth_input(self, smooth: SmoothStep | None = None) -> Saved:
        """Return a `Saved` for the input of a smooth activation, as the plain layer would save it.

        The default is the activation at the block's end. Its input is recomputed from the codes of the batch norm's
        input. Tensors that later layers save may in turn be recomputed from it.
        """
        last: Any = self.plan.steps[-1]
        smooth = smooth or last
        assert smooth is not None
        source, (rows, _, weight, version, *_, eps) = self.norm_input(smooth.inputs[0] - 1)
        steady = smooth.saving.steady
        again = normalised(source, rows.view(4, -1), (weight, version), eps, source.dtype, steady.layout.size)
        numel = source.cell.packed.numel  # type: ignore[union-attr]
        stands = Recomputed(steady.codec, steady.packed_layout, source.dtype, numel, again)
        return self.saved_by(smooth.saving, stands)

    def norm_input(self, number: int) -> tuple[Saved, Any]:
        """Return a `Saved` for the input of a batch norm, as the plain layer would save it, and its other data."""
        packed, settings = self.kept[number]
        return self.saved_by(self.plan.steps[number].savings[0], packed), settings

    def saved_by(self, saving: Saving, packed: Packed) -> Saved:
        """Return the `Saved` that a single layer would have made."""
        cell = SharedCell(0, saving.records[0])
        cell.packed, cell.wanted = packed, packed.codec
        like: Any = self  # dtype and device
        return Saved(self.owner, saving.facts, like, saving.steady.layout, cell)


class BlockFunction(torch.autograd.Function):
    """Autograd function of a block.

    Arguments: input, `BlockSaved`, modules, parameters of each step, forward pass, and all parameters.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, held: BlockSaved, modules: list[Any], operands: Operands, forward: ForwardPass, *_: Tensor
    ) -> Tensor:
        """Return the result of the last step."""
        ctx.save_for_backward(x)
        values, plan = [x], held.plan
        run = Run(plan, forward, x.device)
        if plan.copied:
            copies = iter(cast_together([each for number in plan.copied for each in operands[number]], x.dtype))
            for number in plan.copied:
                operands[number] = tuple(islice(copies, len(operands[number])))
        for step, module, parameters, ends in zip(plan.steps, modules, operands, plan.ends, strict=True):
            held.kept.append(step.forward(module, values, parameters, run))
            for number in ends:
                values[number] = None  # type: ignore[call-overload]
        return values[-1]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        """Return the gradients of the input and of all parameters."""
        held = held_by(ctx)
        if torch.is_grad_enabled():
            held.owner.recorded = True
            raise RuntimeError(
                f"encke: backward with create_graph=True came to a block of layers that ran as one, with "
                f"'{held.site.layer}' in it; its gradient cannot be differentiated again. Layers run one by one from "
                "now on: run this step again."
            )
        grad = take_over(grad)
        steps, kept = held.plan.steps, held.kept
        if keeps_graph():
            kept = [*kept]
        if held.plan.cast_again:
            weights = [kept[number][0].weight() for number in held.plan.cast_again]
            for number, copy in zip(held.plan.cast_again, cast_together(weights, held.dtype), strict=True):
                kept[number] = (copy, copy._version, kept[number][2])
        if held.plan.sums_numel:
            sizes = (held.plan.sums_numel, held.plan.coefficients_numel)
            held.scratch = tuple([torch.empty(size, dtype=torch.float32, device=grad.device) for size in sizes])
        grads: list[Any] = [*[None] * len(steps), grad]
        del grad  # from here on the last step that reads a gradient releases it
        found: list[Any] = []
        for step in reversed(steps):
            found += step_back(step, kept[-1], grads, held)
            del kept[-1]  # releases packed tensors as early as single layers do
        held.scratch = (None, None)
        return (grads[0], None, None, None, None, *found)


def step_back(step: Step, kept: Any, grads: list[Any], held: BlockSaved) -> tuple[Tensor | None, ...]:
    """Pop the gradient of a step's result, add the gradients of its inputs, and return those of its parameters."""
    taken, parameters = step.backward(kept, grads.pop(), held)
    for number, each in zip(step.inputs, taken, strict=True):
        before = grads[number]
        if before is None:
            grads[number] = each
        elif type(step) is PoolStep:
            # One value for each plane. The other gradient comes from a product, and only this sum reads it.
            before.add_(each)
        else:
            # A sum propagates a gradient that others read as well; the other steps return new tensors.
            grads[number] = each + before if type(step) is SumStep else each.add_(before)
    return parameters


class SmoothBlockFunction(BlockFunction):
    """Block that ends with a smooth activation. Capture finds its input on the node, as on the plain operation's."""

    node = {"_raw_saved_self": property(lambda ctx: Slot(held_by(ctx).smooth_input()))}


class NormBlockFunction(BlockFunction):
    """Block that ends with a batch norm. Capture finds its tensors on the node, as on the plain operation's.

    That includes weight and bias: the parameters of the last step come directly after the block's input.
    """

    node = {
        "_raw_saved_input": property(lambda ctx: Slot(held_by(ctx).norm_input(len(held_by(ctx).plan.steps) - 1)[0])),
        "_raw_saved_result1": property(lambda ctx: slot_of(last_norm(ctx)[0])),
        "_raw_saved_result2": property(lambda ctx: slot_of(last_norm(ctx)[1])),
        "_raw_saved_weight": property(lambda ctx: Slot(last_norm(ctx)[2:4])),
        "_saved_eps": property(lambda ctx: last_norm(ctx)[4]),
    }


def held_by(ctx: Any) -> BlockSaved:
    """Return the `BlockSaved` of a block's node."""
    held: BlockSaved = ctx._raw_saved_tensors[0].data
    return held


def last_norm(ctx: Any) -> tuple[Tensor, Tensor, Tensor, int, float]:
    """Return mean, 1 / standard deviation, weight, the weight's version and eps of the batch norm at a block's end."""
    held = held_by(ctx)
    _, (mean, invstd, weight, version, *_, eps) = held.norm_input(len(held.plan.steps) - 1)
    if invstd is None:
        rows = mean.view(-1, weight.numel())
        mean, invstd = rows[0], rows[1]
    return mean, invstd, weight, version, eps


class BlockPlan:
    """Steps of a block for inputs of one size, and the decisions that they rely on."""

    def __init__(self, planner: Planner) -> None:
        self.steps: list[Step] = planner.steps
        steps = self.steps
        self.calls = planner.numbers
        """Layers of the steps, with the number of each layer's last call."""
        self.taken = planner.taken
        """Sites that save the block's input."""
        last_reader = {number: step for step in steps for number in step.inputs if number}
        self.ends = [[number for number, reader in last_reader.items() if reader is step] for step in steps]
        """For each step, the values that it is the last to read."""
        last: Any = steps[-1]
        convolutions = [(number, step) for number, step in enumerate(steps) if isinstance(step, ConvStep)]
        self.copied = [number for number, step in convolutions if step.weight_dtype is not step.dtype]
        """Numbers of the convolutions whose parameters are cast."""
        self.cast_again = [number for number, step in convolutions if step.cast is not None]
        """Numbers of those convolutions whose weights are cast again in backward."""
        self.savings: list[Saving] = [saving for step in steps for saving in step.savings]
        self.places = planner.capture.negligible.places
        """Places of negligible tensors when the plan was made. Small tensors at these places are not packed."""
        reported: list[Any] = [part for step in steps for part in (*step.savings, step)]
        self.records = [record for part in reported for record in part.records]
        """Records of the tensors saved inside the block. They are the same in every pass."""
        self.small_bytes = sum(part.small_bytes for part in reported)
        sizes = [saving.code_bytes + -saving.code_bytes % ALIGNED for saving in self.savings if saving.code_bytes]
        self.codes_size = sum(sizes)
        self.code_sizes = sizes if self.codes_size <= TOGETHER else []
        """Bytes of the codes of each saving, if they are allocated together."""
        norms = [step for step in steps if isinstance(step, NormStep)]
        self.channels = [step.kernels.channels for step in norms if step.kernels is not None]
        """Number of channels of each batch norm that is computed while its input is packed."""
        self.workspace_numel = max((step.kernels.workspace_numel for step in norms if step.kernels), default=0)
        plans = [step.backward_plan for step in norms if step.backward_plan is not None]
        self.sums_numel = max((plan.sums_numel for plan in plans), default=0)
        self.coefficients_numel = 3 * max((plan.channels for plan in plans), default=0)
        operation = last.savings[0].facts.reader if last.savings else "Add"
        if isinstance(last, InstanceNormStep):
            operation = "InstanceNorm"
        functions: Any = {SmoothStep: SmoothBlockFunction, NormStep: NormBlockFunction}
        self.function = in_place_of(operation, functions.get(type(last), BlockFunction))

    def holds(self, forward: ForwardPass, capture: Capture) -> bool:
        """Return whether every site inside the block would save as planned."""
        if not self.calls.keys().isdisjoint(forward.calls) or capture.negligible.places is not self.places:
            return False
        sources, changes = capture.recomputations.sources, capture.recomputations.changes
        for saving in self.savings:
            facts, steady = saving.facts, saving.steady
            if facts is None:
                continue
            if facts.steady is not steady or facts.state is not SiteState.KNOWN or facts.changed:
                return False
            if steady.first is not facts:
                continue  # the step that packs is checked instead
            if len(facts.sharers) != steady.sharers:
                return False
            if facts.dependents or facts.site.place in sources:
                # As long as nothing has changed, `chosen` includes the codecs of the tensors recomputed from this one.
                if not saving.gives_sources or steady.changes != changes:
                    return False
            for choose, site, codec in steady.chosen:
                found = choose(site)
                if found is not codec and found != codec:
                    return False
        return True

    def operands(self, modules: list[Any]) -> Operands | None:
        """Return the parameters of each step; None if one of them differs from the plan."""
        operands: Operands = []
        for step, module in zip(self.steps, modules, strict=True):
            found = step.operands(module)
            if found is None:
                return None
            operands.append(found)
        return operands

    def save_input(self, x: Tensor, frame: Frame, forward: ForwardPass, capture: Capture) -> Saved | None:
        """Pack the block's input, or find it already packed, as its readers would; None if a reader would not."""
        saved = None
        for facts in self.taken:
            steady = facts.steady
            if steady is None or facts.state is not SiteState.KNOWN or not matches(facts, x):
                return None
            cell = save_again(x, facts, steady, frame, forward, capture.recomputations, None)
            if cell is None:
                return None
            saved = Saved(capture.readers, facts, x, steady.layout, cell)
        return saved

    def run(self, x: Tensor, saved: Saved, modules: list[Any], operands: Operands, forward: ForwardPass) -> Tensor:
        """Run the block, and tell the forward pass which tensors were saved."""
        held = BlockSaved(self, saved, x)
        parameters = [parameter for given in reversed(operands) for parameter in given]
        push_saved_tensors_hooks(held.hold, unpack)
        try:
            y: Tensor = self.function(x, held, modules, operands, forward, *parameters)
        finally:
            pop_saved_tensors_hooks()
        forward.calls.update(self.calls)
        forward.tally.records += self.records
        forward.tally.small_bytes += self.small_bytes
        return y


class BlockForward(TrackedForward):
    """Run a container as one function, if its layers alone determine what it computes."""

    def __init__(self, capture: Capture, layer: Layer) -> None:
        super().__init__(capture, layer)
        module = layer.owner()
        assert module is not None
        self.program = program_of(module)
        self.plan: BlockPlan | None = None
        self.failures = 0
        """Number of consecutive passes in which no plan could be made; negative during a pause."""

    @classmethod
    def serves(cls, module: nn.Module) -> bool:
        """Return whether the module's forward is a program of layers, and the GPU kernels can be imported."""
        return bool(module._modules) and has_triton() and program_of(module) is not None

    def attempt(self, module: Any, inputs: tuple[Any, ...], frame: Frame, forward: ForwardPass) -> Tensor | None:
        capture, program, plan = self.capture, self.program, self.plan
        if not forward.steady or frame.number or len(inputs) != 1 or program is None:
            return None
        if self.failures < 0:
            self.failures += 1
            return None
        x = inputs[0]
        if type(x) is not Tensor or not x.requires_grad or not torch.is_grad_enabled() or not self.captured(x):
            return None
        if capture.readers.recorded or not capture.casts_again:
            return None
        if forward.pending:
            capture.readers.read_graph(x.grad_fn)
            if forward.pending:
                return None
        modules = program.current()
        if modules is None or modules[0] is not module or not self.undisturbed(modules):
            return None
        called = [modules[call.layer] for call in program.calls]
        if plan is None:
            planner = Planner(program, called, x, capture)
            if not planner.plan():
                self.failures = self.failures + 1 if self.failures + 1 < ATTEMPTS else -PAUSE
                return None
            plan, self.failures = BlockPlan(planner), 0
            self.plan = plan
        operands = plan.operands(called)
        saved = None
        if operands is not None and plan.holds(forward, capture):
            saved = plan.save_input(x, frame, forward, capture)
        if operands is None or saved is None:
            self.plan = None
            return None
        y = plan.run(x, saved, called, operands, forward)
        if program.last < 0:
            return y
        forward.read_once = y
        try:
            found: Tensor = modules[program.last](y)
        finally:
            forward.read_once = None
        return found

    def undisturbed(self, modules: list[Any]) -> bool:
        """Return whether all modules are in training mode, and those in the block have only our hooks and forwards."""
        for module in modules:
            state = module.__dict__
            if not state["training"]:
                return False
            if module is modules[0]:
                continue  # hooks on the block itself run as usual
            own = state.get("forward")
            if own is not None and not isinstance(own, TrackedForward):
                return False
            if state["_backward_hooks"] or state["_backward_pre_hooks"]:
                return False
            for hooks in (state["_forward_pre_hooks"], state["_forward_hooks"]):
                if hooks and not OUR_HOOKS.issuperset(map(type, hooks.values())):
                    return False
        return not has_global_module_hooks()
