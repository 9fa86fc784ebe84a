"""Where a token is: tables of positions, sines and cosines, rotary positions, relative biases.

Shapes: B images, N tokens (prefix tokens first, then patches), D hidden_dim, K width of a head, h
and w the grid of patches: those of a column and of a row.
"""

from typing import Any

import keras
import numpy as np

from keras_vit.config import WIDTH_MULTIPLES
from keras_vit.layers.random import initializer

# From BERT, as the original says (vit_jax/models_vit.py, Encoder).
POSITION_STDDEV = 0.02

# google-research/big_vision, models/vit.py, posemb_sincos_2d.
TEMPERATURE = 10_000
TABLES = ("learned", "learned_2d", "sincos_2d")

# Rows of a bias that stand before the offsets': from a token without place to one with a place,
# back, and between two without (microsoft/unilm, beit/modeling_finetune.py, RelativePositionBias).
BIAS_PREFIX = 3


def position_initializer() -> Any:
    """Returns the initializer of learned positions, see `initializer`."""
    return initializer(keras.initializers.RandomNormal(stddev=POSITION_STDDEV))


class PositionedLayer(keras.layers.Layer):
    """A layer that may have a table of position embeddings of its own."""

    def build_positions(
        self,
        kind: str | None,
        *,
        grid: tuple[int, int],
        hidden_dim: int,
        num_prefix_tokens: int,
        num_registers: int,
        any_size: bool = False,
    ) -> None:
        """Adds the variables of the table.

        Args:
            kind: one of `TABLES`, or None for no table.
            grid: (height, width) in patches.
            hidden_dim: width D of a token.
            num_prefix_tokens: tokens before the patches'.
            num_registers: how many of them, the last ones, are registers, which have no place.
            any_size: whether the table is resampled to the grids of the images, in float32.

        Raises:
            ValueError: the width cannot be cut into the parts that the table is made of.
        """
        multiple = WIDTH_MULTIPLES.get(str(kind), 1)
        if hidden_dim % multiple:
            raise ValueError(
                f"Positions {kind!r} need tokens whose width is a multiple of {multiple}. "
                f"Received: {hidden_dim}."
            )
        self._kind, self._grid, self._width = kind, grid, hidden_dim
        self._registers, self._any_size = num_registers, any_size
        self._placed_count = count = num_prefix_tokens - num_registers
        rows, columns = grid
        if kind == "learned":
            self.position_embedding = self._table("position_embedding", count + rows * columns)
        if kind == "learned_2d":
            # The tokens before the patches have places of their own, as with "learned": the two
            # differ only in the patches.
            if count:
                self.position_prefix = self._table("position_prefix", count)
            self.position_x = self._table("position_x", columns, hidden_dim // 2)
            self.position_y = self._table("position_y", rows, hidden_dim // 2)
        if kind == "sincos_2d":
            self._sines = sincos_table(grid, hidden_dim)

    def position_table(self, grid: tuple[Any, Any] | None = None) -> Any:
        """Returns the table (1, N, D); its rows of registers are zeros.

        Args:
            grid: (height, width) in patches, whole numbers or scalar tensors, that the table is
                resampled to; None for its own.

        Raises:
            ValueError: the layer has no table.
        """
        if self._kind is None:
            raise ValueError(f"The layer {self.name!r} has no position embeddings.")
        if self._kind == "learned" and not self._registers and grid is None:
            return self.position_embedding
        first, patches = self._parts(grid or self._grid)
        dtype = keras.backend.standardize_dtype(patches.dtype)
        zeros = keras.ops.zeros((1, self._registers, self._width), dtype)
        return keras.ops.concatenate([keras.ops.cast(first, dtype), zeros, patches], axis=1)

    def _parts(self, grid: tuple[Any, Any]) -> tuple[Any, Any]:
        """Returns the rows of the tokens before the patches, but registers, and the patches'."""
        (rows, columns), width = grid, self._width
        nothing = np.zeros((1, self._placed_count, width), np.float32)
        if self._kind == "learned":
            table = keras.ops.convert_to_tensor(self.position_embedding)
            patches = table[:, self._placed_count :]
            if grid is not self._grid:
                patches = keras.ops.reshape(patches, (1, *self._grid, width))
                patches = resample_axis(resample_axis(patches, 1, rows), 2, columns)
                patches = keras.ops.reshape(patches, (1, -1, width))
            return table[:, : self._placed_count], patches
        if self._kind == "sincos_2d":
            table = self._sines if grid is self._grid else sincos_table(grid, width)
            return nothing, keras.ops.convert_to_tensor(table)
        x, y = map(keras.ops.convert_to_tensor, (self.position_x, self.position_y))
        x = keras.ops.expand_dims(resample_axis(x, 1, columns), 1)
        y = keras.ops.expand_dims(resample_axis(y, 1, rows), 2)
        halves = [keras.ops.broadcast_to(each, (1, rows, columns, width // 2)) for each in (x, y)]
        patches = keras.ops.reshape(keras.ops.concatenate(halves, -1), (1, rows * columns, width))
        return self.position_prefix if self._placed_count else nothing, patches

    def _table(self, name: str, rows: int, width: int | None = None) -> Any:
        return self.add_weight(
            name=name,
            shape=(1, rows, width or self._width),
            initializer=position_initializer(),
            autocast=not self._any_size,
        )


@keras.saving.register_keras_serializable(package="keras_vit")
class PositionEmbedding(PositionedLayer):
    """Adds position embeddings to tokens; between blocks, `PatchEncoder` adds those of the input.

    Called with patches too (B, h, w, ...), it takes any number of them, and resamples its table to
    their grid.

    Example:
        >>> PositionEmbedding("learned_2d", grid=(2, 3))(keras.ops.zeros((1, 7, 8))).shape
        TensorShape([1, 7, 8])

    Args:
        kind: "learned" for each token, "learned_2d" for each row and each column in halves of the
            width, or "sincos_2d", fixed: sines and cosines of column and row, zeros before them.
        grid: (height, width) in patches.
        num_prefix_tokens: tokens before the patches'.
        num_registers: how many of them, the last ones, are registers, which have no place.

    Input shape: (B, N, D). Output shape: the same.

    Raises:
        ValueError: there is no such kind, or the number of tokens is another.
    """

    def __init__(
        self,
        kind: str | None,
        *,
        grid: tuple[int, int],
        num_prefix_tokens: int = 1,
        num_registers: int = 0,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        check_kind(kind)
        self.kind = kind
        self.grid = tuple(grid)
        self.num_prefix_tokens = num_prefix_tokens
        self.num_registers = num_registers

    def build(self, input_shape: tuple[Any, ...]) -> None:
        (rows, columns), prefix = self.grid, self.num_prefix_tokens
        if input_shape[1] not in (None, prefix + rows * columns):
            raise ValueError(
                f"A grid of {rows}x{columns} patches after {prefix} other tokens makes "
                f"{prefix + rows * columns}. Received: {input_shape[1]} tokens."
            )
        self.build_positions(
            self.kind,
            grid=(rows, columns),
            hidden_dim=input_shape[-1],
            num_prefix_tokens=prefix,
            num_registers=self.num_registers,
            any_size=input_shape[1] is None,
        )

    def call(self, inputs: Any, patches: Any = None) -> Any:
        grid = None if patches is None else keras.ops.shape(patches)[1:3]
        return inputs + keras.ops.cast(self.position_table(grid), inputs.dtype)

    def compute_output_shape(self, input_shape: tuple[Any, ...]) -> tuple[Any, ...]:
        return input_shape


def check_kind(kind: str | None) -> None:
    """Raises a ValueError unless `kind` is one of `TABLES`."""
    if kind not in TABLES:
        raise ValueError(f"Position tables are {', '.join(TABLES)}. Received: {kind!r}.")


def resample_axis(table: Any, axis: int, size: Any) -> Any:
    """Resamples an axis linearly, corners to corners, as "original" of `resample_positions`.

    Places are fractions of whole numbers: float32 is exact enough for a table of any size.

    Args:
        table: of any dtype; the result is in float32 unless nothing changes.
        axis: of the table; the size that it has is known.
        size: wanted, a whole number or a scalar tensor.
    """
    old = table.shape[axis]
    if isinstance(size, int) and size == old:
        return table
    table = keras.ops.cast(table, "float32")
    steps = keras.ops.maximum(keras.ops.convert_to_tensor(size, "int32") - 1, 1)
    # In whole numbers: rounding could put a position that falls on a cell just below it.
    places = keras.ops.arange(size, dtype="int32") * (old - 1)  # in units of 1 / steps
    lower, rest = places // steps, places % steps
    fraction = keras.ops.cast(rest, "float32") / keras.ops.cast(steps, "float32")
    shape = tuple(-1 if each == axis else 1 for each in range(len(table.shape)))
    fraction = keras.ops.reshape(fraction, shape)
    low = keras.ops.take(table, lower, axis=axis)
    # The last position lies on the last cell: its fraction is 0, and no cell follows.
    high = keras.ops.take(table, keras.ops.minimum(lower + 1, old - 1), axis=axis)
    return low * (1 - fraction) + high * fraction


def sincos_table(grid: tuple[Any, Any], width: int) -> Any:
    """Returns the fixed table of a grid, (1, patches, width), as big_vision's models have it.

    Quarters of the width are sin(x), cos(x), sin(y), cos(y), each at frequencies that fall
    geometrically from 1 to 1 / 10000.

    Args:
        grid: (height, width) in patches, whole numbers, or scalar tensors on TensorFlow.
        width: of a token.

    Returns:
        float32, an array for whole numbers, otherwise a tensor.
    """
    ops = float64_operations(grid)
    quarter = width // 4
    # Divided by quarter - 1, as in big_vision: the last frequency is 1 / 10000 itself.
    falling = TEMPERATURE ** (-np.arange(quarter) / max(quarter - 1, 1))
    places = ops.meshgrid(*(ops.arange(side, dtype="float64") for side in grid), indexing="ij")
    y, x = (ops.reshape(place, (-1, 1)) * falling for place in places)
    table = ops.concatenate([ops.sin(x), ops.cos(x), ops.sin(y), ops.cos(y)], axis=1)[None]
    return table.astype(np.float32) if ops is np else ops.cast(table, "float32")


def float64_operations(grid: tuple[Any, Any]) -> Any:
    """Returns what computes in float64: NumPy where the grid is known, otherwise `keras.ops`."""
    return np if all(isinstance(side, int) for side in grid) else keras.ops


def bias_rows(grid: tuple[int, int], num_prefix_tokens: int) -> int:
    """Returns how many values a relative bias has for each head."""
    return bool(num_prefix_tokens) * BIAS_PREFIX + (2 * grid[0] - 1) * (2 * grid[1] - 1)


def bias_index(grid: tuple[int, int], num_prefix_tokens: int) -> np.ndarray:
    """Returns which row of a relative bias stands between two tokens, (N, N), asking first.

    A row for each offset (rows, columns) from the asking patch to the asked one, the most negative
    first; before them the `BIAS_PREFIX`, if there are tokens before the patches.
    """
    places = np.indices(grid).reshape(2, -1)  # (2, patches)
    # Offsets start at 1 - side; shifted, the most negative has index 0.
    rows, columns = places[:, None, :] - places[:, :, None] + np.array(grid)[:, None, None] - 1
    between = rows * (2 * grid[1] - 1) + columns
    if not num_prefix_tokens:
        return np.asarray(between)
    count = num_prefix_tokens + len(between)
    index = np.empty((count, count), np.int64)
    index[:num_prefix_tokens], index[:, :num_prefix_tokens] = 0, 1
    index[:num_prefix_tokens, :num_prefix_tokens] = 2
    index[num_prefix_tokens:, num_prefix_tokens:] = between + BIAS_PREFIX
    return index


def check_grid(grid: tuple[int, int], tokens: int) -> int:
    """Returns how many tokens stand before those of a grid of patches; a ValueError if none can."""
    prefix = tokens - grid[0] * grid[1]
    if prefix < 0:
        raise ValueError(
            f"A grid of {grid[0]}x{grid[1]} patches has {grid[0] * grid[1]} tokens or more. "
            f"Received: {tokens} tokens."
        )
    return prefix


def rotary_angles(
    *,
    grid: tuple[Any, Any],
    size: int,
    period: float,
    reference_grid: tuple[int, int] | None = None,
    offset: float = 0.0,
) -> Any:
    """Returns the angles of rotary positions in radians, (patches, size / 2), in float64.

    The first half cos_sin by the row, the second by the column, each at frequencies that fall
    geometrically from 1 to almost 1 / period (arXiv 2104.09864, in two dimensions).

    Args:
        grid: (height, width) in patches, whole numbers, or scalar tensors on TensorFlow: then the
            angles are a tensor.
        size: width K of a head, a multiple of 4.
        period: the longest period, in units of the shortest.
        reference_grid: (rows, columns) that places are counted in: a grid of any size has so many.
            None for places from -1 to 1, times 2 pi (facebookresearch/dinov3).
        offset: place of the first row and column of the `reference_grid`.
    """
    ops = float64_operations(grid)
    frequencies = float(period) ** (-np.arange(size // 4) / (size // 4))
    sides = [ops.arange(n, dtype="float64") for n in grid]
    if reference_grid is None:
        sides = [
            # Centres of patches, relative to the image: all resolutions have the same angles.
            2 * np.pi * (ops.divide(2 * (side + 0.5), n) - 1)
            for side, n in zip(sides, grid, strict=True)
        ]
    else:
        sides = [
            ops.divide(side + offset, n) * of
            for side, n, of in zip(sides, grid, reference_grid, strict=True)
        ]
    places = ops.meshgrid(*sides, indexing="ij")
    return ops.concatenate([ops.reshape(p, (-1, 1)) * frequencies for p in places], axis=1)


@keras.saving.register_keras_serializable(package="keras_vit")
class RotaryEmbedding(keras.layers.Layer):
    """Computes by what rotary positions turn queries and keys, for patches of any grid.

    Example:
        >>> RotaryEmbedding(4, period=100.0)(keras.ops.ones((1, 3, 2, 48))).shape
        TensorShape([2, 7, 4])

    Args:
        size: width K of a head, a multiple of 4.
        period: see `rotary_angles`.
        reference_grid: see there.
        offset: see there.
        num_prefix_tokens: tokens before the patches', which are not turned.

    Input shape: (B, h, w, ...). Output shape: (2, N, K), cosines and sines for `rotate`.
    """

    def __init__(
        self,
        size: int,
        *,
        period: float,
        reference_grid: tuple[int, int] | None = None,
        offset: float = 0.0,
        num_prefix_tokens: int = 1,
        **kwargs: Any,
    ) -> None:
        super().__init__(**{"autocast": False, **kwargs})
        self.size = size
        self.num_prefix_tokens = num_prefix_tokens
        self.places: dict[str, Any] = {
            "period": period,
            "reference_grid": reference_grid,
            "offset": offset,
        }

    def call(self, inputs: Any) -> Any:
        grid = keras.ops.shape(inputs)[1:3]
        angles = rotary_angles(grid=grid, size=self.size, **self.places)
        ops = np if isinstance(angles, np.ndarray) else keras.ops
        cos_sin = cos_sin_of(angles, self.num_prefix_tokens, ops)
        return keras.ops.cast(keras.ops.stack(cos_sin), self.compute_dtype)

    def compute_output_shape(self, input_shape: tuple[Any, ...]) -> tuple[Any, ...]:
        _, rows, columns = input_shape[:3]
        if None in (rows, columns):
            return (2, None, self.size)
        return (2, self.num_prefix_tokens + rows * columns, self.size)


def cos_sin_of(angles: Any, prefix: int, ops: Any) -> tuple[Any, Any]:
    """Returns cosines and sines (N, K) for `rotate`, of angles (patches, K / 2).

    Args:
        angles: in radians.
        prefix: tokens before the patches', which are not turned.
        ops: `numpy` for an array, `keras.ops` for a tensor.
    """
    # Angle 0 changes nothing, so that one rotation serves the tokens before the patches, too.
    angles = ops.concatenate([np.zeros((prefix, angles.shape[1])), angles])  # (N, K / 2)
    cosines, sines = ops.cos(angles), ops.sin(angles)
    # With the sign in the table `rotate` is two products and a sum, and negates nothing.
    return ops.concatenate([cosines, cosines], axis=1), ops.concatenate([-sines, sines], axis=1)


def rotate(x: Any, cosines: Any, sines: Any) -> Any:
    """Turns each pair (i, i + K / 2) of x (..., K) by its angle.

    Args:
        x: (..., K).
        cosines: of the angles, twice, with a shape that broadcasts to that of x.
        sines: likewise, the first half negative.
    """
    # Pairs lie half a head apart, not side by side: a split and a join swap them without a gather.
    first, second = keras.ops.split(x, 2, axis=-1)
    swapped = keras.ops.concatenate([second, first], axis=-1)
    return x * keras.ops.cast(cosines, x.dtype) + swapped * keras.ops.cast(sines, x.dtype)
