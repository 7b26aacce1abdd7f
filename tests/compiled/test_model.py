"""Compiled models: one graph that packs, settings that may change, and a clear error where that cannot be."""

from __future__ import annotations

import copy
import json
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import encke
from encke.codecs import ErrorBounded, GroupQuant
from encke.compiled import model as compiled_module
from encke.policies import Comet, Division, Fixed
from encke.train.models.gpt import Gpt
from tests.compiled.common import (
    EIGHT,
    TWO,
    Settable,
    Wrapped,
    compile,
    constant_codecs,
    error,
    gradients,
    graphs,
    images,
    net,
    same,
)
from tests.models import MODELS

inductor = pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler on a CPU")


def test_one_graph_that_packs_and_is_compiled_once() -> None:
    model = compile(net())
    handle = encke.attach(model, TWO)
    for seed in range(3):
        gradients(model, images(seed=seed))
    assert graphs() == 1
    report = handle.report()
    assert report.forwards == 3 and report.ratio > 8
    rows = {row.layer: row.codec for row in report.sites if row.codec != "kept"}
    assert rows == {"1": "GroupQuant", "3": "GroupQuant", "4": "GroupQuant", "5": "Mask"}
    assert "2 bits" in str(report)


def test_min_bytes_is_the_size_from_which_tensors_are_packed() -> None:
    size = 4 * 8 * 16 * 24 * 24
    model = compile(net())
    with encke.attach(model, EIGHT, min_bytes=size) as handle:
        gradients(model, images())
        assert [row.codec for row in handle.report().sites].count("GroupQuant") == 3
    with encke.attach(model, EIGHT, min_bytes=size + 1), pytest.raises(RuntimeError, match="packed nothing.*min_bytes"):
        gradients(model, images())


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in MODELS if name != "lstm"])
def test_eight_bits_are_close_to_plain_gradients_on_all_models(name: str) -> None:
    model, inputs = MODELS[name]()
    compiled = compile(model)
    plain = gradients(compiled, *inputs)
    handle = encke.attach(compiled, EIGHT)
    assert error(plain, gradients(compiled, *inputs)) < 0.03
    assert handle.report().ratio > 1.5


def test_a_gpt_keeps_attention_at_eight_and_four_bits() -> None:
    model = compile(Gpt(64, 64, 1, 4, 64, dropout=0.0))
    handle = encke.attach(model, TWO)
    tokens = torch.randint(64, (8, 64))
    gradients(model, tokens)
    bits = {row.slot: row.bound for row in handle.report().sites if "Attention" in row.operation}
    assert bits == {"query": "8 bits", "key": "8 bits", "value": "4 bits", "output": "", "logsumexp": ""}
    assert handle.report().ratio > 6


def test_the_log_has_a_line_for_each_forward_pass(tmp_path: Path) -> None:
    model = compile(net())
    handle = encke.attach(model, TWO)
    handle.log(tmp_path / "log.jsonl")
    for _ in range(3):
        gradients(model, images())
    handle.detach()
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3] and all(line["ratio"] > 8 for line in lines)


def test_seeds_differ_from_step_to_step_and_repeat_from_run_to_run() -> None:
    runs = []
    for _ in range(2):
        torch._dynamo.reset()
        model = compile(net())
        encke.attach(model, TWO)
        runs.append([gradients(model, images()) for _ in range(2)])
    assert same(runs[0][0], runs[1][0]) and same(runs[0][1], runs[1][1])
    assert not same(runs[0][0], runs[0][1])


