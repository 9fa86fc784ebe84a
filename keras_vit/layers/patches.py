"""From images to tokens: cutting patches, encoding them, and telling them their place."""

from typing import Any

import keras
import numpy as np

from keras_vit import backend
from keras_vit.config import WIDTH_MULTIPLES
from keras_vit.layers.dense import CompositeLayer, TokenDense
from keras_vit.layers.random import RandomLayer, dropout, initializer

# From BERT, as the original says (vit_jax/models_vit.py, Encoder).
POSITION_STDDEV = 0.02

# google-research/big_vision, models/vit.py, posemb_sincos_2d.
TEMPERATURE = 10_000
TABLES = ("learned", "learned_2d", "sincos_2d")

# Rows of a bias that stand before the offsets': from a token without place to one with a place,
# back, and between two without (microsoft/unilm, beit/modeling_finetune.py, RelativePositionBias).
BIAS_PREFIX = 3


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
            initializer=initializer(keras.initializers.RandomNormal(stddev=POSITION_STDDEV)),
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
    places = keras.ops.arange(size, dtype="int32") * (old - 1)  # in units of 1 / steps
    lower, rest = places // steps, places % steps
    fraction = keras.ops.cast(rest, "float32") / keras.ops.cast(steps, "float32")
    shape = tuple(-1 if each == axis else 1 for each in range(len(table.shape)))
    fraction = keras.ops.reshape(fraction, shape)
    low = keras.ops.take(table, lower, axis=axis)
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


# Learned tokens that may stand before the patches, in their order.
PREFIX = ("class_token", "distillation_token", "registers")


