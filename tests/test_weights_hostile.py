"""Tests of hostile weight files: each is refused in a sentence, at once, and changes nothing."""

import io
import json
import os
import pickle
import struct
import tracemalloc
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import h5py
import keras
import numpy as np
import published
import pytest
from conftest import assert_same_arrays, randomize

import keras_vit
from campaigns import oracle
from campaigns.weights import _HDF5, CONFIG, Campaign, _npy
from keras_vit import VisionTransformer, backend

ARRAYS = published.arrays(CONFIG)
POSITIONS = "Transformer/posembed_input/pos_embedding"
LONG_NAMES: dict[str, Any] = {"x" * 5000 + str(i): 1 for i in range(9)}
JSON = {
    "not UTF-8": (b'{"architecture": "\xff"}', "byte 18 is not UTF-8"),
    "NaN": (b'{"mean": NaN}', "NaN, which is not a finite number"),
    "beyond floats": (b'{"mean": 1e999}', "1e999, which is not a finite number"),
    "depth": (b'{"a": ' + b"[" * 100_000, "nested too deeply"),
    "a key twice": (b'{"a": 1, "a": 2}', "has a key twice"),
    "too long": (b" " * 4 * 2**20 + b"{}", "bytes of text; at most"),
    "a list": (b"[]", "holds a list, not a dictionary"),
    "heads of text": (b'{"model_args": {"num_heads": "two"}}', "number of heads is 'two'"),
    "10^30 heads": (b'{"model_args": {"num_heads": 1' + b"0" * 30 + b"}}", "number of heads is 1"),
    "no deviation": (b'{"mean": [0.5], "std": [0.0]}', "image_std is"),
    "a long value": (json.dumps({"mean": "x" * 10**6, "std": [1]}).encode(), "image_mean is 'xxx"),
}


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sound")
    Campaign(folder)
    return folder


@pytest.fixture(scope="module")
def model() -> VisionTransformer:
    """A model that what is refused must not change."""
    return randomize(VisionTransformer(CONFIG))


def header(shape: str) -> bytes:
    text = f"{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}, }}\n".encode()
    return b"\x93NUMPY\x02\x00" + struct.pack("<I", len(text)) + text


def npz(*extra: tuple[str, Any], packed: Any = False, **changes: Any) -> Callable[[Path], None]:
    """Writes the sound arrays with some more or others; bytes are taken as they are."""

    def write(path: Path) -> None:
        kind = zipfile.ZIP_DEFLATED if packed else zipfile.ZIP_STORED
        with zipfile.ZipFile(path, "w", kind) as archive:
            for name, content in [*(ARRAYS | changes).items(), *extra]:
                archive.writestr(
                    f"{name}.npy", content if isinstance(content, bytes) else _npy(content)
                )

    return write


def head(change: Callable[[np.ndarray], Any]) -> Callable[[Path], None]:
    return npz(**{"head/kernel": change(ARRAYS["head/kernel"])})


def put(value: float, dtype: str = "f4") -> Callable[[np.ndarray], np.ndarray]:
    def change(kernel: np.ndarray) -> np.ndarray:
        kernel = kernel.astype(dtype)
        kernel[1, 1] = value
        return kernel

    return change


def prefixed(prefix: str, *beside: str) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        arrays = {f"{prefix}{name}": array for name, array in ARRAYS.items()}
        np.savez(path, **arrays, **dict.fromkeys(beside, ARRAYS["cls"]))

    return write


class _Trap:
    def __reduce__(self) -> tuple[object, ...]:
        return (Path("sprung").write_text, ("!",))


