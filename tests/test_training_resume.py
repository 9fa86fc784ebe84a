"""Trainings that are interrupted, and their files damaged: what is there, and how it goes on.

tests/test_training_kills.py kills trainings in processes of their own.
"""

import csv
import dataclasses
import errno
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import image_files
import keras
import numpy as np
import pytest
from conftest import randomize, weights_differ
from trainings import CONFIG, Listener, in_memory, noise, state, stop

import keras_vit
from keras_vit import training
from keras_vit.data import Augmentation, load_folder
from keras_vit.evaluation import evaluate
from keras_vit.training import RECIPES, Run, pretrain, train

DATA = in_memory(noise(np.arange(16) % 3), noise(np.arange(12) % 3))
# Three epochs of two steps.
RECIPE = dataclasses.replace(
    RECIPES["scratch"],
    epochs=3,
    batch_size=8,
    learning_rate=0.01,
    average=0.5,
    augmentation=Augmentation(crop=0.7, flip=True, rotation=5),
)
PIXELS = dataclasses.replace(CONFIG, classes=3, include_preprocessing=True)
DEFAULTS: dict[str, Any] = {"data": DATA, "model": CONFIG, "recipe": RECIPE}
# Which of the newest files, how, and the step that is left: an epoch has two.
DAMAGES = [(1, "flipped", 4), (2, "cut", 2)]


def distilled(teacher: int = 2) -> training.DistillationModel:
    """A student and its teacher, the same each time, dropout included."""
    keras.utils.set_random_seed(0)
    student, teaching = keras_vit.VisionTransformer(PIXELS), keras_vit.VisionTransformer(PIXELS)
    return training.DistillationModel(randomize(student, seed=1), randomize(teaching, seed=teacher))


def adapted(alpha: float | None = None) -> keras_vit.VisionTransformer:
    """A random model with low-rank matrices, the same each time."""
    keras.utils.set_random_seed(0)
    return keras_vit.lora(randomize(keras_vit.VisionTransformer(PIXELS)), rank=2, alpha=alpha)


def history(run: Run) -> list[str]:
    """The numbers of each epoch, but for its seconds, which come last."""
    lines = (run.path / "history.csv").read_text().splitlines()
    return [line.rpartition(",")[0] for line in lines]


# A function, the model of each call, other arguments, and what is said when it is resumed by them.
KINDS: dict[str, tuple[Callable[..., Run], Callable[[], Any], Callable[[], Any], str]] = {
    "plain": (
        train,
        lambda: CONFIG,
        lambda: {"recipe": dataclasses.replace(RECIPE, learning_rate=0.5)},
        "recipe.learning_rate=0.01, not 0.5",
    ),
    "masked patches": (pretrain, lambda: CONFIG, lambda: {"seed": 1}, "seed=0, not 1"),
    "distillation": (
        *(train, distilled, lambda: {"model": distilled(3)}),
        "distillation.teacher_sha256=",
    ),
    "adapter": (train, adapted, lambda: {"model": adapted(3.0)}, "lora.alpha=None, not 3.0"),
}
# Of `.ci/run` the plain one is killed, in tests/test_training_kills.py.
FULL = [pytest.param(name, marks=pytest.mark.full) for name in KINDS if name != "distillation"]


