"""The formats of an export, a row for each: a new one is a row here, and what writes it.

The command line reads the table for its help, so no framework is imported here.
"""

import dataclasses
import importlib
import importlib.util
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from keras_vit.exporting.clean import Limits

if TYPE_CHECKING:
    from keras_vit.exporting.clean.runners import Runner

RECORD = "verification.json"
MIN_ELEMENTS = 1024  # of a kernel: smaller ones stay float32

# What decides about each format, in standard deviations of the model's outputs. Measured on
# random networks from two blocks to B/16: float32 errors of 4e-6 and at most 2e-5, exact GELU by
# its other formula 2e-4; kernels in float16 2e-3 and 6e-3; in int8 0.09 and 0.4; a constant 1.
_FLOAT = Limits(error=5e-5, largest=5e-4, of_one=5e-4, best=1.0, accuracy=0.0)
_HALF = Limits(error=5e-3, largest=0.03, of_one=0.03, best=1.0, accuracy=0.001)
_HALF_PRODUCTS = Limits(error=0.01, largest=0.06, of_one=0.06, best=1.0, accuracy=0.001)
_INT8 = Limits(error=0.1, largest=0.6, of_one=0.6, best=0.98, accuracy=0.01)
_INT8_WEIGHTS = Limits(error=0.06, largest=0.3, of_one=0.3, best=0.98, accuracy=0.01)
_INT8_FULL = Limits(error=0.2, largest=1.0, of_one=0.8, best=0.98, accuracy=0.01)

_SHARES = {"float32": 1.0, "float16": 0.5, "int8": 0.25}

