"""Writes the files of a full-size model, or loads and runs one of them, in a process of its own.

    python -m benchmarks.weight_runs write timm dinov2-b14-reg FOLDER
    python -m benchmarks.weight_runs run keras_vit dinov2-b14-reg FOLDER

timm and transformers write what they publish: model.safetensors with the settings beside it, here
with made weights, and reference.npz with images and what the library makes of them. That is its
logits, or its pooled vector. keras_vit writes model.npz, in the original's layout, which timm reads
too. `run` reads a folder by one of them.
"""

import dataclasses
import importlib
import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.worker import answer, memory

Run = Callable[[np.ndarray], np.ndarray]
LIBRARIES = ("timm", "transformers")
WEIGHTS = (".safetensors", ".npz")
_BATCH, _RUNS = 2, 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Model:
    """A published network, by its names in both libraries.

    Attributes:
        timm: timm's name.
        transformers: name of the class in transformers, whose config class has the same stem.
        sizes: arguments of that config.
        answer: the field of the class's output that is its answer.
    """

    timm: str
    transformers: str
    sizes: Mapping[str, Any]
    answer: str = "pooler_output"


def _sizes(width: int, layers: int, heads: int, image: int, patch: int, **more: Any) -> Any:
    names = ("hidden_size", "num_hidden_layers", "num_attention_heads", "image_size", "patch_size")
    values = (width, layers, heads, image, patch)
    return {**dict(zip(names, values, strict=True)), **more}


MODELS: Mapping[str, Model] = {
    "vit-l16": Model(
        timm="vit_large_patch16_224",
        transformers="ViTForImageClassification",
        sizes=_sizes(1024, 24, 16, 224, 16, intermediate_size=4096, num_labels=1000),
        answer="logits",
    ),
    "dinov2-b14": Model(
        timm="vit_base_patch14_dinov2",
        transformers="Dinov2Model",
        sizes=_sizes(768, 12, 12, 518, 14),
    ),
    "dinov2-l14": Model(
        timm="vit_large_patch14_dinov2",
        transformers="Dinov2Model",
        sizes=_sizes(1024, 24, 16, 518, 14),
    ),
    "dinov2-b14-reg": Model(
        timm="vit_base_patch14_reg4_dinov2",
        transformers="Dinov2WithRegistersModel",
        sizes=_sizes(768, 12, 12, 518, 14, num_register_tokens=4),
    ),
    "dinov3-b16": Model(
        timm="vit_base_patch16_dinov3",
        transformers="DINOv3ViTModel",
        sizes=_sizes(768, 12, 12, 224, 16, intermediate_size=3072, num_register_tokens=4),
    ),
    "siglip-so400m": Model(
        timm="vit_so400m_patch14_siglip_224",
        transformers="SiglipVisionModel",
        sizes=_sizes(1152, 27, 16, 224, 14, intermediate_size=4304),
    ),
    "clip-l14": Model(
        timm="vit_large_patch14_clip_quickgelu_224",
        transformers="CLIPVisionModelWithProjection",
        sizes=_sizes(1024, 24, 16, 224, 14, intermediate_size=4096, projection_dim=768),
        answer="image_embeds",
    ),
}


def main() -> None:
    """Does what the arguments say and answers in one line."""
    action, library, name, folder = sys.argv[1:]
    if action == "write":
        _write(library, MODELS[name], Path(folder))
        return
    start = time.perf_counter()
    version = _import(library, MODELS[name])
    imported, before = time.perf_counter(), memory("VmRSS")
    run = _open(library, MODELS[name], Path(folder))
    loaded, peak = time.perf_counter(), memory("VmHWM")
    with np.load(Path(folder) / "reference.npz") as arrays:
        images, expected = arrays["images"], arrays["answer"]
    found = run(images)
    seconds = []
    for _ in range(_RUNS + 1):
        begin = time.perf_counter()
        run(images)
        seconds.append(time.perf_counter() - begin)
    answer(
        {
            "version": version,
            "imports": imported - start,
            "load": loaded - imported,
            "process": loaded - start,
            "memory": peak - before,
            "images_per_second": len(images) / statistics.median(seconds[1:]),
            "difference": float(np.abs(found - expected).max() / np.abs(expected).max()),
        }
    )


def _import(library: str, model: Model) -> str:
    """Imports the library with all that it needs, and returns its version."""
    importlib.import_module("keras" if library == "keras_vit" else "torch")
    package = importlib.import_module(library)
    if library == "transformers":
        getattr(package, model.transformers)  # it imports a class where it is named
    return str(package.__version__)


