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
from keras_vit.exporting import (
    onnx_files,
    rebuild,
    references,
    samples,
    savedmodel,
    sensitivity,
    tflite,
    verification,
)
from keras_vit.exporting.clean import messages
from keras_vit.exporting.description import Description, describe
from keras_vit.exporting.rebuild import Exportable

FORMATS = ("savedmodel", *tflite.FORMATS, *onnx_files.FORMATS)
TOP_K = 5
CALIBRATION_MOST = 256  # images that set the ranges of int8 throughout

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
# The modules that each format needs, and the packages that contain them.
_PACKAGES = {
    **{name: {"onnx": "onnx", "onnxruntime": "onnxruntime"} for name in onnx_files.FORMATS},
    **{name: {"ai_edge_litert": "ai-edge-litert"} for name in tflite.FORMATS},
}
# The folders under the export directory; the server reads versions in the directory itself.
FOLDERS = {
    "savedmodel": "",
    **dict.fromkeys(onnx_files.FORMATS, "onnx"),
    **dict.fromkeys(tflite.FORMATS, "tflite"),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Artefact:
    """One exported artefact.

    Attributes:
        format: one of `FORMATS`.
        path: the version directory of a SavedModel, otherwise the file.
        bytes: its size on the disk.
        checks: the results of the checks.
        floats: the kernels that stayed float32, as the file with all of them in int8 failed.
    """

    format: str
    path: Path
    bytes: int
    checks: tuple[messages.Check, ...]
    floats: tuple[str, ...] = ()


def export(
    model: keras.Model,
    path: str | Path,
    *,
    formats: Iterable[str] = ("savedmodel",),
    labels: Sequence[str] | str | Path | None = None,
    images: Sequence[samples.Image] = (),
    targets: Sequence[int] = (),
    top_k: int = TOP_K,
    tflite_batch_size: int = 1,
    opset: int | None = None,
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
            model's name. Version n lies in `path/n`, and of the other formats in `path/tflite/n`
            and `path/onnx/n`.
        formats: which of "savedmodel", "tflite" and "onnx" (float32), "tflite-fp16" and
            "onnx-fp16", "tflite-int8" and "onnx-int8" (products of int8), "tflite-int8-weights" and
            "onnx-int8-weights" (stored in int8, computed in float32), "tflite-int8-full"
            (everything in int8; needs `images`).
        labels: the name of each class, or a text file with one a line; None for "0", "1", ...
        images: image files, or pixels 0..255 as uint8 arrays (height, width, 3), of the kind that
            the model will see; they decide about each artefact. Drawn images are added to fewer
            than 32. Of sixteen and more, half are for calibration, and decide nothing.
        targets: the true class of each image, from 0; the artefacts may not be less accurate.
        top_k: classes in an answer of the server, at most all.
        tflite_batch_size: the fixed number of images that a TFLite file takes.
        opset: the version of ONNX's operators, 17 to 22; None for 20, or 18 for models that tf2onnx
            converts, which can be 17 too.
        verify: whether to check the artefacts before they appear.

    Raises:
        ValueError: an argument does not fit the model.
        TypeError: the model is of another kind.
        ImportError: a format needs a package that is not installed.
        VerificationError: an artefact and the model differ.
        OSError: another export is at work in the directory.
    """
    names = _parse_formats(formats, images=images, verify=verify)
    _check_targets(targets, images)
    for key, value in (("top_k", top_k), ("tflite_batch_size", tflite_batch_size)):
        if value < 1:
            raise ValueError(f"{key} must be at least 1. Received: {key}={value!r}.")
    directory = _model_directory(path)
    exportable = rebuild.rebuild(model)
    _check_network(names, exportable)
    if opset is not None:
        _check_opset(names, exportable, opset)
    expected = samples.make_references(exportable, images)
    is_rounded = any(verification.is_rounded(name) for name in names)
    work = samples.ROUNDED_WORK if is_rounded else samples.FLOAT_WORK
    decisive = samples.make_gate_images(exportable, images, targets, work=work if verify else 0.0)
    rebuilt = samples.compare_rebuilt(model, exportable, expected)
    verification.require([rebuilt], artefact="float32")
    names_of_classes = _class_labels(labels, exportable)
    job = _Job(
        directory=directory,
        exportable=exportable,
        labels=names_of_classes,
        about=describe(exportable, name=directory.name, labels=names_of_classes),
        opset=opset,
        top_k=min(top_k, exportable.classes or top_k),
        images=tuple(images),
        batch_size=tflite_batch_size,
        verify=verify,
        expected=expected,
        decisive=decisive,
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
    decisive: samples.GateImages
    rebuilt: messages.Check
    about: Description
    opset: int | None

    def run(self, formats: Sequence[str]) -> tuple[Artefact, ...]:
        """Writes, checks and publishes the formats; the SavedModel appears last."""
        folders = sorted({FOLDERS[name] for name in formats}, reverse=True)
        artefacts: list[Artefact] = []
        with staging_folder(self.directory) as stage:
            version = next_version([self.directory / name for name in set(FOLDERS.values())])
            moves = {}
            for folder in folders:
                names = [name for name in formats if FOLDERS[name] == folder]
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
        sizes = self._write(paths, staged)
        checks, answers, runtime = {name: [self.rebuilt] for name in names}, {}, {}
        floats: dict[str, tuple[str, ...]] = {}
        for name, path in paths.items() if self.verify else ():
            request = self._request(name, path, weight_bytes=sizes[name])
            report, floats[name] = self._adjusted(request, staged)
            checks[name] += report.checks
            answers[name] = references.record(request.references, report.answers)
            runtime.update(report.runtime)
        if self.labels and "savedmodel" not in paths:
            savedmodel.write_labels(staged / "labels.txt", self.labels)
        verification.write_record(
            staged,
            self.about,
            checks=checks,
            answers=answers,
            files={name: str(path.relative_to(staged)) for name, path in paths.items()},
            floats={name: kept for name, kept in floats.items() if kept},
            runtime=runtime,
            images=self.decisive.about if self.verify else "none",
        )
        return [
            Artefact(
                format=name,
                path=final / path.relative_to(staged),
                bytes=_size(path),
                checks=tuple(checks[name]),
                floats=floats.get(name, ()),
            )
            for name, path in paths.items()
        ]

    def _adjusted(
        self, request: messages.Request, staged: Path
    ) -> tuple[messages.Report, tuple[str, ...]]:
        """Checks an artefact; where int8 fails, keeps the kernels in float32 that cost the most.

        Returns:
            The report of the file that passed, and the kernels that stayed float32.
        """
        name, share = request.format, 1.0
        floats: tuple[str, ...] = ()
        report = verification.run_checks(request)
        costs: list[sensitivity.Cost] = []
        for _ in range(sensitivity.attempts(self.exportable, name)):
            excess = sensitivity.excess(report.checks)
            if not 1.0 < excess < np.inf:
                break
            costs = costs or sensitivity.measure(self.exportable, request)
            share *= (sensitivity.AIM / excess) ** 2
            floats = sensitivity.choose(costs, share=share)
            sizes = self._write({name: request.path}, staged, floats={name: floats})
            request = dataclasses.replace(request, weight_bytes=sizes[name])
            report = verification.run_checks(request)
        verification.require(report.checks, artefact=name)
        return report, floats

    def _write(
        self,
        paths: dict[str, Path],
        staged: Path,
        *,
        floats: Mapping[str, Sequence[str]] | None = None,
    ) -> dict[str, int]:
        """Writes formats of one folder, and returns the bytes of their weights."""
        sizes = dict.fromkeys(paths, self.exportable.parameter_bytes)
        if "savedmodel" in paths:
            savedmodel.write_savedmodel(
                self.exportable,
                staged,
                labels=self.labels,
                top_k=self.top_k,
                model_name=self.directory.name,
            )
            return sizes
        staged.mkdir(exist_ok=True)
        if not paths.keys().isdisjoint(onnx_files.FORMATS):
            return onnx_files.write_onnx(
                self.exportable, paths, about=self.about, opset=self.opset, floats=floats
            )
        return tflite.write_tflite(
            self.exportable,
            paths,
            about=self.about,
            batch_size=self.batch_size,
            calibration=self._calibration_images() if "tflite-int8-full" in paths else (),
            floats=floats,
        )

    def _file_name(self, name: str) -> str:
        """Returns the name of a format's file, such as pets-int8.onnx for "onnx-int8"."""
        if name == "savedmodel":
            return ""
        ending, _, kind = name.partition("-")
        return f"{self.directory.name}{'-' * bool(kind)}{kind}.{ending}"

    def _request(self, name: str, path: Path, *, weight_bytes: int) -> messages.Request:
        exportable, expected = self.exportable, self.expected
        gate = verification.gate(exportable, name, self.decisive)
        if name == "savedmodel":
            cases = verification.savedmodel_cases(exportable, expected, top_k=self.top_k)
        else:
            images, outputs = exportable.to_original(expected.pixels), expected.of_pixels.of_batch
            cases = (verification.file_case(exportable, images, outputs, gate=gate),)
        return messages.Request(
            format=name,
            path=path,
            parameter_bytes=exportable.parameter_bytes,
            weight_bytes=weight_bytes,
            batch_sizes=samples.BATCH_SIZES,
            labels=self.labels,
            cases=cases,
            references=references.make(name, self.about, cases=cases),
            gate=gate,
        )

    def _calibration_images(self) -> list[np.ndarray]:
        pixels = samples.calibration_pixels(self.exportable, self.images, most=CALIBRATION_MOST)
        return list(self.exportable.to_original(pixels))


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
    least = samples.CALIBRATION_LEAST
    if "tflite-int8-full" in names and len(images) < least:
        raise ValueError(
            f"tflite-int8-full needs at least {least} images of the kind that the model will "
            f"see, to set its ranges and to measure its accuracy. Received: {len(images)} images."
        )
    for name in names:
        packages = _PACKAGES.get(name, {})
        missing = [module for module in packages if importlib.util.find_spec(module) is None]
        if missing and (verify or name not in tflite.FORMATS):
            raise ImportError(
                f"To export {name}, {missing[0]} is needed, which is not installed; "
                f"run: pip install {' '.join(packages.values())}"
            )
    return names


def _check_targets(targets: Sequence[int], images: Sequence[samples.Image]) -> None:
    if len(targets) not in (0, len(images)):
        raise ValueError(
            "targets must be the class of each image, or nothing. "
            f"Received: {len(targets)} targets for {len(images)} images."
        )


def _check_network(formats: Sequence[str], exportable: Exportable) -> None:
    """Raises a ValueError for a network that one of the formats cannot hold."""
    config = exportable.config
    if config is None or config.resnet_layers is None or not config.unwritten_fields:
        return
    if not set(formats).isdisjoint(tflite.FORMATS):
        # The conversion gives a group normalisation rank 5.
        raise ValueError(
            "TFLite files hold only hybrids as published; export this one as savedmodel or "
            f"onnx. Received: a hybrid with {', '.join(config.unwritten_fields)} set."
        )


def _check_opset(formats: Sequence[str], exportable: Exportable, opset: int) -> None:
    if set(formats).isdisjoint(onnx_files.FORMATS):
        raise ValueError(
            "opset is that of an ONNX file; add onnx to the formats. "
            f"Received: opset={opset!r}, formats={', '.join(formats)}."
        )
    onnx_files.check_opset(exportable, opset)


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
