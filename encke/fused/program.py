"""Programs: the layers that a container's forward calls, where its code shows that it does nothing else.

The forward runs once, with stand-ins for the module and its input that note the calls of layers and the sums. That
tells what every later call does only if nothing else can decide about it: the code may name no global, and of the
module only children, or attributes that are None (`downsample`). A test on `training` or a random number ends it.
"""

from __future__ import annotations

import dis
import types
import weakref
from collections import Counter
from types import NoneType
from typing import Any, NamedTuple

from torch import nn

CONVOLUTIONS: tuple[type[nn.Module], ...] = (nn.Conv2d, nn.Conv3d)
NORMS: tuple[type[nn.Module], ...] = (nn.BatchNorm2d, nn.BatchNorm3d)
LEAVES = (*CONVOLUTIONS, *NORMS, nn.ReLU, nn.SiLU)
FORBIDDEN = {"LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF", "STORE_GLOBAL", "STORE_ATTR", "IMPORT_NAME"}
"""Instructions by which code reads or changes something else than its arguments and the module's children."""
MOST_CALLS = 12
"""A longer program holds what it has packed for too long. A bottleneck has up to 12 calls."""


class UnknownError(Exception):
    """A forward does something that no program has."""


class Call(NamedTuple):
    """A call of a layer, or a sum. Its result is the value with the next number; the input is value 0."""

    layer: int
    """Number of the layer among the program's modules; -1 for a sum."""
    number: int
    """Number of this call among the layer's calls in the program."""
    inputs: tuple[int, ...]
    """Values that it takes."""
    in_place: bool
    """Whether the result may take the place of the first value: nobody else reads that."""


class Program(NamedTuple):
    """Calls of a container, and all that they depend on. It keeps no module alive."""

    calls: tuple[Call, ...]
    modules: tuple[weakref.ref[nn.Module], ...]
    """The container itself and every module that is called."""
    kinds: list[type[nn.Module]]
    """Their classes."""
    children: tuple[tuple[int, list[int], tuple[str, ...]], ...]
    """Numbers of containers, the ids of their children, and those attributes of theirs that are None."""
    last: int
    """Number of a ReLU that is called with the result; -1 if there is none."""

    def current(self) -> list[Any] | None:
        """Return the modules, if all of them are there and the containers have the children that they had."""
        modules: list[Any] = [module() for module in self.modules]
        # A parametrization changes the class of its module.
        if [*map(type, modules)] != self.kinds:
            return None
        for number, children, missing in self.children:
            module = modules[number]
            if [*map(id, module._modules.values())] != children:
                return None
            for name in missing:
                if module.__dict__.get(name, self) is not None:
                    return None
        return modules


class Value:
    """Stands for a tensor. Whatever else is asked of it is a TypeError or an AttributeError."""

    __slots__ = ("number", "trace")
    __bool__ = __eq__ = __hash__ = None  # type: ignore[assignment]

    def __init__(self, number: int, trace: Trace) -> None:
        self.number = number
        self.trace = trace

    def __add__(self, other: Any) -> Value:
        return self.trace.add(None, False, self, other)

    def __iadd__(self, other: Any) -> Value:  # noqa: PYI034
        return self.trace.add(None, True, self, other)


class Child:
    """Stands for a child of the module that is followed."""

    __slots__ = ("module", "trace")
    __bool__ = __eq__ = __hash__ = None  # type: ignore[assignment]

    def __init__(self, module: nn.Module, trace: Trace) -> None:
        self.module = module
        self.trace = trace

    def __call__(self, value: Value) -> Value:
        return self.trace.follow(self.module, value)


class StandIn:
    """Stands for the module that is followed: has its children, and those attributes of it that are None."""

    def __init__(self, module: nn.Module, trace: Trace) -> None:
        for name, child in module._modules.items():
            self.__dict__[name] = None if child is None else Child(child, trace)

    def __getattr__(self, name: str) -> None:
        """Return None for any other name: `names_nothing_else` has seen that there are no others."""


