"""Tests of keras_vit.model."""

import dataclasses
import json
import pickle
from itertools import starmap
from pathlib import Path
from typing import Any

import keras
import numpy as np
import processes
import pytest
from conftest import FLOAT32, TINY, randomize, reloaded, weights_differ

import keras_vit
from keras_vit import ExactModel, VisionTransformer, backend

NORM, DENSE = ("gamma", "beta"), ("kernel", "bias")
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
OWN_PIXELS: dict[str, Any] = {
    "image_mean": (0.485, 0.456, 0.406),
    "image_std": (0.229, 0.224, 0.225),
}
# What people freeze of a model that has a block of this name.
FREEZING: dict[str, Any] = {
    "a model": lambda model: setattr(model, "trainable", False),
    "all but a block": lambda model: [
        each.__setattr__("trainable", each.name == "block_1") for each in (model, *model.layers)
    ],
    "a block": lambda model: setattr(model.get_layer("block_1"), "trainable", False),
    "a layer inside": lambda model: setattr(model.get_layer("block_1").mlp, "trainable", False),
    "a weight": lambda model: setattr(model.weights[2], "trainable", False),
}
IN_A_NEW_PROCESS = """
import json, os, sys
import keras, keras_vit, numpy as np
os.chdir(sys.argv[1])
keras.utils.set_random_seed(0)
with open("model.json") as file:
    fresh = keras_vit.lora(keras.models.model_from_json(file.read()), rank=2)
np.savez("fresh.npz", *fresh.get_weights())
model, adapted = (keras.saving.load_model(f"{name}.keras") for name in ("model", "adapted"))
again = keras_vit.VisionTransformer(model.config)
again.load_weights("model.weights.h5")
images = np.load("images.npy")
np.savez("answers.npz", *(m.predict(images, verbose=0) for m in (model, again, adapted)))
optimizer = keras.saving.load_model("compiled.keras").optimizer
print(json.dumps([
    [variable.path for variable in model.weights],
    [variable.path for variable in adapted.trainable_weights],
    str(type(optimizer)),
    "keras_vit.training" in sys.modules,
]))
"""


def paths(leaves: tuple[str, ...], *layers: str) -> list[str]:
    return [f"{layer}/{leaf}" for layer in layers for leaf in leaves]


# Variable paths are a file format: a changed line here is a new major version.
BLOCK_PATHS = [
    *paths(NORM, "attention_norm"),
    *paths(DENSE, "attention/qkv", "attention/out"),
    *paths(NORM, "mlp_norm"),
    *paths(DENSE, "mlp/fc1", "mlp/fc2"),
]
UNIT_PATHS = [path for i in (1, 2, 3) for path in (f"conv{i}/kernel", *paths(NORM, f"norm{i}"))]
PROJECTION_PATHS = ["projection/kernel", *paths(NORM, "projection_norm")]
MAP_PATHS = [
    "pooling/probe",
    *paths(NORM, "pooling/norm"),
    *paths(DENSE, "pooling/mlp/fc1", "pooling/mlp/fc2"),
    *paths(DENSE, "pooling/query", "pooling/key_value", "pooling/out"),
]
ENCODER_PATHS = ["patch_encoder/position_embedding", *paths(DENSE, "patch_encoder/projection")]


def test_variable_paths_are_golden() -> None:
    """Every path is as it was when the first file was written, of stems and pooling too."""
    model = VisionTransformer(dataclasses.replace(TINY, num_layers=2, representation_dim=5))
    expected = [
        "patch_encoder/class_token",
        *ENCODER_PATHS,
        *(f"block_{index}/{path}" for index in range(2) for path in BLOCK_PATHS),
        *paths(NORM, "encoder_norm"),
        *paths(DENSE, "representation"),
        *paths(DENSE, "head"),
    ]
    assert [variable.path for variable in model.weights] == expected
    hybrid: dict[str, Any] = {"input_shape": (32, 32, 3), "patch_size": 1, "resnet_layers": (2, 1)}
    config = dataclasses.replace(TINY, num_layers=1, pooling="map", class_token=False, **hybrid)
    units = {"stage_0_unit_0": True, "stage_0_unit_1": False, "stage_1_unit_0": True}
    expected = [
        *("stem/root_conv/kernel", "stem/root_norm/gamma", "stem/root_norm/beta"),
        *(
            f"stem/{unit}/{path}"
            for unit, projects in units.items()
            for path in [*UNIT_PATHS, *(PROJECTION_PATHS if projects else [])]
        ),
        *ENCODER_PATHS,
        *(f"block_0/{path}" for path in BLOCK_PATHS),
        *paths(NORM, "encoder_norm"),
        *MAP_PATHS,
        *paths(DENSE, "head"),
    ]
    assert [variable.path for variable in VisionTransformer(config).weights] == expected


