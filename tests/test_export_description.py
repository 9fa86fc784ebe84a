"""Exported files say what they take and answer, each in its format's own place."""

import dataclasses
import json
import zipfile
from pathlib import Path
from typing import Any

import flatbuffers
import numpy as np
import pytest
from exported import LABELS, served_model
from tensorflow.lite.python import schema_py_generated as schema

from keras_vit.exporting import description, onnx_files, tflite, tflite_metadata
from keras_vit.exporting.clean import runners
from keras_vit.exporting.description import Description
from keras_vit.exporting.rebuild import rebuild

MEAN, DEVIATION = (0.4, 0.5, 0.6), (0.2, 0.3, 0.25)
PIXELS = np.random.default_rng(3).integers(0, 256, (2, 32, 48, 3))


def about(**fields: Any) -> Description:
    exportable = rebuild(served_model(num_layers=1, **fields))
    return description.describe(exportable, name="pets", labels=LABELS)


@pytest.mark.parametrize("is_scaled", [True, False])
def test_a_description_prepares_images_as_the_model_does(is_scaled: bool) -> None:
    """What it computes from pixels is what the file's input takes, and its range is right."""
    model = served_model(
        num_layers=1, include_preprocessing=is_scaled, image_mean=MEAN, image_std=DEVIATION
    )
    exportable = rebuild(model)
    made = description.describe(exportable, name="pets", labels=LABELS)
    np.testing.assert_allclose(made.prepared(PIXELS), exportable.to_original(PIXELS), rtol=1e-6)
    expected = exportable.normalized(PIXELS.astype(np.float32))
    np.testing.assert_allclose(made.normalized(PIXELS), expected, rtol=1e-6)
    low, high = (0.0, 255.0) if is_scaled else (-0.5 / 0.3, 0.6 / 0.2)
    low = low if is_scaled else min(-mean / std for mean, std in zip(MEAN, DEVIATION, strict=True))
    assert made.input_range == pytest.approx((low, high))


def test_grey_images_stay_grey() -> None:
    """The same mean for three channels is one for one channel."""
    made = about(input_shape=(32, 48, 1), include_preprocessing=False)
    assert made.colours == "grey"
    assert made.prepared(PIXELS[..., :1]).shape == (2, 32, 48, 1)
    assert made.input_range == (-1.0, 1.0)


def test_a_description_survives_json() -> None:
    """Read back it is the same; one that lacks a field or has another type is refused."""
    made = about(antialias=False)
    fields = json.loads(json.dumps(made.to_dict()))
    assert Description.from_dict({**fields, "of_a_later_version": 1}) == made
    assert made.antialias is False
    with pytest.raises(ValueError, match="lacks 'labels'"):
        Description.from_dict({name: fields[name] for name in fields if name != "labels"})
    with pytest.raises(ValueError, match="has labels='ant'"):
        Description.from_dict({**fields, "labels": "ant"})


def test_the_source_is_known_by_its_weights() -> None:
    """The hash is that of the values: another precision has the same, another bit has not."""
    model = served_model(num_layers=1)
    before = description.weights_sha256(rebuild(model).network)
    assert description.weights_sha256(rebuild(model.copy(dtype="mixed_bfloat16")).network) == before
    bias = model.get_layer("head").bias
    bias.assign(np.nextafter(np.asarray(bias), 1))
    assert description.weights_sha256(rebuild(model).network) != before


def test_an_onnx_file_says_what_it_is(tmp_path: Path) -> None:
    """ONNX Runtime reads every field, and the names that the specification has for images."""
    pytest.importorskip("onnxruntime")
    made, file = about(), tmp_path / "pets.onnx"
    onnx_files.write_onnx(rebuild(served_model(num_layers=1)), {"onnx": file}, about=made)
    runner = runners.OnnxRunner(file)
    assert description.read_onnx(runner.properties) == made
    assert runner.properties["Image.BitmapPixelFormat"] == "Rgb8"
    assert runner.properties["Image.NominalPixelRange"] == "NominalRange_0_255"
    assert description.read_onnx({}) is None