NPZ: dict[str, tuple[Callable[[Path], Any], str]] = {
    "one NaN": (head(put(np.nan)), "'head/kernel' holds a value that is not a finite number"),
    "one infinity": (head(put(-np.inf)), "not a finite number"),
    "beyond float32": (head(put(1e300, "f8")), "not a finite number in float32"),
    "integers": (head(lambda kernel: kernel.astype("i4")), "is of int32; weights are of float16"),
    "truth values": (head(lambda kernel: kernel > 0), "is of bool; weights are of float16"),
    "a name twice": (npz(("cls", ARRAYS["cls"] * 2)), r"holds 'cls\.npy' twice"),
    "with and without prefix": (prefixed("params/", "cls"), "holds two networks"),
    "optimizer's prefix and none": (prefixed("opt/target/", "cls"), "holds two networks"),
    "two position tables": (
        npz(pos_embedding=np.ones((1, 4, 8), "f4")),
        "posembed_input/pos_embedding' twice",
    ),
    "two sets of positions": (npz(**{POSITIONS: np.ones((2, 5, 8), "f4")}), "of another shape"),
    "a bomb": (
        npz(packed=True, **{POSITIONS: header("(1, 1000001, 8)") + bytes(32 * 1_000_001)}),
        "more than 20 times as many",
    ),
    "10^9 blocks of nothing": (
        npz(("Transformer/encoderblock/x", header("(1000000000, 0)"))),
        "of 1000000000 blocks together",
    ),
    "block 999999999": (
        npz(**{"Transformer/encoderblock_999999999/x": np.ones(2)}),
        "lacks the block or unit 1, and has 0, 999999999",
    ),
    "unit 999999999": (
        npz(**{"conv_root/kernel": np.ones((7, 7, 3, 64)), "block999999999/unit1/x": np.ones(2)}),
        "lacks the block or unit 1",
    ),
    "too many names": (
        npz(*[(f"{'x' * 1000}{i}", b"") for i in range(2500)]),
        "its directory has more than",
    ),
    "a long header": (npz(("x", header("(" + " " * 20000 + "3,)"))), "'x' is not a NumPy array"),
    "many sides": (npz(("x", header("(" + "1," * 3000 + ")"))), "'x' declares shape"),
    "long names": (lambda path: np.savez(path, **LONG_NAMES), "..."),
    "a pickled array": (npz(("x", np.array([1, "x"], object))), "pickled; .* never unpickles"),
    "a bare pickle": (npz(("x", pickle.dumps(_Trap()))), "not a NumPy array"),
    "strings": (npz(("x", np.array(["x"]))), "not numbers"),
    "an absurd shape": (npz(("x", header("(2000000, 2000000, 2000000)"))), "declares shape"),
    "a negative shape": (npz(("x", header("(-4, -1)") + bytes(16))), "declares shape"),
    "calls": (npz(("x", header("(__import__('os').system('x'),)"))), "not a NumPy array"),
    "too few values": (npz(("x", header("(9,)") + bytes(32))), "are 32; the file is damaged"),
    "too many values": (npz(("x", header("(9,)") + bytes(40))), "bytes are 40"),
    "an unknown version": (npz(("x", b"\x93NUMPY\x09\x00" + bytes(99))), "not a NumPy array"),
    "nothing": (npz(("x", b"")), "not a NumPy array"),
    "a web page": (
        lambda path: path.write_text("<html>Not found</html>"),
        r"not a whole \.npz file .*fetch it again",
    ),
}


def check_refused(call: Callable[[], Any], match: str, names: tuple[str, ...]) -> None:
    """One clear sentence, under 100 MB."""
    tracemalloc.start()
    try:
        with pytest.raises((ValueError, OSError), match=match) as caught:
            call()
        assert tracemalloc.get_traced_memory()[1] < 100 * 2**20
    finally:
        tracemalloc.stop()
    assert oracle.says_enough(str(caught.value), names), caught.value
    assert "keras_vit" in str(caught.traceback[-1].path)


