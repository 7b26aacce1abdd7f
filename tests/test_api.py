"""attach, compress, the handle: in place, removable, clear errors."""

from __future__ import annotations

import gc
import io
import json
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from torch import nn

import encke
from encke.codecs import ErrorBounded, GroupQuant
from encke.policies import Comet, Fixed
from tests.models import resnet
from tests.policies.comet.trainings import net as small_net
from tests.policies.comet.trainings import sgd, train


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))


def step(model: nn.Module) -> None:
    model(torch.randn(128, 64)).square().mean().backward()


def test_attach_changes_no_class_no_layer_and_no_weight_and_comes_off_cleanly() -> None:
    model = net()
    state = {k: v.clone() for k, v in model.state_dict().items()}
    classes = [type(m) for m in model.modules()]
    handle = encke.attach(model)
    assert [type(m) for m in model.modules()] == classes and handle.attached
    step(model)
    assert set(model.state_dict()) == set(state)
    for key, value in model.state_dict().items():
        assert torch.equal(value, state[key])
    handle.detach()
    handle.detach()
    assert not handle.attached
    assert not any(m._forward_hooks or m._forward_pre_hooks or m._forward_hooks_always_called for m in model.modules())
    before = handle.report().forwards
    step(model)
    assert handle.report().forwards == before == 1


def test_nothing_happens_in_eval_and_under_no_grad() -> None:
    model = net()
    handle = encke.attach(model)
    model.eval()
    step(model)
    model.train()
    with torch.no_grad():
        model(torch.randn(128, 64))
    with torch.inference_mode():
        model(torch.randn(128, 64))
    assert handle.report().forwards == 0 and "no training forward pass yet" in str(handle.report())


def test_attaching_again_is_an_error_for_the_model_its_parts_and_what_contains_it() -> None:
    model = net()
    handle = encke.attach(model)
    for other in (model, nn.Sequential(model, nn.Linear(2, 2)), model[0]):
        with pytest.raises(ValueError, match="attached already"):
            encke.attach(other)
    handle.detach()
    encke.attach(model[0]).detach()
    encke.attach(model).detach()


@pytest.mark.parametrize(
    ("call", "kind", "words"),
    [
        (lambda: encke.attach(nn.ReLU()), ValueError, "no parameters"),
        (lambda: encke.attach(torch.sin), TypeError, "compress"),
        (lambda: encke.attach(net(), policy="fast"), ValueError, "unknown preset 'fast'.*default, careful"),
        (lambda: encke.attach(net(), policy="carefull"), ValueError, "did you mean 'careful'"),
        (lambda: encke.attach(net(), policy=encke.policies.Comet), TypeError, r"write policy=Comet\("),
        (lambda: encke.attach(net(), policy=ErrorBounded(0.1)), TypeError, r"encke.policies.Fixed\(ErrorB"),
        (lambda: encke.attach(net(), optimizer="sgd"), TypeError, "optimizer must be"),
        (lambda: encke.attach(net(), torch.optim.SGD(net().parameters())), TypeError, "optimizer=optimizer"),
        (lambda: encke.attach(net(), optimizer=torch.optim.SGD(net().parameters())), ValueError, "no parameter of"),
        (lambda: encke.compress(torch.optim.SGD(net().parameters())), TypeError, "optimizer=optimizer"),
        (lambda: encke.Handle(), TypeError, "made by encke.attach"),
        (lambda: encke.attach(net(), min_bytes=0), ValueError, "min_bytes must be at least 1.*got 0.*16384"),
        (lambda: encke.attach(net(), min_bytes=1.5), TypeError, "min_bytes must be a whole number of bytes, got 1.5"),
        (lambda: encke.attach(net(), min_bytes=True), TypeError, "min_bytes must be a whole number"),
        (lambda: encke.compress(min_bytes=-1), ValueError, "min_bytes must be at least 1"),
        (lambda: encke.compress(policy=3), TypeError, "policy must be"),
        (lambda: Fixed("2 bits"), TypeError, "Fixed takes a codec"),
        (lambda: encke.attach(nn.Sequential(torch.compile(net()), nn.ReLU())), NotImplementedError, "is compiled"),
    ],
)
def test_wrong_arguments_name_the_value_and_the_way_out(call, kind, words: str) -> None:
    with pytest.raises(kind, match=words):
        call()