def test_a_tflite_file_says_what_it_is(tmp_path: Path) -> None:
    """The tensors have names, outputs their order, and the archive the labels and the rest."""
    pytest.importorskip("ai_edge_litert")
    made, file = about(), tmp_path / "pets.tflite"
    tflite.write_tflite(rebuild(served_model(num_layers=1)), {"tflite": file}, about=made)
    read = runners.read_archive(file)
    assert read is not None
    assert Description.from_dict(read) == made
    with zipfile.ZipFile(file) as archive:
        assert archive.read("labels.txt").decode().splitlines() == list(LABELS)
    model = schema.ModelT.InitFromPackedBuf(file.read_bytes(), 0)
    (graph,) = model.subgraphs
    names = [graph.tensors[index].name for index in (*graph.inputs, *graph.outputs)]
    assert names == [b"images", b"logits", b"probabilities", b"features"]
    (field,) = [each for each in model.metadata if each.name == tflite_metadata.FIELD]
    metadata = bytes(bytearray(model.buffers[field.buffer].data))
    assert metadata == tflite_metadata.make(made)


class Table:
    """A table of a flatbuffer, by the numbers of its fields in metadata_schema.fbs."""

    def __init__(self, content: bytes, position: int) -> None:
        self._table = flatbuffers.table.Table(content, position)

    def _place(self, field: int) -> int:
        offset = self._table.Offset(4 + 2 * field)
        assert offset, f"field {field} is missing"
        return int(offset) + int(self._table.Pos)

    def table(self, field: int) -> "Table":
        return Table(self._table.Bytes, self._table.Indirect(self._place(field)))

    def tables(self, field: int) -> list["Table"]:
        count = self._table.VectorLen(self._place(field) - self._table.Pos)
        start = self._table.Vector(self._place(field) - self._table.Pos)
        places = range(start, start + 4 * count, 4)
        return [Table(self._table.Bytes, self._table.Indirect(place)) for place in places]

    def text(self, field: int) -> str:
        return str(self._table.String(self._place(field)).decode())

    def floats(self, field: int) -> list[float]:
        kind = flatbuffers.number_types.Float32Flags
        offset = self._place(field) - self._table.Pos
        return list(self._table.GetVectorAsNumpy(kind, offset))

    def byte(self, field: int) -> int:
        return int(self._table.Bytes[self._place(field)])


def test_metadata_of_tflite_is_of_its_schema() -> None:
    """Every value is in the field that the schema has for it, scaling as (pixel - mean) / std."""
    content = tflite_metadata.make(dataclasses.replace(about(), takes="normalized"))
    assert content[4:8] == b"M001"
    root = Table(content, int.from_bytes(content[:4], "little"))
    assert (root.text(0), root.text(7)) == ("pets", "1.0.0")
    (graph,) = root.tables(3)
    (image,) = graph.tables(2)
    assert image.text(0) == "images"
    assert image.table(3).byte(0) == 2  # ImageProperties
    assert image.table(3).table(1).byte(0) == 1  # RGB
    (unit,) = image.tables(4)
    assert unit.byte(0) == 1  # NormalizationOptions
    assert unit.table(1).floats(0) == unit.table(1).floats(1) == [127.5] * 3
    assert (image.table(5).floats(0), image.table(5).floats(1)) == ([1.0], [-1.0])
    outputs = graph.tables(3)
    assert [output.text(0) for output in outputs] == ["logits", "probabilities", "features"]
    for output in outputs[:2]:
        (labels,) = output.tables(6)
        assert (labels.text(0), labels.byte(2)) == ("labels.txt", 2)  # TENSOR_AXIS_LABELS


def test_a_damaged_archive_is_told(tmp_path: Path) -> None:
    """A file without one has no description; a damaged one is an error."""
    file = tmp_path / "pets.tflite"
    file.write_bytes(b"no archive")
    assert runners.read_archive(file) is None
    with zipfile.ZipFile(file, "a") as archive:
        archive.writestr(runners.DESCRIPTION, '{"name": "pets"}')
    assert runners.read_archive(file) == {"name": "pets"}
    content = bytearray(file.read_bytes())
    content[content.index(b"pets")] ^= 1
    file.write_bytes(content)
    with pytest.raises(ValueError, match="archive behind it is damaged"):
        runners.read_archive(file)