def check_both(model: VisionTransformer, path: Path, match: str, *names: str) -> None:
    before = model.get_weights()
    check_refused(lambda: keras_vit.weights.load_weights(model, path), match, names or (path.name,))
    check_refused(lambda: keras_vit.load(path), match, names or (path.name,))
    assert_same_arrays(model.get_weights(), before)


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_hostile_npz(
    tmp_path: Path, model: VisionTransformer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What an .npz declares is held against its bytes and the network, and its values are read."""
    monkeypatch.chdir(tmp_path)
    for write, match in NPZ.values():
        write(tmp_path / "vit.npz")
        check_both(model, tmp_path / "vit.npz", match)
    assert [file.name for file in tmp_path.iterdir()] == ["vit.npz"]  # nothing has run


def test_hostile_hdf5(sound: Path, tmp_path: Path, model: VisionTransformer) -> None:
    """No other file is read, no link followed, nothing unpacked; inside .keras neither."""
    secret = tmp_path / "secret"
    secret.write_bytes(np.arange(1000, dtype="f4").tobytes())
    name = "layers/dense/vars/0"
    for attack in [attack for attack in _HDF5 if attack not in ("empty", "type")]:
        content = io.BytesIO((sound / "vit.weights.h5").read_bytes())
        with h5py.File(content, "a") as file:
            value = file[name][()]
            if attack != "cycle":
                del file[name]
            _HDF5[attack](file, name, value, str(secret))
        alone, inside = tmp_path / f"{attack}.weights.h5", tmp_path / f"{attack}.keras"
        alone.write_bytes(content.getvalue())
        repack(sound / "vit.keras", inside, {"model.weights.h5": content.getvalue()})
        load = partial(keras_vit.weights.load_weights, model, alone)
        check_refused(load, "layers/dense", (alone.name,))
        check_both(model, inside, "layers/dense")


def repack(source: Path, target: Path, members: dict[str, bytes]) -> None:
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as new:
        for name in dict.fromkeys([*old.namelist(), *members]):
            new.writestr(name, members.get(name) or old.read(name))


def field(name: str, value: Any) -> Callable[[bytes], bytes]:
    def change(text: bytes) -> bytes:
        settings = json.loads(text)
        settings["config"]["config"][name] = value
        return json.dumps(settings).encode()

    return change


KERAS = {
    "image of 20000": (field("input_shape", [20000, 20000, 3]), "input_shape .* 134217728 pixels"),
    "image of 10000": (field("input_shape", [10000, 10000, 3]), "grid is 2500x2500"),
    "a million layers": (field("num_layers", 10**6), "num_layers must be a positive integer"),
    "a rate of text": (field("dropout_rate", "x" * 10**6), "dropout_rate must be in"),
    "an epsilon of NaN": (field("layer_norm_epsilon", float("nan")), "NaN, which is not a finite"),
    "spaces": (lambda text: b" " * 50_000_000 + text, "config.json .* bytes of text|20 times"),
    "depth": (lambda text: b"[" * 100_000, "nested too deeply"),
    "an activation": (field("classifier_activation", "sinh2"), "Keras has no activation 'sinh2'"),
}


def test_hostile_config_of_keras(sound: Path, tmp_path: Path, model: VisionTransformer) -> None:
    """The config inside is bounded and typed before a model is built from it.

    HDF5 content is not unpacked where it is a thousand times its packed size.
    """
    with zipfile.ZipFile(sound / "vit.keras") as archive:
        text = archive.read("config.json")
    for change, match in KERAS.values():
        repack(sound / "vit.keras", tmp_path / "vit.keras", {"config.json": change(text)})
        check_both(model, tmp_path / "vit.keras", match)
    weights = (sound / "vit.weights.h5").read_bytes() + bytes(40 * 2**20)
    repack(sound / "vit.keras", tmp_path / "vit.keras", {"model.weights.h5": weights})
    check_both(model, tmp_path / "vit.keras", "more than 20 times as many")


def test_hostile_config_json(sound: Path, tmp_path: Path, model: VisionTransformer) -> None:
    """The file that is at fault is named: config.json, not the weights beside it."""
    path, config = tmp_path / "model.safetensors", tmp_path / "config.json"
    path.write_bytes((sound / "model.safetensors").read_bytes())
    for content, match in JSON.values():
        config.write_bytes(content)
        check_both(model, path, match, "config.json")
    config.unlink()
    os.mkfifo(config)
    check_both(model, path, "a pipe or a device", "config.json")


def twice(content: bytes) -> bytes:
    """The first array's entry stands twice."""
    length = int.from_bytes(content[:8], "little")
    text = content[8 : 8 + length].strip()
    name, fields = next(iter(json.loads(text).items()))
    text = b"{" + json.dumps({name: fields})[1:-1].encode() + b"," + text[1:]
    return struct.pack("<Q", len(text)) + text + content[8 + length :]


def entry(name: str, **fields: Any) -> Callable[[bytes], bytes]:
    def write(content: bytes) -> bytes:
        length = int.from_bytes(content[:8], "little")
        settings = json.loads(content[8 : 8 + length])
        settings[name].update(fields)
        text = json.dumps(settings).encode()
        return struct.pack("<Q", len(text)) + text + content[8 + length :]

    return write


HEADERS: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "a header of 2**60 bytes": (lambda c: struct.pack("<Q", 2**60) + c[8:], "header of 1152921"),
    "an empty file": (lambda c: b"", "not a whole .safetensors file"),
    "offsets that overlap": (entry("cls_token", data_offsets=[0, 32]), "is not a whole"),
    "negative offsets": (entry("cls_token", data_offsets=[-32, 0]), "is not a whole"),
    "a shape too large": (entry("cls_token", shape=[10**9, 10**9]), "is not a whole"),
    "no dtype": (entry("cls_token", dtype="F99"), "is not a whole"),
    "no list": (entry("cls_token", shape=8), "is not a whole"),
    "integers": (entry("cls_token", dtype="I32"), "is of int32; weights are of"),
    "more bytes": (lambda c: c + b"x", "is not a whole"),
    "a name twice": (twice, r"in its header, is not a whole JSON file: .*has a key twice"),
}