@pytest.mark.parametrize("name", ["distillation", *FULL])
def test_an_interruption_is_resumed_to_the_same_bits(name: str, tmp_path: Path) -> None:
    """Stopped in the first epoch and in the last, a training ends as if it never was.

    The plain one reads image files. With other settings it is refused. It ends with a Vision
    Transformer, and no more.
    """
    function, model, other, text = KINDS[name]
    out = tmp_path / "run"
    data = DATA
    if name == "plain":
        data = load_folder(image_files.write_classes(tmp_path / "whole" / "images"))

    def call(**given: Any) -> Run:
        arguments = {**DEFAULTS, "data": data, "model": model(), "out": out}
        return function(**{**arguments, **given})

    whole = call(out=tmp_path / "whole" / "run")
    for step in (3,) if name == "distillation" else (1, 5):  # which is in `.ci/run`
        stopped = stop(call, at=step)
        assert stopped.path == tmp_path / "run.unfinished"
    assert (stopped.path / "adapter.safetensors").is_file() == (name == "adapter")
    changed = other()
    with pytest.raises(ValueError, match=f"was started with {text}"):
        call(existing="resume", **changed)
    resumed = call(existing="resume")

    assert state(resumed) == state(whole)
    assert history(resumed) == history(whole)
    assert not weights_differ(resumed.model, whole.model)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["run", "whole"]
    saved = keras.saving.load_model(out / "model.keras")
    assert type(saved) is keras_vit.VisionTransformer
    assert getattr(saved, "optimizer", None) is None
    assert not weights_differ(saved, resumed.model)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A training that nothing disturbs; tests must not change it."""
    return train(**DEFAULTS, out=tmp_path_factory.mktemp("whole") / "run")


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a training that ended in its last epoch; tests copy it."""
    folder = tmp_path_factory.mktemp("interrupted")
    stopped = stop(train, at=5, **DEFAULTS, out=folder / "run")
    assert "the best so far" in str(stopped)
    return folder


@pytest.fixture
def unfinished(interrupted: Path, tmp_path: Path) -> Path:
    """A copy of it; returns where its run is to be."""
    return shutil.copytree(interrupted, tmp_path / "copy") / "run"


@pytest.mark.full
def test_what_can_be_resumed_can_be_used_too(unfinished: Path) -> None:
    """It is a run of the best epoch, and says how far it came; nothing replaces it unasked."""
    opened = Run.load(unfinished.with_name("run.unfinished"))
    actual = evaluate(opened.model, DATA.validation, labels=opened.labels)
    result = opened.config["result"]

    assert (result["epochs"], result["finished"]) == (2, False)
    assert actual.accuracy == pytest.approx(result["validation_accuracy"], abs=1e-6)
    with pytest.raises(FileExistsError, match="holds an unfinished training"):
        train(**DEFAULTS, out=unfinished)


def test_the_best_model_of_a_killed_training_can_be_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is what a finished run holds, no run of an interruption before; resuming reads none."""
    arguments = {**DEFAULTS, "model": adapted(), "out": tmp_path / "run"}
    folder = tmp_path / "run.unfinished"

    def die(event: training.Event) -> None:
        if isinstance(event, training.StepDone) and event.step == 5:
            raise RuntimeError("killed")

    monkeypatch.setattr("keras_vit.training.loop._JOIN_TIMEOUT", 120)  # each epoch is saved
    stop(train, at=3, **arguments)
    assert training.run.is_run(folder)
    damage(folder / "model.keras", "cut")
    with pytest.raises(RuntimeError, match="killed"):
        train(**arguments, existing="resume", on_event=die)
    assert not training.run.is_run(folder)
    rows = csv.DictReader((folder / "history.csv").read_text().splitlines())
    losses = [float(row["validation_loss"]) for row in rows]
    saved = keras.saving.load_model(folder / "model.keras")
    assert type(saved) is keras_vit.VisionTransformer
    actual = evaluate(saved, DATA.validation, labels=DATA.labels)
    assert actual.loss == pytest.approx(min(losses), rel=1e-5)
    assert abs(np.diff(losses)) > 1e-3  # of two epochs

    (folder / "model.keras").unlink()
    assert train(**arguments, existing="resume").config["result"]["epochs"] == 3


@pytest.mark.full
def test_what_measures_a_run_belongs_to_it(tmp_path: Path) -> None:
    """A run that is not measured is not there; resuming measures it, and trains no step."""
    out = tmp_path / "run"

    def interrupt(event: training.Event) -> None:
        if isinstance(event, training.TrainingDone):
            (event.run.path / "metrics.json").write_text("half")
            raise KeyboardInterrupt

    with pytest.raises(training.TrainingInterrupted, match="resume to finish the run"):
        train(**DEFAULTS, out=out, on_event=interrupt)
    assert [entry.name for entry in tmp_path.iterdir()] == ["run.unfinished"]
    listener = Listener()
    train(**DEFAULTS, out=out, existing="resume", on_event=listener)

    assert [type(event) for event in listener.events] == [training.TrainingDone]
    assert not (out / "metrics.json").exists()
    assert [entry.name for entry in tmp_path.iterdir()] == ["run"]


@pytest.mark.full
def test_a_full_disk_ends_a_training(
    trained: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error of the thread that writes comes out; what it wrote before is resumed."""
    arguments = {**DEFAULTS, "out": tmp_path / "run", "existing": "resume"}
    write = np.savez

    def fill(file: Path, **members: np.ndarray) -> None:
        if "-00000004" in str(file):
            raise OSError(errno.ENOSPC, "full")
        write(file, **members)  # type: ignore[arg-type]

    monkeypatch.setattr(np, "savez", fill)
    monkeypatch.setattr("keras_vit.training.loop._JOIN_TIMEOUT", 120)
    text = r"No space left .*04.npz' .* older checkpoints are kept; make"
    with pytest.raises(OSError, match=text):
        train(**arguments)
    monkeypatch.undo()
    listener = Listener()
    resumed = train(**arguments, on_event=listener)
    assert listener.events[0].step == 3
    assert state(resumed) == state(trained)


