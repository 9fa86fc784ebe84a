"""Attacks weight files of every format: damages their bytes, or their parts by the format."""

import copy
import hashlib
import io
import json
import struct
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import keras
import numpy as np
import safetensors.numpy

import keras_vit
from campaigns.mutations import mutate
from campaigns.oracle import Case
from keras_vit.weights.layouts import original_rows

CONFIG = keras_vit.ViTConfig(
    input_shape=(8, 8, 3),
    patch_size=4,
    hidden_dim=8,
    mlp_dim=16,
    num_heads=2,
    num_layers=1,
    classes=3,
)
# timm's name for each path.
_TIMM = {
    "patch_encoder/class_token": "cls_token",
    "patch_encoder/position_embedding": "pos_embed",
    "patch_encoder/projection": "patch_embed.proj",
    "block_0/attention_norm": "blocks.0.norm1",
    "block_0/attention/qkv": "blocks.0.attn.qkv",
    "block_0/attention/out": "blocks.0.attn.proj",
    "block_0/mlp_norm": "blocks.0.norm2",
    "block_0/mlp/fc1": "blocks.0.mlp.fc1",
    "block_0/mlp/fc2": "blocks.0.mlp.fc2",
    "encoder_norm": "norm",
    "head": "head",
}
_SETTINGS = {
    "architecture": "vit_tiny_patch16_224",
    "num_classes": 3,
    "model_args": {"num_heads": 2, "img_size": 8, "act_layer": "gelu_tanh"},
    "pretrained_cfg": {"mean": [0.5] * 3, "std": [0.5] * 3, "input_size": [3, 8, 8]},
}
_ODD_VALUES: tuple[Any, ...] = (
    *(None, True, -1, 0, 1, 2, 3, 7, 10**6, 10**9, 10**30, 10**4200, 0.5, 1e308, -1e-300),
    *(float("nan"), float("inf"), "", "x", "gelu", "é\x1b[31m", "x" * 100_000, " " * 100_000),
    *([], {}, [[]], [2], [8, 8, 3], [0, 0, 0], [20000, 20000, 3], [10**9] * 3, {"a": {}}),
    *([1] * 10_000, {"class_name": "Lambda"}),
)
_ODD_NAMES = (
    *("params/cls", "cls", "opt/target/head/bias", "pos_embedding", "head/kernel"),
    *("Transformer/encoderblock_999999999/x", "Transformer/encoderblock_1/x", "x" * 5000),
    *(
        "block999999999/unit1/x",
        "conv_root/kernel",
        "../../etc/passwd",
        "Transformer/encoderblock/x",
    ),
    *("vit.cls_token", "cls_token", "blocks.999999999.attn.proj.weight", "blocks.1.norm1.weight"),
    *("layers/transformer_block_99999999/x", "layers/dense/vars/0", "\x1b[31m", ""),
)
_ODD_SHAPES = (
    *("(1000000000, 0)", "(0,)", "()", "(-1,)", "(3,)", "(1, 1000001, 8)", "(2, 5, 8)", "(True,)"),
    *("(2000000, 2000000)", "(" + "1," * 3000 + ")", "(9223372036854775808,)", "(8.0,)", "('a',)"),
    "(" * 3000,
)
_ODD_TYPES = (
    "<f2",
    "<f8",
    ">f4",
    "<i4",
    "|b1",
    "|O",
    "<c8",
    "<U4",
    "|V2",
    "|V4",
    "<m8[s]",
    "x" * 50,
)


