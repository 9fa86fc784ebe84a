"""Makes every asked-for artefact of a model, checks each, and puts them in place together."""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import keras

from keras_vit.export import (
    rebuild,
    references,
    savedmodel,
    serving_files,
    verification,
    versions,
)
from keras_vit.export.clean import request as requests
from keras_vit.export.rebuild import Exportable

FORMATS = ("savedmodel",)
TOP_K = 5


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
    checks: tuple[requests.Check, ...]


def export(
    model: keras.Model,
    path: str | Path,
    *,
    formats: Iterable[str] = ("savedmodel",),
    labels: Sequence[str] | str | Path | None = None,
    images: Sequence[str | Path] = (),
    top_k: int = TOP_K,
    verify: bool = True,
) -> tuple[Artefact, ...]:
    """Writes a trained model for TensorFlow Serving.

    The model is rebuilt in float32, whatever it was trained in. Each artefact is checked on the
    disk, in a process that can import neither Keras nor this package, before the next version of
    all of them appears at once. An artefact that fails its checks appears nowhere.

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
            model's name. Version n lies in `path/n`.
        formats: which of `FORMATS`.
        labels: the name of each class, or a text file with one a line; None for "0", "1", ...
        images: image files to compare on; without, or with fewer than eight, drawn ones join.
        top_k: classes in an answer of the server, at most all.
        verify: whether to check the artefacts before they are put in place.

    Raises:
        ValueError: an argument does not fit the model.
        TypeError: the model is of another kind.
        VerificationError: an artefact does not do what the model does.
        OSError: another export is at work in the directory.
    """
    wanted = _formats(formats)
    exportable = rebuild.rebuild(model)
    names = _labels(labels, exportable)
    top_k = min(top_k, exportable.classes or top_k)
    if top_k < 1:
        raise ValueError(f"top_k must be at least 1. Received: top_k={top_k!r}.")
    job = _Job(
        directory=Path(path).absolute(),
        exportable=exportable,
        labels=names,
        top_k=top_k,
        images=tuple(images),
        verify=verify,
    )
    return job.run(model, wanted)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class _Job:
    directory: Path
    exportable: Exportable
    labels: tuple[str, ...]
    top_k: int
    images: tuple[str | Path, ...]
    verify: bool

    def run(self, model: keras.Model, formats: Sequence[str]) -> tuple[Artefact, ...]:
        expected = references.make_references(self.exportable, self.images)
        rebuilt = references.compare_rebuilt(model, self.exportable, expected)
        verification.require([rebuilt], artefact="float32 copy, and so no")
        with versions.staging_folder(self.directory) as stage:
            made, moves = [], {}
            version = versions.next_version([self.directory])
            for name in formats:
                folder, final = stage / name, self.directory / str(version)
                _WRITERS[name](self, folder)
                checks = self._check(name, folder, expected, rebuilt)
                made.append(self._artefact(name, folder, final, checks))
                moves[folder] = final
            serving_files.write_server_files(
                self.directory, exportable=self.exportable, labels=self.labels
            )
            versions.publish(moves)
        return tuple(made)

    def write_savedmodel(self, folder: Path) -> None:
        savedmodel.write_savedmodel(
            self.exportable,
            folder,
            labels=self.labels,
            top_k=self.top_k,
            model_name=self.directory.name,
        )

    def _check(
        self,
        name: str,
        folder: Path,
        expected: references.References,
        rebuilt: requests.Check,
    ) -> tuple[requests.Check, ...]:
        checks: tuple[requests.Check, ...] = (rebuilt,)
        runtime: dict[str, str] = {}
        if self.verify:
            request = requests.Request(
                format=name,
                path=folder,
                parameter_bytes=self.exportable.parameter_bytes,
                batch_sizes=references.BATCH_SIZES,
                labels=self.labels,
                cases=verification.savedmodel_cases(
                    self.exportable, expected, labels=self.labels, top_k=self.top_k
                ),
            )
            found, runtime = verification.check_artefact(request)
            checks = (rebuilt, *found)
        count = min(len(self.images), len(expected.files))
        verification.write_record(
            folder,
            artefact=name,
            checks=checks,
            runtime=runtime,
            images=f"{count} given, {len(expected.files) - count} drawn",
        )
        return checks

    def _artefact(
        self, name: str, folder: Path, final: Path, checks: tuple[requests.Check, ...]
    ) -> Artefact:
        size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
        return Artefact(format=name, path=final, bytes=size, checks=checks)


_WRITERS: dict[str, Callable[[_Job, Path], None]] = {"savedmodel": _Job.write_savedmodel}


def _formats(formats: Iterable[str]) -> tuple[str, ...]:
    wanted = (formats,) if isinstance(formats, str) else tuple(formats)
    unknown = [name for name in wanted if name not in FORMATS]
    if unknown or not wanted or len(set(wanted)) < len(wanted):
        raise ValueError(
            f"formats must be some of {', '.join(FORMATS)}, each once. Received: {wanted!r}."
        )
    return wanted


def _labels(labels: Sequence[str] | str | Path | None, exportable: Exportable) -> tuple[str, ...]:
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
