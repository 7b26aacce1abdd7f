"""Backward graphs that read codes and restore less: the same gradients, fewer decoders, and nothing elsewhere.

The graphs are those that inductor would get, and are run as they are: no compiler is needed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.fx import Graph

import halley
from halley import rewrites
from halley.compiled import Compiled
from halley.graphs import name_of
from tests.test_compiled import TWO, compile, error, fresh, gradients, images, net, same  # noqa: F401

LAST = torch.channels_last


def as_inductor_gets_it(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., object]:
    from torch._inductor.decomposition import select_decomp_table

    def run(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., object]:
        return make_boxed_func(graph.forward)

    partition = min_cut_rematerialization_partition
    return aot_autograd(fw_compiler=run, decompositions=select_decomp_table(), partition_fn=partition)(graph, inputs)


@pytest.fixture
def everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rewrites on a CPU too, whatever the size."""
    monkeypatch.setattr(rewrites, "NORMS_ON", {"cuda", "cpu"})
    monkeypatch.setattr(rewrites, "SMALLEST", 1)
    monkeypatch.setattr(rewrites, "LARGE_CONV", 1)


@pytest.fixture
def backward(monkeypatch: pytest.MonkeyPatch) -> list[Graph]:
    """The backward graphs that were written, the last one last."""
    seen: list[Graph] = []
    inline = Compiled.inline

    def spy(self, forward, backward, *rest):
        inline(self, forward, backward, *rest)
        seen.append(backward.graph)

    monkeypatch.setattr(Compiled, "inline", spy)
    return seen


def names(graph: Graph) -> Counter[str]:
    return Counter(name_of(node.target) for node in graph.nodes if node.op == "call_function")


def both(model: Callable[[], nn.Module], x: Tensor, backend: object) -> tuple[list[Tensor], list[Tensor]]:
    """Gradients of a model without and with rewrites; codes and seeds are the same."""
    found = []
    for on in (False, True):
        with pytest.MonkeyPatch.context() as patch:
            if not on:
                patch.setattr(rewrites, "norm_behind", lambda x: None)
                patch.setattr(rewrites, "parts", lambda conv, x: False)
            torch.manual_seed(1)
            compiled = compile(model(), backend=backend)
            halley.attach(compiled, TWO)
            found.append(gradients(compiled, x))
        torch._dynamo.reset()
    return found[0], found[1]


@pytest.mark.parametrize("form", [torch.contiguous_format, LAST])
def test_batch_norm_reads_codes(everywhere: None, backward: list[Graph], form: torch.memory_format) -> None:
    plain, found = both(lambda: net().to(memory_format=form), images().to(memory_format=form), as_inductor_gets_it)
    for a, b in zip(plain, found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-6)
    before, after = map(names, backward)
    assert before["site_decode"] == 3 and after["site_decode"] == 1
    assert after["norm_sums"] == after["norm_apply"] == 2 and not before["norm_sums"]
    # Nothing is left of what they stand for.
    assert after["sum"] == 1 and not after["mul"] and not after["sub"]


def test_a_batch_norm_in_half_precision_reads_codes_of_its_input_as_it_was(everywhere: None, backward) -> None:
    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net().to(memory_format=LAST)

        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return self.net(x)

    plain, found = both(Half, images().to(memory_format=LAST), as_inductor_gets_it)
    assert names(backward[1])["norm_apply"] == 2
    assert error(plain, found) < 0.02


