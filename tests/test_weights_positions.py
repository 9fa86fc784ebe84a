"""Tests of keras_vit.weights.positions."""

import itertools
from typing import get_args

import hypothesis
import numpy as np
import published
import pytest
import scipy.ndimage
from conftest import FLOAT32
from hypothesis import strategies as st

from keras_vit.weights.positions import Method, resample_positions, resample_variable, square_grid

GOLDEN = np.load(published.GOLDEN / "positions.npz")
METHODS = get_args(Method)

# torch 2.13, CPU, float64: interpolate(table, size=..., mode="bicubic", antialias=True) of tables
# (1, 1, height, width) from numpy.random.default_rng(0).standard_normal, one after another. Made
# once, by hand: "6x4" is a table and "6x4_to_3x9" what PyTorch makes of it.
ANTIALIAS = np.load(published.GOLDEN / "positions_antialias.npz")

sides = st.integers(1, 6)
# torch 2.13: interpolate(mode=..., align_corners=False) of arange(4) as a 1x4 row to 1x6.
TORCH_ROWS: dict[Method, list[float]] = {
    "bilinear": [0.0, 0.5, 1.1666666, 1.8333334, 2.5, 3.0],
    "bicubic": [-0.0868056, 0.40625, 1.2129627, 1.7870371, 2.59375, 3.0868058],
}
KINDS = {  # cells of a table for a grid of 6x4, what stands before them, and its cells for 3x9
    "position_embedding": ((6, 4), 1, (3, 9)),
    "position_x": ((1, 4), 0, (1, 9)),
    "position_y": ((6, 1), 0, (3, 1)),
    "relative_bias": ((11, 7), 3, (5, 17)),
}


def table(height: int, width: int, prefix: int = 1) -> np.ndarray:
    return np.random.default_rng(0).standard_normal((1, prefix + height * width, 3))


def test_original_is_what_the_original_makes() -> None:
    """Resampled tables equal those of the original's fine-tuning code; others are told apart."""
    for name in ("14_to_24", "7_to_12", "16_to_37", "24_to_14", "14_to_14"):
        old, _, new = name.split("_")
        grids = (int(old),) * 2, (int(new),) * 2
        made = resample_positions(GOLDEN[f"from_{old}"], *grids)
        np.testing.assert_allclose(made, GOLDEN[name], rtol=0, atol=FLOAT32, err_msg=name)
    made = resample_positions(GOLDEN["from_14"], (14, 14), (24, 24), method="bilinear")
    assert np.abs(made - GOLDEN["14_to_24"]).max() > 1e-3


@hypothesis.settings(deadline=None, derandomize=True, max_examples=25)
@hypothesis.given(sides, sides, sides, sides)
def test_original_equals_scipy_zoom(h: int, w: int, new_h: int, new_w: int) -> None:
    """Any grid, square or not, is zoomed as scipy does it."""
    positions = table(h, w)
    made = resample_positions(positions, (h, w), (new_h, new_w))
    zoom = (new_h / h, new_w / w, 1)
    expected = scipy.ndimage.zoom(positions[0, 1:].reshape(h, w, 3), zoom, order=1)
    np.testing.assert_allclose(made[0, 1:].reshape(new_h, new_w, 3), expected, atol=1e-9)
    np.testing.assert_array_equal(made[0, 0], positions[0, 0])


def test_half_pixel_methods_are_pytorchs() -> None:
    """A ramp becomes what PyTorch's interpolate makes of it."""
    ramp = np.arange(4.0).reshape(1, 4, 1)
    for method, expected in TORCH_ROWS.items():
        made = resample_positions(ramp, (1, 4), (1, 6), method=method)
        np.testing.assert_allclose(made[0, :, 0], expected, atol=FLOAT32, err_msg=method)


def antialias_error(name: str, method: Method) -> float:
    """Returns how far a method's table is from PyTorch's antialiased one."""
    old, expected = ANTIALIAS[name.split("_to_")[0]], ANTIALIAS[name]
    (_, _, h, w), (_, _, new_h, new_w) = old.shape, expected.shape
    made = resample_positions(old.reshape(1, -1, 1), (h, w), (new_h, new_w), method=method)
    return float(np.abs(made.reshape(expected.shape) - expected).max())


def test_antialiasing_is_pytorchs() -> None:
    """Grids that grow, shrink, or do both: the table is that of `antialias=True` alone."""
    for name in [name for name in ANTIALIAS if "_to_" in name]:
        assert antialias_error(name, "bicubic_antialias") < 1e-12, name
        # Without it the numbers are others, also where a grid grows.
        assert antialias_error(name, "bicubic") > 1e-2, name


def test_every_kind_of_table_is_resampled_alike() -> None:
    """Its cells as `resample_positions` does it, and what stands before them as it was."""
    for (kind, (cells, prefix, new_cells)), method in itertools.product(KINDS.items(), METHODS):
        value = table(*cells, prefix)
        made = resample_variable(kind, value, (6, 4), (3, 9), method=method)
        wanted = resample_positions(value[:, prefix:], cells, new_cells, method=method)
        np.testing.assert_array_equal(made[:, :prefix], value[:, :prefix], err_msg=kind)
        np.testing.assert_array_equal(made[:, prefix:], wanted, err_msg=f"{kind} {method}")


def test_a_table_of_another_grid_is_refused() -> None:
    """The sentence names both; only a square number has a square grid."""
    assert [square_grid(count) for count in (196, 24)] == [(14, 14), None]
    for method in METHODS:  # of the same grid nothing is computed
        positions = table(3, 5)
        assert resample_positions(positions, (3, 5), (3, 5), method=method) is positions
    with pytest.raises(ValueError, match="26 positions does not hold a grid of 4x4"):
        resample_positions(table(5, 5), (4, 4), (8, 8))
    with pytest.raises(ValueError, match=r"resampled by one of.*'nearest'"):
        resample_positions(table(4, 4), (4, 4), (8, 8), method="nearest")  # type: ignore[arg-type]
