"""What exported files say of themselves, and that commands run them as they run a model."""

import dataclasses
import json
import shutil
import zipfile
from pathlib import Path
from typing import Any

import flatbuffers
import image_files
import keras
import numpy as np
import pytest
from exported import served_model
from tensorflow.lite.python import schema_py_generated as schema

from keras_vit import VisionTransformer, cli
from keras_vit.config import RESIZING
from keras_vit.data import load_data, load_test_folder
from keras_vit.evaluation import evaluate, log_probabilities
from keras_vit.exporting import FORMATS, export, onnx_files, opening, tflite
from keras_vit.exporting.clean import runners
from keras_vit.exporting.rebuild import Description, Exportable, describe, rebuild, weights_sha256

pytest.importorskip("onnxruntime")
pytest.importorskip("ai_edge_litert")

LABELS = ("plain", "striped")
# By how much probabilities may differ: rounded weights err, all others do not.
LIMITS = {"savedmodel": 1e-5, "onnx": 1e-5, "tflite": 1e-5, "tflite-fp16": 1e-3,
          "tflite-int8": 0.03, "onnx-int8": 0.03}  # fmt: skip
PIXELS = np.random.default_rng(3).integers(0, 256, (2, 32, 48, 3))


def made() -> VisionTransformer:
    """A model whose images are resized and normalised in a way of its own."""
    return served_model(
        num_layers=1, classes=2, antialias=False, interpolation="bicubic", crop_pct=0.8,
        crop_mode="center", crop_offset="floor", image_mean=(0.4, 0.5, 0.6),
        image_std=(0.2, 0.3, 0.25), classifier_activation="sigmoid",
    )  # fmt: skip


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Photos, the model as a file, and one version of it in every format, unverified."""
    root = tmp_path_factory.mktemp("opening")
    image_files.write_classes(root / "photos", count=6)
    model = made()
    model.save(root / "model.keras")
    export(model, root / "pets", formats=tuple(LIMITS), labels=LABELS, verify=False)
    return root


def path_of(name: str, root: Path) -> Path:
    row = FORMATS[name]
    folder = root / "pets" / row.folder / "1"
    return folder / f"pets{row.suffix}" if row.suffix else folder


def command(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[list[dict[str, Any]], str]:
    """The JSON lines that a command prints, and its errors."""
    cli.main([*map(str, words), "--json"])
    printed = capsys.readouterr()
    return [json.loads(line) for line in printed.out.splitlines()], printed.err


def test_every_format_answers_like_the_model(place: Path) -> None:
    """Labels, size, filter and normalisation are those of the model, and so are the answers."""
    photos = load_data(str(place / "photos")).train
    expected = np.exp(log_probabilities(made(), photos))
    assert np.ptp(expected[:, 0]) > 0.05
    for name, limit in LIMITS.items():
        opened = opening.open_artefact(path_of(name, place))
        assert (opened.about.labels, opened.is_recorded) == (LABELS, True)
        answers = np.exp(log_probabilities(opened.model, photos))
        np.testing.assert_allclose(answers, expected, atol=limit, err_msg=name)


def test_commands_take_an_export_as_they_take_a_model(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The numbers of `predict`, `evaluate` and `--tta` are those of the model."""
    photos, names = place / "photos", ("model.keras", "pets/onnx/1/pets.onnx")
    of_model, of_export = (
        command(capsys, "predict", place / name, photos / "striped", "--tta") for name in names
    )
    assert len(of_export[0]) == len(of_model[0]) > 5
    for ours, theirs in zip(of_model[0], of_export[0], strict=True):
        first, second = (each["predictions"] for each in (ours, theirs))
        places = {"0": "plain", "1": "striped"}
        assert places[first[0]["label"]] == second[0]["label"]
        assert first[0]["probability"] == pytest.approx(second[0]["probability"], abs=1e-5)
    out = place / "report"
    rows, _ = command(capsys, "evaluate", place / "pets/1", "--data", photos, "--out", out)
    (evaluated,) = [row for row in rows if row["event"] == "evaluation"]
    data = load_data(str(photos))
    whole = load_test_folder(str(photos), labels=LABELS).test
    expected = evaluate(made(), whole, labels=data.labels)
    assert (evaluated["images"], evaluated["accuracy"]) == (12, expected.accuracy)
    assert evaluated["loss"] == pytest.approx(expected.loss, abs=1e-5)
    assert "keras-vit explain" not in (out / "report.html").read_text()


