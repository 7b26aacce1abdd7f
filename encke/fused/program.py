"""Programs: the layers that a container's forward calls, if its code does nothing else.

The forward runs once with stand-ins for the module and its input, which record the calls of layers, sums and products.
The record is valid for later calls only if nothing else affects them. Therefore the code may name no global. Of the
module, it may name only children, attributes that are None (`downsample`), and methods that obey the same rules. A test
on `training` or a random number rules the container out.
"""

from __future__ import annotations

import dis
import functools
import inspect
import operator
import weakref
from collections import Counter
from types import FunctionType
from typing import Any, NamedTuple

from torch import nn

from encke.fused.smooth import SMOOTH

CONVOLUTIONS: tuple[type[nn.Module], ...] = (nn.Conv2d, nn.Conv3d)
INSTANCE_NORMS: tuple[type[nn.Module], ...] = (nn.InstanceNorm2d, nn.InstanceNorm3d)
NORMS: tuple[type[nn.Module], ...] = (nn.BatchNorm2d, nn.BatchNorm3d, *INSTANCE_NORMS)
RECTIFIERS: tuple[type[nn.Module], ...] = (nn.ReLU, nn.LeakyReLU)
"""Activations whose result is packed. Backward reads which values are zero, or their signs."""
POOL, SUM, PRODUCT = nn.AdaptiveAvgPool2d, operator.add, operator.mul
ACTIVATIONS: tuple[type[nn.Module], ...] = (nn.ReLU, *SMOOTH, nn.Sigmoid, nn.Hardsigmoid)
"""Activations of small values, which are computed from a pool's result."""
LEAVES = (*CONVOLUTIONS, *NORMS, POOL, *ACTIVATIONS, *RECTIFIERS)
FORBIDDEN = {
    "LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF", "STORE_GLOBAL", "STORE_ATTR", "DELETE_ATTR", "IMPORT_NAME",
    "MAKE_FUNCTION",
}  # fmt: skip
"""Bytecode instructions that read or change anything but the arguments and the module's children."""
MOST_CALLS = 14
"""Largest number of calls in a program. A longer one would hold its packed tensors for too long. A bottleneck has up to
12 calls, an `MBConv` 14."""

Children = tuple[int, list[int], tuple[str, ...], dict[str, Any]]
"""Number of a container, ids of its children, attributes that are None, and methods that are called."""


class UnknownError(Exception):
    """Raised if a forward does something that a program cannot represent."""


class Call(NamedTuple):
    """Call of a layer, a sum or a product. Its result is the value with the next number; the input is value 0."""

    kind: Any
    """Class of the layer, SUM or PRODUCT."""
    layer: int
    """Number of the layer among the program's modules. For a sum or a product, the number of the container."""
    number: int
    """Number of this call among the layer's calls in the program."""
    inputs: tuple[int, ...]
    """Numbers of the input values."""
    in_place: bool
    """Whether the result may overwrite the first input, because nobody else reads that."""


class Program(NamedTuple):
    """Calls of a container, and everything that they depend on. References to modules are weak."""

    calls: tuple[Call, ...]
    modules: tuple[weakref.ref[nn.Module], ...]
    """The container itself and every module that is called."""
    kinds: list[type[nn.Module]]
    """Classes of these modules."""
    children: tuple[Children, ...]
    """Containers, with everything that their forwards name."""
    last: int
    """Number of the rectifier that is called with the block's result; -1 if there is none."""

    def current(self) -> list[Any] | None:
        """Return the modules; None if one of them, or anything that a container's forward names, has changed."""
        modules: list[Any] = [module() for module in self.modules]
        # A parametrization changes the class of its module.
        if [*map(type, modules)] != self.kinds:
            return None
        for number, children, missing, methods in self.children:
            module, kind = modules[number], self.kinds[number]
            if [*map(id, module._modules.values())] != children:
                return None
            for name in missing:
                if module.__dict__.get(name, self) is not None:
                    return None
            for name, method in methods.items():
                if getattr(kind, name) is not method or (name in module.__dict__ and name != "forward"):
                    return None
        return modules


