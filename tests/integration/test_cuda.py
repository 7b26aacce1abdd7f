"""On a GPU: the same gradients, memory that really drops, no lost data when a prediction is too small."""

from __future__ import annotations

import contextlib
import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.utils import counters
from torch.nn.attention import SDPBackend, sdpa_kernel

import encke
from encke.bench.models import build
from encke.capture import attention, scores
from encke.capture.nodes import operation_name, saved_by
from encke.codecs import Codec, DualPrecision, ErrorBounded, GroupQuant, pending
from encke.codecs.base import WAITS, EncoderState
from encke.compiled import payloads
from encke.policies import Fixed
from tests.compiled.common import Settable
from tests.integration.test_end_to_end import EXACT
from tests.models import MODELS

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def to_cuda(inputs):
    return tuple(t.cuda() for t in inputs)


@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_bit_equal_at_bound_zero(name: str) -> None:
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True, warn_only=True)
    model, inputs = MODELS[name]()
    model, inputs = model.cuda(), to_cuda(inputs)
    plain = copy.deepcopy(model)
    handle = encke.attach(model, EXACT)
    for seed in range(3):
        grads = []
        for m in (plain, model):
            torch.manual_seed(seed)
            m.zero_grad()
            m(*inputs).square().mean().backward()
            grads.append([p.grad.clone() for p in m.parameters() if p.grad is not None])
        for a, b in zip(*grads, strict=True):
            assert torch.equal(a, b)
    assert handle.report().packed_bytes > 0
    torch.use_deterministic_algorithms(False)


def convs() -> nn.Sequential:
    blocks = [m for _ in range(8) for m in (nn.Conv2d(32, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(inplace=True))]
    return nn.Sequential(nn.Conv2d(3, 32, 3, padding=1), *blocks).cuda()


@pytest.mark.parametrize("policy", [Fixed(ErrorBounded(0.01, "rel")), Fixed(GroupQuant(bits=2))], ids=repr)
def test_memory_held_after_forward_drops(policy) -> None:
    torch.manual_seed(0)
    x = torch.randn(64, 3, 128, 128, device="cuda")
    held = {}
    for kind in ("plain", "packed"):
        model = convs()
        if kind == "packed":
            handle = encke.attach(model, policy)
        for _ in range(2):
            model(x).square().mean().backward()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        out = model(x)
        if kind == "packed":
            report = handle.report()
        torch.cuda.synchronize()
        held[kind] = torch.cuda.memory_allocated() - before
        out.square().mean().backward()
    assert held["packed"] < held["plain"] / 4, held
    assert report.saved_bytes == pytest.approx(held["plain"], rel=0.02)


LAYOUT = encke.codecs.layout.Layout((1 << 20,), (1,))


def predicting(codec: ErrorBounded, x: torch.Tensor) -> EncoderState:
    """Return the state of an encoder that has encoded this often enough."""
    state = EncoderState(lambda: "the site")
    for _ in range(WAITS):
        codec.encode_flat(x, LAYOUT, 0, state)
    return state


@pytest.mark.parametrize("mode", ["abs", "rel"])
def test_a_payload_in_a_predicted_capacity_needs_no_source(mode) -> None:
    codec, x = ErrorBounded(1e-3, mode), torch.randn(1 << 20, device="cuda")
    state, expected = predicting(codec, x), codec.encode(x).decode()
    torch.cuda._sleep(int(5e7))
    packed = codec.encode_flat(x, LAYOUT, 0, state)
    x.zero_()
    assert getattr(packed, "row", None) and torch.equal(packed.decode(), expected)


def test_too_small_a_prediction_is_an_error_and_the_next_one_is_large_enough() -> None:
    codec, x = ErrorBounded(1e-3), torch.randn(1 << 20, device="cuda")
    state = predicting(codec, x)
    packed = codec.encode_flat(100 * x, LAYOUT, 0, state)
    with pytest.raises(RuntimeError, match="the site took"):
        packed.decode()
    packed = codec.encode_flat(100 * x, LAYOUT, 0, state)
    assert getattr(packed, "row", None) and (packed.decode() - 100 * x).abs().max() <= 1e-3


@pytest.mark.parametrize(("scale", "factor"), [(4, 4), (100, 64)])
def test_a_bound_of_a_policys_is_coarsened_on_the_gpu(scale, factor) -> None:
    codec, x = ErrorBounded(1e-3, coarsens=True), torch.randn(1 << 20, device="cuda")
    state = predicting(codec, x)
    decoded = [codec.encode_flat(scale * x, LAYOUT, 0, copy.copy(state)).decode() for _ in range(2)]
    assert torch.equal(*decoded) and torch.equal(decoded[0], ErrorBounded(factor * 1e-3).encode(scale * x).decode())


@pytest.mark.parametrize(
    "policy", [Fixed(ErrorBounded(0.01)), Fixed(ErrorBounded(0.01, "rel")), Fixed(GroupQuant()), "default"]
)
def test_a_training_step_does_not_wait_for_the_gpu(policy) -> None:
    model = convs()
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9, foreach=True)
    encke.attach(model, policy, optimizer=optimizer)
    x = torch.randn(64, 3, 64, 64, device="cuda")

    def step() -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    for _ in range(4):
        step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    with torch.profiler.profile() as profiler:
        step()
    names = {event.key for event in profiler.key_averages()}
    assert any("gq_" in name or "encode_kernel" in name for name in names), names
    assert not [name for name in names if "Pageable" in name or name in ("cudaStreamSynchronize", "cudaMemcpy")], names