def test_min_bytes_is_the_size_from_which_tensors_are_packed() -> None:
    def packed(**options) -> list[str]:
        model = net()
        with encke.attach(model, Fixed(ErrorBounded(0)), **options) as handle:
            for _ in range(2):
                model(torch.randn(8, 64)).square().mean().backward()
        return [row.operation for row in handle.report().sites if row.codec != "kept"]

    size = 4 * 8 * 64
    assert packed() == packed(min_bytes=size + 1) == []
    assert packed(min_bytes=size) == packed(min_bytes=1) != []


def test_layer_names_drop_what_wrappers_put_in_front() -> None:
    wrapped = nn.DataParallel(net())
    handle = encke.attach(wrapped)
    step(wrapped)
    assert {row.layer for row in handle.report().sites} == {"0", "1"}


def test_report_prints_and_exports(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, inputs = resnet()
    handle = encke.attach(model, optimizer=torch.optim.SGD(model.parameters(), 0.1))
    for _ in range(2):
        model(*inputs).sum().backward()
    report = handle.report()
    assert report.ratio == pytest.approx(report.saved_bytes / report.packed_bytes) and report.ratio > 5
    assert report.peak_bytes > report.saved_bytes
    text = str(report)
    assert "4.conv1" in text and "GroupQuant" in text and "MaxPool2DWithIndices.result1" in text
    report.to_json(tmp_path / "report.json")
    data = json.loads((tmp_path / "report.json").read_text())
    assert data == json.loads(json.dumps(report.to_dict()))
    for key in ("saved_bytes", "packed_bytes", "ratio", "peak_bytes"):
        assert key in data
    assert {"layer", "operation", "slot", "codec", "bound", "saved_bytes", "packed_bytes", "ratio"} <= set(
        data["sites"][0]
    )
    assert sum(row["saved_bytes"] for row in data["sites"]) == data["saved_bytes"]
    with pytest.raises(FileNotFoundError, match="does not exist"):
        report.to_json(tmp_path / "missing" / "report.json")


def test_max_pool_indices_take_a_byte_or_less() -> None:
    model, inputs = resnet()
    handle = encke.attach(model)
    for size in (32, 32, 48):
        model(torch.randn(8, 3, size, size)).sum().backward()
    (row,) = [row for row in handle.report().sites if row.codec == "Window"]
    assert row.saved_bytes == 8 * 8 * 16 * 24 * 24 and row.ratio == 16


def test_state_goes_on_where_it_was() -> None:
    def run(steps: int, state: dict | None) -> tuple[torch.Tensor, dict]:
        torch.manual_seed(3)
        model = net()
        handle = encke.attach(model, Fixed(GroupQuant(bits=2)))
        if state is not None:
            handle.load_state_dict(json.loads(json.dumps(state)))
        for _ in range(steps):
            model.zero_grad()
            x = torch.randn(128, 64, generator=torch.Generator().manual_seed(9))
            model(x).square().mean().backward()
        return model[2].weight.grad.clone(), handle.state_dict()

    whole, _ = run(4, None)
    _, state = run(3, None)
    resumed, _ = run(1, state)
    other, _ = run(1, None)
    assert torch.equal(whole, resumed) and not torch.equal(whole, other)
    handle = encke.attach(net())
    for bad, words in (
        ({}, "lacks"),
        ({**state, "version": 3}, "version 3.*up to 2"),
        ({**state, "version": "1"}, "version 1"),
        ({**state, "policy": {"a": 1}}, "not a state of Comet"),
    ):
        with pytest.raises(ValueError, match=words):
            handle.load_state_dict(bad)


def test_compress_takes_functions_and_leaves_other_threads_alone() -> None:
    w = torch.randn(64, 64, requires_grad=True)
    x = torch.randn(256, 64)
    seen = []

    def other() -> None:
        seen.append(torch._C._autograd._top_saved_tensors_default_hooks(True))

    context = encke.compress(Fixed(ErrorBounded(0)))
    with context as handle:
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        y = torch.tanh(x @ w).square().mean()
        with pytest.raises(RuntimeError, match="entered already"), context:
            pass
    assert seen == [None]
    y.backward()
    expected = torch.autograd.grad(torch.tanh(x @ w).square().mean(), w)[0]
    assert torch.equal(w.grad, expected)
    assert handle.report().packed_bytes > 0


def test_compress_after_an_exception_leaves_nothing() -> None:
    with pytest.raises(KeyError), encke.compress():
        raise KeyError
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None


MEMORY = """
import os, sys, torch
import torch.nn as nn
def resident():
    return int(open('/proc/self/statm').read().split()[1]) * os.sysconf('SC_PAGE_SIZE')
torch.manual_seed(0)
blocks = [m for _ in range(8) for m in (nn.Conv2d(32, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(inplace=True))]
model = nn.Sequential(nn.Conv2d(3, 32, 3, padding=1), *blocks)
if sys.argv[1] == 'packed':
    import encke
    handle = encke.attach(model)
x = torch.randn(16, 3, 64, 64)
for _ in range(3):
    model(x).square().mean().backward()
before = resident()
out = model(x)
held = resident() - before
out.square().mean().backward()
print(held)
"""


@pytest.mark.soak
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads Linux's process memory")
def test_memory_held_after_forward_drops_measured_from_outside() -> None:
    held = {}
    for kind in ("plain", "packed"):
        # A fixed threshold gives every large tensor back to the system when it is freed.
        env = {
            "MALLOC_MMAP_THRESHOLD_": "65536",
            "MALLOC_TRIM_THRESHOLD_": "65536",
            "PATH": "/usr/bin",
            "OMP_NUM_THREADS": "2",
        }
        run = subprocess.run(
            [sys.executable, "-c", MEMORY, kind],
            env=env,
            capture_output=True,
            text=True,
            check=True,
            cwd=Path(__file__).parents[1],
        )
        held[kind] = int(run.stdout)
    assert held["plain"] > 100 << 20
    assert held["packed"] < held["plain"] / 4, held


def test_log_writes_every_layer_at_every_forward_pass(tmp_path: Path) -> None:
    model = small_net()
    optimizer = sgd(model)
    handle = encke.attach(model, Comet(every=3, rounding="nearest"), optimizer)
    path = tmp_path / "log.jsonl"
    handle.log(path)
    train(model, optimizer, 5)
    assert len(path.read_text().splitlines()) == 4
    report = handle.report()
    handle.detach()
    handle.detach()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5]
    assert lines[-1]["ratio"] == pytest.approx(report.ratio)
    assert lines[-1]["sites"] == json.loads(json.dumps(report.to_dict()["sites"]))
    for line in lines:
        assert line["saved_bytes"] / line["packed_bytes"] == pytest.approx(line["ratio"])
        lossy = [row for row in line["sites"] if row["codec"] == "ErrorBounded"]
        assert len(lossy) >= 5 and all(row["bound"] and row["ratio"] > 1 and row["layer"] for row in lossy)
        # One line a step, the bound of that step: relative before the first collection, absolute after.
        for row in lossy:
            assert ("rel" in row["bound"]) == (line["step"] == 1)


