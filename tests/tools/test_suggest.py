"""Hints at the name that was meant."""

from __future__ import annotations

import pytest

from encke.tools.errors import UsageError
from encke.tools.suggest import pick, suggestion

MODELS = ("resnet18", "resnet50", "wide_resnet50_2", "gpt2")


@pytest.mark.parametrize("asked", ["resnet50", "ResNet-50", "RESNET_50"])
def test_a_name_is_found_whatever_its_case_and_dashes(asked):
    assert pick(asked, MODELS, "--models") == "resnet50"


def test_a_name_that_is_nearly_right_is_corrected():
    with pytest.raises(UsageError, match=r"^--models: there is no 'wideresnet'; did you mean wide_resnet50_2\?$"):
        pick("wideresnet", MODELS, "--models")


def test_a_name_like_no_other_gets_the_whole_list():
    with pytest.raises(UsageError, match="choose from resnet18, resnet50, wide_resnet50_2, gpt2"):
        pick("zzz", MODELS, "--models")


def test_the_last_part_of_a_dotted_name_is_enough():
    assert suggestion("lr", ["epochs", "optimizer.lr", "optimizer.clip"]) == "did you mean optimizer.lr?"
    assert suggestion("optimiser.lr", ["epochs", "optimizer.lr"]) == "did you mean optimizer.lr?"


def test_there_is_no_hint_where_nothing_is_near():
    assert suggestion("zzz", MODELS) == ""
