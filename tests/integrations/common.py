"""Tiny language models, data to learn from, and the hooks that a model has. Libraries are imported when used."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from encke.codecs import ErrorBounded
from encke.policies import Fixed
from encke.train.models.vision import torchvision_models

VOCABULARY, LENGTH = 64, 64
EXACT = Fixed(ErrorBounded(0))


def needs(*libraries: str) -> None:
    """Skip the test if a library is missing. They import torchvision, which is made to fit the installed torch."""
    if libraries:
        torchvision_models()
    for library in libraries:
        pytest.importorskip(library)


def tokens(count: int) -> Tensor:
    """Return sequences that count upwards in steps of 1, 2 or 3."""
    steps = torch.arange(count)[:, None] % 3 + 1
    return (torch.arange(LENGTH) * steps + torch.arange(count)[:, None]) % VOCABULARY


def llama(layers: int = 1) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM, set_seed

    set_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=LENGTH,
        )
    )


def trainer(model: nn.Module, folder: Path, *callbacks: Any, steps: int = 12, **options: Any) -> Any:
    """Return a `Trainer` for a language model on the CPU that logs every step."""
    from transformers import Trainer, TrainingArguments

    settings = {
        "max_steps": steps,
        "per_device_train_batch_size": 8,
        "learning_rate": 3e-3,
        "lr_scheduler_type": "constant",
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
    }
    arguments = TrainingArguments(str(folder), **{**settings, **options})
    data = [{"input_ids": row, "labels": row} for row in tokens(96)]
    evaluated = data[:8] if arguments.eval_strategy != "no" else None
    return Trainer(model=model, args=arguments, train_dataset=data, eval_dataset=evaluated, callbacks=list(callbacks))


def losses(trainer: Any) -> list[float]:
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]


def hooks(model: nn.Module) -> list[tuple[str, int]]:
    """Return all that Encke could leave on a model: hooks, and attributes of the instances."""
    found = []
    for name, module in model.named_modules():
        parts = (module._forward_hooks, module._forward_pre_hooks, module._forward_hooks_always_called)
        found.append((f"{name} {sorted(module.__dict__)}", sum(map(len, parts))))
    return found
