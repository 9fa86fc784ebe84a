"""Makes every asked-for artefact of a model, checks each, and puts them in place together."""

import contextlib
import dataclasses
import importlib.util
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import keras
import numpy as np

from keras_vit import atomic
from keras_vit.data import decoding
from keras_vit.data import images as image_files
from keras_vit.exporting import rebuild, samples, savedmodel, tflite, verification
from keras_vit.exporting.clean import messages
from keras_vit.exporting.rebuild import Exportable

FORMATS = ("savedmodel", *tflite.FORMATS, "onnx")

# Images for int8 throughout: one half sets the ranges, the other is the accuracy gate.
CALIBRATION_COUNTS = (16, 512)
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")

# What each format needs: the module and the package that brings it.
_NEEDS = {
    "onnx": {"onnx": "onnx", "onnxruntime": "onnxruntime"},
    **{name: {"ai_edge_litert": "ai-edge-litert"} for name in tflite.FORMATS},
}


def checked_directory(path: str | Path) -> Path:
    """Returns the absolute directory, whose name is also the model's."""
    directory = Path(path).absolute()
    if not _NAME.fullmatch(directory.name):
        raise ValueError(
            "The directory's name is the model's name in addresses and settings: letters, digits, "
            f"'_', '-' and '.'. Received: {directory.name!r}."
        )
    return directory


def checked_formats(
    formats: Iterable[str], *, images: Sequence[samples.Image], verify: bool
) -> tuple[str, ...]:
    """Returns the formats, known, each once, and with all that they need."""
    wanted = (formats,) if isinstance(formats, str) else tuple(formats)
    unknown = [name for name in wanted if name not in FORMATS]
    if unknown or not wanted or len(set(wanted)) < len(wanted):
        raise ValueError(
            f"formats must be some of {', '.join(FORMATS)}, each once. Received: {wanted!r}."
        )
    fewest, _ = CALIBRATION_COUNTS
    if "tflite-int8-full" in wanted and len(images) < fewest:
        raise ValueError(
            f"tflite-int8-full needs at least {fewest} images of the kind that the model will "
            f"see, to set its ranges and to measure what it loses. Received: {len(images)} images."
        )
    for name in wanted:
        packages = _NEEDS.get(name, {})
        missing = [module for module in packages if importlib.util.find_spec(module) is None]
        if missing and (verify or name == "onnx"):
            raise ImportError(
                f"To export {name}, {missing[0]} is needed, which is not installed; "
                f"run: pip install {' '.join(packages.values())}"
            )
    return wanted


def check_network(formats: Sequence[str], exportable: Exportable) -> None:
    """Raises a ValueError for a network that one of the formats cannot hold."""
    config = exportable.config
    if config is None or config.resnet_layers is None or not config.departures:
        return
    if not set(formats).isdisjoint(tflite.FORMATS):
        # Converted, a group normalisation has rank 5.
        raise ValueError(
            "TFLite files hold a hybrid only as it was published; export this one as savedmodel or "
            f"onnx. Received: a hybrid with {', '.join(config.departures)} set."
        )


