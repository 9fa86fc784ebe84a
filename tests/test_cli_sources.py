"""Tests of the commands on models that are there: runs, files, folders, the Hugging Face Hub."""

import dataclasses
import json
import resource
import shutil
from pathlib import Path

import cli_rig
import huggingface_hub
import image_files
import keras
import numpy as np
import published
import pytest
import safetensors.numpy
from conftest import FLOAT32
from PIL import Image

import keras_vit
from keras_vit import evaluation
from keras_vit.data import Resizing, load_digits, read_image, resize_image
from keras_vit.training import Run, open_source

MODERN = published.GOLDEN / "modern"
WORDS = ["plain", "striped", "sea urchin", "owl", "fox", "hen", "crane"]
COMMIT = "0" * 40
Asked = list[tuple[str, str]]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A classifier of transformers that names its classes."""
    return named(Path(shutil.copytree(MODERN / "hf_vit_cls", tmp_path / "vit")), WORDS)


def named(folder: Path, words: list[str]) -> Path:
    settings = json.loads((folder / "config.json").read_text())
    settings["id2label"] = {str(place): word for place, word in enumerate(words)}
    (folder / "config.json").write_text(json.dumps(settings))
    return folder


@pytest.fixture
def image(tmp_path: Path) -> Path:
    image_files.write_classes(tmp_path / "images", count=6)
    return tmp_path / "images" / "striped" / "000.jpg"


@pytest.fixture
def hub(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Asked:
    """A Hub with that folder as owner/vit; the names and revisions that were asked for."""
    asked: Asked = []
    snapshot = tmp_path / "models--owner--vit" / "snapshots" / COMMIT
    shutil.copytree(folder, snapshot)

    def hf_hub_download(repository: str, name: str, *, revision: str) -> str:
        assert repository == "owner/vit"
        asked.append((name, revision))
        return str(snapshot / name)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", hf_hub_download)
    monkeypatch.setenv("KERAS_HOME", str(tmp_path / "keras"))
    return asked


def assert_predicts(source: object, image: Path, names: list[str]) -> None:
    """The numbers are those of the model as `keras_vit.load` makes it, with these names."""
    (line,) = cli_rig.done("predict", source, image, "--top", "7", "--json").events
    actual = {row["label"]: row["probability"] for row in line["predictions"]}
    model = keras_vit.load(MODERN / "hf_vit_cls", classifier_activation="softmax")
    pixels = resize_image(read_image(str(image)), Resizing((64, 64)))
    expected = keras.ops.convert_to_numpy(model(pixels[None]))[0]
    np.testing.assert_allclose(
        [actual[name] for name in names], expected, atol=FLOAT32, err_msg=str(source)
    )


def test_predict_names_the_classes_of_any_source(folder: Path, image: Path, hub: Asked) -> None:
    """The numbers are those of the loaded model, the names those beside its weights."""
    for source in (folder, folder / "model.safetensors", "hf://owner/vit"):
        assert_predicts(source, image, WORDS)
    hub.clear()
    assert_predicts("hf://owner/vit@v1", image, WORDS)
    assert hub[0] == ("config.json", "v1")
    assert {revision for _, revision in hub[1:]} == {COMMIT}
    index = published.write_shards(folder, count=2)
    for source in (index, index.parent):
        assert_predicts(source, image, WORDS)
    named(folder, ["caf\ud800", *WORDS[1:]])  # half of a character
    cli_rig.done("predict", folder, image, "--csv", folder / "found.csv", "--top", "7")
    assert ",caf?," in (folder / "found.csv").read_text()


def test_predict_without_names_has_numbers(image: Path, tmp_path: Path) -> None:
    """A .keras file names no class; a placeholder of transformers is no name."""
    model = keras_vit.load(MODERN / "hf_vit_cls", classifier_activation=None)
    model.save(tmp_path / "vit.keras")
    for source in (tmp_path / "vit.keras", MODERN / "hf_vit_cls"):
        assert_predicts(source, image, [*"0123456"])


@pytest.mark.full
def test_evaluate_takes_names_and_identifiers_of_folders(
    folder: Path, image: Path, tmp_path: Path
) -> None:
    """Images are counted for their class by either; the name of two classes is refused."""
    images = image.parent.parent
    line = cli_rig.done("evaluate", folder, "--data", images, "--json").events[-1]
    assert (line["split"], line["images"]) == ("test", 12)
    (images / "plain").rename(images / "caf\xe9")
    accents = named(folder, [word.replace("plain", "cafe\u0301") for word in WORDS])
    line = cli_rig.done("evaluate", accents, "--data", images, "--json").events[-1]
    assert line["images"] == 12
    (images / "caf\xe9").rename(images / "plain")

    shutil.copytree(images / "striped", tmp_path / "val" / "Testing" / "n02123045")
    shutil.copytree(images / "plain", tmp_path / "val" / "Testing" / "n01440764")
    arrays = safetensors.numpy.load_file(folder / "model.safetensors")
    generator = np.random.default_rng(0)
    arrays["classifier.weight"] = generator.standard_normal((1000, 16)).astype(np.float32)
    arrays["classifier.bias"] = np.zeros(1000, np.float32)
    safetensors.numpy.save_file(arrays, folder / "model.safetensors")
    command = ("evaluate", named(folder, ["LABEL_0", "LABEL_1"]), "--data")  # which name none
    out = tmp_path / "report"
    assert "test: 12 images" in cli_rig.done(*command, tmp_path / "val", "--out", out).out
    assert (out / "metrics.json").is_file()
    shutil.copytree(images / "striped", tmp_path / "birds" / "crane")
    refused = cli_rig.run(*command, tmp_path / "birds")
    assert (refused.code, "two classes 'crane'" in refused.errors[0]) == (1, True)


def test_what_is_assumed_is_said(folder: Path, image: Path) -> None:
    """One line on stderr, without the place in the code; the output stays as it is."""
    (folder / "preprocessor_config.json").unlink()
    result = cli_rig.done("predict", folder, image, "--json")
    (line,) = result.errors
    assert line.startswith(f"keras-vit: {folder / 'model.safetensors'} does not say")
    assert "assumed image_mean" in line
    assert len(result.events) == 1


def test_a_damaged_run_is_no_other_source(tmp_path: Path) -> None:
    """What training left is opened as a run or not at all: its labels would be lost."""
    keras_vit.load(MODERN / "hf_vit_cls").save(tmp_path / "model.keras")
    assert open_source(tmp_path).labels == tuple("0123456")
    (tmp_path / "history.csv").write_text("")
    with pytest.raises(ValueError, match="is not a run directory"):
        open_source(tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("family", ["hf_dinov2", "timm_deit_distilled"])
def test_train_takes_the_model_of_the_source(family: str, image: Path, tmp_path: Path) -> None:
    """Without --model: the network is the source's, the classifier fresh, the size as asked."""
    before = keras_vit.load(MODERN / family)
    side = 3 * before.config.stride
    out = tmp_path / "run"
    flags = ("--set", "steps=1", "batch_size=2", "learning_rate=1e-12", "--image-size", side)
    source = ("--data", image.parents[1], "--weights", MODERN / family)
    cli_rig.done("train", *source, "--out", out, *flags)
    trained = Run.load(out)

    assert trained.labels == ("plain", "striped")
    assert trained.image_size == (side, side)
    assert trained.model.config.image_mean == before.config.image_mean
    old, new = ({each.path: each for each in model.weights} for model in (before, trained.model))
    for name in ("block_0/attention/qkv/kernel", "block_1/mlp/fc2/kernel"):
        np.testing.assert_allclose(new[name], old[name], atol=FLOAT32)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose images are the digits, and one of them beside it."""
    folder = tmp_path_factory.mktemp("models")
    Image.fromarray(load_digits().test.images[0]).save(folder / "digit.png")
    settings = {"data": {"source": "digits"}, "labels": [*"0123456", "e\u0301", *"89"]}
    return cli_rig.make_run(folder / "run", settings=settings, input_shape=(16, 24, 3), classes=10)


@pytest.mark.full
def test_a_run_and_a_file_are_explained(run: Path, tmp_path: Path) -> None:
    """The page and its pictures are written, also where --json names them; the size is said."""
    out, image = tmp_path / "seen", run.parent / "digit.png"
    said = cli_rig.done("explain", run, image, "--out", out, "--class", "\xe9").out
    assert "8 pixels wide and 8 high. It was resampled to 24 pixels wide and 16 high" in said
    assert f"Open {out / 'index.html'} in a browser." in said
    page = (out / "index.html").read_text(encoding="utf-8")
    assert r"relevance for \u00e9:" in page
    assert "digit.png" in page
    assert (out / "rollout.png").stat().st_size > 5000

    model = Run.load(run).model  # 1,000 classes are taken for those of ImageNet
    config = dataclasses.replace(model.config, classes=1000)
    model = model.copy(config=config, reinitialize=["head"])
    model.save(tmp_path / "model.keras")
    more = ("--out", tmp_path / "more", "--class", "tabby", "--json")
    (event,) = cli_rig.done("explain", tmp_path / "model.keras", image, *more).events
    assert {Path(file) for file in event["files"]} == set((tmp_path / "more").iterdir())
    assert (event["image"], event["taken"]) == ([8, 8], [16, 24])
    assert "relevance for tabby" in (tmp_path / "more" / "index.html").read_text(encoding="utf-8")


@pytest.mark.full
def test_more_is_what_the_functions_say(run: Path, tmp_path: Path) -> None:
    """The numbers are those of keras_vit.evaluation, people get sentences, a picture is drawn."""
    actual = cli_rig.done("evaluate", run, "--more", "--json").events[-1]
    model, data = Run.load(run).model, load_digits()
    measured = evaluation.evaluate(model, data.test, labels=data.labels).predictions
    expected = measured and measured.calibration.error
    assert actual["calibration_error"] == pytest.approx(expected, abs=1e-6)
    expected = evaluation.nearest_neighbors(model, train=data.train, test=data.test)
    assert actual["nearest_neighbors"] == pytest.approx(expected, abs=1e-9)
    results = evaluation.few_shot(model, train=data.train, test=data.test)
    assert [each["accuracies"] for each in actual["few_shot"]] == [
        list(result.accuracies) for result in results
    ]
    assert len(actual["mistakes"]) == 16
    said = cli_rig.done("evaluate", run, "--more", "--out", tmp_path).out
    for text in ("Expected calibration error:", "25 labelled images", "predicted as", "neighbours"):
        assert text in said
    assert (tmp_path / "mistakes.png").stat().st_size > 5000
    assert "calibration" not in cli_rig.done("evaluate", run).out


@pytest.mark.full
def test_real_labels_go_by_the_names_of_the_images(run: Path, tmp_path: Path) -> None:
    """Classes that are the model's answers, in order of the names, are all right."""
    data = load_digits()
    measured = evaluation.evaluate(Run.load(run).model, data.test, labels=data.labels)
    assert measured.predictions is not None
    places = sorted(range(len(data.test)), key=lambda place: data.test.name(place))
    actual = []
    for classes in (data.test.targets[places], measured.predictions.predicted[places]):
        for rows in ([[int(each)] for each in classes], [[int(each)] for each in classes[::-1]]):
            (tmp_path / "real.json").write_text(str(rows))
            said = cli_rig.done("evaluate", run, "--json", "--real", tmp_path / "real.json")
            actual.append(said.events[-1]["accuracy"])
    assert actual[0] == pytest.approx(measured.accuracy)
    assert actual[2] == 1 > actual[3]
    (tmp_path / "short.json").write_text("[[1]]")
    refused = cli_rig.run("evaluate", run, "--real", tmp_path / "short.json")
    assert (refused.code, "and 1 sets" in refused.errors[0]) == (1, True)


