"""Settings read at run time: a changed one compiles nothing and holds at once; payloads live while they are read."""

from __future__ import annotations

import gc
import shutil
import weakref
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

import encke
from encke.capture.sites import Site
from encke.codecs import Codec, DualPrecision, ErrorBounded, GroupQuant, LogProb, Packed
from encke.compiled import payloads
from encke.compiled.writer import Form, Packing
from encke.policies import Comet
from tests.compiled.common import (
    LAST,
    Settable,
    as_inductor_gets_it,
    compile,
    error,
    gradients,
    graphs,
    images,
    net,
    rewrite_everywhere,
    same,
)

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler on a CPU")
CODECS = [
    GroupQuant(bits=2), GroupQuant(bits=8), ErrorBounded(0.05), GroupQuant(bits=2, group=64), DualPrecision(bits=4),
    GroupQuant(bits=4, signs=True), ErrorBounded(0.01, "rel", "stochastic"),
    ErrorBounded(0.05, rounding="dithered", signs=True),
]  # fmt: skip


class Seen:
    """Everything that was packed while a test ran: the values before, and what they were packed to."""

    def __init__(self) -> None:
        self.all: list[tuple[Tensor, weakref.ref[Packed]]] = []
        self.values: list[Tensor] = []
        """Decoded values."""

    @property
    def alive(self) -> int:
        gc.collect()
        return sum(packed() is not None for _, packed in self.all)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Iterator[Seen]:
    found, hold_packed = Seen(), payloads.hold_packed

    def spy(packing: Packing, x: Tensor, packed: Packed) -> Tensor:
        found.all.append((x.clone(), weakref.ref(packed)))
        found.values.append(packed.decode())
        return hold_packed(packing, x, packed)

    monkeypatch.setattr(payloads, "hold_packed", spy)
    yield found
    del found.values[:]


def compilations() -> tuple[int, ...]:
    """Numbers that grow when anything is compiled."""
    return graphs(), counters["frames"]["total"], counters["aot_autograd"]["total"]


@pytest.mark.slow
def test_changes_of_settings_compile_nothing_and_hold_at_once(seen: Seen) -> None:
    policy = Settable(CODECS[0])
    model = compile(net(4))
    handle = encke.attach(model, policy)
    x = images(4)
    gradients(model, x)
    before = compilations()
    for codec in (*CODECS[::-1], *CODECS):
        policy.codec = codec
        del seen.all[:], seen.values[:]
        gradients(model, x)
        assert len(seen.all) == 3
        for (values, _), decoded in zip(seen.all, seen.values, strict=True):
            assert_error_is_as_predicted(values, decoded, codec)
        used = {(row.codec, row.bound) for row in handle.report().sites if row.codec not in ("kept", "Mask")}
        assert used == {(type(codec).__name__, codec.describe())}
    assert compilations() == before and before[0] == 1


def assert_error_is_as_predicted(x: Tensor, decoded: Tensor, codec: Codec) -> None:
    apart = (decoded - x).abs()
    if isinstance(codec, ErrorBounded):
        bound = codec.bound * (1 if codec.mode == "abs" else float(x.max() - x.min()))
        assert bound / 4 < float(apart.max()) <= bound
    elif isinstance(codec, GroupQuant) and not codec.signs and x.min() < 0:
        groups = x.flatten().view(-1, codec.group)
        step = (groups.amax(1) - groups.amin(1)) / (2**codec.bits - 1)
        predicted = float(step.square().mean() / 12)
        assert 0.9 < float(apart.square().mean()) / predicted < 1.1
    else:
        assert 0 < float(apart.max()) < float(x.max() - x.min()) / 2


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("direct", [True, pytest.param(False, marks=pytest.mark.soak)])
def test_inductor_compiles_nothing_either(seen: Seen, monkeypatch: pytest.MonkeyPatch, direct: bool) -> None:
    if direct:
        monkeypatch.setattr("encke.compiled.lowerings.DIRECT_ON", {"cuda", "cpu"})
        rewrite_everywhere(monkeypatch)
    policy, expected = Settable(CODECS[0]), Settable(CODECS[0])
    model, other = net().to(memory_format=LAST), net().to(memory_format=LAST)
    compiled, reference = compile(model, backend="inductor"), compile(other)
    encke.attach(compiled, policy)
    encke.attach(reference, expected)
    x = images().to(memory_format=LAST)
    plain = gradients(net().to(memory_format=LAST), x)
    before: tuple[int, ...] = ()
    for codec in (*CODECS, *CODECS[::-2]):
        policy.codec = expected.codec = codec
        wanted = gradients(reference, x)
        # Inductor's last bits differ, and a code that is rounded another way for that.
        assert error(wanted, gradients(compiled, x)) < 1e-3 + 0.02 * error(plain, wanted)
        assert before in ((), compilations())
        before = compilations()
    assert seen.alive == 0


