"""What an exported file says of itself: its input, how images become that, its labels, its source.

Each format has a place for it: `metadata_props` in ONNX, the metadata of TFLite (see
`tflite_metadata`), and for a SavedModel, as for all, `verification.json` beside it.
"""

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

import keras
import numpy as np

from keras_vit import version
from keras_vit.exporting.rebuild import Exportable, Range

if TYPE_CHECKING:
    import onnx

COLOURS: Mapping[int, str] = {1: "grey", 3: "RGB", 4: "RGBA"}
# The names that the ONNX specification has for the range of an image's values.
_ONNX_RANGES = {(0.0, 255.0): "NominalRange_0_255", (-1.0, 1.0): "Normalized_1_1",
                (0.0, 1.0): "Normalized_0_1"}  # fmt: skip
_ONNX_FORMATS = {"RGB": "Rgb8", "grey": "Gray8", "RGBA": "Rgba8"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Description:
    """What a program must know to run an exported file without its model.

    Attributes:
        name: the model's.
        keras_vit: the version of this package that wrote the file.
        weights_sha256: of the source, see `weights_sha256`.
        image_shape: (height, width, channels) of the images.
        colours: the order of the channels, "RGB" or "grey"; "" where they are no colours.
        takes: "pixels" 0..255, or "normalized": (pixels / 255 - mean) / deviation.
        image_mean: of the pixels over 255, for each channel.
        image_std: their deviation.
        filter: how images are resized.
        antialias: whether that smooths where an image shrinks.
        activation: from logits to probabilities; "" without classifier.
        answers: the output that the source returns.
        outputs: of an ONNX or TFLite file, in order.
        labels: the name of each class, in the order of the outputs.
    """

    name: str
    weights_sha256: str
    image_shape: tuple[int, int, int]
    colours: str
    takes: Range
    image_mean: tuple[float, ...]
    image_std: tuple[float, ...]
    antialias: bool
    activation: str
    answers: str
    outputs: tuple[str, ...]
    labels: tuple[str, ...]
    filter: Literal["bilinear"] = "bilinear"
    keras_vit: str = version.__version__

    @property
    def input_range(self) -> tuple[float, float]:
        """The lowest and the highest value that an image may have in the file's input."""
        values = self.prepared(np.array([[0.0], [255.0]], np.float32))
        return float(values.min()), float(values.max())

    def prepared(self, pixels: np.ndarray) -> np.ndarray:
        """Converts pixels 0..255 to the file's input, float32."""
        values: np.ndarray = np.asarray(pixels, np.float32)
        return values if self.takes == "pixels" else self.normalized(values)

    def normalized(self, pixels: np.ndarray) -> np.ndarray:
        """Scales pixels 0..255 by mean and deviation, as the model does."""
        pairs = zip(self.image_mean, self.image_std, strict=True)
        rows = [(1 / (255 * std), -mean / std) for mean, std in pairs]
        rows = rows[:1] if len(set(rows)) == 1 else rows  # as for images of another depth
        scale, offset = np.array(rows, np.float32).T
        normalized: np.ndarray = np.asarray(pixels, np.float32) * scale + offset
        return normalized

    def to_dict(self) -> dict[str, Any]:
        """Returns the fields and the range of the input, as plain values for JSON."""
        return {**dataclasses.asdict(self), "input_range": self.input_range}

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> "Description":
        """Reads what `to_dict` returned.

        Raises:
            ValueError: a field is missing or of another type.
        """
        names = {field.name: field for field in dataclasses.fields(cls)}
        try:
            values = {name: fields[name] for name in names}
        except KeyError as error:
            raise ValueError(f"its description lacks {error}") from None
        for name, value in values.items():
            if isinstance(value, list):
                values[name] = tuple(value)
            if str(names[name].type).startswith("tuple") != isinstance(values[name], tuple):
                raise ValueError(f"its description has {name}={value!r}")
        return cls(**values)


def describe(exportable: Exportable, *, name: str, labels: tuple[str, ...]) -> Description:
    """Returns the description of a model's files.

    Args:
        exportable: the rebuilt model.
        name: of the model.
        labels: the name of each class; empty without classifier.
    """
    config, activation = exportable.input_config, exportable.activation
    return Description(
        name=name,
        weights_sha256=weights_sha256(exportable.network),
        image_shape=exportable.image_shape,
        colours=COLOURS.get(exportable.image_shape[2], ""),
        takes=exportable.takes,
        image_mean=tuple(config.image_mean),
        image_std=tuple(config.image_std),
        antialias=config.antialias,
        activation="" if activation is None else getattr(activation, "__name__", ""),
        answers=exportable.answers,
        outputs=exportable.output_names,
        labels=labels,
    )


def weights_sha256(network: keras.Model) -> str:
    """Returns the SHA-256 of a model's weights: path and float32 values of each, by path.

    It is the same for a model in another precision or file format that holds the same values.
    """
    digest = hashlib.sha256()
    for weight in sorted(network.weights, key=lambda weight: str(weight.path)):
        digest.update(f"{weight.path}\n".encode())
        array = np.asarray(keras.ops.convert_to_numpy(weight), "<f4")
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()


def describe_onnx(model: "onnx.ModelProto", about: Description) -> None:
    """Writes a description into an ONNX model: each field as JSON, under its name.

    The keys that begin with "Image." are those of the ONNX specification ("Optional metadata",
    docs/MetadataProps.md).
    """
    import onnx

    fields = {name: json.dumps(value) for name, value in about.to_dict().items()}
    for key, value in (
        ("Image.BitmapPixelFormat", _ONNX_FORMATS.get(about.colours)),
        ("Image.NominalPixelRange", _ONNX_RANGES.get(about.input_range)),
    ):
        if value is not None:
            fields[key] = value
    onnx.helper.set_model_props(model, fields)
    model.producer_name, model.producer_version = "keras-vit", about.keras_vit
    model.doc_string = f"{about.name}: {_summary(about)}"


def read_onnx(properties: Mapping[str, str]) -> Description | None:
    """Reads a description from an ONNX file's `metadata_props`; None if it has none.

    Raises:
        ValueError: it is damaged.
    """
    if "weights_sha256" not in properties:
        return None
    fields = {}
    for name, value in properties.items():
        if not name.startswith("Image."):
            fields[name] = json.loads(value)
    return Description.from_dict(fields)


def _summary(about: Description) -> str:
    height, width, _ = about.image_shape
    low, high = about.input_range
    what = f"{len(about.labels)} classes" if about.labels else "features"
    return (
        f"images {width} pixels wide and {height} high, {about.colours or 'channels'} last, values "
        f"{low:g} to {high:g}; {what}. Written by keras-vit {about.keras_vit}."
    )
