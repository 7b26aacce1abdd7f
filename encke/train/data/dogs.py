"""`encke data dogs`: the archive of Stanford Dogs as folders for training and validation."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np

from encke.tools.errors import UsageError
from encke.tools.files import write_whole
from encke.tools.progress import progress
from encke.tools.terminal import note
from encke.train.data import seeded
from encke.train.data.readers import classes_of, list_images
from encke.train.data.seeded import Purpose
from encke.train.data.verify import Brightness, Wanted, checks, file_sizes, worker_count

ABOUT = "split.json"
"""Description of how a folder was made. It is written first, so that the same command may continue."""

Listed = list[tuple[str, int]]
"""Files, each with the index of its class."""


def dogs(
    src: Path,
    dst: Path,
    split: Literal["official", "random"] = "official",
    fraction: float = 0.2,
    seed: int = 0,
    workers: int | None = None,
) -> None:
    """Turn the archive of Stanford Dogs into folders for training and validation.

    Makes DST/train and DST/val with one folder for each breed (links to the images, copies where links cannot be made),
    train.txt and val.txt (path and label), classes.txt, and mean.json with mean and standard deviation of each channel
    of the training images. Broken images are left out and listed in broken.txt.

    Args:
        src: The folder with Images and lists in it, as the archives unpack, or Images itself.
        dst: The folder to make.
        split: official takes the archive's lists, random holds out a part of each breed.
        fraction: With random, the part of each breed that is for validation.
        seed: With random, decides which images these are.
        workers: Processes that decode; by default one for each core.
    """
    if not 0 < fraction < 1:
        raise UsageError(f"--fraction must be between 0 and 1, got {fraction}")
    processes = worker_count(workers)
    root = src / "Images" if (src / "Images").is_dir() else src
    if dst.resolve().is_relative_to(root.resolve()):
        raise UsageError(f"DST {dst} is inside {root}, where it would be taken for a breed: name another folder")
    classes = classes_of(root, "SRC")
    listed = official(root, classes) if split == "official" else random(root, classes, fraction, seed)
    about = {"images": str(root.resolve()), "split": split}
    if split == "random":
        about |= {"fraction": str(fraction), "seed": str(seed)}
    start(dst, about)
    broken = []
    for name, files in listed.items():
        good, bad, brightness = checked(root, files, name, processes)
        broken += bad
        if not good:
            raise UsageError(f"{root}: none of {len(files):,} images for {name} can be decoded")
        for path, _ in good:
            link(root / path, dst / name / path)
        write(dst / f"{name}.txt", [f"{path} {label}" for path, label in good])
        note(f"{dst / name}: {len(good):,} images of {len({label for _, label in good})} breeds")
        if name == "train":
            mean, std = brightness.mean_and_std()
            write(dst / "mean.json", [json.dumps({"mean": mean, "std": std})])
    write(dst / "classes.txt", classes)
    if broken:
        write(dst / "broken.txt", broken)
        note(f"broken images left out: {len(broken):,}, listed in {dst / 'broken.txt'}")
    note(f"train with --data.kind folder --data.path {dst}")


def official(root: Path, classes: Sequence[str]) -> dict[str, Listed]:
    """Return the archive's own split."""
    places = (root.parent / "lists", root.parent, root / "lists")
    lists = next((place for place in places if (place / "train_list.mat").is_file()), None)
    if lists is None:
        raise UsageError(
            f"no lists/train_list.mat beside {root}: unpack the archive's lists there, or use --split random"
        )
    number = {name: label for label, name in enumerate(classes)}
    found = {}
    for name, file in (("train", lists / "train_list.mat"), ("val", lists / "test_list.mat")):
        files = read_list(file)
        # Two plain names and no more: a path with `..` in it would be written outside DST.
        outside = next((path for path in files if len(Path(path).parts) != 2 or ".." in path.split("/")), None)
        if outside is not None:
            raise UsageError(f"{file} lists {outside!r}, which is not BREED/FILE: get the lists again")
        missing = [path for path in files if Path(path).parts[0] not in number or not (root / path).is_file()]
        if missing:
            raise UsageError(
                f"{file} lists {len(missing):,} images that are not in {root} ({missing[0]}): unpack the images again, "
                "or use --split random"
            )
        found[name] = [(path, number[Path(path).parts[0]]) for path in files]
    return found


