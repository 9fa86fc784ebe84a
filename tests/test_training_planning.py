"""Tests of keras_vit.training.planning and execution: what is chosen, and where it runs."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import image_files
import keras
import numpy as np
import pytest
import tensorflow as tf
from trainings import CONFIG, in_memory, noise

import keras_vit
from keras_vit import environment, training
from keras_vit.data import ImageData, load_folder
from keras_vit.training import Execution, is_first_worker, planning
from keras_vit.training.execution import StrategyName, TensorFlowEngine
from keras_vit.training.train import make_engine
from keras_vit.weights import resolve

RECIPE = training.Recipe(epochs=2, batch_size=12, learning_rate=1e-3)
STEPS = "gradient_accumulation_steps"
WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("tensorflow", {"strategy": "parameter_server"}, "strategy must be one .*='parameter_server'"),
    ("tensorflow", {"precision": "int8"}, "precision must be one of .*='int8'"),
    ("tensorflow", {STEPS: 0}, f"{STEPS} must be a positive integer. .*: {STEPS}=0"),
    ("tensorflow", {"mesh": "data=2"}, "Meshes are for JAX: set KERAS_BACKEND=jax"),
    ("jax", {"strategy": "mirrored"}, "on JAX give a mesh, such as data=8, in place of"),
    ("jax", {"xla": False}, "XLA compiles every step on JAX"),
    ("torch", {}, "TensorFlow or JAX backend. Received: 'torch'"),
]


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


LONG: list[dict[str, Any]] = [{}, {"batch_size": 64}, {"optimizer": "lamb", "epochs": 500}]


def two_classes(count: int) -> ImageData:
    return in_memory(noise(np.arange(count) % 2), noise(np.arange(4) % 2), labels="ab")


def test_published_weights_are_fine_tuned_where_they_can_be_reached(
    mirror: Path, photos: ImageData
) -> None:
    """The smallest variant, with small batches; the look counts classes."""
    plan = planning.plan(photos)
    assert (plan.model, plan.weights, plan.place) == ("Ti/16", "imagenet21k", "mirror")
    fields = plan.to_dict()
    assert (fields["largest_class"], fields["smallest_class"], fields["classes"]) == (20, 10, 2)
    assert plan.config == dataclasses.replace(training.model_config("Ti/16"))
    assert plan.recipe == planning.fine_tuning(photos)
    assert plan.recipe.batch_size == 8
    own = planning.plan(photos, settings={"batch_size": 12}).recipe
    assert own == planning.fine_tuning(photos, batch_size=12)
    assert plan.choice_text == (
        "30 images of 2 classes, the largest 2.0 times the smallest: fine-tunes Ti/16 from "
        "imagenet21k (in the mirror)."
    )


def test_data_and_machine_choose_the_model(
    mirror: Path, photos: ImageData, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The larger one for many images on an accelerator; the small one where patches do not fit.

    The digits stay as they are.
    """
    digits = planning.plan(dataclasses.replace(two_classes(40), source="digits"))
    assert digits.config == training.MODELS["digits-hybrid"]
    assert (digits.recipe, digits.execution) == (training.RECIPES["digits"], Execution())
    assert planning.plan(photos, image_size=(96, 128)).model == "Ti/16"
    plan = planning.plan(photos, image_size=(72, 72))
    assert (plan.model, plan.config and plan.config.image_size) == ("tiny", (72, 72))
    assert plan.choice_text.endswith("16 pixels do not divide 72x72 (height x width).")
    for count, has, model in ((999, True, "Ti/16"), (1000, True, "S/16"), (1000, False, "Ti/16")):
        kind = "GPU" if has else "CPU"
        monkeypatch.setattr(planning, "_devices", lambda kind=kind: (kind, []))
        assert planning.plan(two_classes(count)).model == model


