"""Tests of keras_vit.parallel; those with devices need Keras' JAX backend."""

import json
import os
import subprocess
import sys
from typing import Any

import keras
import numpy as np
import pytest

import keras_vit

DEVICES = 2
TRAINING = """
import json, sys
import keras, numpy as np
import keras_vit
kind = sys.argv[1]
if kind == "data":
    keras.distribution.set_distribution(keras.distribution.DataParallel())
elif kind == "model":
    devices = np.array(keras.distribution.list_devices())
    mesh = keras.distribution.DeviceMesh((1, len(devices)), ("batch", "model"), devices)
    keras.distribution.set_distribution(keras.distribution.ModelParallel(
        layout_map=keras_vit.layout_map(mesh), batch_dim_name="batch"))
keras.utils.set_random_seed(0)
model = keras_vit.VisionTransformer(keras_vit.ViTConfig(
    input_shape=(16, 16, 3), patch_size=8, hidden_dim=16, mlp_dim=32, num_heads=4, num_layers=2,
    classes=3))
model.compile(keras.optimizers.SGD(0.3, momentum=0.9, global_clipnorm=1.0),
              keras.losses.SparseCategoricalCrossentropy(from_logits=True))
x = np.random.default_rng(0).uniform(-1, 1, (8, 16, 16, 3)).astype("float32")
losses = model.fit(x, np.arange(8) % 3, batch_size=8, epochs=6, shuffle=False, verbose=0)
kernel = model.get_layer("block_0").mlp.fc1.kernel.value
print(json.dumps({"losses": losses.history["loss"], "devices": len(kernel.devices()),
                  "split": kernel.sharding.shard_shape(kernel.shape) != kernel.shape}))
"""

needs_jax = pytest.mark.skipif(
    keras.backend.backend() != "jax", reason="Keras shares weights among devices on JAX alone"
)


def train(kind: str) -> dict[str, Any]:
    """Trains on two CPU devices in a process of its own, whose devices are made first."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={DEVICES}"
    output = subprocess.run(
        [sys.executable, "-c", TRAINING, kind],
        env={**os.environ, "XLA_FLAGS": flags.strip()},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    actual: dict[str, Any] = json.loads(output.splitlines()[-1])
    return actual


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    """The same training on one device."""
    return train("none")


@needs_jax
@pytest.mark.parametrize(("kind", "is_split"), [("data", False), ("model", True)])
def test_two_devices_train_as_one(kind: str, is_split: bool, alone: dict[str, Any]) -> None:
    """Images shared, or kernels shared: the losses of one device."""
    actual = train(kind)

    np.testing.assert_allclose(actual["losses"], alone["losses"], rtol=1e-4)
    assert alone["losses"][-1] < alone["losses"][0]
    assert (actual["devices"], actual["split"]) == (DEVICES, is_split)


def test_each_block_has_its_layout() -> None:
    """Wide kernels are split once, biases with their columns, the rest not at all."""
    mesh = keras.distribution.DeviceMesh((1, 1), ("batch", "model"), np.array(["cpu:0"]))
    layouts = keras_vit.layout_map(mesh)
    axes = {
        name: None if layouts[name] is None else layouts[name].axes
        for name in (
            "block_11/attention/qkv/kernel",
            "block_11/attention/qkv/bias",
            "block_11/attention/out/kernel",
            "block_11/attention/out/bias",
            "block_0/mlp/fc2/kernel",
            "head/kernel",
        )
    }

    assert list(axes.values()) == [
        (None, "model"),
        ("model",),
        ("model", None),
        None,
        ("model", None),
        None,
    ]


def test_a_mesh_without_the_axis_is_an_error() -> None:
    """The sentence names the axes that there are."""
    mesh = keras.distribution.DeviceMesh((1,), ("batch",), np.array(["cpu:0"]))
    with pytest.raises(ValueError, match=r"no axis 'model'; its axes are \['batch'\]"):
        keras_vit.layout_map(mesh)
