"""Callback for the `Trainer` of Lightning."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from encke.integrations.common import EnckeTraining
from encke.policies.base import Policy
from encke.policies.overrides import Override

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
except ModuleNotFoundError as error:
    if error.name not in ("lightning", "lightning.pytorch"):
        raise
    raise ImportError("this callback is for Lightning: pip install lightning") from error


class EnckeCallback(EnckeTraining, Callback):
    """Keeps the tensors that autograd saves compressed while a Lightning `Trainer` trains.

    It attaches Encke when training starts and detaches at the end. All of `training_step` counts as the forward pass,
    including the loss; under manual optimization, each call of a layer does. The trainer's loggers get `encke_ratio`,
    `encke_saved_bytes`, `encke_packed_bytes`, `encke_peak_bytes` and, for an adaptive policy, `encke_bits` (mean over
    the places it has set). Checkpoints contain the policy's state. The report of the last step is written to
    `encke_report.json` in the folder for logs. `handle` is the handle that `encke.attach` returned.

    Args:
        policy: A policy of `encke.policies`, or a preset's name, as for `encke.attach`.
        overrides: Codecs or policies for some layers, by pattern, as for `encke.attach`.
        min_bytes: Tensors of fewer bytes are kept as they are; see `encke.attach`.
        module: Name of the part to attach, such as "net" for `self.net`; a compiled part must be named.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: There is no such preset, or `min_bytes` is below 1.
    """

    def __init__(
        self,
        policy: Policy | str = "default",
        overrides: Mapping[str, Override] | None = None,
        min_bytes: int | None = None,
        module: str = "",
    ) -> None:
        super().__init__(policy, overrides, min_bytes)
        self.module = module
        self._loaded: dict[str, Any] | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Attach Encke, and continue from the state of a checkpoint."""
        if getattr(pl_module, "_compiler_ctx", None) is not None:
            raise NotImplementedError(
                "EnckeCallback cannot follow a LightningModule that is compiled as a whole: compile the network in it, "
                'as in self.net = torch.compile(net), and pass EnckeCallback(module="net")'
            )
        optimizers = trainer.optimizers
        model = pl_module.get_submodule(self.module) if self.module else trainer.strategy.model
        self.begin(model, optimizers[0] if len(optimizers) == 1 else None, self._loaded)
        self._loaded = None
        # Strategies that wrap the module call `training_step` through the wrapper already.
        if model is pl_module and pl_module.automatic_optimization:
            pl_module.training_step = CalledAsForward(pl_module, pl_module.training_step)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        """Log the figures in the steps that the trainer logs."""
        self.check_first_step()
        if trainer.global_step % trainer.log_every_n_steps == 0 or trainer.is_last_batch:
            pl_module.log_dict(self.figures())

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Detach Encke and write the report."""
        folder = trainer.log_dir or trainer.default_root_dir
        self._take_off(pl_module)
        self.finish(folder if trainer.is_global_zero else None)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Detach Encke."""
        self._take_off(pl_module)
        self.finish(None)

    def _take_off(self, pl_module: LightningModule) -> None:
        if isinstance(pl_module.__dict__.get("training_step"), CalledAsForward):
            pl_module.training_step = pl_module.training_step.step
            if getattr(pl_module.training_step, "__func__", None) is type(pl_module).training_step:
                del pl_module.training_step

    def state_dict(self) -> dict[str, Any]:
        """Return the policy's state, for the checkpoint."""
        return {} if self.handle is None else self.handle.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep the state of a checkpoint until training starts."""
        self._loaded = state_dict or None


class CalledAsForward:
    """A `training_step` that runs as the module's forward, so that it is one forward pass with its loss."""

    def __init__(self, module: LightningModule, step: Callable[..., Any]) -> None:
        self.module = module
        self.step = step

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self.module
        own = module.__dict__.get("forward")

        def restore() -> None:
            if own is not None:
                module.forward = own
            else:
                module.__dict__.pop("forward", None)

        def forward(*args: Any, **kwargs: Any) -> Any:
            restore()  # the step itself may call the module
            return self.step(*args, **kwargs)

        module.forward = forward
        try:
            return module(*args, **kwargs)
        finally:
            restore()
