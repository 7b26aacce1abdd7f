"""Self-consistent attention: backward reads the results that belong to its decoded inputs.

The backward of `scaled_dot_product_attention` recomputes the softmax as exp(score - logsumexp). With decoded queries
and keys but the logsumexp of the exact ones, the error of a score would enter as an exponential: rows of the softmax
would not add up to one. So where query, key or value are lossy, one forward of the same operation recomputes logsumexp
and output from the decoded inputs. Neither of the two is kept.

With dropout the output cannot be recomputed. It is kept, and its error enters linearly; the logsumexp does not depend
on dropout. Operations that are not listed here are exact.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from encke.capture.nodes import operation_name
from encke.capture.saved import Saved
from encke.codecs.base import check_version
from encke.torch_internals import RAW_SAVED, saved_setting

INPUTS = ("query", "key", "value")
CACHE = "encke_attention"
"""Key of a node's metadata: holds the tensors that the node's backward has yet to read."""

FORWARDS = {
    "ScaledDotProductFlashAttention": torch.ops.aten._scaled_dot_product_flash_attention.default,
    "ScaledDotProductFlashAttentionForCpu": torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    "ScaledDotProductEfficientAttention": torch.ops.aten._scaled_dot_product_efficient_attention.default,
    "ScaledDotProductCudnnAttention": torch.ops.aten._scaled_dot_product_cudnn_attention.default,
}
"""Operation of an autograd node -> the operation that computes its output and logsumexp, as its first two results."""
CONSTANTS = {"dropout_p": 0.0, "compute_log_sumexp": True, "return_debug_mask": False}
"""Arguments that are the same for every recomputation."""


@functools.cache
def arguments_of(name: str) -> tuple[Any, tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
    """Return an operation of `FORWARDS` with the names of its arguments: positional ones, others, those a node keeps.

    Args:
        name: The operation of the node.
    """
    arguments = FORWARDS[name]._schema.arguments
    positional = tuple(a.name for a in arguments if not a.kwarg_only)
    named = tuple(a.name for a in arguments if a.kwarg_only)
    kept = tuple(a.name for a in arguments if a.name not in INPUTS and a.name not in CONSTANTS)
    return FORWARDS[name], positional, named, kept


def forward_arguments(name: str, settings: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """Return the arguments of an operation of `FORWARDS` by their names, positional ones and others."""
    known = {**settings, **CONSTANTS}
    _, positional, named, _ = arguments_of(name)
    return [known[argument] for argument in positional], {argument: known[argument] for argument in named}


def logsumexp_of(node: Any) -> str:
    """Return the slot in which a node of attention saves the logsumexp."""
    return "log_sumexp" if hasattr(type(node), f"{RAW_SAVED}log_sumexp") else "logsumexp"


def read(node: Any, saved: Any) -> Tensor | None:
    """Return the tensor that backward reads from one slot of attention; None if it reads the saved tensor itself.

    Args:
        node: The node whose backward is running.
        saved: Object that our hook gave to autograd in the tensor's place.
    """
    metadata = node.metadata
    tensors = metadata.get(CACHE)
    if tensors is None:
        raw = everything_saved(node)
        if not any_lossy(raw) or not any([each is saved for each in raw]):
            return None
        tensors = metadata[CACHE] = compute_again(node, raw)
    t: Tensor | None = tensors.pop(id(saved), None)
    if not tensors:
        del metadata[CACHE]
    return t


def raw_saved(node: Any, slot: str) -> Any:
    """Return the object that our hook gave to autograd for a slot."""
    return getattr(node, RAW_SAVED + slot).data


def everything_saved(node: Any) -> list[Any]:
    """Return the objects that our hook gave to autograd for query, key, value, logsumexp and output."""
    return [getattr(node, RAW_SAVED + slot).data for slot in (*INPUTS, logsumexp_of(node), "output")]


def any_lossy(raw: list[Any]) -> bool:
    """Return whether any of the saved objects is lossy, or is a result that was not kept."""
    for each in raw:
        if isinstance(each, Saved) and (each.lossy or each.dropped):
            return True
    return False


def compute_again(node: Any, raw: list[Any]) -> dict[int, Tensor]:
    """Return the decoded inputs and the results recomputed from them, by id of the saved object.

    Args:
        node: The node.
        raw: Return value of `everything_saved` for the node.
    """
    name = operation_name(node)
    forward, _, _, needed = arguments_of(name)
    inputs = [value_of(each) for each in raw[:3]]
    settings = dict(zip(INPUTS, inputs, strict=True))
    for each in needed:
        settings[each] = saved_setting(node, each)
    arguments, keywords = forward_arguments(name, settings)
    with torch.no_grad() if torch.is_grad_enabled() else nullcontext():
        output, logsumexp = forward(*arguments, **keywords)[:2]
    tensors = {id(each): t for each, t in zip(raw, (*inputs, logsumexp), strict=False)}
    kept, dropout = raw[4], saved_setting(node, "dropout_p")
    if isinstance(kept, Saved) and kept.dropped and dropout:
        kept.facts.distrust()
    tensors[id(kept)] = value_of(kept) if dropout else output
    return tensors


def value_of(raw: Any) -> Tensor:
    """Return the tensor that a saved object stands for."""
    if isinstance(raw, Saved):
        return raw.restore()
    check_version(raw[0], raw[1])
    return raw[0]