def test_values_are_the_same_on_cpu_and_gpu() -> None:
    torch.manual_seed(0)
    x = torch.randn(100_003)
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        for codec in (
            ErrorBounded(0.01, "rel"),
            ErrorBounded(0.05, rounding="stochastic"),
            ErrorBounded(0.05, rounding="dithered"),
            ErrorBounded(0.05, rounding="dithered", signs=True),
            GroupQuant(bits=2),
            GroupQuant(bits=4),
        ):
            for t in (x, x.relu()):
                a, b = codec.encode(t.to(dtype)).decode(), codec.encode(t.to(dtype).cuda()).decode()
                assert torch.equal(a, b.cpu())


def test_a_language_model_waits_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Statistics, labels and log-probabilities: none has a size or a range that only the GPU knows."""
    model = build("gpt", 256).cuda()
    tokens = torch.randint(0, 256, (16, 256), device="cuda")
    encke.attach(model)
    waiting: list[object] = []
    monkeypatch.setattr(pending._Table, "add", lambda table, row: waiting.append(row))
    for step in range(4):
        if step == 3:
            waiting.clear()
            torch.cuda.set_sync_debug_mode("error")
        try:
            with torch.autocast("cuda", torch.bfloat16):
                loss = model(tokens)
            loss.backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert not waiting


def test_recorded_graphs_compute_the_same_and_round_every_step_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiled model as CUDA graphs, beside the same without: 16-bit values and statistics from encoders as well."""
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    x = torch.randn(16, 3, 96, 96, device="cuda").to(memory_format=torch.channels_last)
    found: dict[str | None, list[list[torch.Tensor]]] = {None: [], "reduce-overhead": []}
    counters.clear()
    for mode, steps in found.items():
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = convs().to(memory_format=torch.channels_last)
        compiled = torch.compile(model, fullgraph=True, mode=mode)
        handle = encke.attach(compiled, Fixed(GroupQuant(bits=2)))
        for step in range(6):
            model.zero_grad()
            with torch.profiler.profile() if step == 5 else contextlib.nullcontext() as profiler:
                torch.cuda.set_sync_debug_mode("error" if step == 4 else "default")
                with torch.autocast("cuda", torch.bfloat16):
                    compiled(x).float().square().mean().backward()
                torch.cuda.set_sync_debug_mode("default")
                torch.cuda.synchronize()
            steps.append([p.grad.clone() for p in model.parameters()])
        assert handle.report().forwards == 6 and handle.report().ratio > 5
        handle.detach()
        launched = sum(event.count for event in profiler.key_averages() if event.key == "cudaGraphLaunch")
        assert launched == (2 if mode else 0)
    assert not counters["inductor"]["cudagraph_skips"]
    whole = {mode: [torch.cat([g.flatten() for g in step]) for step in steps] for mode, steps in found.items()}
    plain, recorded = whole.values()
    for step in range(6):
        apart = (recorded[step] - recorded[step - 1]).norm()
        assert apart > 0.01 * recorded[step].norm() and (recorded[step] - plain[step]).norm() < 0.1 * apart


BACKENDS = {
    SDPBackend.FLASH_ATTENTION: "ScaledDotProductFlashAttention",
    SDPBackend.EFFICIENT_ATTENTION: "ScaledDotProductEfficientAttention",
    SDPBackend.CUDNN_ATTENTION: "ScaledDotProductCudnnAttention",
}


