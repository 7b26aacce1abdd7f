"""Graphs that read codes, restore less and read less twice: the same gradients, and nothing elsewhere.

The graphs are those that inductor would get, and are run as they are: no compiler is needed.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.fx import Graph, Node

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read by triton.jit when the kernels are imported

import encke
from encke.codecs import GroupQuant
from encke.compiled import ops, rewrites
from encke.compiled.model import CompiledModel
from encke.compiled.names import name_of
from encke.kernels import GroupFormat
from tests.compiled.common import (
    EIGHT,
    LAST,
    TWO,
    as_inductor_gets_it,
    compile,
    constant_codecs,
    error,
    gradients,
    images,
    net,
    rewrite_everywhere,
    same,
)

pytestmark = pytest.mark.slow


@pytest.fixture
def everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    rewrite_everywhere(monkeypatch)


@pytest.fixture
def backward(monkeypatch: pytest.MonkeyPatch) -> list[Graph]:
    """The backward graphs that were written, the last one last."""
    seen: list[Graph] = []
    inline = CompiledModel.inline

    def spy(self, forward, backward, *rest):
        inline(self, forward, backward, *rest)
        seen.append(backward.graph)

    monkeypatch.setattr(CompiledModel, "inline", spy)
    return seen


@pytest.fixture
def forward(monkeypatch: pytest.MonkeyPatch) -> list[Graph]:
    """The forward graphs that were written."""
    seen: list[Graph] = []
    inline = CompiledModel.inline

    def spy(self, forward, *rest):
        inline(self, forward, *rest)
        seen.append(forward.graph)

    monkeypatch.setattr(CompiledModel, "inline", spy)
    return seen


def names(graph: Graph) -> Counter[str]:
    return Counter(name_of(node.target) for node in graph.nodes if node.op == "call_function")


@pytest.fixture(params=["run time", "constant"])
def codecs(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Operators' names by what they do, with codecs that are read at run time and with constants of the graph."""
    if request.param == "constant":
        constant_codecs(monkeypatch)
        return {
            "encode": "site_encode", "encode_moments": "site_encode_moments",
            "encode_norm_relu": "site_encode_norm_relu", "decode": "site_decode", "mask": "site_mask",
            "gate": "site_gate", "sums": "norm_sums", "apply": "norm_apply",
        }  # fmt: skip
    return {
        "encode": "site_pack", "encode_moments": "site_pack_moments", "encode_norm_relu": "site_pack_norm_relu",
        "decode": "packed_decode", "mask": "packed_mask", "gate": "packed_gate", "sums": "packed_norm_sums",
        "apply": "packed_norm_apply",
    }  # fmt: skip


def both(model: Callable[[], nn.Module], x: Tensor, backend: object) -> tuple[list[Tensor], list[Tensor]]:
    """Gradients of a model without and with rewrites; codes and seeds are the same."""
    found = []
    for on in (False, True):
        with pytest.MonkeyPatch.context() as patch:
            if not on:
                patch.setattr(rewrites, "find_norm_backward", lambda x: None)
                patch.setattr(rewrites, "should_split_conv_backward", lambda conv, x: False)
            torch.manual_seed(1)
            compiled = compile(model(), backend=backend)
            encke.attach(compiled, TWO)
            found.append(gradients(compiled, x))
        torch._dynamo.reset()
    return found[0], found[1]


@pytest.mark.parametrize("form", [torch.contiguous_format, LAST])
def test_batch_norm_reads_codes(everywhere: None, backward, codecs, form: torch.memory_format) -> None:
    plain, found = both(lambda: net().to(memory_format=form), images().to(memory_format=form), as_inductor_gets_it)
    for a, b in zip(plain, found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-6)
    before, after = map(names, backward)
    assert before[codecs["decode"]] == 3 and after[codecs["decode"]] == 1
    assert after[codecs["sums"]] == after[codecs["apply"]] == 2 and not before[codecs["sums"]]
    # Nothing is left of what they stand for.
    assert after["sum"] == 1 and not after["mul"] and not after["sub"]


