"""Layer norm and RMS norm in one kernel: results of the layers, gradients of plain hooks, and fewer tensors held."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import encke
from encke.capture import expressions
from encke.codecs import ErrorBounded, GroupQuant
from encke.fused import registry, rownorm
from encke.fused.rownorm import RowNormForward
from encke.policies import Fixed
from encke.train.models.vision import torchvision_models
from tests.fused.common import DEVICE, EXACT, copies, near, second_order

pytest.importorskip("triton")
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

WIDTH = 64
TWO, FOUR, FINE = (Fixed(GroupQuant(bits)) for bits in (2, 4, 8))


class LlamaNorm(nn.Module):
    def __init__(self, width: int = WIDTH, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, width))
        self.variance_epsilon = eps

    def forward(self, x: Tensor) -> Tensor:
        kind, x = x.dtype, x.to(torch.float32)
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * x.to(kind)


class GemmaNorm(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-0.5, 0.5, width))
        self.eps = 1e-6

    def forward(self, x: Tensor) -> Tensor:
        y = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.eps)
        return (y * (1.0 + self.weight.float())).type_as(x)


class T5Norm(LlamaNorm):
    def forward(self, x: Tensor) -> Tensor:
        x = x * torch.rsqrt(x.to(torch.float32).pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        if self.weight.dtype in (torch.float16, torch.bfloat16):
            x = x.to(self.weight.dtype)
        return self.weight * x


NORMS = {
    "llama": LlamaNorm,
    "gemma": GemmaNorm,
    "t5": T5Norm,
    "layer": lambda: nn.LayerNorm(WIDTH),
    "layer without bias": lambda: nn.LayerNorm(WIDTH, bias=False),
    "layer without weight": lambda: nn.LayerNorm(WIDTH, elementwise_affine=False),
    "layer over two dimensions": lambda: nn.LayerNorm((4, WIDTH)),
    "rms": lambda: nn.RMSNorm(WIDTH),
}


class Net(nn.Module):
    """A layer in front of a norm, and two that read its result."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.inp, self.norm = nn.Linear(WIDTH, WIDTH), norm
        self.a, self.b = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        y = self.norm(x)
        return x + self.a(y) * self.b(y)


def net(kind: str = "llama", dtype: torch.dtype = torch.float32) -> Net:
    torch.manual_seed(1)
    model = Net(NORMS[kind]())
    with torch.no_grad():
        for p in model.norm.parameters():
            p.copy_(torch.rand_like(p) + 0.5 - float(kind == "gemma"))
    return model.to(DEVICE, dtype)


