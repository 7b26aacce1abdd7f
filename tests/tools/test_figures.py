"""Figures without a display."""

from __future__ import annotations

from pathlib import Path

from encke.tools.figures import figure


def test_a_figure_is_written_when_the_block_ends(tmp_path: Path) -> None:
    path = tmp_path / "panels.png"
    with figure(path, 1, 2, (4, 2), dpi=50) as (_, panels):
        assert panels.shape == (1, 2) and not path.exists()
    assert path.read_bytes().startswith(b"\x89PNG")
