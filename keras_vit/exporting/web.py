"""Writes a folder with a page that classifies images in a browser alone, by ONNX Runtime Web.

The model's graph takes an image of any size as a canvas has it, and resizes and scales it itself:
the page adds nothing to compute, and the checks of the exporter run the whole of it.
"""

import base64
import hashlib
import os
import shutil
import subprocess
import tarfile
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from keras_vit import atomic, pages
from keras_vit.exporting import description, onnx_files
from keras_vit.exporting.rebuild import Exportable
from keras_vit.weights import download

if TYPE_CHECKING:
    import onnx

PAGE, MODEL, INPUT = "index.html", "model.onnx", "rgba"
PREPARING, PREPARED = "prepare_", "prepared"  # its nodes, and what they make for the network
# onnxruntime-web on the npm registry, and the integrity that the registry states for it.
PACKAGE, VERSION = "onnxruntime-web", "1.30.0"
INTEGRITY = (
    "sha512-q0y+JrrtukXSzsBWEMccVfqX25LRmosXHF+CaRJmg8pZ"
    "ClzcV7svNc4rKY3jL02Vb7QmRMDs1SigqR4CXAfKYQ=="
)
ARCHIVE = f"{PACKAGE}-{VERSION}.tgz"
_PACK = f"npm pack {PACKAGE}@{VERSION}"
# What the page loads: the module, and the program in WebAssembly with what starts it.
RUNTIME = ("ort.wasm.min.mjs", "ort-wasm-simd-threaded.mjs", "ort-wasm-simd-threaded.wasm")
LARGEST = onnx_files.LARGEST  # bytes of weights: one file, in the 4 GiB that WebAssembly addresses
MOST_PIXELS = 50_000_000  # of an image, for the same reason
_NPM_SECONDS = 600
_TOP = 5


def check(exportable: Exportable) -> None:
    """Raises a ValueError for a model that no page can run."""
    height, width, channels = exportable.image_shape
    if exportable.activation is None:
        raise ValueError(
            "The web page names classes, and this model has no classifier; export it as onnx."
        )
    if channels != 3:
        raise ValueError(
            "The web page reads images of 3 channels; export this model as onnx. Received: a model "
            f"for images of shape ({height}, {width}, {channels})."
        )
    if exportable.parameter_bytes > LARGEST:
        raise ValueError(
            f"A browser runs models of up to {LARGEST} bytes of weights; export this one as onnx. "
            f"Received: {exportable.parameter_bytes} bytes."
        )


def find_runtime(place: str | os.PathLike[str] | None = None) -> Path:
    """Returns the npm package onnxruntime-web as a file whose SHA-512 was checked.

    Args:
        place: the file, or a folder with it; None for the cache, which npm fills the first time.

    Raises:
        FileNotFoundError: it is not at `place`.
        ImportError: it is not in the cache, and npm is not installed or cannot fetch it.
        ValueError: it is not what the registry published.
    """
    if place is not None:
        file = Path(place)
        file = file / ARCHIVE if file.is_dir() else file
        if not file.is_file():
            raise FileNotFoundError(
                f"There is no {str(file)!r}; run {_PACK} --pack-destination FOLDER, and give "
                "FOLDER."
            )
        return _checked(file)
    cached = download.cache_folder() / "npm" / ARCHIVE
    if not cached.is_file():
        _fetch(cached)
    return _checked(cached)


def integrity(file: Path) -> str:
    """Returns the SHA-512 of a file, as registries write it."""
    with file.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha512").digest()
    return f"sha512-{base64.b64encode(digest).decode()}"


def write_web(
    exportable: Exportable, folder: Path, *, about: description.Description, runtime: Path
) -> None:
    """Writes the model, the page and the runtime into an existing folder.

    Args:
        exportable: the rebuilt model, a classifier.
        folder: where to write.
        about: what the model says of itself: its name is in the page's title.
        runtime: what `find_runtime` returns.
    """
    import onnx

    model, labels = make_model(exportable), about.labels
    description.describe_onnx(model, about)
    onnx.save_model(model, str(folder / MODEL))
    with tarfile.open(runtime) as archive:
        for file in RUNTIME:
            member = archive.extractfile(f"package/dist/{file}")
            if member is None:
                raise ValueError(f"{runtime} has no file {file}.")
            (folder / file).write_bytes(member.read())
    height, width, _ = exportable.image_shape
    pages.write_page(
        folder / PAGE,
        "web.html",
        title=f"Try {about.name}",
        styles=("upload.css",),
        scripts=("upload.js", "web.js"),
        allowed={
            "script-src": "'self' 'wasm-unsafe-eval'",
            "connect-src": "'self'",
            "img-src": "data: blob:",
        },
        summary=f"The model takes images {width} pixels wide and {height} high, and knows "
        f"{len(labels)} classes.",
        settings={
            "model": MODEL,
            "runtime": RUNTIME[0],
            "input": INPUT,
            "labels": list(labels),
            "top": min(_TOP, len(labels)),
            "most_pixels": MOST_PIXELS,
        },
    )


