"""`encke study gradients`: theory against measurement on small layers, the study's own codecs, and the command."""

from __future__ import annotations

import contextlib
import csv
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import encke
from encke.cli import main
from encke.codecs import ErrorBounded
from encke.policies.comet.theory import error_std, stochastic_power
from encke.study.codecs import HighFrequency, LowFrequency, Midpoint
from encke.study.data import LENGTH, images, text
from encke.study.distributions import distance, ks_normal, kurtosis, triangle, uniform
from encke.study.frozen import Frozen, Layer, rms
from encke.study.predict import close_loop, codec_error, measure, predict
from encke.study.results import confirm, study_layer
from encke.study.zeros import SameCodec, gradients_by_layer, norms_left_alone
from encke.train.models.gpt import Gpt

BOUNDS = (0.05, 0.2, 1.0)


class Small(nn.Module):
    """Two convolutions, ReLU between them, and a linear layer with dropout before it."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 16, 3, padding=1)
        self.second = nn.Conv2d(16, 24, 3, stride=2, padding=1)
        self.drop = nn.Dropout(0.3)
        self.last = nn.Linear(24 * 64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.second(torch.relu(self.first(x)))
        return self.last(self.drop(torch.relu(x).flatten(1)))


@pytest.fixture(scope="module")
def frozen() -> Frozen:
    torch.manual_seed(0)
    return Frozen(Small(), torch.randn(16, 3, 16, 16), torch.randint(10, (16,)), seed=0)


@pytest.fixture(scope="module")
def layers(frozen: Frozen) -> dict[str, Layer]:
    return {layer.name: layer for layer in frozen.layers()}


def photos(path: Path, n: int = 24, side: int = 32) -> Path:
    """Noise as images in a file."""
    generator = np.random.default_rng(0)
    pixels = generator.integers(0, 256, (n, side, side, 3), dtype=np.uint8)
    np.savez(path, images=pixels, labels=generator.integers(0, 10, n))
    return path


def failure(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    with pytest.raises(SystemExit) as end:
        main(["study", "gradients", *args])
    assert end.value.code == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1
    return lines[0]


# -- the frozen step -------------------------------------------------------------------------------------------------


def test_a_frozen_step_repeats_bit_for_bit(frozen):
    assert frozen.repeatable == set(frozen.plain)
    assert all(torch.equal(g, frozen.plain[name]) for name, g in frozen.gradients().items())


def test_the_product_gives_the_plain_gradient(layers):
    assert list(layers) == ["first", "second", "last"]
    for layer in layers.values():
        torch.testing.assert_close(layer.gradient_error(layer.x), layer.gradient)


def test_shared_and_nested_linear_layers_are_found():
    torch.manual_seed(0)
    tokens = torch.randint(20, (2, LENGTH))
    found = Frozen(Gpt(20, layers=1, heads=2, width=32), tokens, tokens, 0)
    layers = {layer.name: layer for layer in found.layers()}
    assert list(layers) == [f"blocks.0.{name}" for name in ("qkv", "merge", "widen", "narrow")] + ["head"]
    assert found.name_of(layers["head"].weight) == "tokens.weight"
    layer = layers["blocks.0.qkv"]
    assert layer.x.shape == (2 * LENGTH, 32)
    torch.testing.assert_close(layer.gradient_error(layer.x), layer.gradient)


# -- predicted against measured --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["first", "second", "last"])
def test_stochastic_rounding_is_predicted_within_ten_percent(layers, name):
    for result in study_layer(layers[name], BOUNDS, seed=0):
        if result.rounding == "stochastic":
            assert result.ratio("exact") == pytest.approx(1, abs=0.1)
            assert result.ratio("certain") == pytest.approx(1, abs=0.1)


def test_the_check_fails_with_a_wrong_norm_or_without_sparsity(layers):
    """With the mean absolute value for the rms, or zeros counted as if they had errors, 10 % would not be met."""
    layer = layers["second"]
    bound = 0.2 * rms(layer.x)
    found = measure(layer, bound, "stochastic", codec_error(layer, bound, "stochastic"), 0).rms
    terms, share = layer.product.terms, layer.share
    right = error_std(stochastic_power(bound, share), rms(layer.g), terms)
    assert found / right == pytest.approx(1, abs=0.1)
    assert 0.3 < share < 0.7
    dense = error_std(stochastic_power(bound, 1.0), rms(layer.g), terms)
    mean_abs = error_std(stochastic_power(bound, share), float(layer.g.abs().mean()), terms)
    assert abs(found / dense - 1) > 0.1
    assert abs(found / mean_abs - 1) > 0.1


def test_what_is_certain_about_a_coarse_step_must_be_counted(layers):
    """Values below half a step all become half a step: of an input below that, nothing is left to chance."""
    layer = layers["first"]
    x = 0.1 + 1e-4 * torch.rand_like(layer.x)  # a block of equal values would be exact
    still = Layer("still", layer.weight, x, layer.g.abs(), layer.gradient, layer.product, layer.weight_gradient)
    wrong = codec_error(still, 1.0, "stochastic")
    torch.testing.assert_close(wrong, 0.5 - x, rtol=1e-3, atol=1e-4)
    found = rms(still.gradient_error(wrong))
    predicted = predict(still, 1.0, "stochastic", wrong)
    assert predicted.certain == pytest.approx(found, rel=1e-3)
    assert predicted.exact == pytest.approx(found, rel=0.1)
    assert predicted.plain < 0.5 * found


def test_the_closed_loop_brings_nearest_levels_to_their_aim(layers):
    for layer in layers.values():
        for multiple in BOUNDS:
            bound = multiple * rms(layer.x)
            wrong = codec_error(layer, bound, "nearest")
            predicted = predict(layer, bound, "nearest", wrong)
            target = 0.5 * predicted.plain
            loop = close_loop(layer, bound, target, rms(layer.gradient_error(wrong)), predicted.exact / bound)
            assert loop.bound < bound and 1 <= loop.rounds <= 4
            assert loop.ratio == pytest.approx(1, abs=0.1)


def test_a_real_run_confirms_the_product_and_leaves_other_gradients_alone(frozen, layers):
    for layer in layers.values():
        (result,) = (r for r in study_layer(layer, [0.2], 0) if r.rounding == "nearest")
        found = confirm(frozen, result)
        assert found.disagreement < 1e-3
        assert found.equal == found.others == 5


def test_a_gradient_that_changes_elsewhere_is_an_error(frozen, layers, monkeypatch):
    monkeypatch.setitem(frozen.plain, "last.bias", frozen.plain["last.bias"] + 1)
    (result,) = (r for r in study_layer(layers["first"], [0.2], 0) if r.rounding == "nearest")
    with pytest.raises(RuntimeError, match=r"only the input of first was lossy.*last\.bias"):
        confirm(frozen, result)


def test_small_inputs_are_reported_as_kept():
    torch.manual_seed(0)
    found = Frozen(Small(), torch.randn(2, 3, 16, 16), torch.randint(10, (2,)), seed=0)
    layer = found.layers()[0]
    assert layer.small
    rows = [result.row() for result in study_layer(layer, [0.2], 0)]
    assert [row["status"] for row in rows] == ["kept (small)"] * 2
    assert all(row["measured_rms"] is None and row["predicted_exact"] is None for row in rows)


# -- distributions ---------------------------------------------------------------------------------------------------


def test_distances_know_their_distributions():
    generator = torch.Generator().manual_seed(0)
    normal = torch.randn(50_000, generator=generator)
    flat = (2 * torch.rand(50_000, generator=generator) - 1).double().sort().values
    hat = (torch.rand(50_000, generator=generator) - torch.rand(50_000, generator=generator)).double().sort().values
    assert ks_normal(normal) < 0.01 < ks_normal(flat)
    assert distance(flat, uniform(flat)) < 0.01 < distance(flat, triangle(flat))
    assert distance(hat, triangle(hat)) < 0.01 < distance(hat, uniform(hat))
    assert abs(kurtosis(normal)) < 0.1 and kurtosis(flat) == pytest.approx(-1.2, abs=0.05)


# -- exact zeros -----------------------------------------------------------------------------------------------------


def test_the_middle_of_a_cell_differs_from_our_levels_at_zeros_alone():
    torch.manual_seed(0)
    x = torch.randn(4, 8, 30, 30).relu()
    ours, theirs = (codec.encode(x).decode() for codec in (ErrorBounded(0.05, "rel"), Midpoint(0.05)))
    bound = 0.05 * float(x.max())
    edges = (x / (2 * bound)).frac()
    inside = (x != 0) & (edges > 1e-3) & (edges < 0.999)
    torch.testing.assert_close(ours[inside], theirs[inside], rtol=1e-3, atol=1e-5)
    assert not ours[x == 0].any()
    torch.testing.assert_close(theirs[x == 0], torch.full_like(theirs[x == 0], bound))
    assert float((theirs - x).abs().max()) <= bound * 1.0001


def test_without_exact_zeros_the_mask_is_read_from_what_was_decoded():
    """Every zero comes back positive, so ReLU lets every gradient pass."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1))
    x = torch.randn(8, 3, 32, 32)

    def gradient(codec: encke.codecs.Codec) -> torch.Tensor:
        handle = encke.attach(model, SameCodec(codec), overrides=norms_left_alone(model))
        for _ in range(2):
            model.zero_grad()
            model(x).square().sum().backward()
        handle.detach()
        return model[0].bias.grad.clone()

    hidden = model[0](x).relu().detach().requires_grad_()
    model[2](hidden).square().sum().backward()
    masked, unmasked = (g.sum((0, 2, 3)) for g in (hidden.grad * (hidden > 0), hidden.grad))
    torch.testing.assert_close(gradient(ErrorBounded(0.05, "rel")), masked, rtol=1e-4, atol=1e-2)
    torch.testing.assert_close(gradient(Midpoint(0.05)), unmasked, rtol=1e-4, atol=1e-2)
    assert not torch.allclose(masked, unmasked, rtol=0.1)