def batch(rows: int = 32, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(rows, 4, WIDTH, generator=torch.Generator().manual_seed(0)).to(DEVICE, dtype)


def attach(model: nn.Module, policy=FOUR, fused: bool = True) -> encke.Handle:
    """An attached model whose norms run in our kernels."""
    handle = encke.attach(model, policy)
    for forward in forwards(handle):
        forward.device_type = DEVICE if fused else "none"
    return handle


def forwards(handle: encke.Handle) -> list[RowNormForward]:
    return [hook for hook in handle._hooks if isinstance(hook, RowNormForward)]


def gradients(model: nn.Module, x: Tensor, autocast: torch.dtype | None = None, steps: int = 3) -> list[Tensor]:
    """Output and gradients after a few steps: in the second one sites are known, in the third one their sources."""
    x = x.detach().requires_grad_()
    for _ in range(steps):
        model.zero_grad()
        x.grad = None
        with torch.autocast(DEVICE, autocast or torch.bfloat16, enabled=autocast is not None):
            out = model(x)
        out.float().square().mean().backward()
    return [out.detach(), x.grad, *(p.grad for p in model.parameters() if p.grad is not None)]


@pytest.fixture(autouse=True)
def kernels_everywhere(monkeypatch) -> None:
    monkeypatch.setattr(expressions, "runs_kernels", lambda device: True)


@pytest.fixture
def calls(monkeypatch) -> list[str]:
    """Record of calls of the kernels: `forward`, `packed` or `values` for each backward, `again`."""
    seen: list[str] = []
    kernels = expressions.row_kernels()
    forward, backward, again = kernels.RowPlan.forward, kernels.RowPlan.backward, kernels.normalise_again

    def watched(plan, grad, data, seed, format, *rest):
        seen.append("values" if format is None else "packed")
        return backward(plan, grad, data, seed, format, *rest)

    monkeypatch.setattr(kernels.RowPlan, "forward", lambda *args: seen.append("forward") or forward(*args))
    monkeypatch.setattr(kernels.RowPlan, "backward", watched)
    monkeypatch.setattr(kernels, "normalise_again", lambda *args: seen.append("again") or again(*args))
    return seen


def last_pass(calls: list[str]) -> list[str]:
    """Calls from the last `forward` on, each once: two layers behind a norm read its result together or in turn."""
    return list(dict.fromkeys(calls[len(calls) - 1 - calls[::-1].index("forward") :]))


def rows(handle: encke.Handle) -> dict[str, str]:
    return {f"{row.layer}:{row.operation}.{row.slot}": row.codec for row in handle.report().sites}


@pytest.mark.parametrize("kind", NORMS)
def test_gradients_are_those_of_the_plain_layer_at_the_decoded_input(kind, calls):
    plain, model = net(kind), net(kind)
    attach(model, FINE)
    got, wanted = gradients(model, batch()), gradients(plain, batch())
    assert calls[0] == "forward" and last_pass(calls) == ["forward", "again", "packed"] and "values" not in calls
    assert near(got[:1], wanted[:1], 1e-5) and near(got, wanted, 0.03)


@pytest.mark.parametrize("kind", ["llama", "gemma", "layer"])
def test_the_same_codes_give_the_gradient_of_plain_autograd(kind, monkeypatch):
    """The expected gradient is that of the plain layer on the decoded input, with the exact input's deviation."""
    model = net(kind)
    attach(model, TWO)
    gradients(model, batch(), steps=2)
    x = model.inp(batch()).detach().requires_grad_()

    class Alone(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = copy.deepcopy(model.norm)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(x * 1)

    alone = Alone()
    attach(alone, TWO)
    for _ in range(2):
        y = alone(x)
    decoded = y.grad_fn._raw_saved_tensors[0].data.restore().detach()
    norm, weight = y.grad_fn.plan.norm, alone.norm.weight.detach()
    v = x.detach() - x.detach().mean(-1, keepdim=True) if norm.centred else x.detach()
    rstd = (v.square().mean(-1, keepdim=True) + norm.eps).rsqrt()
    n = (decoded - x.detach().mean(-1, keepdim=True) if norm.centred else decoded) * rstd
    grad = torch.randn_like(y)
    y.backward(grad)
    scaled = grad * (weight + norm.offset)
    wanted = scaled - n * (scaled * n).mean(-1, keepdim=True)
    wanted = rstd * (wanted - scaled.mean(-1, keepdim=True) if norm.centred else wanted)
    assert (decoded - x).norm() > 0.05 * x.norm()
    assert near([x.grad, alone.norm.weight.grad], [wanted, (grad * n).sum((0, 1))], 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "gemma", "t5", "layer"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_results_of_16_bits_are_those_of_the_layer(kind, dtype, calls):
    plain, model = net(kind, dtype), net(kind, dtype)
    attach(model, FINE)
    got, wanted = gradients(model, batch(dtype=dtype)), gradients(plain, batch(dtype=dtype))
    assert calls.count("forward") == 3 and all(a.dtype == b.dtype for a, b in zip(got, wanted, strict=True))
    # Sums in another order: now and then a deviation, and with it a value of its row, is rounded the other way.
    assert (got[0] == wanted[0]).double().mean() > 0.98
    assert near(got, wanted, 0.06)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "gemma", "t5"])
def test_weights_of_32_bits_with_inputs_of_16(kind, calls):
    plain, model = net(kind), net(kind)
    attach(model, FINE)
    for m in (plain, model):
        m.inp.to(torch.bfloat16)
        for layer in (m.a, m.b):
            layer.to(torch.float32 if kind != "gemma" else torch.bfloat16)
    got, wanted = (gradients(m, batch(dtype=torch.bfloat16)) for m in (model, plain))
    assert calls.count("forward") == 3 and near(got, wanted, 0.05) and got[0].dtype == wanted[0].dtype


@pytest.mark.filterwarnings("ignore:Mismatch dtype")
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[pytest.mark.soak] * kind.startswith("layer ")) for kind in NORMS]
)
def test_autocast(kind, calls):
    plain, model = net(kind), net(kind)
    handle = attach(model, FINE)
    got, wanted = (gradients(m, batch(), torch.bfloat16) for m in (model, plain))
    assert got[0].dtype == wanted[0].dtype and near(got, wanted, 0.06)
    operation = rownorm.OPERATIONS[kind.startswith("layer")]
    assert last_pass(calls) == ["forward", "again", "packed"]
    assert rows(handle)[f"norm:{operation}.input"] == "GroupQuant"


