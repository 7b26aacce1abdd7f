"""Callback for the `Trainer` of transformers and its derivatives, such as TRL's `SFTTrainer`."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from encke.integrations.common import EnckeTraining
from encke.integrations.logits import ChunkedLoss, chunk_loss
from encke.policies.base import Policy
from encke.policies.overrides import Override

try:
    from transformers import Trainer, TrainerCallback
except ModuleNotFoundError as error:
    if error.name != "transformers":
        raise
    raise ImportError("this callback is for transformers: pip install transformers accelerate") from error


class EnckeCallback(EnckeTraining, TrainerCallback):
    """Keeps the tensors that autograd saves compressed while a `Trainer` trains.

    It attaches Encke when `train()` begins and detaches at the end. The trainer's logs get `encke_ratio`,
    `encke_saved_bytes`, `encke_packed_bytes`, `encke_peak_bytes` and, for an adaptive policy, `encke_bits` (mean over
    the places it has set). Checkpoints get the policy's state, and `train(resume_from_checkpoint=...)` continues from
    it. The report of the last step is written to `encke_report.json` in the output folder. `handle` is the handle that
    `encke.attach` returned; after an error in training, `handle.detach()` removes Encke.

    Args:
        policy: A policy of `encke.policies`, or a preset's name, as for `encke.attach`.
        overrides: Codecs or policies for some layers, by pattern, as for `encke.attach`.
        min_bytes: Tensors of fewer bytes are kept as they are; see `encke.attach`.
        chunk_loss: Whether a language model's loss is computed in chunks (`encke.integrations.chunk_loss`) if its
            output layer is a plain linear layer. Losses are equal up to the order of summation.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: There is no such preset, or `min_bytes` is below 1.
    """

    def __init__(
        self,
        policy: Policy | str = "default",
        overrides: Mapping[str, Override] | None = None,
        min_bytes: int | None = None,
        chunk_loss: bool = True,
    ) -> None:
        super().__init__(policy, overrides, min_bytes)
        self.chunk_loss = chunk_loss
        self._chunked: ChunkedLoss | None = None

    def on_train_begin(
        self, args: Any, state: Any, control: Any, model: Any = None, optimizer: Any = None, **kwargs: Any
    ) -> None:
        """Attach Encke to the model that is called in training, and load the state of the checkpoint."""
        trainer, checkpoint = running_trainer()
        # Reporters such as TensorBoard's precede the user's callbacks and would miss our figures. Callbacks after this
        # one keep their positions, so that the loop that called us continues correctly.
        callbacks = trainer.callback_handler.callbacks
        callbacks.remove(self)
        callbacks.insert(0, self)
        saved = load_state(Path(checkpoint), args) if checkpoint is not None else None
        self.begin(trainer.model_wrapped, optimizer, saved)
        find_head = getattr(model, "get_output_embeddings", None)
        head = find_head() if self.chunk_loss and find_head is not None else None
        if type(head) is nn.Linear:
            self._chunked = chunk_loss(model, head)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Warn if the first step was not compressed."""
        self.check_first_step()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        """Add the figures to the trainer's training logs."""
        if logs is None or not {"loss", "train_loss"} & logs.keys():
            return
        figures = self.figures()
        logs.update(figures)
        if state.log_history:
            state.log_history[-1].update(figures)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Write the policy's state into the checkpoint, one file for each process."""
        folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        if self.handle is not None and folder.is_dir() and not args.save_only_model:
            torch.save(self.handle.state_dict(), folder / state_name(args))

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Detach Encke and write the report."""
        if self._chunked is not None:
            self._chunked.remove()
        self.finish(args.output_dir if state.is_world_process_zero else None)


def state_name(args: Any) -> str:
    """Return the name of this process's state file, modelled on `Trainer`'s names for random states."""
    return "encke.pt" if args.world_size <= 1 else f"encke_{args.process_index}.pt"


def load_state(folder: Path, args: Any) -> dict[str, Any] | None:
    """Return the state in a checkpoint, None with a warning if it has none."""
    # The number of processes may have changed: all made the same decisions.
    files = [folder / name for name in (state_name(args), "encke.pt", "encke_0.pt")]
    file = next((file for file in files if file.is_file()), None)
    if file is None:
        warnings.warn(
            f"encke: {folder} was saved without EnckeCallback, so the policy learns anew from here",
            RuntimeWarning,
            stacklevel=2,
        )
        return None
    return torch.load(file, map_location="cpu", weights_only=True)


def running_trainer() -> tuple[Trainer, str | None]:
    """Return the trainer whose `train()` is on the call stack, and the checkpoint that it resumes from.

    A callback is given neither; the model that it is given is not the compiled one.
    """
    frame = sys._getframe(1)
    while frame is not None:
        values = frame.f_locals
        if frame.f_code.co_name == "train" and isinstance(values.get("self"), Trainer):
            checkpoint = values.get("resume_from_checkpoint")
            return values["self"], None if checkpoint is None else str(checkpoint)
        frame = frame.f_back  # type: ignore[assignment]
    raise RuntimeError(
        "EnckeCallback found no Trainer.train() that called it: pass it as Trainer(..., callbacks=[EnckeCallback()]). "
        "In a training loop of your own, call encke.attach(model, optimizer=optimizer) instead"
    )