def test_several_forwards_before_backward_each_use_their_own_seed() -> None:
    def run(together: bool) -> list[Tensor]:
        torch._dynamo.reset()
        model = compile(net())
        encke.attach(model, TWO)
        losses = []
        for seed in range(3):
            losses.append(model(images(seed=seed)).square().mean())
            if not together:
                losses.pop().backward()
        for loss in reversed(losses):
            loss.backward()
        return [p.grad for p in model.parameters()]

    for a, b in zip(run(True), run(False), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_retain_graph_gives_the_same_gradients_again() -> None:
    model = compile(net())
    encke.attach(model, TWO)
    # Compiled graphs refuse it otherwise, with or without us.
    with torch._functorch.config.patch(donated_buffer=False):
        loss = model(images()).square().mean()
    loss.backward(retain_graph=True)
    first = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    loss.backward()
    assert same(first, [p.grad for p in model.parameters()])


@pytest.mark.parametrize("in_place", [False, True])
def test_a_model_that_ran_before_is_compiled_again_and_runs_plain_after_detach(in_place: bool) -> None:
    model = Wrapped()
    if in_place:
        model.compile(backend="aot_eager", fullgraph=True)
    else:
        model = compile(model)
    x = images()
    plain = gradients(model, x)
    handle = encke.attach(model, TWO)
    assert handle.attached and not same(plain, gradients(model, x))
    handle.detach()
    assert not handle.attached and same(plain, gradients(model, x))
    forwards = handle.report().forwards
    encke.attach(model, TWO)
    assert not same(plain, gradients(model, x)) and handle.report().forwards == forwards == 1


def test_nothing_happens_in_eval_and_under_no_grad() -> None:
    model = compile(net())
    handle = encke.attach(model, TWO)
    with torch.no_grad():
        model(images())
    model.eval()
    gradients(model, images())
    assert handle.report().forwards == 0
    model.train()
    gradients(model, images())
    assert handle.report().forwards == 1


def test_copies_are_not_attached() -> None:
    model = Wrapped()
    model.compile(backend="aot_eager")
    encke.attach(model, TWO)
    twin = copy.deepcopy(model)
    assert twin._compiled_call_impl is None and not twin._forward_hooks
    assert same(gradients(twin, images()), gradients(net(), images()))


def test_an_exception_in_forward_leaves_no_hooks_behind() -> None:
    model = compile(net())
    encke.attach(model, TWO)
    with pytest.raises(Exception, match="channels"):
        model(torch.randn(2, 4, 8, 8))
    gradients(model, images())


def test_overrides_leave_layers_as_they_are() -> None:
    model = compile(net())
    handle = encke.attach(model, TWO, overrides={"3": None, "1": None})
    gradients(model, images())
    assert {row.layer for row in handle.report().sites if row.codec != "kept"} == {"4", "5"}


def test_packing_nothing_is_an_error() -> None:
    small = compile(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)))
    encke.attach(small, TWO)
    with pytest.raises(RuntimeError, match="packed nothing.*16 KiB"):
        small(torch.randn(4, 8))
    other = compile(net(), backend="eager")
    encke.attach(other, TWO)
    with pytest.raises(RuntimeError, match="packed nothing.*AOTAutograd"):
        other(images())


def test_a_later_step_with_nothing_to_pack_is_no_error() -> None:
    plain = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 8))
    model = compile(copy.deepcopy(plain))
    handle = encke.attach(model, TWO)
    gradients(model, torch.randn(128, 64))
    assert handle.report().ratio > 2
    x = torch.randn(3, 64)  # the last batch of an epoch
    assert same(gradients(model, x), gradients(plain, x))


def test_layers_that_change_from_step_to_step() -> None:
    class Changing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts, self.act, self.number = nn.ModuleList(nn.Linear(64, 64) for _ in range(3)), F.relu, 0

        def forward(self, x: Tensor) -> Tensor:
            x = self.act(self.parts[0](x))
            return self.parts[2](self.act(self.parts[self.number](x)))

    plain = Changing()
    model, x = compile(copy.deepcopy(plain)), torch.randn(128, 64)
    encke.attach(model, EIGHT)
    for number, act in enumerate((F.relu, F.gelu, torch.tanh, F.relu, torch.exp)):
        plain.number = model.number = number % 2
        plain.act = model.act = act
        assert error(gradients(plain, x), gradients(model, x)) < 0.03, act


@pytest.mark.parametrize("pool", [nn.Identity(), nn.MaxPool1d(3, 1, 1)], ids=repr)
def test_a_policy_without_loss_packs_nothing_and_is_no_error(pool: nn.Module) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), pool, nn.Linear(256, 8))
    x = torch.randn(128, 64)
    compiled = torch.compile(model, backend="aot_eager")
    compiled(x).square().sum().backward()
    plain = [p.grad.clone() for p in model.parameters()]
    handle = encke.attach(compiled, Fixed(ErrorBounded(0)))
    for _ in range(2):
        model.zero_grad()
        compiled(x).square().sum().backward()
        assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), plain, strict=True))
    assert {row.codec for row in handle.report().sites} <= {"kept", "shape"}


