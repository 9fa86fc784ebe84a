"""Fixtures that several test files share; two devices, so that strategies can be tested."""

import dataclasses
import os
import subprocess
import sys
from pathlib import Path
from typing import TypeVar

import filelock
import keras
import numpy as np
import pytest

import keras_vit
from keras_vit.config import ViTConfig
from keras_vit.model import VisionTransformer

if keras.backend.backend() == "tensorflow":
    import tensorflow as tf

    tf.config.set_logical_device_configuration(
        tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 2
    )

Model = TypeVar("Model", bound=keras.Model)

CLASSES = 7
TINY = ViTConfig(
    input_shape=(32, 48, 3),
    patch_size=8,
    hidden_dim=24,
    mlp_dim=48,
    num_heads=3,
    num_layers=3,
    classes=CLASSES,
)


# All that may depart from the published networks at once.
VARIED = dataclasses.replace(
    TINY,
    num_layers=2,
    position_embedding="relative",
    num_registers=1,
    layer_scale=0.1,
    query_key_norm=True,
    activation="swiglu",
    distillation_token=True,
)


def randomize(model: Model, seed: int = 0) -> Model:
    """Gives every weight random values: fresh heads are zero and fresh norms fold away."""
    generator = np.random.default_rng(seed)
    for variable in model.trainable_variables:
        values = generator.standard_normal(variable.shape) * 0.1
        variable.assign(values + (variable.name == "gamma"))
    return model


def weights_differ(left: keras.Model, right: keras.Model) -> bool:
    """Whether any bit does."""
    pairs = zip(left.get_weights(), right.get_weights(), strict=True)
    return not all(np.array_equal(a, b) for a, b in pairs)


@pytest.fixture(scope="session")
def tiny() -> VisionTransformer:
    """A small model with every weight random; tests must not change it."""
    return randomize(VisionTransformer(TINY))


@pytest.fixture
def images() -> np.ndarray:
    """Two images for `tiny`, in [-1, 1]."""
    return np.random.default_rng(1).uniform(-1, 1, (2, 32, 48, 3)).astype(np.float32)


@pytest.fixture(scope="session")
def digits_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on the digits as the README makes it: minutes, so one for all processes of a test."""
    common = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        common = common.parent
    out = common / "digits-run"
    with filelock.FileLock(common / "digits-run.lock"):
        if not out.exists():
            subprocess.run(
                [sys.executable, "-m", "keras_vit", "train", "--data", "digits", "--out", out],
                env={
                    **os.environ,
                    "PYTHONPATH": str(Path(keras_vit.__file__).parents[1]),
                    "CUDA_VISIBLE_DEVICES": "",
                },
                check=True,
            )
    return out
