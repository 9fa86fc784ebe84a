"""Opens an exported artefact as a Keras model of pixels, for what predicts and evaluates."""

import dataclasses
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_vit import environment
from keras_vit.config import ViTConfig
from keras_vit.data.images import to_grey
from keras_vit.exporting import checking, description, verification
from keras_vit.exporting.clean import runners
from keras_vit.exporting.description import Description

_SIGNATURES = {"savedmodel": "pixels"}  # which takes float32; its uint8 would be rounded
_GREY, _COLOURED = 1, 3


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class OpenedArtefact:
    """An exported artefact that is loaded.

    Attributes:
        format: one of `FORMATS`.
        path: the file, or the folder of a SavedModel.
        about: what it says of itself.
        is_recorded: whether its files were compared with a record.
        model: from float32 pixels 0..255 (B, height, width, 3) to the source's own answer.
    """

    format: str
    path: Path
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
    _check_channels(artefact, about)
    runners.require(name)
    try:
        with environment.without_log_lines():
            model = _model(name, runners.open_runner(name, artefact), about)
    except Exception as error:  # each runtime has errors of its own
        raise ValueError(
            f"{str(artefact)!r} cannot be loaded ({str(error).splitlines()[0]}); export it again."
        ) from error
    return OpenedArtefact(
        format=name,
        path=artefact,
        about=about,
        is_recorded=is_recorded,
        model=model,
    )


def _find(path: Path) -> tuple[str, Path, Description, bool]:
    """Returns format, path and description of an artefact, and whether a record vouches for it."""
    if path.is_file() and not checking.record_file(path.parent).is_file():
        return _alone(path)
    versions = checking.find_versions(path)
    newest = max(versions, key=lambda folder: (len(folder.name), folder.name)).name
    found = [
        (name, inner, folder, record)
        for folder in versions
        if folder.name == newest
        for record in [checking.read_record(folder)]
        for name, inner in record["artefacts"].items()
        if path.is_dir() or inner == "." or folder / inner == path
    ]
    if len(found) != 1:
        listed = ", ".join(str(folder / inner) for _, inner, folder, _ in found)
        raise ValueError(
            f"{str(path)!r} holds several exported models; give one of {listed}."
            if found
            else f"{str(path)!r} is none of the models in the {verification.RECORD} beside it."
        )
    ((name, inner, folder, record),) = found
    files = checking.files_of(inner, record)
    for _, fault in checking.find_faults(folder, record, only=files):
        raise ValueError(f"{fault.rstrip('.')}; export the model again, or copy it again.")
    return name, folder / inner, Description.from_dict(record["description"]), True


def _alone(file: Path) -> tuple[str, Path, Description, bool]:
    """Returns the same of a file without record, which describes itself."""
    name = file.suffix.removeprefix(".")
    about = None
    try:
        runners.require(name)
        if name == "onnx":
            about = description.read_onnx(runners.OnnxRunner(file).properties)
        elif name == "tflite":
            fields = runners.read_archive(file)
            about = None if fields is None else Description.from_dict(fields)
    except ImportError:
        raise
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


def _check_channels(artefact: Path, about: Description) -> None:
    channels = about.image_shape[2]
    if channels not in (_GREY, _COLOURED):
        raise ValueError(
            f"Image files have 1 or 3 channels. Received: {str(artefact)!r}, which takes images "
            f"of {channels}."
        )


def _model(name: str, runner: runners.Runner, about: Description) -> ExportedModel:
    height, width, _ = about.image_shape
    images = keras.Input((height, width, 3))
    outputs = _Ask(name, runner, about)(images)
    return ExportedModel(images, outputs, name=about.name)


class _Ask(keras.layers.Layer):
    """Asks an artefact for its answers to pixels.

    Attributes:
        config: how images are prepared for it; nothing else of it is true of the artefact.
    """

    def __init__(self, name: str, runner: runners.Runner, about: Description) -> None:
        super().__init__(name="artefact")
        self.supports_jit = False
        self.config = ViTConfig(antialias=about.antialias)
        self._runner, self._about, self._format = runner, about, name
        # Of probabilities that are a softmax, the logits say more.
        is_softmax = about.activation == "softmax" and about.answers != "features"
        self._output = "logits" if is_softmax else about.answers
        blank: np.ndarray = np.zeros((1, *about.image_shape[:2], 3), np.float32)
        self._shape = self._answer(blank).shape[1:]

    def compute_output_shape(self, input_shape: Any) -> tuple[int | None, ...]:
        return (input_shape[0], *self._shape)

    def call(self, pixels: Any) -> Any:
        answers = tf.numpy_function(self._answer, [pixels], tf.float32, stateful=False)
        return tf.ensure_shape(answers, (None, *self._shape))

    def _answer(self, pixels: np.ndarray) -> np.ndarray:
        about, kind = self._about, runners.family(self._format)
        if about.image_shape[2] == _GREY:
            pixels = np.asarray(to_grey(pixels))
        if kind == "savedmodel":
            inputs = {"pixel_values": about.normalized(pixels)}
        else:
            inputs = {"images": about.prepared(pixels)}
        return self._runner.run(_SIGNATURES.get(kind, ""), inputs)[self._output]
