"""What users call: attach, compress, and the handle that they get."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from types import TracebackType
from typing import Any, TextIO

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from encke.capture.hooks import Capture
from encke.capture.modules import Layer, WatchHook, drop_inert, hook_layers, layers_of
from encke.capture.passes import may_push
from encke.codecs.pending import settle_all
from encke.fused import registry as fused
from encke.policies import AdaptivePolicy, Policy, preset
from encke.report import Report, StepLog, peak_bytes, rows_of

_handles: weakref.WeakKeyDictionary[nn.Module, Handle] = weakref.WeakKeyDictionary()


class Handle:
    """What `attach` and `compress` return: report, state, detach."""

    def __init__(self, capture: Capture, model: nn.Module | None = None, optimizer: Optimizer | None = None) -> None:
        self._capture = capture
        self._model = weakref.ref(model) if model is not None else None
        self._hooks: list[Any] = []
        self.optimizer = optimizer

    @property
    def policy(self) -> Policy:
        """The policy at work."""
        return self._capture.policy

    @property
    def history(self) -> list[dict[str, Any]]:
        """What the policy set at each collection step, site by site, with the figures behind it; for plotting."""
        policy = self.policy
        return policy.history if isinstance(policy, AdaptivePolicy) else []

    def log(self, target: str | os.PathLike[str] | TextIO | None, every: int = 1) -> None:
        """Writes bound and ratio of every layer at every `every`-th forward pass; None ends it.

        A path gets JSON lines, appended; a stream such as `sys.stdout` gets lines to read. A pass is written when the
        next one begins or the handle is detached: only then all sizes are known.
        """
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise ValueError(f"every must be a whole number of forward passes, at least 1, got {every!r}")
        self._capture.ledger.log = None if target is None else StepLog(target, every).write

    @property
    def attached(self) -> bool:
        """Whether the model's forward passes go through this handle."""
        return bool(self._hooks)

    def report(self) -> Report:
        """What the last training forward pass saved, and the measured peak."""
        settle_all()
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
        )

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
        """Takes every hook off the model; what was saved before stays readable. Calling it twice does no harm."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        # Shallow copies of the model's layers may still tell of their calls.
        self._capture.passes.detached = self._model is not None
        self._capture.passes.abandon()
        self._capture.ledger.write(self._capture.step)
        if self._capture.schedule is not None:
            self._capture.schedule.stop()
        model = self._model() if self._model is not None else None
        if model is not None and _handles.get(model) is self:
            del _handles[model]

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs to make the same decisions."""
        return {"version": 1, "step": self._capture.step, "policy": self.policy.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from `state_dict()` of an earlier run."""
        missing = {"version", "step", "policy"} - set(state)
        if missing:
            raise ValueError(f"this is not a state of encke: it lacks {sorted(missing)}")
        if state["version"] != 1:
            raise ValueError(f"this state has version {state['version']}; this release reads version 1")
        self.policy.load_state_dict(state["policy"])
        self._capture.step = int(state["step"])
        for hook in self._hooks:
            if isinstance(hook, Around):
                hook.compiled.stale = True


def attach(
    model: nn.Module,
    policy: Policy | str = "default",
    optimizer: Optimizer | None = None,
    filter: Callable[[nn.Module, str], bool] | None = None,
) -> Handle:
    """Keeps what autograd saves in `model` compressed from now on, in place, until `handle.detach()`.

    `policy` chooses the codec for each saved tensor (default: `Comet()`, which follows the training). With the
    `optimizer` it sees the momentum and what becomes of the gradients; without, it averages gradients itself.
    `filter(module, name)` returning False leaves what that layer itself saves as it is. Nothing happens in `eval()` and
    under `no_grad`.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"attach takes a torch.nn.Module, got {type(model).__name__}; for functions use `with encke.compress():`"
        )
    check_optimizer(optimizer)
    policy = policy_from(policy)
    if filter is not None and not callable(filter):
        raise TypeError(f"filter must be a function (module, name) -> bool, got {type(filter).__name__}")
    if next(model.parameters(), None) is None:
        raise ValueError(f"{type(model).__name__} has no parameters, so there is no training to compress")
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
    capture = Capture(bind_policy(policy, model, optimizer), model)
    handle = Handle(capture, model, optimizer)
    if compiled is not None:
        handle._hooks.append(Around(compiled, capture, filter))
    else:
        layers = layers_of(model, filter)
        forwards = fused.install(layers, capture)
        told = {forward.layer for forward in forwards}
        handle._hooks += [
            *forwards,
            *hook_layers([layer for layer in layers if layer not in told], capture.passes.enter, capture.passes.leave),
        ]
    _handles[model] = handle
    return handle


