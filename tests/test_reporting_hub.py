"""Tests of keras_vit.reporting.hub: the model card, and a run on the Hub and back."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import hub_rig
import huggingface_hub.constants
import image_files
import numpy as np
import processes
import published
import pytest
import yaml
from conftest import FLOAT32, TINY, made

import keras_vit
from keras_vit import reporting
from keras_vit.cli.main import main
from keras_vit.training import RECIPES, Provenance, Run, open_source

hub = hub_rig.hub_fixture
# huggingface-hub 2.4 hands a file to its HTTP client in a way that this will drop.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")
LABELS = ["a_b", "dog: [small]", "größer"]
CONFIG = dataclasses.replace(
    TINY, input_shape=(16, 16, 3), num_layers=1, classes=3, include_preprocessing=True
)
METRICS: dict[str, Any] = {
    split: {"images": 9, "accuracy": accuracy, "loss": 0.25, "classes": []}
    for split, accuracy in (("validation", 7 / 9), ("test", 8 / 9))
}
ORIGINS: list[tuple[dict[str, Any], dict[str, Any], str]] = published.TABLES["origins"]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The files of a run, without a training."""
    folder = tmp_path / "my run"
    folder.mkdir()
    made(CONFIG).save(folder / "model.keras")
    config = {
        "model": CONFIG.to_dict(),
        "objective": "classification",
        "recipe": RECIPES["scratch"].to_dict(),
        "seed": 3,
        "data": {
            "source": "/home/someone/secret/my photos",
            "images": {"train": 72, "validation": 9, "test": 9},
            "damaged": ["/home/someone/secret/my photos/a/7.jpg"],
        },
        "labels": LABELS,
        "result": {"best_epoch": 5, "state_sha256": "0" * 64, "replaced": ["secret.jpg"]},
        "versions": {"keras_vit": keras_vit.__version__, "python": "3.11"},
        "made": "2026-11-23",
        "provenance": {
            "commands": ["keras-vit train --data '/home/someone/secret/my photos' --out run"],
            "weights": "/home/someone/secret/earlier-run",
        },
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "metrics.json").write_text(json.dumps(METRICS))
    (folder / "labels.txt").write_text("\n".join(LABELS))
    (folder / "splits.csv").write_text("split,label,path\ntest,a_b,secret.jpg\n")
    (folder / "tensorboard").mkdir()
    (folder / "tensorboard" / "events").write_bytes(b"events")
    image_files.write_image(folder / "sample.png")
    reporting.write_card(Run.load(folder))
    return folder


def header(text: str) -> dict[str, Any]:
    fields: dict[str, Any] = yaml.safe_load(text.split("---\n")[1])
    return fields


def test_the_card_says_what_the_run_is(run: Path) -> None:
    """The Hub's own classes read its header; the numbers are those of metrics.json."""
    text = (run / "README.md").read_text(encoding="utf-8")
    card: Any = huggingface_hub.ModelCard(text)

    assert card.data.library_name == "keras"
    assert card.data.pipeline_tag == "image-classification"
    results = {
        result.dataset_split: result
        for result in card.data.eval_results
        if result.metric_type == "accuracy"
    }
    assert {split: result.metric_value for split, result in results.items()} == {
        "validation": 7 / 9,
        "test": 8 / 9,
    }
    assert results["test"].dataset_name == "my photos"
    assert card.data.model_name == "my run"
    for words in ("72 train, 9 validation, 9 test", "88.89%", r"a\_b, dog: \[small\], größer."):
        assert words in text
    assert "secret" not in text


def test_the_card_has_the_licence_of_the_first_weights(run: Path) -> None:
    """What the catalogues know, through a run that was trained further as well."""
    for origin, fields, words in ORIGINS:
        first = Provenance.of("keras-vit train --data secret", **origin)
        for provenance in (first, None):
            provenance = provenance or Provenance.of("keras-vit train", weights=str(run))
            config = json.loads((run / "config.json").read_text())
            config["provenance"] = provenance.to_dict()
            (run / "config.json").write_text(json.dumps(config))
            text = reporting.write_card(Run.load(run)).read_text(encoding="utf-8")
            if provenance is first:
                assert fields.items() <= header(text).items()
                assert words in text
            assert header(text)["license"] == fields["license"]
            assert ("No commercial use." in text) == ("mae" in str(origin))
            assert "secret" not in text