def test_elsewhere_the_small_model_trains_and_says_why(
    photos: ImageData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With what to do; weights that were not asked for need no reason, and no network."""
    monkeypatch.setenv("KERAS_VIT_MIRROR", str(tmp_path / "empty"))
    monkeypatch.setenv("KERAS_HOME", str(tmp_path / "home"))
    plan = planning.plan(photos)
    assert (plan.model, plan.weights) == ("tiny", None)
    assert plan.recipe == training.RECIPES["scratch"]
    assert "cannot be reached (there is no " in plan.choice_text
    assert "KERAS_VIT_MIRROR" in plan.choice_text
    assert "--weights none" in plan.choice_text
    monkeypatch.setattr(
        "keras_vit.weights.sources.resolve_origin", lambda *_, **__: pytest.fail("asked")
    )
    fresh = planning.plan(photos, weights=None)
    assert fresh.choice_text.endswith("smallest: trains tiny from random weights.")


def test_a_start_from_weights_has_two_hundred_steps() -> None:
    """However few the images are and whatever is set, but their number itself; it ends not before.

    Few steps have another rate, by layer. Weights that train anew do as random ones.
    """
    scratch, tuned = training.RECIPES["scratch"], training.RECIPES["fine-tune"]
    for count, batch_size, epochs in (
        *((1, 8, 200), (24, 8, 67), (64, 8, 25), (240, 8, 10), (1279, 32, 10), (1280, 64, 10)),
    ):
        recipe = planning.fine_tuning(two_classes(count))
        assert (recipe.batch_size, recipe.epochs) == (batch_size, epochs), count
        few: Any = {"learning_rate": 3e-4, "layer_decay": 0.75} if count < 1280 else {}
        few |= {"batch_size": batch_size, "epochs": epochs, "patience": recipe.patience}
        assert recipe == dataclasses.replace(tuned, **few)
        for anew in (False, True):
            for settings in LONG:
                made = planning.fine_tuning(two_classes(count), anew=anew, **settings)
                plan = made.plan(images=count)
                assert plan.steps >= (made.patience or 0) * plan.steps_per_epoch >= 200
                assert {name: getattr(made, name) for name in settings} == settings
    assert planning.fine_tuning(two_classes(240), anew=True) == scratch.changed(patience=67)
    set_by_hand = planning.fine_tuning(two_classes(24), steps=5, patience=None)
    assert (set_by_hand.steps, set_by_hand.epochs, set_by_hand.patience) == (5, None, None)
    digits = dataclasses.replace(two_classes(240), source="digits")
    assert planning.fine_tuning(digits).augmentation == training.RECIPES["digits"].augmentation
    assert planning.fine_tuning(digits).patience is None


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


def test_a_plan_says_how_in_a_sentence_and_in_json(photos: ImageData) -> None:
    """Size, length, parts, precision and devices; height first, which is said where it matters."""
    wide = dataclasses.replace(CONFIG, input_shape=(8, 16, 3))
    split = Execution(gradient_accumulation_steps=12, precision="mixed_float16")
    for config, execution, said in (
        (CONFIG, Execution(), "8x8 pixels, 2 epochs in batches of 12, float32, on "),
        (wide, Execution(), "8x16 pixels (height x width), 2 epochs"),
        (None, split, "2 epochs in batches of 12, each in 12 micro-batches, mixed_float16, on "),
    ):
        plan = planning.TrainingPlan(
            data=photos, model="test", config=config, recipe=RECIPE, execution=execution
        )
        assert plan.steps_text.startswith(said)
    fields = plan.to_dict()
    names = ("gradient_accumulation_steps", "steps", "batch_size")
    assert [fields[name] for name in names] == [12, 4, 12]
    assert (fields["image_size"], fields["images"]) == (None, photos.counts)


def test_what_cannot_be_done_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is made; the sentence says what to do on which backend."""
    for backend, fields, message in WRONG:
        monkeypatch.setattr(keras.backend, "backend", lambda name=backend: name)
        with pytest.raises(ValueError, match=message):
            make_engine(Execution(**fields))


def test_several_workers_need_their_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without TF_CONFIG, or with one worker in it, the sentence says what it must hold."""
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": {"worker": ["localhost:1"]}}))
    with pytest.raises(ValueError, match=r"cluster\.worker listing two or more host:port"):
        Execution(strategy="multi_worker").make_strategy()


def test_the_first_worker_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the index in TF_CONFIG; alone, a process is the first."""
    cluster = {"worker": ["localhost:1", "localhost:2"]}
    actual = []
    for index in (0, 1):
        task = {"cluster": cluster, "task": {"type": "worker", "index": index}}
        monkeypatch.setenv("TF_CONFIG", json.dumps(task))
        actual.append(is_first_worker())
    monkeypatch.delenv("TF_CONFIG")

    assert [*actual, is_first_worker()] == [True, False, True]


def test_all_devices_of_the_machine_are_used(strategy: tf.distribute.Strategy) -> None:
    """Here two logical CPUs; a second strategy would break off the sums of another model."""
    engine = TensorFlowEngine(strategy)

    assert strategy.num_replicas_in_sync == 2
    assert (engine.index, engine.count, engine.gather(5)) == (0, 1, [5])
    assert Execution(strategy="mirrored").make_strategy() is strategy


def test_replicas_of_one_machine_divide_nothing_among_workers() -> None:
    """TensorFlow would rewrite the batches for one worker, for most of a minute."""
    batches = tf.data.Dataset.range(4).batch(2)
    strategies = Execution(strategy="mirrored"), Execution(strategy="none")
    machine, device = (
        TensorFlowEngine(execution.make_strategy()).one_pass(lambda _: batches).options()
        for execution in strategies
    )

    policies = tf.data.experimental.AutoShardPolicy
    assert machine.experimental_distribute.auto_shard_policy == policies.OFF
    assert device.experimental_distribute.auto_shard_policy == policies.DATA


@pytest.mark.parametrize("strategy", ["none", "mirrored"])
def test_each_evaluation_is_one_pass_over_all_images(strategy: StrategyName) -> None:
    """However many there are of them; the last batch is short, and the second replica has none."""
    values = np.array([[1.0], [2.0], [4.0], [8.0], [16.0], [32.0]], np.float32)
    pairs = tf.data.Dataset.from_tensor_slices((values, values))
    engine = make_engine(Execution(strategy=strategy))
    with engine.scope():
        inputs = keras.Input((1,))
        outputs = keras.layers.Dense(1, kernel_initializer="zeros", use_bias=False)(inputs)
        model = keras_vit.ExactModel(inputs, outputs)
        model.compile("sgd", loss="mse")
    batches = pairs.batch(4)
    engine.begin(model, training=lambda _: batches, validation=lambda _: batches, size=4)

    losses = [float(engine.evaluate()["loss"]) for _ in range(3)]

    np.testing.assert_allclose(losses, [(values**2).mean()] * 3, rtol=1e-6)