def is_compiled(model: nn.Module) -> bool:
    """Whether calls of a model go to what torch.compile made: `torch.compile(model)` or `model.compile()`."""
    return "_orig_mod" in model._modules or model._compiled_call_impl is not None


def compiled_part(model: nn.Module) -> nn.Module | None:
    """The model itself if it is compiled, or what a DDP wraps; None if nothing is."""
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
    """Puts itself between a compiled model and what torch.compile made of it, until it is removed."""

    def __init__(
        self, model: nn.Module, capture: Capture, filter: Callable[[nn.Module, str], bool] | None = None
    ) -> None:
        # Imported late: it brings the compiler in.
        from encke.compiled.model import Compiled

        self.model = weakref.ref(model)
        self.capture = capture
        wrapped = "_orig_mod" in model._modules
        self.name = "forward" if wrapped else "_compiled_call_impl"
        self.call = model.__dict__[self.name]
        module = model._modules["_orig_mod"] if wrapped else model
        assert module is not None
        self.module = weakref.ref(module)
        self.layers = layers_of(module, filter)
        skip = {layer.name for layer in self.layers if not layer.compress}
        self.compiled = Compiled(capture, module, self.call, self.eager, skip)
        model.__dict__[self.name] = self.compiled
        self.watch = module.register_forward_pre_hook(WatchHook(self.compiled.watch, self.layers[0]))

    def eager(self, *args: Any, **kwargs: Any) -> Any:
        """One forward pass without the compiled graphs, captured as in eager mode."""
        module = self.module()
        assert module is not None
        hooks = hook_layers(self.layers, self.capture.passes.enter, self.capture.passes.leave)
        try:
            return module._call_impl(*args, **kwargs)
        finally:
            for hook in hooks:
                hook.remove()

    def remove(self) -> None:
        self.watch.remove()
        model = self.model()
        if model is not None and model.__dict__.get(self.name) is self.compiled:
            model.__dict__[self.name] = self.call


def policy_from(policy: Any) -> Policy:
    """Return the policy itself, or the one with this preset name."""
    if isinstance(policy, str):
        return preset(policy)
    if not isinstance(policy, Policy):
        raise TypeError(
            f"policy must be a name such as 'default' or one of encke.policies, such as encke.policies.Comet(), "
            f"got {policy!r}"
        )
    return policy


def check_optimizer(optimizer: Any) -> None:
    if optimizer is not None and not isinstance(optimizer, Optimizer):
        raise TypeError(f"optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}")


def bind_policy(policy: Policy, model: nn.Module | None, optimizer: Optimizer | None) -> Policy:
    """Return the policy at work in one training: an adaptive one gets a state of its own."""
    return policy.bind(model, optimizer) if isinstance(policy, AdaptivePolicy) else policy


class compress:
    """`with encke.compress(policy) as handle:` keeps what autograd saves in the block compressed, without a module.

    Make it once and enter it at every step: it learns from one step to the next who reads what.
    """

    def __init__(self, policy: Policy | str = "default", optimizer: Optimizer | None = None) -> None:
        check_optimizer(optimizer)
        self._capture = Capture(bind_policy(policy_from(policy), None, optimizer), None)
        self._layer = Layer("", None, None, True)
        self._handle = Handle(self._capture, optimizer=optimizer)

    def __enter__(self) -> Handle:
        if self._capture.threads.forward.frames:
            raise RuntimeError("this compress context is entered already: make a new one for a nested block")
        if torch.is_grad_enabled() and may_push():
            self._capture.passes.begin(self._layer)
        return self._handle

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._capture.threads.forward.frames:
            self._capture.passes.finish(None)