@keras.saving.register_keras_serializable(package="keras_vit")
class Patches(keras.layers.Layer):
    """Cuts images into a grid of square patches that do not overlap.

    Example:
        >>> Patches(16)(keras.ops.ones((2, 48, 32, 3))).shape
        TensorShape([2, 3, 2, 768])

    Args:
        patch_size: side P of a patch in pixels.

    Input shape: (B, H, W, C), H and W multiples of P, or unknown.
    Output shape: (B, H/P, W/P, P*P*C), pixels of a patch in row order, channels last.

    Raises:
        ValueError: the height or width is not a multiple of the patch.
    """

    def __init__(self, patch_size: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        if patch_size < 1:
            raise ValueError(f"patch_size must be a positive integer. Received: {patch_size!r}.")
        self.patch_size = patch_size

    def build(self, input_shape: tuple[Any, ...]) -> None:
        self.compute_output_shape(input_shape)

    def call(self, inputs: Any) -> Any:
        self.compute_output_shape(inputs.shape)
        return backend.space_to_depth(inputs, self.patch_size)  # (B, H/P, W/P, P*P*C)

    def compute_output_shape(self, input_shape: tuple[Any, ...]) -> tuple[Any, ...]:
        if len(input_shape) != 4 or input_shape[3] is None:
            raise ValueError(
                "Patches needs images of shape (batch, height, width, channels) with known "
                f"channels. Received: shape={tuple(input_shape)}."
            )
        batch, *sides, channels = input_shape
        size = self.patch_size
        if any(side is not None and side % size for side in sides):
            near = [None if side is None else max(side // size, 1) * size for side in sides]
            raise ValueError(
                f"The image's height and width must be multiples of patch_size={size}. "
                f"Received: height={sides[0]}, width={sides[1]}; resize the image, for instance to "
                f"{near[0]}x{near[1]}."
            )
        rows, columns = (None if side is None else side // size for side in sides)
        return (batch, rows, columns, size * size * channels)


@keras.saving.register_keras_serializable(package="keras_vit")
class PatchEncoder(CompositeLayer, RandomLayer, PositionedLayer):
    """Projects patches to tokens, puts learned tokens before them and adds position embeddings.

    Example:
        >>> PatchEncoder(8)(keras.ops.ones((2, 3, 2, 48))).shape
        TensorShape([2, 7, 8])

    Args:
        hidden_dim: width D of a token.
        class_token: whether a learned token stands before the patches (arXiv 2010.11929, Eq. 1).
        dropout_rate: dropout after the positions are added.
        position_embedding: "learned", "learned_2d" or "sincos_2d", see `PositionEmbedding`; None if
            the input gets none.
        num_registers: learned tokens without place after the class token (arXiv 2309.16588).
        distillation_token: whether a learned token stands after the class token, with a place of
            its own (arXiv 2012.12877).
        position_grid: (height, width) in patches that the table of positions is made for; each call
            resamples it to the input's grid, which may be unknown. None for the input's grid.

    Input shape: (B, H/P, W/P, P*P*C), as `Patches` makes them.
    Output shape: (B, N, D), N = patches + the tokens before them; patches in row order.

    Raises:
        ValueError: there is no such kind of positions, or neither the input's grid nor
            `position_grid` is known.
    """

    def __init__(
        self,
        hidden_dim: int,
        *,
        class_token: bool = True,
        dropout_rate: float = 0.0,
        position_embedding: str | None = "learned",
        num_registers: int = 0,
        distillation_token: bool = False,
        position_grid: tuple[int, int] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(is_random=dropout_rate > 0, **kwargs)
        if position_embedding is not None:
            check_kind(position_embedding)
        self.hidden_dim = hidden_dim
        self.dropout_rate = dropout_rate
        self.position_kind = position_embedding
        self.position_grid = position_grid
        self.num_registers = num_registers
        # The learned tokens before the patches, in their order, and how many each is.
        counts = (class_token, distillation_token, num_registers)
        self.prefix = tuple(zip(PREFIX, map(int, counts), strict=True))
        self.projection = TokenDense(
            hidden_dim,
            kernel_initializer="lecun_normal",
            dtype=self.dtype_policy.name,
            name="projection",
        )

    def build(self, input_shape: tuple[Any, ...]) -> None:
        self.compute_output_shape(input_shape)
        self.grid = tuple(input_shape[1:3])  # (height, width) in patches, None where unknown
        self.projection.build(input_shape)
        for name, count in self.prefix:
            if count:
                self._build_prefix(name, count)
        self.build_positions(
            self.position_kind,
            grid=self.position_grid or self.grid,
            hidden_dim=self.hidden_dim,
            num_prefix_tokens=sum(count for _, count in self.prefix),
            num_registers=self.num_registers,
            any_size=self.position_grid is not None,
        )
        self.change_dense()

    def call(self, inputs: Any, training: bool | None = None) -> Any:
        grid = None if self.position_grid is None else keras.ops.shape(inputs)[1:3]
        return self.assemble(self.embed(inputs), training=training, grid=grid)

    def embed(self, patches: Any) -> Any:
        """Projects patches (B, H/P, W/P, P*P*C) to their tokens (B, H/P * W/P, D), in row order."""
        tokens = self.projection(patches)  # (B, H/P, W/P, D)
        _, height, width, hidden_dim = tokens.shape
        if None in (height, width):
            return keras.ops.reshape(tokens, (keras.ops.shape(tokens)[0], -1, hidden_dim))
        return keras.ops.reshape(tokens, (-1, height * width, hidden_dim))

    def assemble(
        self, tokens: Any, *, training: bool | None, grid: tuple[Any, Any] | None = None
    ) -> Any:
        """Makes of the patches' tokens all of them (B, N, D): with learned ones and positions.

        `grid` is the patches', where the table of positions is resampled to it.
        """
        first = [getattr(self, name) for name, count in self.prefix if count]
        if first:
            batch = keras.ops.shape(tokens)[0]
            first = [
                keras.ops.broadcast_to(keras.ops.cast(each, tokens.dtype), (batch, *each.shape[1:]))
                for each in first
            ]
            tokens = keras.ops.concatenate([*first, tokens], axis=1)  # (B, N, D)
        if self.position_kind is not None:
            tokens = tokens + keras.ops.cast(self.position_table(grid), tokens.dtype)
        return dropout(tokens, self.dropout_rate, seed=self.next_seed(training))

    def compute_output_shape(self, input_shape: tuple[Any, ...]) -> tuple[Any, ...]:
        is_grid = len(input_shape) == 4 and input_shape[3] is not None
        if not is_grid or (None in input_shape[1:3] and self.position_grid is None):
            raise ValueError(
                "PatchEncoder needs a grid of patches (batch, rows, columns, values), as Patches "
                "makes it, and position_grid if rows and columns are unknown. "
                f"Received: shape={tuple(input_shape)}."
            )
        batch, rows, columns, _ = input_shape
        if None in (rows, columns):
            return (batch, None, self.hidden_dim)
        return (batch, sum(count for _, count in self.prefix) + rows * columns, self.hidden_dim)

    def _build_prefix(self, name: str, count: int) -> None:
        # Equal registers would stay equal; the original's class token starts at zero.
        normal: Any = keras.initializers.RandomNormal(stddev=POSITION_STDDEV)
        shape = (1, count, self.hidden_dim)
        weight = self.add_weight(
            name=name,
            shape=shape,
            initializer="zeros" if name == "class_token" else initializer(normal),
        )
        setattr(self, name, weight)