def test_a_run_goes_to_the_hub_and_back(
    run: Path, hub: hub_rig.Hub, capsys: pytest.CaptureFixture[str]
) -> None:
    """One commit with the run's files but those of images; what comes back is the same model."""
    argv = ["push", str(run), "hf://owner/photos", "--private", "--license", "apache-2.0"]
    assert main(argv) == 0
    said = capsys.readouterr().out
    files = hub.repositories["owner/photos"]

    assert set(files) == {
        *("README.md", "config.json", "labels.txt", "metrics.json", "model.keras"),
        "tensorboard/events",
    }
    assert len(hub.commits) == 1
    assert hub.private == {"owner/photos"}
    assert hub.commits[0] in said
    assert f"{hub.url}/owner/photos" in said
    assert not [name for name, content in files.items() if b"secret" in content]
    card = files["README.md"].decode()
    huggingface_hub.ModelCard(card)  # the Hub's own classes take its header
    assert header(card)["license"] == "apache-2.0"
    assert "keras-vit predict hf://owner/photos image.jpg" in card
    assert files["model.keras"] == (run / "model.keras").read_bytes()

    images = np.random.default_rng(0).integers(0, 255, (2, 16, 16, 3)).astype(np.float32)
    expected = Run.load(run).model.predict_on_batch(images)
    loaded = keras_vit.load("hf://owner/photos")
    np.testing.assert_allclose(loaded.predict_on_batch(images), expected, atol=FLOAT32)
    opened = open_source("hf://owner/photos")
    assert list(opened.labels) == LABELS
    assert opened.run is None
    assert opened.recipe["augmentation"]["flip"] is True
    assert main(["predict", "hf://owner/photos", str(run / "sample.png"), "--json"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert {row["label"] for row in json.loads(line)["predictions"]} == set(LABELS)
    assert main(["predict", "hf://owner/photos/model.keras", str(run / "sample.png")]) == 0
    assert "größer" in capsys.readouterr().out


def test_pushing_again_keeps_what_a_user_wrote(run: Path, hub: hub_rig.Hub) -> None:
    """An edited card is published as it is, beside the images where these are asked for."""
    reporting.push(run, "hf://owner/photos")
    card = (run / "README.md").read_text(encoding="utf-8")
    (run / "README.md").write_text(f"{card}\nMy own words, hf://owner/name.\n", encoding="utf-8")
    published = reporting.push(run, "hf://owner/photos", images=True)
    files = hub.repositories["owner/photos"]

    assert len(hub.commits) == 2
    assert published.commit == hub.commits[1]
    assert b"My own words, hf://owner/photos." in files["README.md"]
    assert header(files["README.md"].decode())["license"] == "unknown"
    assert {"splits.csv", "sample.png"} <= set(files)
    assert hub.private == set()


def test_what_is_refused_is_a_sentence(
    run: Path, hub: hub_rig.Hub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing is committed, and one line says what to do."""

    def refused(words: str, path: Path = run, address: str = "hf://owner/photos") -> None:
        assert main(["push", str(path), address]) == 1
        (line,) = capsys.readouterr().err.splitlines()
        assert "model.keras" not in hub.repositories.get("owner/photos", {})
        assert words in line
        assert hub_rig.TOKEN not in line

    refused("A Hub address is hf://owner/name", address="hf://photos")
    refused("is pushed to hf://owner/name. Received: 'hf://o/p@v1'", address="hf://o/p@v1")
    refused("is not a run directory", path=run / "tensorboard")
    hub.refuses_writing = True
    refused("hf://owner/photos could not be written (")
    hub.refuses_writing = False
    hub.repositories["owner/photos"] = {"model.safetensors": b"another"}
    refused("holds another model (model.safetensors)")
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr(huggingface_hub.constants, "HF_TOKEN_PATH", str(run / "none"))
    refused("run hf auth login, or set HF_TOKEN")


@pytest.mark.full
def test_it_works_with_the_librarys_own_settings(
    run: Path, hub: hub_rig.Hub, tmp_path: Path
) -> None:
    """A process of its own that is told the address by HF_ENDPOINT alone pushes and loads."""
    variables: dict[str, Any] = {
        "HF_ENDPOINT": hub.url,
        "HF_HOME": str(tmp_path / "home"),
        "HF_HUB_DISABLE_XET": "1",
        "PYTHONPATH": str(Path(keras_vit.__file__).parents[1]),
        "CUDA_VISIBLE_DEVICES": "",
    }
    code = """
import sys
from keras_vit.cli import main
push = main(["push", sys.argv[1], "hf://owner/own"])
sys.exit(push or main(["predict", "hf://owner/own", sys.argv[1] + "/sample.png", "--json"]))
"""
    done = processes.python("-c", code, run, **variables)

    assert json.loads(done.stdout.splitlines()[-1])["predictions"][0]["label"] in LABELS
