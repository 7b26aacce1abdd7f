"""Encoders and decoders in compiled graphs: packed where made, restored where read, gradients as in eager mode."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import encke
from encke.codecs import Codec, DualPrecision, ErrorBounded, GroupQuant
from encke.codecs.base import EncoderState
from encke.codecs.layout import layout_of, rows_for, with_rows
from encke.compiled.model import CompiledModel
from encke.compiled.writer import Form, Packing, order_of
from encke.kernels import mix
from encke.train.models.gpt import Gpt
from tests.compiled.common import (
    EIGHT,
    TWO,
    Settable,
    compile,
    constant_codecs,
    error,
    gradients,
    graphs,
    images,
    net,
    same,
)


class Expected:
    """Eager mode with the operators and seeds of a compiled model: packs what the report says was packed, in order."""

    def __init__(self, compiled: CompiledModel, codec: Codec, step: int) -> None:
        self.codec = codec
        packings = [p for graph in compiled.packings.values() for p in graph if p.form is not Form.KEPT]
        self.coded = {p.sites[0].layer: p for p in packings}
        self.step = step
        self.layer = ""

    def pack(self, t: Tensor) -> object:
        packing = self.coded.get(self.layer)
        if t.numel() * t.element_size() < 16384 or packing is None or t.dim() != 4:
            return t
        t, site = t.detach(), packing.sites[0]
        order = order_of(t)
        if packing.form is Form.MASK:
            data = torch.ops.encke.mask_encode(t > 0, order)
            return lambda: torch.ops.encke.mask_decode(data, t.shape, t.stride(), order).to(t.dtype)
        layout, length = layout_of(t.shape, t.stride())
        if site.operation == "BatchNorm":
            layout = with_rows(layout, rows_for(layout, length, ("channels", 0)))
        key = mix(self.step, site.number, 0)
        return self.codec_of(packing).encode_run(t, layout, length, key, EncoderState()).decode

    def codec_of(self, packing: Packing) -> Codec:
        """Return the codec of the day, with mask bits where a ReLU reads them."""
        if isinstance(self.codec, DualPrecision) and any(site.need == "mask" for site in packing.sites):
            return replace(self.codec, mask=True)
        return self.codec

    def unpack(self, packed: object) -> Tensor:
        return packed() if callable(packed) else packed  # type: ignore[return-value]


@pytest.mark.parametrize("constant", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last], ids=["nchw", "nhwc"])
def test_gradients_equal_those_of_eager_mode_bit_for_bit(
    monkeypatch: pytest.MonkeyPatch, memory_format: torch.memory_format, constant: bool
) -> None:
    codecs: list[Codec] = [GroupQuant(bits=2), GroupQuant(bits=2)]
    if constant:
        constant_codecs(monkeypatch)
    else:
        codecs += [ErrorBounded(0.05), DualPrecision(bits=4), GroupQuant(bits=4, signs=True), GroupQuant(2, group=64)]
    model = net().to(memory_format=memory_format)
    twin = copy.deepcopy(model)
    x = images().to(memory_format=memory_format)
    compiled, policy = compile(model), Settable(codecs[0])
    handle = encke.attach(compiled, policy)
    (around,) = handle._hooks
    for step, policy.codec in enumerate(codecs, 1):
        found = gradients(compiled, x)
        expected = Expected(around.compiled, policy.codec, step)
        hooks = [
            module.register_forward_pre_hook(lambda m, a, name=name, e=expected: setattr(e, "layer", name))
            for name, module in twin.named_modules()
        ]
        twin.zero_grad()
        with torch.autograd.graph.saved_tensors_hooks(expected.pack, expected.unpack):
            out = twin(x).square().mean()
        out.backward()
        assert same(found, [p.grad for p in twin.parameters()])
        for hook in hooks:
            hook.remove()
    assert graphs() == 1


def test_softmax_is_saved_and_not_recomputed_from_lossy_scores() -> None:
    class Scores(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k = nn.Linear(64, 64), nn.Linear(64, 64)

        def forward(self, x: Tensor) -> Tensor:
            return torch.softmax(self.q(x) @ self.k(x).transpose(1, 2), -1) @ x

    model = compile(Scores())
    handle = encke.attach(model, TWO)
    gradients(model, torch.randn(4, 64, 64))
    rows = {(row.operation, row.bound) for row in handle.report().sites if row.codec == "GroupQuant"}
    assert rows == {("Softmax", "8 bits"), ("Bmm", "4 bits")}


def test_relu_between_convolutions_has_exact_masks_at_two_bits() -> None:
    """Small values may come back negative: zeros are what is kept."""
    model = nn.Sequential(nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3))
    compiled = compile(model)
    plain = gradients(compiled, images())
    handle = encke.attach(compiled, TWO)
    found = gradients(compiled, images())
    # The gradient of a bias needs the masks alone.
    for i in (1, 3, 5):
        torch.testing.assert_close(found[i], plain[i], rtol=1e-4, atol=1e-7)
    assert [row.codec for row in handle.report().sites if row.layer in ("2", "4")] == ["GroupQuant"] * 2


def test_a_value_recomputed_from_a_lossy_one_is_saved_instead() -> None:
    """The partitioner would recompute the activation from the lossy input of batch norm, and its mask from that."""

    class Chain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.out = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 16, 1)
            self.norm = nn.BatchNorm2d(16)

        def forward(self, x: Tensor) -> Tensor:
            y = nn.functional.silu(self.norm(self.conv(x)) + 1)
            return self.out(y * torch.sigmoid(y.mean((2, 3), keepdim=True)))

    model = compile(Chain())
    plain = gradients(model, images())
    encke.attach(model, EIGHT)
    assert error(plain, gradients(model, images())) < 0.03


def held_by(output: Tensor) -> int:
    """Bytes of what the compiled backward holds."""
    node, seen = output.grad_fn, set()
    while "CompiledFunction" not in node.name():
        node = node.next_functions[0][0]
    total = 0
    for t in node.saved_tensors:
        storage = t.untyped_storage()
        if storage.data_ptr() not in seen and not isinstance(t, nn.Parameter):
            seen.add(storage.data_ptr())
            payload = getattr(storage, "encke_payload", None)
            total += storage.nbytes() if payload is None else payload.nbytes
    return total


@pytest.mark.parametrize("constant", [False, True])
def test_what_the_backward_graph_holds_is_what_the_report_says(monkeypatch: pytest.MonkeyPatch, constant: bool) -> None:
    if constant:
        constant_codecs(monkeypatch)
    model = compile(net())
    plain = held_by(model(images()).square().mean())
    handle = encke.attach(model, TWO)
    packed = held_by(model(images()).square().mean())
    report = handle.report()
    assert packed < plain / 6
    weights = sum(p.nbytes for p in model.parameters() if p.dim() > 1)
    assert report.packed_bytes <= packed <= report.packed_bytes + weights + 4096


def test_values_are_packed_where_they_are_made_and_restored_where_they_are_read(monkeypatch) -> None:
    seen = {}

    def spy(self, forward, backward, *rest):
        inline(self, forward, backward, *rest)
        seen["forward"], seen["backward"] = forward.graph, backward.graph

    inline = CompiledModel.inline
    monkeypatch.setattr(CompiledModel, "inline", spy)
    model = compile(net())
    encke.attach(model, TWO)
    gradients(model, images())
    forward = list(seen["forward"].nodes)
    for i, node in enumerate(forward):
        if "encode" in str(node.target) or "site_pack" in str(node.target):
            assert forward[i - 1] is node.args[0]
    backward = list(seen["backward"].nodes)
    decoded = [node for node in backward if "decode" in str(node.target)]
    assert len(decoded) == 4
    for node in decoded:
        assert min(backward.index(user) for user in node.users) == backward.index(node) + 1


def test_a_smaller_last_batch_works() -> None:
    model = net().to(memory_format=torch.channels_last)
    compiled = compile(model)
    encke.attach(compiled, EIGHT)
    for batch in (8, 8, 5, 7, 8, 3):
        x = images(batch).to(memory_format=torch.channels_last)
        assert error(gradients(copy.deepcopy(model), x), gradients(compiled, x)) < 0.03
    # The second size makes the batch a symbol; all further ones share that graph.
    assert graphs() == 2


@pytest.mark.slow
def test_dynamic_shapes_from_the_start() -> None:
    model = Gpt(64, 64, 1, 4, 64, dropout=0.0)
    compiled = compile(model, dynamic=True)
    encke.attach(compiled, EIGHT)
    for batch, length in ((8, 64), (6, 48), (9, 33)):
        tokens = torch.randint(64, (batch, length))
        assert error(gradients(copy.deepcopy(model), tokens), gradients(compiled, tokens)) < 0.05
    assert graphs() <= 2