@pytest.mark.parametrize(("fields", "shape"), POOLINGS)
def test_output_shapes(fields: dict[str, Any], shape: tuple[int, ...], images: np.ndarray) -> None:
    """Pooling, classifier and representation layer give the documented shape, eager or not."""
    model = randomize(VisionTransformer(dataclasses.replace(TINY, **fields)))
    assert model.output_shape == (None, *shape[1:])
    assert tuple(model(images).shape) == shape
    np.testing.assert_allclose(model.predict(images, verbose=0), model(images), atol=FLOAT32)


def test_a_batch_is_its_images_one_by_one(tiny: VisionTransformer, images: np.ndarray) -> None:
    """No image sees another of its batch; one of another size is an error, not a silent crop."""
    single = np.concatenate([tiny(image[None]) for image in images])
    np.testing.assert_allclose(tiny(images), single, atol=FLOAT32)
    for size in ((31, 48), (32, 40), (48, 32)):
        with pytest.raises(ValueError, match="32, 48"):
            tiny(np.zeros((1, *size, 3), np.float32))


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
            for given in (pixels, pixels.astype(np.float32)):
                inputs = model.preprocess_input(given)
                for answer in (model(inputs), model.predict(inputs, verbose=0)):
                    np.testing.assert_allclose(answer, expected, rtol=0, atol=FLOAT32)
    finally:
        keras.config.set_image_data_format(before)


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
    there = r"no feature 'block_9'; choose from patch_encoder.*block_2"
    with pytest.raises(ValueError, match=there):
        tiny.feature_extractor(["block_9"])


def test_config_rebuilds_the_model() -> None:
    """Name, dtype policy and every field survive `from_config(get_config())`."""
    config = dataclasses.replace(TINY, dropout_rate=0.1, resnet_layers=(1,), patch_size=2)
    model = VisionTransformer(config, name="mine", dtype="mixed_bfloat16")
    again = VisionTransformer.from_config(model.get_config())
    assert again.get_config() == model.get_config()
    assert (again.config, again.name) == (config, "mine")
    assert again.get_layer("block_0").dtype_policy.name == "mixed_bfloat16"


def test_a_copy_computes_as_a_model_of_its_config_with_the_weights(
    tiny: VisionTransformer, images: np.ndarray
) -> None:
    """It has the config asked for, the name and every bit of the weights, and shares none."""
    before = tiny.get_weights()
    fields: dict[str, Any]
    for fields in (
        {"dropout_rate": 0.1, "drop_path_rate": 0.2},
        {"classifier_activation": "softmax", "include_preprocessing": True},
        {"remat": True},
        {"scan_blocks": True},
    ):
        config = dataclasses.replace(TINY, **fields)
        copy, expected = tiny.copy(config=config), VisionTransformer(config)
        expected.set_weights(before)
        assert (type(copy), copy.config, copy.name) == (VisionTransformer, config, tiny.name)
        assert [v.path for v in copy.weights] == [v.path for v in tiny.weights]
        np.testing.assert_array_equal(copy(images), expected(images), err_msg=str(fields))
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
    """Class, flags of each weight, LoRA, int8 kernels are the model's, and the bits."""
    # The memory of weights that are assigned later may hold anything.
    monkeypatch.setattr(backend, "empty", keras.initializers.Constant(float("nan")))
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


