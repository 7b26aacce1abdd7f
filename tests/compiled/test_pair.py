"""Names that the nodes of compiled graphs tell."""

from __future__ import annotations

import torch
from torch import nn

from encke.compiled.pair import layer_of, root_of


def test_names_of_layers_and_operations() -> None:
    node = torch.fx.Graph().placeholder("x")
    for path, name in (
        ("L['self'].blocks.0.norm", "blocks.0.norm"),
        ("L['self']._modules['0']._modules['conv']", "0.conv"),
        ("L['fn']._orig_mod.module.a[3].b", "a.3.b"),
        ("", ""),
    ):
        node.meta["nn_module_stack"] = {"k": (path, nn.Linear)} if path else {}
        assert layer_of(node) == name
    assert root_of("_native_batch_norm_legit_functional") == root_of("native_batch_norm_backward") == "batch_norm"
    assert root_of("gelu_backward") == root_of("gelu") != root_of("threshold_backward")
