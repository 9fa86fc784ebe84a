"""Tests of keras_vit.backend: each backend's own forms give the plain form's numbers."""

from typing import Any

import keras
import numpy as np
import pytest

import keras_vit
from keras_vit import backend
from keras_vit.backend import plain

# Largest difference between the two forms, as a fraction of the largest value.
TOLERANCES = {"float32": 1e-5, "bfloat16": 2e-2}
# Form, shapes of what it takes, its other arguments.
FORMS: dict[str, tuple[str, list[tuple[int, ...]], dict[str, Any]]] = {
    **{
        f"dense, {activation}": ("dense", [(2, 3, 8), (8, 5), (5,)], {"activation": activation})
        for activation in plain.ACTIVATIONS
    },
    "layer_norm": ("layer_norm", [(2, 3, 8), (8,), (8,)], {"epsilon": 1e-6}),
    "softmax": ("softmax", [(2, 2, 3, 7)], {}),
    "self_attention": ("self_attention", [(2, 5, 24)], {"num_heads": 2}),
}


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def relative(ours: Any, expected: Any) -> float:
    ours, expected = (
        keras.ops.convert_to_numpy(keras.ops.cast(x, "float32")) for x in (ours, expected)
    )
    assert ours.shape == expected.shape
    return float(np.abs(ours - expected).max() / np.abs(expected).max())


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize(("function", "shapes", "arguments"), FORMS.values(), ids=FORMS)
def test_forms_equal_the_plain_ones(function: str, shapes: Any, arguments: Any, dtype: str) -> None:
    """Every form of this backend gives the plain form's numbers, outside a graph."""
    arrays = [keras.ops.cast(normal(*shape, seed=k), dtype) for k, shape in enumerate(shapes)]
    ours = getattr(backend, function)(*arrays, **arguments)
    expected = getattr(plain, function)(*arrays, **arguments)
    assert relative(ours, expected) < TOLERANCES[dtype]


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_dense_adds_the_residual_last(dtype: str) -> None:
    """The residual is added to what the activation gives."""
    x, kernel, bias, residual = (
        keras.ops.cast(normal(*shape, seed=k), dtype)
        for k, shape in enumerate([(2, 3, 8), (8, 5), (5,), (2, 3, 5)])
    )
    for activation in plain.ACTIVATIONS:
        ours = backend.dense(x, kernel, bias, activation, residual=residual)
        expected = residual + plain.dense(x, kernel, bias, activation)
        assert relative(ours, expected) < TOLERANCES[dtype]
        assert relative(backend.dense(x, kernel, bias, activation), expected) > TOLERANCES[dtype]


def test_layer_norm_of_bfloat16_keeps_its_statistics_in_float32() -> None:
    """Under bfloat16 a mean far from zero costs no more than rounding the answer does."""
    x = keras.ops.cast(normal(4, 768) + 20, "bfloat16")
    gamma, beta = (keras.ops.cast(value, "bfloat16") for value in (np.ones(768), np.zeros(768)))
    wide = np.asarray(keras.ops.cast(x, "float32"), np.float64)
    expected = (wide - wide.mean(-1, keepdims=True)) / wide.std(-1, keepdims=True)
    ours = backend.layer_norm(x, gamma, beta, epsilon=1e-6)
    assert relative(ours, expected) < TOLERANCES["bfloat16"]


def test_backends_have_the_same_activations() -> None:
    """No activation exists on one backend alone."""
    assert set(backend.ACTIVATIONS) == set(plain.ACTIVATIONS)


@pytest.mark.parametrize(("height", "width", "block"), [(4, 6, 2), (6, 6, 3), (5, 3, 1)])
def test_space_to_depth_equals_the_plain_form(height: int, width: int, block: int) -> None:
    """Blocks hold the same pixels in the same order."""
    images = normal(2, height, width, 3)
    ours = backend.space_to_depth(images, block)
    np.testing.assert_array_equal(ours, plain.space_to_depth(images, block))


def test_uninitialized_has_shape_and_dtype() -> None:
    """What nobody reads still has the shape and dtype asked for."""
    for module in (backend, plain):
        array = module.empty((2, 3), "bfloat16")
        assert tuple(array.shape) == (2, 3)
        assert keras.backend.standardize_dtype(array.dtype) == "bfloat16"


@pytest.mark.parametrize("offset", [0, 4])
def test_adopted_values_survive_their_array(offset: int) -> None:
    """Taken over or copied, aligned or not, the values stay, and changing them is safe."""
    memory = np.empty(4096 + 64 + offset, np.uint8)
    start = -memory.ctypes.data % 64 + offset
    array = memory[start : start + 4096].view(np.float32).reshape(32, 32)
    array[:] = normal(32, 32)
    expected = array.copy()
    variable = keras.Variable(np.zeros((32, 32), np.float32))
    variable.assign(backend.from_numpy_without_copy(array))
    del array, memory
    np.testing.assert_array_equal(variable, expected)
    variable.assign_add(keras.ops.ones((32, 32)))
    np.testing.assert_array_equal(variable, expected + 1)


def test_each_block_has_its_layout_on_a_mesh() -> None:
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
