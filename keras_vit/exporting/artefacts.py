"""Exports a model in several formats, checks each artefact, and publishes all together."""

import collections
import contextlib
import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import keras
import numpy as np

from keras_vit import atomic
from keras_vit.data.source import composed
from keras_vit.exporting import rebuild, records, samples, savedmodel, tflite, verification
from keras_vit.exporting.clean.agreement import Check, Request
from keras_vit.exporting.clean.checker import Report
from keras_vit.exporting.formats import FORMATS, Format, Options, require_to_write
from keras_vit.exporting.rebuild import Description, Exportable
from keras_vit.exporting.records import Artefact as Artefact
from keras_vit.limits import MAX_TEXT, FileError, check_file, counted, is_line, shown
from keras_vit.preprocessing import LABELLED

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")


def export(
    model: keras.Model,
    path: str | Path,
    *,
    formats: Iterable[str] = ("savedmodel",),
    labels: Sequence[str] | str | Path | None = None,
    images: Sequence[samples.Image] = (),
    targets: Sequence[int] = (),
    top_k: int = Options.top_k,
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
    rows = _parse_formats(formats, images=images, opset=opset, verify=verify)
    if len(targets) not in (0, len(images)):
        raise ValueError(
            "targets must be the class of each image, or nothing. "
            f"Received: {len(targets)} targets for {len(images)} images."
        )
    for key, value in (("top_k", top_k), ("tflite_batch_size", tflite_batch_size)):
        if value < 1:
            raise ValueError(f"{key} must be at least 1. Received: {key}={value!r}.")
    directory = Path(path).absolute()
    if not _NAME.fullmatch(directory.name):
        raise ValueError(
            "The directory's name is the model's name in addresses and settings: letters, digits, "
            f"'_', '-' and '.'. Received: {directory.name!r}."
        )
    exportable = rebuild.rebuild(model)
    top_k = min(top_k, exportable.classes or top_k)
    options = Options(top_k=top_k, batch_size=tflite_batch_size, opset=opset)
    for row in rows:
        row.module.check(exportable, options)
    is_rounded = any(row.weights != "float32" for row in rows)
    work = samples.ROUNDED_WORK if is_rounded else samples.FLOAT_WORK
    decisive = samples.make_verification_images(
        exportable, images, targets, work=work if verify else 0.0
    )
    rebuilt = samples.compare_rebuilt(model, exportable, decisive.batch)
    verification.require([rebuilt], artefact="float32")
    if any(row.needs_images for row in rows):
        calibration = samples.make_calibration(exportable, images)
        options = dataclasses.replace(options, calibration=calibration)
    names = _class_labels(labels, exportable)
    job = _Job(
        exportable=exportable,
        about=rebuild.describe(exportable, name=directory.name, labels=names),
        options=options,
        images=images,
        decisive=decisive,
        rebuilt=rebuilt,
        verify=verify,
    )
    return job.run(rows, directory)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class _Job:
    exportable: Exportable
    about: Description
    options: Options
    images: Sequence[samples.Image]
    decisive: samples.VerificationImages
    rebuilt: Check
    verify: bool

    def run(self, rows: Sequence[Format], directory: Path) -> tuple[Artefact, ...]:
        made: dict[str, Artefact] = {}
        with staging_folder(directory) as stage:
            version = next_version({directory / row.folder for row in FORMATS.values()})
            moves = {}
            for folder in sorted({row.folder for row in rows}, reverse=True):
                staged = stage / (folder or "savedmodel")
                moves[staged] = directory / folder / str(version)
                for artefact in self._export_folder(
                    [row for row in rows if row.folder == folder], staged
                ):
                    path = moves[staged] / artefact.path.relative_to(staged)
                    made[artefact.format] = dataclasses.replace(artefact, path=path)
            if any(row.has_signatures for row in rows):
                savedmodel.write_server_files(directory, self.exportable, self.about.labels)
            publish(moves)
        return tuple(made[row.name] for row in rows)

    def _export_folder(self, rows: Sequence[Format], staged: Path) -> list[Artefact]:
        staged.mkdir()
        name = self.about.name
        paths = {row.name: staged / (row.suffix and f"{name}{row.suffix}") for row in rows}
        sizes = self._write(rows[0], paths)
        artefacts: list[Artefact] = []
        reports: dict[str, Report] = {}
        for row in rows:
            path, checks = paths[row.name], [self.rebuilt]
            float32: tuple[str, ...] = ()
            if self.verify:
                request = self._request(row, path, weight_bytes=sizes[row.name])
                reports[row.name], float32 = self._checked(row, request)
                checks += reports[row.name].checks
            files = path.parent.glob(f"{path.name}*") if path.is_file() else path.rglob("*")
            artefacts.append(
                Artefact(
                    format=row.name,
                    path=path,
                    bytes=sum(file.stat().st_size for file in files if file.is_file()),
                    checks=tuple(checks),
                    float32_layers=float32,
                )
            )
        if self.about.labels:
            savedmodel.write_labels(staged / rows[0].extras / "labels.txt", self.about.labels)
        images = self.decisive.about if self.verify else "none"
        records.write_record(staged, rows[0].extras, self.about, artefacts, reports, images=images)
        return artefacts

    def _write(
        self, row: Format, paths: Mapping[str, Path], float32: Sequence[str] = ()
    ) -> dict[str, int]:
        sizes: dict[str, int] = row.module.write(
            self.exportable, paths, about=self.about, options=self.options, float32=float32
        )
        return sizes

    def _request(self, row: Format, path: Path, *, weight_bytes: int) -> Request:
        exportable, batch = self.exportable, self.decisive.batch
        gate = verification.make_gate(exportable, row, self.decisive)
        if row.has_signatures:
            cases = verification.savedmodel_cases(
                exportable, row, batch, self.images, top_k=self.options.top_k
            )
        else:
            cases = verification.file_cases(exportable, row, batch, gate)
        return Request(
            format=row.name,
            runtime=row.runtime,
            path=path,
            parameter_bytes=exportable.parameter_bytes,
            weight_bytes=weight_bytes,
            labels=self.about.labels,
            cases=cases,
            gate=gate,
        )

    def _checked(self, row: Format, request: Request) -> tuple[Report, tuple[str, ...]]:
        report = verification.run_checks(request)
        float32: tuple[str, ...] = ()
        costs: list[tflite.Cost] = []
        share = 1.0
        for _ in range(tflite.ATTEMPTS if row.is_mixed else 0):
            excess = tflite.excess(report.checks)
            if self.exportable.written_config is None or not 1.0 < excess < np.inf:
                break
            costs = costs or tflite.measure(self.exportable, row, request.gate)
            share *= (tflite.AIM / excess) ** 2
            float32 = tflite.choose(costs, share=share)
            sizes = self._write(row, {row.name: request.path}, float32)
            request = dataclasses.replace(request, weight_bytes=sizes[row.name])
            report = verification.run_checks(request)
        verification.require(report.checks, artefact=row.name)
        return report, float32


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
        atomic.lock(directory / ".export.lock", what=f"export to {str(directory)!r}"),
        atomic.explain_errors(directory),
        atomic.staging_folder(directory) as stage,
    ):
        yield stage


