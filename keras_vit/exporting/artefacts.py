"""Exports a model in several formats, checks each artefact, and publishes all together."""

import contextlib
import dataclasses
import importlib.util
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import keras
import numpy as np

from keras_vit import atomic
from keras_vit.exporting import rebuild, samples, savedmodel, tflite, verification
from keras_vit.exporting.clean import messages
from keras_vit.exporting.rebuild import Exportable

FORMATS = ("savedmodel", *tflite.FORMATS, "onnx")
TOP_K = 5
# Images for int8 throughout: half of them set the ranges, the others measure the accuracy.
CALIBRATION_COUNTS = (16, 512)

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
# The modules that each format needs, and the packages that contain them.
_PACKAGES = {
    "onnx": {"onnx": "onnx", "onnxruntime": "onnxruntime"},
    **{name: {"ai_edge_litert": "ai-edge-litert"} for name in tflite.FORMATS},
}
# The folders under the export directory; the server reads versions in the directory itself.
_FOLDERS = {"savedmodel": "", "onnx": "onnx", **dict.fromkeys(tflite.FORMATS, "tflite")}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Artefact:
    """One exported artefact.

    Attributes:
        format: one of `FORMATS`.
        path: the version directory of a SavedModel, otherwise the file.
        bytes: its size on the disk.
        checks: the results of the checks.
    """

    format: str
    path: Path
    bytes: int
    checks: tuple[messages.Check, ...]