@pytest.mark.parametrize("what", FREEZING)
def test_what_is_frozen_stays_frozen(what: str, tiny: VisionTransformer, tmp_path: Path) -> None:
    """In a file with the optimizer's state, and a clone; alone and in another model; it answers."""
    base, images, tokens = tiny.copy(), keras.Input((32, 48, 3)), keras.Input((4, 8))
    FREEZING[what](base)
    nested = ExactModel(images, keras.layers.Dense(2)(base(images)))
    block = keras_vit.layers.TransformerBlock(2, 16, name="block_1", trainable=what != "a block")
    small = keras.Model(tokens, keras.layers.Dense(2)(block(tokens)))
    FREEZING[what](small)
    for model in filter(lambda model: model.trainable_variables, (nested, small, base)):
        flags = [(weight.path, weight.trainable) for weight in model.weights]
        assert not all(is_trainable for _, is_trainable in flags)
        model.compile("adam", "mse")
        x, y = (np.ones((2, *shape[1:])) for shape in (model.input_shape, model.output_shape))
        model.train_on_batch(x, y)
        again = reloaded(model, tmp_path)
        for ours, theirs in zip(again.optimizer.variables, model.optimizer.variables, strict=True):
            np.testing.assert_array_equal(ours, theirs)
        np.testing.assert_allclose(again(x), model(x), atol=FLOAT32)
        if model is nested:
            features = again.get_layer("vit").features(x)["head"]
            np.testing.assert_allclose(features, base(x), atol=FLOAT32)
        for copy in (again, pickle.loads(pickle.dumps(model)), keras.models.clone_model(model)):
            assert [(weight.path, weight.trainable) for weight in copy.weights] == flags


def test_fresh_layers_of_a_copy_start_anew(tiny: VisionTransformer) -> None:
    """A classifier of other classes is zeros, one may come or go, and all else is copied."""
    wide = tiny.copy(config=dataclasses.replace(TINY, classes=9), reinitialize=["head"])
    bare = tiny.copy(config=dataclasses.replace(TINY, classes=None), reinitialize=["head"])
    again = bare.copy(config=TINY, reinitialize=["head"])
    assert not np.any(wide.get_layer("head").kernel)
    assert wide.output_shape == (None, 9)
    for model in (wide, bare, again):
        for ours, theirs in zip(model.weights, tiny.weights, strict=False):
            if not ours.path.startswith("head/"):
                np.testing.assert_array_equal(ours, theirs)
    drawn = tiny.copy(reinitialize=["block_1"]).get_layer("block_1").mlp.fc1.kernel
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
        tiny.copy(reinitialize=["head", "haed"])


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


def test_without_the_import_the_error_names_it(
    tiny: VisionTransformer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keras' own message prints the config of what it has no class for."""
    tiny.save(tmp_path / "tiny.keras")
    monkeypatch.delitem(keras.saving.get_custom_objects(), "keras_vit>VisionTransformer")
    with pytest.raises(TypeError, match=r"import keras_vit before keras\.saving\.load_model"):
        keras.saving.load_model(tmp_path / "tiny.keras")


def test_a_process_that_only_imported_the_package_loads_files(
    tiny: VisionTransformer, tmp_path: Path
) -> None:
    """`.keras` and `.weights.h5` give the same bits; optimizer, schedule, loss, LoRA are known.

    A seed decides every new weight, the low-rank matrices of LoRA too, there and where others
    drew before.
    """
    tiny.save(tmp_path / "model.keras")
    adapted = randomize(keras_vit.lora(tiny, rank=2))
    adapted.save(tmp_path / "adapted.keras")
    tiny.save_weights(tmp_path / "model.weights.h5")
    (tmp_path / "model.json").write_text(tiny.to_json())
    images = np.random.default_rng(1).uniform(-1, 1, (2, 32, 48, 3))
    np.save(tmp_path / "images.npy", images)
    compiled = VisionTransformer(dataclasses.replace(TINY, num_layers=1))
    schedule = keras_vit.optimizers.WarmupDecay(0.1, steps=9)
    compiled.compile(keras_vit.optimizers.AdamW(schedule), keras_vit.losses.SigmoidCrossEntropy())
    compiled.save(tmp_path / "compiled.keras")
    process = processes.python("-c", IN_A_NEW_PROCESS, tmp_path)
    paths, trained, *printed = json.loads(process.stdout.splitlines()[-1])
    assert paths == [variable.path for variable in tiny.weights]
    assert trained == [variable.path for variable in adapted.trainable_weights]
    assert printed == ["<class 'keras_vit.optimizers.AdamW'>", False]
    answers, expected = np.load(tmp_path / "answers.npz"), tiny.predict(images, verbose=0)
    np.testing.assert_array_equal(answers["arr_0"], expected)
    np.testing.assert_array_equal(answers["arr_1"], expected)
    np.testing.assert_array_equal(answers["arr_2"], adapted.predict(images, verbose=0))
    theirs = list(np.load(tmp_path / "fresh.npz").values())
    for seed in (0, 1):
        keras.utils.set_random_seed(seed)
        fresh = keras_vit.lora(keras.models.model_from_json(tiny.to_json()), rank=2)
        same = starmap(np.array_equal, zip(fresh.get_weights(), theirs, strict=True))
        assert all(same) == (seed == 0)
