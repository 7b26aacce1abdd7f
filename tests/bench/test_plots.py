"""Plots of `encke bench`."""

from __future__ import annotations

from encke.bench.plots import spread


def test_names_beside_a_plot_keep_their_order_and_a_gap():
    found = spread([0.5, 0.5, 0.99, 0.98, 0.0], 0.1)
    ordered = sorted(found)
    assert all(b - a >= 0.1 - 1e-9 for a, b in zip(ordered, ordered[1:], strict=False))
    assert found[4] == 0 and found[2] > found[3] and max(found) <= 1
