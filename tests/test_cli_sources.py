"""Tests of the commands on models of any source: files, folders and the Hugging Face Hub."""

import json
import shutil
import types
from collections.abc import Callable
from pathlib import Path

import huggingface_hub.constants
import huggingface_hub.errors
import image_files
import keras
import numpy as np
import published
import pytest
import safetensors.numpy
from conftest import FLOAT32

import keras_vit
from keras_vit.cli.main import main
from keras_vit.data import read_image, resize_image
from keras_vit.training import Run, open_source
from keras_vit.weights import download

MODERN = published.GOLDEN / "modern"
WORDS = ["plain", "striped", "sea urchin", "owl", "fox", "hen", "crane"]
COMMIT = "0" * 40


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
def hub(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """A Hub with that folder as owner/vit; the names and revisions that were asked for."""
    asked: list[tuple[str, str]] = []
    snapshot = tmp_path / "models--owner--vit" / "snapshots" / COMMIT
    shutil.copytree(folder, snapshot)

    def hf_hub_download(repository: str, name: str, *, revision: str) -> str:
        assert repository == "owner/vit"
        asked.append((name, revision))
        return str(snapshot / name)

    client = types.SimpleNamespace(
        hf_hub_download=hf_hub_download,
        errors=huggingface_hub.errors,
        constants=huggingface_hub.constants,
    )
    monkeypatch.setattr(download, "_hub_library", lambda address: client)
    monkeypatch.setenv("KERAS_HOME", str(tmp_path / "keras"))
    return asked


def predicted(capsys: pytest.CaptureFixture[str], source: object, image: Path) -> dict[str, float]:
    assert main(["predict", str(source), str(image), "--top", "7", "--json"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    return {row["label"]: row["probability"] for row in json.loads(line)["predictions"]}


def expected(image: Path) -> np.ndarray:
    """The probabilities of the model as `keras_vit.load` makes it."""
    model = keras_vit.load(MODERN / "hf_vit_cls", classifier_activation="softmax")
    pixels = resize_image(read_image(str(image)), size=(64, 64), antialias=True)
    probabilities: np.ndarray = keras.ops.convert_to_numpy(model(pixels[None]))[0]
    return probabilities


SOURCES: dict[str, Callable[[Path], Path | str]] = {
    "folder": lambda folder: folder,
    "file": lambda folder: folder / "model.safetensors",
    "shards": lambda folder: published.write_shards(folder, count=2).parent,
    "index": lambda folder: published.write_shards(folder, count=2),
    "hub": lambda folder: "hf://owner/vit",
    "revision": lambda folder: "hf://owner/vit@v1",
}


@pytest.mark.parametrize("kind", SOURCES)
def test_predict_names_the_classes_of_any_source(
    kind: str,
    folder: Path,
    image: Path,
    hub: list[tuple[str, str]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The numbers are those of the loaded model, the names those beside its weights."""
    probabilities = predicted(capsys, SOURCES[kind](folder), image)
    np.testing.assert_allclose(
        [probabilities[word] for word in WORDS], expected(image), atol=FLOAT32
    )
    if kind == "revision":
        assert hub[0] == ("config.json", "v1")
        assert {revision for _, revision in hub[1:]} == {COMMIT}


@pytest.mark.parametrize("suffix", [".npz", ".keras"])
def test_predict_without_names_has_numbers(
    suffix: str, image: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An .npz or .keras file names no class; a placeholder of transformers is no name."""
    model = keras_vit.load(MODERN / "hf_vit_cls", classifier_activation=None)
    path = tmp_path / f"vit{suffix}"
    if suffix == ".npz":
        keras_vit.weights.save_npz(model, path)
    else:
        model.save(path)
    for source in (path, MODERN / "hf_vit_cls"):
        probabilities = predicted(capsys, source, image)
        np.testing.assert_allclose(
            [probabilities[str(place)] for place in range(7)], expected(image), atol=FLOAT32
        )


def imagenet(folder: Path) -> Path:
    """Gives the classifier of a folder a thousand classes, which have no names."""
    arrays = safetensors.numpy.load_file(folder / "model.safetensors")
    generator = np.random.default_rng(0)
    arrays["classifier.weight"] = generator.standard_normal((1000, 16)).astype(np.float32)
    arrays["classifier.bias"] = np.zeros(1000, np.float32)
    safetensors.numpy.save_file(arrays, folder / "model.safetensors")
    return named(folder, ["LABEL_0", "LABEL_1"])


@pytest.mark.full
def test_evaluate_takes_names_and_identifiers_of_folders(
    folder: Path, image: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Images are counted for their class by either; the name of two classes is refused."""
    images = image.parent.parent
    assert main(["evaluate", str(folder), "--data", str(images), "--json"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert (lines[-1]["split"], lines[-1]["images"]) == ("test", 12)

    shutil.copytree(images / "striped", tmp_path / "val" / "n02123045")
    shutil.copytree(images / "plain", tmp_path / "val" / "n01440764")
    source = ["evaluate", str(imagenet(folder)), "--data"]
    assert main([*source, str(tmp_path / "val"), "--out", str(tmp_path / "report")]) == 0
    assert "test: 12 images" in capsys.readouterr().out
    assert (tmp_path / "report" / "metrics.json").is_file()
    shutil.copytree(images / "striped", tmp_path / "birds" / "crane")
    assert main([*source, str(tmp_path / "birds")]) == 1
    assert "two classes 'crane'" in capsys.readouterr().err


@pytest.mark.full
def test_evaluate_measures_the_features_of_a_backbone(
    image: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without classifier, on the class folders of --data."""
    image_files.write_classes(tmp_path / "more", count=8)
    argv = ["evaluate", str(MODERN / "hf_dinov2"), "--data", str(tmp_path / "more")]
    assert main([*argv, "--json"]) == 0
    line = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert line["event"] == "features"
    assert line["few_shot"]


@pytest.mark.full
def test_explain_takes_any_source(
    folder: Path, image: Path, tmp_path: Path, hub: list[tuple[str, str]]
) -> None:
    """With the names of the classes; a model without classifier is drawn without them."""
    argv = ["explain", "hf://owner/vit", str(image), "--out", str(tmp_path / "seen")]
    assert main([*argv, "--class", "sea urchin"]) == 0
    page = (tmp_path / "seen" / "index.html").read_text(encoding="utf-8")
    assert "speak for sea urchin" in page
    argv = ["explain", str(MODERN / "hf_dinov2"), str(image), "--out", str(tmp_path / "backbone")]
    assert main(argv) == 0
    assert (tmp_path / "backbone" / "index.html").is_file()


TRAIN = ["train", "--data", "{images}", "--out", "{out}", "--batch-size", "4", "--steps", "1"]
WRONG = [
    (["predict", "{backbone}", "{image}"], "no classifier", "--weights {backbone}."),
    (["evaluate", "{folder}"], "has no images of its own", "give --data"),
    (["evaluate", "{backbone}"], "no labelled images of its own", "give --data"),
    (["evaluate", "{folder}", "--data", "{other}"], "stranger", ""),
    (["predict", "gone.safetensors", "{image}"], "no model file 'gone.safetensors'", ""),
    (["predict", "gone", "{image}"], "no run directory 'gone'", ""),
    (["predict", "{images}", "{image}"], "holds no checkpoint", ""),
    (["predict", "hf://owner", "{image}"], "A Hub address is hf://owner/name", ""),
    ([*TRAIN, "--weights", "gone.npz"], "no model file 'gone.npz'", ""),
    ([*TRAIN, "--weights", "sam"], "needs --model", "such as --model B/16"),
    ([*TRAIN, "--weights", "{images}"], "holds no checkpoint", ""),
    ([*TRAIN, "--teacher", "{folder}"], "has the classes plain, striped, sea", "the same order"),
]


@pytest.mark.parametrize(("argv", "message", "advice"), WRONG)
def test_what_does_not_fit_is_one_sentence(
    argv: list[str],
    message: str,
    advice: str,
    folder: Path,
    image: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """One line on stderr that says what to do, and nothing written."""
    shutil.copytree(image.parent, tmp_path / "other" / "stranger")
    places = {
        "folder": folder,
        "backbone": MODERN / "hf_dinov2",
        "image": image,
        "images": image.parents[1],
        "other": tmp_path / "other",
        "out": tmp_path / "out",
    }
    assert main([word.format(**places) for word in argv]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("keras-vit: error: ")
    assert message in line
    assert advice.format(**places) in line
    assert not (tmp_path / "out").exists()


def test_what_is_assumed_is_said(
    folder: Path, image: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line on stderr, without the place in the code; the output stays as it is."""
    (folder / "preprocessor_config.json").unlink()
    assert main(["predict", str(folder), str(image), "--json"]) == 0
    captured = capsys.readouterr()
    (line,) = captured.err.splitlines()
    assert line.startswith(f"keras-vit: {folder / 'model.safetensors'} does not say")
    assert "assumed image_mean" in line
    assert len(captured.out.splitlines()) == 1


def test_a_damaged_run_is_no_other_source(
    tmp_path: Path, image: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What training left is opened as a run or not at all: its labels would be lost."""
    keras_vit.load(MODERN / "hf_vit_cls").save(tmp_path / "model.keras")
    assert open_source(tmp_path).labels == tuple("0123456")
    (tmp_path / "history.csv").write_text("")
    with pytest.raises(ValueError, match="is not a run directory"):
        open_source(tmp_path)
    argv = ["train", "--data", "digits", "--out", str(tmp_path / "out"), "--model", "Ti/16"]
    assert main([*argv, "--weights", str(tmp_path)]) == 1
    assert "--model is the run's" in capsys.readouterr().err


@pytest.mark.full
def test_export_has_the_labels_of_the_source(folder: Path, tmp_path: Path) -> None:
    """Checked on generated images, for want of the source's own."""
    assert main(["export", str(folder), "--out", str(tmp_path / "export")]) == 0
    assert (tmp_path / "export" / "labels.txt").read_text().splitlines() == WORDS


@pytest.mark.full
@pytest.mark.parametrize("family", ["hf_dinov2", "timm_deit_distilled"])
def test_train_takes_the_model_of_the_source(family: str, image: Path, tmp_path: Path) -> None:
    """Without --model: the network is the source's, the classifier fresh, the size as asked."""
    out = tmp_path / "run"
    argv = ["train", "--data", str(image.parents[1]), "--out", str(out), "--steps", "1"]
    argv += ["--batch-size", "2", "--learning-rate", "1e-12", "--weights", str(MODERN / family)]
    before = keras_vit.load(MODERN / family)
    stride = before.config.stride
    assert main([*argv, "--image-size", str(3 * stride)]) == 0
    run = Run.load(out)

    assert run.labels == ("plain", "striped")
    assert run.image_size == (3 * stride, 3 * stride)
    assert run.model.config.image_mean == before.config.image_mean
    names = ("block_0/attention/qkv/kernel", "block_1/mlp/fc2/kernel")
    for name in names:
        old, new = (
            next(weight for weight in model.weights if weight.path == name)
            for model in (before, run.model)
        )
        np.testing.assert_allclose(new, old, atol=FLOAT32)