@pytest.mark.parametrize("fullgraph", [False, True])
def test_attaching_first_and_compiling_then_is_an_error(fullgraph: bool) -> None:
    model = net()
    encke.attach(model, TWO)
    compiled = compile(model, fullgraph=fullgraph)
    with pytest.raises(Exception, match="(?s)attached and then compiled"):
        gradients(compiled, images())


def test_a_model_attached_first_may_be_compiled_for_evaluation() -> None:
    model = net()
    encke.attach(model, TWO)
    model.eval()
    with torch.no_grad():
        assert torch.equal(compile(model)(images()), net().eval()(images()))


@pytest.mark.parametrize("fullgraph", [False, True])
def test_an_attached_compiled_model_within_another_compiled_function_is_an_error(fullgraph: bool) -> None:
    model = compile(Wrapped())
    encke.attach(model, TWO)
    outer = torch.compile(lambda x: model(x) + 1, backend="aot_eager", fullgraph=fullgraph)
    with pytest.raises(Exception, match="(?s)within another function"):
        outer(images())


def test_a_part_that_is_compiled_in_a_model_that_is_not() -> None:
    model = nn.Sequential(compile(net()), nn.Linear(10, 10))
    with pytest.raises(NotImplementedError, match="0 of this Sequential is compiled"):
        encke.attach(model)


@pytest.mark.parametrize(
    ("policy", "bits", "words"),
    [
        (Fixed(ErrorBounded(1e-2, "rel")), "8 bits", "ErrorBounded"),
        (Division(), "2 bits", "DualPrecision"),
    ],
)
def test_in_cuda_graphs_a_codec_of_fixed_rate_takes_the_place_of_others(
    monkeypatch: pytest.MonkeyPatch, policy, bits: str, words: str
) -> None:
    constant_codecs(monkeypatch)
    compiled_module._warned.clear()
    model = compile(net())
    handle = encke.attach(model, policy)
    with pytest.warns(RuntimeWarning, match=f"{words} has no fixed size, which CUDA graphs need"):
        gradients(model, images())
    assert {row.bound for row in handle.report().sites if row.codec == "GroupQuant"} == {bits}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        gradients(model, images())


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, first: int = 0) -> None:
    for step in range(first, first + steps):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images(seed=step)), torch.arange(8)).backward()
        optimizer.step()


@pytest.mark.slow
@pytest.mark.parametrize("follows", [True, False])
def test_in_cuda_graphs_comet_compiles_again_only_for_more_bits(monkeypatch, follows: bool) -> None:
    constant_codecs(monkeypatch)
    model = compile(net())
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    handle = encke.attach(model, Comet(sigma=0.4), optimizer=optimizer if follows else None)
    train(model, optimizer, 9)
    assert graphs() == 1 and {row["step"] for row in handle.history} == {1}

    lasting = {place.split("/")[0]: setting.lasting.bits for place, setting in handle.policy.settings.items()}
    found = {row.layer: row.bound for row in handle.report().sites if row.codec == "GroupQuant"}
    assert len(found) == 3 and found == {layer: f"{lasting[layer]} bits" for layer in found}
    assert any(row["bits"] < lasting[row["layer"]] for row in handle.history)
    train(model, optimizer, 4, 9)
    assert {row["step"] for row in handle.history} == {1, 10} and handle.report().forwards == 13
    more = any(row["bits"] > lasting[row["layer"]] for row in handle.history)
    assert graphs() == 1 + more
    (around,) = handle._hooks
    # As many bits as there is room for compile nothing.
    for place, setting in handle.policy.settings.items():
        setting.codec = GroupQuant(bits=lasting[place.split("/")[0]])
    around.compiled.stale = True
    train(model, optimizer, 1, 13)
    assert graphs() == 1 + more
    for setting in handle.policy.settings.values():
        setting.codec = GroupQuant(bits=8)
    around.compiled.stale = True
    train(model, optimizer, 1, 14)
    assert graphs() == 2 + more
    assert {row.bound for row in handle.report().sites if row.codec == "GroupQuant"} == {"8 bits"}
    # Fewer bits, or the same: the graph has room, and stays.
    for setting in handle.policy.settings.values():
        setting.codec = GroupQuant(bits=2)
    around.compiled.stale = True
    train(model, optimizer, 2, 15)
    assert graphs() == 2 + more