class Half(nn.Module):
    """In half precision."""

    def __init__(self, channels: int = 16, form: torch.memory_format = LAST) -> None:
        super().__init__()
        self.net = net(channels).to(memory_format=form)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return self.net(x)


def test_a_batch_norm_in_half_precision_reads_codes_of_its_input_as_it_was(everywhere: None, backward) -> None:
    plain, found = both(Half, images().to(memory_format=LAST), as_inductor_gets_it)
    assert names(backward[1])["packed_norm_apply"] == 2
    assert error(plain, found) < 0.02


def test_an_encoder_computes_the_statistics_of_the_batch_norm_that_reads_the_same(
    everywhere: None, forward: list[Graph], codecs: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    encode, measure, normalise = codecs["encode"], codecs["encode_moments"], codecs["encode_norm_relu"]
    x, found = images().to(memory_format=LAST), []
    for on in (True, False):
        if not on:
            monkeypatch.setattr(rewrites, "fuses_encoder", lambda *settings: False)
        model = Half()
        compiled = compile(model, backend=as_inductor_gets_it)
        encke.attach(compiled, TWO)
        found.append([*gradients(compiled, x), *model.buffers()])
        torch._dynamo.reset()
    after, before = map(names, forward)
    assert before["var_mean"] == 2 and not before[measure] and before[encode] == 4
    assert not after["var_mean"] and after[measure] == 2 and after[encode] == after[normalise] == 1
    assert before["convert_element_type"] - after["convert_element_type"] == 3
    # On a CPU the operators are what they stand for: the same bits.
    assert same(*found)
    order = list(forward[0].nodes)
    for i, node in enumerate(order):
        if name_of(node.target) == measure:
            assert order[i - 1] is node.args[0] and name_of(order[i - 1].target) == "convolution"


@pytest.mark.parametrize(
    ("model", "policy"),
    [
        (lambda: net().to(memory_format=LAST), TWO),
        (lambda: Half(12), TWO),
        (lambda: Half(form=torch.contiguous_format), TWO),
        (Half, encke.policies.Fixed(GroupQuant(bits=4, signs=True))),
        (Half, encke.policies.Fixed(GroupQuant(bits=2, group=256))),
    ],
    ids=["fp32", "channels", "contiguous", "signs", "group"],
)
def test_statistics_of_others_stay_as_they_are(
    everywhere: None, reference_kernels: None, forward: list[Graph], model, policy
) -> None:
    made = model()
    form = LAST if next(made.parameters()).is_contiguous(memory_format=LAST) else torch.contiguous_format
    compiled = compile(made, backend=as_inductor_gets_it)
    encke.attach(compiled, policy)
    gradients(compiled, images().to(memory_format=form))
    assert names(forward[0])["var_mean"] == 2 and names(forward[0])["site_pack"] >= 3


def test_small_inputs_are_not_measured(forward: list[Graph], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rewrites, "NORMS_ON", {"cpu"})
    compiled = compile(Half(), backend=as_inductor_gets_it)
    encke.attach(compiled, TWO)
    gradients(compiled, images().to(memory_format=LAST))
    assert names(forward[0])["var_mean"] == 2


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(("channels", "measured"), [(24, True), (12, False)])
def test_kernels_measure_while_they_encode(monkeypatch: pytest.MonkeyPatch, channels: int, measured: bool) -> None:
    """On a GPU, else in Triton's interpreter; where the kernels do not take a tensor, torch measures it."""
    plans = pytest.importorskip("encke.kernels.gpu.plans")
    device = "cuda" if torch.cuda.is_available() else "cpu"

    def plan_of(format, numel, device):
        return plans.group_plan(GroupFormat.from_numbers(format), numel, device, True)

    seen: list[object] = []
    encode_moments = plans.GpuPlan.encode_moments
    monkeypatch.setattr(ops, "plan_of", plan_of)
    monkeypatch.setattr(plans.GpuPlan, "encode_moments", lambda *all: seen.append(all) or encode_moments(*all))
    x = (torch.randn(4, channels, 15, 17) * 2 + 20).to(device, torch.bfloat16).contiguous(memory_format=LAST)
    settings = (1, GroupFormat(2, 128, torch.bfloat16, channels).numbers(), [0, 2, 3, 1])
    seed = torch.tensor([3, -5], device=device)
    data, var, mean = torch.ops.encke.site_encode_moments(x, seed, *settings)
    assert len(seen) == measured
    assert torch.equal(data, torch.ops.encke.site_encode(x, seed, *settings))
    expected = torch.var_mean(x.double(), [0, 2, 3], correction=0, keepdim=True)
    for got, wanted in zip((var, mean), expected, strict=True):
        assert got.dtype == torch.float32 and got.shape == wanted.shape
        assert (got / wanted - 1).abs().max() < 1e-5


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
    assert not names(backward[1])["packed_norm_sums"] and same(plain, found)


def test_small_inputs_and_other_devices_stay_as_they_are(backward: list[Graph]) -> None:
    both(net, images(), as_inductor_gets_it)
    found = names(backward[1])
    assert not found["packed_norm_sums"] and not found["conv_input_grad"]


@pytest.mark.parametrize("form", [torch.contiguous_format, LAST])
def test_a_convolution_lets_go_of_its_input_before_its_gradient(everywhere: None, backward, form) -> None:
    plain, found = both(lambda: net().to(memory_format=form), images().to(memory_format=form), "aot_eager")
    assert same(plain, found)
    order = list(backward[1].nodes)
    (part,) = (node for node in order if name_of(node.target) == "conv_input_grad")
    conv = next(node for node in order if name_of(node.target) == "convolution_backward" and node.args[-1][0] is False)
    assert order.index(conv) < order.index(part) and conv.args[0] is part.args[0]
    # The mask of the ReLU behind it comes from the codes.
    assert name_of(conv.args[1].target) == "packed_decode" and list(conv.args[1].users) == [conv]
    assert names(backward[1])["packed_mask"] == 1


def test_a_relu_before_a_convolution_gates_its_gradient_from_the_codes(backward: list[Graph], codecs) -> None:
    both(lambda: net().to(memory_format=LAST), images().to(memory_format=LAST), as_inductor_gets_it)
    found = names(backward[1])
    assert found[codecs["gate"]] == 1 and not found[codecs["mask"]] and not found["le"] - 1


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = (nn.Conv2d(i, 16, 3, padding=1) for i in (3, 16))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.first(x))
        return self.last(y) + y


