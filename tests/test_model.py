"""Tests of keras_vit.model."""

import dataclasses
import json
import subprocess
import sys
from itertools import starmap
from pathlib import Path
from typing import Any

import keras
import numpy as np
import oracle
import published
import pytest
from conftest import FLOAT32, TINY, randomize, weights_differ

import keras_vit
from keras_vit import backend
from keras_vit.model import VisionTransformer

# Variable paths are a file format: a changed line here is a new major version.
BLOCK_PATHS = [
    "attention_norm/gamma",
    "attention_norm/beta",
    "attention/qkv/kernel",
    "attention/qkv/bias",
    "attention/out/kernel",
    "attention/out/bias",
    "mlp_norm/gamma",
    "mlp_norm/beta",
    "mlp/fc1/kernel",
    "mlp/fc1/bias",
    "mlp/fc2/kernel",
    "mlp/fc2/bias",
]
UNIT_PATHS = [
    f"{part}/{leaf}"
    for index in (1, 2, 3)
    for part, leaf in (
        (f"conv{index}", "kernel"),
        (f"norm{index}", "gamma"),
        (f"norm{index}", "beta"),
    )
]
PROJECTION_PATHS = ["projection/kernel", "projection_norm/gamma", "projection_norm/beta"]
MAP_PATHS = [
    "pooling/probe",
    "pooling/norm/gamma",
    "pooling/norm/beta",
    *(f"pooling/mlp/{layer}/{leaf}" for layer in ("fc1", "fc2") for leaf in ("kernel", "bias")),
    *(
        f"pooling/{part}/{leaf}"
        for part in ("query", "key_value", "out")
        for leaf in ("kernel", "bias")
    ),
]
ENDS = {
    "encoder": [
        "patch_encoder/position_embedding",
        "patch_encoder/projection/kernel",
        "patch_encoder/projection/bias",
    ],
    "norm": ["encoder_norm/gamma", "encoder_norm/beta"],
    "head": ["head/kernel", "head/bias"],
}

POOLINGS = [
    ({"pooling": "token"}, (2, 7)),
    ({"pooling": "avg"}, (2, 7)),
    ({"pooling": "avg", "class_token": False}, (2, 7)),
    ({"pooling": "map", "class_token": False}, (2, 7)),
    ({"pooling": None, "classes": None}, (2, 25, 24)),
    ({"pooling": None, "classes": None, "class_token": False}, (2, 24, 24)),
    ({"classes": None}, (2, 24)),
    ({"classes": None, "representation_dim": 5}, (2, 5)),
]


def test_variable_paths_are_golden() -> None:
    """Every path of a plain model is as it was when the first file was written."""
    model = VisionTransformer(dataclasses.replace(TINY, num_layers=2, representation_dim=5))
    expected = [
        "patch_encoder/class_token",
        *ENDS["encoder"],
        *(f"block_{index}/{path}" for index in range(2) for path in BLOCK_PATHS),
        *ENDS["norm"],
        "representation/kernel",
        "representation/bias",
        *ENDS["head"],
    ]
    assert [variable.path for variable in model.weights] == expected


def test_variable_paths_of_a_hybrid_are_golden() -> None:
    """So are those of the ResNet stem and of attention pooling."""
    config = dataclasses.replace(
        TINY,
        input_shape=(32, 32, 3),
        num_layers=1,
        patch_size=1,
        resnet_layers=(2, 1),
        pooling="map",
        class_token=False,
    )
    units = {"stage_0_unit_0": True, "stage_0_unit_1": False, "stage_1_unit_0": True}
    expected = [
        *("stem/root_conv/kernel", "stem/root_norm/gamma", "stem/root_norm/beta"),
        *(
            f"stem/{unit}/{path}"
            for unit, projects in units.items()
            for path in [*UNIT_PATHS, *(PROJECTION_PATHS if projects else [])]
        ),
        *ENDS["encoder"],
        *(f"block_0/{path}" for path in BLOCK_PATHS),
        *ENDS["norm"],
        *MAP_PATHS,
        *ENDS["head"],
    ]
    assert [variable.path for variable in VisionTransformer(config).weights] == expected