class Value:
    """Stand-in for a tensor. Any other use of it is a TypeError or an AttributeError."""

    __slots__ = ("number", "trace")
    __bool__ = __eq__ = __hash__ = __imul__ = None  # type: ignore[assignment]

    def __init__(self, number: int, trace: Trace) -> None:
        self.number = number
        self.trace = trace

    def __add__(self, other: Any) -> Value:
        return self.trace.add(SUM, None, False, self, other)

    def __iadd__(self, other: Any) -> Value:  # noqa: PYI034
        return self.trace.add(SUM, None, True, self, other)

    def __mul__(self, other: Any) -> Value:
        return self.trace.add(PRODUCT, None, False, self, other)


class Child:
    """Stand-in for a child of the module that is traced."""

    __slots__ = ("module", "trace")
    __bool__ = __eq__ = __hash__ = None  # type: ignore[assignment]

    def __init__(self, module: nn.Module, trace: Trace) -> None:
        self.module = module
        self.trace = trace

    def __call__(self, value: Value) -> Value:
        return self.trace.follow(self.module, value)


class StandIn:
    """Stand-in for the module that is traced, with its children, its methods, and its attributes that are None."""

    def __init__(self, module: nn.Module, methods: dict[str, Any], trace: Trace) -> None:
        for name, child in module._modules.items():
            self.__dict__[name] = None if child is None else Child(child, trace)
        self._methods = methods

    def __getattr__(self, name: str) -> Any:
        """Return a method, else None. `names_nothing_else` has checked that there are no other names."""
        method = self._methods.get(name)
        return None if method is None else functools.partial(method, self)


class Trace:
    """Record of the calls in a forward."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, int, bool, tuple[int, ...]]] = []
        """Kind, number of the module, whether in-place, and numbers of the input values, for each call."""
        self.modules: dict[nn.Module, int] = {}
        """Modules that are called, with their numbers."""
        self.children: list[Children] = []
        self.inside: list[int] = []
        """Numbers of the containers that are being traced, the innermost one last."""

    def add(self, kind: Any, layer: int | None, in_place: bool, *values: Any) -> Value:
        """Record a call and return its result. Without a layer, the call belongs to the innermost container."""
        if not all(type(value) is Value for value in values):
            raise UnknownError
        layer = self.inside[-1] if layer is None else layer
        self.calls.append((kind, layer, in_place, tuple(value.number for value in values)))
        return Value(len(self.calls), self)

    def follow(self, module: nn.Module, value: Value) -> Value:
        """Record all calls within a call of a module, and return its result."""
        number, kind = self.modules.setdefault(module, len(self.modules)), type(module)
        if kind in LEAVES:
            return self.add(kind, number, bool(getattr(module, "inplace", False)), value)
        if kind is nn.Identity:
            return value
        if (kind.__call__, kind.__getattr__) != (nn.Module.__call__, nn.Module.__getattr__):
            raise UnknownError
        children = [*map(id, module._modules.values())]
        if kind.forward is nn.Sequential.forward:
            self.children.append((number, children, (), {"forward": kind.forward}))
            for child in module._modules.values():
                assert child is not None
                value = self.follow(child, value)
            return value
        missing, methods = names_nothing_else(module)
        self.children.append((number, children, missing, methods))
        self.inside.append(number)
        result: Value = methods["forward"](StandIn(module, methods, self), value)
        self.inside.pop()
        return result


def names_nothing_else(module: nn.Module) -> tuple[tuple[str, ...], dict[str, Any]]:
    """Return the attributes named by a forward's code that are None, and its methods by name.

    Children may be named as well. Methods obey the same rules as the forward. Any other name is an error.
    """
    kind, missing, methods, names = type(module), set(), {}, ["forward"]
    while names:
        name = names.pop()
        if module._modules.get(name) is not None:
            if hasattr(kind, name):
                raise UnknownError  # the class's attribute hides the child
        elif name in module.__dict__ and name != "forward":
            missing.add(name)
        elif name not in methods:
            methods[name] = method = inspect.getattr_static(kind, name)
            if not isinstance(method, FunctionType):
                raise UnknownError
            if FORBIDDEN & {instruction.opname for instruction in dis.get_instructions(method)}:
                raise UnknownError
            names += method.__code__.co_names
    if any(module.__dict__[name] is not None for name in missing):
        raise UnknownError
    return tuple(missing), methods


def program_of(module: nn.Module) -> Program | None:
    """Return the program of a container's forward; None if it may do anything but call supported layers."""
    trace = Trace()
    try:
        result: Any = trace.follow(module, Value(0, trace))
    except (AttributeError, TypeError, UnknownError):
        return None
    calls, last = trace.calls, -1
    if type(result) is not Value or result.number != len(calls) or len(calls) > MOST_CALLS:
        return None
    follows = bool(calls) and calls[-1][3] == (len(calls) - 1,)  # not an earlier value
    if follows and calls[-1][0] in RECTIFIERS and (calls[-1][0] is nn.ReLU or calls[-1][2]):
        # As a separate layer it releases the gradient of its result early; a block's function would hold it to its end.
        last = calls.pop()[1]
    if not fits(calls) or (last < 0 and calls[-1][0] in INSTANCE_NORMS):
        return None  # later layers must not recompute from an instance norm's result, which has another size
    uses = Counter(value for *_, inputs in calls for value in inputs)
    found: list[Call] = []
    numbers: Counter[int] = Counter()
    for kind, layer, in_place, inputs in calls:
        alone = inputs[0] > 0 and uses[inputs[0]] == 1
        if in_place and not alone:
            return None  # another call reads the value that would be overwritten
        if kind is PRODUCT and numbers[layer]:
            return None  # it does not save at the sites of the first product
        found.append(Call(kind, layer, numbers[layer], inputs, alone))
        numbers[layer] += kind is not SUM
    modules = tuple(map(weakref.ref, trace.modules))
    return Program(tuple(found), modules, [*map(type, trace.modules)], tuple(trace.children), last)