@pytest.mark.slow
def test_in_cuda_graphs_compilations_come_to_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    constant_codecs(monkeypatch)
    compiled_module._warned.clear()
    model, policy = compile(net()), Settable(GroupQuant(bits=2))
    plain = gradients(model, images())
    handle = encke.attach(model, policy)
    (around,) = handle._hooks

    def step(bits: int) -> tuple[float, int]:
        policy.codec = GroupQuant(bits=bits)
        around.compiled.stale = True
        return error(plain, gradients(model, images())), graphs()

    found = [step(bits) for bits in (2, 2, 3, 4)]
    assert [count - found[0][1] for _, count in found] == [0, 0, 1, 2]
    assert found[1][0] > 1.5 * found[2][0] > 2 * found[3][0]
    with pytest.warns(RuntimeWarning, match="'1' and other layers by now need more bits"):
        step(8)
    assert {step((2, 3, 4, 8)[i % 4])[1] for i in range(95)} == {found[-1][1]}
    assert {row.bound for row in handle.report().sites if row.codec == "GroupQuant"} == {"4 bits"}
    # What has to be exact is.
    around.compiled.capture.readers.not_finite.update(packing.sites[0] for packing, _ in around.compiled.constants())
    assert step(2) == (0.0, found[-1][1] + 1)


@pytest.mark.slow
def test_state_goes_on_with_the_settings_it_had() -> None:
    model = compile(net())
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    handle = encke.attach(model, Comet(sigma=0.05), optimizer=optimizer)
    train(model, optimizer, 12)
    state = handle.state_dict()
    again = compile(net())
    resumed = encke.attach(again, Comet(sigma=0.05), optimizer=torch.optim.SGD(again.parameters(), 0.05))
    resumed.load_state_dict(state)
    gradients(again, images())
    rows = [[(r.layer, r.bound) for r in h.report().sites] for h in (handle, resumed)]
    assert rows[0] == rows[1] and any(bound == "8 bits" or bound == "4 bits" for _, bound in rows[0])


class Broken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = net()[:6], nn.Conv2d(16, 16, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        torch._dynamo.graph_break()
        y = torch.tanh(x) if x.shape[0] else x
        torch._dynamo.graph_break()
        return self.b(y)


def test_a_model_that_breaks_into_several_graphs() -> None:
    model = compile(Broken(), fullgraph=False)
    plain = gradients(model, images())
    handle = encke.attach(model, EIGHT)
    assert error(plain, gradients(model, images())) < 0.03
    assert {"a.1", "a.3", "a.4"} <= {row.layer for row in handle.report().sites if row.codec == "GroupQuant"}


@inductor
@pytest.mark.slow
def test_inductor_gives_the_same_gradients() -> None:
    # Operators, which are called on a CPU. Convolutions and norms: tests/compiled/test_lowerings.py.
    model, x = nn.Sequential(nn.Linear(16, 256), nn.ReLU(), nn.Linear(256, 64)), torch.randn(256, 16)
    found = []
    for backend in ("aot_eager", "inductor"):
        compiled = compile(model, backend=backend)
        handle = encke.attach(compiled, EIGHT)
        found.append(gradients(compiled, x))
        assert handle.report().ratio > 3
        handle.detach()
    assert error(*found) < 0.03


CACHED = """
import sys, torch, encke
from torch import nn
from encke.codecs import GroupQuant
from encke.policies import Fixed
for kind in sys.argv[1:]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))
    compiled = torch.compile(model, fullgraph=True)
    handle = None if kind == "plain" else encke.attach(compiled, Fixed(GroupQuant(bits=int(kind))))
    compiled(torch.randn(256, 64)).square().mean().backward()
    bounds = {row.bound for row in handle.report().sites if row.bound} if handle else ""
    print(kind, *bounds, model[2].weight.grad.norm().item())
"""


@inductor
@pytest.mark.soak
def test_graphs_cached_by_another_process_are_not_mixed_up(tmp_path: Path) -> None:
    found = []
    for kinds in (("plain", "2"), ("8", "2", "plain")):
        run = subprocess.run(
            [sys.executable, "-c", CACHED, *kinds],
            env={"PATH": "/usr/bin:/bin", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "OMP_NUM_THREADS": "2"},
            capture_output=True,
            text=True,
            check=True,
            cwd=Path(__file__).parents[2],
        )
        found.append(sorted(run.stdout.splitlines()))
    assert set(found[0]) < set(found[1]) and len({line.split()[-1] for line in found[1]}) == 3
    assert [line.split()[:2] for line in found[1][:2]] == [["2", "2"], ["8", "8"]]