@pytest.mark.parametrize("exact", [False, True])
def test_model_equals_the_same_network_in_numpy(exact: bool, tmp_path: Path) -> None:
    """A float64 NumPy forward pass on the checkpoint's own names gives the same logits."""
    config = dataclasses.replace(
        TINY, representation_dim=16, activation="gelu" if exact else "gelu_tanh"
    )
    original = VisionTransformer(dataclasses.replace(config, activation="gelu_tanh"))
    keras_vit.weights.load(original, published.write(tmp_path / "weights.npz", config))
    model = VisionTransformer(config)
    model.set_weights(original.get_weights())
    images = published.images(config)
    expected = oracle.forward(published.arrays(config), images, exact_gelu=exact)
    np.testing.assert_allclose(model(images), expected, rtol=0, atol=FLOAT32)


@pytest.mark.parametrize(("fields", "shape"), POOLINGS)
def test_output_shapes(fields: dict[str, Any], shape: tuple[int, ...], images: np.ndarray) -> None:
    """Pooling, classifier and representation layer give the documented shape, eager or not."""
    model = randomize(VisionTransformer(dataclasses.replace(TINY, **fields)))
    assert model.output_shape == (None, *shape[1:])
    assert tuple(model(images).shape) == shape
    np.testing.assert_allclose(model.predict(images, verbose=0), model(images), atol=FLOAT32)


def test_a_fresh_classifier_answers_zero(images: np.ndarray) -> None:
    """The head starts at zero, as the original's does."""
    assert not keras.ops.convert_to_numpy(VisionTransformer(TINY)(images)).any()


def test_a_batch_is_its_images_one_by_one(tiny: VisionTransformer, images: np.ndarray) -> None:
    """No image sees another of its batch."""
    single = np.concatenate([tiny(image[None]) for image in images])
    np.testing.assert_allclose(tiny(images), single, atol=FLOAT32)


@pytest.mark.parametrize("size", [(31, 48), (32, 40, 3), (48, 32, 3)])
def test_another_image_size_is_refused(tiny: VisionTransformer, size: tuple[int, ...]) -> None:
    """An image of another size is an error, not a silent crop."""
    with pytest.raises(ValueError, match="32, 48"):
        tiny(np.zeros((1, *size[:2], 3), np.float32))


def test_preprocessing_takes_pixels(tiny: VisionTransformer) -> None:
    """With preprocessing inside, uint8 and float pixels give what scaled pixels give without."""
    inside = VisionTransformer(dataclasses.replace(TINY, include_preprocessing=True))
    inside.set_weights(tiny.get_weights())
    pixels = np.random.default_rng(0).integers(0, 256, (2, 32, 48, 3), dtype=np.uint8)
    expected = keras.ops.convert_to_numpy(tiny((pixels.astype(np.float32) - 127.5) / 127.5))
    np.testing.assert_allclose(inside(pixels), expected, atol=FLOAT32)
    np.testing.assert_allclose(inside(pixels.astype(np.float32)), expected, atol=FLOAT32)
    np.testing.assert_allclose(inside.predict(pixels, verbose=0), expected, atol=FLOAT32)


OWN_PIXELS: dict[str, Any] = {
    "image_mean": (0.485, 0.456, 0.406),
    "image_std": (0.229, 0.224, 0.225),
}


