"""Files made to do harm, through the command line: each ends in one line, runs no code and writes nowhere else.

SECURITY.md lists which loader reads what.
"""

from __future__ import annotations

import gzip
import io
import json
import pickle
import struct
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import encke
from encke.cli import main
from encke.train.checkpoint import RunFolder
from encke.train.data.dogs import ABOUT
from encke.train.settings import read

RECIPE = "model: {name: digits}\ndata: {kind: digits}\nepochs: 1\n"


class Harmful:
    """Creates a file when it is unpickled by a loader that trusts it."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return Path.touch, (self.trace,)


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return tmp_path / "harm was done"


def failure(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> str:
    """Run a command that must end with one line about what is wrong, and return the line."""
    with pytest.raises(SystemExit) as end:
        main([str(each) for each in arguments])
    assert end.value.code == 2
    line = capsys.readouterr().err.strip().splitlines()[-1]
    assert line.startswith("encke: ")
    return line


def test_the_harmful_object_does_harm_where_it_is_trusted(trace: Path) -> None:
    pickle.loads(pickle.dumps(Harmful(trace)))
    assert trace.exists()


@pytest.mark.slow
@pytest.mark.parametrize("zipped", [True, False])
def test_a_checkpoint_with_code_in_it_is_refused(zipped: bool, trace: Path, tmp_path: Path, capsys) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "settings.yaml").write_text(f"{RECIPE}out: {run}\n")
    (run / "metrics.jsonl").write_text("")
    torch.save({"model": Harmful(trace)}, run / "checkpoint.pt", _use_new_zipfile_serialization=zipped)
    line = failure(capsys, "train", run, "--resume")
    assert "checkpoint.pt" in line and "--overwrite" in line
    assert not trace.exists()


def test_weights_with_code_in_them_are_refused(trace: Path, tmp_path: Path, capsys) -> None:
    torch.save({"0.weight": Harmful(trace)}, tmp_path / "weights.pt")
    line = failure(capsys, "train", "digits", "--model.weights", tmp_path / "weights.pt", "--out", tmp_path / "run")
    assert "weights.pt holds no state_dict" in line
    assert not trace.exists() and not (tmp_path / "run").exists()


@pytest.mark.parametrize("tag", ["!!python/object/apply:pathlib.Path.touch", "!!python/object/new:pathlib.Path"])
def test_a_recipe_with_python_tags_is_refused(tag: str, trace: Path, tmp_path: Path, capsys) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"out: {tag} [{trace}]\n")
    assert "recipe.yaml, line 1" in failure(capsys, "train", recipe)
    assert not trace.exists()


def test_a_cifar_file_with_code_in_it_is_refused(trace: Path, tmp_path: Path, capsys) -> None:
    for name in (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"):
        (tmp_path / name).write_bytes(pickle.dumps({b"data": Harmful(trace)}))
    options = ("--data.kind", "cifar10", "--data.path", tmp_path, "--out", tmp_path / "run")
    assert "data_batch_1" in failure(capsys, "train", "resnet18-cifar10", *options)
    assert not trace.exists()


def test_arrays_with_pickled_objects_are_refused(trace: Path, tmp_path: Path, capsys) -> None:
    hostile = np.array([Harmful(trace)], dtype=object)
    np.savez(tmp_path / "data.npz", images=hostile, labels=hostile)
    assert "data.npz" in failure(capsys, "study", "gradients", "--data", tmp_path / "data.npz")
    assert not trace.exists()


@pytest.mark.parametrize(
    "content",
    [b"", b"\x1f\x8b" + b"\xff" * 64, gzip.compress(b"\0\0\x08\x03" + b"\xff" * 12), gzip.compress(b"\0" * 4096)[:30]],
    ids=["empty", "no gzip", "short", "cut off"],
)
def test_an_idx_file_that_promises_what_it_does_not_hold_is_refused(content: bytes, tmp_path: Path, capsys) -> None:
    for name in ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1"):
        (tmp_path / f"{name}-ubyte.gz").write_bytes(content)
    options = ("--data.kind", "mnist", "--data.path", tmp_path, "--out", tmp_path / "run")
    assert "train-images-idx3-ubyte.gz" in failure(capsys, "train", "digits", *options)


def png(width: int, height: int) -> bytes:
    """A PNG that claims to be of this size and holds one row of one pixel."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    head = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(b"\0\0")) + chunk(b"IEND", b"")


def dogs(folder: Path) -> Path:
    """Two breeds of two tiny images each, as the archive unpacks. Return the folder of images."""
    for breed in ("n1-beagle", "n2-boxer"):
        (folder / "Images" / breed).mkdir(parents=True)
        for number in range(2):
            (folder / "Images" / breed / f"{number}.png").write_bytes(png(1, 1))
    return folder / "Images"


