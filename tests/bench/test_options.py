"""Options of `encke bench`: amounts of memory, and help that comes from the registries."""

from __future__ import annotations

from dataclasses import fields

import pytest

from encke.bench.methods import METHODS
from encke.bench.models import MODELS
from encke.bench.options import Options, StepOptions, parse_bytes
from encke.tools.errors import UsageError


@pytest.mark.parametrize(
    ("text", "value"), [("16GiB", 16 * 2**30), ("900MiB", 900 * 2**20), ("1.5 GB", 1_500_000_000), ("4096 B", 4096)]
)
def test_amounts_of_memory_are_read(text, value):
    assert parse_bytes(text) == value


@pytest.mark.parametrize("text", ["", "much", "16", "16 gallons", "-1GiB", "0", "GiB", "1e9"])
def test_what_is_no_amount_of_memory_is_named(text):
    with pytest.raises(UsageError, match="--memory"):
        parse_bytes(text)


def test_every_option_is_explained_and_names_come_from_the_registries():
    explained = {field.name: field.metadata["help"] for field in fields(StepOptions)}
    assert all(explained.values())
    assert all(name in explained["methods"] for name in METHODS)
    assert all(name in explained["models"] for name in MODELS)


def test_a_plan_has_a_table_for_each_model_precision_and_batch(tmp_path):
    options = Options(models=("gpt",), methods=("plain", "default"), precision=("fp32", "bf16"), out=tmp_path)
    plan = options.plan(batch=(2, 3))
    tables = plan.tables()
    assert [[task.method for task in tasks] for tasks in tables] == [["plain", "default"]] * 4
    assert [(tasks[0].precision, tasks[0].batch) for tasks in tables] == [
        ("fp32", 2),
        ("fp32", 3),
        ("bf16", 2),
        ("bf16", 3),
    ]