class Twice(nn.Module):
    """Somebody else reads the input of the batch norm too."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        return self.norm(y) * y


@pytest.mark.parametrize(
    "model",
    [Twice, lambda: nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16, affine=False), nn.ReLU())],
    ids=["read twice", "no weight"],
)
def test_other_batch_norms_stay_as_they_are(everywhere: None, backward: list[Graph], model) -> None:
    plain, found = both(model, images(), as_inductor_gets_it)
    assert not names(backward[1])["norm_sums"] and same(plain, found)


def test_small_inputs_and_other_devices_stay_as_they_are(backward: list[Graph]) -> None:
    both(net, images(), as_inductor_gets_it)
    found = names(backward[1])
    assert not found["norm_sums"] and not found["conv_input_grad"]


@pytest.mark.parametrize("form", [torch.contiguous_format, LAST])
def test_a_convolution_lets_go_of_its_input_before_its_gradient(everywhere: None, backward, form) -> None:
    plain, found = both(lambda: net().to(memory_format=form), images().to(memory_format=form), "aot_eager")
    assert same(plain, found)
    order = list(backward[1].nodes)
    (part,) = (node for node in order if name_of(node.target) == "conv_input_grad")
    conv = next(node for node in order if name_of(node.target) == "convolution_backward" and node.args[-1][0] is False)
    assert order.index(conv) < order.index(part) and conv.args[0] is part.args[0]
    # The mask of the ReLU behind it comes from the codes.
    assert name_of(conv.args[1].target) == "site_decode" and list(conv.args[1].users) == [conv]
    assert names(backward[1])["site_mask"] == 1


def test_a_relu_before_a_convolution_gates_its_gradient_from_the_codes(backward: list[Graph]) -> None:
    both(lambda: net().to(memory_format=LAST), images().to(memory_format=LAST), as_inductor_gets_it)
    found = names(backward[1])
    assert found["site_gate"] == 1 and not found["site_mask"] and not found["le"] - 1


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = (nn.Conv2d(i, 16, 3, padding=1) for i in (3, 16))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.first(x))
        return self.last(y) + y


def test_a_relu_before_a_sum_takes_its_mask_from_the_codes(backward: list[Graph]) -> None:
    model = Residual()
    compiled = compile(model, backend=as_inductor_gets_it)
    plain = gradients(compiled, images())
    halley.attach(compiled, TWO)
    found = gradients(compiled, images())
    assert names(backward[-1])["site_mask"] == 1 and not names(backward[-1])["site_gate"]
    # The gradient of the first bias needs the mask alone.
    torch.testing.assert_close(found[1], plain[1], rtol=1e-4, atol=1e-7)


def test_masks_and_gates_are_exact_where_values_come_back_as_zero() -> None:
    """A few tiny values beside a large one: restored they may be zero, in the codes they are not."""
    x = torch.rand(4, 8, 16, 16).mul(1e-30).relu()
    x[:, :, ::2] = 0
    x[..., 0] = 1e30
    x = x.to(memory_format=LAST)
    order, rate = [0, 2, 3, 1], (2, 128, 8, False)
    data = torch.ops.halley.site_encode(x, torch.tensor([1, 0]), order, 5, 0, *rate)
    mask = torch.ops.halley.site_mask(data, x.shape, x.stride(), x.dtype, order, *rate)
    assert torch.equal(mask, x > 0) and mask.stride() == x.stride()
    grad = torch.randn_like(x)
    assert torch.equal(torch.ops.halley.site_gate(grad, data, *rate), torch.where(x > 0, grad, 0))


def test_other_batch_sizes_share_one_graph(everywhere: None, backward: list[Graph]) -> None:
    model = net().to(memory_format=LAST)
    compiled = compile(model, backend=as_inductor_gets_it)
    plain = [gradients(model, images(batch).to(memory_format=LAST)) for batch in (8, 6, 7)]
    halley.attach(compiled, halley.policies.Fixed(halley.codecs.GroupQuant(bits=8)))
    for batch, expected in zip((8, 6, 7), plain, strict=True):
        assert error(expected, gradients(compiled, images(batch).to(memory_format=LAST))) < 0.03
    assert len(backward) == 2
    for graph in backward:
        assert names(graph)["norm_apply"] == 2 and names(graph)["conv_input_grad"] == 1


def test_operators_agree_with_their_fakes() -> None:
    x = torch.randn(4, 16, 12, 12).to(memory_format=LAST)
    grad, seed, line = torch.randn_like(x), torch.tensor([3, 0]), torch.rand(16)
    data = torch.ops.halley.site_encode(x, seed, [0, 2, 3, 1], 7, 0, 2, 128, 16, False)
    settings = (7, 0, 2, 16)
    sums = torch.ops.halley.norm_sums(grad, data, seed, line, line, line, *settings)
    weight = torch.randn(8, 16, 3, 3)
    conv = (torch.randn(4, 8, 12, 12), weight, x.shape, x.stride(), [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    calls = {
        "site_mask": (data, x.shape, x.stride(), x.dtype, [0, 2, 3, 1], 2, 128, 16, False),
        "site_gate": (grad, data, 2, 128, 16, False),
        "norm_sums": (grad, data, seed, line, line, line, *settings),
        "norm_apply": (grad, data, seed, sums, *settings),
        "conv_input_grad": conv,
    }
    for name, arguments in calls.items():
        arguments = tuple(list(a) if isinstance(a, torch.Size | tuple) else a for a in arguments)
        operator = getattr(torch.ops.halley, name).default
        torch.library.opcheck(operator, arguments, test_utils=("test_schema", "test_faketensor"))
