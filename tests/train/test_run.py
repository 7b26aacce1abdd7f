"""A training before its first step: model and data have to fit each other."""

from __future__ import annotations

import pytest
import torch

from encke.tools.errors import UsageError
from encke.train.data.sources import load
from encke.train.run import network_for
from encke.train.settings import read


def network(model: str, side: int, *more: str) -> torch.nn.Module:
    settings = read("digits", ["--model", model, "--data", "synthetic", f"--data.size={side}", "--batch=4", *more])
    return network_for(settings, load(settings.data, settings.seed, None))


@pytest.mark.parametrize(
    ("model", "side", "more", "words"),
    [
        ("squeezenet1_0", 8, [], r"\(4, 3, 8, 8\) \(.*too small\): change data.size or batch"),
        ("mobilenet_v3_small", 16, ["--batch", "1"], r"\(1, 3, 16, 16\) \(Expected more than 1 value"),
        ("mobilenet_v3_small", 16, ["--accumulate", "4"], r"\(1, 3, 16, 16\) \(Expected more than 1 value"),
        ("vit_b_16", 28, [], "takes no images of 28 pixels .*data.size"),
    ],
)
def test_a_batch_that_the_network_cannot_take_is_an_error_of_one_line(model, side, more, words):
    with pytest.raises(UsageError, match=f"model.name {model} .*{words}") as error:
        network(model, side, *more)
    assert "\n" not in str(error.value)


def test_a_network_that_takes_the_batch_is_unchanged_by_the_test_of_it():
    torch.manual_seed(0)
    made = network("mobilenet_v3_small", 32)
    drawn = torch.rand(3)
    assert {x.device.type for x in (*made.parameters(), *made.buffers())} == {"cpu"}
    assert all(int(b) == 0 for name, b in made.named_buffers() if name.endswith("num_batches_tracked"))
    torch.manual_seed(0)
    from encke.train.models.registry import build
    from encke.train.settings import Model

    again = build(Model("mobilenet_v3_small"), 10, 3, 32)
    assert all(torch.equal(a, b) for a, b in zip(made.parameters(), again.parameters(), strict=True))
    assert torch.equal(drawn, torch.rand(3))
