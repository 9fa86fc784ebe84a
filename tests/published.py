"""Checkpoints in the published layout and images, by the rule behind the golden numbers.

The arrays in `tests/golden/` come from the original JAX code (google-research/vision_transformer,
commit c6de1e53, float32, CPU) run on exactly these weights and images.
"""

import json
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy

from keras_vit.config import ViTConfig
from keras_vit.weights.layouts import original_rows

GOLDEN = Path(__file__).parent / "golden"
TABLES = json.loads((GOLDEN / "tables.json").read_text(encoding="utf-8"))
MODERN = GOLDEN / "modern"  # folders of timm and transformers, one a family of models

Change = Callable[[dict[str, np.ndarray], dict[str, Any]], Any]

# Names of published files, which number the modules of a block one after another.
TO_LINEN = (
    ("LayerNorm_2", "LayerNorm_1"),
    ("MultiHeadDotProductAttention_1", "MultiHeadDotProductAttention_0"),
    ("MlpBlock_3", "MlpBlock_0"),
)


def in_tuples(fields: dict[str, Any]) -> dict[str, Any]:
    """Fields of a config as JSON has them, with the tuples that they are."""
    return {name: tuple(each) if isinstance(each, list) else each for name, each in fields.items()}


def array(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Returns the array of that name: a normal one seeded by the name, scaled by its role."""
    generator = np.random.default_rng(zlib.crc32(name.encode()))
    normal = generator.standard_normal(shape, dtype=np.float32)
    leaf = name.rsplit("/")[-1]
    if leaf == "kernel":
        in_heads = name.rsplit("/")[-2] in ("query", "key", "value")
        return normal / np.float32(np.sqrt(shape[0] if in_heads else np.prod(shape[:-1])))
    if leaf == "scale":
        return 1 + np.float32(0.1) * normal
    return np.float32(0.02) * normal


def arrays(config: ViTConfig) -> dict[str, Any]:
    """Returns every array of a checkpoint for this config, under the published names."""
    return {
        name: array(name, shape)
        for row in original_rows(config)
        for name, shape in zip(row.names, row.shapes, strict=True)
    }


def linen(named: dict[str, Any]) -> dict[str, Any]:
    """Renames as newer Flax numbers the modules of a block: per class."""
    renamed = {}
    for name, value in named.items():
        for old, new in TO_LINEN if name.startswith("Transformer/") else ():
            name = name.replace(f"/{old}/", f"/{new}/")
        renamed[name] = value
    return renamed


def write(path: Path, config: ViTConfig) -> Path:
    np.savez(path, **arrays(config))
    return path


def rewritten(family: str, folder: Path, change: Change) -> Path:
    """Returns a copy of a family's folder, in `folder`, with other arrays or settings."""
    copy = Path(shutil.copytree(MODERN / family, folder / family))
    arrays = safetensors.numpy.load_file(copy / "model.safetensors")
    settings = json.loads((copy / "config.json").read_text())
    change(arrays, settings)
    whole = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    safetensors.numpy.save_file(whole, copy / "model.safetensors")
    (copy / "config.json").write_text(json.dumps(settings))
    return copy


def write_shards(folder: Path, *, count: int) -> Path:
    """Puts a folder's model.safetensors into shards, as its libraries do; returns their index."""
    whole = folder / "model.safetensors"
    arrays = safetensors.numpy.load_file(whole)
    whole.unlink()
    places: dict[str, str] = {}
    for shard in range(count):
        names = sorted(arrays)[shard::count]
        file = f"model-{shard + 1:05}-of-{count:05}.safetensors"
        safetensors.numpy.save_file({name: arrays[name] for name in names}, folder / file)
        places |= dict.fromkeys(names, file)
    size = sum(array.nbytes for array in arrays.values())
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {"total_size": size}, "weight_map": places}))
    return index


def images(config: ViTConfig) -> np.ndarray:
    """Returns two images in [-1, 1] of the config's input shape."""
    generator = np.random.default_rng(zlib.crc32(b"image"))
    return generator.uniform(-1, 1, (2, *config.input_shape)).astype(np.float32)