def test_zeros_are_compared_layer_by_layer(frozen, layers):
    rows = gradients_by_layer(frozen, layers.values())
    first, second, last = rows
    assert [row["layer"] for row in rows] == ["first", "second", "last"]
    assert first["alone_zeros"] == pytest.approx(first["alone_no_zeros"], rel=0.02)
    assert second["alone_zeros"] < second["alone_no_zeros"]
    assert first["together_zeros"] < first["together_no_zeros"]


# -- low and high frequency ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("side", [32, 20, 8, 4, 1])
def test_low_and_high_frequency_add_up(side):
    torch.manual_seed(0)
    x = torch.randn(3, 5, side, side) + 4
    low, high = LowFrequency(8).encode(x), HighFrequency(8, 2).encode(x)
    tiles = math.ceil(side / 8) ** 2
    assert low.nbytes == 3 * 5 * tiles * 2
    assert high.nbytes == math.ceil(x.numel() * 2 / 8) + 3 * 5 * 8
    corner = x[0, 0, : min(8, side), : min(8, side)].mean()
    torch.testing.assert_close(low.decode()[0, 0, 0, 0], corner, rtol=0.01, atol=0.01)
    edge = x[0, 0, (side - 1) // 8 * 8 :, (side - 1) // 8 * 8 :].mean()
    torch.testing.assert_close(low.decode()[0, 0, -1, -1], edge, rtol=0.01, atol=0.01)
    rest = x - low.decode()
    span = (rest.amax((2, 3)) - rest.amin((2, 3))) / 3
    assert bool(((low.decode() + high.decode() - x).abs().amax((2, 3)) <= span + 1e-5).all())


def test_high_frequency_is_right_on_average():
    x = torch.linspace(0, 1, 64).view(1, 1, 8, 8)
    mean = sum(HighFrequency(8, 2, seed).encode(x).decode() for seed in range(500)) / 500
    low = LowFrequency(8).encode(x).decode()
    assert float((mean + low - x).abs().max()) < 0.05


# -- the command -----------------------------------------------------------------------------------------------------


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open() as file:
        return list(csv.DictReader(file))


@pytest.mark.slow
def test_the_study_of_a_small_cnn_end_to_end(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("encke.study.zeros.STEPS", 3)
    data, out = photos(tmp_path / "photos.npz"), tmp_path / "out"
    options = ["--model", "cnn", "--batch", "16", "--steps", "2", "--bounds", "0.05", "0.2"]
    main(["study", "gradients", *options, "--data", str(data), "--out", str(out)])
    rows = rows_of(out / "gradients.csv")
    names = list(dict.fromkeys(row["layer"] for row in rows))
    assert len(names) == 5 and len(rows) == 5 * 2 * 2
    for row in rows:
        assert row["model"] == "cnn" and row["data"] == "photos.npz" and row["status"] == "lossy"
        assert row["date"] and row["command"] and row["cpu"] and row["torch"]
        ratio = float(row["measured_rms"]) / float(row["predicted_exact"])
        assert float(row["measured_over_exact"]) == pytest.approx(ratio, rel=1e-4)
        assert (row["loop_bound"] == "") == (row["rounding"] == "stochastic")
        if row["rounding"] == "stochastic":
            assert float(row["measured_over_certain"]) == pytest.approx(1, abs=0.1)
    assert [row["layer"] for row in rows_of(out / "zeros.csv")] == names
    assert len(rows_of(out / "frequency.csv")) == 4
    assert len(rows_of(out / "training.csv")) == 3
    for name in ("predicted", "distributions", "zeros", "frequency"):
        assert (out / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    shown = capsys.readouterr().out
    assert "bit-equal" in shown and "after the closed loop" in shown.splitlines()[-1]


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["study", "--help"], ["gradients"]),
        (["study", "gradients", "--help"], ["--model", "--data", "--bounds", "--rate", "--out"]),
    ],
)
def test_help_names_what_there_is(args, words, capsys):
    with contextlib.suppress(SystemExit):
        main(args)
    shown = capsys.readouterr().out
    assert all(word in shown for word in words)