def test_an_export_that_is_not_as_it_was_is_refused(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One flipped byte in any format is found by the hash that the record carries."""
    shutil.copytree(place / "pets", tmp_path / "pets")
    for name in LIMITS:
        path = path_of(name, tmp_path)
        file = path / "variables/variables.data-00000-of-00001" if path.is_dir() else path
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
        _, error = command(capsys, "predict", path, place / "photos")
        assert "other content than was exported" in error
        assert error.count("\n") == 1


def test_a_file_without_its_record_describes_itself(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It runs, and it is said that nothing vouches for it; a foreign file is refused."""
    for name in ("onnx", "tflite"):
        alone = Path(shutil.copy(path_of(name, place), tmp_path))
        rows, error = command(capsys, "predict", alone, place / "photos/plain/000.jpg")
        assert {each["label"] for each in rows[0]["predictions"]} == set(LABELS)
        assert "has no verification.json beside it" in error
        alone.write_bytes(alone.read_bytes()[:1000])
        _, error = command(capsys, "predict", alone, place / "photos/plain/000.jpg")
        assert "cannot be read" in error or "does not say what images" in error


def test_what_an_export_cannot_do_is_refused(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One sentence each, for flags, for several models at one place, and for other commands."""
    file, photos, dense = path_of("onnx", place), place / "photos", place / "dense.keras"
    layers = [keras.Input((8, 8, 3)), keras.layers.Flatten(), keras.layers.Dense(2)]
    keras.Sequential(layers).save(dense)
    for words, message in (
        (("predict", file, photos, "--precision", "bfloat16"), "leave --precision out"),
        (("evaluate", file, "--data", photos, "--more"), "--more measures features"),
        (("evaluate", file), "has no images of its own"),
        (("predict", place / "pets/tflite", photos), "holds several exported models; give one"),
        (("predict", place / "pets", photos), "holds several exported models; give one"),
        (("predict", file.with_name("labels.onnx"), photos), "There is no"),
        (("explain", file, photos / "plain/000.jpg", "--out", place / "x"), "predict and evaluate"),
        (("predict", dense, photos, "--precision", "bfloat16"), "runs in bfloat16; leave"),
        (("export", dense, "--out", place / "x"), "export takes a VisionTransformer, or"),
        (("export", file, "--out", place / "x"), "predict and evaluate"),
    ):
        rows, error = command(capsys, *words)
        assert message in error
        assert (rows, error.count("\n")) == ([], 1)
    monkeypatch.setattr(runners.importlib.util, "find_spec", lambda name: None)  # type: ignore[attr-defined]
    assert "pip install onnxruntime" in command(capsys, "predict", file, photos)[1]


MEAN, DEVIATION = (0.4, 0.5, 0.6), (0.2, 0.3, 0.25)


def small(**fields: Any) -> Exportable:
    return rebuild(served_model(num_layers=1, classes=2, **fields))


def about(**fields: Any) -> Description:
    return describe(small(**fields), name="pets", labels=LABELS)


@pytest.mark.parametrize("is_scaled", [True, False])
def test_a_description_prepares_images_as_the_model_does(is_scaled: bool) -> None:
    """What it computes from pixels is what the file's input takes, and its range is right."""
    fields = {"include_preprocessing": is_scaled, "image_mean": MEAN, "image_std": DEVIATION}
    exportable, made = small(**fields), about(**fields)
    np.testing.assert_allclose(made.prepared(PIXELS), exportable.to_original(PIXELS), rtol=1e-6)
    expected = exportable.normalized(PIXELS)
    np.testing.assert_allclose(made.normalized(PIXELS), expected, rtol=1e-6)
    low, high = (0.0, 255.0) if is_scaled else (-0.5 / 0.3, 0.6 / 0.2)
    low = low if is_scaled else min(-mean / std for mean, std in zip(MEAN, DEVIATION, strict=True))
    assert made.input_range == pytest.approx((low, high))
    # The same mean for three channels is one for one channel.
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
    old = {name: value for name, value in fields.items() if name not in RESIZING[1:]}
    assert Description.from_dict(old) == made  # written before there was a choice
    with pytest.raises(ValueError, match="lacks 'labels'"):
        Description.from_dict({name: fields[name] for name in fields if name != "labels"})
    with pytest.raises(ValueError, match="has labels='ant'"):
        Description.from_dict({**fields, "labels": "ant"})


def test_the_source_is_known_by_its_weights() -> None:
    """The hash is that of the values: another precision has the same, another bit has not."""
    model = served_model(num_layers=1)
    before = weights_sha256(rebuild(model).network)
    assert weights_sha256(rebuild(model.copy(dtype="mixed_bfloat16")).network) == before
    bias = model.get_layer("head").bias
    bias.assign(np.nextafter(np.asarray(bias), 1))
    assert weights_sha256(rebuild(model).network) != before


def test_an_onnx_file_says_what_it_is(tmp_path: Path) -> None:
    """ONNX Runtime reads every field, and the names that the specification has for images."""
    made, file = about(), tmp_path / "pets.onnx"
    onnx_files.write(small(), {"onnx": file}, about=made)
    assert Description.from_dict(runners.OnnxRunner.describe(file) or {}) == made
    properties = runners.OnnxRunner(file).session.get_modelmeta().custom_metadata_map
    assert properties["Image.BitmapPixelFormat"] == "Rgb8"
    assert properties["Image.NominalPixelRange"] == "NominalRange_0_255"
    foreign = onnx_files.make_onnx(small())
    file.write_bytes(foreign.SerializeToString())
    assert runners.OnnxRunner.describe(file) is None


def test_a_tflite_file_says_what_it_is(tmp_path: Path) -> None:
    """The tensors have names, outputs their order, and the archive the labels and the rest."""
    made, file = about(), tmp_path / "pets.tflite"
    tflite.write(small(), {"tflite": file}, about=made)
    assert Description.from_dict(runners.TfliteRunner.describe(file) or {}) == made
    with zipfile.ZipFile(file) as archive:
        assert archive.read("labels.txt").decode().splitlines() == list(LABELS)
    model = schema.ModelT.InitFromPackedBuf(file.read_bytes(), 0)
    (graph,) = model.subgraphs
    names = [graph.tensors[index].name for index in (*graph.inputs, *graph.outputs)]
    assert names == [b"images", b"logits", b"probabilities", b"features"]
    (field,) = [each for each in model.metadata if each.name == tflite.METADATA]
    metadata = bytes(bytearray(model.buffers[field.buffer].data))
    assert metadata == tflite.make_metadata(made)


class Table(flatbuffers.table.Table):
    """A table of a flatbuffer, by the numbers of its fields in metadata_schema.fbs."""

    def offset(self, field: int) -> Any:
        return self.Offset(4 + 2 * field) or pytest.fail(f"field {field} is missing")

    def table(self, field: int) -> "Table":
        return Table(self.Bytes, self.Indirect(self.Pos + self.offset(field)))

    def tables(self, field: int) -> list["Table"]:
        start, count = self.Vector(self.offset(field)), self.VectorLen(self.offset(field))
        return [Table(self.Bytes, self.Indirect(start + 4 * place)) for place in range(count)]

    def text(self, field: int) -> Any:
        return self.String(self.Pos + self.offset(field)).decode()

    def floats(self, field: int) -> list[float]:
        kind = flatbuffers.number_types.Float32Flags
        return list(self.GetVectorAsNumpy(kind, self.offset(field)))

    def byte(self, field: int) -> Any:
        return self.Bytes[self.Pos + self.offset(field)]


def test_metadata_of_tflite_is_of_its_schema() -> None:
    """Every value is in the field that the schema has for it, scaling as (pixel - mean) / std."""
    content = tflite.make_metadata(dataclasses.replace(about(), takes="normalized"))
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
    assert runners.TfliteRunner.describe(file) is None
    with zipfile.ZipFile(file, "a") as archive:
        archive.writestr(runners.DESCRIPTION, '{"name": "pets"}')
    assert runners.TfliteRunner.describe(file) == {"name": "pets"}
    content = bytearray(file.read_bytes())
    content[content.index(b"pets")] ^= 1
    file.write_bytes(content)
    with pytest.raises(ValueError, match="archive behind it is damaged"):
        runners.TfliteRunner.describe(file)
