"""Tests of keras_vit.training.run and models: what a training starts from, and what it leaves."""

import dataclasses
import functools
import io
import json
import os
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import image_files
import keras
import numpy as np
import pytest
from conftest import CLASSES, TINY, randomize
from trainings import not_refused

import keras_vit
from keras_vit import VisionTransformer
from keras_vit.cli.main import main
from keras_vit.data import load_digits
from keras_vit.training import MODEL_NAMES, MODELS, Run, model_config, pretrained_model, run
from keras_vit.training.checkpoints import check_settings

LABELS = [f"class {place}" for place in range(CLASSES)]
Damage = Callable[[Path], Any]


def write_run(path: Path, *, content: str = "{}") -> Path:
    """Writes what counts as a run, without a real model."""
    path.mkdir(parents=True, exist_ok=True)
    (path / run.MODEL).write_text(content)
    (path / run.CONFIG).write_text(content)
    return path


def test_a_training_is_resumed_on_the_images_of_its_start(tmp_path: Path) -> None:
    """The number of epochs may rise; other images and settings are refused, emptied ones too."""
    record = tmp_path / "settings.json"
    recipe = {"epochs": 3, "model": {"pooling": "avg"}}
    record.write_text(json.dumps({"data": {"images": {"train": 240}}, "recipe": recipe}))
    more = {"data": {"images": {"train": 240}}, "recipe": {"epochs": 4}}
    assert check_settings(record, more) == 3
    assert check_settings(record, {**more, "recipe": {"epochs": 3}}) is None
    with pytest.raises(ValueError, match="train=240, not 212; put the images back as they were"):
        check_settings(record, {**more, "data": {"images": {"train": 212}}})
    with pytest.raises(ValueError, match=r"recipe\.model=None, not {}"):
        check_settings(record, {**more, "recipe": {"epochs": 3, "model": {}}})


def test_what_is_no_run_is_never_replaced(tmp_path: Path) -> None:
    """A file, a link, a folder of other things, and a run with notes in it are all refused.

    A new name and an empty folder may be written to; without `overwrite` a run is safe.
    """
    run.check_free(tmp_path / "new", existing="refuse")
    run.check_free(tmp_path, existing="refuse")
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(write_run(tmp_path / "run"))
    with pytest.raises(FileExistsError, match="already holds a run"):
        run.check_free(tmp_path / "run", existing="refuse")
    run.check_free(tmp_path / "run", existing="overwrite")
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "a.jpg").touch()
    (write_run(tmp_path / "noted") / "notes.txt").touch()
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / run.LABELS).touch()
    texts = {
        "file": "is not a folder",
        "link": "is not a folder",
        "photos": r"other things than a run \('a.jpg'\)",
        "noted": r"other things than a run \('notes.txt'\)",
        "half": "no whole run",
    }
    choices: tuple[run.Existing, ...] = ("refuse", "overwrite", "resume")
    calls = [
        (functools.partial(run.check_free, tmp_path / name, existing=existing), text)
        for name, text in texts.items()
        for existing in choices
    ]
    assert not not_refused(calls, FileExistsError)


def test_what_is_no_run_is_not_opened(tmp_path: Path) -> None:
    """A missing path and another folder each give a sentence; digits are found, pixels are gone."""
    calls: list[tuple[Callable[[], object], str]] = [
        (lambda: Run.load(tmp_path / "gone"), r"FileNotFoundError: .*no run directory '.*gone'"),
        (lambda: Run.load(tmp_path), r"is not a run directory: it lacks model\.keras"),
        *(
            (functools.partial(Run.load, path), "is not a run directory")
            for path in (".", "/", "..")
        ),
    ]
    assert not not_refused(calls, (FileNotFoundError, ValueError))
    opened = run.Run(path=tmp_path, model=None, labels=(), config={"data": {"source": "digits"}})
    assert opened.data().counts == load_digits().counts
    opened = run.Run(path=tmp_path, model=None, labels=(), config={"data": {"source": "memory"}})
    with pytest.raises(ValueError, match="were in memory and are gone; name a folder"):
        opened.data()


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sound") / "run"
    folder.mkdir()
    randomize(VisionTransformer(TINY)).save(folder / run.MODEL)
    fields = {"model": TINY.to_dict(), "labels": LABELS, "data": {"source": "digits"}}
    (folder / run.CONFIG).write_text(json.dumps(fields))
    return folder


def says(**fields: Any) -> Damage:
    """Other fields in the run's config.json; a dictionary changes the one that is there."""

    def change(folder: Path) -> None:
        actual = json.loads((folder / run.CONFIG).read_text())
        for name, value in fields.items():
            actual[name] = {**actual[name], **value} if name == "model" and value else value
        (folder / run.CONFIG).write_text(json.dumps(actual))

    return change


def holds(name: str, content: bytes) -> Damage:
    return lambda folder: (folder / name).write_bytes(content)


def inside(**fields: Any) -> Damage:
    """Other fields of the network in the config.json inside of model.keras."""

    def change(settings: bytes) -> bytes:
        actual = json.loads(settings)
        actual["config"]["config"].update(fields)
        return json.dumps(actual).encode()

    return member("config.json", change)