class Campaign:
    """Attacks on all formats through `weights.load_weights`, or at times `keras_vit.load`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._model = keras_vit.VisionTransformer(CONFIG)
        generator = np.random.default_rng(0)
        for variable in self._model.weights:
            variable.assign(generator.standard_normal(variable.shape).astype(np.float32))
        self._arrays = _published(self._model)
        self._write_sound()
        self._zero = [np.zeros(variable.shape, np.float32) for variable in self._model.weights]
        self._model.set_weights(self._zero)
        self._sound = {
            (file, call): _digest(self._act(file, call)())
            for file in ("vit.npz", "model.safetensors", "vit.weights.h5", "vit.keras")
            for call in ("load", "weights.load_weights")
            if (file, call) != ("vit.weights.h5", "load")
        }

    def case(self, rng: np.random.Generator) -> Case:
        """Makes an attack on one of the formats."""
        self._restore()
        attacks: tuple[Callable[[np.random.Generator], tuple[str, str, bool]], ...] = (
            *(self._bytes, self._bytes, self._member, self._npz_names, self._npz_header),
            *(self._values, self._json, self._json, self._header, self._h5),
        )
        file, what, has_checksum = attacks[rng.integers(len(attacks))](rng)
        is_load = rng.integers(8) == 0 and file != "vit.weights.h5"
        call = "load" if is_load else "weights.load_weights"
        act = self._act(file, call)
        return Case(
            what=f"{call} of {file}: {what}",
            act=lambda: _digest(act()),
            sound=self._sound[file, call],
            names=(file, *(["config.json"] if file == "model.safetensors" else [])),
            has_checksum=has_checksum,
        )

    def _act(self, file: str, call: str) -> Callable[[], Any]:
        path = self._folder / file

        def load_model() -> Any:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return keras_vit.load(path).get_weights()

        def load_weights() -> Any:
            try:
                keras_vit.weights.load_weights(self._model, path)
            except Exception as error:
                if any(np.any(value) for value in self._model.get_weights()):
                    raise RuntimeError("the model has changed") from error
                raise
            values = self._model.get_weights()
            self._model.set_weights(self._zero)
            return values

        return load_model if call == "load" else load_weights

    def _write_sound(self) -> None:
        keras_vit.weights.save_npz(self._model, self._folder / "vit.npz")
        self._model.save(self._folder / "vit.keras")
        self._model.save_weights(self._folder / "vit.weights.h5")
        tensors = {}
        for variable in self._model.weights:
            path, _, leaf = variable.path.rpartition("/")
            value = keras.ops.convert_to_numpy(variable)
            if variable.path in _TIMM:
                tensors[_TIMM[variable.path]] = value
                continue
            if path == "patch_encoder/projection" and leaf == "kernel":
                value = value.reshape(4, 4, 3, 8).transpose(3, 2, 0, 1)
            kind = "weight" if leaf in ("kernel", "gamma") else "bias"
            tensors[f"{_TIMM[path]}.{kind}"] = np.ascontiguousarray(
                value if value.ndim == 4 else value.T
            )
        safetensors.numpy.save_file(tensors, self._folder / "model.safetensors")
        (self._folder / "config.json").write_text(json.dumps(_SETTINGS))
        self._files = {path.name: path.read_bytes() for path in self._folder.iterdir()}
        self._changed: set[str] = set()

    def _restore(self) -> None:
        for name in self._changed:
            (self._folder / name).write_bytes(self._files[name])
        self._changed.clear()

    def _write(self, name: str, content: bytes) -> None:
        (self._folder / name).write_bytes(content)
        self._changed.add(name)

    def _bytes(self, rng: np.random.Generator) -> tuple[str, str, bool]:
        name = str(rng.choice(sorted(self._files)))
        content, what = mutate(self._files[name], rng)
        self._write(name, content)
        file = "model.safetensors" if name == "config.json" else name
        return file, f"{name}: {what}", file in ("vit.npz", "vit.keras")

    def _member(self, rng: np.random.Generator) -> tuple[str, str, bool]:
        """Damages a member of an archive before it is packed, so its checksum is correct."""
        name = str(rng.choice(["vit.npz", "vit.keras"]))
        members = _members(self._files[name])
        inside = str(rng.choice(sorted(members)))
        members[inside], what = mutate(members[inside], rng)
        self._write(name, _archive(members.items(), rng))
        return name, f"{inside} inside: {what}", False

    def _npz_names(self, rng: np.random.Generator) -> tuple[str, str, bool]:
        """Doubles, removes, prefixes or replaces names."""
        arrays = [(name, _npy(value)) for name, value in self._arrays.items()]
        place, odd = int(rng.integers(len(arrays))), str(rng.choice(_ODD_NAMES))
        name, content = arrays[place]
        what = str(
            rng.choice(["doubled", "renamed", "added", "removed", "prefixed", "all prefixed"])
        )
        if what == "doubled":
            arrays.append((name, _npy(self._arrays[name] * 2)))
        elif what == "renamed":
            arrays[place] = (odd, content)
        elif what == "added":
            arrays.append((odd, content))
        elif what == "removed":
            del arrays[place]
        elif what == "prefixed":
            arrays.append((f"params/{name}", content))
        else:
            arrays = [(f"params/{n}", c) for n, c in arrays] + [(name, content)] * int(
                rng.integers(2)
            )
        self._write_npz(arrays, rng)
        return "vit.npz", f"{name[:60]!r} {what} ({odd[:40]!r})", False

    def _npz_header(self, rng: np.random.Generator) -> tuple[str, str, bool]:
        """Declares another shape or type of an array than its bytes have."""
        name = str(rng.choice(sorted(self._arrays)))
        shape, kind = str(self._arrays[name].shape), "<f4"
        if rng.integers(2):
            shape = str(rng.choice(_ODD_SHAPES))
        else:
            kind = str(rng.choice(_ODD_TYPES))
        content = _header(shape, kind) + self._arrays[name].tobytes()
        if rng.integers(8) == 0:  # a bomb: zeros that compress a thousandfold, no square grid
            content = _header("(1, 1000003, 8)", "<f4") + bytes(32 * 1000003)
        arrays = {n: _npy(value) for n, value in self._arrays.items()} | {name: content}
        self._write_npz(list(arrays.items()), rng)
        return "vit.npz", f"{name} declared as {kind} {shape[:60]}", False

    def _values(self, rng: np.random.Generator) -> tuple[str, str, bool]:
        """Puts values or types into an array that no weight has."""
        name = str(rng.choice(sorted(self._arrays)))
        value = self._arrays[name].astype(rng.choice(["f2", "f4", "f8"]))
        odd = rng.choice([np.nan, np.inf, -np.inf, 1e300, 1e-300, 3e38])
        with np.errstate(over="ignore"):
            value.reshape(-1)[rng.integers(value.size)] = odd
        if rng.integers(4) == 0:
            value = self._arrays[name].astype(rng.choice(["i4", "?", "c8", "u1", "U3"]))
        arrays = {n: _npy(v) for n, v in self._arrays.items()} | {name: _npy(value)}
        self._write_npz(list(arrays.items()), rng)
        return "vit.npz", f"{name} of {value.dtype} with {odd}", False

    def _json(self, rng: np.random.Generator) -> tuple[str, str, bool]:
        """Changes a settings file, which remains correct JSON."""
        name = str(rng.choice(["config.json", "vit.keras"]))
        if name == "vit.keras":
            members = _members(self._files[name])
            members["config.json"], what = _changed(members["config.json"], rng)
            self._write(name, _archive(members.items(), rng))
            return name, f"config.json inside: {what}", False
        content, what = _changed(self._files[name], rng)
        self._write(name, content)
        return "model.safetensors", f"{name}: {what}", False

    def _header(self, rng: np.random.Generator) -> tuple[str, str, bool]:
        """Changes the header of a .safetensors file."""
        content = self._files["model.safetensors"]
        length = int.from_bytes(content[:8], "little")
        header, what = _changed(content[8 : 8 + length], rng)
        if rng.integers(4) == 0:
            entry = json.dumps({"dtype": "F32", "shape": [0], "data_offsets": [0, 0]})
            odd = json.dumps(str(rng.choice(_ODD_NAMES)))
            header, what = header[:1] + f"{odd}:{entry},".encode() + header[1:], f"{odd[:40]} added"
        data = content[8 + length :]
        self._write("model.safetensors", struct.pack("<Q", len(header)) + header + data)
        return "model.safetensors", f"header: {what}", False

    def _h5(self, rng: np.random.Generator) -> tuple[str, str, bool]:
        """Puts what Keras never writes into an HDF5 file, half of them in a .keras file."""
        buffer = io.BytesIO(self._files["vit.weights.h5"])
        odd = list(_HDF5)[rng.integers(len(_HDF5))]
        with h5py.File(buffer, "a") as file:
            names: list[str] = []
            file.visititems(
                lambda n, node: names.append(n) if isinstance(node, h5py.Dataset) else None
            )
            name = str(rng.choice(names))
            value = file[name][()]
            if odd != "cycle":
                del file[name]
            _HDF5[odd](file, name, value, str(self._folder / "config.json"))
        what = f"{name}: {odd}"
        if rng.integers(2):
            self._write("vit.weights.h5", buffer.getvalue())
            return "vit.weights.h5", what, False
        members = _members(self._files["vit.keras"]) | {"model.weights.h5": buffer.getvalue()}
        self._write("vit.keras", _archive(members.items(), rng))
        return "vit.keras", what, False

    def _write_npz(self, arrays: list[tuple[str, bytes]], rng: np.random.Generator) -> None:
        self._write("vit.npz", _archive([(f"{n}.npy", content) for n, content in arrays], rng))


def _virtual(file: Any, name: str, value: np.ndarray, other: str) -> None:
    layout = h5py.VirtualLayout(value.shape, value.dtype)
    layout[...] = h5py.VirtualSource(other, "x", value.shape)
    file.create_virtual_dataset(name, layout)


def _cycle(file: Any, name: str, value: np.ndarray, other: str) -> None:
    file[f"{name.rpartition('/')[0]}/again"] = file["layers"]


# Objects that Keras never writes: (file, name, the original value, the path of another file).
_HDF5: dict[str, Callable[[Any, str, np.ndarray, str], object]] = {
    "external storage": lambda f, n, v, other: f.create_dataset(
        n, v.shape, v.dtype, external=[(other, 0, v.nbytes)]
    ),
    "virtual": _virtual,
    "soft link": lambda f, n, v, other: f.__setitem__(n, h5py.SoftLink("/layers")),
    "external link": lambda f, n, v, other: f.__setitem__(n, h5py.ExternalLink(other, "/x")),
    "cycle": _cycle,
    "never written": lambda f, n, v, other: f.create_dataset(n, v.shape, v.dtype),
    "lzf": lambda f, n, v, other: f.create_dataset(n, data=v, chunks=v.shape, compression="lzf"),
    "bomb": lambda f, n, v, other: f.create_dataset(
        n, (1, 10**6, 8), "f4", chunks=(1, 10**5, 8), compression="gzip"
    ),
    "references": lambda f, n, v, other: f.create_dataset(n, data=f.ref, dtype=h5py.ref_dtype),
    "text": lambda f, n, v, other: f.create_dataset(n, data="x"),
    "compound": lambda f, n, v, other: f.create_dataset(n, v.shape, [("a", "f4")]),
    "bool": lambda f, n, v, other: f.create_dataset(n, data=v > 0),
    "int": lambda f, n, v, other: f.create_dataset(n, data=v.astype(int)),
    "NaN": lambda f, n, v, other: f.create_dataset(n, data=np.where(v == v.max(), np.nan, v)),
    "empty": lambda f, n, v, other: f.create_dataset(n, data=h5py.Empty("f4")),
    "sides of 0": lambda f, n, v, other: f.create_dataset(n, (0, 10**9), "f4"),
    "group": lambda f, n, v, other: f.create_group(n),
    "type": lambda f, n, v, other: f.__setitem__(n, np.dtype("f4")),
}


def _published(model: keras.Model) -> dict[str, np.ndarray]:
    variables = {v.path: keras.ops.convert_to_numpy(v) for v in model.weights}
    return {
        name: array
        for row in original_rows(CONFIG)
        for name, array in zip(row.names, row.split(variables[row.path]), strict=True)
    }


def _changed(text: bytes, rng: np.random.Generator) -> tuple[bytes, str]:
    """Changes or removes one value of a JSON text."""
    settings = json.loads(text)
    items = list(_items(settings))
    container, key = items[rng.integers(len(items))]
    odd = copy.deepcopy(_ODD_VALUES[rng.integers(len(_ODD_VALUES))])
    what = f"{key!r} = {str(type(odd)) if odd == 10**4200 else repr(odd)[:40]}"
    if rng.integers(8) == 0:
        del container[key]
        what = f"{key!r} removed"
    else:
        container[key] = odd
    content = json.dumps(settings).encode()
    if rng.integers(20) == 0:
        deep = b"[" * 50_000 + b"]" * 50_000
        content, what = content[:-1] + b', "deep": ' + deep + b"}", "nested deeply"
    elif rng.integers(20) == 0:
        content, what = b" " * 3_000_000 + content, "3 MB of spaces"
    return content, what


def _items(value: Any) -> Any:
    """Yields (container, key) of every value at any depth."""
    pairs = value.items() if isinstance(value, dict) else enumerate(value)
    for key, inner in pairs:
        yield value, key
        if isinstance(inner, dict | list):
            yield from _items(inner)


def _members(content: bytes) -> dict[str, bytes]:
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def _archive(members: Any, rng: np.random.Generator) -> bytes:
    buffer, kind = io.BytesIO(), int(rng.choice([zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED]))
    with warnings.catch_warnings(), zipfile.ZipFile(buffer, "w", kind) as archive:
        warnings.simplefilter("ignore")  # doubled names
        for name, content in members:
            archive.writestr(name or "x", content)
    return buffer.getvalue()


def _npy(array: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array)
    return buffer.getvalue()


def _header(shape: str, kind: str) -> bytes:
    text = f"{{'descr': '{kind}', 'fortran_order': False, 'shape': {shape}, }}\n".encode()
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text


def _digest(values: list[np.ndarray]) -> str:
    digest = hashlib.sha256()
    for value in values:
        digest.update(value.tobytes())
    return digest.hexdigest()