@pytest.mark.parametrize("kind", ["llama", "gemma"])
def test_one_packed_tensor_is_held_and_the_layers_behind_get_their_input_from_it(kind, calls):
    model, other = net(kind), net(kind)
    handle, unfused = attach(model, FINE), attach(other, FINE, fused=False)
    gradients(model, batch())
    gradients(other, batch())
    held = {name: codec for name, codec in rows(handle).items() if name.startswith("norm")}
    assert held == {"norm:FusedRmsNorm.input": "GroupQuant", "norm:FusedRmsNorm.(formula)": "recomputed"}
    assert rows(handle)["a:Mm.self"] == "recomputed" and "b:Mm.self" not in rows(handle)
    # Forward and backward of the norm, and its result for the layers behind it.
    assert last_pass(calls) == ["forward", "again", "packed"]
    report, plain = handle.report(), unfused.report()
    assert report.saved_bytes == pytest.approx(plain.saved_bytes, rel=0.02)
    assert report.packed_bytes < plain.packed_bytes


def test_functional_norms_are_computed_again_in_one_kernel(calls):
    class Functional(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.bias = (nn.Parameter(torch.rand(WIDTH) + 0.5) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.layer_norm(x, (WIDTH,), self.weight, self.bias)

    plain, model = net(), net()
    plain.norm = Functional().to(DEVICE)
    model.norm = copy.deepcopy(plain.norm)
    attach(model, FINE)
    assert near(gradients(model, batch()), gradients(plain, batch()), 0.03)
    assert set(calls) == {"again"}


def test_input_that_is_not_packed_is_read_as_it_is_restored(calls):
    plain, model = net(), net()
    attach(model, Fixed(ErrorBounded(1e-6)))
    assert near(gradients(model, batch()), gradients(plain, batch()), 1e-4)
    assert calls == ["forward", "values"] * 3


@pytest.mark.parametrize("kind", NORMS)
def test_exact_policies_get_the_gradients_of_plain_autograd_bit_for_bit(kind, calls):
    plain, model = net(kind), net(kind)
    attach(model, EXACT)
    assert all(map(torch.equal, gradients(model, batch()), gradients(plain, batch())))
    assert not calls


class Detached(LlamaNorm):
    """Its deviation gets no gradient."""

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon).detach())


class Squared(LlamaNorm):
    def forward(self, x: Tensor) -> Tensor:
        return self.weight.square() * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon))


class OtherDimension(LlamaNorm):
    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean((-2, -1), keepdim=True) + self.variance_epsilon))


class OtherEpsilon(LlamaNorm):
    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 2 * self.variance_epsilon))


class Gated(LlamaNorm):
    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        return super().forward(x) * gate


class WithBuffer(LlamaNorm):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))


class OwnLayerNorm(nn.LayerNorm):
    pass


