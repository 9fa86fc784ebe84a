"""Tests of planning and measuring: what is chosen before a training."""

import dataclasses
from pathlib import Path
from typing import Any

import image_files
import keras
import numpy as np
import pytest
from PIL import Image
from trainings import CONFIG, in_memory, noise

from keras_vit import environment, training
from keras_vit.data import ImageData, load_folder, load_unlabelled_folder
from keras_vit.training import Execution, measuring, planning
from keras_vit.training.execution import Job
from keras_vit.weights import resolve

RECIPE = training.Recipe(epochs=2, batch_size=12, learning_rate=1e-3)


@pytest.fixture
def mirror(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A mirror with files of the published names, which nobody opens."""
    folder = tmp_path / "mirror"
    for name in ("Ti/16", "S/16"):
        file = folder / f"{resolve(name, 'imagenet21k').name}.npz"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(b"never read")
    monkeypatch.setenv("KERAS_VIT_MIRROR", str(folder))
    monkeypatch.setenv("KERAS_HOME", str(tmp_path / "home"))
    return folder


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> ImageData:
    """Twenty images of one class and ten of the other."""
    folder = tmp_path_factory.mktemp("photos")
    image_files.write_classes(folder, count=20)
    for file in sorted((folder / "striped").iterdir())[10:]:
        file.unlink()
    return load_folder(folder)


def two_classes(count: int) -> ImageData:
    return in_memory(noise(np.arange(count) % 2), noise(np.arange(4) % 2), labels="ab")


def test_published_weights_are_fine_tuned_where_they_can_be_reached(
    mirror: Path, photos: ImageData
) -> None:
    """The smallest variant, with small batches; the look counts classes and reads headers."""
    plan = planning.choose(photos)
    assert (plan.model, plan.weights, plan.place) == ("Ti/16", "imagenet21k", "mirror")
    assert (plan.largest, plan.smallest, plan.classes) == (20, 10, 2)
    assert plan.config == dataclasses.replace(training.model_config("Ti/16"))
    assert plan.recipe == planning.fine_tuning(len(photos.train))
    assert plan.recipe.batch_size == 8
    assert plan.choice_text.startswith(
        "30 images of 2 classes, the largest 2.0 times the smallest, median "
    )
    assert plan.choice_text.endswith(": fine-tunes Ti/16 from imagenet21k (in the mirror).")


def test_data_and_machine_choose_the_model(
    mirror: Path, photos: ImageData, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The larger one for many images on an accelerator; the small one where patches do not fit.

    The digits stay as they are.
    """
    digits = planning.choose(dataclasses.replace(two_classes(40), source="digits"))
    assert digits.config == training.MODELS["digits-hybrid"]
    assert (digits.recipe, digits.execution) == (training.RECIPES["digits"], Execution())
    assert planning.choose(photos, image_size=(96, 128)).model == "Ti/16"
    plan = planning.choose(photos, image_size=(72, 72))
    assert (plan.model, plan.config and plan.config.image_size) == ("tiny", (72, 72))
    assert plan.choice_text.endswith("16 pixels do not divide 72x72 (height x width).")
    for count, has, model in ((999, True, "Ti/16"), (1000, True, "S/16"), (1000, False, "Ti/16")):
        monkeypatch.setattr(measuring, "has_accelerator", lambda has=has: has)
        assert planning.choose(two_classes(count)).model == model


def test_elsewhere_the_small_model_trains_and_says_why(
    photos: ImageData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With what to do; weights that were not asked for need no reason, and no network."""
    monkeypatch.setenv("KERAS_VIT_MIRROR", str(tmp_path / "empty"))
    monkeypatch.setenv("KERAS_HOME", str(tmp_path / "home"))
    plan = planning.choose(photos)
    assert (plan.model, plan.weights) == ("tiny", None)
    assert plan.recipe == training.RECIPES["scratch"]
    assert "cannot be reached (there is no " in plan.choice_text
    assert "KERAS_VIT_MIRROR" in plan.choice_text
    assert "--weights none" in plan.choice_text
    monkeypatch.setattr("keras_vit.weights.sources.reach", lambda *_, **__: pytest.fail("asked"))
    fresh = planning.choose(photos, weights=None)
    assert fresh.choice_text.endswith("pixels: trains tiny from fresh weights.")


def test_sizes_of_huge_photos_are_read_from_their_headers(tmp_path: Path) -> None:
    """Of JPEG and PNG, without decoding; EXIF does not matter, sides are sorted."""
    huge = Image.new("RGB", (6000, 4000))
    huge.save(tmp_path / "0.jpg", exif=Image.Exif())
    for number in range(1, 5):
        (tmp_path / f"{number}.jpg").write_bytes((tmp_path / "0.jpg").read_bytes())
    Image.new("L", (30, 20)).save(tmp_path / "5.png")
    plan = planning.describe(
        dataclasses.replace(load_unlabelled_folder(tmp_path), labels=("a", "b")),
        model="tiny",
        config=CONFIG,
        recipe=RECIPE,
        execution=Execution(),
    )
    assert plan.sides == (6000, 4000)


def test_precision_follows_the_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    """bfloat16 where TensorFlow's kernels have units for it; XLA's code has no use for them."""
    choices: list[tuple[bool, Any, str]] = [
        (True, "auto", "mixed_bfloat16"),
        (True, True, "float32"),
        (False, "auto", "float32"),
    ]
    for tiles, xla, precision in choices:
        monkeypatch.setattr(environment, "has_bfloat16_units", lambda among, has=tiles: has)
        expected = precision if keras.backend.backend() == "tensorflow" else "float32"
        assert planning.fast_precision(Execution(xla=xla)) == expected


def machine(*, room: int, peak: int) -> Any:
    """What has so much memory, of which every step takes so much."""
    methods = {"room": lambda self: room, "peak": lambda self: peak}
    return type("Machine", (measuring._NoMeter,), methods)


@pytest.fixture(scope="module")
def free(photos: ImageData) -> training.TrainingPlan:
    """A plan that is measured with all the memory there may be."""
    described = planning.describe(
        photos, model="test", config=CONFIG, recipe=RECIPE, execution=Execution()
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measuring, "_meter", machine(room=2**40, peak=2**20))
        return described.measured(photos)


def test_what_fits_is_one_part(free: training.TrainingPlan, photos: ImageData) -> None:
    """The time is that of all images, their validation and the start."""
    cost = free.cost
    assert cost is not None
    assert (cost.part, free.execution.accumulate) == (12, 1)
    job = Job(photos, recipe=RECIPE, execution=free.execution)
    doubled = dataclasses.replace(job, recipe=dataclasses.replace(RECIPE, epochs=4))
    rest = cost.seconds(job) - cost.seconds_to_start
    assert 0 < rest < cost.seconds(doubled) - cost.seconds_to_start < 2.01 * rest
    assert "2 epochs in batches of 12, float32: about " in free.steps_text
    assert free.to_dict()["accumulate"] == 1


def test_what_does_not_fit_is_split(
    free: training.TrainingPlan, photos: ImageData, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where little memory is free, down to one image at a time; validation takes no more."""
    monkeypatch.setattr(measuring, "_meter", machine(room=0, peak=2**30))
    plan = free.measured(photos)
    assert plan.cost is not None
    assert (plan.cost.part, plan.execution.accumulate) == (1, 12)
    assert "in batches of 12, each in 12 parts to fit into memory" in plan.steps_text
    assert "This does not fit into the free memory" in plan.steps_text
    assert (plan.to_dict()["fits"], free.to_dict()["fits"]) == (False, True)
    assert "does not fit" not in free.steps_text
    asked = dataclasses.replace(free, execution=plan.execution)  # by --accumulate
    assert "each in 12 parts, float32" in asked.steps_text
    assert Job(photos, recipe=RECIPE, execution=plan.execution).evaluated_at_once == 1


def test_memory_is_on_the_line_through_two_sizes() -> None:
    """A power of two that fits, and no more than the batch."""
    first = measuring._Run(size=1, seconds=0.1, seconds_to_start=1, before=0, peak=1000)
    second = dataclasses.replace(first, size=5, peak=1400)
    for usable, expected in ((10_000, (64, 7300)), (5000, (32, 4100)), (1450, (4, 1400))):
        assert measuring._fit([first, second], largest=64, usable=usable) == expected


def test_no_part_is_larger_than_fits() -> None:
    """The first part has the remainder, too."""
    for size, part, parts in ((64, 64, 1), (64, 8, 8), (37, 8, 6), (5, 0, 5)):
        assert planning._parts(size, part=part) == parts
        assert size // parts + size % parts <= max(part, 1)


def test_control_groups_limit_memory(tmp_path: Path) -> None:
    """The smallest room counts, of a group and those around it, of both versions."""

    def write(name: str, text: str) -> None:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)

    assert measuring.available_memory(tmp_path) is None
    write("proc/meminfo", "MemTotal: 9 kB\nMemAvailable:       8000 kB\n")
    assert measuring.available_memory(tmp_path) == 8000 * 1024
    write("proc/self/cgroup", "0::/pod/inner\n")
    write("sys/fs/cgroup/pod/inner/memory.max", "max\n")
    write("sys/fs/cgroup/pod/memory.max", "5000\n")
    write("sys/fs/cgroup/pod/memory.current", "3000\n")
    write("sys/fs/cgroup/pod/memory.stat", "anon 1\ninactive_file 500\n")
    assert measuring.available_memory(tmp_path) == 2500
    write("proc/self/cgroup", "5:cpu:/x\n4:memory:/elsewhere\n")
    write("sys/fs/cgroup/memory/memory.limit_in_bytes", "4000\n")
    write("sys/fs/cgroup/memory/memory.usage_in_bytes", "1000\n")
    assert measuring.available_memory(tmp_path) == 3000
