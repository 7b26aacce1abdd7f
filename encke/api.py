"""The interface for users: `attach`, `compress`, and the `Handle` that they return."""

from __future__ import annotations

import os
import weakref
from collections.abc import Mapping
from types import TracebackType
from typing import Any, TextIO

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter
from torch.optim import Optimizer

from encke.capture.hooks import SMALL, Capture
from encke.capture.modules import Layer, WatchHook, drop_inert, layer_name, layers_of
from encke.capture.passes import hook_layers, may_push
from encke.capture.readers import is_wrapper
from encke.fused import registry as fused
from encke.policies.base import AdaptivePolicy, Policy
from encke.policies.overrides import Override, resolve, with_overrides
from encke.policies.presets import as_policy
from encke.report import Report, StepLog, peak_bytes, rows_of

_handles: weakref.WeakKeyDictionary[nn.Module, Handle] = weakref.WeakKeyDictionary()

STATE_VERSION = 2
"""Version of `Handle.state_dict()`. Release 0.1 wrote version 1, which is still read."""


class Handle:
    """Report, log, history and state of one attached model, and its `detach()`.

    Created by `attach` and `compress`; has no public constructor. As a context manager it detaches at the block's end.

    Example:
        >>> import torch, encke
        >>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 16, 3), torch.nn.ReLU(), torch.nn.Conv2d(16, 8, 3))
        >>> with encke.attach(model) as handle:
        ...     model(torch.randn(8, 3, 32, 32)).sum().backward()
        >>> handle
        <encke.Handle of Sequential: Comet(), detached, 1 forward pass, last ratio 7.5>
    """

    _capture: Capture
    _model: weakref.ref[nn.Module] | None
    _hooks: list[Any]
    _attached: bool

    def __init__(self) -> None:
        raise TypeError("a Handle is made by encke.attach(model) or encke.compress()")

    @classmethod
    def _make(cls, capture: Capture, model: nn.Module | None) -> Handle:
        handle = cls.__new__(cls)
        handle._capture = capture
        handle._model = weakref.ref(model) if model is not None else None
        handle._hooks = []
        handle._attached = True
        return handle

    def __repr__(self) -> str:
        model = self._model() if self._model is not None else None
        name = "compress" if self._model is None else "a model that is gone" if model is None else type(model).__name__
        steps = self._capture.step
        text = f"<encke.Handle of {name}: {self.policy!r}, {'attached' if self.attached else 'detached'}, "
        text += f"{steps} forward pass{'' if steps == 1 else 'es'}"
        rows = rows_of(self._capture.ledger.last)
        saved, packed = sum(row.saved_bytes for row in rows), sum(row.packed_bytes for row in rows)
        return f"{text}, last ratio {saved / packed:.1f}>" if packed else f"{text}>"

    def __enter__(self) -> Handle:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.detach()

    @property
    def policy(self) -> Policy:
        """The active policy: the one given to `attach`, bound to this training if it is adaptive."""
        return self._capture.policy

    @property
    def attached(self) -> bool:
        """Whether Encke is attached; False after `detach()`."""
        return self._attached

    @property
    def history(self) -> list[dict[str, Any]]:
        """One entry for each setting that an adaptive policy made, oldest first; empty for other policies.

        Every entry of `Comet` has the keys `step`, `layer`, `operation`, `slot`, `place` (which site), `codec`,
        `bits` or `bound` (the new setting), `share` (of non-zeros), `std` (of the values) and `gain` (measured over
        predicted error). Inputs that a weight's gradient is computed from also have `momentum` (mean absolute
        momentum of the weight), `tolerated` and `predicted` (error of its gradient, allowed and expected with the new
        setting), `in_force_predicted` and `in_force_measured` (the same with the old one; None if not measured).
        Other inputs with stochastic rounding have `propagated`, the relative error of the gradient they propagate.
        """
        policy = self.policy
        return policy.history if isinstance(policy, AdaptivePolicy) else []

    def report(self) -> Report:
        """Return the tensors that the last training forward pass saved, site by site, and the measured peak.

        Returns:
            A report to print, to read from Python, or to write as JSON.

        Example:
            >>> import torch, encke
            >>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 16, 3), torch.nn.ReLU(), torch.nn.Conv2d(16, 8, 3))
            >>> handle = encke.attach(model)
            >>> loss = model(torch.randn(8, 3, 32, 32)).sum()
            >>> [(site.layer, site.codec) for site in handle.report().sites]
            [('0', 'GroupQuant'), ('1', 'GroupQuant')]
        """
        capture = self._capture
        rows = rows_of(capture.ledger.last)
        device = None
        model = self._model() if self._model is not None else None
        if model is not None:
            device = next(model.parameters()).device
        elif torch.cuda.is_available():
            device = torch.device("cuda")
        return Report(
            policy=repr(capture.policy),
            saved_bytes=sum(row.saved_bytes for row in rows),
            packed_bytes=sum(row.packed_bytes for row in rows),
            peak_bytes=peak_bytes(device),
            forwards=capture.step,
            sites=rows,
            coarsened=sum(record.facts.encoder_state.coarsened for record in capture.ledger.last),
        )

    def log(self, target: str | os.PathLike[str] | TextIO | None, every: int = 1) -> None:
        """Write setting and ratio of every site for some training forward passes.

        A pass is written when the next one begins or the handle is detached, because only then are all sizes known.

        Args:
            target: A path gets JSON lines, appended; a stream such as `sys.stdout` gets readable lines; None stops it.
            every: Passes from one entry to the next.

        Raises:
            FileNotFoundError: The folder of the path does not exist.
            TypeError: The target is neither a path nor a stream.
            ValueError: `every` is not a whole number from 1 on.

        Example:
            >>> import io, torch, encke
            >>> model = torch.nn.Conv2d(3, 16, 3)
            >>> stream = io.StringIO()
            >>> with encke.attach(model) as handle:
            ...     handle.log(stream)
            ...     loss = model(torch.randn(8, 3, 32, 32)).sum()
            >>> print(stream.getvalue().splitlines()[0])
            step 1 - Convolution.input GroupQuant 4 bits ratio 7.53
        """
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise ValueError(f"every must be a whole number of forward passes, at least 1, got {every!r}")
        self._capture.ledger.log = None if target is None else StepLog(target, every).write

    def collect_now(self) -> bool:
        """Make the next training forward pass a collection step.

        Returns:
            False if the policy is not adaptive, so that there is nothing to collect.
        """
        schedule = self._capture.schedule
        if schedule is not None:
            schedule.collect_now()
        return schedule is not None

    def detach(self) -> None:
        """Remove every hook from the model; saved tensors stay readable. A second call has no effect."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._attached = False
        # Shallow copies of the model's layers may still report their calls.
        self._capture.passes.detached = True
        self._capture.passes.abandon()
        self._capture.ledger.write(self._capture.step)
        if self._capture.schedule is not None:
            self._capture.schedule.stop()
        model = self._model() if self._model is not None else None
        if model is not None and _handles.get(model) is self:
            del _handles[model]

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a resumed run needs to make the same choices.

        Returns:
            Plain data and tensors, which `torch.save` writes and `torch.load` reads with `weights_only=True`.

        Example:
            >>> import torch, encke
            >>> handle = encke.attach(torch.nn.Linear(2, 2))
            >>> state = handle.state_dict()
            >>> encke.attach(torch.nn.Linear(2, 2)).load_state_dict(state)
        """
        policy, capture = self.policy.state_dict(), self._capture
        return {"version": STATE_VERSION, "step": capture.step, "policy": policy, **capture.decisions()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict()` of an earlier run. A state that does not fit changes nothing.

        Args:
            state: Return value of `state_dict()`, from this release or an earlier one.

        Raises:
            ValueError: The state is invalid, or belongs to another policy or a later release.
        """
        if not isinstance(state, Mapping):
            raise ValueError(f"this is not a state of encke but a {type(state).__name__}")
        missing = {"version", "step", "policy"} - set(state)
        if missing:
            raise ValueError(f"this is not a state of encke: it lacks {sorted(missing)}")
        if state["version"] not in range(1, STATE_VERSION + 1):
            raise ValueError(f"this state has version {state['version']}; this release reads up to {STATE_VERSION}")
        before = self._capture.decisions()
        try:
            step = int(state["step"])
            self._capture.load_decisions(state)
            self.policy.load_state_dict(state["policy"])
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            self._capture.load_decisions(before)
            why = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
            raise ValueError(f"cannot continue from this state: {why}") from error
        self._capture.step = step
        for hook in self._hooks:
            if isinstance(hook, Around):
                hook.compiled.stale = True


def attach(
    model: nn.Module,
    policy: Policy | str = "default",
    optimizer: Optimizer | None = None,
    overrides: Mapping[str, Override] | None = None,
    min_bytes: int | None = None,
) -> Handle:
    """Keep the tensors that autograd saves in `model` compressed, in place, until `handle.detach()`.

    Nothing happens in `eval()` and under `no_grad`. Compile a model before attaching it.

    Args:
        model: The model to train. No class, no layer and no weight of it changes.
        policy: A policy of `encke.policies`, or a preset's name: "default", "careful", "aggressive", "comet" (as
            published) or "division".
        optimizer: The optimizer, if it exists already. An adaptive policy reads the momentum from it; without one it
            averages gradients itself.
        overrides: Codec, policy or preset's name for some layers, by pattern (`fnmatch`) of layer names as in
            `model.named_modules()`, without the prefixes that wrappers add. None leaves the tensors that these layers
            save uncompressed. A pattern applies to the layers it matches and all layers below them; the last pattern
            that matches a layer wins.
        min_bytes: Tensors of fewer bytes are kept as they are: packing them costs time and saves little memory. None:
            16 KiB, and tensors of less than a ten-thousandth of all saved bytes, up to 0.3 % together.

    Returns:
        The handle with report, log, history, state and `detach()`.

    Raises:
        NotImplementedError: Only a part of the model is compiled.
        TypeError: An argument has the wrong type.
        ValueError: The model has no parameters or is attached already, there is no such preset, a pattern matches no
            layer, the optimizer has no parameter of the model, or `min_bytes` is below 1.

    Example:
        >>> import torch, encke
        >>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 16, 3), torch.nn.ReLU(), torch.nn.Conv2d(16, 8, 3))
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        >>> handle = encke.attach(model, optimizer=optimizer, overrides={"0": encke.codecs.ErrorBounded(1e-3)})
        >>> for step in range(2):  # the first step sets the bits
        ...     optimizer.zero_grad()
        ...     model(torch.randn(8, 3, 32, 32)).square().mean().backward()
        ...     optimizer.step()
        >>> handle.report().ratio > 4
        True
        >>> handle.detach()
    """
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"attach takes a torch.nn.Module, got {type(model).__name__}; for functions use `with encke.compress():`"
        )
    optimizer = unwrapped(optimizer)
    check_optimizer(optimizer, policy, "attach(model, optimizer=optimizer)", model)
    check_min_bytes(min_bytes)
    policy = as_policy(policy)
    if next(model.parameters(), None) is None:
        raise ValueError(f"{type(model).__name__} has no parameters, so there is no training to compress")
    check_layers(model)
    by_layer = resolve(overrides or {}, [layer_name(name) for name, _ in model.named_modules()])
    compiled = compiled_part(model)
    for module in model.modules():
        if module in _handles:
            name = type(module).__name__
            raise ValueError(
                f"{name} is attached already: call detach() on its handle first, or pass the policy to that attach"
            )
    attached = [other for other in _handles if any(child is model for child in other.modules())]
    if attached:
        raise ValueError(f"{type(model).__name__} is part of a {type(attached[0]).__name__} that is attached already")

    for module in model.modules():
        drop_inert(module)
    capture = Capture(bind_policy(with_overrides(policy, by_layer), model, optimizer), model, min_bytes)
    handle = Handle._make(capture, model)
    left_alone = {name for name, each in by_layer.items() if each is None}
    if compiled is not None:
        handle._hooks.append(Around(compiled, capture, left_alone))
    else:
        layers = layers_of(model, left_alone)
        forwards = fused.install(layers, capture)
        told = {forward.layer for forward in forwards}
        handle._hooks += [
            *forwards,
            *hook_layers([layer for layer in layers if layer not in told], capture.passes),
        ]
    _handles[model] = handle
    fused.prepare_kernels(model, compiled is not None)
    return handle


def is_compiled(model: nn.Module) -> bool:
    """Return whether a model is compiled, by `torch.compile(model)` or `model.compile()`."""
    return "_orig_mod" in model._modules or model._compiled_call_impl is not None


def compiled_part(model: nn.Module) -> nn.Module | None:
    """Return the model itself if it is compiled, or the module that a DDP wraps; None if nothing is."""
    if is_compiled(model):
        return model
    if isinstance(model, DistributedDataParallel) and is_compiled(model.module):
        return model.module
    for name, module in model.named_modules():
        if is_compiled(module):
            raise NotImplementedError(
                f"{name} of this {type(model).__name__} is compiled and the rest is not: compile the whole model, or "
                "attach the compiled part"
            )
    return None


class Around:
    """Replaces the compiled call of a model until it is removed."""

    def __init__(self, model: nn.Module, capture: Capture, left_alone: set[str]) -> None:
        # Imported here because it imports the compiler.
        from encke.compiled.model import CompiledModel

        self.model = weakref.ref(model)
        self.capture = capture
        wrapped = "_orig_mod" in model._modules
        self.name = "forward" if wrapped else "_compiled_call_impl"
        self.call = model.__dict__[self.name]
        module = model._modules["_orig_mod"] if wrapped else model
        assert module is not None
        self.module = weakref.ref(module)
        self.layers = layers_of(module, left_alone)
        self.compiled = CompiledModel(capture, module, self.call, self.eager, left_alone)
        model.__dict__[self.name] = self.compiled
        self.watch = module.register_forward_pre_hook(WatchHook(self.compiled.watch, self.layers[0]))

    def eager(self, *args: Any, **kwargs: Any) -> Any:
        """Run one forward pass without the compiled graphs, captured as in eager mode."""
        module = self.module()
        assert module is not None
        hooks = hook_layers(self.layers, self.capture.passes)
        try:
            return module._call_impl(*args, **kwargs)
        finally:
            for hook in hooks:
                hook.remove()

    def remove(self) -> None:
        """Restore the model's compiled call."""
        self.watch.remove()
        self.compiled.detach()
        model = self.model()
        if model is not None and model.__dict__.get(self.name) is self.compiled:
            model.__dict__[self.name] = self.call


def check_layers(model: nn.Module) -> None:
    """Raise for layers whose weights do not exist yet, and for layers whose calls cannot be observed."""
    for name, module in model.named_modules():
        place = f"layer {name!r} of this {type(model).__name__}" if name else f"this {type(module).__name__}"
        if isinstance(module, torch.jit.ScriptModule):
            raise TypeError(
                f"{place} is a TorchScript module, whose layers cannot be followed: attach the model as it is without "
                "torch.jit, or compile it with torch.compile(model) and attach that"
            )
        if any(
            isinstance(t, UninitializedParameter | UninitializedBuffer)
            for t in (*module._parameters.values(), *module._buffers.values())
        ):
            raise ValueError(
                f"{place} is lazy and has no weights yet: run one forward pass, such as model(batch) under "
                "torch.no_grad(), then attach"
            )


def unwrapped(optimizer: Any) -> Any:
    """Return the optimizer inside a wrapper with an attribute `optimizer`, such as accelerate's."""
    while isinstance(inner := getattr(optimizer, "optimizer", None), Optimizer):
        optimizer = inner
    return optimizer


def check_optimizer(optimizer: Any, policy: Any, right: str, model: nn.Module | None = None) -> None:
    """Raise for a value that is not an optimizer, an optimizer in the policy's place, and another model's optimizer."""
    if isinstance(policy, Optimizer):
        raise TypeError(f"the second argument is the policy, got an optimizer ({type(policy).__name__}): write {right}")
    if optimizer is not None and not isinstance(optimizer, Optimizer):
        raise TypeError(f"optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}")
    if optimizer is None or model is None:
        return
    trained = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    own = set(map(id, model.parameters()))
    # While a layer runs, the model holds whole parameters in place of its sharded ones (DTensor).
    if not any(id(parameter) in own or is_wrapper(parameter) for parameter in trained):
        raise ValueError(
            f"this {type(optimizer).__name__} has no parameter of this {type(model).__name__}: it belongs to another "
            "model, or it was made before the model's parameters were replaced. Pass the optimizer that trains this "
            "model, or leave `optimizer` out"
        )


def check_min_bytes(min_bytes: Any) -> None:
    """Raise unless the smallest size is a whole number of bytes from 1 on."""
    if min_bytes is None:
        return
    if isinstance(min_bytes, bool) or not isinstance(min_bytes, int):
        raise TypeError(f"min_bytes must be a whole number of bytes, got {min_bytes!r}")
    if min_bytes < 1:
        raise ValueError(f"min_bytes must be at least 1 (pack everything), got {min_bytes}; the default is {SMALL}")


def bind_policy(policy: Policy, model: nn.Module | None, optimizer: Optimizer | None) -> Policy:
    """Return the policy bound to one training: an adaptive one gets a state of its own."""
    return policy.bind(model, optimizer) if isinstance(policy, AdaptivePolicy) else policy


class compress:
    """Keeps the tensors that autograd saves in a `with` block compressed, without a module.

    Create it once and enter it in every step: it learns from one step to the next which operation reads which tensor.
    The `with` statement returns the handle; after `handle.detach()` the block compresses nothing.

    Args:
        policy: A policy of `encke.policies`, or a preset's name; see `attach`.
        optimizer: The optimizer, if it exists already.
        min_bytes: Tensors of fewer bytes are kept as they are; see `attach`.

    Raises:
        RuntimeError: The context is entered while it is active.
        TypeError: An argument has the wrong type.
        ValueError: There is no such preset, or `min_bytes` is below 1.

    Example:
        >>> import torch, encke
        >>> weight = torch.randn(16, 3, 3, 3, requires_grad=True)
        >>> context = encke.compress()
        >>> for step in range(3):
        ...     with context as handle:
        ...         loss = torch.conv2d(torch.randn(8, 3, 32, 32), weight).tanh().mean()
        ...     loss.backward()
        >>> handle.report().ratio > 4
        True
    """

    def __init__(
        self, policy: Policy | str = "default", optimizer: Optimizer | None = None, min_bytes: int | None = None
    ) -> None:
        optimizer = unwrapped(optimizer)
        check_optimizer(optimizer, policy, "compress(optimizer=optimizer)")
        check_min_bytes(min_bytes)
        self._capture = Capture(bind_policy(as_policy(policy), None, optimizer), None, min_bytes)
        self._layer = Layer("", None, None, True)
        self._handle = Handle._make(self._capture, None)

    def __enter__(self) -> Handle:
        if self._capture.threads.forward.frames:
            raise RuntimeError("this compress context is entered already: make a new one for a nested block")
        if self._handle.attached and torch.is_grad_enabled() and may_push():
            self._capture.passes.begin(self._layer)
        return self._handle

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._capture.threads.forward.frames:
            self._capture.passes.finish(None)
