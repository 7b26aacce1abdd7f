"""accelerate needs no callback: `attach` takes the prepared model and optimizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import encke
from tests.integrations.common import EXACT, llama, needs, tokens

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]


def new_accelerator(precision: str = "no") -> Any:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)  # else the first precision holds for the process
    return Accelerator(cpu=True, mixed_precision=precision, gradient_accumulation_steps=2)


def train(policy: Any, precision: str) -> tuple[list[float], encke.Handle | None]:
    model, accelerator = llama(), new_accelerator(precision)
    batches = torch.utils.data.DataLoader(tokens(48), batch_size=8)
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    model, optimizer, batches = accelerator.prepare(model, optimizer, batches)
    handle = encke.attach(accelerator.unwrap_model(model), policy, optimizer) if policy is not None else None
    losses = []
    for batch in batches:
        with accelerator.accumulate(model):
            loss = model(input_ids=batch, labels=batch).loss
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses, handle


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_losses_are_those_of_plain(precision: str) -> None:
    needs("transformers", "accelerate")
    plain, _ = train(None, precision)
    exact, _ = train(EXACT, precision)
    ours, handle = train("default", precision)
    assert exact == plain and len(plain) == 6
    assert ours != plain and ours == pytest.approx(plain, rel=0.005)
    assert handle is not None and handle.report().ratio > 2 and {row["step"] for row in handle.history} == {1}


def test_checkpoints_carry_a_registered_handle(tmp_path: Path) -> None:
    needs("accelerate")
    found = []
    for _ in range(2):
        accelerator, model = new_accelerator(), nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 8))
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
        handle = encke.attach(accelerator.unwrap_model(model), optimizer=optimizer)
        accelerator.register_for_checkpointing(handle)
        if not found:
            model(torch.randn(256, 64)).square().mean().backward()
            optimizer.step()
            accelerator.save_state(str(tmp_path))
        else:
            accelerator.load_state(str(tmp_path))
        found.append(repr(handle.state_dict()))
    assert found[0] == found[1] and "GroupQuant" in found[0]