def damage(file: Path, how: str) -> None:
    content, middle = bytearray(file.read_bytes()), file.stat().st_size // 2
    for place in range(middle, middle + 200):  # more than a header, of which few bytes matter
        content[place] ^= 1
    file.write_bytes(content[:middle] if how == "cut" else content)


@pytest.mark.full
def test_a_damaged_file_is_left_out_and_said(
    trained: Run, interrupted: Path, tmp_path: Path
) -> None:
    """An older checkpoint is used; the run ends with its bits."""
    for count, how, step in DAMAGES:
        folder = shutil.copytree(interrupted, tmp_path / how) / "run.unfinished"
        files = sorted(folder.glob("checkpoint-*"))[-count:]
        for file in files:
            damage(file, how)
        listener = Listener()
        with pytest.warns(UserWarning, match="older one is used") as warned:
            resumed = train(
                **DEFAULTS, out=tmp_path / how / "run", existing="resume", on_event=listener
            )
        said = "".join(str(warning.message) for warning in warned)
        assert all(f"{file.name}' is damaged" in said for file in files)
        assert listener.events[0].step == step + 1
        assert state(resumed) == state(trained)
        assert not weights_differ(resumed.model, trained.model)


def test_damage_without_a_way_back_is_told_before_training(unfinished: Path) -> None:
    """Where nothing whole is left, the sentence comes when it is resumed, not at the end."""
    arguments = {**DEFAULTS, "out": unfinished, "existing": "resume"}
    folder = unfinished.with_name("run.unfinished")
    for file in folder.glob("checkpoint-*"):
        damage(file, "cut")
    before = sorted(entry.name for entry in folder.iterdir())

    with (
        pytest.warns(UserWarning, match="is damaged; an older one is used"),
        pytest.raises(ValueError, match=r"No checkpoint in .*run.unfinished' is whole; put the"),
    ):
        train(**arguments)
    assert sorted(entry.name for entry in folder.iterdir()) == before
    damage(folder / "settings.json", "cut")
    with pytest.raises(ValueError, match=r"settings.json' is damaged"):
        train(**arguments)


@pytest.mark.full
def test_an_interruption_does_not_replace_a_whole_run(trained: Run, tmp_path: Path) -> None:
    """With "overwrite" the old run stays until the new one is complete."""
    out = shutil.copytree(trained.path, tmp_path / "run")
    before = (out / "model.keras").read_bytes()
    arguments = {**DEFAULTS, "recipe": dataclasses.replace(RECIPE, epochs=1), "out": out}

    with pytest.raises(training.TrainingInterrupted):
        train(**arguments, existing="overwrite", on_event=Listener(1))
    assert (out / "model.keras").read_bytes() == before
    train(**arguments, existing="resume")

    assert Run.load(out).config["result"]["epochs"] == 1
    assert len(list(tmp_path.iterdir())) == 1