def test_a_relu_before_a_sum_takes_its_mask_from_the_codes(backward: list[Graph], codecs) -> None:
    model = Residual()
    compiled = compile(model, backend=as_inductor_gets_it)
    plain = gradients(compiled, images())
    encke.attach(compiled, TWO)
    found = gradients(compiled, images())
    assert names(backward[-1])[codecs["mask"]] == 1 and not names(backward[-1])[codecs["gate"]]
    # The gradient of the first bias needs the mask alone.
    torch.testing.assert_close(found[1], plain[1], rtol=1e-4, atol=1e-7)


class Blocks(nn.Module):
    """Residual blocks: the gradient of each ReLU but the last is a sum of two that are stored."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 16, 3, padding=1)
        self.convs = nn.ModuleList(nn.Conv2d(16, 16, 3, padding=1, bias=False) for _ in range(3))
        self.norms = nn.ModuleList(nn.BatchNorm2d(16) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.first(x))
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = torch.relu(norm(conv(x)) + x)
        return x


def test_gates_add_the_gradients_of_a_residual_block(backward: list[Graph], codecs) -> None:
    model = Blocks().to(memory_format=LAST)
    x = images().to(memory_format=LAST)
    compiled = compile(model, backend=as_inductor_gets_it)
    plain = gradients(compiled, x)
    handle = encke.attach(compiled, EIGHT)
    found = gradients(compiled, x)
    gates = [node for node in backward[-1].nodes if name_of(node.target) == codecs["gate"]]
    assert len(gates) == 3 and all(isinstance(node.args[2], Node) for node in gates)
    # Values are nearly exact, so masks decide: gradients would be far off without them.
    assert error(plain, found) < 0.03
    handle.detach()


def test_masks_and_gates_are_exact_where_values_come_back_as_zero() -> None:
    """A few tiny values beside a large one: restored they may be zero, in the codes they are not."""
    x = torch.rand(4, 8, 16, 16).mul(1e-30).relu()
    x[:, :, ::2] = 0
    x[..., 0] = 1e30
    x = x.to(memory_format=LAST)
    order, format = [0, 2, 3, 1], GroupFormat(2, 128, x.dtype, 8).numbers()
    data = torch.ops.encke.site_encode(x, torch.tensor([1]), 0, format, order)
    mask = torch.ops.encke.site_mask(data, format, x.shape, x.stride(), order)
    assert torch.equal(mask, x > 0) and mask.stride() == x.stride()
    grad = torch.randn_like(x)
    assert torch.equal(torch.ops.encke.site_gate(grad, data, None, format), torch.where(x > 0, grad, 0))


def test_other_batch_sizes_share_one_graph(everywhere: None, backward: list[Graph], codecs) -> None:
    """With three images there are too few pixels for groups of one channel each."""
    model = net().to(memory_format=LAST)
    compiled = compile(model, backend=as_inductor_gets_it)
    plain = [gradients(model, images(batch).to(memory_format=LAST)) for batch in (8, 6, 7, 3)]
    encke.attach(compiled, encke.policies.Fixed(encke.codecs.GroupQuant(bits=8)))
    for batch, expected in zip((8, 6, 7, 3), plain, strict=True):
        assert error(expected, gradients(compiled, images(batch).to(memory_format=LAST))) < 0.03
    assert len(backward) == 2
    for graph in backward:
        assert names(graph)[codecs["apply"]] == 2 and names(graph)["conv_input_grad"] == 1


def test_operators_agree_with_their_fakes(reference_kernels: None) -> None:
    x = torch.randn(4, 16, 12, 12).to(memory_format=LAST)
    grad, seed, line = torch.randn_like(x), torch.tensor([3, 5]), torch.rand(16)
    order, format = [0, 2, 3, 1], GroupFormat(2, 128, x.dtype, 16).numbers()
    data = torch.ops.encke.site_encode(x, seed, 1, format, order)
    settings = (1, format)
    gated = (data, *settings, format)
    sums = torch.ops.encke.norm_sums(grad, data, seed, line, line, line, *gated)
    weight = torch.randn(8, 16, 3, 3)
    conv = (torch.randn(4, 8, 12, 12), weight, x.shape, x.stride(), [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    flags = torch.ops.encke.mask_encode(x > 0, order)
    calls = {
        "site_encode": (x, seed, 1, format, order),
        "site_encode_moments": (x.bfloat16(), seed, 1, GroupFormat(2, 128, torch.bfloat16, 16).numbers(), order),
        "site_encode_norm_relu": (x, line, line, line, line, seed, 1, format, order),
        "site_decode": (data, seed, 1, format, x.shape, x.stride(), order),
        "site_mask": (data, format, x.shape, x.stride(), order),
        "site_gate": (grad, data, grad, format),
        "mask_encode": (x > 0, order),
        "mask_decode": (flags, x.shape, x.stride(), order),
        "norm_sums": (grad, data, seed, line, line, line, *gated),
        "norm_apply": (grad, data, seed, sums, *gated),
        "conv_input_grad": conv,
    }
    assert {*calls} == {function.__name__ for function in ops.OPERATORS} - {"forward_seeds"}
    half = (x.contiguous().half(), seed, 1, GroupFormat(2, 128, torch.float16, 16).numbers(), order)
    torch.library.opcheck(torch.ops.encke.site_encode_moments.default, half, test_utils=("test_schema",))
    for name, arguments in calls.items():
        arguments = tuple(list(a) if isinstance(a, torch.Size | tuple) else a for a in arguments)
        operator = getattr(torch.ops.encke, name).default
        torch.library.opcheck(operator, arguments, test_utils=("test_schema", "test_faketensor"))
