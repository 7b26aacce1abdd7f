"""DIVISION's evidence: how much low and high frequencies of a convolution's input contribute to its gradient."""

from __future__ import annotations

from encke.study.codecs import HighFrequency, LowFrequency
from encke.study.frozen import Layer, rms

BLOCK, BITS = 8, 2


def frequencies(layer: Layer, seed: int) -> dict[str, object]:
    """Return error over gradient and bytes, with each of the two alone and with both."""
    low = LowFrequency(BLOCK).encode(layer.x)
    high = HighFrequency(BLOCK, BITS, seed).encode(layer.x)
    parts = {"low": low.decode(), "high": high.decode()}
    restored = {**parts, "both": parts["low"] + parts["high"]}
    sizes = {"low": low.nbytes, "high": high.nbytes, "both": low.nbytes + high.nbytes}
    row: dict[str, object] = {
        "layer": layer.name,
        "input": "x".join(map(str, layer.x.shape)),
        "block": BLOCK,
        "bits": BITS,
        "input_bytes": layer.x.nbytes,
    }
    for name, x in restored.items():
        row[f"{name}_bytes"] = sizes[name]
        row[f"{name}_input_error"] = rms(x - layer.x) / (rms(layer.x) or 1)
        row[f"{name}_gradient_error"] = rms(layer.gradient_error(x - layer.x)) / (rms(layer.gradient) or 1)
    return row