def test_log_to_a_stream_is_to_be_read() -> None:
    model = small_net()
    optimizer = sgd(model)
    handle = encke.attach(model, Comet(every=3), optimizer)
    stream = io.StringIO()
    handle.log(stream)
    train(model, optimizer, 2)
    handle.detach()
    lines = stream.getvalue().splitlines()
    assert any(line.startswith("step 1 0 Convolution.input GroupQuant 4 bits ratio ") for line in lines)
    assert [line.split(" ratio ")[0] for line in lines if " all " in line] == ["step 1 all", "step 2 all"]
    assert float(lines[-1].split()[-1]) == pytest.approx(handle.report().ratio, abs=0.01)


def test_log_every_third_pass_and_its_end(tmp_path: Path) -> None:
    model = small_net()
    optimizer = sgd(model)
    handle = encke.attach(model, Comet(), optimizer)
    path = tmp_path / "log.jsonl"
    path.write_text("{}\n")
    handle.log(str(path), every=3)
    train(model, optimizer, 8)
    assert [json.loads(line).get("step") for line in path.read_text().splitlines()] == [None, 3, 6]
    handle.log(None)
    train(model, optimizer, 8)
    handle.detach()
    assert len(path.read_text().splitlines()) == 3


def test_bad_log_targets_are_told(tmp_path: Path) -> None:
    handle = encke.attach(net())
    with pytest.raises(FileNotFoundError, match="folder .*missing does not exist"):
        handle.log(tmp_path / "missing" / "log.jsonl")
    with pytest.raises(TypeError, match="path or an open text stream, got int"):
        handle.log(3)  # type: ignore[arg-type]
    for every in (0, -1, 1.5, True, "2"):
        with pytest.raises(ValueError, match="every must be"):
            handle.log(tmp_path / "log.jsonl", every=every)  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []


def test_the_public_names_are_these() -> None:
    public = {"AdaptivePolicy", "Codec", "Handle", "Packed", "Policy", "Report", "Site", "attach", "codecs"}
    public |= {"Estimate", "compress", "estimate", "policies", "register_reader"}
    assert set(encke.__all__) == public == set(dir(encke)) - {"__version__"}
    assert all(hasattr(encke, name) for name in encke.__all__)
    assert encke.__doc__ is not None and (Path(encke.__file__).parent / "py.typed").exists()


def test_a_handle_prints_model_policy_steps_and_ratio() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3))
    handle = encke.attach(model, "careful")
    assert repr(handle) == "<encke.Handle of Sequential: Comet(sigma=0.05), attached, 0 forward passes>"
    for count in ("1 forward pass", "2 forward passes"):
        model(torch.randn(8, 3, 32, 32)).sum().backward()
        assert f"attached, {count}, last ratio {handle.report().ratio:.1f}>" in repr(handle)
    handle.detach()
    assert " detached, 2 forward passes" in repr(handle)
    del model
    gc.collect()
    assert "of a model that is gone" in repr(handle) and "of compress:" in repr(encke.compress()._handle)


def test_a_handle_detaches_at_the_end_of_a_block() -> None:
    model = net()
    with encke.attach(model) as handle:
        step(model)
        assert handle.attached
    assert not handle.attached and not model._forward_hooks
    with pytest.raises(KeyError), encke.attach(model) as handle:
        raise KeyError
    assert not handle.attached


def test_a_compress_handle_is_attached_until_it_is_detached() -> None:
    x, w = torch.randn(256, 64, requires_grad=True), torch.randn(64, 64, requires_grad=True)
    context = encke.compress(Fixed(GroupQuant(bits=2)))
    with context as handle:
        torch.tanh(x @ w).sum().backward()
    assert handle.attached and handle.report().forwards == 1
    handle.detach()
    with context:
        torch.tanh(x @ w).sum().backward()
    assert not handle.attached and handle.report().forwards == 1


def test_collect_now_makes_the_next_step_a_collection_step() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3))
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    with encke.attach(model, optimizer=optimizer) as handle:
        for number in range(1, 6):
            if number == 4:
                assert handle.collect_now()
            model(torch.randn(8, 3, 32, 32)).square().mean().backward()
            optimizer.step()
        assert {row["step"] for row in handle.history} == {1, 4}
    with encke.attach(model, Fixed(GroupQuant(bits=2))) as handle:
        assert not handle.collect_now() and handle.history == []


class Wrapper:
    """Has the shape of accelerate's `AcceleratedOptimizer`: no hooks of its own, the optimizer inside."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def step(self) -> None:
        self.optimizer.step()


def test_the_optimizer_inside_a_wrapper_is_read() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    handle = encke.attach(model, optimizer=Wrapper(optimizer))  # type: ignore[arg-type]
    for _ in range(2):
        model(torch.randn(128, 64)).sum().backward()
        Wrapper(optimizer).step()
    assert handle.policy.schedule.optimizer is optimizer and handle.policy.schedule.updates == 2  # type: ignore


def test_an_optimizer_of_more_or_less_than_the_model_is_taken() -> None:
    model, other = net(), net()
    for parameters in ([*model.parameters(), *other.parameters()], model[0].parameters()):
        encke.attach(model, optimizer=torch.optim.SGD(parameters, 0.1)).detach()


def test_lazy_layers_and_scripts_say_what_to_do() -> None:
    lazy = nn.Sequential(nn.LazyLinear(8), nn.ReLU())
    with pytest.raises(ValueError, match="layer '0' of this Sequential is lazy.*run one forward pass.*then attach"):
        encke.attach(lazy)
    lazy(torch.randn(4, 64))
    encke.attach(lazy).detach()
    script = torch.jit.script(nn.Linear(8, 8))
    for model, words in ((script, "this RecursiveScriptModule"), (nn.Sequential(nn.Linear(8, 8), script), "layer '1'")):
        with pytest.raises(TypeError, match=f"{words}.*TorchScript.*torch.compile"):
            encke.attach(model)


def test_layers_called_one_by_one_are_added_up() -> None:
    model = net()
    handle = encke.attach(model, Fixed(GroupQuant(bits=2)))
    for _ in range(3):
        y = torch.randn(512, 64)
        for layer in model:
            y = layer(y)
        y.sum().backward()
        assert {row.layer for row in handle.report().sites if row.layer} >= {"1", "2"}