def test_hostile_safetensors(sound: Path, tmp_path: Path, model: VisionTransformer) -> None:
    """Arrays fill the file without gap or overlap, as the format wants."""
    (tmp_path / "config.json").write_bytes((sound / "config.json").read_bytes())
    path = tmp_path / "model.safetensors"
    for change, match in HEADERS.values():
        path.write_bytes(change((sound / "model.safetensors").read_bytes()))
        check_both(model, path, match)


def test_what_is_no_file_is_refused(sound: Path, tmp_path: Path, model: VisionTransformer) -> None:
    """A pipe would hang, a device never end; what is no Vision Transformer is not filled."""
    os.mkfifo(tmp_path / "pipe.npz")
    (tmp_path / "folder.npz").mkdir()
    (tmp_path / "device.npz").symlink_to("/dev/zero")
    (tmp_path / "link.npz").symlink_to(tmp_path / "nowhere")
    for name in ("pipe.npz", "folder.npz", "device.npz", "link.npz"):
        path = tmp_path / name
        check_refused(partial(keras_vit.weights.load_weights, model, path), "file", (name,))
    other = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    with pytest.raises(TypeError, match=r"fills a VisionTransformer.*Received: Sequential"):
        keras_vit.weights.load_weights(other, sound / "vit.npz")


@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt])
def test_loading_is_all_or_nothing(
    error: type[BaseException],
    sound: Path,
    model: VisionTransformer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An interrupt between two variables leaves the model as it was."""
    before, calls = model.get_weights(), iter(range(100))
    usual = backend.from_numpy_without_copy

    def fails(value: np.ndarray) -> Any:
        if next(calls) == 5:
            raise error
        return usual(value)

    monkeypatch.setattr(backend, "from_numpy_without_copy", fails)
    with pytest.raises(error):
        keras_vit.weights.load_weights(model, sound / "vit.npz")
    assert_same_arrays(model.get_weights(), before)


def test_large_sound_values_are_taken(tmp_path: Path, model: VisionTransformer) -> None:
    """A sum that overflows is no infinity among the values; denormal values are numbers too."""
    large = np.full((8, 3), 3e38, np.float32)
    large[0, 0] = 1e-44
    npz(**{"head/kernel": large})(tmp_path / "vit.npz")
    keras_vit.weights.load_weights(model, tmp_path / "vit.npz")
    np.testing.assert_array_equal(model.get_layer("head").kernel, large)
