"""Names the tensors of a TFLite file, and writes metadata that MediaPipe and LiteRT tools read.

The metadata is a flatbuffer of the schema `metadata_schema.fbs` (MediaPipe, once TFLite Support),
in a buffer of the model. Its associated files, the labels and this package's description, are a zip
archive behind the model, which runtimes do not read.
"""

import json
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import flatbuffers
import numpy as np
from tensorflow.lite.python import schema_py_generated as schema

from keras_vit.exporting.clean import runners
from keras_vit.exporting.description import Description

LABELS, FIELD, IDENTIFIER = "labels.txt", b"TFLITE_METADATA", b"M001"
_PARSER_VERSION = "1.0.0"  # the first that reads what is written here
_MADE = (1980, 1, 1, 0, 0, 0)  # so that a file is the same whenever it is written
# metadata_schema.fbs: AssociatedFileType, ColorSpaceType, and the members of two unions.
_AXIS_LABELS = 2
_COLOURS = {"RGB": 1, "grey": 2}
_FEATURE, _IMAGE, _NORMALIZATION = 1, 2, 1


def write(file: Path, model: Any, about: Description) -> None:
    """Writes a converted model with named tensors, its outputs in order, and metadata.

    Args:
        file: the path to write.
        model: the converted model, as an object of TFLite's schema.
        about: what the file says of itself.
    """
    (graph,) = model.subgraphs
    _name_tensors(model, graph, about.outputs)
    model.description = f"{about.name}, written by keras-vit {about.keras_vit}".encode()
    buffer, field = schema.BufferT(), schema.MetadataT()
    buffer.data = np.frombuffer(make(about), np.uint8)
    field.name, field.buffer = FIELD, len(model.buffers)
    model.buffers.append(buffer)
    model.metadata = [*(model.metadata or ()), field]
    weights = sum(len(each.data) for each in model.buffers if each.data is not None)
    builder = flatbuffers.Builder(2**20 + weights + weights // 100)  # it need not grow
    builder.Finish(model.Pack(builder), b"TFL3")
    with file.open("wb") as stream:
        stream.write(memoryview(builder.Bytes)[builder.Head() :])
    texts = {runners.DESCRIPTION: json.dumps(about.to_dict(), indent=1)}
    if about.labels:
        texts[LABELS] = "".join(f"{label}\n" for label in about.labels)
    with zipfile.ZipFile(file, "a") as archive:
        for name, text in texts.items():
            archive.writestr(zipfile.ZipInfo(name, _MADE), text)


def make(about: Description) -> bytes:
    """Makes the metadata: of the image its colours, size and scaling, of each output its labels.

    The mean and deviation are those of the schema, (pixel - mean) / deviation of pixels 0..255.
    """
    builder = _Builder()
    low, high = about.input_range
    is_pixels = about.takes == "pixels"
    mean = [0.0 if is_pixels else 255 * value for value in about.image_mean]
    deviation = [1.0 if is_pixels else 255 * value for value in about.image_std]
    height, width, _ = about.image_shape
    size = builder.table({0: ("Uint32", width), 1: ("Uint32", height)})
    scaling = {0: builder.floats(mean), 1: builder.floats(deviation)}
    colours = ("Int8", _COLOURS.get(about.colours, 0))
    image = builder.tensor(
        "images",
        f"{about.colours} images, resized by a {about.filter} filter"
        + (" that smooths where they shrink." if about.antialias else "."),
        content=(_IMAGE, builder.table({0: colours, 1: size})),
        units=[builder.unit(_NORMALIZATION, scaling)],
        stats=builder.table({0: builder.floats([high]), 1: builder.floats([low])}),
    )
    outputs = [builder.output(name, about) for name in about.outputs]
    graph = builder.table({2: builder.vector([image]), 3: builder.vector(outputs)})
    description = builder.file(runners.DESCRIPTION, "all of this, and the source, as JSON", kind=0)
    root = builder.table(
        {
            0: builder.text(about.name),
            1: builder.text(f"A Vision Transformer, written by keras-vit {about.keras_vit}."),
            2: builder.text(about.weights_sha256),
            3: builder.vector([graph]),
            6: builder.vector([description]),
            7: builder.text(_PARSER_VERSION),
        }
    )
    return builder.finish(root)


_Value = int | tuple[str, float]  # an offset, or a type of the builder and its value


class _Builder:
    """Writes tables of the schema: fields by their number, values inside or as offsets."""

    def __init__(self) -> None:
        self._builder = flatbuffers.Builder(1024)

    def text(self, value: str) -> int:
        return int(self._builder.CreateString(value))

    def floats(self, values: Sequence[float]) -> int:
        return int(self._builder.CreateNumpyVector(np.array(values, np.float32)))

    def vector(self, offsets: Sequence[int]) -> int:
        self._builder.StartVector(4, len(offsets), 4)
        for offset in reversed(offsets):
            self._builder.PrependUOffsetTRelative(offset)
        return int(self._builder.EndVector())

    def table(self, fields: Mapping[int, _Value]) -> int:
        self._builder.StartObject(max(fields, default=-1) + 1)
        for number, value in fields.items():
            if isinstance(value, int):
                self._builder.PrependUOffsetTRelativeSlot(number, value, 0)
            else:
                kind, inside = value
                getattr(self._builder, f"Prepend{kind}Slot")(number, inside, 0)
        return int(self._builder.EndObject())

    def unit(self, kind: int, options: Mapping[int, _Value]) -> int:
        return self.table({0: ("Uint8", kind), 1: self.table(options)})

    def file(self, name: str, description: str, *, kind: int) -> int:
        text = self.text(description)
        return self.table({0: self.text(name), 1: text, 2: ("Int8", kind)})

    def tensor(
        self,
        name: str,
        description: str,
        *,
        content: tuple[int, int],
        units: Sequence[int] = (),
        stats: int | None = None,
        files: Sequence[int] = (),
    ) -> int:
        kind, properties = content
        fields: dict[int, _Value] = {
            0: self.text(name),
            1: self.text(description),
            3: self.table({0: ("Uint8", kind), 1: properties}),
        }
        if units:
            fields[4] = self.vector(units)
        if stats is not None:
            fields[5] = stats
        if files:
            fields[6] = self.vector(files)
        return self.table(fields)

    def output(self, name: str, about: Description) -> int:
        texts = {
            "logits": "the classifier's output",
            "probabilities": f"{about.activation} of the logits",
            "features": "what the network makes of an image before its classifier",
        }
        has_labels = bool(about.labels) and name != "features"
        files = [self.file(LABELS, "one class a line", kind=_AXIS_LABELS)] if has_labels else []
        return self.tensor(name, texts[name], content=(_FEATURE, self.table({})), files=files)

    def finish(self, root: int) -> bytes:
        self._builder.Finish(root, IDENTIFIER)
        return bytes(self._builder.Output())


def _name_tensors(model: Any, graph: Any, outputs: Sequence[str]) -> None:
    """Names the input and the outputs as the signature does, and puts the outputs in order."""
    (signature,) = model.signatureDefs
    tensors = {
        each.name.decode(): each.tensorIndex for each in (*signature.inputs, *signature.outputs)
    }
    for name, index in tensors.items():
        graph.tensors[index].name = name.encode()
    graph.outputs = [tensors[name] for name in outputs]
