"""Attention that is consistent with itself: backward reads the results that belong to its decoded inputs.

The backward of `scaled_dot_product_attention` computes the softmax again, as exp(score - logsumexp). From decoded
queries and keys with the logsumexp of the exact ones, an error of a score would enter as an exponential: rows of the
softmax would not add up to one. So where query, key or value are lossy, one forward of the same operation gives
logsumexp and output again, from what was decoded. Neither of them is kept.

With dropout the output cannot be computed again. It is kept, and its error enters linearly; the logsumexp does not
depend on dropout. Operations that are not listed here are exact.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from encke.capture.nodes import operation_name
from encke.capture.saved import Saved
from encke.codecs.base import check_version
from encke.torch_internals import RAW_SAVED, saved_setting

INPUTS = ("query", "key", "value")
CACHE = "encke_attention"
"""Key under which the metadata of a node has the tensors that its backward has yet to read."""

FORWARDS = {
    "ScaledDotProductFlashAttention": torch.ops.aten._scaled_dot_product_flash_attention.default,
    "ScaledDotProductFlashAttentionForCpu": torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    "ScaledDotProductEfficientAttention": torch.ops.aten._scaled_dot_product_efficient_attention.default,
    "ScaledDotProductCudnnAttention": torch.ops.aten._scaled_dot_product_cudnn_attention.default,
}
"""Operation of an autograd node -> the operation that computes its output and logsumexp, as its first two results."""
CONSTANTS = {"dropout_p": 0.0, "compute_log_sumexp": True, "return_debug_mask": False}
"""Arguments that are the same whenever results are computed again."""


def forward_arguments(forward: Any, settings: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """Return the arguments of an operation of `FORWARDS` by their names, positional ones and others."""
    known = {**settings, **CONSTANTS}
    positional = [known[a.name] for a in forward._schema.arguments if not a.kwarg_only]
    return positional, {a.name: known[a.name] for a in forward._schema.arguments if a.kwarg_only}


def logsumexp_of(node: Any) -> str:
    """Return the slot in which a node of attention saves the logsumexp."""
    return "log_sumexp" if hasattr(type(node), f"{RAW_SAVED}log_sumexp") else "logsumexp"


def read(node: Any, saved: Any) -> Tensor | None:
    """Return the tensor that backward reads from one slot of attention; None if what was saved is what it reads.

    Args:
        node: The node whose backward is running.
        saved: Object that our hook gave to autograd in the tensor's place.
    """
    tensors = node.metadata.get(CACHE)
    if tensors is None:
        slots = [raw_saved(node, slot) for slot in (*INPUTS, logsumexp_of(node), "output")]
        lossy = any(isinstance(raw, Saved) and (raw.lossy or raw.dropped) for raw in slots)
        if not lossy or not any(raw is saved for raw in slots):
            return None
        tensors = node.metadata[CACHE] = compute_again(node)
    t = tensors.pop(id(saved), None)
    if not tensors:
        del node.metadata[CACHE]
    return t


def raw_saved(node: Any, slot: str) -> Any:
    """Return the object that our hook gave to autograd for a slot."""
    return getattr(node, RAW_SAVED + slot).data


def compute_again(node: Any) -> dict[int, Tensor]:
    """Return what the backward of attention reads, by id of the saved object: inputs decoded, results from them."""
    forward = FORWARDS[operation_name(node)]
    raw = [raw_saved(node, slot) for slot in INPUTS]
    inputs = [value_of(each) for each in raw]
    others = {a.name for a in forward._schema.arguments} - set(INPUTS) - set(CONSTANTS)
    settings = dict(zip(INPUTS, inputs, strict=True)) | {name: saved_setting(node, name) for name in others}
    arguments, keywords = forward_arguments(forward, settings)
    with torch.no_grad():
        output, logsumexp = forward(*arguments, **keywords)[:2]
    tensors = {id(each): t for each, t in zip(raw, inputs, strict=True)}
    tensors[id(raw_saved(node, logsumexp_of(node)))] = logsumexp
    kept = raw_saved(node, "output")
    if isinstance(kept, Saved) and kept.dropped and saved_setting(node, "dropout_p"):
        kept.facts.distrust()
    tensors[id(kept)] = value_of(kept) if saved_setting(node, "dropout_p") else output
    return tensors


def value_of(raw: Any) -> Tensor:
    """Return the tensor that a saved object stands for."""
    if isinstance(raw, Saved):
        return raw.restore()
    check_version(raw[0], raw[1])
    return raw[0]