class Trace:
    """Calls that are noted while a forward is followed."""

    def __init__(self) -> None:
        self.calls: list[tuple[nn.Module | None, bool, tuple[int, ...]]] = []
        self.modules: dict[nn.Module, int] = {}
        """Modules that were called, with their numbers."""
        self.children: list[tuple[int, list[int], tuple[str, ...]]] = []

    def add(self, module: nn.Module | None, in_place: bool, *values: Any) -> Value:
        """Note a call and return its result."""
        if not all(type(value) is Value for value in values):
            raise UnknownError
        self.calls.append((module, in_place, tuple(value.number for value in values)))
        return Value(len(self.calls), self)

    def follow(self, module: nn.Module, value: Value) -> Value:
        """Note the calls that a call of a module makes, and return its result."""
        number = self.modules.setdefault(module, len(self.modules))
        if type(module) in LEAVES:
            return self.add(module, bool(getattr(module, "inplace", False)), value)
        if type(module) is nn.Identity:
            return value
        function: Any = type(module).forward
        if function is nn.Sequential.forward:
            self.children.append((number, [*map(id, module._modules.values())], ()))
            for child in module._modules.values():
                assert child is not None
                value = self.follow(child, value)
            return value
        missing = names_nothing_else(module, function)
        self.children.append((number, [*map(id, module._modules.values())], missing))
        return function(StandIn(module, self), value)


def names_nothing_else(module: nn.Module, function: Any) -> tuple[str, ...]:
    """Return the names in a forward's code that are no children but None; raise if there are others."""
    if not isinstance(function, types.FunctionType):
        raise UnknownError
    instructions = {instruction.opname for instruction in dis.get_instructions(function)}
    missing = [name for name in function.__code__.co_names if module._modules.get(name) is None]
    if instructions & FORBIDDEN or any(module.__dict__.get(name, module) is not None for name in missing):
        raise UnknownError
    return tuple(missing)


def program_of(module: nn.Module) -> Program | None:
    """Return the program of a container's forward; None if it may do anything but call layers that are known here."""
    trace = Trace()
    try:
        result: Any = trace.follow(module, Value(0, trace))
    except (AttributeError, TypeError, UnknownError):
        return None
    calls, last = trace.calls, -1
    if type(result) is not Value or result.number != len(calls) or len(calls) > MOST_CALLS:
        return None
    if calls and type(calls[-1][0]) is nn.ReLU:
        # On its own it releases the gradient of its result, which a function would hold to its end.
        last = trace.modules[calls.pop()[0]]  # type: ignore[index]
    if not fits(calls):
        return None
    uses = Counter(value for _, _, inputs in calls for value in inputs)
    found: list[Call] = []
    numbers: Counter[int] = Counter()
    for called, in_place, inputs in calls:
        alone = inputs[0] > 0 and uses[inputs[0]] == 1
        if in_place and not alone:
            return None  # what is written over is read elsewhere
        layer = -1 if called is None else trace.modules[called]
        found.append(Call(layer, numbers[layer], inputs, alone))
        numbers[layer] += 1
    modules = tuple(map(weakref.ref, trace.modules))
    return Program(tuple(found), modules, [*map(type, trace.modules)], tuple(trace.children), last)


def fits(calls: list[tuple[nn.Module | None, bool, tuple[int, ...]]]) -> bool:
    """Return whether a block runs these calls.

    Convolutions take the block's input or the result of a ReLU; a batch norm or a ReLU alone takes theirs. A SiLU takes
    the result of a batch norm alone, and makes that of the block. Every value is read, and at most twice: the order in
    which two gradients are added does not matter. The last one is the result.
    """
    kinds: list[Any] = [Value, *(type(module) for module, _, _ in calls)]
    readers: list[list[Any]] = [[] for _ in kinds]
    for kind, (_, _, inputs) in zip(kinds[1:], calls, strict=True):
        for value in inputs:
            readers[value].append(kind)
        if kind in CONVOLUTIONS and kinds[inputs[0]] not in (Value, nn.ReLU):
            return False
    for kind, by in zip(kinds[:-1], readers, strict=False):
        if not 1 <= len(by) <= 2:
            return False
        if kind in CONVOLUTIONS and (len(by) > 1 or by[0] not in (*NORMS, nn.ReLU)):
            return False
        if kind is nn.SiLU or (nn.SiLU in by and (kind not in NORMS or len(by) > 1)):
            return False
    first = set(readers[0]) - {NoneType}
    return bool(first) and first <= set(CONVOLUTIONS) and kinds[-1] not in CONVOLUTIONS