def _open(library: str, model: Model, folder: Path) -> Run:
    """Loads a folder and reads every weight once, since a mapped file is not loaded before."""
    if library == "keras_vit":
        import keras

        import keras_vit

        ours = keras_vit.load(folder, classifier_activation=None)
        sum(float(keras.ops.sum(weight)) for weight in ours.weights)
        return lambda images: np.asarray(ours.predict_on_batch(images.astype(np.float32)))
    network = _timm(model, folder) if library == "timm" else _transformers(model, folder)
    sum(float(weight.detach().sum()) for weight in network.parameters())
    return _runner(library, network, model, *_pixels(library, folder))


def _timm(model: Model, folder: Path) -> Any:
    import timm

    path = next(file for file in folder.glob("model.*") if file.suffix in WEIGHTS)
    return timm.create_model(model.timm, checkpoint_path=str(path))


def _transformers(model: Model, folder: Path) -> Any:
    import transformers

    return getattr(transformers, model.transformers).from_pretrained(folder)


def _runner(library: str, network: Any, model: Model, mean: Any, deviation: Any) -> Run:
    import torch

    network.eval()

    def run(images: np.ndarray) -> np.ndarray:
        scaled = ((images / 255 - mean) / deviation).astype(np.float32).transpose(0, 3, 1, 2)
        with torch.inference_mode():
            output = network(torch.from_numpy(np.ascontiguousarray(scaled)))
        vector = output if library == "timm" else getattr(output, model.answer)
        return np.asarray(vector.numpy())

    return run


def _pixels(library: str, folder: Path) -> tuple[Any, Any]:
    """Returns the pixels' mean and deviation that the settings say; the original's without any."""
    if (folder / "model.npz").exists():
        return np.array(0.5), np.array(0.5)
    if library == "timm":
        settings = json.loads((folder / "config.json").read_text())["pretrained_cfg"]
        return np.array(settings["mean"]), np.array(settings["std"])
    settings = json.loads((folder / "preprocessor_config.json").read_text())
    return np.array(settings["image_mean"]), np.array(settings["image_std"])


def _write(library: str, model: Model, folder: Path) -> None:
    """Writes a network of made weights as its library publishes it, and its answers."""
    if library == "keras_vit":
        _write_original(model, folder)
        return
    import torch

    torch.manual_seed(0)
    folder.mkdir(parents=True)
    if library == "timm":
        import timm
        from timm.models import save_for_hf

        network = timm.create_model(model.timm)
        _fill(network)
        save_for_hf(network, folder, safe_serialization=True)
        side = network.pretrained_cfg["input_size"][-1]
    else:
        import transformers

        stem = model.transformers.split("Model")[0].split("For")[0]
        config = getattr(transformers, f"{stem}Config")(**model.sizes)
        network = getattr(transformers, model.transformers)(config)
        _fill(network)
        network.save_pretrained(folder)
        settings = {"image_mean": [0.48, 0.46, 0.41], "image_std": [0.27, 0.26, 0.28]}
        (folder / "preprocessor_config.json").write_text(json.dumps(settings))
        side = model.sizes["image_size"]
    images = np.random.default_rng(0).integers(0, 256, (_BATCH, side, side, 3), np.uint8)
    run = _runner(library, network, model, *_pixels(library, folder))
    np.savez(folder / "reference.npz", images=images, answer=run(images))


def _write_original(model: Model, folder: Path) -> None:
    """Writes model.npz; only ViT has that layout."""
    import keras_vit
    from benchmarks.export import make_model

    folder.mkdir(parents=True)
    size = model.sizes["image_size"]
    network = make_model("L/16", size)
    keras_vit.weights.save_npz(network, folder / "model.npz")
    images = np.random.default_rng(0).integers(0, 256, (_BATCH, size, size, 3), np.uint8)
    answer = network.predict_on_batch(images.astype(np.float32))
    np.savez(folder / "reference.npz", images=images, answer=answer)


def _fill(network: Any) -> None:
    """Gives every parameter numbers that keep activations of order 1, none of them zero or one."""
    import torch

    with torch.no_grad():
        for name, weight in network.named_parameters():
            weight.normal_(std=0.1 if weight.ndim < 2 else weight[0].numel() ** -0.5)
            if weight.ndim == 1 and name.endswith("weight"):
                weight.add_(1)


if __name__ == "__main__":
    main()
