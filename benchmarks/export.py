"""Times every exported artefact and the live model: latency of one image, throughput of eight.

    python -m benchmarks.export --variant B/16 --threads 1 --rounds 5
    python -m benchmarks.export --weights hf://facebook/dinov2-with-registers-base --threads 2

The contenders take turns, so a busy machine slows down all of them; figures are medians. TFLite
files take one image at a time, so their throughput is that of eight calls. "onnx by tf2onnx" and
"tflite of the layers" are the same network, converted from TensorFlow and from the Keras layers, to
compare with what this package writes itself. OpenVINO runs if it is installed.
"""

import argparse
import dataclasses
import functools
import importlib.metadata
import importlib.util
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

BATCH = 8
_OF_TFLITE = ("tflite", "tflite-fp16", "tflite-int8", "tflite-int8-weights")
_OF_ONNX = ("onnx", "onnx-fp16", "onnx-int8", "onnx-int8-weights")
FORMATS = ("savedmodel", *_OF_TFLITE, *_OF_ONNX)
RUNTIMES = {
    "savedmodel": ", session",
    **dict.fromkeys(_OF_ONNX, ", onnxruntime"),
    **dict.fromkeys(_OF_TFLITE, ", LiteRT"),
}
CONTENDERS = (
    "live model",
    *(f"{name}{RUNTIMES[name]}" for name in FORMATS),
    "tflite of the layers, LiteRT",
    "onnx by tf2onnx, onnxruntime",
    "onnx, OpenVINO",
)
PACKAGES = (
    "tensorflow",
    "keras",
    "onnxruntime",
    "ai-edge-litert",
    "ai-edge-quantizer",
    "tf2onnx",
    "openvino",
)

Runner = Callable[[np.ndarray], Any]


