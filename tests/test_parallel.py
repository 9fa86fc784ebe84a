"""Tests of keras_vit.parallel; tests/test_backend_jax_trainer trains on its meshes."""

import keras
import numpy as np
import pytest

import keras_vit


def test_each_block_has_its_layout() -> None:
    """Wide kernels are split once, biases with their columns, the rest not at all.

    Of a mesh without the axis the sentence names the axes that there are.
    """
    mesh = keras.distribution.DeviceMesh((1, 1), ("batch", "model"), np.array(["cpu:0"]))
    layouts = keras_vit.layout_map(mesh)
    for name, axes in {
        "block_11/attention/qkv/kernel": (None, "model"),
        "block_11/attention/qkv/bias": ("model",),
        "block_11/attention/out/kernel": ("model", None),
        "block_11/attention/out/bias": None,
        "block_0/mlp/fc2/kernel": ("model", None),
        "head/kernel": None,
    }.items():
        assert getattr(layouts[name], "axes", None) == axes, name
    mesh = keras.distribution.DeviceMesh((1,), ("batch",), np.array(["cpu:0"]))
    with pytest.raises(ValueError, match=r"no axis 'model'; its axes are \['batch'\]"):
        keras_vit.layout_map(mesh)
