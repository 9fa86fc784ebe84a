"""Resamples a table of position embeddings to another grid of patches, in NumPy alone.

Shapes: tables (1, prefix + h * w, D) of a grid h x w, D hidden_dim; matrices (new, old).
"""

from collections.abc import Callable
from typing import Literal, get_args

import numpy as np

Method = Literal["original", "bilinear", "bicubic", "bicubic_antialias"]

# The constant of torch.nn.functional.interpolate(mode="bicubic"); with antialias=True it is
# Pillow's, -0.5 (PyTorch, aten/src/ATen/native/cpu/UpSampleKernel.cpp, HelperInterpCubic).
CUBIC_SHARPNESS = {"bicubic": -0.75, "bicubic_antialias": -0.5}

# The variables whose shape depends on the grid of patches, by the last part of their path, and
# how many cells, (height, width), each has for a grid.
CELLS: dict[str, Callable[[int, int], tuple[int, int]]] = {
    "position_embedding": lambda height, width: (height, width),
    "position_x": lambda height, width: (1, width),
    "position_y": lambda height, width: (height, 1),
    "relative_bias": lambda height, width: (2 * height - 1, 2 * width - 1),
}


def resample_positions(
    table: np.ndarray,
    grid: tuple[int, int],
    new_grid: tuple[int, int],
    *,
    method: Method = "original",
) -> np.ndarray:
    """Resamples position embeddings from one (height, width) grid of patches to another.

    Example:
        >>> table = np.arange(5.0).reshape(1, 5, 1)  # a class token, then a grid of 2 x 2
        >>> resample_positions(table, (2, 2), (3, 3))[0, :, 0].tolist()
        [0.0, 1.0, 1.5, 2.0, 2.0, 2.5, 3.0, 3.0, 3.5, 4.0]

    Args:
        table: (1, prefix + height * width, D); rows before the grid's (a class token) are kept.
        grid: (height, width) of the table, in patches.
        new_grid: (height, width) wanted, in patches.
        method: "original" maps corners to corners linearly, as the original's fine-tuning does
            (`scipy.ndimage.zoom(order=1)`, vit_jax/checkpoint.py); the others map half-pixel
            centres, as PyTorch's `interpolate` does: "bilinear" and "bicubic" without
            antialiasing, "bicubic_antialias" with it, as timm and DINOv2 with registers resample.

    Returns:
        (1, prefix + new height * new width, D), in the table's dtype.

    Raises:
        ValueError: the table does not hold the grid, or the method is unknown.
    """
    check_method(method)
    prefix = table.shape[1] - grid[0] * grid[1]
    if prefix not in (0, 1):
        raise ValueError(
            f"A table of {table.shape[1]} positions does not hold a grid of {grid[0]}x{grid[1]} "
            "patches, with or without a class token."
        )
    if grid == new_grid:
        return table
    # In float64, so that the result is rounded once, to the table's dtype.
    cells = table[0, prefix:].reshape(*grid, -1).astype(np.float64)
    rows = _weights(grid[0], new_grid[0], method)
    columns = _weights(grid[1], new_grid[1], method)
    # Every method is separable: one matrix for rows, one for columns.
    cells = np.einsum("ah,hwd,bw->abd", rows, cells, columns, optimize=True)
    cells = cells.reshape(1, new_grid[0] * new_grid[1], -1).astype(table.dtype)
    return np.concatenate([table[:, :prefix], cells], axis=1)


def resample_variable(
    kind: str,
    value: np.ndarray,
    grid: tuple[int, int],
    new_grid: tuple[int, int],
    *,
    method: Method = "original",
) -> np.ndarray:
    """Resamples any variable whose shape depends on the grid; rows before the cells' are kept.

    Args:
        kind: one of `CELLS`.
        value: its value, (1, prefix + cells, width).
        grid: (height, width) of the model, in patches.
        new_grid: (height, width) wanted, in patches.
        method: see `resample_positions`.
    """
    cells, new_cells = CELLS[kind](*grid), CELLS[kind](*new_grid)
    prefix = value.shape[1] - cells[0] * cells[1]
    table = resample_positions(value[:, prefix:], cells, new_cells, method=method)
    return np.concatenate([value[:, :prefix], table], axis=1)


def check_method(method: object, *, any_size: bool = False) -> None:
    """Raises a ValueError unless `method` is one of `Method`, and one that a graph computes.

    Args:
        method: the way of resampling.
        any_size: whether a graph resamples, to the size of the images.
    """
    if method not in get_args(Method):
        raise ValueError(
            f"Positions are resampled by one of {get_args(Method)}. Received: {method!r}."
        )
    if any_size and method != "original":
        raise ValueError(
            'A model for images of any size resamples positions as "original" in its graph. '
            f"Received: positions={method!r}; give a height and width, or leave positions out."
        )


def square_grid(positions: int) -> tuple[int, int] | None:
    """Returns the (height, width) of a square grid of that many patches, or None."""
    side = round(positions**0.5)
    return (side, side) if side * side == positions else None


def _weights(old: int, new: int, method: Method) -> np.ndarray:
    if method == "bicubic_antialias":
        # The kernel is as wide as a new cell where the grid shrinks. What it would take from beyond
        # an edge is left out, and each row sums to one.
        scale = old / new
        centers = (np.arange(new) + 0.5) * scale - 0.5
        # A wider kernel averages all old cells below a new one; skipping them would alias.
        matrix = _kernel((centers[:, None] - np.arange(old)) / max(scale, 1), method)
        return np.asarray(matrix / matrix.sum(axis=1, keepdims=True))
    if method == "original":
        # The outermost cells keep their values, and the others are evenly between.
        centers = np.linspace(0, old - 1, new)
    else:
        # Cells have an area, as pixels do: the centre of cell i is i + 0.5, in both grids.
        centers = (np.arange(new) + 0.5) * old / new - 0.5
    if method == "bilinear":
        # PyTorch moves these centres into the table; for bicubic it repeats the edge instead.
        centers = np.clip(centers, 0, old - 1)
    reach = 2 if method == "bicubic" else 1
    matrix = np.zeros((new, old))
    first = np.floor(centers).astype(int) - reach + 1
    for offset in range(2 * reach):
        source = first + offset
        value = _kernel(centers - source, method)
        # Beyond an edge its own cell is repeated: one entry may be added to several times.
        np.add.at(matrix, (np.arange(new), np.clip(source, 0, old - 1)), value)
    return matrix


def _kernel(distance: np.ndarray, method: Method) -> np.ndarray:
    x = np.abs(distance)
    if method not in CUBIC_SHARPNESS:
        return np.asarray(np.maximum(1 - x, 0))
    # Keys' cubic convolution: `a` is its slope at distance 1, where the two pieces meet.
    a = CUBIC_SHARPNESS[method]
    near = (a + 2) * x**3 - (a + 3) * x**2 + 1
    far = a * x**3 - 5 * a * x**2 + 8 * a * x - 4 * a
    return np.asarray(np.where(x <= 1, near, np.where(x < 2, far, 0)))