@pytest.mark.slow
def test_batch_norms_made_for_one_codec_read_all_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """The graph reads codes in batch norm's backward; codecs without such codes are decoded."""
    x, found = images().to(memory_format=LAST), []
    for on in (True, False):
        with monkeypatch.context() as patch:
            if on:
                rewrite_everywhere(patch)
            policy = Settable(GroupQuant(bits=2))
            compiled = compile(net().to(memory_format=LAST), backend=as_inductor_gets_it)
            encke.attach(compiled, policy)
            steps = []
            for codec in CODECS:
                policy.codec = codec
                steps.append(gradients(compiled, x))
            found.append(steps)
        torch._dynamo.reset()
    for step in zip(*found, strict=True):
        for a, b in zip(*step, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("codec", [ErrorBounded(0.03), ErrorBounded(1e-3, "rel")], ids=["abs", "rel"])
def test_every_value_keeps_its_bound(seen: Seen, codec: ErrorBounded, dtype: torch.dtype) -> None:
    model = net().to(dtype)
    compiled = compile(model)
    encke.attach(compiled, Settable(codec))
    gradients(compiled, images().to(dtype))
    assert len(seen.all) == 3
    for (x, _), decoded in zip(seen.all, seen.values, strict=True):
        bound = codec.bound * (1 if codec.mode == "abs" else float(x.double().max() - x.double().min()))
        assert float((decoded.double() - x.double()).abs().max()) <= bound


@pytest.mark.slow
def test_nothing_is_left_after_backward(seen: Seen) -> None:
    model = compile(net())
    encke.attach(model, Settable(GroupQuant(bits=4)))
    losses = [model(images(seed=seed)).square().mean() for seed in range(3)]
    assert seen.alive == 9
    losses[1].backward()
    assert seen.alive == 6
    with torch.no_grad():
        model(images())
    assert len(seen.all) == 9
    # Dropped without backward.
    del losses[2]
    assert seen.alive == 3
    losses[0].backward()
    assert seen.alive == 0


@pytest.mark.slow
def test_a_retained_graph_gives_the_same_again_and_nothing_is_left_then(seen: Seen) -> None:
    model = compile(net())
    encke.attach(model, Settable(GroupQuant(bits=2)))
    with torch._functorch.config.patch(donated_buffer=False):
        loss = model(images()).square().mean()
    parameters = list(model.parameters())
    first = torch.autograd.grad(loss, parameters, retain_graph=True)
    assert seen.alive == 3
    second = torch.autograd.grad(loss, parameters)
    assert same(list(first), list(second)) and seen.alive == 0


class Checkpoints(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = net()

    def forward(self, x: Tensor) -> Tensor:
        return self.net[3:](checkpoint(self.net[:3], x, use_reentrant=False))


@pytest.mark.slow
def test_nothing_is_left_of_checkpoints_within_and_around(seen: Seen) -> None:
    model = Checkpoints()
    plain = gradients(model, images())
    compiled = compile(model)
    policy = Settable(GroupQuant(bits=2))
    encke.attach(compiled, policy)
    gradients(compiled, images())
    policy.codec, packed = GroupQuant(bits=8), len(seen.all)
    assert error(plain, gradients(compiled, images())) < 0.03
    assert len(seen.all) == 2 * packed and seen.alive == 0
    x = images().requires_grad_()
    model.zero_grad()
    checkpoint(compiled, x, use_reentrant=True).square().mean().backward()
    assert error(plain, [p.grad for p in model.parameters()]) < 0.03
    assert len(seen.all) > 2 * packed and seen.alive == 0


class Raises(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = net()
        self.broken = True

    def forward(self, x: Tensor) -> Tensor:
        y = self.net(x)
        torch._dynamo.graph_break()
        if self.broken:
            raise KeyError("broken")
        return y


@pytest.mark.slow
def test_nothing_is_left_after_an_exception(seen: Seen) -> None:
    model = Raises()
    compiled = compile(model, fullgraph=False)
    encke.attach(compiled, Settable(GroupQuant(bits=2)))
    with pytest.raises(KeyError, match="broken"):
        compiled(images())
    assert len(seen.all) == 3 and seen.alive == 0
    model.broken = False
    loss = compiled(images()).square().mean()
    loss.register_hook(lambda grad: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        loss.backward()
    assert seen.alive == 3
    del loss
    assert seen.alive == 0


def test_the_report_counts_what_was_kept(seen: Seen) -> None:
    policy = Settable(GroupQuant(bits=2))
    model = compile(net())
    handle = encke.attach(model, policy)
    for codec in (GroupQuant(bits=2), ErrorBounded(1e-3), GroupQuant(bits=8)):
        policy.codec = codec
        del seen.all[:]
        loss = model(images()).square().mean()
        kept = sorted(packed().nbytes for _, packed in seen.all)
        rows = [row for row in handle.report().sites if row.codec == type(codec).__name__]
        assert sorted(row.packed_bytes for row in rows) == kept
        loss.backward()


def test_masks_are_exact_before_and_behind_views() -> None:
    for rest in ([nn.Flatten(), nn.Linear(8 * 22 * 22, 5)], [nn.Conv2d(8, 5, 3)]):
        torch._dynamo.reset()
        compiled = compile(nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), *rest))
        plain = gradients(compiled, images())
        policy = Settable(CODECS[0])
        encke.attach(compiled, policy)
        for policy.codec in (*CODECS, DualPrecision(bits=2)):
            # The gradient of the first bias needs the mask alone.
            torch.testing.assert_close(gradients(compiled, images())[1], plain[1], rtol=1e-4, atol=1e-7)


def test_where_decoded_values_are_compared_zeros_come_back_as_zeros() -> None:
    """The mask bits of `DualPrecision` are no help there."""
    sites = [Site("1", "Convolution", "input", need="lossy"), Site("0", "Relu", "result", need="mask")]
    packing, policy = Packing(Form.CODES, sites), Settable(DualPrecision(bits=4))
    assert packing.codec_now(policy.choose, torch.float32) == DualPrecision(bits=4, mask=True)
    packing.compare_values()
    assert packing.codec_now(policy.choose, torch.float32) == GroupQuant(bits=4)
    policy.codec = ErrorBounded(0.1)
    assert packing.codec_now(policy.choose, torch.float32) == ErrorBounded(0.1)


def test_what_is_not_finite_is_stored_exactly_from_then_on() -> None:
    class Product(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.weight = nn.Linear(512, 512), nn.Parameter(torch.ones(512))

        def forward(self, x: Tensor, added: Tensor) -> Tensor:
            return (self.linear(x) + added) * self.weight

    model = compile(Product())
    handle = encke.attach(model, Settable(GroupQuant()))
    x, added = torch.randn(64, 512), torch.zeros(64, 512)
    spoilt = added.clone()
    spoilt[3, 5] = torch.inf
    for number in range(4):
        model.zero_grad()
        model(x, spoilt if number == 2 else added).sum().backward()
        assert (~model.weight.grad.isfinite()).nonzero().tolist() == [[5]] * (number == 2), number
        (codec,) = {row.codec for row in handle.report().sites if row.operation == "Mul"}
        assert codec == ("GroupQuant" if number < 2 else "ErrorBounded"), number  # bound 0
    assert graphs() == 1


def test_what_a_codec_does_not_take_is_kept_exact(seen: Seen) -> None:
    policy = Settable(ErrorBounded(0.01))
    model = compile(net().double())
    encke.attach(model, policy)
    plain = gradients(net().double(), images().double())
    gradients(model, images().double())
    policy.codec = LogProb()
    assert same(gradients(model, images().double()), plain)
    assert all(torch.equal(x, y) for (x, _), y in zip(seen.all[3:], seen.values[3:], strict=True))


def test_operators_agree_with_their_fakes() -> None:
    x = torch.randn(4, 16, 12, 12).to(memory_format=LAST)
    handle = payloads.hold(GroupQuant().encode(x), x.device)
    grad, line = torch.randn_like(x), torch.rand(16)
    layout = ([*x.shape], [*x.stride()])
    calls = {
        "packed_decode": (handle, *layout, x.dtype),
        "packed_mask": (handle, *layout),
        "packed_gate": (grad, handle, grad),
        "packed_norm_sums": (grad, handle, line, line, line, handle),
        "packed_norm_apply": (grad, handle, torch.rand(5, 16), handle),
    }
    encoders = {"site_pack", "site_pack_moments", "site_pack_norm_relu"}
    assert {*calls} == {function.__name__ for function in payloads.OPERATORS} - encoders
    for name, arguments in calls.items():
        operator = getattr(torch.ops.encke, name).default
        made = operator(*arguments)
        with FakeTensorMode() as mode:
            fakes = [mode.from_tensor(a) if isinstance(a, Tensor) else a for a in arguments]
            fake = operator(*fakes)
        assert [made.shape, made.stride(), made.dtype] == [fake.shape, fake.stride(), fake.dtype]


def test_batch_norms_kernels_read_groups_of_one_channel_in_channels_last_memory_alone() -> None:
    for shape, kernels in (((8, 16, 24, 24), True), ((3, 16, 24, 24), False)):
        for form, expected in ((LAST, kernels), (torch.contiguous_format, True)):
            x = torch.randn(shape).to(memory_format=form)
            plan = payloads.norm_plan_for(GroupQuant().encode(x), x)
            assert (plan is not None) == expected
            other = torch.contiguous_format if form is LAST else LAST
            assert payloads.norm_plan_for(GroupQuant().encode(x), x.to(memory_format=other)) is None


def test_other_strides_than_those_packed_are_restored() -> None:
    x = torch.randn(4, 16, 12, 12)
    flags, grad = x.relu() > 0, torch.randn_like(x).to(memory_format=LAST)
    packed = GroupQuant(bits=8).encode(x.relu())
    handle = payloads.hold(packed, x.device)
    out = torch.empty_like(grad)
    for function, wanted in (
        (lambda: payloads.decode_into(handle, out=out), packed.decode()),
        (lambda: payloads.gate_into(grad, handle, None, out=out), torch.where(flags, grad, 0)),
        (lambda: payloads.gate_into(grad, handle, grad, out=out), torch.where(flags, grad + grad, 0)),
        (lambda: payloads.mask_into(handle, out=out), flags.float()),
    ):
        function()
        assert torch.equal(out, wanted) and out.stride() == grad.stride()
    restored = torch.ops.encke.packed_decode(handle, [*x.shape], [*grad.stride()], x.dtype)
    assert torch.equal(restored, packed.decode()) and restored.stride() == grad.stride()


@pytest.mark.parametrize("relu", [GroupQuant(bits=3), GroupQuant(bits=2, group=64), ErrorBounded(0.01)], ids=str)
@pytest.mark.parametrize("norm", [GroupQuant(bits=2), ErrorBounded(0.01)], ids=str)
def test_a_batch_norm_reads_a_relus_codes_whatever_their_codec(norm: Codec, relu: Codec) -> None:
    x, grad, line = (torch.randn(8, 16, 12, 12).to(memory_format=LAST) for _ in "xyz")
    line, y = torch.rand(3, 16), x.relu()
    handle, gate = (payloads.hold(codec.encode(t), x.device) for codec, t in ((norm, x), (relu, y)))
    gated = torch.where(y > 0, grad, 0)
    ops = torch.ops.encke
    sums = ops.packed_norm_sums(grad, handle, *line, gate)
    assert torch.equal(sums, ops.packed_norm_sums(gated, handle, *line, None))
    found, expected = (ops.packed_norm_apply(g, handle, sums, h) for g, h in ((grad, gate), (gated, None)))
    assert torch.equal(found, expected) and not torch.equal(found, ops.packed_norm_apply(grad, handle, sums, None))


def test_a_copy_of_a_handle_is_an_error() -> None:
    handle = payloads.hold(GroupQuant().encode(torch.randn(500)), torch.device("cpu"))
    assert torch.ops.encke.packed_decode(handle, [500], [1], torch.float32).shape == (500,)
    for copy in (handle.clone(), torch.empty(1, dtype=torch.uint8)):
        with pytest.raises(RuntimeError, match="copy of a handle"):
            torch.ops.encke.packed_decode(copy, [500], [1], torch.float32)


@pytest.mark.slow
def test_comet_changes_bits_without_compilation() -> None:
    model = compile(net())
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    handle = encke.attach(model, Comet(sigma=0.05), optimizer=optimizer)
    bounds = []
    for step in range(22):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images(seed=step)), torch.arange(8)).backward()
        optimizer.step()
        bounds.append({row.layer: row.bound for row in handle.report().sites if row.codec == "GroupQuant"})
    assert graphs() == 1 and {row["step"] for row in handle.history} == {1, 10, 20}
    last = {row["layer"]: f"{row['bits']} bits" for row in handle.history}
    assert bounds[21] == {layer: last[layer] for layer in bounds[21]} != bounds[1]