def test_a_keras_file_is_exported(run: Path, tmp_path: Path) -> None:
    """The command says what it wrote and where, and how to go on."""
    out, labels = tmp_path / "pets", tmp_path / "labels.txt"
    labels.write_text("\r\n".join([*"abcdefghi", "e\u0301"]), "utf-8-sig", newline="")
    command = ("export", run / "model.keras", "--out", out)
    lines = cli_rig.done(*command, "--labels", labels, "--no-verify").out.splitlines()
    assert lines[0].startswith(f"savedmodel: {out / '1'} (0.")
    assert lines[0].endswith("not checked)")
    assert lines[1] == f"Next: {out / 'serve.sh'}"
    assert (out / "labels.txt").read_text() == "\n".join([*"abcdefghi", "\xe9", ""])


def test_a_full_disk_is_one_sentence(run: Path, tmp_path: Path) -> None:
    """Whatever the library that writes raises; no file of the export is left."""
    pytest.importorskip("onnxruntime")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    for form in ("savedmodel", "onnx", "onnx-int8", "tflite"):
        command = ("export", run / "model.keras", "--out", tmp_path / "pets", "--formats", form)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4000, limits[1]))  # bytes of a file
        try:
            result = cli_rig.run(*command, "--no-verify")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        (line,) = result.errors
        assert (result.code, line.startswith("keras-vit: error: ")) == (1, True)
        assert not [*(tmp_path / "pets").rglob("*.*")], form


def test_machines_read_json(run: Path, tmp_path: Path) -> None:
    """With --json there is one object for each artefact, with its checks."""
    pytest.importorskip("onnxruntime")
    out = ("--out", tmp_path / "json", "--formats", "onnx")
    (actual,) = cli_rig.done("export", run / "model.keras", *out, "--json").events
    assert (actual["event"], actual["format"]) == ("artefact", "onnx")
    assert Path(actual["path"]).is_file()
    assert all(check["passed"] for check in actual["checks"])
