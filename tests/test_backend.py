"""Tests of keras_vit.backend: each backend's own forms give the plain form's numbers."""

import keras
import numpy as np
import pytest

from keras_vit import backend
from keras_vit.backend import plain


def normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("activation", plain.ACTIVATIONS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_dense_equals_the_plain_form(activation: str | None, dtype: str) -> None:
    """Product, bias and activation agree to float32's noise, or to a rounding of bfloat16."""
    rows, kernel, bias = (
        keras.ops.cast(array, dtype) for array in (normal(6, 8), normal(8, 5), normal(5))
    )
    ours = keras.ops.cast(backend.dense(rows, kernel, bias, activation), "float32")
    expected = keras.ops.cast(plain.dense(rows, kernel, bias, activation), "float32")
    tolerance = 1e-5 if dtype == "float32" else 5e-2
    np.testing.assert_allclose(ours, expected, atol=tolerance)


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
        array = module.uninitialized((2, 3), "bfloat16")
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
    variable.assign(backend.adopt(array))
    del array, memory
    np.testing.assert_array_equal(variable, expected)
    variable.assign_add(keras.ops.ones((32, 32)))
    np.testing.assert_array_equal(variable, expected + 1)