@pytest.mark.parametrize("kind", [Detached, Squared, OtherDimension, OtherEpsilon, Gated, WithBuffer])
def test_layers_that_compute_something_else_are_left_alone(kind):
    assert not RowNormForward.serves(kind())


def test_other_layers_are_left_alone():
    others = [OwnLayerNorm(8), nn.GroupNorm(2, 8), nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Module()]
    assert not any(map(RowNormForward.serves, others))
    assert all(RowNormForward.serves(make()) for make in NORMS.values())


def test_layers_of_transformers():
    torchvision_models()  # transformers imports torchvision, which is made to fit the installed torch
    pytest.importorskip("transformers")
    from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
    from transformers.models.llama.modeling_llama import LlamaRMSNorm
    from transformers.models.mistral.modeling_mistral import MistralRMSNorm
    from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm
    from transformers.models.t5.modeling_t5 import T5LayerNorm

    for kind in (LlamaRMSNorm, MistralRMSNorm, Qwen2RMSNorm, GemmaRMSNorm, T5LayerNorm):
        for dtype in (torch.float32, torch.bfloat16):
            layer = kind(96).to(dtype)
            state = copy.deepcopy(layer.state_dict())
            assert RowNormForward.serves(layer)
            norm, _ = rownorm.try_layer(layer, dtype, torch.device("cpu"))
            assert norm.offset == float(kind is GemmaRMSNorm) and norm.out == dtype
            assert norm.inner == (torch.float32 if kind is GemmaRMSNorm else dtype)
            assert torch.equal(layer.weight, state["weight"]) and "forward" not in vars(layer)


@pytest.mark.slow
@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
def test_llama_of_transformers_holds_the_inputs_of_its_norms_alone(autocast, calls):
    torchvision_models()
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, use_cache=False,
    )  # fmt: skip
    tokens = torch.randint(0, 64, (2, 64), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    results, handles = [], []
    for way in ("plain", "unfused", "fused"):
        torch.manual_seed(0)
        model = transformers.LlamaForCausalLM(config).to(DEVICE).train()
        handles.append(None if way == "plain" else attach(model, FINE, way == "fused"))
        for _ in range(3):
            model.zero_grad()
            with torch.autocast(DEVICE, torch.bfloat16, enabled=autocast is not None):
                loss = model(tokens, labels=tokens).loss
            loss.backward()
        results.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    plain, unfused, fused = results
    assert (fused - plain).norm() <= 1.2 * (unfused - plain).norm() < 0.1 * plain.norm()
    assert calls.count("forward") == 9 and calls.count("packed") == 9
    found, before = rows(handles[2]), rows(handles[1])
    for layer in ("input_layernorm", "post_attention_layernorm"):
        name = f"model.layers.0.{layer}"
        held = {row: codec for row, codec in found.items() if row.startswith(name)}
        assert held == {f"{name}:FusedRmsNorm.input": "GroupQuant", f"{name}:FusedRmsNorm.(formula)": "recomputed"}
        assert sum(row.startswith(name) for row in before) >= 1
    assert found["model.layers.0.self_attn.q_proj:Mm.self"] == found["model.layers.0.mlp.gate_proj:Mm.self"]
    assert found["model.layers.0.mlp.gate_proj:Mm.self"] == "recomputed"


def test_formula_without_casts_is_taken_in_32_bits_alone(calls):
    class Short(LlamaNorm):
        def forward(self, x: Tensor) -> Tensor:
            return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon))

    for dtype, times in ((torch.float32, 3), (torch.bfloat16, 0)):
        calls.clear()
        plain, model = net(dtype=dtype), net(dtype=dtype)
        plain.norm, model.norm = Short().to(DEVICE, dtype), Short().to(DEVICE, dtype)
        attach(model, FINE)
        got, wanted = (gradients(m, batch(dtype=dtype)) for m in (model, plain))
        assert near(got, wanted, 0.05 if times == 0 else 0.03) and calls.count("forward") == times