def fits(calls: list[tuple[Any, int, bool, tuple[int, ...]]]) -> bool:
    """Return whether a block can run these calls.

    Convolutions read the block's input, or the result of an activation or product. The only reader of a convolution's
    result is a norm or a rectifier. A smooth activation is the only reader of a batch norm's result, and one
    convolution reads its own result. Alternatively, two calls may read the result of any activation: a pool, and then
    the product with a value computed from the pool's result. The values in between are small. Each of them is read
    once, by a convolution, an activation or the product. Every other value is read at most twice, because the order in
    which two gradients are added does not matter. The last value is the result.
    """
    kinds: list[Any] = [Value, *(kind for kind, *_ in calls)]
    readers: list[list[Any]] = [[] for _ in kinds]
    small = [False]
    for kind, _, _, inputs in calls:
        count = sum(small[value] for value in inputs)
        if kind is PRODUCT and count != 1:
            return False
        small.append(kind is POOL or (count == 1 and kind is not PRODUCT))
        for value in inputs:
            readers[value].append(kind)
    if not all(map(may_read, kinds[:-1], small, readers)) or small[-1]:
        return False
    first = set(readers[0]) - {SUM}
    return bool(first) and first <= set(CONVOLUTIONS) and kinds[-1] in (*NORMS, *RECTIFIERS, *SMOOTH, SUM)


def may_read(kind: Any, small: bool, readers: list[Any]) -> bool:
    """Return whether calls of the given kinds may read a value of that kind, in the given order."""
    one = readers[0] if len(readers) == 1 else None
    if small:
        return one in (*CONVOLUTIONS, *ACTIVATIONS, PRODUCT)
    if kind in CONVOLUTIONS:
        return one in (*NORMS, *RECTIFIERS)
    if kind is PRODUCT:
        return one in CONVOLUTIONS
    if kind in (*RECTIFIERS, *SMOOTH) and readers == [POOL, PRODUCT]:
        return True
    if kind in SMOOTH:
        return one in CONVOLUTIONS
    if kind in NORMS and one in SMOOTH:
        return kind not in INSTANCE_NORMS
    others = {*NORMS, *RECTIFIERS, SUM, *(CONVOLUTIONS if kind in (Value, *RECTIFIERS) else ())}
    return 1 <= len(readers) <= 2 and others.issuperset(readers)