@pytest.mark.parametrize("data_format", ["channels_last", "channels_first"])
def test_pixels_of_the_config_inside_and_before_the_model(
    tiny: VisionTransformer, data_format: str
) -> None:
    """(x / 255 - mean) / std, in the model or by its preprocess_input, in any layout of Keras."""
    pixels = np.random.default_rng(2).integers(0, 256, (2, *TINY.input_shape), np.uint8)
    means = (np.array(OWN_PIXELS[name], np.float32) for name in ("image_mean", "image_std"))
    mean, std = means
    expected = keras.ops.convert_to_numpy(tiny((pixels / np.float32(255) - mean) / std))
    assert np.abs(keras.ops.convert_to_numpy(tiny(pixels / 127.5 - 1)) - expected).max() > 1e-2
    before = keras.config.image_data_format()
    keras.config.set_image_data_format(data_format)
    try:
        for inside in (True, False):
            config = dataclasses.replace(TINY, include_preprocessing=inside, **OWN_PIXELS)
            model = VisionTransformer(config)
            model.set_weights(tiny.get_weights())
            answer = keras.ops.convert_to_numpy(model(model.preprocess_input(pixels)))
            np.testing.assert_allclose(answer, expected, rtol=0, atol=FLOAT32)
    finally:
        keras.config.set_image_data_format(before)


def test_pixels_of_the_original_are_one_multiplication_and_one_addition() -> None:
    """The numbers of the default config are those that it always had."""
    model = VisionTransformer(dataclasses.replace(TINY, include_preprocessing=True))
    layer = model.get_layer("rescaling")
    assert (layer.scale, layer.offset) == (1 / 127.5, -1.0)


def test_pixels_of_the_config_survive_a_keras_file(tmp_path: Path) -> None:
    """What is saved comes back with its mean and deviation, and the same answers."""
    config = dataclasses.replace(TINY, include_preprocessing=True, **OWN_PIXELS)
    model = randomize(VisionTransformer(config))
    model.save(tmp_path / "model.keras")
    again = keras.saving.load_model(tmp_path / "model.keras")
    assert again.config == config
    pixels = np.random.default_rng(2).integers(0, 256, (2, *TINY.input_shape), np.uint8)
    np.testing.assert_array_equal(again(pixels), model(pixels))


def test_features_are_the_models_own(tiny: VisionTransformer, images: np.ndarray) -> None:
    """Every named result comes from the same weights, the last one being the model's output."""
    features = tiny.features(images)
    assert tuple(features) == tiny.feature_names
    assert tiny.feature_names == (
        *("patch_encoder", "block_0", "block_1", "block_2", "encoder_norm", "pooling", "head"),
    )
    assert features["block_2"].shape == (2, 25, 24)
    np.testing.assert_array_equal(features["pooling"], features["encoder_norm"][:, 0])
    np.testing.assert_allclose(features["head"], tiny(images), atol=FLOAT32)
    extractor = tiny.feature_extractor(["block_1"])
    assert {id(v) for v in extractor.variables} <= {id(v) for v in tiny.variables}


def test_unknown_feature_is_refused(tiny: VisionTransformer) -> None:
    """The error lists the names there are."""
    with pytest.raises(
        ValueError, match=r"no feature 'block_9'; choose from patch_encoder.*block_2"
    ):
        tiny.feature_extractor(["block_9"])


def test_mixed_precision_keeps_the_classifier_in_float32(images: np.ndarray) -> None:
    """Under bfloat16 the logits are float32 and near the float32 model's."""
    plain = randomize(VisionTransformer(TINY))
    mixed = VisionTransformer(TINY, dtype="mixed_bfloat16")
    mixed.set_weights(plain.get_weights())
    logits = mixed(images)
    assert keras.backend.standardize_dtype(logits.dtype) == "float32"
    assert keras.backend.standardize_dtype(mixed.get_layer("block_0").compute_dtype) == "bfloat16"
    np.testing.assert_allclose(logits, plain(images), atol=0.05)


def test_config_rebuilds_the_model() -> None:
    """Name, dtype policy and every field survive `from_config(get_config())`."""
    config = dataclasses.replace(TINY, dropout_rate=0.1, resnet_layers=(1,), patch_size=2)
    model = VisionTransformer(config, name="mine", dtype="mixed_bfloat16")
    again = VisionTransformer.from_config(model.get_config())
    assert again.get_config() == model.get_config()
    assert (again.config, again.name) == (config, "mine")
    assert again.get_layer("block_0").dtype_policy.name == "mixed_bfloat16"