def test_eval_no_grad_small_inputs_and_other_devices_go_the_plain_way(calls):
    model = net()
    attach(model)
    model.eval()
    gradients(model, batch())
    model.train()
    with torch.no_grad():
        model(batch())
    gradients(model, batch(2))
    for forward in (m.forward for m in [model.norm]):
        forward.device_type = "none"
    gradients(model, batch())
    assert not calls


@pytest.mark.parametrize("kind", ["llama", "layer"])
def test_calls_that_go_one_way_and_then_the_other(kind, calls):
    plain, model = net(kind), net(kind)
    attach(model, FINE)
    for device in (DEVICE, "none", DEVICE, DEVICE, "none", "none"):
        model.norm.forward.device_type = device
        calls.clear()
        assert near(gradients(model, batch(), steps=1), gradients(plain, batch(), steps=1), 0.03)
        assert ("forward" in calls) == (device == DEVICE)


class Permuted(Net):
    """The norm of transposed rows, which layers behind it read."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.inp(x).transpose(0, 1))
        return (self.a(y) * self.b(y).sigmoid()).transpose(0, 1)


def permuted(norm: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return Permuted(norm).to(DEVICE)


def test_a_norm_whose_result_has_the_strides_of_its_input_takes_no_transposed_rows(calls):
    model, plain = permuted(LlamaNorm()), permuted(LlamaNorm())
    attach(model, FINE)
    assert near(gradients(model, batch()), gradients(plain, batch()), 0.03) and "forward" not in calls


@pytest.mark.parametrize("autocast", [None, pytest.param(torch.bfloat16, marks=pytest.mark.slow)])
def test_layer_norm_takes_transposed_rows(autocast, calls):
    model, plain = permuted(nn.LayerNorm(WIDTH)), permuted(nn.LayerNorm(WIDTH))
    handle = attach(model, FINE)
    strides = []
    model.norm.register_forward_hook(lambda module, inputs, y: strides.append((y.stride(), inputs[0].is_contiguous())))
    got, wanted = (gradients(m, batch(), autocast) for m in (model, plain))
    assert near(got, wanted, 0.03 if autocast is None else 0.06)
    assert last_pass(calls) == ["forward", "again", "packed"]
    size = batch().transpose(0, 1).shape
    assert set(strides) == {(torch.empty(size).stride(), False)}
    assert rows(handle)["norm:NativeLayerNorm.input"] == "GroupQuant"


def test_layer_norm_of_transposed_rows_is_exact_where_the_policy_is():
    model, plain = permuted(nn.LayerNorm(WIDTH)), permuted(nn.LayerNorm(WIDTH))
    attach(model, EXACT)
    assert all(map(torch.equal, gradients(model, batch()), gradients(plain, batch())))


@pytest.mark.filterwarnings("ignore:.*enable_nested_tensor")
def test_layer_norms_behind_attention_with_the_batch_first(calls):
    """Its result has transposed rows, and so has everything that is added to it."""
    torch.manual_seed(0)
    vision = torchvision_models()
    plain = vision.VisionTransformer(16, 4, 2, 2, WIDTH, 2 * WIDTH, num_classes=3).to(DEVICE)
    nn.init.normal_(plain.heads[0].weight)  # zero at first, as would be all gradients
    model = copy.deepcopy(plain)
    attach(model, FINE)
    images = torch.randn(8, 3, 16, 16, device=DEVICE)
    got, wanted = gradients(model, images), gradients(plain, images)
    assert near(got, wanted, 0.06) and calls.count("forward") == 3 * 5 and "values" not in calls


def test_frozen_weights_and_inputs_without_a_gradient(calls):
    for kind in ("llama", "layer"):
        plain, model = net(kind), net(kind)
        for m in (plain, model):
            m.norm.weight.requires_grad_(False)
        attach(model, FINE)
        assert near(gradients(model, batch()), gradients(plain, batch()), 0.03)
        assert model.norm.weight.grad is None
        for m in (plain, model):
            m.norm.requires_grad_(True)
            m.inp.requires_grad_(False)
        for _ in range(2):
            for m in (plain, model):
                m.zero_grad()
                m(batch()).square().mean().backward()
        found, wanted = ([p.grad for p in m.parameters() if p.grad is not None] for m in (model, plain))
        assert len(found) == len(wanted) and near(found, wanted, 0.03)
    assert "forward" in calls and "values" not in calls


@pytest.mark.parametrize("kind", ["llama", "gemma", "layer", "layer over two dimensions"])
def test_double_backward(kind, calls):
    plain, model = net(kind), net(kind)
    attach(model, FINE)
    got, wanted = second_order(model, batch()), second_order(plain, batch())
    assert "forward" in calls and len(got) == len(wanted) > 3
    assert all((a - b).norm() <= 0.05 * b.norm() for a, b in zip(got, wanted, strict=True))


def test_a_weight_that_is_modified_before_backward_is_an_error():
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), LlamaNorm()).to(DEVICE)
    attach(model)
    out = model(batch())
    with torch.no_grad():
        model[1].weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_checkpoint_runs_the_layer_itself(calls):
    plain, model = net(), net()
    attach(model, FINE)

    def grads(m: nn.Module) -> list[Tensor]:
        m.zero_grad()
        (m(batch()) + checkpoint(m.norm, batch(), use_reentrant=False)).square().mean().backward()
        return [p.grad for p in m.parameters()]

    for _ in range(3):
        assert near(grads(model), grads(plain), 0.03)
    assert calls.count("forward") == 3


def test_detach_and_copies_have_the_layer_s_own_forward():
    model = net()
    handle = attach(model)
    gradients(model, batch())
    assert isinstance(vars(model.norm)["forward"], RowNormForward)
    for other in copies(model):
        forward = vars(other.norm).get("forward")
        assert not isinstance(forward, RowNormForward)
        assert near(gradients(other, batch()), gradients(net(), batch()), 1e-5)
    handle.detach()
    assert "forward" not in vars(model.norm)


def test_switched_off(monkeypatch):
    monkeypatch.setattr(registry, "ENABLED", False)
    model = net()
    attach(model)
    assert "forward" not in vars(model.norm)


def test_kernels_launched_for_one_norm(monkeypatch):
    """One forward; in backward one for the layers behind, one for the gradient, and one for the weight's sums."""
    from encke.kernels.gpu import launch, row_norm

    model = net()
    attach(model, FINE)
    gradients(model, batch())
    seen: list[str] = []
    run = launch.Launch.__call__

    def counted(self, *args):
        function = self.arguments[0]
        seen.append(getattr(function, "fn", function).__name__)
        return run(self, *args)

    monkeypatch.setattr(launch.Launch, "__call__", counted)
    gradients(model, batch(), steps=1)
    ours = {name for name in vars(row_norm) if name.endswith("_kernel")}
    names = ["row_forward_kernel", "row_again_kernel", "row_backward_kernel", "column_sums_kernel"]
    found = [name for name in seen if name in ours]
    assert list(dict.fromkeys(found)) == names and len(found) <= len(names) + 1  # one layer behind after the other


class Operations(TorchDispatchMode):
    """Names of the operations of torch that ran; without a GPU also those of backward."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.seen.append(function.overloadpacket.__name__)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", ["llama", "gemma", "layer"])
def test_no_operation_of_torch_computes_a_norm(kind):
    arithmetic = {"mul", "add", "sub", "div", "pow", "mean", "sum", "rsqrt", "_to_copy", "native_layer_norm"}
    counts = []
    for fused in (True, False):
        norm = nn.Sequential(nn.Identity(), NORMS[kind]()).to(DEVICE, torch.bfloat16)
        attach(norm, FINE, fused)
        x = batch(64, torch.bfloat16).requires_grad_()
        grad = torch.randn_like(x)
        for _ in range(2):
            with Operations() as operations:
                norm(x).backward(grad)
        counts.append(len([name for name in operations.seen if name in arithmetic]))
    assert counts[0] == 0 < counts[1]