@pytest.mark.parametrize("content", [png(60_000, 60_000), png(4, 4)[:40], b"\x89PNG\r\n\x1a\n" + b"\xff" * 64, b""])
def test_an_image_that_is_a_bomb_or_broken_is_left_out_and_listed(content: bytes, tmp_path: Path, capsys) -> None:
    images = dogs(tmp_path / "archive")
    (images / "n1-beagle" / "2.png").write_bytes(content)
    main(["data", "dogs", str(images), str(tmp_path / "dst"), "--split", "random", "--workers", "1"])
    assert "2.png" in (tmp_path / "dst" / "broken.txt").read_text()
    assert not list((tmp_path / "dst" / "train").rglob("2.png"))


@pytest.mark.parametrize("name", ["n1-beagle/../../../secret.png", "../secret.png", "{tmp}/secret.png"])
def test_a_list_that_points_outside_the_images_is_refused(name: str, tmp_path: Path, capsys) -> None:
    scipy_io = pytest.importorskip("scipy.io")
    images = dogs(tmp_path / "archive")
    (tmp_path / "secret.png").write_bytes(png(1, 1))
    (tmp_path / "archive" / "secret.png").write_bytes(png(1, 1))
    name = name.format(tmp=tmp_path)
    for file in ("train_list.mat", "test_list.mat"):
        listed = np.array([["n1-beagle/0.png"], [name]], dtype=object)
        scipy_io.savemat(tmp_path / "archive" / file, {"file_list": listed})
    before = sorted(tmp_path.rglob("*"))
    line = failure(capsys, "data", "dogs", images, tmp_path / "a" / "b" / "dst")
    assert "list.mat" in line
    assert sorted(tmp_path.rglob("*")) == before


def test_a_link_out_of_the_images_is_not_followed_to_what_is_no_image(tmp_path: Path) -> None:
    images = dogs(tmp_path / "archive")
    (tmp_path / "password").write_text("secret")
    (images / "n1-beagle" / "2.png").symlink_to(tmp_path / "password")
    main(["data", "dogs", str(images), str(tmp_path / "dst"), "--split", "random", "--workers", "1"])
    assert all(b"secret" not in file.read_bytes() for file in (tmp_path / "dst").rglob("*.png"))


@pytest.mark.parametrize("content", [b"", b"\0" * 4096, b"\xff" * 16384, b"\xde\xc0\xef\xbe" * 4096])
def test_a_file_that_is_no_lmdb_is_refused(content: bytes, tmp_path: Path, capsys) -> None:
    (tmp_path / "data.mdb").write_bytes(content)
    options = ("--data.kind", "lmdb", "--data.path", tmp_path, "--out", tmp_path / "run")
    assert str(tmp_path) in failure(capsys, "train", "resnet50-dogs96", *options)


@pytest.mark.parametrize(
    "meta",
    [
        b"{",
        b"[]",
        b"[" * 100_000,
        b'{"format": "encke images 1"}',
        b'{"format": "encke images 1", "classes": ["a"], "count": 1, "mean": [0, 0, 0], "std": [0, 0, 0]}',
        b'{"format": "encke images 1", "classes": ["a"], "count": 1, "mean": [0, 0, 0], "std": [1, 1, 1]}',
    ],
)
def test_an_lmdb_with_garbage_in_its_records_is_refused(meta: bytes, tmp_path: Path, capsys) -> None:
    lmdb = pytest.importorskip("lmdb")
    with lmdb.open(str(tmp_path / "data")) as file, file.begin(write=True) as transaction:
        transaction.put(b".meta", meta)
        transaction.put(b".labels", b"\0" * 7)
    options = ("--data.kind", "lmdb", "--data.path", tmp_path / "data", "--out", tmp_path / "run")
    assert str(tmp_path) in failure(capsys, "train", "resnet50-dogs96", *options)


@pytest.mark.parametrize(
    "content",
    [b"", b"\xff" * 64, struct.pack("<Q", 1 << 60) + b"{}", struct.pack("<Q", 2) + b"[]", pickle.dumps({"a": 1})],
)
def test_a_file_that_is_no_safetensors_is_refused(content: bytes, tmp_path: Path, capsys) -> None:
    (tmp_path / "x.safetensors").write_bytes(content)
    assert "x.safetensors" in failure(capsys, "bench", "codec", "--data", tmp_path / "x.safetensors")