@pytest.mark.slow
def test_small_inputs_are_named_in_the_table_and_in_words(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("encke.study.zeros.STEPS", 1)
    data = photos(tmp_path / "photos.npz")
    options = ["--model", "cnn", "--batch", "4", "--steps", "0", "--bounds", "0.2"]
    main(["study", "gradients", *options, "--data", str(data), "--out", str(tmp_path / "out")])
    shown = capsys.readouterr().out
    assert "kept (small), so not studied: 14" in shown
    assert [row["status"] for row in rows_of(tmp_path / "out" / "gradients.csv")][-1] == "kept (small)"


def test_built_in_data_have_the_promised_form(tmp_path):
    digits = images(None)
    assert digits.inputs.shape == (5000, 3, 32, 32) and digits.classes == 10
    source = text(None)
    assert source.inputs.shape[1] == LENGTH
    assert torch.equal(source.inputs[0, 1:], source.targets[0, :-1])
    small = images(photos(tmp_path / "small.npz", side=20))
    assert small.inputs.shape == (24, 3, 32, 32)


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        ({"images": np.zeros((4, 8, 8, 3), np.uint8)}, "labels"),
        ({"images": np.zeros((4, 8, 8, 3), np.float32), "labels": np.zeros(4, int)}, "uint8"),
        ({"images": np.zeros((4, 3, 8, 8), np.uint8), "labels": np.zeros(4, int)}, "uint8"),
        ({"images": np.zeros((4, 8, 8, 3), np.uint8), "labels": np.zeros(3, int)}, "labels"),
        ({"images": np.zeros((4, 8, 8, 3), np.uint8), "labels": np.zeros(4)}, "labels"),
        ({"images": np.zeros((4, 8, 8, 3), np.uint8), "labels": np.zeros(4, int)}, "--batch"),
    ],
)
def test_wrong_arrays_are_named(arrays, words, tmp_path, capsys):
    np.savez(tmp_path / "x.npz", **arrays)
    assert words in failure(capsys, "--model", "cnn", "--data", str(tmp_path / "x.npz"), "--out", str(tmp_path))


def test_missing_and_broken_files_are_named(tmp_path, capsys):
    missing, broken = tmp_path / "none", tmp_path / "broken.npz"
    broken.write_bytes(b"PK\x03\x04 no archive")
    for model in ("cnn", "gpt"):
        assert str(missing) in failure(capsys, "--model", model, "--data", str(missing))
    assert str(broken) in failure(capsys, "--model", "cnn", "--data", str(broken))
    broken.write_bytes(b"\xff\xfe\xff")
    assert "UTF-8" in failure(capsys, "--model", "gpt", "--data", str(broken))
    broken.write_text("short")
    assert "characters" in failure(capsys, "--model", "gpt", "--data", str(broken))


@pytest.mark.parametrize(
    ("option", "value"), [("--bounds", "0"), ("--bounds", "nan"), ("--batch", "1"), ("--steps", "-1"), ("--rate", "0")]
)
def test_a_senseless_number_is_named(option, value, capsys):
    line = failure(capsys, f"{option}={value}" if option != "--bounds" else option, *([value] * (option == "--bounds")))
    assert option in line and value in line