def make_model(exportable: Exportable) -> "onnx.ModelProto":
    """Makes an ONNX model of one image of any size: `rgba`, uint8 (height, width, 4).

    Outputs `logits` and `probabilities` (1, classes). Alpha is not read: a canvas has laid the
    image on white.
    """
    import onnx

    model = onnx_files.to_onnx(exportable)
    return onnx.compose.merge_models(
        _preprocessing(exportable, model),
        model,
        io_map=[(PREPARED, "images")],
        outputs=["logits", "probabilities"],
    )


def _preprocessing(exportable: Exportable, model: "onnx.ModelProto") -> "onnx.ModelProto":
    """Makes the graph from an image to the input of a model, of the same opset."""
    import onnx
    from onnx.helper import make_node, make_tensor_value_info

    height, width, _ = exportable.image_shape
    numbers = {"start": [0], "end": [3], "axis": [2], "front": [0], "size": [1, 3, height, width]}
    weights: dict[str, np.ndarray] = {
        name: np.array(value, np.int64) for name, value in numbers.items()
    }
    nodes = [
        make_node("Slice", [INPUT, "start", "end", "axis"], ["rgb"]),
        make_node("Transpose", ["rgb"], ["planes"], perm=(2, 0, 1)),
        make_node("Cast", ["planes"], ["floats"], to=onnx.TensorProto.FLOAT),
        make_node("Unsqueeze", ["floats", "front"], ["batched"]),
        make_node("Resize", ["batched", "", "", "size"], ["resized"], mode="linear"),
    ]
    if exportable.input_config.antialias:  # at the borders, as TensorFlow and Pillow do
        nodes[-1].attribute.extend(
            onnx.helper.make_attribute(name, 1) for name in ("antialias", "exclude_outside")
        )
    last = "resized"
    if exportable.takes == "normalized":
        for kind, name, value in zip(
            ("Mul", "Add"), ("scale", "offset"), exportable.rescaling, strict=True
        ):
            weights[name] = np.broadcast_to(np.float32(value), (3,)).reshape(3, 1, 1)
            nodes.append(make_node(kind, [last, name], [f"with_{name}"]))
            last = f"with_{name}"
    nodes.append(make_node("Transpose", [last], [PREPARED], perm=(0, 2, 3, 1)))
    for index, node in enumerate(nodes):
        node.name = f"{PREPARING}{index}"
    graph = onnx.helper.make_graph(
        nodes,
        "prepare",
        [make_tensor_value_info(INPUT, onnx.TensorProto.UINT8, ("height", "width", 4))],
        [make_tensor_value_info(PREPARED, onnx.TensorProto.FLOAT, (1, height, width, 3))],
        [onnx.numpy_helper.from_array(np.ascontiguousarray(v), n) for n, v in weights.items()],
    )
    return onnx.helper.make_model(
        graph, opset_imports=model.opset_import, ir_version=model.ir_version
    )


def _fetch(cached: Path) -> None:
    """Has npm fetch the package into the cache."""
    program = shutil.which("npm")
    missing = (
        f"The web page runs the model by {PACKAGE} {VERSION}, which is not here and which npm "
        f"fetches; run {_PACK} --pack-destination FOLDER where npm is, and give --web-runtime "
        "FOLDER"
    )
    if program is None:
        raise ImportError(f"{missing} (npm is not installed).")
    with tempfile.TemporaryDirectory(prefix="keras-vit-") as name:
        command = [program, "pack", f"{PACKAGE}@{VERSION}", "--pack-destination", name]
        try:
            subprocess.run(
                command, cwd=name, capture_output=True, text=True, check=True, timeout=_NPM_SECONDS
            )
        except (subprocess.SubprocessError, OSError) as error:
            said = (getattr(error, "stderr", None) or str(error)).strip().splitlines()
            raise ImportError(f"{missing} (npm said: {said[0] if said else 'nothing'}).") from error
        file = _checked(Path(name) / ARCHIVE)
        cached.parent.mkdir(parents=True, exist_ok=True)
        with atomic.whole_file(cached) as temporary:
            shutil.copyfile(file, temporary)


def _checked(file: Path) -> Path:
    """Returns the file if it is what the registry published."""
    if integrity(file) != INTEGRITY:
        raise ValueError(
            f"{file} is not {PACKAGE} {VERSION} as the npm registry published it: its integrity is "
            f"{integrity(file)}, and not {INTEGRITY}; delete it, and run {_PACK}."
        )
    return file