def next_version(directories: Iterable[Path]) -> int:
    """Returns the number after the highest version in any of the directories."""
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


def _parse_formats(
    formats: Iterable[str], *, images: Sequence[samples.Image], opset: int | None, verify: bool
) -> tuple[Format, ...]:
    names = (formats,) if isinstance(formats, str) else tuple(formats)
    if not names or not set(names) <= set(FORMATS) or len(set(names)) < len(names):
        raise ValueError(
            f"formats must be some of {', '.join(FORMATS)}, each once. Received: {names!r}."
        )
    rows, least = tuple(FORMATS[name] for name in names), samples.CALIBRATION_LEAST
    for row in rows:
        if row.needs_images and len(images) < least:
            raise ValueError(
                f"{row.name} needs at least {least} images of the kind that the model will "
                f"see, to set its ranges and to measure its accuracy. Received: {len(images)} "
                "images."
            )
    require_to_write(rows, verify=verify)
    if opset is not None and all(row.runtime != "onnx" for row in rows):
        raise ValueError(
            "opset is that of an ONNX file; add onnx to the formats. "
            f"Received: opset={opset!r}, formats={', '.join(names)}."
        )
    return rows


def _class_labels(
    labels: Sequence[str] | str | Path | None, exportable: Exportable
) -> tuple[str, ...]:
    classes = exportable.classes
    if isinstance(labels, str | Path):
        path, labels = Path(labels), read_labels(labels)
        if len(labels) != classes:
            count = counted(len(labels), "label")
            raise FileError(f"{path} has {count}, and the model {classes or 'no'} classes.", path)
    if classes is None:
        return ()
    if labels is None:
        return tuple(map(str, range(classes)))
    if wrong := [label for label in labels if not is_line(label)]:
        raise ValueError(f"A label is a line of text. Received: {shown(wrong[0])}.")
    if len(labels) != classes:
        raise ValueError(
            f"The model has {classes} classes; give a label for each. "
            f"Received: {len(labels)} labels."
        )
    return tuple(labels)


def read_labels(file: str | Path) -> tuple[str, ...]:
    """Returns the names of classes in a text file, one a line.

    Raises:
        OSError: the file is not there, or cannot be opened.
        FileError: it is no such file, or has a name twice, which only those of ImageNet do.
    """
    path = Path(file)
    check_file(path)
    with path.open("rb") as opened:
        content = opened.read(MAX_TEXT + 1)
    try:
        if len(content) > MAX_TEXT:
            raise ValueError(f"it has more than {MAX_TEXT} bytes")
        labels = tuple(map(composed, content.decode("utf-8-sig").splitlines()))
        if empty := [number for number, label in enumerate(labels, 1) if not label.strip()]:
            raise ValueError(f"line {empty[0]} is empty")
        for label, count in collections.Counter(labels).most_common(1):
            if count > 1 and len(labels) not in LABELLED:
                raise ValueError(f"{shown(label)} stands in it {count} times")
    except ValueError as error:
        text = f"{path} is not a list of labels in UTF-8, one a line: {error}."
        raise FileError(text, path) from None
    return labels