def attend(leaves: list[torch.Tensor], backend: SDPBackend, **options) -> torch.Tensor:
    """Run attention on activations, with the same random numbers each time; skip where the backend is missing."""
    torch.manual_seed(1)
    with sdpa_kernel(backend):
        try:
            return F.scaled_dot_product_attention(*(t + torch.zeros((), device=t.device) for t in leaves), **options)
        except RuntimeError as error:
            if "No available kernel" in str(error):
                pytest.skip(str(error))
            raise


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.float() - b.float()).norm() / a.float().norm())


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"scale": 20.0}, {"dropout_p": 0.2}], ids=str)
@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
def test_attention_belongs_to_its_decoded_inputs(backend: SDPBackend, options: dict, monkeypatch) -> None:
    monkeypatch.setattr(scores, "SCORE_ERROR", 1e9)
    context = encke.compress(Fixed(GroupQuant(bits=8)), min_bytes=1)
    for _ in range(3):
        leaves = [torch.randn(4, 8, 256, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
        with context:
            output = attend(leaves, backend, **options)
            result = output.tanh()
        node = output.grad_fn
        assert operation_name(node) == BACKENDS[backend]
        saved = dict(saved_by(node))
        assert saved[attention.logsumexp_of(node)].dropped
        assert saved["output"].dropped == ("dropout_p" not in options)
        lossy = [saved[slot].restore().clone().requires_grad_() for slot in attention.INPUTS]
        given = torch.randn_like(output)
        state = torch.cuda.get_rng_state()
        found = torch.autograd.grad(result, leaves, given)
        assert torch.equal(torch.cuda.get_rng_state(), state)
        # The same dropout as before, and tanh's derivative as it was saved.
        behind_tanh = (given.float() * (1 - result.float() ** 2)).to(given.dtype)
        expected = torch.autograd.grad(attend(lossy, backend, **options), lossy, behind_tanh)
        for a, b in zip(expected, found, strict=True):
            assert relative(a, b) < 0.05


@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
def test_attention_in_compiled_graphs(backend: SDPBackend, compiler: str) -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.project = nn.Linear(256, 768)
            self.merge = nn.Linear(256, 256)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q, k, v = self.project(x).view(*x.shape[:2], 3, 4, 64).permute(2, 0, 3, 1, 4)
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=2.0)
            return self.merge(y.transpose(1, 2).flatten(2))

    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Attention().cuda().bfloat16()
    plain = copy.deepcopy(model)
    x = torch.randn(8, 256, 256, device="cuda", dtype=torch.bfloat16)
    with sdpa_kernel(backend):
        compiled = torch.compile(model, backend=compiler, fullgraph=True)
        handle = encke.attach(compiled, Fixed(GroupQuant(bits=8)))
        for _ in range(4):
            for each, call in ((plain, plain), (model, compiled)):
                each.zero_grad()
                call(x).float().square().mean().backward()
            for a, b in zip(plain.parameters(), model.parameters(), strict=True):
                assert relative(a.grad, b.grad) < 0.1
    rows = {(row.slot, row.codec) for row in handle.report().sites if "Attention" in row.operation}
    assert ("logsumexp", "recomputed") in rows and ("output", "GroupQuant") not in rows
    handle.detach()


@pytest.mark.parametrize("policy", [Fixed(GroupQuant(bits=2)), "default"], ids=str)
def test_attention_does_not_wait_for_the_gpu(policy) -> None:
    model = build("gpt", 256).cuda()
    tokens = torch.randint(0, 256, (8, 256), device="cuda")
    handle = encke.attach(model, policy)
    for step in range(14):
        # Steps 1 and 10 measure. What they have found is fetched when the next one begins.
        if step in (3, 4, 11, 12):
            torch.cuda.set_sync_debug_mode("error")
        try:
            with torch.autocast("cuda", torch.bfloat16):
                loss = model(tokens)
            loss.backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert set(handle._capture.scores.bits.values()) <= {2, 4, 8}
    assert handle._capture.scores.bits


CODECS = (GroupQuant(bits=2), GroupQuant(bits=8), ErrorBounded(1e-3), GroupQuant(bits=4), DualPrecision(bits=4))


def test_inductor_reads_settings_at_run_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled once, each step packs with the codec of that step; nothing but ErrorBounded's sizes is waited for."""
    seen: list[tuple[torch.Tensor, torch.Tensor, Codec]] = []
    hold_packed = payloads.hold_packed

    def spy(packing, x, packed):
        handle = hold_packed(packing, x, packed)
        seen.append((x.clone(), packed.decode(), packed.codec))
        return handle

    x = torch.randn(16, 3, 96, 96, device="cuda").to(memory_format=torch.channels_last)
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    model = convs().to(memory_format=torch.channels_last)
    compiled = torch.compile(model, fullgraph=True)
    policy = Settable(CODECS[0])
    handle = encke.attach(compiled, policy)

    def gradients() -> torch.Tensor:
        model.zero_grad()
        with torch.autocast("cuda", torch.bfloat16):
            compiled(x).float().square().mean().backward()
        return torch.cat([p.grad.flatten() for p in model.parameters()])

    gradients()
    before = counters["stats"]["unique_graphs"], counters["frames"]["total"]
    errors: dict[Codec, float] = {}
    policy.codec = ErrorBounded(0)
    exact = gradients()
    for codec in (*CODECS, *CODECS):
        policy.codec = codec
        with monkeypatch.context() as patch:
            patch.setattr(payloads, "hold_packed", spy)
            errors[codec] = float((gradients() - exact).norm() / exact.norm())
        # For a mask, DualPrecision keeps one more bit.
        assert seen and all((type(used), used.describe()) == (type(codec), codec.describe()) for *_, used in seen)
        if isinstance(codec, ErrorBounded):
            assert all(((y.double() - x.double()).abs() <= codec.bound).all() for x, y, _ in seen)
        seen.clear()
    assert (counters["stats"]["unique_graphs"], counters["frames"]["total"]) == before
    assert errors[GroupQuant(bits=8)] < errors[GroupQuant(bits=4)] < errors[GroupQuant(bits=2)]
    assert handle.report().ratio > 1.5
    policy.codec = GroupQuant(bits=4)
    gradients()
    torch.cuda.set_sync_debug_mode("error")
    try:
        gradients()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("bound", [1e-30, 1e-3])
def test_payloads_of_a_compiled_graph_need_no_source(bound) -> None:
    """The compiled graph overwrites what was packed: values that do not shrink at all, and values that do."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512)).cuda()
    twin = copy.deepcopy(model)
    compiled = torch.compile(model, fullgraph=True)
    encke.attach(compiled, Settable(ErrorBounded(bound)))
    for dtype in (*[torch.float32] * (WAITS + 2), *[torch.bfloat16] * (WAITS + 2)):
        x = torch.randn(1024, 512, device="cuda")
        for net, call in ((model, compiled), (twin, twin)):
            net.zero_grad()
            with torch.autocast("cuda", torch.bfloat16, enabled=dtype is torch.bfloat16):
                call(x).square().mean().backward()
        for a, b in zip(model.parameters(), twin.parameters(), strict=True):
            assert (a.grad - b.grad).norm() < 2e-2 * b.grad.norm()


def test_memory_of_payloads_is_released() -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = convs().to(memory_format=torch.channels_last)
    compiled = torch.compile(model, fullgraph=True)
    policy = Settable(GroupQuant(bits=2))
    encke.attach(compiled, policy)
    x = torch.randn(32, 3, 96, 96, device="cuda").to(memory_format=torch.channels_last)
    held = []
    for step in range(12):
        policy.codec = CODECS[step % 2]
        model.zero_grad()
        loss = compiled(x).square().mean()
        if step % 3:
            loss.backward()
        del loss
        torch.cuda.synchronize()
        held.append(torch.cuda.memory_allocated())
    # Gradients are there or not.
    assert max(held[6:]) <= max(held[3:6]) + (1 << 20)


def test_recordings_do_not_grow_with_fewer_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA graphs keep the bits that they were recorded with; fewer bits record and compile nothing."""
    from torch._inductor import cudagraph_trees

    recorded: list[int] = []
    run_first = cudagraph_trees.CUDAGraphNode.__init__

    def spy(self, *arguments, **settings):
        recorded.append(1)
        run_first(self, *arguments, **settings)

    monkeypatch.setattr(cudagraph_trees.CUDAGraphNode, "__init__", spy)
    torch._dynamo.reset()
    counters.clear()
    model = convs().to(memory_format=torch.channels_last)
    compiled = torch.compile(model, fullgraph=True, mode="reduce-overhead")
    policy = Settable(GroupQuant(bits=4))
    handle = encke.attach(compiled, policy)
    (around,) = handle._hooks
    x = torch.randn(16, 3, 96, 96, device="cuda").to(memory_format=torch.channels_last)
    counts = []
    for step in range(30):
        policy.codec = GroupQuant(bits=(4, 2)[step % 2])
        around.compiled.stale = True
        model.zero_grad()
        compiled(x).square().mean().backward()
        counts.append((len(recorded), counters["stats"]["unique_graphs"]))
    assert counts[10] == counts[-1] and counts[-1][1] == 1
