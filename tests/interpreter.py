"""Triton's interpreter without work whose result nobody reads: kernels run in less than half the time."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from types import FunctionType

import triton
from triton.language import core, tensor
from triton.runtime import interpreter


def quicken() -> None:
    """Change the interpreter of this process, if it is the one that this was written for. Values stay as they are."""
    if not triton.__version__.startswith("3.6."):
        return
    builder = interpreter.interpreter_builder
    if not builder.options.debug:  # else overflows are reported; they are computed at every integer operation
        builder.options = replace(builder.options, sanitize_overflow=False)
    interpreter._patch_lang = functools.partial(patch_once, interpreter._patch_lang)
    interpreter._get_np_dtype = functools.partial(dtype_of_numpy, interpreter._get_np_dtype)
    core._type_for_tuple_values = functools.partial(type_of_tuple, core._type_for_tuple_values)


def patch_once(patch, kernel: FunctionType):
    """Patch the language for a launch, and not again for each function that the kernel calls."""
    used = [each for each in (interpreter.tl, core) if any(value is each for value in kernel.__globals__.values())]
    patched = not any(core.is_builtin(function) for function in (tensor.__add__, *(each.load for each in used)))
    return interpreter._LangPatchScope() if used and patched else patch(kernel)


def dtype_of_numpy(find, kind: core.dtype):
    """Look a dtype up in one table, not in a new one each time."""
    kind = kind.element_ty if isinstance(kind, core.block_type) else kind
    return find(kind) if isinstance(kind, core.pointer_type) else once(find, kind)


def type_of_tuple(make, values: Sequence, fields=None):
    """Make the type of a shape once: every tensor has one."""
    lengths = tuple(getattr(value, "value", value) for value in values)
    whole = fields is None and all(type(length) is int for length in lengths)
    return once(make, lengths) if whole else make(values, fields)


@functools.cache
def once(function, argument):
    return function(argument)