def export(
    model: keras.Model,
    path: str | Path,
    *,
    formats: Iterable[str] = ("savedmodel",),
    labels: Sequence[str] | str | Path | None = None,
    images: Sequence[samples.Image] = (),
    top_k: int = TOP_K,
    tflite_batch_size: int = 1,
    verify: bool = True,
) -> tuple[Artefact, ...]:
    """Writes a trained model for TensorFlow Serving, TFLite and ONNX.

    The model is rebuilt in float32, whatever its own precision. Each artefact is checked on the
    disk, in a process that can import neither Keras nor this package. Then the next version of all
    formats appears together; if one fails its checks, none appears.

    Example:
        >>> import tempfile, keras_vit
        >>> config = keras_vit.ViTConfig(
        ...     input_shape=(32, 32, 3), patch_size=16, hidden_dim=16, mlp_dim=32, num_heads=2,
        ...     num_layers=1, classes=3, include_preprocessing=True)
        >>> directory = Path(tempfile.mkdtemp(), "pets")
        >>> (artefact,) = export(keras_vit.VisionTransformer(config), directory,
        ...                      labels=("cat", "dog", "fish"))
        >>> artefact.path.relative_to(directory)
        PosixPath('1')

    Args:
        model: a `VisionTransformer`, or a functional model with one inside.
        path: the directory to export to, which is the base path for the server; its name is the
            model's name. Version n lies in `path/n`, `path/tflite/n` and `path/onnx/n`.
        formats: which of "savedmodel", "tflite" (float32), "tflite-fp16", "tflite-int8" (weights
            in int8), "tflite-int8-full" (everything in int8; needs `images`) and "onnx".
        labels: the name of each class, or a text file with one a line; None for "0", "1", ...
        images: image files, or pixels 0..255 as uint8 arrays (height, width, 3), for the checks;
            random images are added to fewer than eight.
        top_k: classes in an answer of the server, at most all.
        tflite_batch_size: the fixed number of images that a TFLite file takes.
        verify: whether to check the artefacts before they appear.

    Raises:
        ValueError: an argument does not fit the model.
        TypeError: the model is of another kind.
        ImportError: a format needs a package that is not installed.
        VerificationError: an artefact and the model differ.
        OSError: another export is at work in the directory.
    """
    names = _parse_formats(formats, images=images, verify=verify)
    for key, value in (("top_k", top_k), ("tflite_batch_size", tflite_batch_size)):
        if value < 1:
            raise ValueError(f"{key} must be at least 1. Received: {key}={value!r}.")
    directory = _model_directory(path)
    exportable = rebuild.rebuild(model)
    _check_network(names, exportable)
    expected = samples.make_references(exportable, images)
    rebuilt = samples.compare_rebuilt(model, exportable, expected)
    verification.require([rebuilt], artefact="float32")
    job = _Job(
        directory=directory,
        exportable=exportable,
        labels=_class_labels(labels, exportable),
        top_k=min(top_k, exportable.classes or top_k),
        images=tuple(images),
        batch_size=tflite_batch_size,
        verify=verify,
        expected=expected,
        rebuilt=rebuilt,
    )
    return job.run(names)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class _Job:
    directory: Path
    exportable: Exportable
    labels: tuple[str, ...]
    top_k: int
    images: tuple[samples.Image, ...]
    batch_size: int
    verify: bool
    expected: samples.References
    rebuilt: messages.Check

    def run(self, formats: Sequence[str]) -> tuple[Artefact, ...]:
        """Writes, checks and publishes the formats; the SavedModel appears last."""
        folders = sorted({_FOLDERS[name] for name in formats}, reverse=True)
        artefacts: list[Artefact] = []
        with staging_folder(self.directory) as stage:
            version = next_version([self.directory / name for name in set(_FOLDERS.values())])
            moves = {}
            for folder in folders:
                names = [name for name in formats if _FOLDERS[name] == folder]
                staged = stage / (folder or "savedmodel")
                final = self.directory / folder / str(version)
                artefacts += self._export_folder(names, staged, final)
                moves[staged] = final
            if "savedmodel" in formats:
                savedmodel.write_server_files(
                    self.directory, exportable=self.exportable, labels=self.labels
                )
            publish(moves)
        return tuple(sorted(artefacts, key=lambda artefact: formats.index(artefact.format)))

    def _export_folder(self, names: Sequence[str], staged: Path, final: Path) -> list[Artefact]:
        """Writes and checks the formats of one folder."""
        paths = {name: staged / self._file_name(name) for name in names}
        self._write(paths, staged)
        checks, runtime = {name: [self.rebuilt] for name in names}, {}
        for name, path in paths.items() if self.verify else ():
            results, versions = verification.check_artefact(self._request(name, path))
            checks[name] += results
            runtime.update(versions)
        count = min(len(self.images), samples.COUNT)
        verification.write_record(
            staged,
            self.exportable,
            checks=checks,
            runtime=runtime,
            images=f"{count} given, {samples.COUNT - count} drawn",
        )
        return [
            Artefact(
                format=name,
                path=final / path.relative_to(staged),
                bytes=_size(path),
                checks=tuple(checks[name]),
            )
            for name, path in paths.items()
        ]

    def _write(self, paths: dict[str, Path], staged: Path) -> None:
        if "savedmodel" in paths:
            savedmodel.write_savedmodel(
                self.exportable,
                staged,
                labels=self.labels,
                top_k=self.top_k,
                model_name=self.directory.name,
            )
            return
        staged.mkdir()
        if "onnx" in paths:
            from keras_vit.exporting import onnx_files

            onnx_files.write_onnx(self.exportable, paths["onnx"])
        else:
            tflite.write_tflite(
                self.exportable,
                paths,
                batch_size=self.batch_size,
                calibration=self._calibration_images() if "tflite-int8-full" in paths else (),
            )
        if self.labels:
            savedmodel.write_labels(staged / "labels.txt", self.labels)

    def _file_name(self, name: str) -> str:
        if name == "savedmodel":
            return ""
        ending = ".onnx" if name == "onnx" else f"{name.removeprefix('tflite')}.tflite"
        return f"{self.directory.name}{ending}"

    def _request(self, name: str, path: Path) -> messages.Request:
        exportable, expected = self.exportable, self.expected
        if name == "savedmodel":
            cases = verification.savedmodel_cases(exportable, expected, top_k=self.top_k)
        else:
            pixels, outputs = expected.pixels, expected.of_pixels.of_batch
            if name == "tflite-int8-full":
                pixels = self._pixels(1)
                outputs = samples.outputs(exportable, exportable.from_pixels(pixels))
            images = exportable.to_original(pixels)
            cases = (verification.file_case(exportable, name, images, outputs),)
        return messages.Request(
            format=name,
            path=path,
            parameter_bytes=exportable.parameter_bytes,
            batch_sizes=samples.BATCH_SIZES,
            labels=self.labels,
            cases=cases,
        )

    def _calibration_images(self) -> list[np.ndarray]:
        return list(self.exportable.to_original(self._pixels(0)))

    def _pixels(self, half: int) -> np.ndarray:
        """Returns every second given image from `half` on, as float32 pixels 0..255."""
        images = self.images[: CALIBRATION_COUNTS[1]][half::2]
        files = [samples.file_bytes(image) for image in images]
        return np.round(samples.resize_files(self.exportable, files)).astype(np.float32)


