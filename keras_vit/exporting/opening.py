"""Opens an exported artefact as a Keras model of pixels, for what predicts and evaluates."""

import dataclasses
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_vit import environment
from keras_vit.config import PROBLEM_TYPES, RESIZING, ViTConfig
from keras_vit.exporting import records
from keras_vit.exporting.clean.runners import Runner
from keras_vit.exporting.formats import FORMATS, RECORD, Format
from keras_vit.exporting.rebuild import Description
from keras_vit.exporting.samples import to_grey

_GREY = 1  # channel


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class OpenedArtefact:
    """An exported artefact that is loaded.

    Attributes:
        about: what it says of itself.
        is_recorded: whether its files were compared with a record.
        model: from float32 pixels 0..255 (B, height, width, 3) to the source's logits, values or
            features.
    """

    about: Description
    is_recorded: bool
    model: keras.Model


class ExportedModel(keras.Model):
    """A functional model whose only layer asks an artefact; it has no weights to train or save."""


def open_artefact(path: Path) -> OpenedArtefact:
    """Opens a SavedModel, or an ONNX or TFLite file.

    Args:
        path: the file or folder, or one above it that holds a single artefact in its newest
            version.

    Raises:
        FileNotFoundError: there is none.
        ImportError: what runs it is not installed.
        ValueError: there are several, it is not as its record says, or nothing says what it takes.
    """
    name, artefact, about, is_recorded = _find(path)
    if about.image_shape[2] not in (_GREY, 3):
        raise ValueError(
            f"Image files have 1 or 3 channels. Received: {str(artefact)!r}, which takes images "
            f"of {about.image_shape[2]}."
        )
    if name not in FORMATS:  # one of a later version
        raise ValueError(f"There is no runtime for the format {name!r}.")
    row = FORMATS[name]
    row.require()
    try:
        with environment.without_log_lines():
            ask = _Ask(row, row.runner(artefact), about)
    except Exception as error:  # each runtime has errors of its own
        raise ValueError(
            f"{str(artefact)!r} cannot be loaded ({str(error).splitlines()[0]}); export it again."
        ) from error
    images = keras.Input((*about.image_shape[:2], 3))
    return OpenedArtefact(
        about=about,
        is_recorded=is_recorded,
        model=ExportedModel(images, ask(images), name=about.name),
    )


def _find(path: Path) -> tuple[str, Path, Description, bool]:
    if path.is_file() and not records.record_file(path.parent).is_file():
        return _alone(path)
    versions = records.find_versions(path)
    newest = max(versions, key=lambda folder: (len(folder.name), folder.name)).name
    found = [
        (name, inner, folder, record)
        for folder in versions
        if folder.name == newest
        for record in [records.read_record(folder)]
        for name, inner in record["artefacts"].items()
        if path.is_dir() or inner == "." or folder / inner == path
    ]
    if len(found) != 1:
        listed = ", ".join(str(folder / inner) for _, inner, folder, _ in found)
        raise ValueError(
            f"{str(path)!r} holds several exported models; give one of {listed}."
            if found
            else f"{str(path)!r} is none of the models in the {RECORD} beside it."
        )
    ((name, inner, folder, record),) = found
    files = records.files_of(inner, record)
    for _, fault in records.find_faults(folder, record, only=files):
        raise ValueError(f"{fault.rstrip('.')}; export the model again, or copy it again.")
    return name, folder / inner, Description.from_dict(record["description"]), True


def _alone(file: Path) -> tuple[str, Path, Description, bool]:
    """Returns the same of a file without record, which describes itself."""
    name = file.suffix.removeprefix(".")
    if name in FORMATS:
        FORMATS[name].require()
    try:
        fields = FORMATS[name].runner.describe(file) if name in FORMATS else None
        about = None if fields is None else Description.from_dict(fields)
    except Exception as error:  # each runtime has errors of its own
        raise ValueError(
            f"{str(file)!r} cannot be read ({str(error).splitlines()[0]}); export it again."
        ) from error
    if about is None:
        raise ValueError(
            f"{str(file)!r} does not say what images it takes, and has no verification.json "
            "beside it; export the model with this version of keras-vit."
        )
    return name, file, about, False


class _Ask(keras.layers.Layer):
    """Runs an exported model on pixels.

    Attributes:
        config: how images are prepared, and what it answers; no more of it is the artefact's.
    """

    def __init__(self, row: Format, runner: Runner, about: Description) -> None:
        super().__init__(name="artefact")
        self.supports_jit = False
        self._row, self._runner, self._about = row, runner, about
        self._output = "logits" if about.activation else about.answers  # they say most
        said = "regression" if about.answers == "values" else PROBLEM_TYPES.get(about.activation)
        classes = None if said is None else ViTConfig.classes
        resizing = {name: getattr(about, name) for name in RESIZING}
        self.config = ViTConfig(classes=classes, problem_type=said, **resizing)
        blank: np.ndarray = np.zeros((1, *about.image_shape[:2], 3), np.float32)
        self._shape = self._answer(blank).shape[1:]

    def compute_output_shape(self, input_shape: Any) -> tuple[int | None, ...]:
        return (input_shape[0], *self._shape)

    def call(self, pixels: Any) -> Any:
        answers = tf.numpy_function(self._answer, [pixels], tf.float32, stateful=False)
        return tf.ensure_shape(answers, (None, *self._shape))

    def _answer(self, pixels: np.ndarray) -> np.ndarray:
        about = self._about
        if about.image_shape[2] == _GREY:
            pixels = np.asarray(to_grey(pixels))
        signature, inputs = "", {"images": about.prepared(pixels)}
        if self._row.has_signatures:  # of which this takes float32; uint8 would be rounded
            signature, inputs = "pixels", {"pixel_values": about.normalized(pixels)}
        return self._runner.run(signature, inputs)[self._output]