def test_safetensors_that_promise_more_than_the_file_holds_are_refused(tmp_path: Path, capsys) -> None:
    head = json.dumps({"x": {"dtype": "F32", "shape": [1 << 40], "data_offsets": [0, 1 << 42]}}).encode()
    (tmp_path / "x.safetensors").write_bytes(struct.pack("<Q", len(head)) + head + b"\0" * 64)
    assert "x.safetensors" in failure(capsys, "bench", "codec", "--data", tmp_path / "x.safetensors")


@pytest.mark.parametrize("garbage", [b"\xff\xfe\n", b"[" * 100_000 + b"\n", b'{"step": NaN}\n', b"null\n"])
def test_garbage_in_the_metrics_of_a_run_is_named(garbage: bytes, tmp_path: Path, capsys) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "settings.yaml").write_text(f"{RECIPE}out: {run}\n")
    good = b'{"event": "step", "step": 1, "loss": 1.0}\n'
    (run / "metrics.jsonl").write_bytes(garbage + good)
    assert "metrics.jsonl, line 1" in failure(capsys, "report", run)


def run_folder(tmp_path: Path) -> Path:
    """A folder with the settings of a run, and nothing else of it."""
    run = tmp_path / "run"
    run.mkdir()
    (run / "settings.yaml").write_text(f"{RECIPE}out: {run}\n")
    (run / "metrics.jsonl").write_text("")
    return run


DEEP = "[" * 100_000
NAMES = list(zip("abcdefgh", "bcdefghi", strict=True))
BOMB = "[&a [1, 1, 1, 1, 1, 1, 1, 1, 1]" + "".join(f", &{b} [{', '.join([f'*{a}'] * 9)}]" for a, b in NAMES)
"""Half a kilobyte of YAML that is gigabytes when written out."""


@pytest.mark.parametrize(
    "text",
    [
        f"epochs: {BOMB}]\n",
        f"schedule: {{milestones: {BOMB}]}}\n",
        f"zebra: {BOMB}]\n",
        "a: &a {z: 1}\n"
        + "".join(f"{b}: &{b} {{" + ", ".join(f"{c}: *{a}" for c in "mnopqrstu") + "}\n" for a, b in NAMES),
        f"epochs: {DEEP}",
    ],
    ids=["number", "numbers", "unknown", "sections", "deep"],
)
def test_a_recipe_that_is_a_bomb_is_refused(text: str, tmp_path: Path, capsys) -> None:
    (tmp_path / "recipe.yaml").write_text(text)
    line = failure(capsys, "train", tmp_path / "recipe.yaml")
    assert "recipe.yaml" in line and len(line) < 500


@pytest.mark.parametrize("content", [DEEP, "{", "\xff", "[]", '{"finished": NaN}'])
def test_garbage_in_the_result_of_a_run_is_named_and_does_not_end_a_training(content: str, tmp_path: Path, capsys):
    run = run_folder(tmp_path)
    (run / "metrics.jsonl").write_text('{"event": "step", "step": 1, "loss": 1.0}\n')
    (run / "result.json").write_text(content, encoding="latin1")
    if content != '{"finished": NaN}':
        assert "result.json" in failure(capsys, "report", run)
    assert RunFolder(read(str(run)), resume=True, overwrite=False).finished() is None


GARBAGE: dict[str, object] = {
    "nothing": {},
    "no dictionary": [1, 2],
    "model": {"model": 3, "processes": [1]},
    "processes": {"processes": 7},
}


@pytest.mark.parametrize("name", GARBAGE)
def test_a_checkpoint_with_garbage_in_it_is_refused(name: str, tmp_path: Path, capsys) -> None:
    run = run_folder(tmp_path)
    torch.save(GARBAGE[name], run / "checkpoint.pt")
    before = (run / "checkpoint.pt").read_bytes()
    line = failure(capsys, "train", run, "--resume")
    assert "checkpoint.pt" in line and "--overwrite" in line
    assert (run / "checkpoint.pt").read_bytes() == before


STATES: dict[str, object] = {
    "no dictionary": 3,
    "no version": {"version": None, "step": 1, "policy": {}},
    "no step": {"version": 2, "step": None, "policy": {}},
    "no policy": {"version": 2, "step": 1, "policy": None},
    "words": {
        "version": 2,
        "step": 1,
        "policy": dict.fromkeys(("settings", "history", "turn", "warned", "schedule"), "x"),
    },
    "numbers": {
        "version": 2,
        "step": 1,
        "policy": dict.fromkeys(("settings", "history", "turn", "warned", "schedule"), 7),
    },
    "averages": {"averages": {"weight": (3, "x")}},
    "shape": {"averages": {"weight": (torch.zeros(3), 1)}},
    "updates": {"updates": "many"},
}


