"""Tests of keras_vit.parallel; tests/test_backend_jax_trainer trains on its meshes."""

import keras
import numpy as np
import pytest

import keras_vit


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