def read_list(file: Path) -> list[str]:
    """Read the paths in one of the archive's MATLAB files."""
    try:
        from scipy.io import loadmat
    except ModuleNotFoundError:
        raise UsageError("the official lists are read with scipy: pip install scipy, or use --split random") from None
    try:
        cells = np.atleast_1d(loadmat(file, squeeze_me=True)["file_list"])
    except FileNotFoundError:
        raise UsageError(f"{file} is not there: unpack the archive's lists again, or use --split random") from None
    except KeyError:
        raise UsageError(f"{file} holds no file_list: unpack the archive's lists again") from None
    except Exception as error:
        raise UsageError(f"{file} cannot be read as a MATLAB file ({error}): unpack the lists again") from None
    return [str(cell) for cell in cells]


def random(root: Path, classes: Sequence[str], fraction: float, seed: int) -> dict[str, Listed]:
    """Hold out a part of each breed, at least one image, for validation."""
    found: dict[str, Listed] = {"train": [], "val": []}
    files = list_images(root, classes, keep_lost=True)
    for label, name in enumerate(classes):
        mine = [each for each in files if each[1] == label]
        if len(mine) < 2:
            raise UsageError(f"{root / name}: {len(mine)} image cannot be split: add some or remove the folder")
        held_out = min(max(1, round(fraction * len(mine))), len(mine) - 1)
        order = seeded.permutation(len(mine), seed, label, Purpose.HELD_OUT).tolist()
        found["val"] += [mine[place] for place in sorted(order[:held_out])]
        found["train"] += [mine[place] for place in sorted(order[held_out:])]
    return found


def start(dst: Path, about: dict[str, str]) -> None:
    """Make the folder, or go on with one that was made in the same way."""
    try:
        dst.mkdir(parents=True, exist_ok=True)
        inside = [each.name for each in dst.iterdir()]
        if inside and ABOUT not in inside:
            raise UsageError(f"DST {dst} holds other files ({inside[0]}): name a new folder")
        if inside and json.loads((dst / ABOUT).read_text()) != about:
            raise UsageError(f"DST {dst} holds another split: remove it or name another folder")
        write(dst / ABOUT, [json.dumps(about)])
    except OSError as error:
        raise UsageError(f"DST {dst} cannot be written ({error.strerror}): name another folder") from None
    except UsageError:
        raise
    except (ValueError, RecursionError):
        raise UsageError(f"DST {dst}: its {ABOUT} cannot be read: remove the folder or name another one") from None


def checked(root: Path, files: Listed, name: str, workers: int) -> tuple[Listed, list[str], Brightness]:
    """Return the files that can be decoded, lines about those that cannot, and the brightness of the good ones."""
    good, broken, brightness = [], [], Brightness()
    paths = [os.path.join(root, path) for path, _ in files]
    sizes = file_sizes(paths)
    rest = iter(files)
    with checks(paths, sizes, workers, Wanted(False)) as results, progress(name, len(files)) as advance:
        for found in results:
            # `rest` comes second: zip must not consume one of it when the problems end.
            for problem, each in zip(found.problems, rest, strict=False):
                if problem:
                    broken.append(f"{root / each[0]}\t{problem}")
                else:
                    good.append(each)
            brightness.add(found.brightness)
            advance(len(found.problems))
    return good, broken, brightness


def link(file: Path, place: Path) -> None:
    """Make a hard link to a file, or a symbolic link, or a copy, whichever is possible first."""
    if place.exists():
        return
    place.parent.mkdir(parents=True, exist_ok=True)
    for way in (os.link, os.symlink, shutil.copyfile):
        part = place.with_name(f".{place.name}.part")
        part.unlink(missing_ok=True)
        try:
            way(file.resolve(), part)
        except OSError as error:
            problem = error
            continue
        os.replace(part, place)
        return
    raise UsageError(f"{place} cannot be made ({problem.strerror}): make room there or name another folder")


def write(file: Path, lines: Sequence[str]) -> None:
    """Write lines to a text file."""
    write_whole(file, "".join(f"{line}\n" for line in lines))