@pytest.mark.parametrize("name", STATES)
def test_a_policy_state_with_garbage_in_it_is_refused_and_changes_nothing(name: str) -> None:
    model = torch.nn.Linear(4, 4)
    handle = encke.attach(model)
    state: Any = STATES[name]
    if name in ("averages", "shape", "updates"):
        whole = handle.state_dict()
        whole["policy"]["schedule"] |= state
        state = whole
    elif name in ("words", "numbers"):
        state["policy"]["rounding"] = handle.state_dict()["policy"]["rounding"]
    before = handle.state_dict()
    with pytest.raises(ValueError, match="state"):
        handle.load_state_dict(state)
    assert handle.state_dict() == before


@pytest.mark.parametrize("content", [b"\xff\xfe" * 400, b"\0" + b"\x80" * 400, b""])
def test_a_text_that_is_none_is_refused(content: bytes, tmp_path: Path, capsys) -> None:
    (tmp_path / "x.txt").write_bytes(content)
    options = ("--data.kind", "text", "--data.path", tmp_path / "x.txt", "--out", tmp_path / "run")
    assert "x.txt" in failure(capsys, "train", "gpt-text", *options)


@pytest.mark.parametrize(
    "content", [DEEP, "{", '{"mean": [NaN, 0, 0], "std": [1, 1, 1]}', '{"mean": [0, 0, 0], "std": [1, 1, Infinity]}']
)
def test_garbage_in_the_mean_of_a_folder_is_named(content: str, tmp_path: Path, capsys) -> None:
    for part in ("train", "val"):
        for breed in ("beagle", "boxer"):
            (tmp_path / part / breed).mkdir(parents=True)
            (tmp_path / part / breed / "0.png").write_bytes(png(1, 1))
    (tmp_path / "mean.json").write_text(content)
    options = ("--data.kind", "folder", "--data.path", tmp_path / "train", "--data.size", "32", "--batch", "1")
    assert "mean.json" in failure(capsys, "train", "resnet18-cifar10", *options, "--out", tmp_path / "run")


@pytest.mark.parametrize("name", ["cut", "flipped", "huge", "no zip"])
def test_arrays_that_are_damaged_or_promise_too_much_are_refused(name: str, tmp_path: Path, capsys) -> None:
    path = tmp_path / "data.npz"
    np.savez_compressed(path, images=np.zeros((64, 8, 8, 1), np.uint8), labels=np.zeros(64, np.int64))
    content = bytearray(path.read_bytes())
    if name == "cut":
        content = content[: len(content) // 2]
    elif name == "flipped":
        content[60:90] = bytes(30)
    elif name == "huge":
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w") as archive:
            head = io.BytesIO()
            np.lib.format.write_array_header_1_0(head, {"descr": "|u1", "fortran_order": False, "shape": (1 << 50,)})
            archive.writestr("images.npy", head.getvalue() + b"\0" * 16)
        content = bytearray(buffer.getvalue())
    else:
        content = bytearray(b"PK" + b"\xff" * 64)
    path.write_bytes(content)
    assert "data.npz" in failure(capsys, "study", "gradients", "--data", path)


@pytest.mark.parametrize("meta", [DEEP, "[]", '{"x": {"bound": NaN}}', '{"x": 3}'])
def test_garbage_in_the_metadata_of_safetensors_is_refused(meta: str, tmp_path: Path, capsys) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    safetensors.save_file({"x": torch.zeros(4096)}, tmp_path / "x.safetensors", {"meta": meta})
    assert "x.safetensors" in failure(capsys, "bench", "codec", "--data", tmp_path / "x.safetensors")


@pytest.mark.parametrize("content", [DEEP, "{", "\xff"])
def test_a_destination_with_garbage_of_an_earlier_attempt_is_refused(content: str, tmp_path: Path, capsys) -> None:
    images = dogs(tmp_path / "archive")
    (tmp_path / "dst").mkdir()
    (tmp_path / "dst" / ABOUT).write_text(content, encoding="latin1")
    line = failure(capsys, "data", "dogs", images, tmp_path / "dst", "--split", "random", "--workers", "1")
    assert str(tmp_path / "dst") in line


@pytest.mark.parametrize("content", [DEEP.encode(), b"{", b"[]", b'{"format": 1}', b'{"brightness": 3}'])
def test_an_lmdb_with_garbage_of_an_earlier_attempt_is_refused(content: bytes, tmp_path: Path, capsys) -> None:
    lmdb = pytest.importorskip("lmdb")
    images = dogs(tmp_path / "archive")
    with lmdb.open(str(tmp_path / "dst")) as file, file.begin(write=True) as transaction:
        transaction.put(b".meta", content)
    line = failure(capsys, "data", "lmdb", images, tmp_path / "dst", "--workers", "1")
    assert str(tmp_path / "dst") in line