@contextlib.contextmanager
def staging_folder(directory: Path) -> Iterator[Path]:
    """Makes a hidden folder in `directory` to assemble versions in, and removes it at the end.

    It locks the directory for one export at a time, and removes the folder of a killed export.

    Raises:
        FileExistsError: `directory` is a file, or another export is at work there.
        OSError: the directory cannot be written to.
    """
    if directory.exists() and not directory.is_dir():
        raise FileExistsError(f"{str(directory)!r} is a file; give a directory to export to.")
    with (
        atomic.hold(directory / ".export.lock", what=f"export to {str(directory)!r}"),
        atomic.staging_folder(directory) as stage,
    ):
        yield stage


def next_version(directories: Sequence[Path]) -> int:
    """Returns the number after the highest version in any of the directories.

    Example:
        >>> next_version([Path("not-there")])
        1
    """
    versions = [
        int(child.name)
        for directory in directories
        if directory.is_dir()
        for child in directory.iterdir()
        if child.name.isdecimal()
    ]
    return max(versions, default=0) + 1


def publish(stages: Mapping[Path, Path]) -> None:
    """Renames assembled folders to their final paths, in order.

    Each folder is synced to the disk first. If one rename fails, the others are undone.
    """
    published: list[tuple[Path, Path]] = []
    try:
        for stage, final in stages.items():
            if final.exists():
                raise FileExistsError(f"{str(final)!r} has appeared meanwhile; export again.")
            with atomic.explain_errors(final.parent):
                final.parent.mkdir(parents=True, exist_ok=True)
                stage.chmod(0o755)  # the server runs as another user than the exporter
            atomic.publish(stage, final)
            published.append((stage, final))
    except BaseException:
        for stage, final in reversed(published):
            with contextlib.suppress(OSError):  # the disk may be gone: raise the first error
                final.rename(stage)
        raise


def _model_directory(path: str | Path) -> Path:
    """Returns the absolute directory, whose name is the model's name."""
    directory = Path(path).absolute()
    if not _NAME.fullmatch(directory.name):
        raise ValueError(
            "The directory's name is the model's name in addresses and settings: letters, digits, "
            f"'_', '-' and '.'. Received: {directory.name!r}."
        )
    return directory


def _parse_formats(
    formats: Iterable[str], *, images: Sequence[samples.Image], verify: bool
) -> tuple[str, ...]:
    """Returns the names of the formats, after checks of their names, images and packages."""
    names = (formats,) if isinstance(formats, str) else tuple(formats)
    is_known = all(name in FORMATS for name in names)
    if not names or not is_known or len(set(names)) < len(names):
        raise ValueError(
            f"formats must be some of {', '.join(FORMATS)}, each once. Received: {names!r}."
        )
    least, _ = CALIBRATION_COUNTS
    if "tflite-int8-full" in names and len(images) < least:
        raise ValueError(
            f"tflite-int8-full needs at least {least} images of the kind that the model will "
            f"see, to set its ranges and to measure its accuracy. Received: {len(images)} images."
        )
    for name in names:
        packages = _PACKAGES.get(name, {})
        missing = [module for module in packages if importlib.util.find_spec(module) is None]
        if missing and (verify or name == "onnx"):
            raise ImportError(
                f"To export {name}, {missing[0]} is needed, which is not installed; "
                f"run: pip install {' '.join(packages.values())}"
            )
    return names


def _check_network(formats: Sequence[str], exportable: Exportable) -> None:
    """Raises a ValueError for a network that one of the formats cannot hold."""
    config = exportable.config
    if config is None or config.resnet_layers is None or not rebuild.unwritten(config):
        return
    if not set(formats).isdisjoint(tflite.FORMATS):
        # The conversion gives a group normalisation rank 5.
        raise ValueError(
            "TFLite files hold only hybrids as published; export this one as savedmodel or "
            f"onnx. Received: a hybrid with {', '.join(rebuild.unwritten(config))} set."
        )


def _class_labels(
    labels: Sequence[str] | str | Path | None, exportable: Exportable
) -> tuple[str, ...]:
    """Returns a label for each class; none without classifier."""
    classes = exportable.classes
    if classes is None:
        return ()
    if labels is None:
        return tuple(map(str, range(classes)))
    if isinstance(labels, str | Path):
        labels = Path(labels).read_text(encoding="utf-8").splitlines()
    if len(labels) != classes:
        raise ValueError(
            f"The model has {classes} classes; give a label for each. "
            f"Received: {len(labels)} labels."
        )
    return tuple(labels)


def _size(path: Path) -> int:
    if path.is_file():
        return sum(file.stat().st_size for file in path.parent.glob(f"{path.name}*"))
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