def main() -> None:
    """Exports the artefacts, times them, and prints a table or JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--variant", default="B/16", help="with random weights (%(default)s)")
    parser.add_argument("--image-size", type=int, default=224)
    parser.add_argument("--weights", help="a model that keras_vit.load takes, instead")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", nargs="+", choices=CONTENDERS, default=list(CONTENDERS))
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    # Before any runtime starts: each starts as many threads as there are cores to use.
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: options.threads])
    with tempfile.TemporaryDirectory() as folder:
        runners = make_runners(Path(folder), options)
        generator = np.random.default_rng(0)
        shape = (BATCH, *options.input_shape)
        images = generator.integers(0, 256, shape).astype(np.float32)
        figures = measure(runners, images, rounds=options.rounds)
    report(figures, options)


def make_runners(folder: Path, options: argparse.Namespace) -> dict[str, Runner]:
    """Exports a model with random weights and opens the artefacts of `options.only`."""
    import keras

    import keras_vit
    from keras_vit.exporting import export, rebuild

    if options.weights is None:
        model = make_model(options.variant, options.image_size)
    else:
        model = keras_vit.load(options.weights, classifier_activation=None)
    options.input_shape = model.input_shape[1:]
    contenders, threads = options.only, options.threads
    formats = [name for name in FORMATS if f"{name}{RUNTIMES[name]}" in contenders]
    if "onnx, OpenVINO" in contenders and "onnx" not in formats:
        formats.append("onnx")
    paths = {}
    if formats:
        artefacts = export(model, folder / "model", formats=formats, verify=False)
        paths = {artefact.format: artefact.path for artefact in artefacts}
    layers = dataclasses.replace(rebuild.rebuild(model), config=None)

    def edge(name: str) -> Runner:
        return _tflite(paths[name], threads)

    def cloud(name: str) -> Runner:
        return _onnx(paths[name], threads)

    openers: dict[str, Callable[[], Runner]] = {
        "live model": lambda: model.predict_on_batch,
        "savedmodel, session": lambda: _savedmodel(paths["savedmodel"]),
        "onnx by tf2onnx, onnxruntime": lambda: _converted_onnx(layers, folder, threads),
        "onnx, OpenVINO": lambda: _openvino(paths["onnx"], threads),
        "tflite of the layers, LiteRT": lambda: _converted_tflite(layers, folder, threads),
        **{f"{name}, LiteRT": functools.partial(edge, name) for name in _OF_TFLITE},
        **{f"{name}, onnxruntime": functools.partial(cloud, name) for name in _OF_ONNX},
    }
    runners = {
        name: openers[name]() for name in CONTENDERS if name in contenders and _is_installed(name)
    }
    keras.backend.clear_session()
    return runners


def make_model(variant: str, size: int) -> Any:
    """Makes a model of pixels with random weights that keep activations of order 1."""
    import keras_vit

    config = dataclasses.replace(
        keras_vit.variant(variant), input_shape=(size, size, 3), include_preprocessing=True
    )
    model = keras_vit.VisionTransformer(config)
    generator = np.random.default_rng(0)
    for weight in model.trainable_variables:
        fan_in = np.prod(weight.shape[:-1]) if weight.name == "kernel" else 100
        normal = generator.standard_normal(weight.shape, dtype=np.float32) / np.sqrt(fan_in)
        weight.assign(normal + (weight.name == "gamma"))
    return model


def measure(
    runners: dict[str, Runner], images: np.ndarray, *, rounds: int
) -> dict[str, dict[str, float]]:
    """Returns the median milliseconds of one image, and images per second of a batch."""
    times: dict[str, dict[int, list[float]]] = {name: {1: [], BATCH: []} for name in runners}
    for turn in range(rounds + 1):
        for name, run in runners.items():
            for size in (1, BATCH):
                start = time.perf_counter()
                run(images[:size])
                if turn:  # the first turn warms up
                    times[name][size].append(time.perf_counter() - start)
    return {
        name: {
            "ms": 1000 * statistics.median(seconds[1]),
            "images_per_second": BATCH / statistics.median(seconds[BATCH]),
        }
        for name, seconds in times.items()
    }


def report(figures: dict[str, dict[str, float]], options: argparse.Namespace) -> None:
    """Prints the figures with the options, the machine and the versions."""
    settings = {
        "image_size": options.input_shape[0],
        "threads": options.threads,
        "rounds": options.rounds,
        **about(options.weights or options.variant),
    }
    if options.json:
        print(json.dumps({**settings, "figures": figures}))
        return
    print(", ".join(f"{key} {value}" for key, value in settings.items()))
    print(f"{'':40}{'ms, batch 1':>12}{'images/s, batch 8':>20}")
    for name, each in figures.items():
        print(f"{name:40}{each['ms']:>12.1f}{each['images_per_second']:>20.1f}")


def about(model: str) -> dict[str, str]:
    """Returns what a figure has to say: the model, the machine, the date and the versions."""
    versions = {}
    for package in PACKAGES:
        if importlib.util.find_spec(package.replace("-", "_")):
            versions[package] = importlib.metadata.version(package)
    machine = f"{platform.machine()}, {_processor()}"
    return {"model": model, "machine": machine, "date": time.strftime("%Y-%m-%d"), **versions}


def _savedmodel(path: Path) -> Runner:
    from keras_vit.exporting.clean import runners

    model = runners.SavedModelRunner(path)
    return lambda images: model.run("image_tensor", {"images": images.astype(np.uint8)})


def _onnx(path: Path, threads: int) -> Runner:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    session = onnxruntime.InferenceSession(str(path), options)
    return lambda images: session.run(["logits"], {"images": images})


def _tflite(path: Path, threads: int) -> Runner:
    from ai_edge_litert import interpreter as litert

    runner = litert.Interpreter(str(path), num_threads=threads).get_signature_runner()
    return lambda images: [runner(images=images[place : place + 1]) for place in range(len(images))]


def _converted_onnx(layers: Any, folder: Path, threads: int) -> Runner:
    import onnx

    from keras_vit.exporting import onnx_files

    onnx.save_model(onnx_files.convert_to_onnx(layers), str(folder / "converted.onnx"))
    return _onnx(folder / "converted.onnx", threads)


def _converted_tflite(layers: Any, folder: Path, threads: int) -> Runner:
    from keras_vit.exporting import rebuild, tflite

    about = rebuild.describe(layers, name="converted", labels=())
    tflite.write(layers, {"tflite": folder / "converted.tflite"}, about=about)
    return _tflite(folder / "converted.tflite", threads)


def _is_installed(contender: str) -> bool:
    needs = {"onnx by tf2onnx, onnxruntime": "tf2onnx", "onnx, OpenVINO": "openvino"}
    return contender not in needs or importlib.util.find_spec(needs[contender]) is not None


def _openvino(path: Path, threads: int) -> Runner:
    import openvino

    settings = {"INFERENCE_NUM_THREADS": threads, "PERFORMANCE_HINT": "LATENCY"}
    compiled = openvino.Core().compile_model(str(path), "CPU", settings)
    return lambda images: compiled(images)


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))


if __name__ == "__main__":
    main()