def member(name: str, change: Callable[[bytes], bytes], *, compression: int = 0) -> Damage:
    def rewrite(folder: Path) -> None:
        with zipfile.ZipFile(folder / run.MODEL) as archive:
            members = {one: archive.read(one) for one in archive.namelist()}
        members[name] = change(members[name])
        with zipfile.ZipFile(folder / run.MODEL, "w", compression) as archive:
            for one, content in members.items():
                archive.writestr(one, content)

    return rewrite


def layers(count: int) -> Damage:
    """Both files agree on so many; the weights do not."""

    def change(folder: Path) -> None:
        says(model={"num_layers": count})(folder)
        inside(num_layers=count)(folder)

    return change


def flipped(folder: Path) -> None:
    content = bytearray((folder / run.MODEL).read_bytes())
    content[len(content) // 2] ^= 1
    (folder / run.MODEL).write_bytes(content)


def piped(folder: Path) -> None:
    (folder / run.CONFIG).unlink()
    os.mkfifo(folder / run.CONFIG)


def not_a_number(weights: bytes) -> bytes:
    stream = io.BytesIO(weights)
    with h5py.File(stream, "r+") as file:
        file["layers/dense/vars/1"][0] = np.nan
    return stream.getvalue()


# What is done to a run, and a word of the sentence.
DAMAGED: dict[str, tuple[Damage, str]] = {
    "empty config": (holds(run.CONFIG, b""), "config.json' is damaged"),
    "no text": (holds(run.CONFIG, b"\xff\xfe{}"), "config.json' is damaged"),
    "a list": (holds(run.CONFIG, b"[]"), "config.json' is damaged"),
    "deep": (holds(run.CONFIG, b"[" * 100_000), "config.json' is damaged"),
    "spaces": (holds(run.CONFIG, b" " * 2**25), "config.json' is damaged"),
    "nothing said": (holds(run.CONFIG, b"{}"), "does not say the labels"),
    "no labels": (says(labels=None), "does not say the labels"),
    "one text": (says(labels="abc"), "does not say the labels"),
    "numbers": (says(labels=[1, 2]), "does not say the labels"),
    "few labels": (says(labels=["a"]), "has 1 labels, and model.keras has"),
    "data": (says(data=[]), "does not say the labels, the data"),
    "source": (says(data={"source": 3}), "does not say the labels, the data"),
    "no model": (says(model=None), "data and the model of a run"),
    "other model": (says(model={"num_heads": 1}), "not of the same run: num_heads"),
    "nan": (says(model={"layer_norm_epsilon": float("nan")}), "not of the same run"),
    "pipe": (piped, "is not a run directory"),
    "empty model": (holds(run.MODEL, b""), "model.keras is not a whole .keras file"),
    "page": (holds(run.MODEL, b"<html>"), "model.keras is not a whole .keras file"),
    "flipped": (flipped, "model.keras' cannot be opened"),
    "no object": (member("config.json", lambda _: b"[]"), "its config.json is not a whole"),
    "fewer layers": (layers(1), "model.keras' cannot be opened"),
    "a million layers": (layers(10**6), "model.keras' cannot be opened"),
    "wide": (inside(mlp_dim=2**18), "asks for .* parameters"),
    "no number": (inside(hidden_dim="x"), "model.keras' cannot be opened"),
    "bomb": (
        member("metadata.json", lambda _: bytes(2**26), compression=zipfile.ZIP_DEFLATED),
        "more than 20 times as many",
    ),
}


def test_a_damaged_run_is_refused_in_a_sentence(sound: Path, tmp_path: Path) -> None:
    """It names the file that is at fault, and what to do."""
    calls: list[tuple[Callable[[], object], str]] = []
    for name, (damage, word) in DAMAGED.items():
        folder = shutil.copytree(sound, tmp_path / name)
        damage(folder)
        # No sentence is longer, or has two lines.
        calls.append((functools.partial(Run.load, folder), rf"^(?=.*{word})[^\n]{{1,500}}$"))
    assert not not_refused(calls)


def test_a_model_that_answers_no_number_is_an_error(
    sound: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not a table with "nan%" and exit code 0."""
    folder = shutil.copytree(sound, tmp_path / "run")
    member("model.weights.h5", not_a_number)(folder)
    picture = image_files.write_image(tmp_path / "dot.png")
    assert main(["predict", str(folder), str(picture)]) == 1
    printed = capsys.readouterr()
    assert "nan%" not in printed.out
    assert "error" in printed.err


def test_labels_cannot_move_the_cursor(
    sound: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """On the terminal they are escaped; in JSON they are as they are."""
    folder = shutil.copytree(sound, tmp_path / "run")
    wild = [f"\x1b[2J\u202e\x07 {place}" for place in range(CLASSES)]
    says(labels=wild)(folder)
    picture = image_files.write_image(tmp_path / "dot\x1b[31m.png")
    main(["predict", str(folder), str(picture), str(tmp_path / "gone\x1b[1m.png")])
    printed = capsys.readouterr()
    assert not set("\x1b\u202e\x07") & set(printed.out + printed.err)
    assert r"\x1b[2J\u202e\x07" in printed.out
    main(["predict", str(folder), str(picture), "--json"])
    actual = json.loads(capsys.readouterr().out)
    assert {one["label"] for one in actual["predictions"]} <= set(wild)


def test_a_run_that_a_kill_took_away_is_put_back(tmp_path: Path) -> None:
    """Where names cannot be swapped, a kill may fall between two renames; no place has no name."""
    write_run(run.unfinished_path(tmp_path / "run") / ".replaced", content='{"labels": []}')
    with pytest.raises(ValueError, match=r"config\.json"):  # it says nothing, but it was found
        Run.load(tmp_path / "run")

    assert run.is_run(tmp_path / "run")


def test_every_name_gives_its_model() -> None:
    """Without sizes the table's own row; image and patch can be replaced, the rest stays."""
    for name in MODEL_NAMES:
        assert model_config(name) == (MODELS.get(name) or keras_vit.VARIANTS[name])
    config = model_config("Ti/16", image_size=(96, 48), patch_size=8)
    assert config == dataclasses.replace(
        keras_vit.VARIANTS["Ti/16"], input_shape=(96, 48, 3), patch_size=8
    )


def test_a_checkpoint_is_taken_over_with_a_fresh_head(tmp_path: Path) -> None:
    """The body is the file's, the classifier new and zero for other classes, the size as asked."""
    config = model_config("Ti/16", image_size=(32, 32))
    saved = VisionTransformer(config)
    keras_vit.weights.save_npz(saved, tmp_path / "saved.npz")

    model = pretrained_model(
        "Ti/16", weights=tmp_path / "saved.npz", classes=3, image_size=(48, 32)
    )

    before, after = saved.get_layer("block_3"), model.get_layer("block_3")
    for old, new in zip(before.get_weights(), after.get_weights(), strict=True):
        assert np.array_equal(old, new)
    assert model.output_shape == (None, 3)
    assert not model.get_layer("head").kernel.numpy().any()
    assert model.input_shape == (None, 48, 32, 3)


def test_a_starting_point_is_resampled_as_asked_for(tmp_path: Path) -> None:
    """By the method for positions, from a checkpoint and from a run."""
    model = randomize(VisionTransformer(model_config("Ti/16", image_size=(64, 64))))
    path = keras_vit.weights.save_npz(model, tmp_path / "saved.npz")
    opened = Run(path=tmp_path, model=model, labels=(), config={})
    tables = []
    for method in ("original", "bicubic_antialias"):
        size: dict[str, Any] = {"image_size": (48, 96), "positions": method}
        for other in (
            pretrained_model("Ti/16", weights=path, classes=2, **size),
            opened.classifier(("a", "b"), **size),
        ):
            tables.append(np.asarray(other.get_layer("patch_encoder").position_embedding))
    assert np.array_equal(tables[0], tables[1])
    assert np.array_equal(tables[2], tables[3])
    assert np.abs(tables[0] - tables[2]).max() > 1e-3


def test_models_that_are_none_are_refused(tmp_path: Path) -> None:
    """Numbers and names are in the sentence; small models have no published weights."""
    opened = Run(path=Path("run"), model=keras.Sequential(), labels=(), config={})
    start = functools.partial(pretrained_model, classes=2)
    calls: list[tuple[Callable[[], object], str]] = [
        (lambda: model_config("tiny", image_size=(60, 64)), r"multiples of 8.*\(60, 64, 3\)"),
        (lambda: model_config("vgg"), r"no model 'vgg'; choose one of digits, .*, tiny, Ti/16"),
        (lambda: start("tiny", weights="x.npz"), "no model 'tiny'; choose one of Ti/16"),
        (lambda: start("Ti/16", weights=tmp_path / "gone.npz"), r"FileNotFoundError.*gone\.npz"),
        (lambda: opened.classifier(["a", "b"]), "the run 'run' holds a Sequential"),
    ]
    assert not not_refused(calls, (ValueError, FileNotFoundError))


@pytest.mark.parametrize("labels", ["abcdefg", "gfedcba"])
@pytest.mark.parametrize("pooling", ["token", "avg", "map"])
def test_a_run_keeps_its_classifier_for_its_own_labels(pooling: Any, labels: str) -> None:
    """Other labels, or a run of `pretrain`, get one of zeros; the body is kept."""
    is_trained = pooling == "token"
    given: dict[str, Any] = {"classes": 7 if is_trained else None, "distillation_token": is_trained}
    model = randomize(VisionTransformer(dataclasses.replace(TINY, pooling=pooling, **given)))
    opened = Run(path=Path("run"), model=model, labels=tuple("abcdefg"), config={})
    assert opened.classifier("ab").config.pooling == ("map" if pooling == "map" else "token")
    actual = {variable.path: variable for variable in opened.classifier(tuple(labels)).weights}
    old = {variable.path: variable for variable in model.weights}
    assert actual["head/kernel"].shape == (24, 7)
    for path, variable in actual.items():
        is_fresh = "head/" in path and (not is_trained or labels != "abcdefg")
        np.testing.assert_array_equal(variable, 0 * variable if is_fresh else old[path])