Kind = Literal["float32", "float16", "int8"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """What is chosen for the files of an export, where it concerns them.

    Attributes:
        top_k: classes in a response of the server.
        batch_size: the fixed number of images in a batch of a TFLite file; delegates want it fixed.
        opset: the version of ONNX's operators; None for the writer's own.
        calibration: images (B, H, W, C) as the original model takes them, to set ranges on.
    """

    top_k: int = 5
    batch_size: int = 1
    opset: int | None = None
    calibration: Any = ()


DEFAULTS = Options()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Format:
    """What an export knows of a format.

    Attributes:
        name: what users call it.
        runtime: what runs it, one of `clean.runners.RUNNERS`.
        writer: the module for all formats of the runtime. Its `write` takes a rebuilt model, the
            path of each format, what the files say of themselves, options, and the kernels that
            stay float32 where others are rounded to int8; it returns the bytes of the weights of
            each. Its `check` raises a ValueError for a model or options that do not fit.
        folder: where its versions are in the directory of an export.
        suffix: what the name of its file has after the model's; "" for a folder.
        main_file: of a folder, the file that it is known by.
        extras: where labels and record are in a version.
        batch_sizes: to check it with, up to `samples.COUNT`; 0 asks it about no images.
        limits: what decides about it.
        weights: what most of them are stored in.
        products: what they are multiplied in.
        needs_images: whether it takes them to be written.
        packages: to install to write it.
    """

    name: str
    runtime: Literal["savedmodel", "tflite", "onnx"]
    writer: str
    folder: str = ""
    suffix: str = ""
    main_file: str = ""
    extras: str = ""
    batch_sizes: Sequence[int] = (1, 2, 3, 8, 0)
    limits: Limits = _FLOAT
    weights: Kind = "float32"
    products: Kind = "float32"
    needs_images: bool = False
    packages: Sequence[str] = ()

    @property
    def has_signatures(self) -> bool:
        """Whether it has several, of files and pixels; otherwise it takes what the model takes."""
        return not self.suffix

    @property
    def is_mixed(self) -> bool:
        """Whether kernels that bear no int8 may stay float32."""
        return self.weights == "int8" and not self.needs_images

    @property
    def share(self) -> float:
        """Bytes of a weight over the four that it has in float32."""
        return _SHARES[self.weights]

    @property
    def module(self) -> Any:
        """The module that writes it."""
        return importlib.import_module(f"keras_vit.exporting.{self.writer}")

    @property
    def runner(self) -> "type[Runner]":
        """What opens and runs it."""
        from keras_vit.exporting.clean import runners

        return runners.RUNNERS[self.runtime]

    def require(self) -> None:
        """Raises an ImportError that says what to install, if it cannot be run."""
        if self.runner.package and not _is_installed(self.runner.package):
            raise ImportError(
                f"{self.name} runs in {self.runner.title}, which is not installed; "
                f"run: pip install {self.runner.package}"
            )


def require_to_write(rows: Iterable[Format], *, verify: bool) -> None:
    """Raises an ImportError that names all that is missing to write the formats, or check them."""
    needed: dict[str, str] = {}  # the first format that needs it, by package
    for row in rows:
        for package in (*row.packages, row.runner.package if verify else None):
            if package:
                needed.setdefault(package, row.name)
    missing = [package for package in needed if not _is_installed(package)]
    if missing:
        names, are = ", ".join(missing), "is" if len(missing) == 1 else "are"
        formats = ", ".join(dict.fromkeys(needed[package] for package in missing))
        raise ImportError(
            f"To export {formats}, {names} {are} needed, which {are} not installed; "
            f"run: pip install {' '.join(needed)}"
        )


def is_version(folder: Path) -> bool:
    """Whether a folder holds what one export wrote into it."""
    marks = {Path(row.extras, RECORD) for row in FORMATS.values()}
    marks |= {Path(row.main_file) for row in FORMATS.values()}
    return any((folder / mark).is_file() for mark in marks)


def version_folders(directory: Path) -> list[Path]:
    """Returns the versions in the directory of an export, or in one of the folders in it."""
    places = sorted({row.folder for row in FORMATS.values()})
    is_inner = directory.absolute().name in places  # of "." too
    return [
        child
        for folder in ([directory] if is_inner else map(directory.joinpath, places))
        if folder.is_dir()
        for child in sorted(folder.iterdir(), key=lambda each: (len(each.name), each.name))
        if child.name.isdecimal() and child.is_dir()
    ]


def _is_installed(package: str) -> bool:
    return importlib.util.find_spec(package.replace("-", "_")) is not None


_QUANTIZER = ("ai-edge-quantizer",)


def _tflite(tag: str, **fields: Any) -> Format:
    own: dict[str, Any] = {"runtime": "tflite", "writer": "tflite", "folder": "tflite"}
    return Format(name=f"tflite{tag}", suffix=f"{tag}.tflite", batch_sizes=(8,), **own, **fields)


def _onnx(tag: str, **fields: Any) -> Format:
    own: dict[str, Any] = {"runtime": "onnx", "writer": "onnx_files", "folder": "onnx"}
    own["packages"] = ("onnx", "onnxruntime")
    return Format(name=f"onnx{tag}", suffix=f"{tag}.onnx", **own, **fields)


_ROWS = (
    Format(
        name="savedmodel",
        runtime="savedmodel",
        writer="savedmodel",
        main_file="saved_model.pb",
        extras="assets.extra",
    ),
    _tflite(""),
    _tflite("-fp16", weights="float16", limits=_HALF, packages=_QUANTIZER),
    _tflite("-int8", weights="int8", products="int8", limits=_INT8, packages=_QUANTIZER),
    _tflite("-int8-weights", weights="int8", limits=_INT8_WEIGHTS, packages=_QUANTIZER),
    _tflite("-int8-full", weights="int8", products="int8", limits=_INT8_FULL, needs_images=True),
    _onnx(""),
    _onnx("-fp16", weights="float16", products="float16", limits=_HALF_PRODUCTS),
    _onnx("-int8", weights="int8", products="int8", limits=_INT8),
    _onnx("-int8-weights", weights="int8", limits=_INT8_WEIGHTS),
)
FORMATS: Mapping[str, Format] = {row.name: row for row in _ROWS}