def checked_labels(
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


@contextlib.contextmanager
def staging_folder(directory: Path) -> Iterator[Path]:
    """Makes a hidden folder inside `directory` to assemble versions in; it is removed at the end.

    Only one export at a time may hold it; what a killed one left behind is removed too.

    Raises:
        FileExistsError: `directory` is a file, or another export is at work there.
        OSError: it cannot be written to.
    """
    if directory.exists() and not directory.is_dir():
        raise FileExistsError(f"{str(directory)!r} is a file; give a directory to export to.")
    with (
        atomic.hold(directory / ".export.lock", what=f"export to {str(directory)!r}"),
        atomic.staging_folder(directory) as stage,
    ):
        yield stage


def next_version(directories: Sequence[Path]) -> int:
    """Returns the number after the highest that any of these directories holds.

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
    """Renames assembled folders to their final paths, in the given order.

    Each reaches the disk before its name changes. If one rename fails, the folders
    already renamed are taken back.
    """
    done: list[tuple[Path, Path]] = []
    try:
        for stage, final in stages.items():
            if final.exists():
                raise FileExistsError(f"{str(final)!r} has appeared meanwhile; export once more.")
            with atomic.explain_errors(final.parent):
                final.parent.mkdir(parents=True, exist_ok=True)
                _make_readable(stage)
            atomic.publish(stage, final)
            done.append((stage, final))
    except BaseException:
        for stage, final in reversed(done):
            with contextlib.suppress(OSError):  # the disk may be gone: the first error says it
                final.rename(stage)
        raise


TOP_K = 5

# Where a format lies under the export directory: the server looks at the directory itself.
_FOLDERS = {"savedmodel": "", "onnx": "onnx", **dict.fromkeys(tflite.FORMATS, "tflite")}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Artefact:
    """One exported artefact.

    Attributes:
        format: one of `FORMATS`.
        path: the version directory of a SavedModel, otherwise the file.
        bytes: its size on the disk.
        checks: what was verified, with the figures.
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

    The model is rebuilt in float32, whatever it was trained in. Each artefact is checked on the
    disk, in a process that can import neither Keras nor this package, before the next version of
    all of them appears. If one fails its checks, none appears.

    Example:
        >>> import tempfile, keras_vit
        >>> config = keras_vit.ViTConfig(
        ...     input_shape=(32, 32, 3), patch_size=16, hidden_dim=16, mlp_dim=32, num_heads=2,
        ...     num_layers=1, classes=3, include_preprocessing=True)
        >>> directory = Path(tempfile.mkdtemp(), "pets")
        >>> made = export(keras_vit.VisionTransformer(config), directory,
        ...               labels=("cat", "dog", "fish"))
        >>> made[0].path.relative_to(directory)
        PosixPath('1')

    Args:
        model: a `VisionTransformer`, or a functional model with one inside.
        path: the directory to export to, which is the base path for the server; its name is the
            model's name. Version n lies in `path/n`, `path/tflite/n` and `path/onnx/n`.
        formats: which of "savedmodel", "tflite" (float32), "tflite-fp16", "tflite-int8" (weights
            in int8), "tflite-int8-full" (everything in int8; needs `images`) and "onnx".
        labels: the name of each class, or a text file with one a line; None for "0", "1", ...
        images: image files, or pixels 0..255 as uint8 arrays (height, width, 3), to compare on;
            drawn ones join if they are fewer than eight.
        top_k: classes in an answer of the server, at most all.
        tflite_batch_size: the fixed number of images that a TFLite file takes.
        verify: whether to check the artefacts before they are put in place.

    Raises:
        ValueError: an argument does not fit the model.
        TypeError: the model is of another kind.
        ImportError: a format needs a package that is not installed.
        VerificationError: an artefact does not do what the model does.
        OSError: another export is at work in the directory.
    """
    wanted = checked_formats(formats, images=images, verify=verify)
    for name, value in (("top_k", top_k), ("tflite_batch_size", tflite_batch_size)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1. Received: {name}={value!r}.")
    directory = checked_directory(path)
    exportable = rebuild.rebuild(model)
    check_network(wanted, exportable)
    expected = samples.make_references(exportable, images)
    rebuilt = samples.compare_rebuilt(model, exportable, expected)
    verification.require([rebuilt], artefact="float32")
    job = _Job(
        directory=directory,
        exportable=exportable,
        labels=checked_labels(labels, exportable),
        top_k=min(top_k, exportable.classes or top_k),
        images=tuple(images),
        batch_size=tflite_batch_size,
        verify=verify,
        expected=expected,
        rebuilt=rebuilt,
    )
    return job.run(wanted)


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
        """Makes, checks and publishes the formats; the SavedModel appears last."""
        folders = sorted({_FOLDERS[name] for name in formats}, reverse=True)
        made: list[Artefact] = []
        with staging_folder(self.directory) as stage:
            version = next_version([self.directory / folder for folder in ("", "tflite", "onnx")])
            moves = {}
            for folder in folders:
                names = [name for name in formats if _FOLDERS[name] == folder]
                staged = stage / (folder or "savedmodel")
                final = self.directory / folder / str(version)
                made += self._make(names, staged, final)
                moves[staged] = final
            if "savedmodel" in formats:
                savedmodel.write_server_files(
                    self.directory, exportable=self.exportable, labels=self.labels
                )
            publish(moves)
        return tuple(sorted(made, key=lambda artefact: formats.index(artefact.format)))

    def _make(self, names: Sequence[str], staged: Path, final: Path) -> list[Artefact]:
        """Writes and checks the formats that lie in one folder."""
        paths = {name: staged / self._file_name(name) for name in names}
        self._write(paths, staged)
        checks, runtime = {}, {}
        for name, path in paths.items():
            checks[name] = [self.rebuilt]
            if self.verify:
                found, versions_there = verification.check_artefact(self._request(name, path))
                checks[name] += found
                runtime.update(versions_there)
        count = min(len(self.images), samples.COUNT)
        verification.write_record(
            staged,
            checks=checks,
            runtime=runtime,
            images=f"{count} given, {samples.COUNT - count} drawn",
            pixels=verification.pixels_of(self.exportable),
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
                calibration=self._given(0) if "tflite-int8-full" in paths else (),
            )
        if self.labels:
            savedmodel.write_labels(staged / "labels.txt", self.labels)

    def _file_name(self, name: str) -> str:
        if name == "savedmodel":
            return ""
        if name == "onnx":
            return f"{self.directory.name}.onnx"
        return f"{self.directory.name}{name.removeprefix('tflite')}.tflite"

    def _request(self, name: str, path: Path) -> messages.Request:
        exportable, expected = self.exportable, self.expected
        if name == "savedmodel":
            cases = verification.savedmodel_cases(
                exportable, expected, labels=self.labels, top_k=self.top_k
            )
        else:
            pixels, outputs = expected.pixels, expected.of_pixels.of_batch
            if name == "tflite-int8-full":
                pixels = np.stack(self._given(1))
                outputs = samples.outputs(
                    exportable, exportable.from_pixels(pixels.astype(np.float32))
                )
            images = samples.as_original(exportable, pixels)
            cases = (verification.file_case(exportable, name, images, outputs),)
        return messages.Request(
            format=name,
            path=path,
            parameter_bytes=exportable.parameter_bytes,
            batch_sizes=samples.BATCH_SIZES,
            labels=self.labels,
            cases=cases,
        )

    def _given(self, half: int) -> list[np.ndarray]:
        """One half of the given images, as pixels of the model's size."""
        size = self.exportable.image_shape[:2]
        chosen = self.images[: CALIBRATION_COUNTS[1]][half::2]
        decoded = [decoding.decode_image(samples.file_bytes(image)) for image in chosen]
        resized = [
            image_files.resize_image(image, size=size, antialias=self.exportable.antialias)
            for image in decoded
        ]
        pixels = np.round(np.stack(resized))
        if half == 0:
            pixels = samples.as_original(self.exportable, pixels)
        return list(pixels.astype(np.float32))


def _make_readable(folder: Path) -> None:
    # The server runs as another user than the one who exports; mkdtemp keeps all others out.
    folder.chmod(0o755)


def _size(path: Path) -> int:
    if path.is_file():
        return sum(file.stat().st_size for file in path.parent.glob(f"{path.name}*"))
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