# What a copy may have otherwise, every weight as it is.
OTHER_FIELDS = [
    {"dropout_rate": 0.1, "drop_path_rate": 0.2},
    {"classifier_activation": "softmax"},
    {"include_preprocessing": True},
    {"remat": True},
    {"scan_blocks": True},
]


@pytest.mark.parametrize("fields", OTHER_FIELDS, ids=lambda fields: next(iter(fields)))
def test_a_copy_computes_as_a_model_of_its_config_with_the_weights(
    fields: dict[str, Any], tiny: VisionTransformer, images: np.ndarray
) -> None:
    """It has the config asked for, the name and every bit of the weights, and shares none."""
    config = dataclasses.replace(TINY, **fields)
    copy = tiny.copy(config=config)
    expected = VisionTransformer(config)
    expected.set_weights(tiny.get_weights())
    assert (type(copy), copy.config, copy.name) == (VisionTransformer, config, tiny.name)
    assert [v.path for v in copy.weights] == [v.path for v in tiny.weights]
    np.testing.assert_array_equal(copy(images), expected(images))
    before = tiny.get_weights()
    randomize(copy, seed=1)
    assert all(map(np.array_equal, before, tiny.get_weights()))
    assert weights_differ(copy, tiny)


def test_a_copy_in_another_dtype_rounds_the_weights(tiny: VisionTransformer) -> None:
    """The policy is that of the layers, the classifier stays float32, and back nothing is lost."""
    half = tiny.copy(dtype="bfloat16")
    assert half.get_config() == {**tiny.get_config(), "dtype": "bfloat16"}
    for rounded, weight in zip(half.weights, tiny.weights, strict=True):
        is_head = rounded.path.startswith("head/")
        assert keras.backend.standardize_dtype(rounded.dtype) == (
            "float32" if is_head else "bfloat16"
        )
        expected = keras.ops.cast(keras.ops.cast(weight, rounded.dtype), "float32")
        np.testing.assert_array_equal(keras.ops.cast(rounded, "float32"), expected)
    again = half.copy(dtype=keras.DTypePolicy("float32")).copy(dtype="bfloat16")
    assert not weights_differ(again, half)


