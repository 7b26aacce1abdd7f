"""Triton 3.6's interpreter without work whose result nobody reads: kernels run in a fifth of the time."""

from __future__ import annotations

import functools
from dataclasses import replace
from types import FunctionType
from typing import Any

from triton.language import core
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

BARE = frozenset({core.tensor, core.dtype, core.block_type, core.pointer_type, int, float, bool, str, type(None)})
"""Types of values that neither are nor hold constants in Triton's wrapping."""
patches: dict[tuple[Any, ...], list[tuple[Any, str, Any]]] = {}
"""Attributes that a launch changes, by the modules that its kernel sees."""
original = {
    "unwrap": core._unwrap_if_constexpr,
    "equal": core.tuple.__eq__,
    "equal_types": core.block_type.__eq__,
    "dtype": interpreter._get_np_dtype,
    "patch": interpreter._patch_lang,
    "to_tensor": TritonSemantic.to_tensor,
    "operands": TritonSemantic.binary_op_type_checking_impl,
    "broadcast": TritonSemantic.broadcast_impl_value,
}


def quicken() -> None:
    """Change the interpreter of this process. Values stay as they are."""
    builder = interpreter.interpreter_builder
    if not builder.options.debug:  # else overflows are reported; they are computed at every integer operation
        builder.options = replace(builder.options, sanitize_overflow=False)
    interpreter._patch_lang = patch_once
    interpreter._patch_attr = patch_attribute
    interpreter._get_np_dtype = dtype_of_numpy
    core._unwrap_if_constexpr = unwrap
    core.tuple.__eq__ = equal_tuples
    core.block_type.__init__ = make_block_type
    core.block_type.to_ir = block_type_in_ir
    core.block_type.with_element_ty = block_type_for_elements
    core.block_type.__eq__ = equal_block_types
    core.tensor.__init__ = make_tensor
    TritonSemantic.to_tensor = to_tensor
    TritonSemantic.binary_op_type_checking_impl = operands
    TritonSemantic.broadcast_impl_value = broadcast


def patch_once(kernel: FunctionType) -> interpreter._LangPatchScope:
    """Patch the language for a launch, and not again for each function that the kernel calls."""
    used = languages(kernel)
    scope = interpreter._LangPatchScope()
    if used and not any(core.is_builtin(function) for function in (core.tensor.__add__, *(each.load for each in used))):
        return scope
    if used not in patches:
        scope = original["patch"](kernel)
        patches[used] = [(owner, name, getattr(owner, name)) for owner, name, _ in scope._changes]
        return scope
    for patch in patches[used]:
        scope.set_attr(*patch)
    return scope


@functools.cache
def languages(kernel: FunctionType) -> tuple[Any, ...]:
    """Return the modules of the language that a kernel sees."""
    return tuple(each for each in (interpreter.tl, core) if any(value is each for value in kernel.__globals__.values()))


def patch_attribute(owner: Any, name: str, member: Any, builder: Any, scope: interpreter._LangPatchScope) -> None:
    """Let a function of the language compute at once, without the check that wraps it."""
    semantic, function = TritonSemantic(builder), getattr(member, "__wrapped__", member)

    def call(*args: Any, **settings: Any) -> Any:
        settings["_semantic"] = semantic
        return function(*args, **settings)

    scope.set_attr(owner, name, call)


def dtype_of_numpy(kind: core.dtype) -> Any:
    """Look a dtype up in one table, not in a new one each time."""
    kind = kind.element_ty if type(kind) is core.block_type else kind
    return original["dtype"](kind) if isinstance(kind, core.pointer_type) else once(original["dtype"], kind)


@functools.cache
def once(function: Any, argument: Any) -> Any:
    return function(argument)


def unwrap(value: Any) -> Any:
    """Return the value of a constant, and anything else as it is."""
    kind = type(value)
    if kind is core.constexpr:
        return value.value
    return value if kind in BARE else original["unwrap"](value)


def equal_tuples(self: core.tuple, other: Any) -> core.constexpr:
    """Compare with a list of numbers without making a tuple of it."""
    if type(other) is list and all(type(each) is int for each in other):
        return core.constexpr(self.values == other)
    return original["equal"](self, other)


class Shape(core.tuple):
    """Shape of block types, made once for each, with the shape that tensors have and the number of values."""

    def __init__(self, lengths: tuple[int, ...]) -> None:
        super().__init__(lengths)
        self.numel = core.validate_block_shape(self)
        self.of_tensors = core.tuple([core.constexpr(length) for length in lengths]), core.constexpr(self.numel)
        self.name = core.tuple.__str__(self)

    def __str__(self) -> str:
        return self.name


shape_of = functools.cache(Shape)
OF_SCALARS = core.tuple([]), core.constexpr(1)


def make_block_type(self: core.block_type, element_ty: core.dtype, shape: Any) -> None:
    if type(shape) is not Shape:
        if not len(shape):
            raise TypeError("0d block_type is forbidden")
        shape = shape_of(tuple(unwrap(length) for length in shape))
    self.element_ty, self.shape, self.numel = element_ty, shape, shape.numel
    self.name = f"<{shape}, {element_ty}>"


def block_type_for_elements(self: core.block_type, scalar_ty: core.dtype) -> core.block_type:
    return self if scalar_ty is self.element_ty else core.block_type(scalar_ty, self.shape)


def block_type_in_ir(self: core.block_type, builder: Any) -> core.block_type:
    return block_type_for_elements(self, self.element_ty.to_ir(builder))


def equal_block_types(self: core.block_type, other: Any) -> bool:
    if type(other) is core.block_type and self.shape is other.shape:
        return self.element_ty == other.element_ty
    return original["equal_types"](self, other)


def make_tensor(self: core.tensor, handle: Any, type: core.dtype) -> None:
    """Give a tensor the shape that its type has already."""
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.shape, self.numel = type.shape.of_tensors if type.is_block() else OF_SCALARS


def to_tensor(self: TritonSemantic, value: Any, check_type: bool = True) -> Any:
    return value if type(value) is core.tensor else original["to_tensor"](self, value, check_type)


def operands(self: TritonSemantic, left: Any, right: Any, *settings: bool, **more: bool) -> tuple[Any, Any]:
    """Make two operands alike. Tensors of one dtype are, but for their shapes; a small number becomes one of these."""
    if len(settings) <= 2 and not more:  # whether pointers are allowed; not a division, whose operands are cast
        if takes(left, right):
            right = self.scalar_constant(right, left.dtype)
        elif takes(right, left):
            left = self.scalar_constant(left, right.dtype)
        if type(left) is type(right) is core.tensor and left.dtype is right.dtype and not left.dtype.is_ptr():
            return self.broadcast_impl_value(left, right)
    return original["operands"](self, left, right, *settings, **more)


def takes(tensor: Any, number: Any) -> bool:
    """Return whether a number becomes one of the tensor's dtype, whatever this is."""
    if type(tensor) is not core.tensor:
        return False
    if type(number) is int and 0 <= number < 128:
        return tensor.dtype.is_floating() or (tensor.dtype.is_int() and not tensor.dtype.is_bool())
    return type(number) is float and tensor.dtype.is_floating()


def broadcast(self: TritonSemantic, left: core.tensor, right: core.tensor) -> tuple[core.tensor, core.tensor]:
    if left.shape is right.shape:
        return left, right
    return original["broadcast"](self, left, right)
