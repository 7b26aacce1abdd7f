"""`encke demo` in small: both acts run, and the figures say what happened. With its own model in `make soak`."""

from __future__ import annotations

import json
import sys

import pytest

from encke import demo as demo_module
from encke.cli import main
from encke.demo import outcome

pytestmark = pytest.mark.soak


# Most of the peak has to be saved tensors: many layers with few weights.
SIZES = {"densenet121": ("64", "12"), "resnet50": ("96", "16")}
STEPS = 16


@pytest.fixture(scope="module", params=SIZES)
def demo(request, tmp_path_factory):
    out = tmp_path_factory.mktemp("demo")
    image, batch = SIZES[request.param]
    training = demo_module.training
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(demo_module, "MODEL", request.param)
        patch.setattr(demo_module, "training", lambda options: training([*options, "--steps", str(STEPS)]))
        main(["demo", "--epochs", "1", "--image", image, "--batch", batch, "--out", str(out)])
    return out


@pytest.fixture(scope="module")
def results(demo):
    return json.loads((demo / "results.json").read_text())


def test_the_first_act_measures_memory_and_time_of_both(results):
    plain, ours = results["photos"]["plain"], results["photos"]["default"]
    assert plain["step_ms"] > 0 and ours["step_ms"] > 0
    assert ours["packed_bytes"] < ours["saved_bytes"] / 6
    # Weights and what belongs to them are in both peaks; what is saved no longer goes away from one of them.
    spared = ours["saved_bytes"] - ours["packed_bytes"]
    assert ours["peak_above_bytes"] < plain["peak_above_bytes"] - 0.6 * spared
    assert plain["held_bytes"] == pytest.approx(ours["saved_bytes"], rel=0.15)
    assert ours["held_bytes"] < plain["held_bytes"] / 5
    assert results["torch"] and results["cpu"] and results["command"]


@pytest.mark.skipif(sys.platform != "linux", reason="a cap on memory needs Linux")
def test_under_a_cap_between_the_peaks_only_the_compressed_training_goes_on(results):
    photos = results["photos"]
    assert photos["default"]["peak_added_bytes"] < photos["cap_bytes"] < photos["plain"]["peak_added_bytes"]
    assert photos["default"]["capped"] == "trains"
    # In brackets: torch's words, oneDNN's, or how the process died.
    assert photos["plain"]["capped"].startswith("out of memory (")


def test_what_a_trial_under_a_cap_tells():
    assert outcome({"fits": True, "step_ms": 1.0}) == "trains"
    exhausted = {"out_of_memory": True, "failed": "out of memory", "error": "RuntimeError: no"}
    assert outcome(exhausted) == "out of memory (RuntimeError: no)"
    assert outcome({"failed": "killed by SIGSEGV", "died": True}) == "out of memory (killed by SIGSEGV)"
    assert outcome({"failed": "ValueError: other"}) == "ValueError: other"


def test_the_second_act_trains_both_on_the_same_digits(results):
    plain, ours = results["digits"]["plain"], results["digits"]["default"]
    assert plain["steps"] == ours["steps"] == STEPS and plain["samples"] == 1000
    assert plain["validation_accuracy"] > 0.8 and ours["validation_accuracy"] > 0.8
    assert plain["ratio"] is None and ours["ratio"] > 6
    assert ours["step_peak_bytes"] < plain["step_peak_bytes"] / 1.5


def test_the_page_shows_both_acts_and_both_runs(demo):
    page = (demo / "report.html").read_text()
    shown = ("Act 1, memory", "Before training, model and libraries take", "Act 2, accuracy", "out of memory", "trains")
    assert all(words in page for words in shown)
    assert (demo / "plain" / "metrics.jsonl").exists() and (demo / "default" / "sites.jsonl").exists()