def test_a_copy_keeps_what_is_frozen_adapted_and_quantised(
    images: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Class, flags of each weight, thin matrices and int8 kernels are the model's, and the bits."""
    # The memory of weights that are assigned later may hold anything.
    monkeypatch.setattr(backend, "uninitialized", keras.initializers.Constant(float("nan")))
    adapted = randomize(keras_vit.lora(randomize(VisionTransformer(TINY)), rank=2, targets="fc1"))
    frozen = randomize(VisionTransformer(TINY, name="mine"))
    keras_vit.freeze(frozen, blocks=2)
    quantised = randomize(VisionTransformer(TINY))
    quantised.get_layer("block_0").mlp.fc1.quantize("int8")
    quantised.get_layer("block_1").attention.qkv.enable_lora(2)
    for model in (adapted, frozen, quantised):
        copy = model.copy(config=dataclasses.replace(TINY, remat=True))
        expected = {**model.get_config(), "config": copy.config.to_dict()}
        assert (type(copy), copy.get_config()) == (type(model), expected)
        actual, wanted = (
            [(v.path, v.dtype, v.trainable) for v in m.weights] for m in (copy, model)
        )
        assert actual == wanted
        assert not weights_differ(copy, model)
        np.testing.assert_array_equal(copy(images), model(images))
    larger = keras_vit.resize(frozen, (64, 64, 3))
    assert [v.trainable for v in larger.weights] == [v.trainable for v in frozen.weights]


def test_fresh_layers_of_a_copy_start_anew(tiny: VisionTransformer) -> None:
    """A classifier of other classes is zeros, one may come or go, and all else is copied."""
    wide = tiny.copy(config=dataclasses.replace(TINY, classes=9), fresh=["head"])
    bare = tiny.copy(config=dataclasses.replace(TINY, classes=None), fresh=["head"])
    again = bare.copy(config=TINY, fresh=["head"])
    assert not np.any(wide.get_layer("head").kernel)
    assert wide.output_shape == (None, 9)
    for model in (wide, bare, again):
        for ours, theirs in zip(model.weights, tiny.weights, strict=False):
            if not ours.path.startswith("head/"):
                np.testing.assert_array_equal(ours, theirs)
    drawn = tiny.copy(fresh=["block_1"]).get_layer("block_1").mlp.fc1.kernel
    assert 0 < np.abs(drawn).max() < np.sqrt(6 / (24 + 48))  # Xavier's bound


def test_a_copy_that_the_weights_do_not_fit_is_refused(tiny: VisionTransformer) -> None:
    """Other shapes, more or fewer weights and names of no layer are one sentence each."""
    shape = dataclasses.replace(TINY, input_shape=(48, 48, 3))
    with pytest.raises(ValueError, match=r"'patch_encoder/position_embedding' differs;.*resize"):
        tiny.copy(config=shape)
    with pytest.raises(ValueError, match=r"'block_3/.* and 11 more differ"):
        tiny.copy(config=dataclasses.replace(TINY, num_layers=4))
    with pytest.raises(ValueError, match=r"'block_2/.* and 11 more differ"):
        tiny.copy(config=dataclasses.replace(TINY, num_layers=2))
    with pytest.raises(ValueError, match=r"'head/bias' and 1 more differ.*name such layers"):
        tiny.copy(config=dataclasses.replace(TINY, classes=3))
    with pytest.raises(ValueError, match=r"no layer 'haed'"):
        tiny.copy(fresh=["head", "haed"])


def test_a_model_made_in_a_scope_is_copied_whole(images: np.ndarray) -> None:
    """Paths begin with the scope's name; the copy, adapted and merged ones get every weight."""
    with keras.name_scope("outer"):
        model = randomize(VisionTransformer(TINY))
    assert model.weights[0].path.startswith("outer/")
    expected = model(images)
    adapted = keras_vit.lora(model, rank=2)
    for copy in (model.copy(), adapted, keras_vit.merge_lora(adapted)):
        np.testing.assert_allclose(copy(images), expected, atol=FLOAT32)
    with keras.name_scope("other"):
        np.testing.assert_array_equal(model.copy()(images), expected)


IN_A_NEW_PROCESS = """
import json, os, sys
import keras, keras_vit, numpy as np
os.chdir(sys.argv[1])
keras.utils.set_random_seed(0)
with open("model.json") as file:
    fresh = keras_vit.lora(keras.models.model_from_json(file.read()), rank=2)
np.savez("fresh.npz", *fresh.get_weights())
model = keras.saving.load_model("model.keras")
again = keras_vit.VisionTransformer(model.config)
again.load_weights("model.weights.h5")
images = np.load("images.npy")
np.savez("answers.npz", a=model.predict(images, verbose=0), b=again.predict(images, verbose=0))
optimizer = keras.saving.load_model("compiled.keras").optimizer
print(json.dumps([
    [variable.path for variable in model.weights],
    str(type(optimizer)),
    "keras_vit.training" in sys.modules,
]))
"""


@pytest.fixture(scope="module")
def new_process(
    tiny: VisionTransformer, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, list[Any]]:
    """The folder of a process that only imported the package, and what it printed."""
    folder = tmp_path_factory.mktemp("new_process")
    tiny.save(folder / "model.keras")
    tiny.save_weights(folder / "model.weights.h5")
    (folder / "model.json").write_text(tiny.to_json())
    np.save(folder / "images.npy", np.random.default_rng(1).uniform(-1, 1, (2, 32, 48, 3)))
    compiled = VisionTransformer(dataclasses.replace(TINY, num_layers=1))
    schedule = keras_vit.optimizers.WarmupDecay(0.1, steps=9)
    compiled.compile(keras_vit.optimizers.AdamW(schedule), keras_vit.losses.SigmoidCrossEntropy())
    compiled.save(folder / "compiled.keras")
    command = [sys.executable, "-c", IN_A_NEW_PROCESS, str(folder)]
    process = subprocess.run(command, check=True, capture_output=True, text=True)
    return folder, json.loads(process.stdout.splitlines()[-1])


def test_files_load_in_a_process_that_only_imported_the_package(
    tiny: VisionTransformer, new_process: tuple[Path, list[Any]]
) -> None:
    """`.keras` and `.weights.h5` give the same logits, bit for bit, in a new process."""
    folder, (paths, *_) = new_process
    answers = np.load(folder / "answers.npz")
    expected = tiny.predict(np.load(folder / "images.npy"), verbose=0)
    np.testing.assert_array_equal(answers["a"], expected)
    np.testing.assert_array_equal(answers["b"], expected)
    assert paths == [variable.path for variable in tiny.weights]


def test_a_compiled_model_loads_with_the_package_alone(
    new_process: tuple[Path, list[Any]],
) -> None:
    """Its optimizer, schedule and loss are known without importing keras_vit.training."""
    _, printed = new_process
    assert printed[1:] == ["<class 'keras_vit.optimizers.AdamW'>", False]


def test_a_seed_decides_every_fresh_weight(
    tiny: VisionTransformer, new_process: tuple[Path, list[Any]]
) -> None:
    """Here, where others drew before, and in a new process; the thin matrices of LoRA too."""
    theirs = list(np.load(new_process[0] / "fresh.npz").values())
    for seed in (0, 1):
        keras.utils.set_random_seed(seed)
        fresh = keras_vit.lora(keras.models.model_from_json(tiny.to_json()), rank=2)
        same = starmap(np.array_equal, zip(fresh.get_weights(), theirs, strict=True))
        assert all(same) == (seed == 0)


def test_model_works_inside_another(
    tiny: VisionTransformer, images: np.ndarray, tmp_path: Path
) -> None:
    """Nested in a user's model it computes, saves and loads, and its features still answer."""
    inputs = keras.Input((32, 48, 3))
    model = keras.Model(inputs, keras.layers.Dense(2, name="mine")(tiny(inputs)))
    model.save(tmp_path / "model.keras")
    again = keras.saving.load_model(tmp_path / "model.keras")
    np.testing.assert_allclose(again(images), model(images), atol=FLOAT32)
    np.testing.assert_allclose(
        again.get_layer("vit").features(images)["head"], tiny(images), atol=FLOAT32
    )


@pytest.mark.full
def test_training_lowers_the_loss_and_moves_every_weight() -> None:
    """`fit` with every kind of dropout reaches all weights, and the loss falls."""
    keras.utils.set_random_seed(0)
    config = dataclasses.replace(
        TINY, dropout_rate=0.1, attention_dropout_rate=0.1, drop_path_rate=0.1, representation_dim=8
    )
    model = randomize(VisionTransformer(config))
    generator = np.random.default_rng(0)
    x, y = generator.standard_normal((8, 32, 48, 3)), generator.integers(0, 7, 8)
    before = model.get_weights()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(3e-3), loss)
    losses = model.fit(x, y, epochs=10, verbose=0).history["loss"]
    assert losses[-1] < 0.9 * losses[0]
    for old, variable in zip(before, model.weights, strict=True):
        assert not np.array_equal(old, keras.ops.convert_to_numpy(variable)), variable.path


@pytest.mark.full
def test_frozen_weights_stay(tiny: VisionTransformer) -> None:
    """A frozen block keeps its bits while the rest trains."""
    model = VisionTransformer(TINY)
    model.set_weights(tiny.get_weights())
    model.get_layer("block_1").trainable = False
    before = [keras.ops.convert_to_numpy(v) for v in model.get_layer("block_1").weights]
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    model.fit(np.ones((4, 32, 48, 3)), np.arange(4), verbose=0)
    for old, variable in zip(before, model.get_layer("block_1").weights, strict=True):
        np.testing.assert_array_equal(old, variable)
